"""The executor that computes a decoder's layers on a GPU: torch's matmuls, and our Triton kernels between them.

A layer takes nine launches, and a tenth if the step has prompts beside decodes. With few rows, and in the
batch-invariant mode with any number, our kernels may compute products as well, with the gate and the residual: eight
launches; of a single row with the norm, too: six. A layer of experts takes three more, and our kernels compute the
experts' products for any number of rows. Norms of all heads together take two more, gates of attention one, latent
attention four, and a fifth if queries have a low rank, and an input of the layer's own five. A mixer in place of
attention takes two or three launches, and its small projections one.
decoder_layer.py computes the same in torch: it is used where these kernels cannot be, and it is the tests' oracle.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import cast

import torch
from torch import Tensor

from ...attention import AttentionMeta, KVCache, LayerCache
from ...attention.gpu_plan import Plan
from ...attention.paged_gpu import MAX_ERROR, HeadNorms, PagedGPU, Rotation, limitation
from ...kernels.library import Kernels
from ..decoder_layer import Layer
from ..decoder_spec import DecoderSpec, sinks_name
from ..executor import Eager
from ..experts import Beside
from ..families.family import BEFORE
from ..forward import Forward
from ..layer_inputs import LayerInput, LayerInputs
from ..layers import Linear
from ..mixers.states import LayerStates, Segments, States
from ..norms import RMSNorm
from ..rope import Rotary
from ..spec import ModelSpec
from . import experts as gpu_experts
from . import stored_rows
from .experts import RoutedExperts
from .latent import GPULatent
from .layers import add, add_norm, gate_heads, gated, normalize
from .products import after_norm, before_residual, normalized, product
from .skinny import (
    ANY,
    AS_STORED,
    CANDIDATES,
    MEASURED_BYTES,
    AnyTile,
    Choices,
    Tiles,
    candidates,
    fastest,
    is_measurable,
    multiply,
    seconds,
    tiles_of,
)
from .weights import relative

MAX_HIDDEN = 1 << 14  # numbers of a row that a program of `add_norm` holds in registers without spills
TRIAL_TOKENS, MANY_TOKENS, TRIAL_BLOCK = 3, 16, 16
# A number in the middle between two of a cache in int8 or fp8 is rounded to either, if it differs in its last bit.
MAX_CACHE_ERROR = {torch.int8: 1e-2, torch.float8_e4m3fn: 5e-2}
TRIAL_PERIODS = 3  # in which the trial has tokens, if queries are scaled by the period of their position


class OnGPU:
    """An Executor for steps whose attention backend is PagedGPU."""

    def __init__(
        self,
        model: ModelSpec,
        embedding: Linear,
        layers: Sequence[Layer],
        rotaries: Sequence[Rotary],
        inputs: LayerInputs | None = None,
        *,
        choices: Choices | None = None,  # None: each layer computes its products as it does itself
    ) -> None:
        assert model.decoder is not None
        self._embedding, self._layers, self._rotaries, self._inputs = embedding, layers, rotaries, inputs
        self._choices = choices or {}
        self._decoder, self._activation = model.decoder, model.decoder.activation
        self._turns = sorted({layer.turn for layer in layers if layer.turn >= 0})  # of rotary embeddings that are used
        self._of_heads = [
            head_norms(layer) if layer.latent is None else GPULatent(layer.latent, model.dtype) for layer in layers
        ]
        self._experts = [
            None if layer.experts is None else RoutedExperts(layer.experts, self._activation) for layer in layers
        ]

    def takes(self, forward: Forward) -> bool:
        return isinstance(forward.cache.backend, PagedGPU)

    @property
    def obstacle(self) -> str:
        """Why its launches cannot be captured in a CUDA graph; empty: they can."""
        mixers = (layer.mixer for layer in self._layers if layer.mixer is not None)
        return "" if all(mixer.is_capturable for mixer in mixers) else "torch computes layers that keep states"

    def run(self, forward: Forward) -> Tensor:
        meta, positions = cast(Plan, forward.plan).meta, forward.positions
        longest, slots = meta.max_seq, meta.slot_mapping
        rotations = {turn: rotation_of(self._rotaries[turn], self._decoder, positions, longest) for turn in self._turns}
        x = self._embedding.rows(forward.ids)  # the residual stream, updated in place
        inputs = None if self._inputs is None else self._inputs(forward.ids, x)
        added, after, scale = None, None, None  # what is to be added to it, its norm, and the scale of the sum
        tiles, act = tiles_of(self._choices, len(x)), self._activation
        for layer, own, experts in zip(self._layers, self._of_heads, self._experts, strict=True):
            normed = None  # the input of attention and of the MLP beside it
            if layer.mixer is not None:
                before = normalized(x, added, layer.attention_norm, after, scale)
                projected = after_norm(layer.qkv, tiles.qkv, before, None, None, activation=act)
                seen = layer.mixer(before, projected, forward.states, layer.cache)
            else:
                if layer.spec.is_parallel:
                    normed = normalized(x, added, layer.attention_norm, after, scale)
                    qkv = layer.qkv(normed)
                else:
                    norm = layer.attention_norm
                    qkv = after_norm(layer.qkv, tiles.qkv, x, added, norm, activation=act, after=after, scale=scale)
                seen = _attend(forward, layer, qkv, rotations.get(layer.turn), own)
            added, after = before_residual(layer.output, tiles.output, seen, x), layer.attention_after
            scale = layer.scale
            if experts is not None and layer.beside is None:
                normed, after = normalized(x, added, layer.mlp_norm, after), layer.mlp_after
                added = None if after is None else torch.zeros_like(x)
                experts.add_to(x if added is None else added, normed, slots)
                continue
            if not layer.has_mlp:
                continue
            if normed is not None:
                add(x, added, after)
                inner = product(layer.gate_up, normed, act)
            else:
                inner = after_norm(layer.gate_up, tiles.gate_up, x, added, layer.mlp_norm, activation=act, after=after)
            added, after = before_residual(layer.down, tiles.down, inner, x), layer.mlp_after
            if experts is not None and layer.beside is not None and added is not None:
                added = with_experts(layer.beside, experts, added, x, slots)
            if layer.input is not None and inputs is not None:
                add(x, added, after)
                added, after = own_input(layer.input, x, inputs[layer.index], act), layer.input.norm
        add(x, added, after, scale)
        return x


def _attend(
    forward: Forward, layer: Layer, qkv: Tensor, rotation: Rotation | None, own: HeadNorms | GPULatent | None
) -> Tensor:
    """Return what attention reads, before the output projection: [tokens, its columns]. `own`: the norms of its heads,
    or what computes latent attention."""
    plan, backend = cast(Plan, forward.plan), cast(PagedGPU, forward.cache.backend)
    cache = forward.cache.layers[layer.cache]
    if isinstance(own, GPULatent):
        return own.attend(qkv, rotation, backend, cache, plan)
    normalize_together(layer, qkv)
    heads = qkv[:, layer.gates :] if layer.gates else qkv
    seen = backend.attend_qkv(cache, heads, rotation, own, plan, gated=layer.spec.gates_attention)
    if (gates := gates_of(layer, qkv)) is not None:
        gate_heads(seen, gates, is_softplus=layer.spec.head_gate is not None and layer.spec.head_gate.is_softplus)
    return seen.flatten(1)


def gates_of(layer: Layer, qkv: Tensor) -> Tensor | None:
    """Return the gates of each head in the results of the projections before attention, [tokens, heads, head_dim] or
    [tokens, heads, 1]; None: it has none."""
    if layer.spec.gates_attention:
        return qkv[:, : layer.rows[0]].unflatten(1, (-1, 2, layer.shape.head_dim))[:, :, 1]
    if not layer.gates:
        return None
    heads = layer.spec.heads(layer.index)
    return qkv[:, : layer.gates].unflatten(1, (heads, layer.gates // heads))


def with_experts(beside: Beside, experts: RoutedExperts, mlp: Tensor, x: Tensor, slots: Tensor) -> Tensor:
    """Return the output of an MLP with that of the experts beside it, as Beside does; x: the residual stream. `slots`:
    see RoutedExperts."""
    total, found = add_norm(mlp, None, beside.of_mlp), torch.zeros_like(x)
    experts.compute(found, add_norm(x, None, beside.before), *experts.route(add_norm(x, None, beside.of_router), slots))
    add(total, found, beside.after)
    return total


def own_input(layer: LayerInput, x: Tensor, own: Tensor, activation: str) -> Tensor:
    """Return what a layer adds for its own input [tokens, size], before the norm: [tokens, hidden_size]."""
    return layer.projection(gated(torch.cat([layer.gate(x), own], -1), activation))


def rotation_of(rotary: Rotary, decoder: DecoderSpec, positions: Tensor, length: int) -> Rotation:
    """Return the rotary embedding of positions below `length`."""
    is_wide, scales = decoder.rotates_wide or decoder.wide_angles, rotary.query_scales
    table, period = rotary.table(length), 0 if scales is None else rotary.period
    return Rotation(positions, table, decoder.is_interleaved, is_wide, scales, period)


def head_norms(layer: Layer) -> HeadNorms | None:
    """Return the norms of each query and key of a layer, if it has them, and of each value."""
    q, k = layer.q_norm, layer.k_norm
    if q is None or layer.spec.qk_norm == "all":
        return None
    return HeadNorms(q.gain, (k or q).gain, q.eps, q.kind.is_wide, layer.v_norm is not None, layer.spec.turns_first)


def normalize_together(layer: Layer, qkv: Tensor) -> None:
    """Normalize a token's queries together, and its keys, in place, if the layer does: [tokens, rows of qkv]."""
    if layer.spec.qk_norm == "all" and layer.q_norm is not None and layer.k_norm is not None:
        normalize(qkv, 0, layer.q_norm)
        normalize(qkv, len(layer.q_norm.weight), layer.k_norm)


