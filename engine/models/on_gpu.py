"""The executor that computes a decoder's layers on a GPU: torch's matmuls, and our Triton kernels between them.

A layer takes nine launches, and a tenth if the step has prompts beside decodes. With few rows our kernels may compute
products as well, with the norm, the gate and the residual: six launches. decoder_layer.py computes the same in torch:
it is used where these kernels cannot be, and it is the tests' oracle.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor

from ..attention import AttentionMeta, KVCache
from ..attention.gpu_plan import Plan
from ..attention.paged_gpu import MAX_ERROR, HeadNorms, PagedGPU, Rotation, limitation, power_of_two, warps
from ..kernels.launching import launch
from ..kernels.library import Kernels
from .decoder_layer import Layer
from .executor import Eager
from .forward import Forward
from .layers import Gated, Linear
from .norms import RMSNorm
from .rope import Rotary
from .skinny import CANDIDATES, MEASURED_BYTES, Choices, Tile, Tiles, fastest, is_measurable, seconds, tiles_of
from .spec import ModelSpec

MAX_HIDDEN = 1 << 14  # numbers of a row that a program of `add_norm` holds in registers without spills
GATE_TILE = 1024
TRIAL_TOKENS, TRIAL_BLOCK = 3, 16


class OnGPU:
    """An Executor for steps whose attention backend is PagedGPU."""

    def __init__(
        self,
        model: ModelSpec,
        embedding: Linear,
        layers: Sequence[Layer],
        rotaries: Sequence[Rotary],
        choices: Choices | None = None,  # None: torch computes all products with plain weights
    ) -> None:
        assert model.decoder is not None
        self._embedding, self._layers, self._rotaries = embedding, layers, rotaries
        self._choices = choices or {}
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
        tiles, activation = tiles_of(self._choices, len(x)), self._activation
        for layer, layer_cache, head_norms in zip(self._layers, cache.layers, self._head_norms, strict=True):
            assert layer.attention_norm is not None and layer.mlp_norm is not None  # see `objection`
            qkv = after_norm(layer.qkv, tiles.qkv, x, added, layer.attention_norm, activation=activation)
            seen = backend.attend_qkv(layer_cache, qkv, rotations[layer.turn], head_norms, plan)
            added = before_residual(layer.output, tiles.output, seen.flatten(1), x)
            inner = after_norm(layer.gate_up, tiles.gate_up, x, added, layer.mlp_norm, activation=activation)
            added = before_residual(layer.down, tiles.down, inner, x)
        return x if added is None else x.add_(added)


def after_norm(
    linear: Linear, tile: Tile | None, x: Tensor, added: Tensor | None, norm: RMSNorm, *, activation: str
) -> Tensor:
    """Add to x [tokens, hidden_size] in place, and return the layer of its norm; if it is Gated with its activation."""
    is_gated = isinstance(linear, Gated)
    if tile is not None:
        if added is not None:
            x.add_(added)
        return linear.few(x, tile, norm=(norm.weight, norm.eps), activation=activation if is_gated else "")
    normed = add_norm(x, added, norm)
    return gated(linear.product(normed), activation) if isinstance(linear, Gated) else linear(normed)


def before_residual(linear: Linear, tile: Tile | None, x: Tensor, residual: Tensor) -> Tensor | None:
    """Return what is to be added to the residual stream; None: it has been added."""
    if tile is None:
        return linear(x)
    linear.few(x, tile, residual=residual)
    return None


def choose(model: ModelSpec, embedding: Linear, layers: Sequence[Layer], rotaries: Sequence[Rotary]) -> Choices | str:
    """Return which products of few rows our kernel computes, or why none. It is tried, and measured.

    The measurement replays each product from a CUDA graph, on the weights of as many layers as no cache holds.
    """
    assert model.decoder is not None
    are_plain = all(linear.is_plain for layer in layers for linear in layer.linears)
    if not are_plain or not is_measurable(embedding.weight.device):
        return {}
    parts = model, embedding, layers, rotaries
    for rows, tiles in CANDIDATES.items():
        for tile in tiles:
            if reason := trial(*parts, {rows: Tiles(tile, tile, tile, tile)}):
                return reason
    try:
        return {
            rows: Tiles(*(fastest(times) for times in measured(layers, rows, model.decoder.activation).values()))
            for rows in CANDIDATES
        }
    except RuntimeError as error:  # of a capture
        return f"products of few rows could not be measured: {(str(error).splitlines() or [''])[0][:200]}"


@torch.inference_mode()
def measured(layers: Sequence[Layer], rows: int, activation: str) -> dict[str, dict[Tile | None, float]]:
    """Return the seconds of each of a layer's products of `rows` rows, with each tile and by torch (None).

    A product's time includes the norm and the gate. The residual is left out: torch's way adds it with the norm.
    """
    first = layers[0].qkv.weight
    device, dtype = first.device, first.dtype
    found: dict[str, dict[Tile | None, float]] = {}
    for part in Tiles._fields:
        linears: list[tuple[Linear, RMSNorm | None]] = []
        for layer in layers:
            norm = {"qkv": layer.attention_norm, "gate_up": layer.mlp_norm}.get(part)
            linears.append((getattr(layer, part), norm))
        weight = linears[0][0].weight
        linears = linears[: max(2, -(-MEASURED_BYTES // weight.nbytes))]
        x = torch.ones(rows, weight.shape[1], dtype=dtype, device=device)
        residual = torch.zeros(rows, len(weight), dtype=dtype, device=device)

        def work(
            linear: Linear, norm: RMSNorm | None, tile: Tile | None, x: Tensor = x, residual: Tensor = residual
        ) -> None:
            if norm is None:
                before_residual(linear, tile, x, residual)
            else:
                after_norm(linear, tile, x, None, norm, activation=activation)

        found[part] = {
            tile: seconds([partial(work, linear, norm, tile) for linear, norm in linears], device) / len(linears)
            for tile in (None, *CANDIDATES[rows])
        }
    return found


def add_norm(x: Tensor, added: Tensor | None, norm: RMSNorm) -> Tensor:
    """Add to x [tokens, hidden_size] in place, and return its norm. None: there is nothing to add."""
    from ..kernels.gpu import layers as kernels

    tokens, size = x.shape
    assert x.is_contiguous() and (added is None or added.is_contiguous())
    normed = torch.empty_like(x)
    width = power_of_two(size)
    launch(kernels.add_norm, (tokens,),
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
    launch(
        kernels.gate,
        (tokens, -(-inner // tile)),
        gate_up,
        out,
        INNER=inner,
        TILE=tile,
        ACTIVATION=activation,
        num_warps=warps(tile),
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
def trial(
    model: ModelSpec,
    embedding: Linear,
    layers: Sequence[Layer],
    rotaries: Sequence[Rotary],
    choices: Choices | None = None,
    *,
    invariant: bool = False,
) -> str | None:
    """Compute the first layer for a few tokens; return why the kernels cannot be used, or None.

    `choices`: see OnGPU; as many tokens as the largest has are computed. `invariant`: see PagedGPU. The compiled
    kernels are kept, so this costs a start no more than their first use would.
    """
    device, first = embedding.weight.device, layers[:1]
    count = max(choices or [TRIAL_TOKENS])
    num_blocks = -(-count // TRIAL_BLOCK)
    results = []
    try:
        for executor in (OnGPU(model, embedding, first, rotaries, choices), Eager(embedding, first, rotaries)):
            cache = KVCache.allocate(
                PagedGPU(invariant=invariant),
                model.layers[:1],
                num_blocks=num_blocks,
                block_size=TRIAL_BLOCK,
                dtype=model.cache_dtype,
                device=device,
            )
            tokens = torch.arange(count, device=device)
            plan = cache.plan(AttentionMeta.of([(list(range(num_blocks)), 0, count)], TRIAL_BLOCK, device))
            results.append(executor.run(Forward(tokens % model.vocab_size, tokens, plan, cache, tokens)).double())
        ours, reference = results
        error = float((ours - reference).norm() / reference.norm())
    except Exception as problem:  # whatever Triton's compiler, the driver or an old GPU raises
        lines = (str(problem).strip().splitlines() or [""])[0]
        return f"the Triton kernels do not run on this device: {type(problem).__name__}: {lines[:200]}"
    if not error < MAX_ERROR[model.dtype]:
        return f"the Triton kernels compute wrong results on this device (relative error {error:.2g})"
    return None
