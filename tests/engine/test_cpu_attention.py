"""The paged CPU kernel against dense attention in float64, the bits of its results, and its selection."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine import ConfigError, EngineConfig
from engine.attention import AttentionMeta, LayerCache, choose, cpu, create
from engine.attention.cpu import Paged
from engine.attention.reference import Reference, dequantize, quantize
from engine.kernels import build, library
from tests.engine.test_attention import Pool, dense, layer_of, spoil
from tests.engine.test_kernels import kernels
from tests.engine.test_models import Bench, load
from tests.models import make, prompt

CPU = torch.device("cpu")
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
# Block size, KV heads, query heads of each, sizes of a key and of a value, one number if they are alike. The first ones
# are read in place, the others are plain.
SHAPES = [
    (16, 2, 2, 64),
    (32, 1, 7, 80),
    (16, 3, 1, 112),
    (1024, 2, 3, 128),
    (48, 1, 12, 192),
    (16, 1, 2, 256),
    (16, 1, 100, 16),
    (4, 2, 3, 8),
    (5, 1, 2, 33),
    (1, 2, 2, 16),
    (16, 2, 4, 1),
    (16, 1, 20, (576, 512)),
    (32, 2, 3, (192, 128)),
    (16, 2, 1, (16, 48)),
    (16, 1, 3, (40, 32)),
    (16, 2, 2, (32, 24)),
    (4, 1, 5, (8, 12)),
]

pytestmark = [
    pytest.mark.skipif(
        build.supported() is not None or build.compiler() is None, reason="needs Linux on x86-64 and a C++ compiler"
    ),
    pytest.mark.usefixtures("same_threads_after"),
]


def backend(isa: str) -> Paged:
    """Return a variant, emulated as `kernels` says; skips the test if it cannot run."""
    return Paged(kernels(isa).library, isa)


Kind = tuple[Paged, torch.dtype, torch.dtype]  # a variant, the model's dtype and the cache's

# Without the instructions for bfloat16 their variants are that of AVX-512; with AMX an int8 cache is, too.
KINDS = [
    (isa, dtype, held, name)
    for isa in build.variants("attention")
    for dtype, held, name in library.cache_dtypes()
    if isa not in build.EMULATED or held == torch.bfloat16
]


@pytest.fixture(params=KINDS, ids=lambda kind: f"{kind[0]}-{kind[3]}")
def kind(request) -> Kind:
    isa, dtype, held, _ = request.param
    return backend(isa), dtype, held


@pytest.fixture
def best() -> Paged:
    return Paged.create("auto")


@pytest.fixture(params=list(LIMITS), ids=["float32", "bfloat16"])
def dtype(request) -> torch.dtype:
    return request.param


@pytest.fixture(params=[*library.cache_dtypes(), (torch.bfloat16, torch.bfloat16, "amx")], ids=lambda kind: kind[2])
def best_kind(request, best) -> Kind:
    """The best variant, and that of AMX, which most processors only emulate."""
    dtype, held, name = request.param
    return backend("amx") if name == "amx" else best, dtype, held


def pool(
    kind: Kind, shape: tuple[int, int, int, Any], lengths: list[int], sinks: Tensor | None = None, **more: Any
) -> Pool:
    paged, dtype, held = kind
    block_size, kv_heads, group, dim = shape
    layer = layer_of(kv_heads, *(dim if isinstance(dim, tuple) else (dim, dim)), group=group, **more)
    return Pool(0, lengths, layer, block_size=block_size, dtype=dtype, held=held, backend=paged, sinks=sinks)


# -- numbers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_mixed_rows_equal_dense_attention(kind, shape):
    _, dtype, _ = kind
    made = pool(kind, shape, [40, 3, 17, 1, 145])
    made.q = [q * q.shape[-1] ** -0.5 for q in made.q]
    assert made.run() < LIMITS[dtype]


@pytest.mark.parametrize(
    "kw", [{"window": 1}, {"window": 5}, {"window": 64}, {"softcap": 3.0}, {"sinks": True}], ids=str
)
@pytest.mark.parametrize("shape", [(16, 2, 3, 64), (4, 2, 3, 8)], ids=str)
def test_window_softcap_and_sinks_equal_dense_attention(kind, shape, kw):
    _, dtype, _ = kind
    if "sinks" in kw:
        kw = {"sinks": torch.linspace(-2, 3, shape[1] * shape[2])}
    assert pool(kind, shape, [150, 3, 70, 1], **kw).run() < LIMITS[dtype]


def test_window_softcap_and_sinks_together_equal_dense_attention(best):
    sinks = torch.linspace(-2, 3, 6)
    kind = best, torch.float32, torch.float32
    made = pool(kind, (16, 2, 3, 64), [150, 3, 70, 1], sinks, window=40, softcap=2.0)
    assert made.run() < 1e-5


@pytest.mark.parametrize(("threads", "window"), [(1, 1100), (2, None), (5, None), (5, 1100)])
def test_long_contexts_are_split_and_merged(kind, threads, window):
    _, dtype, _ = kind
    torch.set_num_threads(threads)
    made = pool(kind, (16, 2, 2, 64), [2600, 40], window=window)
    made.q = [q * 0.3 for q in made.q]
    made.step({0: 2598, 1: 38})
    assert made.step({0: 1, 1: 1}) < LIMITS[dtype]
    assert made.step({0: 1}) < LIMITS[dtype]


def test_huge_scores(kind):
    _, dtype, _ = kind
    made = pool(kind, (16, 1, 2, 64), [90])
    made.q[0] *= 1e4
    assert made.step({0: 60}) < LIMITS[dtype] * 10
    assert made.step({0: 1}) < LIMITS[dtype] * 10


def test_scores_far_below_zero_are_scores(best):
    """No score is below the initial maximum. Powers of two, so that the oracle's sums are exact in any order."""
    made = pool((best, torch.float32, torch.float32), (16, 1, 1, 64), [70])
    made.q[0], made.k[0] = torch.full((70, 1, 64), 2.0**60), torch.full((70, 1, 64), -(2.0**60))
    assert made.step({0: 69}) < 1e-5
    assert made.step({0: 1}) < 1e-5