def choose(
    model: ModelSpec,
    embedding: Linear,
    layers: Sequence[Layer],
    rotaries: Sequence[Rotary],
    inputs: LayerInputs | None = None,
) -> Choices | str:
    """Return which products of few rows our kernel computes, or why none. It is tried, and measured.

    The measurement replays each product from a CUDA graph, on the weights of as many layers as no cache holds.
    """
    assert model.decoder is not None
    linears = [linear for layer in layers for linear in layer.linears]
    parts = model, embedding, layers, rotaries, inputs
    # Our kernels add to the residual stream what has no norm.
    if model.decoder.norms != BEFORE or not is_measurable(embedding.weight):
        return {}
    if all(linear.quantized is not None for linear in linears):
        stored_rows.compile_rows(layers, model.decoder.activation, model.dtype, embedding.weight.device)
        if reason := trial(*parts, choices=AS_STORED):
            return f"products of a single row do not compute the norm before them: {reason}"
        return stored_rows.fastest(layers, model.decoder.activation)
    if not all(linear.is_plain for linear in linears):
        return {}
    tried: set[Tiles] = set()
    for rows in sorted(CANDIDATES, reverse=True):  # the same tiles are tried with most rows
        each = [candidates(part, rows, embedding.weight.device) for part in Tiles._fields]
        for tiles in map(Tiles._make, itertools.zip_longest(*each)):
            if tiles not in tried and (reason := trial(*parts, choices={rows: tiles})):
                return f"torch computes all products: {reason}"
            tried.add(tiles)
    try:
        found = {rows: measured(layers, rows, model.decoder.activation) for rows in CANDIDATES}
    except Exception as error:  # of a capture, or of Triton
        first = (str(error).splitlines() or [""])[0]
        return f"torch computes all products: those of few rows could not be measured: {first[:200]}"
    return {rows: Tiles(*(fastest(times[part]) for part in Tiles._fields)) for rows, times in found.items()}


