"""The executor that computes a decoder's layers on a GPU: torch's matmuls, and our Triton kernels between them.

A layer takes nine launches, and a tenth if the step has prompts beside decodes. decoder_layer.py computes the same in
torch: it is used where these kernels cannot be, and it is the tests' oracle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from ..attention import AttentionMeta, KVCache
from ..attention.paged_gpu import MAX_ERROR, HeadNorms, PagedGPU, Plan, Rotation, limitation, power_of_two, warps
from ..kernels.library import Kernels
from .decoder_layer import Layer
from .executor import Eager
from .forward import Forward
from .layers import Linear, RMSNorm
from .rope import Rotary
from .spec import ModelSpec

MAX_HIDDEN = 1 << 14  # numbers of a row that a program of `add_norm` holds in registers without spills
GATE_TILE = 1024
TRIAL_TOKENS, TRIAL_BLOCK = 3, 16


class OnGPU:
    """An Executor for steps whose attention backend is PagedGPU."""

    def __init__(
        self, model: ModelSpec, embedding: Linear, layers: Sequence[Layer], rotaries: Sequence[Rotary]
    ) -> None:
        assert model.decoder is not None
        self._embedding, self._layers, self._rotaries = embedding, layers, rotaries
        self._activation = model.decoder.activation
        self._head_norms = [
            HeadNorms(layer.q_norm.weight, layer.k_norm.weight, layer.q_norm.eps)
            if layer.q_norm is not None and layer.k_norm is not None
            else None
            for layer in layers
        ]

    def takes(self, forward: Forward) -> bool:
        return isinstance(forward.cache.backend, PagedGPU)

    def run(self, forward: Forward) -> Tensor:
        cache, plan = forward.cache, cast(Plan, forward.plan)  # PagedGPU returns this kind of plan
        backend = cast(PagedGPU, cache.backend)
        tables = [rotary.table(plan.meta.max_seq) for rotary in self._rotaries]
        rotations = [Rotation(forward.positions, table) for table in tables]
        x = self._embedding.rows(forward.ids)  # the residual stream, updated in place
        added: Tensor | None = None
        for layer, layer_cache, head_norms in zip(self._layers, cache.layers, self._head_norms, strict=True):
            assert layer.attention_norm is not None and layer.mlp_norm is not None  # see `objection`
            qkv = layer.qkv(add_norm(x, added, layer.attention_norm))
            seen = backend.attend_qkv(layer_cache, qkv, rotations[layer.turn], head_norms, plan)
            added = layer.output(seen.flatten(1))
            gate_up = layer.gate_up.product(add_norm(x, added, layer.mlp_norm))
            added = layer.down(gated(gate_up, self._activation))
        return x if added is None else x.add_(added)


def add_norm(x: Tensor, added: Tensor | None, norm: RMSNorm) -> Tensor:
    """Add to x [tokens, hidden_size] in place, and return its norm. None: there is nothing to add."""
    from ..kernels.gpu import layers as kernels

    tokens, size = x.shape
    assert x.is_contiguous() and (added is None or added.is_contiguous())
    normed = torch.empty_like(x)
    width = power_of_two(size)
    kernels.add_norm[(tokens,)](
        x, x if added is None else added, norm.weight, normed, norm.eps,
        SIZE=size, SIZE_P=width, ADD=added is not None,
        num_warps=warps(width)
    )  # fmt: skip
    return normed


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """Return activation(gate) * up, [tokens, inner], for gate_up [tokens, 2 * inner]."""
    from ..kernels.gpu import layers as kernels

    tokens, inner = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.is_contiguous()
    out = gate_up.new_empty(tokens, inner)
    tile = min(GATE_TILE, power_of_two(inner))
    kernels.gate[tokens, -(-inner // tile)](
        gate_up, out, INNER=inner, TILE=tile, ACTIVATION=activation, num_warps=warps(tile)
    )
    return out


def objection(model: ModelSpec, device: torch.device, kernels: Kernels | None) -> str | None:
    """Return why OnGPU cannot compute a model's layers, or None; `kernels` compute its matmuls, None: torch does."""
    assert model.decoder is not None
    if kernels is not None:
        return "the weights are packed for a CPU"
    if difference := model.decoder.difference_on_gpu:
        return f"the model has {difference}"
    if model.decoder.hidden_size > MAX_HIDDEN:
        return f"the Triton kernels serve hidden states of up to {MAX_HIDDEN} numbers"
    return limitation(model.layers, model.dtype, device)


@torch.inference_mode()
def trial(model: ModelSpec, embedding: Linear, layers: Sequence[Layer], rotaries: Sequence[Rotary]) -> str | None:
    """Compute the first layer for a few tokens; return why the kernels cannot be used, or None.

    The compiled kernels are kept, so this costs a start no more than their first use would.
    """
    device, first = embedding.weight.device, layers[:1]
    results = []
    try:
        for executor in (OnGPU(model, embedding, first, rotaries), Eager(embedding, first, rotaries)):
            cache = KVCache.allocate(
                PagedGPU(),
                model.layers[:1],
                num_blocks=1,
                block_size=TRIAL_BLOCK,
                dtype=model.cache_dtype,
                device=device,
            )
            tokens = torch.arange(TRIAL_TOKENS, device=device)
            plan = cache.plan(AttentionMeta.of([([0], 0, TRIAL_TOKENS)], TRIAL_BLOCK, device))
            results.append(executor.run(Forward(tokens % model.vocab_size, tokens, plan, cache, tokens)).double())
        ours, reference = results
        error = float((ours - reference).norm() / reference.norm())
    except Exception as problem:  # whatever Triton's compiler, the driver or an old GPU raises
        lines = (str(problem).strip().splitlines() or [""])[0]
        return f"the Triton kernels do not run on this device: {type(problem).__name__}: {lines[:200]}"
    if not error < MAX_ERROR[model.dtype]:
        return f"the Triton kernels compute wrong results on this device (relative error {error:.2g})"
    return None