def test_subnormal_numbers(kind):
    _, dtype, _ = kind
    made = pool(kind, (16, 1, 2, 64), [40])
    made.v[0] = (torch.randn(40, 1, 64) * 1e-39).to(dtype)
    made.k[0] *= 1e-39
    out = made.step({0: 40})
    assert out < 1e-37


def test_one_key_is_its_value(kind):
    _, dtype, _ = kind
    made = pool(kind, (16, 2, 2, 64), [1])
    # A whole number times its scale is rounded, and a cache's number is not.
    assert made.step({0: 1}) <= (LIMITS[dtype] if made.held == torch.int8 else 0.0)


def test_empty_rows_do_not_affect_others(best):
    made = pool((best, torch.float32, torch.float32), (16, 1, 2, 64), [30, 20])
    made.step({0: 10, 1: 10})
    assert made.step({0: 0, 1: 5}) < 1e-5
    assert made.step({0: 5, 1: 0}) < 1e-5


def test_a_number_that_is_none_stays_with_its_sequence(best_kind):
    made = pool(best_kind, (16, 1, 2, 64), [30, 20])
    made.q[0][3] = made.k[0][25] = math.nan
    meta = AttentionMeta.of([(made.blocks[s], 0, n) for s, n in enumerate(made.lengths)], 16)
    out = made.cache.attend(0, *(torch.cat(x) for x in (made.q, made.k, made.v)), made.cache.plan(meta))
    assert out[3].isnan().all() and out[25:30].isnan().all() and not out[30:].isnan().any()


def test_blocks_can_be_copied_as_bytes(best_kind):
    _, dtype, _ = best_kind
    made = pool(best_kind, (16, 2, 2, 64), [40])
    made.step({0: 39})
    cache, spare = made.cache.layers[0].tensor, (set(range(6)) - set(made.blocks[0])).pop()
    assert cache[0].is_contiguous()
    cache[spare] = cache[made.blocks[0][1]]
    spoil(cache[made.blocks[0][1]])
    made.blocks[0][1] = spare
    assert made.step({0: 1}) < LIMITS[dtype]


def test_strided_inputs_are_read_in_place(best):
    """Values are a slice of a fused matmul's result; transformers' queries have the heads first."""
    made = pool((best, torch.float32, torch.float32), (16, 2, 2, 64), [50])
    made.q[0] = made.q[0].transpose(0, 1).contiguous().transpose(0, 1)
    made.v[0] = torch.cat([made.v[0], torch.full((50, 3, 64), math.nan)], 1)[:, :2]
    meta = AttentionMeta.of([(made.blocks[0], 0, 50)], 16)
    out = made.cache.attend(0, made.q[0], made.k[0], made.v[0], made.cache.plan(meta))
    want = dense(made.q[0].double(), made.k[0].double(), made.v[0].double(), scale=0.3)
    assert (out - want).abs().max() < 1e-5