def choose_head(head: Linear) -> None:
    """Let our kernel compute the logits of few rows where it is faster than torch, after a trial.

    Whatever fails leaves them to torch.
    """
    if head.is_plain and head.scale == 1 and is_measurable(head.weight):
        with suppress(Exception), torch.inference_mode():
            head.use_for_few({rows: _fastest_head(head, rows) for rows in CANDIDATES})


def _fastest_head(head: Linear, rows: int) -> AnyTile | None:
    weight = head.weight
    x = torch.randn(rows, weight.shape[1], dtype=weight.dtype, device=weight.device)
    want = head(x)
    times: dict[AnyTile | None, float] = {None: seconds([partial(head, x)], weight.device)}
    for tile in candidates("qkv", rows, weight.device):
        product = partial(multiply, x, weight, tile, bias=head.bias, dtype=want.dtype)
        if relative(product(), want) < MAX_ERROR[weight.dtype]:
            times[tile] = seconds([product], weight.device)
    return fastest(times)


@torch.inference_mode()
def measured(layers: Sequence[Layer], rows: int, activation: str) -> dict[str, dict[AnyTile | None, float]]:
    """Return the seconds of each of a layer's products of `rows` rows, with each tile and by torch (None).

    A product's time includes the norm and the gate, and not the residual with torch's: the next norm's kernel adds it.
    """
    device, dtype = layers[0].qkv.weight.device, layers[0].qkv.weight.dtype
    found: dict[str, dict[AnyTile | None, float]] = {}
    for part in Tiles._fields:
        linears: list[tuple[Linear, RMSNorm | None]] = []
        owners = layers if part in ("qkv", "output") else [layer for layer in layers if layer.has_mlp]
        if not owners:
            found[part] = {None: 0.0}  # there is nothing to choose
            continue
        for layer in owners:
            # That before a mixer is not computed with the product, see OnGPU.run.
            before = None if layer.mixer is not None else layer.attention_norm
            norm = {"qkv": before, "gate_up": layer.mlp_norm}.get(part)
            linears.append((getattr(layer, part), norm))
        weight = linears[0][0].weight
        linears = [each for each in linears if each[0].weight.shape == weight.shape]  # layers may have several
        linears = linears[: max(2, -(-MEASURED_BYTES // weight.nbytes))]
        x = torch.ones(rows, weight.shape[1], dtype=dtype, device=device)
        residual = None
        if part in ("output", "down"):
            residual = torch.zeros(rows, len(weight), dtype=dtype, device=device)
        work = partial(_product, x=x, residual=residual, activation=activation)
        found[part] = {
            tile: seconds([partial(work, linear, norm, tile) for linear, norm in linears], device) / len(linears)
            for tile in (None, *candidates(part, rows, device))
        }
    return found


def _product(
    linear: Linear, norm: RMSNorm | None, tile: AnyTile | None, *, x: Tensor, residual: Tensor | None, activation: str
) -> None:
    """Compute a product as OnGPU does."""
    if residual is None:
        after_norm(linear, tile, x, None, norm, activation=activation)
    else:
        before_residual(linear, tile, x, residual)


def objection(model: ModelSpec, device: torch.device, kernels: Kernels | None) -> str | None:
    """Return why OnGPU cannot compute a model's layers, or None; `kernels` compute its matmuls, None: torch does."""
    assert model.decoder is not None
    if kernels is not None:
        return "the weights are packed for a CPU"
    experts = model.decoder.experts
    if model.decoder.scales_layers and experts is not None and not experts.is_beside:
        return "the Triton kernels do not scale the results of layers whose MLP is a mixture of experts"
    if model.decoder.norms_values and model.decoder.qk_norm != "head":
        return "the Triton kernels normalize values only with the queries and keys of each head"
    if model.decoder.hidden_size > MAX_HIDDEN:
        return f"the Triton kernels serve hidden states of up to {MAX_HIDDEN} numbers"
    if model.decoder.qk_norm == "all" and model.decoder.rows(0)[0] > MAX_HIDDEN:
        return f"the Triton kernels normalize up to {MAX_HIDDEN} numbers of queries together"
    return limitation(model.layers, model.dtype, device)


def first_states(model: ModelSpec, layers: Sequence[Layer], count: int = 1) -> list[LayerStates]:
    """Return `count` states for each of a model's layers that keep states, as far as these layers need them."""
    device = layers[0].qkv.weight.device
    last = max((layer.cache for layer in layers if layer.mixer is not None), default=-1)
    return [LayerStates.allocate(shape, count, model.dtype, device) for shape in model.mixers[: last + 1]]


def sinks_of(layers: Sequence[Layer]) -> dict[str, Tensor]:
    """Return the sinks that some layers have, by the names that their attention has for them."""
    return {sinks_name(layer.index): layer.sinks for layer in layers if layer.sinks is not None}


class _Heard(PagedGPU):
    """Keeps the lengths of each call's queries, which are the same in any order of a head's numbers."""

    def __init__(self, *, invariant: bool) -> None:
        super().__init__(invariant=invariant)
        self.lengths: list[Tensor] = []  # [tokens, heads]

    def _attend(self, cache: LayerCache, q: Tensor, plan: Plan) -> Tensor:
        self.lengths.append(q.double().norm(dim=-1))
        return super()._attend(cache, q, plan)


def _trial_positions(rotaries: Sequence[Rotary], tokens: Tensor) -> Tensor:
    """Return positions for these tokens: with scaled queries in the first periods that the scales are for."""
    for rotary in rotaries:
        if rotary.query_scales is not None:
            return tokens % min(TRIAL_PERIODS, len(rotary.query_scales)) * rotary.period + tokens
    return tokens


@torch.inference_mode()
def trial(
    model: ModelSpec,
    embedding: Linear,
    layers: Sequence[Layer],
    rotaries: Sequence[Rotary],
    inputs: LayerInputs | None = None,
    *,
    choices: Choices | None = None,
    invariant: bool = False,
) -> str | None:
    """Compute a few tokens by the first layers of each size, with experts, with an MLP, with a rotary embedding and
    without, one after the other; return why the kernels cannot be used, or None.

    `choices`: see OnGPU; as many tokens as the largest has are computed at once. `invariant`: see PagedGPU. The
    compiled kernels are kept, so this costs a start no more than their first use would.
    """
    device = embedding.weight.device
    kinds = {(layer.shape, layer.experts is None, layer.turn < 0): layer.index for layer in reversed(layers)}
    owners = (layers[index].shape.shares for index in kinds.values())  # of the keys and values that they share
    first = [layers[index] for index in sorted({*kinds.values(), *(index for index in owners if index is not None)})]
    mixture = next((layer.experts for layer in first if layer.experts is not None), None)
    most = [rows for rows in choices or {} if rows < ANY]
    count = max([TRIAL_TOKENS, *most, *([MANY_TOKENS] if mixture is not None else [])])
    num_blocks = -(-count // TRIAL_BLOCK)
    results, lengths = [], []
    try:
        tokens = torch.arange(count, device=device)
        positions = _trial_positions(rotaries, tokens)
        # The tokens see each other, wherever their positions are.
        size, metas = max(most) if most else count, []  # of a step: as many tokens as the choices are for
        for own in tokens.split(size):
            meta = AttentionMeta.of([(list(range(num_blocks)), int(own[0]), len(own))], TRIAL_BLOCK, device)
            metas.append(replace(meta, max_seq=int(positions.max()) + 1))
        ours = OnGPU(model, embedding, first, rotaries, inputs, choices=choices)
        for executor in (ours, Eager(embedding, first, rotaries, inputs)):
            backend = _Heard(invariant=invariant)
            cache = KVCache.allocate(
                backend,
                model.layers[: 1 + max(layer.cache for layer in first if layer.mixer is None)],
                num_blocks=num_blocks,
                block_size=TRIAL_BLOCK,
                dtype=model.cache_dtype,
                device=device,
                sinks=sinks_of(layers),
            )
            found, states = [], first_states(model, first)
            for meta, own in zip(metas, tokens.split(size), strict=True):
                at, segments = own - own[0], Segments.of([[(len(own), 0 if own[0] else -1, 0)]], device)
                plan, ids = cache.plan(meta), own % model.vocab_size
                forward = Forward(ids, positions[own], plan, cache, at, States(states, segments))
                found.append(executor.run(forward).double())
            results.append(torch.cat(found))
            lengths.append(torch.cat(backend.lengths[:: len(backend.lengths) // len(metas)]))
        error = float((results[0] - results[1]).norm() / results[1].norm())
        if mixture is not None:  # of some tokens another expert may be chosen, because of the rounding before
            error = float(_errors(*results).median())
            assert model.decoder is not None
            if reason := gpu_experts.trial(mixture, model.decoder.activation):
                return reason
        # Hidden states hardly show how a single token's query is scaled.
        of_queries = float(_errors(*lengths).max())
    except Exception as problem:  # whatever Triton's compiler, the driver or an old GPU raises
        lines = (str(problem).strip().splitlines() or [""])[0]
        return f"the Triton kernels do not run on this device: {type(problem).__name__}: {lines[:200]}"
    allowed = max(MAX_ERROR[model.dtype], MAX_CACHE_ERROR.get(model.cache_dtype, 0.0))
    for each in (error, of_queries):
        if not each < allowed:  # nor if it is no number
            return f"the Triton kernels compute wrong results on this device (relative error {each:.2g})"
    return None


def _errors(found: Tensor, want: Tensor) -> Tensor:
    """Return the relative error of each row; that of a row of zeros is 0 if it is the same."""
    return (found - want).norm(dim=1) / want.norm(dim=1).clamp(min=torch.finfo(want.dtype).tiny)
