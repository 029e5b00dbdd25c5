"""Compiles the Triton kernels of a model for the current GPU in threads, while its weights are read.

A job is code that launches kernels, with tensors on the meta device: see kernels/launching.py. Triton keeps the
results, so that the first launches for real find them, those of the trials included. A kernel that no job compiles is
compiled when it is first launched.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from .attention import AttentionLayer, AttentionMeta
from .attention.backend import LayerCache
from .attention.gpu_plan import FEW_ROWS
from .attention.paged_gpu import PagedGPU, Rotation, is_interpreted, limitation
from .config import EngineConfig
from .kernels.launching import META, Compiling, Job
from .models import ModelSpec
from .models.decoder_layer import Layer
from .models.experts import Experts
from .models.families.family import BEFORE
from .models.gpu import executor as on_gpu
from .models.gpu import experts as gpu_experts
from .models.gpu import invariance, skinny
from .models.gpu.coded import CodedRows
from .models.gpu.heads import MANY_TOKENS
from .models.gpu.latent import GPULatent
from .models.gpu.layers import add, gate_heads
from .models.gpu.single import Single
from .models.gpu.skinny import CANDIDATES, candidates
from .models.layer_inputs import LayerInputs
from .models.layers import InFile, Linear
from .models.mixers.mixer import gpu_jobs
from .models.norms import RMSNorm, make_norm
from .models.rope import Rotary
from .runner.triton_logits import FIELDS, TritonLogits

FEW = 2  # tokens of a chunk


def begin(spec: ModelSpec, config: EngineConfig, device: torch.device) -> Compiling | None:
    """Begin to compile the kernels of a model; None: there are none here."""
    if device.type != "cuda" or is_interpreted() or limitation(spec.layers, spec.dtype, device) is not None:
        return None
    return Compiling(jobs(spec, config, device), device)


def jobs(spec: ModelSpec, config: EngineConfig, device: torch.device) -> dict[str, list[Job]]:
    """Return the jobs of a model by group: attention, layers, logits."""
    are_ours = spec.decoder is not None and on_gpu.objection(spec, device, None) is None
    return {
        "attention": list(_attention(spec, config)),
        "layers": [*_mixers(spec), *(_layers(spec, config) if are_ours else ())],
        "logits": list(_logits(spec.vocab_size)),
    }


def _attention(spec: ModelSpec, config: EngineConfig) -> Iterator[Job]:
    for layer in dict.fromkeys(spec.layers):
        for invariant in {False, config.batch_invariant}:  # the trial is of the default
            for rows in ([([1], 0, FEW)], [([1], 0, 1)], [([1], 0, 1)] * (FEW_ROWS + 1)):
                yield partial(_attend, layer, spec, config.block_size, rows, invariant=invariant)


def _attend(
    layer: AttentionLayer,
    spec: ModelSpec,
    block_size: int,
    rows: list[tuple[list[int], int, int]],  # see AttentionMeta.of
    *,
    invariant: bool,
) -> None:
    backend = PagedGPU(invariant=invariant)
    cache = _cache(backend, layer, spec, block_size)
    plan = backend.plan(AttentionMeta.of(rows, block_size, META))
    tokens = sum(new for _, _, new in rows)
    heads, kv_heads, dim, v_dim = layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.v_head_dim
    q, k, v = (
        torch.empty(tokens, *shape, dtype=spec.dtype, device=META)
        for shape in ((heads, dim), (kv_heads, dim), (kv_heads, v_dim))
    )
    backend.attend(cache, q, k, v, plan)


def _cache(backend: PagedGPU, layer: AttentionLayer, spec: ModelSpec, block_size: int) -> LayerCache:
    sinks = None if layer.sinks is None else torch.empty(layer.num_heads, dtype=spec.dtype, device=META)
    return backend.allocate(layer, 2, block_size, spec.cache_dtype, META, sinks=sinks)


def _mixers(spec: ModelSpec) -> Iterator[Job]:
    for shape in dict.fromkeys(spec.mixers):
        yield from gpu_jobs(shape, spec.dtype)


def _layers(spec: ModelSpec, config: EngineConfig) -> Iterator[Job]:
    """Yield the jobs of a decoder's layers beside attention; weight_trial.objection compiles products with quantized
    weights, but for those of routed experts."""
    decoder = spec.decoder
    assert decoder is not None
    activation = decoder.activation
    caches = decoder.caches
    attended = [None if each.mixer else spec.layers[cache] for each, cache in zip(decoder.shapes, caches, strict=True)]
    kinds = {
        (attended[index], decoder.turns[index], decoder.shapes[index], decoder.experts_of(index) is None): index
        for index in reversed(range(len(decoder.shapes)))
    }
    layers = [
        Layer(index, spec, decoder, META, cache=caches[index], is_shared=False) for index in sorted(kinds.values())
    ]
    for each in layers:
        if each.latent is not None:
            for tokens in (FEW, MANY_TOKENS):
                yield partial(_attend_to_latents, each, spec, config.block_size, tokens)
        elif each.mixer is None:
            yield partial(_rotate_store, each, spec, config.block_size)
    if decoder.has_gates:
        for each in layers:
            if each.mixer is None:
                yield partial(_gate_heads, each, spec.dtype)
    layer = next(each for each in layers if each.mixer is None)  # all have the same norms
    attention_norm, of_input = layer.attention_norm, layer.input
    mlp_norm = next((each.mlp_norm for each in layers if each.mlp_norm is not None), None)  # some have no MLP

    x = _numbers(FEW, layer.qkv)
    last = make_norm(decoder.hidden_size, decoder.norm_eps, spec.dtype, META, decoder.norm)
    yield partial(on_gpu.add_norm, x, None, last)
    if mlp_norm is not None or layer.attention_after is not None:
        yield partial(on_gpu.normalized, x, x, mlp_norm, layer.attention_after)
    at_end = layer.mlp_after if of_input is None else of_input.norm
    yield partial(on_gpu.normalized, x, x, attention_norm, at_end, layer.scale)
    if at_end is not None:
        yield partial(add, x, x, at_end)
        yield partial(add, x, x, at_end, layer.scale)
    qkv = torch.empty(FEW, len(layer.qkv.weight), dtype=spec.dtype, device=META)
    yield partial(on_gpu.normalize_together, layer, qkv)
    with_mlp = list({each.gate_up.weight.shape: each for each in layers if each.has_mlp}.values())
    widths = {len(each.gate_up.weight) for each in with_mlp}
    small = []  # linear layers that `quantization` leaves plain
    if of_input is not None and decoder.inputs is not None:
        inputs = LayerInputs(spec, decoder, decoder.inputs, META)
        yield partial(on_gpu.add_norm, torch.empty(FEW, inputs.size, dtype=spec.dtype, device=META), None, inputs.norm)
        widths.add(2 * inputs.size)
        small = [of_input.gate, of_input.projection, inputs.projection]
    for width in sorted(widths):
        yield partial(on_gpu.gated, torch.empty(FEW, width, dtype=spec.dtype, device=META), activation)
    head = Linear(spec.vocab_size, decoder.hidden_size, False, spec.dtype, META)
    experts = [each.experts for each in layers if each.experts is not None][:1]  # all have the same spec
    uniforms = skinny.uniforms(spec.dtype, META)[0]
    if config.batch_invariant:
        wide = [head, *(mixture.router for mixture in experts)]
        plain = [] if spec.on_gpu else layers
        if not spec.on_gpu:
            small += [linear for mixture in experts for linear in mixture.shared or ()]
            small += [each.latent.queries for each in layers[:1] if each.latent is not None and each.latent.queries]
        for linear in (*wide, *small, *(linear for each in plain for linear in each.linears)):
            linear.unify(uniforms, spec.dtype)
        choices = invariance.choices(spec)
        for rows in _numbers_of_rows(uniforms):
            for each in plain:
                yield partial(_layer_alike, each, skinny.tiles_of(choices, rows), rows, activation)
            yield partial(_alike, small, rows, None)
            yield partial(_alike, wide, rows, torch.float32)
    elif spec.dtype != torch.float32:
        for tile in dict.fromkeys(itertools.chain(*CANDIDATES.values())):
            yield partial(_products, [head], tile, torch.float32)
    qkvs = list({each.qkv.weight.shape: each.qkv for each in layers}.values())
    outputs = list({each.output.weight.shape: each.output for each in layers}.values())
    if not (config.batch_invariant or spec.on_gpu) and decoder.norms == BEFORE:
        after = [*((each, attention_norm) for each in qkvs), *((each.gate_up, mlp_norm) for each in with_mlp)]
        for tile in dict.fromkeys(tile for rows in CANDIDATES for tile in candidates("gate_up", rows, META)):
            for linear, norm in after:
                yield partial(_after_norm, linear, tile, _numbers(_rows(tile), linear), norm, activation=activation)
                if isinstance(tile, Single):  # after a product that torch has computed, whose result is added first
                    x = _numbers(1, linear)
                    yield partial(_after_norm, linear, tile, x, norm, added=x, activation=activation)
        for tile in dict.fromkeys(tile for rows in CANDIDATES for tile in candidates("down", rows, META)):
            yield partial(_before_residuals, (*outputs, *(each.down for each in with_mlp)), tile, _rows(tile))
    for mixture in experts:
        router = mixture.router
        is_wide = router.weight.dtype == torch.float32 or router.bias is None or config.batch_invariant
        for stored in _as_stored(mixture, spec, activation):
            if config.batch_invariant:
                for linear in (*stored.gate_ups, *stored.downs, *(stored.shared or ())):
                    linear.unify(uniforms, spec.dtype)
            yield from gpu_experts.jobs(stored, activation, spec.dtype, wide=is_wide)


def _as_stored(experts: Experts, spec: ModelSpec, activation: str) -> Iterator[Experts]:
    """Yield experts like these in each form that their weights may have, see ModelSpec.forms."""
    hidden, inner = experts.hidden, experts.spec.inner
    shapes = {(inner, hidden), (2 * inner, hidden), (hidden, inner)}  # gate and up may be one tensor
    forms = dict.fromkeys(form for form, *shape in spec.forms if tuple(shape) in shapes) if spec.on_gpu else {}
    if not forms:
        yield experts
    for form in forms:
        stored = Experts(hidden, experts.spec, spec.dtype, META, activation=activation)
        for linear in (*stored.gate_ups, *stored.downs, *(stored.shared or ())):
            rows = CodedRows(form, tuple(linear.weight.shape), lambda: (None, iter(())), 0)
            linear.pack(None, in_file=InFile([rows], None))
        yield stored


def _rows(tile: skinny.AnyTile) -> int:
    """Return a number of rows for which a kernel is compiled."""
    return 1 if isinstance(tile, Single) else FEW


def _products(linears: Sequence[Linear], tile: skinny.AnyTile, dtype: torch.dtype | None) -> None:
    for linear in linears:  # mostly of the same kernel
        skinny.multiply(_numbers(_rows(tile), linear), linear.weight, tile, bias=linear.bias, dtype=dtype)


def _numbers_of_rows(uniforms: skinny.Uniforms) -> list[int]:
    """Return numbers of rows with which each of the tiles is used."""
    return sorted({FEW, *(most + 1 for tiles in uniforms for most in tiles if most < skinny.ANY)})


def _alike(linears: Sequence[Linear], rows: int, dtype: torch.dtype | None) -> None:
    for linear in linears:
        tile = linear.tile(rows)
        assert tile is not None
        skinny.multiply(_numbers(rows, linear), linear.weight, tile, bias=linear.bias, dtype=dtype)


def _layer_alike(layer: Layer, ways: skinny.Tiles, rows: int, activation: str) -> None:
    if ways == skinny.TORCH:  # what comes after a product has a kernel of its own
        _alike(layer.linears, rows, None)
        return
    _after_norm(layer.qkv, ways.qkv, _numbers(rows, layer.qkv), layer.attention_norm, activation=activation)
    _before_residuals([layer.output], ways.output, rows)
    if layer.has_mlp:
        x = _numbers(rows, layer.gate_up)
        _after_norm(layer.gate_up, ways.gate_up, x, layer.mlp_norm, activation=activation)
        _before_residuals([layer.down], ways.down, rows)


def _numbers(tokens: int, linear: Linear) -> Tensor:
    """Return the input of a product with `linear`."""
    return torch.empty(tokens, linear.weight.shape[1], dtype=linear.weight.dtype, device=META)


def _after_norm(
    linear: Linear,
    way: skinny.Way | None,
    x: Tensor,
    norm: RMSNorm | None,
    *,
    added: Tensor | None = None,
    activation: str,
) -> None:
    on_gpu.after_norm(linear, way, x, added, norm, activation=activation)


def _before_residuals(linears: Sequence[Linear], way: skinny.Way | None, rows: int) -> None:
    for linear in linears:
        x, residual = (
            torch.empty(rows, size, dtype=linear.weight.dtype, device=META) for size in linear.weight.shape[::-1]
        )
        on_gpu.before_residual(linear, way, x, residual)


def _rotate_store(layer: Layer, spec: ModelSpec, block_size: int) -> None:
    assert spec.decoder is not None
    backend, turn = PagedGPU(), layer.turn
    cache = _cache(backend, spec.layers[layer.cache], spec, block_size)
    plan = backend.plan(AttentionMeta.of([([1], 0, FEW)], block_size, META))
    qkv = torch.empty(FEW, len(layer.qkv.weight), dtype=spec.dtype, device=META)[:, layer.gates :]
    rotation, gated = _rotation(turn, spec, FEW), layer.spec.gates_attention
    backend.rotate_store(cache, qkv, rotation, on_gpu.head_norms(layer), plan, gated=gated)


def _attend_to_latents(layer: Layer, spec: ModelSpec, block_size: int, tokens: int) -> None:
    assert layer.latent is not None
    backend = PagedGPU()
    cache = _cache(backend, spec.layers[layer.cache], spec, block_size)
    plan = backend.plan(AttentionMeta.of([(range(-(-tokens // block_size)), 0, tokens)], block_size, META))
    projected = torch.empty(tokens, len(layer.qkv.weight), dtype=spec.dtype, device=META)
    rotation = _rotation(layer.turn, spec, tokens)
    GPULatent(layer.latent, spec.dtype).attend(projected, rotation, backend, cache, plan)


def _rotation(turn: int, spec: ModelSpec, tokens: int) -> Rotation | None:
    """Return the rotary embedding of a layer with this `turn` on META."""
    assert spec.decoder is not None
    if turn < 0:
        return None
    rotary = Rotary(spec.decoder.ropes[turn], spec.serve_len, spec.dtype, META)
    positions = torch.empty(tokens, dtype=torch.int64, device=META)
    return on_gpu.rotation_of(rotary, spec.decoder, positions, tokens)


def _gate_heads(layer: Layer, dtype: torch.dtype) -> None:
    heads, gate = layer.spec.heads(layer.index), layer.spec.head_gate
    seen = torch.empty(FEW, heads, layer.shape.head_dim, dtype=dtype, device=META)
    gates = on_gpu.gates_of(layer, seen.new_empty(FEW, len(layer.qkv.weight)))
    assert gates is not None
    gate_heads(seen, gates, is_softplus=gate is not None and gate.is_softplus)


def _logits(vocab_size: int) -> Iterator[Job]:
    backend = TritonLogits(vocab_size, META)
    x = torch.empty(FEW, vocab_size, device=META)
    rows = torch.empty(FEW * FIELDS.itemsize // 8, dtype=torch.int64, device=META)
    yield partial(backend.best, x)
    for has_k, has_p in ((False, False), (True, True)):
        yield partial(backend.draw, x, rows, has_k=has_k, has_p=has_p)
    yield partial(backend.launch_distribution, x)