# -- bits -----------------------------------------------------------------------------------------------------------


class Streams:
    """Sequences with every token computed alone: the reference for bits."""

    LENGTHS = (1300, 700, 65, 64, 17, 1)

    def __init__(self, kind: Kind, block_size: int, dim: int, sinks: Tensor | None = None, **more: Any) -> None:
        paged, dtype, held = kind
        self.paged, self.block_size = paged, block_size
        layer = layer_of(2, dim, dim, scale=dim**-0.5, **more)
        if sinks is not None:
            layer = replace(layer, sinks="sinks")
        self.data = [[torch.randn(n, heads, dim).to(dtype) for heads in (4, 2, 2)] for n in self.LENGTHS]
        self.data[0][0] *= 3  # a sharper softmax
        needs = [-(-n // block_size) for n in self.LENGTHS]
        self.caches: list[tuple[LayerCache, list[list[int]]]] = []
        for _ in range(2):  # the same keys in other places; what lies behind their ends is no number
            cache = paged.allocate(layer, sum(needs) + 1, block_size, held, CPU, sinks=sinks)
            spoil(cache.tensor)
            order = torch.randperm(sum(needs) + 1).tolist()
            self.caches.append((cache, [[order.pop() for _ in range(need)] for need in needs]))
        torch.set_num_threads(1)
        self.alone = [torch.cat([self.run([(s, i, i + 1)], 0) for i in range(n)]) for s, n in enumerate(self.LENGTHS)]
        self.run([(s, 0, n) for s, n in enumerate(self.LENGTHS)], 1)

    def run(self, rows: list[tuple[int, int, int]], which: int) -> Tensor:
        cache, blocks = self.caches[which]
        meta = AttentionMeta.of([(blocks[s], a, b - a) for s, a, b in rows], self.block_size)
        q, k, v = (torch.cat([self.data[s][part][a:b] for s, a, b in rows]) for part in range(3))
        return self.paged.attend(cache, q, k, v, self.paged.plan(meta))


CASES = [(16, 64, {}), (5, 24, {}), (64, 32, {"window": 100, "softcap": 20.0, "sinks": torch.linspace(-1, 1, 4)})]
CASES.append((32, 48, {"window": 300}))


@pytest.mark.parametrize("case", CASES, ids=["in-place", "plain", "window", "odd head size"])
def test_bits_do_not_depend_on_the_schedule(best_kind, case):
    block_size, dim, kw = case
    streams, rng = Streams(best_kind, block_size, dim, **kw), random.Random(7)
    lengths = Streams.LENGTHS
    for _ in range(100):
        rows = []
        for s in rng.sample(range(len(lengths)), rng.randint(1, len(lengths))):
            end = rng.randint(1, lengths[s])
            rows.append((s, max(0, end - rng.choice([1, 1, 2, 5, 16, 33, 64, 130, 700])), end))
        torch.set_num_threads(rng.choice([1, 2, 3]))
        out = streams.run(rows, rng.randrange(2))
        want = torch.cat([streams.alone[s][a:b] for s, a, b in rows])
        bits = torch.int32 if out.dtype == torch.float32 else torch.int16
        assert torch.equal(out.view(bits), want.view(bits)), rows


def test_bits_do_not_depend_on_the_layout(kind):
    paged, dtype, held = kind
    q, k, v = (torch.randn(200, heads, 64).to(dtype) for heads in (4, 2, 2))
    found = []
    for block_size in (16, 7, 256):
        blocks = list(range(-(-200 // block_size)))
        cache = paged.allocate(layer_of(2, 64, 64, scale=0.125), len(blocks), block_size, held, CPU)
        spoil(cache.tensor)
        plan = paged.plan(AttentionMeta.of([(blocks, 0, 200)], block_size))
        found.append(paged.attend(cache, q, k, v, plan))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_bits_do_not_depend_on_the_schedule_where_sums_are_subnormal(best_kind):
    """A higher score rescales sums, which are then below the smallest normal number; AMX takes them as zero."""
    paged, dtype, held = best_kind
    q, k, v = (torch.randn(150, heads, 64).to(dtype) for heads in (2, 1, 1))
    q *= 4
    v *= 2.0**-124
    alone, chunks = [], []
    for out, length in ((alone, 1), (chunks, 50)):
        cache = paged.allocate(layer_of(1, 64, 64, scale=0.125), 10, 16, held, CPU)
        for at in range(0, 150, length):
            plan = paged.plan(AttentionMeta.of([(list(range(10)), at, length)], 16))
            out.append(paged.attend(cache, *(x[at : at + length] for x in (q, k, v)), plan))
    assert torch.equal(torch.cat(alone), torch.cat(chunks))


@pytest.mark.parametrize("name", ["qwen3", "mistral"])
def test_logits_have_the_same_bits_in_any_schedule(tmp_path, dtype, name):
    """The whole model: each token alone, and many sequences in chunks, on one and two threads."""
    model = load(make(name, tmp_path, dtype=dtype), dtype)
    if not model.product.invariant:
        pytest.skip("torch computes the products here")
    prompts, rng = [prompt(length, seed=length) for length in (70, 33, 18, 1)], random.Random(5)
    torch.set_num_threads(1)
    alone = [[bench.step({0: [token]})[0] for token in ids] for ids in prompts for bench in [Bench(model)]]
    for threads in (1, 2, 2):
        torch.set_num_threads(threads)
        bench, found = Bench(model, seed=threads), [[] for _ in prompts]
        while open_ := [s for s, ids in enumerate(prompts) if bench.done.get(s, 0) < len(ids)]:
            chosen = rng.sample(open_, rng.randint(1, len(open_)))
            starts = {s: bench.done.get(s, 0) for s in chosen}
            rows = {s: prompts[s][at : at + rng.choice([1, 1, 2, 9, 40])] for s, at in starts.items()}
            for seq, logits in bench.step(rows).items():
                found[seq].append(logits)
        for one, other in zip(alone, found, strict=True):
            assert torch.equal(torch.cat(one), torch.cat(other))


def test_int8_cache_equals_that_of_the_reference(kind):
    """Attention over a single key returns its value: that of `quantize`, for numbers of every magnitude."""
    paged, dtype, held = kind
    if held != torch.int8:
        pytest.skip("not a cache of int8")
    for block_size, dim in ((16, 64), (16, 48), (5, 33), (3, 1)):
        scale = torch.tensor([1.0, 1e-3, 1e3, 1e-30, 1e30, 1e-36, 1e-37, 1e-39, 0.0, 3e38])[:, None, None]
        v = (torch.randn(10, 2, dim).clamp(-1, 1) * scale).to(dtype)
        q = k = torch.zeros(10, 2, dim, dtype=dtype)
        cache = paged.allocate(layer_of(2, dim, dim, group=1, scale=1.0), 10, block_size, torch.int8, CPU)
        spoil(cache.tensor)
        plan = paged.plan(AttentionMeta.of([([block], 0, 1) for block in range(10)], block_size))
        out = paged.attend(cache, q, k, v, plan)
        assert torch.equal(out, dequantize(quantize(v), dtype))
        v[3, 0, 0], v[4, 1, dim - 1] = math.nan, -math.inf
        none = paged.attend(cache, q, k, v, plan).isnan()
        assert none[3, 0].all() and none[4, 1].all() and none.sum() == 2 * dim


# -- bad calls and the choice -----------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused(best):
    cache = best.allocate(layer_of(2, 8, 8), 3, 16, torch.float32, CPU)
    plan = best.plan(AttentionMeta.of([([0], 0, 4)], 16))
    q, kv = torch.randn(4, 4, 8), torch.randn(4, 2, 8)
    wrong: list[tuple[Tensor, Tensor, Tensor]] = [
        (q[:3], kv[:3], kv[:3]),
        (q, kv, kv[:, :, :4]),
        (torch.randn(4, 3, 8), kv, kv),
        (q, kv[:, :1], kv[:, :1]),
        (q[:, :, :4], kv, kv),
        (q.bfloat16(), kv, kv),
        (q.double(), kv.double(), kv.double()),
    ]
    for given in wrong:
        with pytest.raises(ValueError):
            best.attend(cache, *given, plan)
    int8 = best.allocate(layer_of(2, 8, 8), 3, 16, torch.int8, CPU)
    for given in wrong[:5] + wrong[6:]:
        with pytest.raises(ValueError):
            best.attend(int8, *given, plan)
    odd = [(torch.float16, layer_of(2, 8, 8)), (torch.float32, replace(layer_of(2, 8, 8), num_heads=3))]
    for dtype, layer in odd:
        with pytest.raises(ValueError):
            best.allocate(layer, 3, 16, dtype, CPU)
    with pytest.raises(ValueError):
        best.allocate(layer_of(2, 8, 8), 3, 16, torch.float32, CPU, sinks=torch.zeros(3))
    meta = AttentionMeta.of([([0], 0, 4), ([1], 0, 2)], 16)
    for part in ({"slot_mapping": meta.slot_mapping[:5]}, {"block_table": meta.block_table[:1]}):
        with pytest.raises(ValueError):
            best.plan(replace(meta, **part))


def test_layers_of_one_kind_share_the_arguments_of_a_step(best):
    kinds = [layer_of(2, 8, 8), layer_of(2, 8, 8, sinks="a"), layer_of(2, 8, 8, window=3)]
    same, too, other = (best.allocate(kind, 3, 16, torch.float32, CPU) for kind in kinds)
    plan, strides = best.plan(AttentionMeta.of([([0], 0, 4)], 16)), (64, 8, 64, 8, 64, 8)
    assert plan.call(same, strides) == plan.call(too, strides) != plan.call(other, strides)
    assert plan.call(same, (32, 8, 16, 8, 16, 8)) != plan.call(same, strides)


@pytest.mark.parametrize("backend", [Paged, Reference])
def test_longer_steps_and_contexts_take_more_workspace(backend):
    layers = [layer_of(2, 64, 64), layer_of(2, 128, 128)]

    def needed(max_len: int, tokens: int, held: torch.dtype = torch.bfloat16) -> int:
        config = EngineConfig(model="", max_len=max_len, max_seqs=4, max_batched_tokens=tokens, threads=4)
        return backend.workspace_bytes(layers, torch.bfloat16, held, config)

    assert 0 < needed(4096, 16) < needed(4096, 64) and needed(4096, 16) < needed(65536, 16)
    assert needed(65536, 16) <= needed(65536, 16, torch.int8)


def test_cache_bytes_per_token(best_kind):
    best, _, held = best_kind
    for layer in (layer_of(2, 8, 8), layer_of(3, 33, 33)):
        for block_size in (16, 5):
            assert best.allocate(layer, 3, block_size, held, CPU).tensor.nbytes == 3 * block_size * layer.bytes(held)


def test_auto_takes_the_kernel_where_it_can():
    same, other = [layer_of(2, 8, 8)], [layer_of(2, 8, 8), layer_of(2, 8, 4)]
    assert choose("auto", CPU, same, torch.bfloat16).name == "cpu"
    assert choose("auto", CPU, other, torch.bfloat16).name == "cpu"
    assert choose("cpu", CPU, same, torch.float32).note == ""
    on_gpu = choose("auto", torch.device("cuda"), same, torch.float64)
    assert on_gpu.name == "reference" and "the Triton kernels do not compute in float64" in on_gpu.note
    for layers, dtype, isa, reason in [
        (same, torch.float16, "auto", "in float32 and bfloat16, not in float16"),
        (same, torch.float32, "torch", "`cpu_isa=torch` disables the CPU kernels"),
    ]:
        found = choose("auto", CPU, layers, dtype, isa)
        assert found.name == "reference" and reason in found.note
        with pytest.raises(ConfigError, match=f"the attention backend cpu cannot be used: .*{reason}"):
            choose("cpu", CPU, layers, dtype, isa)
    with pytest.raises(ConfigError, match="the device is cuda"):
        choose("cpu", torch.device("cuda"), same, torch.float32)


def test_without_a_library_torch_computes(monkeypatch):
    def fails():
        raise build.BuildError("no C++ compiler was found")

    monkeypatch.setattr(cpu.build, "library", fails)
    found = choose("auto", CPU, [layer_of(2, 8, 8)], torch.float32)
    assert found.name == "reference" and "there are no CPU kernels: no C++ compiler was found" in found.note


def test_forced_variant_is_used():
    isa = library.available()[-1]
    q, k, v = (torch.randn(5, 2, 64) for _ in range(3))
    layer, meta = layer_of(2, 64, 64, group=1), AttentionMeta.of([([0], 0, 5)], 16)
    outs = []
    for paged in (create("cpu", isa), backend(isa)):
        outs.append(paged.attend(paged.allocate(layer, 1, 16, q.dtype, CPU), q, k, v, paged.plan(meta)))
    assert torch.equal(*outs)
