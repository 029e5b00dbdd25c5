"""The Triton kernels of a decoder's layers in Triton's interpreter; test_paged_gpu.py runs this file.

    TRITON_INTERPRET=1 python -m pytest tests/engine/interpreted_layers.py

The interpreter truncates where a GPU rounds to bfloat16, so rounding is compared in float16.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime.interpreter import InterpretedFunction

from engine import EngineConfig, memory
from engine.attention import AttentionMeta, KVCache
from engine.attention.layer import LARGEST
from engine.attention.paged_gpu import MAX_ERROR, HeadNorms, PagedGPU, Rotation
from engine.kernels.gpu import attention as attention_kernels
from engine.kernels.gpu import layers as layer_kernels
from engine.kernels.gpu import storing as storing_kernels
from engine.kernels.launching import gpu_kernels
from engine.models import Forward
from engine.models.decoder import Decoder
from engine.models.executor import Eager
from engine.models.families.family import PLAIN, NormKind
from engine.models.gpu import executor as on_gpu
from engine.models.gpu import experts as gpu_experts
from engine.models.gpu import products as gpu_products
from engine.models.gpu import weight_trial
from engine.models.gpu.executor import OnGPU, add_norm, gated
from engine.models.gpu.layers import add, gate_heads, normalize
from engine.models.layers import ACTIVATIONS
from engine.models.mixers.states import LayerStates, Segments, States
from engine.models.norms import RMSNorm, make_norm
from engine.models.rope import Rope, Rotary, rotate
from tests.engine.interpreter import prepare
from tests.engine.test_attention import CPU, layer_of, spoil
from tests.models import load_model, make

prepare()


def inside(rows: Tensor) -> Tensor:
    """Return the same rows between rows of NaN, which nobody may read."""
    return torch.cat([torch.full_like(rows[:1], math.nan), rows, torch.full_like(rows[:1], math.nan)])[1:-1]


def norm_of(size: int, dtype: torch.dtype, kind: NormKind = PLAIN) -> RMSNorm:
    norm = make_norm(size, 1e-6, dtype, CPU, kind)
    norm.weight.uniform_(0.5, 1.5)
    return norm


WIDE, CENTERED = NormKind(offset=1.0, is_wide=True), NormKind(is_wide=True, is_centered=True)


@pytest.mark.parametrize("kind", [PLAIN, WIDE, CENTERED], ids=["plain", "wide", "centered"])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.float16, 1e-3)])
def test_what_is_added_may_have_a_norm_of_its_own_and_the_sum_a_scale(kind, dtype, tolerance):
    norm, after = (norm_of(80, dtype, kind) for _ in range(2))
    x, added = torch.randn(3, 80).to(dtype) + 1, torch.randn(3, 80).to(dtype)
    stream, total = inside(x), x + after(added)
    torch.testing.assert_close(
        add_norm(stream, inside(added), norm, after), norm(total), rtol=tolerance, atol=tolerance
    )
    torch.testing.assert_close(stream, total, rtol=tolerance, atol=tolerance)
    stream = inside(x)
    add(stream, inside(added), after)
    torch.testing.assert_close(stream, total, rtol=tolerance, atol=tolerance)
    stream, scale = inside(x), torch.tensor([0.7]).to(dtype)
    normed = add_norm(stream, inside(added), norm, after, scale)
    torch.testing.assert_close(stream, total * scale, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(normed, norm(total * scale), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.float16, 1e-3), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("size", [64, 80, 1000, 3072])
def test_the_residual_is_added_in_place_and_normalized(size, dtype, tolerance):
    torch.manual_seed(size)
    x, added, norm = torch.randn(3, size).to(dtype), torch.randn(3, size).to(dtype), norm_of(size, dtype)
    stream = inside(x)
    normed = add_norm(stream, inside(added), norm)
    torch.testing.assert_close(normed, norm(x + added), rtol=tolerance, atol=tolerance)
    if dtype != torch.bfloat16:
        assert torch.equal(stream, x + added)
    torch.testing.assert_close(add_norm(inside(x), None, norm), norm(x), rtol=tolerance, atol=tolerance)


def test_some_columns_are_normalized_in_place():
    x, norm = torch.randn(3, 40), norm_of(24, torch.float32, WIDE)
    want = torch.cat([x[:, :8], norm(x[:, 8:32]), x[:, 32:]], 1)
    found = inside(x)
    normalize(found, 8, norm)
    torch.testing.assert_close(found, want)


def test_a_row_is_normalized_alike_in_any_batch():
    x, added, norm = torch.randn(5, 1000), torch.randn(5, 1000), norm_of(1000, torch.float32)
    together = add_norm(x.clone(), added, norm)
    alone = [add_norm(x[row : row + 1].clone(), added[row : row + 1], norm) for row in range(5)]
    assert torch.equal(together, torch.cat(alone))


def test_a_token_is_rotated_and_gated_alike_in_any_batch():
    layer, rotary, backend = layer_of(2, 80, 80), Rotary(Rope(80), 64, torch.float32, CPU), PagedGPU()
    norms = HeadNorms(norm_of(80, torch.float32).weight, norm_of(80, torch.float32).weight, 1e-6)
    qkv, positions = torch.randn(3, 8 * 80), torch.tensor([40, 7, 11])

    def stored(tokens: list[int]) -> tuple[Tensor, Tensor]:
        """Return the queries of tokens of one sequence each, and the cache without what nobody has stored."""
        cache = backend.allocate(layer, 12, 4, torch.float32, CPU)
        cache.tensor.zero_()
        rows = [([4 * token + place for place in range(4)] * 3, int(positions[token]), 1) for token in tokens]
        mine = qkv[tokens].clone()
        plan = backend.plan(AttentionMeta.of(rows, 4))
        backend.rotate_store(cache, mine, Rotation(positions[tokens], rotary.table(64)), norms, plan)
        return mine, cache.tensor

    together, cache = stored([2, 0, 1])
    for place, token in enumerate([2, 0, 1]):
        alone, own = stored([token])
        assert torch.equal(alone[0], together[place])
        assert torch.equal(own[4 * token : 4 * token + 4], cache[4 * token : 4 * token + 4]) and own.any()
    gates = gated(qkv, "silu")
    assert torch.equal(gates, torch.cat([gated(qkv[token : token + 1], "silu") for token in range(3)]))


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
@pytest.mark.parametrize("inner", [1, 100, 1500])
def test_gates_are_exact_until_they_are_rounded(inner, activation):
    torch.manual_seed(inner)
    x = 4 * torch.randn(3, 2 * inner)
    gate, up = x.double().chunk(2, dim=-1)
    want = ACTIVATIONS[activation](gate) * up
    torch.testing.assert_close(gated(inside(x), activation).double(), want, rtol=1e-5, atol=1e-6)
    half = x.half()
    gate, up = half.float().chunk(2, dim=-1)
    torch.testing.assert_close(
        gated(half, activation), (ACTIVATIONS[activation](gate) * up).half(), rtol=1e-3, atol=1e-5
    )


@pytest.mark.parametrize("inner", [1, 100, 1500])
def test_without_a_gate_numbers_are_squared_above_0(inner):
    torch.manual_seed(inner)
    x = 4 * torch.randn(3, inner)
    torch.testing.assert_close(gated(inside(x), "relu2"), x.relu().square())
    large = torch.tensor([[-torch.inf, -200.0, 0.0, torch.inf, torch.nan]])
    torch.testing.assert_close(gated(large, "relu2"), large.relu().square(), equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("heads, dim", [(1, 16), (3, 80), (9, 256)])
def test_what_heads_have_seen_is_multiplied_by_the_sigmoid_of_their_gates(heads, dim, dtype):
    torch.manual_seed(dim)
    seen, qkv = torch.randn(3, heads, dim).to(dtype), 4 * torch.randn(3, (2 * heads + 2) * dim).to(dtype)
    gates = qkv[:, : 2 * heads * dim].view(3, heads, 2, dim)[:, :, 1]
    want, own = seen * gates.sigmoid(), seen.clone()
    gate_heads(seen, inside(qkv)[:, : 2 * heads * dim].view(3, heads, 2, dim)[:, :, 1])
    torch.testing.assert_close(seen, want, rtol=1e-6 if dtype == torch.float32 else 2e-3, atol=1e-7)
    # Each head has one gate, in the first columns.
    want = own * functional.softplus(qkv[:, :heads, None].float()).to(dtype)
    gate_heads(own, inside(qkv)[:, :heads, None], is_softplus=True)
    torch.testing.assert_close(own, want, rtol=1e-6 if dtype == torch.float32 else 2e-3, atol=1e-7)


def test_gates_of_large_numbers_are_finite():
    x = torch.tensor([[-200.0, 200.0, 1.0, 1.0]])
    for activation in ACTIVATIONS:
        assert gated(x, activation).tolist() == [[0.0, 200.0]]


class Kind(NamedTuple):
    """How heads are rotated."""

    turned: int | None = None  # numbers of a head; None: all
    is_interleaved: bool = False
    query_beta: float = 0.0
    is_gated: bool = False  # each query is followed by a gate


USUAL = Kind()


def rotations(
    shape: tuple[int, int, int], window: int | None, held: torch.dtype, norms: list[RMSNorm], kind: Kind
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Yield (result, cache) of ours and of torch for chunks, then decodes, in caches of which the rest is NaN."""
    kv_heads, group, dim = shape
    turned = dim if kind.turned is None else kind.turned
    torch.manual_seed(dim)
    layer = layer_of(kv_heads, dim, dim, group=group, window=window)
    rope = Rope(turned or 2, max_positions=16, query_beta=kind.query_beta)
    rotary = Rotary(rope, 64, torch.float32, CPU)
    scales, period = (None, 0) if rotary.query_scales is None else (rotary.query_scales, rotary.period)
    order = torch.arange(dim)  # of the numbers that torch rotates: those of a pair are half of them apart
    if kind.is_interleaved:
        order[:turned] = torch.cat([order[:turned:2], order[1:turned:2]])

    def rotated(x: Tensor, positions: Tensor) -> Tensor:
        return rotate(x[..., order], *rotary.at(positions))[..., order.argsort()] if turned else x

    backends = [PagedGPU(), PagedGPU()]
    ours, torchs = caches = [backend.allocate(layer, 9, 5, held, CPU) for backend in backends]
    for cache in caches:
        spoil(cache.tensor)
    for first, second in [((0, 23), (0, 3)), ((23, 1), (3, 1))]:
        plan = PagedGPU().plan(AttentionMeta.of([([7, 2, 8, 3, 0], *first), ([5], *second)], 5))
        positions = torch.cat([torch.arange(cached, cached + new) for cached, new in (first, second)])
        qkv = torch.randn(len(positions), (group + 2) * kv_heads * dim)
        widths = [group * kv_heads * dim, kv_heads * dim, kv_heads * dim]
        q, k, v = (part.unflatten(1, (-1, dim)) for part in qkv.split(widths, dim=1))
        if norms:
            q, k = norms[0](q), norms[1](k)
        factor = 1 if scales is None else scales[positions // 16][:, None, None]
        want = backends[1].attend(torchs, rotated(q, positions) * factor, rotated(k, positions), v, plan)
        heads = HeadNorms(norms[0].weight, norms[1].weight, norms[0].eps) if norms else None
        rotation = Rotation(positions, rotary.table(64), kind.is_interleaved, False, scales, period)
        if kind.is_gated:
            pairs = qkv[:, : widths[0]].unflatten(1, (-1, 1, dim)).expand(-1, -1, 2, -1).clone()
            pairs[:, :, 1] = math.nan  # gates are neither read nor written
            qkv = torch.cat([pairs.flatten(1), qkv[:, widths[0] :]], 1)
        rotation = rotation if turned else None
        found = backends[0].attend_qkv(ours, inside(qkv), rotation, heads, plan, gated=kind.is_gated)
        yield found, ours.tensor, want, torchs.tensor


@pytest.mark.parametrize("held", [torch.float32, *LARGEST], ids=str)
@pytest.mark.parametrize(
    "shape, window", [((2, 2, 64), None), ((1, 1, 80), 20), ((2, 3, 96), None), ((1, 7, 128), 20), ((1, 2, 256), None)]
)
def test_queries_and_keys_are_rotated_and_stored_as_in_torch(shape, window, held):
    for found, ours, want, torchs in rotations(shape, window, held, [], USUAL):
        assert torch.equal(found, want) and not found.isnan().any()
        assert torch.equal(ours.view(torch.uint8), torchs.view(torch.uint8))


@pytest.mark.parametrize(
    "kind, held",
    [
        (Kind(turned=48), torch.int8),
        (Kind(turned=0), torch.float32),
        (Kind(turned=0), torch.int8),
        (Kind(is_interleaved=True), torch.int8),
        (Kind(turned=32, is_interleaved=True), torch.float32),
        (Kind(query_beta=0.3), torch.float32),
        (Kind(turned=16, is_gated=True), torch.float32),
        (Kind(turned=0, is_gated=True), torch.int8),
    ],
    ids=str,
)
def test_rotations_of_other_kinds_are_those_of_torch(kind, held):
    for found, ours, want, torchs in rotations((1, 2, 64), None, held, [], kind):
        assert torch.equal(found, want) and not found.isnan().any()
        assert torch.equal(ours.view(torch.uint8), torchs.view(torch.uint8))


@pytest.mark.parametrize(
    "shape, kind",
    [((2, 3, 96), USUAL), ((1, 2, 256), USUAL), ((1, 1, 64), Kind(turned=24)), ((1, 1, 64), Kind(turned=0))],
)
def test_queries_and_keys_are_normalized_as_in_torch(shape, kind):
    norms = [norm_of(shape[2], torch.float32) for _ in range(2)]
    for found, ours, want, torchs in rotations(shape, None, torch.float32, norms, kind):
        torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(ours, torchs, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("steps", [[2, 0], [1, 0]], ids=["of its own", "of the keys"])
def test_values_are_normalized_and_another_layer_attends_to_what_is_stored(steps):
    """Of each layer: whether qkv has keys and values, keys that are values as well, or neither."""
    kv_heads, dim, positions = 2, 24, torch.tensor([5, 6, 7])
    layer, rotary = layer_of(kv_heads, dim, dim), Rotary(Rope(dim), 64, torch.float32, CPU)
    norms, unweighted = [norm_of(dim, torch.float32) for _ in range(2)], make_norm(dim, 1e-6, torch.float32, CPU, PLAIN)
    unweighted.weight.fill_(1)
    heads = HeadNorms(norms[0].weight, norms[1].weight, norms[0].eps, has_values=True)
    backends = [PagedGPU(), PagedGPU()]
    ours, torchs = (backend.allocate(layer, 3, 4, torch.float32, CPU) for backend in backends)
    for cache in (ours, torchs):
        cache.tensor.zero_()
    plan = PagedGPU().plan(AttentionMeta.of([([2, 0], 5, 3)], 4))
    for own in steps:
        qkv = torch.randn(3, (4 + own * kv_heads) * dim)
        q, *more = qkv.unflatten(1, (-1, dim)).split([4, *[kv_heads] * own], dim=1)
        if own:
            k, v = rotate(norms[1](more[0]), *rotary.at(positions)), unweighted(more[-1])
        want = backends[1].attend(torchs, rotate(norms[0](q), *rotary.at(positions)), k, v, plan)
        found = backends[0].attend_qkv(ours, inside(qkv), Rotation(positions, rotary.table(64)), heads, plan)
        torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(ours.tensor, torchs.tensor, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("is_wide", [False, True])
def test_keys_in_float16_are_rounded_where_torch_rounds_them(is_wide):
    layer, dtype = layer_of(2, 80, 80), torch.float16
    rotary = Rotary(Rope(80), 64, torch.float32 if is_wide else dtype, CPU)
    backend, positions, qkv = PagedGPU(), torch.tensor([40, 41, 42]), torch.randn(3, 8 * 80).half()
    cache = backend.allocate(layer, 3, 16, dtype, CPU)
    plan = backend.plan(AttentionMeta.of([([1, 0, 2], 40, 3)], 16))
    k = rotate(qkv[:, 4 * 80 : 6 * 80].unflatten(1, (2, 80)), *rotary.at(positions)).half()
    backend.attend_qkv(cache, qkv.clone(), Rotation(positions, rotary.table(64), is_wide=is_wide), None, plan)
    assert torch.equal(cache.tensor[2, :, : 16 * 80].view(2, 16, 80)[:, 8:11], k.transpose(0, 1))


def test_padding_tokens_are_not_stored():
    backend = PagedGPU()
    cache = backend.allocate(layer_of(1, 16, 16), 1, 4, torch.float32, CPU)
    cache.tensor.fill_(7)
    meta = AttentionMeta.of([([0], 0, 2)], 4)
    meta.slot_mapping[1] = -1
    rotation = Rotation(torch.tensor([0, 1]), torch.ones(2, 2, 8))
    qkv = torch.tensor([0.0, 3.0])[:, None].expand(2, 64).contiguous()
    backend.attend_qkv(cache, qkv, rotation, None, backend.plan(meta))
    assert (cache.tensor == 0).sum() == 32 and (cache.tensor == 7).sum() == 4 * 32 - 32


def step(
    model: Decoder, rows: list[tuple[list[int], int, int]], cache: KVCache, states: list[LayerStates] | None = None
) -> Forward:
    """Return a step of these rows of (block ids, cached tokens, new tokens), each with a state of its own."""
    positions = torch.cat([torch.arange(cached, cached + new) for _, cached, new in rows])
    plan, ids = cache.plan(AttentionMeta.of(rows, 4)), (7 * positions + 3) % model.spec.vocab_size
    segments = Segments.of([[(new, number if cached else -1, number)] for number, (_, cached, new) in enumerate(rows)])
    return Forward(ids, positions, plan, cache, positions, None if states is None else States(states, segments))


def cache_of(model: Decoder) -> KVCache:
    cache = KVCache.allocate(
        PagedGPU(),
        model.spec.layers,
        num_blocks=16,
        block_size=4,
        dtype=model.spec.cache_dtype,
        device=CPU,
        sinks=model.sinks,
    )
    for layer in cache.layers:
        spoil(layer.tensor)
    return cache


def model_of(name: str, folder: Any, dtype: str = "float32") -> Decoder:
    config = EngineConfig(model=str(make(name, folder)), cpu_isa="torch", dtype=dtype)
    model = load_model(config, folder)
    assert isinstance(model, Decoder) and isinstance(model.executors[0], OnGPU)
    return model


@pytest.fixture
def untried(monkeypatch):
    """Leave out the trials of the kernels, which compute more than a step of these models."""
    for module in (on_gpu, gpu_experts):
        monkeypatch.setattr(module, "trial", lambda *_: None)
    monkeypatch.setattr(weight_trial, "objection", lambda *_: None)


CHUNKS = [([3, 7, 1], 0, 9), ([5, 2], 0, 2)]
MIXED = [([3, 7, 1], 9, 1), ([5, 2], 2, 2)]
DECODES = [([3, 7, 1], 10, 1), ([5, 2], 4, 1)]


def test_the_final_norm_is_one_call(tmp_path, monkeypatch):
    model, calls = model_of("qwen3", tmp_path), Calls()
    monkeypatch.setattr(layer_kernels, "add_norm", calls.kernel(layer_kernels.add_norm))
    x = torch.randn(2, model.spec.hidden_size)
    with torch.no_grad(), calls:
        found = model.norm(x)
    assert calls.names == ["add_norm"]
    want = model.norm.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + model.norm.eps)
    torch.testing.assert_close(found, want)


@pytest.mark.parametrize(
    "name",
    [
        "llama-yarn", "llama-bias", "mistral", "qwen3", "gemma2", "gemma3_text", "granite", "smollm3", "glm4", "olmo3",
        "hunyuan_v1_dense", "ministral3", "cohere2", "gemma4_text-small", "qwen3_5_text", "qwen3_5_moe_text",
        "lfm2-bias", "lfm2_moe", "granitemoehybrid-mamba", "nemotron_h", "nemotron_h-experts", "deepseek_v2",
        "deepseek_v3-groups", "youtu", "mistral4", "mistral4-plain", "minicpm3", "arcee-bias", "afmoe", "mellum",
        "laguna", "laguna-layers", "granite_swa-bases", "flex_olmo", "nemotron_h-latents",
    ],
)  # fmt: skip
def test_steps_equal_those_in_torch(tmp_path, name, monkeypatch):
    monkeypatch.setattr(gpu_experts, "trial", lambda *_: None)  # interpreted_experts.py has it
    model = model_of(name, tmp_path)
    eager = next(executor for executor in model.executors if isinstance(executor, Eager))
    ours, torchs = cache_of(model), cache_of(model)
    of_ours, of_torchs = (on_gpu.first_states(model.spec, model.layers, count=2) for _ in range(2))
    with torch.inference_mode():
        for rows in (CHUNKS, MIXED, DECODES):
            assert model.executors[0].takes(step(model, rows, ours))
            found = model.executors[0].run(step(model, rows, ours, of_ours))
            want = eager.run(step(model, rows, torchs, of_torchs))
            torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("name", ["nemotron_h", "nemotron_h-experts", "youtu", "deepseek_v2"])
def test_steps_equal_those_in_torch_with_quantized_weights(tmp_path, name, quantization):
    folder = make(name, tmp_path)
    config = EngineConfig(model=str(folder), cpu_isa="torch", dtype="float32", quantization=quantization)
    model = load_model(config, folder)
    assert isinstance(model, Decoder) and isinstance(model.executors[0], OnGPU)
    eager = Eager(model.embedding, model.layers, model.rotaries)
    ours, torchs = cache_of(model), cache_of(model)
    of_ours, of_torchs = (on_gpu.first_states(model.spec, model.layers, count=2) for _ in range(2))
    with torch.inference_mode():
        for rows in (CHUNKS, MIXED, DECODES):
            found = model.executors[0].run(step(model, rows, ours, of_ours))
            want = eager.run(step(model, rows, torchs, of_torchs))
            torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)


class Calls(TorchDispatchMode):
    """Records what a GPU would be given: torch's operations, except views and allocations, and our kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::").partition(".")[0]
        if not func.is_view and "empty" not in name:
            self.names.append(name)
        return func(*args, **(kwargs or {}))

    def kernel(self, kernel: Any, *, runs: bool = True) -> Any:
        """Return a kernel that is recorded instead of the operations of the interpreter, and run if `runs`."""
        calls = self

        class Recorded:
            def __getitem__(self, grid: Any) -> Any:
                def launch(*args: Any, **options: Any) -> None:
                    calls.names.append(kernel.fn.__name__)
                    if runs:
                        with _disable_current_modes():
                            kernel[grid](*args, **options)

                return launch

        return Recorded()


def calls_of_a_layer(product: str) -> list[str]:
    return ["add_norm", product, "rotate_store", "attend", product, "add_norm", product, "gate", product]


@pytest.mark.parametrize(
    "name, layer, last",
    [
        ("qwen3", calls_of_a_layer("mm"), "add_"),
        ("llama-bias", calls_of_a_layer("addmm"), "add_"),
        ("gemma2", calls_of_a_layer("mm"), "add_norm"),
        # The first layer adds nothing before its first product.
        ("olmo2", ["mm", "add_norm", "add_norm", *calls_of_a_layer("mm")[2:], "add_norm"], ""),
        ("cohere2", [*calls_of_a_layer("mm")[:5], "add_", *calls_of_a_layer("mm")[6:]], "add_"),
    ],
)
def test_a_layer_takes_one_device_call_for_each_kernel_and_product(tmp_path, monkeypatch, name, layer, last):
    model, calls = model_of(name, tmp_path), Calls()
    cache = cache_of(model)
    for module, kernels in (
        (attention_kernels, ["attend"]),
        (storing_kernels, ["rotate_store", "store"]),
        (layer_kernels, ["add_norm", "gate"]),
    ):
        for kernel in kernels:
            monkeypatch.setattr(module, kernel, calls.kernel(getattr(module, kernel), runs=False))
    for rows, launches in (CHUNKS, 1), (MIXED, 2), (DECODES, 1):
        forward = step(model, rows, cache)
        model.executors[0].run(forward)  # makes the step's plan and the workspace
        calls.names.clear()
        with torch.no_grad(), calls:  # in inference mode a product would be seen before it is resolved
            model.executors[0].run(forward)
        at = layer.index("attend")
        layers = [*layer[:at], *["attend"] * launches, *layer[at + 1 :]] * len(model.layers)
        rows_of_the_embedding = ["embedding", "mul"] if name == "gemma2" else ["embedding"]
        assert calls.names == [*rows_of_the_embedding, *layers, *filter(None, [last])]


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize(
    "name",
    [
        "youtu", "deepseek_v2-groups", "deepseek_v3-groups", "glm4_moe", "qwen3", "qwen2_moe", "gemma2", "nemotron_h",
        "nemotron_h-experts", "nemotron_h-latents", "mistral4", "mistral4-plain", "afmoe", "laguna", "flex_olmo",
    ],
)  # fmt: skip
def test_a_step_takes_no_more_launches_than_the_plan_counts(tmp_path, monkeypatch, name):
    model, calls = model_of(name, tmp_path), Calls()
    names = "attention", "experts", "heads", "latents", "layers", "mamba2", "skinny", "storing"
    for module in map(gpu_kernels, names):
        for kernel, value in list(vars(module).items()):
            is_called = kernel.startswith("_") or getattr(value, "__module__", "") != module.__name__  # by kernels
            if isinstance(value, InterpretedFunction) and not is_called:
                monkeypatch.setattr(module, kernel, calls.kernel(value, runs=False))
    forward = step(model, MIXED, cache_of(model), on_gpu.first_states(model.spec, model.layers, count=2))
    with torch.no_grad():
        model.executors[0].run(forward)  # makes the step's plan and the workspace
        calls.names.clear()
        with calls:
            model.executors[0].run(forward)
    config = EngineConfig(model="m", device="cuda", max_len=1024, max_seqs=256, max_batched_tokens=2048)
    counted = memory.graph_reserve(model.spec, config, PagedGPU).step_graph - memory.GRAPH_BYTES
    assert 0 < len(calls.names) <= counted // memory.LAUNCH_BYTES


def test_kernels_that_fail_or_err_are_replaced_by_torch(tmp_path, monkeypatch):
    folder = make("qwen3", tmp_path)
    config = EngineConfig(model=str(folder), cpu_isa="torch", dtype="float32")
    monkeypatch.setattr(
        gpu_products, "gated", lambda gate_up, activation: gate_up[:, : gate_up.shape[1] // 2].contiguous()
    )
    model = load_model(config, folder)
    assert [type(executor) for executor in model.executors] == [Eager]
    parts = model.spec, model.embedding, model.layers, model.rotaries
    assert "wrong results on this device" in on_gpu.trial(*parts)
    monkeypatch.setattr(gpu_products, "gated", lambda *_: 1 / 0)
    assert "do not run on this device: ZeroDivisionError" in on_gpu.trial(*parts)


@pytest.mark.parametrize("period", [None, 1, 2])
def test_a_trial_finds_a_wrong_scale_of_the_queries_of_a_later_period(tmp_path, monkeypatch, period):
    """Also where numbers are rounded as coarsely as in bfloat16."""
    monkeypatch.setitem(MAX_ERROR, torch.float32, MAX_ERROR[torch.bfloat16])
    model = model_of("ministral3", tmp_path)
    parts = model.spec, model.embedding, model.layers, model.rotaries
    real = on_gpu.rotation_of

    def wrong(*args: Any) -> Rotation:
        rotation = real(*args)
        assert rotation.query_scales is not None
        scales = rotation.query_scales.clone()
        scales[period] = 1.0
        return rotation._replace(query_scales=scales)

    if period is not None:
        monkeypatch.setattr(on_gpu, "rotation_of", wrong)
    reason = on_gpu.trial(*parts)
    assert reason is None if period is None else "wrong results on this device" in str(reason)
