"""Products of a single row with quantized weights and what is around them, for a loaded model on a GPU: compiles them,
and chooses by measurement where a product computes what is around it, too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor

from ...kernels.launching import META, Compiling, Job
from ..decoder_layer import Layer
from ..norms import RMSNorm, make_norm
from .layers import add
from .products import after_norm, before_residual, normalized
from .single import takes
from .skinny import AS_STORED, GAIN, MEASURED_BYTES, Choices, Tiles, seconds
from .weights import GPUProduct, GPUWeight


def compile_rows(layers: Iterable[Layer], activation: str, dtype: torch.dtype, device: torch.device) -> None:
    """Compile each of a model's products once, in threads."""
    jobs: dict[object, Job] = {}
    for layer in layers:
        parts: list[tuple[GPUProduct | None, RMSNorm | None, str, bool]] = [
            (layer.qkv.quantized, layer.attention_norm, "", False), (layer.output.quantized, None, "", True)
        ]  # fmt: skip
        if layer.has_mlp:
            parts += [
                (layer.gate_up.quantized, layer.mlp_norm, activation, False), (layer.down.quantized, None, "", True)
            ]  # fmt: skip
        for product, norm, gate, adds in parts:
            if product is not None:
                tiles = tuple(part.tiles[1] for part in product.parts)
                key = product.kind, product.has_bias, tiles, norm is not None, gate, adds
                jobs.setdefault(key, partial(_run, product, norm, gate, dtype, adds=adds))
    if device.type == "cuda":
        Compiling({"rows": list(jobs.values())}, device).wait("rows")


def _run(product: GPUProduct, norm: RMSNorm | None, gate: str, dtype: torch.dtype, *, adds: bool) -> None:
    """Compute a product without memory."""
    parts = []
    for part in product.parts:
        parts.append(GPUWeight(part.form, part.rows, part.columns, META))
        parts[-1].use(part.tiles)
    x = torch.empty(1, parts[0].columns, dtype=dtype, device=META)
    residual: Tensor | None = torch.empty(1, product.outputs, dtype=dtype, device=META) if adds else None
    own = None if norm is None else make_norm(x.shape[1], norm.eps, dtype, META, norm.kind)
    if own is not None and not takes(own, x):
        own = None
    bare = GPUProduct(parts, product.bias.to(META) if product.has_bias else None, dtype)
    if bare.fuses(x, is_gated=bool(gate)):
        for each in dict.fromkeys((own, None)):  # what is added before a norm has a kernel of its own, with the norm
            bare.fused(x, residual=residual, activation=gate, norm=each)


@torch.inference_mode()
def fastest(layers: Sequence[Layer], activation: str) -> Choices:
    """Return which products compute the norm before them, the gate, and the sum with the residual stream: by the time
    of layers without attention, since what one of them leaves to another kernel costs the next one."""
    owners: list[Layer] = []
    for layer in layers:
        owners.append(layer)
        if sum(_bytes(each) for each in owners) >= MEASURED_BYTES:
            break
    whole, weight = AS_STORED[1], layers[0].qkv.weight
    with suppress(Exception):  # of a capture, or of Triton
        times = {
            tiles: seconds([partial(_compute, owners, tiles, activation, weight.dtype, weight.device)], weight.device)
            for tiles in (Tiles(), whole, whole._replace(gate_up=None))
        }
        best = min(times, key=lambda tiles: times[tiles])
        return {1: best} if times[best] * GAIN <= times[Tiles()] else {}
    return {}


def _bytes(layer: Layer) -> int:
    return sum(linear.quantized.num_bytes for linear in layer.linears if linear.quantized is not None)


def _compute(layers: Sequence[Layer], tiles: Tiles, activation: str, dtype: torch.dtype, device: torch.device) -> None:
    """Compute the products of a row as OnGPU does, without attention and experts."""
    x, added = torch.ones(1, layers[0].spec.hidden_size, dtype=dtype, device=device), None
    for layer in layers:
        if layer.mixer is None:
            after_norm(layer.qkv, tiles.qkv, x, added, layer.attention_norm, activation=activation)
        else:
            before = normalized(x, added, layer.attention_norm, None)
            after_norm(layer.qkv, tiles.qkv, before, None, None, activation=activation)
        assert layer.output.quantized is not None
        seen = torch.zeros(1, layer.output.quantized.parts[0].columns, dtype=dtype, device=device)
        added = before_residual(layer.output, tiles.output, seen, x)
        if layer.has_mlp:
            inner = after_norm(layer.gate_up, tiles.gate_up, x, added, layer.mlp_norm, activation=activation)
            added = before_residual(layer.down, tiles.down, inner, x)
        else:
            normalized(x, added, layer.mlp_norm, None)
            added = None
    add(x, added, None)
