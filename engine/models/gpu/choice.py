"""Chooses what computes a loaded decoder on a GPU: its layers, and products with weights in fp8."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ...kernels.library import Choice
from ..decoder_layer import Layer
from ..experts import Experts
from ..layer_inputs import LayerInputs
from ..layers import Linear
from ..mixers import mixer
from ..norms import RMSNorm
from ..rope import Rotary
from ..spec import ModelSpec
from . import executor as on_gpu
from . import experts as gpu_experts
from . import invariance, measured_tiles, scaled
from .executor import OnGPU
from .layers import add_norm
from .skinny import Choices
from .weights import GPUProduct

# Embedding, layers, rotary embeddings, and the inputs that layers have of their own
Parts = tuple[ModelSpec, Linear, Sequence[Layer], Sequence[Rotary], LayerInputs | None]


def choose(
    parts: Parts,
    *,
    norm: RMSNorm,
    head: Linear,
    linears: Collection[Linear],
    product: Choice,
    project: Callable[[Tensor], Tensor],
) -> tuple[OnGPU | None, Choice]:
    """Return the executor of the layers, None: not on a GPU, and what computes the matmuls.

    norm: the last one, before the head; it uses the executor's kernel. linears: all linear layers, with the head.
    project: see Decoder.project.
    """
    device = norm.weight.device
    objection = on_gpu.objection(parts[0], device, product.kernels)
    if objection is None:
        objection = next(filter(None, (gpu_experts.objection(each) for each in _experts(parts[2]))), None)
    by_torch = ""
    if product.kernels is None:
        found = [layer.mixer for layer in parts[2] if layer.mixer is not None]
        mixer.use_gpu(found, parts[0].dtype, device)
        by_torch = mixer.by_torch(found)
    if product.is_uniform and objection is None and by_torch:
        return None, replace(product, note=by_torch)
    if objection is None and not product.is_uniform:
        objection = on_gpu.trial(*parts)
    if objection is not None:
        if device.type == "cuda":
            product = replace(product, note=_joined(f"torch computes norms and gates of layers: {objection}", by_torch))
        return None, product
    for each in (norm, *(() if parts[4] is None else (parts[4].norm,))):
        each.use(partial(add_norm, added=None, norm=each))
    choices: Choices = {}
    if product.is_uniform:
        problem = invariance.settle(*parts, linears=linears, project=project)
        product = replace(product, note=problem or "", is_proven=problem is None)
        choices = invariance.choices(parts[0])
    else:
        own = _quantized(linears, parts[2])
        note = _scale(own, device)
        if not measured_tiles.choose(own, parts[0].dtype):
            note = "torch's product is wrong for a shape of this model"
        if note:
            product = replace(product, note=f"fp8 weights are dequantized for prompts: {note}")
        if isinstance(chosen := on_gpu.choose(*parts), str):
            product = replace(product, note=chosen)
        else:
            choices = chosen
            on_gpu.choose_head(head)
        product = replace(product, note=_joined(product.note, by_torch))
    return OnGPU(*parts, choices=choices), product


def _joined(*notes: str) -> str:
    return "; and ".join(filter(None, notes))


def _experts(layers: Sequence[Layer]) -> Iterator[Experts]:
    return (layer.experts for layer in layers if layer.experts is not None)


def _quantized(linears: Collection[Linear], layers: Sequence[Layer]) -> list[GPUProduct]:
    """Return the products with quantized weights, but for those of routed experts: they have a kernel of their own,
    which multiplies in 16 bits, and is compared with each expert's product."""
    routed = {linear for each in _experts(layers) for linear in (*each.gate_ups, *each.downs)}
    return [each.quantized for each in linears if each not in routed and each.quantized is not None]


def _scale(products: Sequence[GPUProduct], device: torch.device) -> str | None:
    """Let products with weights in fp8 multiply several rows in fp8, if this GPU can; return why torch does not
    multiply many, or None."""
    in_fp8 = [each for each in products if each.can_scale]
    if not in_fp8:
        return None
    if reason := scaled.objection(device):
        return reason
    kinds = {bool(part.form.group) for each in in_fp8 for part in each.parts}
    reasons = {kind: scaled.objection_to_torch(device, is_blocked=kind) for kind in kinds}
    for each in in_fp8:
        each.scale(by_torch={kind: reason is None for kind, reason in reasons.items()})
    return next(filter(None, reasons.values()), None)
