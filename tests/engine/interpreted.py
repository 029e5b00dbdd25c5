"""The Triton kernels in Triton's interpreter, on the CPU.

test_paged_gpu.py runs this file in a process of its own: Triton decides whether to interpret when it is imported.

    TRITON_INTERPRET=1 python -m pytest tests/engine/interpreted.py
"""

from __future__ import annotations

import asyncio

import pytest
import torch
import triton
import triton.language as tl

from engine import ConfigError, EngineConfig, EngineRequest, LocalEngine, SamplingParams
from engine.attention import AttentionLayer, AttentionMeta, KVCache, check, choice, gpu_plan, gpu_shapes, paged_gpu
from engine.attention.layer import LARGEST
from engine.attention.paged_gpu import PagedGPU
from engine.attention.reference import quantize
from engine.models.gpu import executor as on_gpu
from engine.runner import logits_choice
from tests.engine.interpreter import prepare
from tests.engine.test_attention import CPU, Pool, layer_of, spoil
from tests.engine.test_windows import SHARING, check_shared_places, check_unread
from tests.models import make

prepare()


def representable(x: torch.Tensor) -> torch.Tensor:
    """Return keys or values that fp8 stores exactly: the interpreter rounds to it otherwise than a GPU."""
    x = (100 * x).clamp(-448, 448).to(torch.float8_e4m3fn).float()
    x[x.abs() < 1] = 0
    x[..., 0] = 448
    return x / 128


@triton.jit
def alike(out_ptr, x_ptr, y_ptr, FLAG: tl.constexpr):
    """Operations whose arguments differ in little more than their values."""
    i = tl.program_id(0)
    place = tl.arange(0, 4)
    x, y = tl.load(x_ptr + place), tl.load(y_ptr + place)
    negative = tl.where(x > 0, x, -0.0)
    at = out_ptr + 32 * i + place
    tl.store(at, x * x)
    tl.store(at + 4, x * y)
    tl.store(at + 8, y * x)
    tl.store(at + 12, tl.where(x < 9, x, x))
    tl.store(at + 16, tl.where(x < 9, y, x))
    tl.store(at + 20, 1.0 / negative)
    tl.store(at + 24, 1.0 / tl.where(x > 0, x, 0.0) + FLAG)
    tl.store(at + 28, i * (place[:, None] < place[None, :]).to(tl.float32).sum(1), mask=place < 1 + i)


def test_operations_that_are_recorded_are_repeated_with_their_own_arguments():
    x, y, out = torch.tensor([1.0, -2, 4, 0]), torch.tensor([3.0, 5, 7, 9]), torch.zeros(2, 8, 4)
    for flag in (1, True, 2):
        alike[(2,)](out, x, y, FLAG=flag)
        below = torch.where(x > 0, 1 / x, -torch.inf)
        rows = [x * x, x * y, x * y, x, y, below, torch.where(x > 0, 1 / x, torch.inf) + flag]
        for program in (0, 1):
            assert torch.equal(out[program, :7], torch.stack(rows))
            assert out[program, 7].tolist() == [[0.0, 0, 0, 0], [3.0, 2, 0, 0]][program]


@pytest.fixture
def small(monkeypatch):
    """Parts and tiles that short sequences fill, so that the interpreter has little to do."""
    monkeypatch.setattr(gpu_plan, "SPLIT", 32)
    monkeypatch.setattr(gpu_shapes, "TILE_ROWS", (16, 16, 16))
    monkeypatch.setattr(gpu_shapes, "FLOAT32_TILE_ROWS", (16, 16, 16))
    shape = paged_gpu.attend_shape
    monkeypatch.setattr(paged_gpu, "attend_shape", lambda *args, **traits: shape(*args, **traits)._replace(keys=16))


@pytest.mark.parametrize(
    "shape, block_size, held, rules",
    [
        ((2, 2, 8, 8), 16, torch.float32, {}),
        ((1, 12, 16, 16), 4, torch.float32, {"window": 20}),
        ((2, 3, 24, 8), 5, torch.float32, {"softcap": 5.0, "sinks": True}),
        ((1, 1, 40, 40), 16, torch.float32, {"window": 5, "sinks": True}),
        ((1, 2, 288, 288), 16, torch.int8, {}),
        ((2, 2, 16, 16), 16, torch.int8, {}),
        ((1, 3, 24, 7), 5, torch.int8, {"window": 20, "softcap": 5.0, "sinks": True}),
        ((1, 3, 24, 7), 5, torch.float8_e4m3fn, {"window": 20, "softcap": 5.0, "sinks": True}),
    ],
)
def test_mixed_rows_equal_dense_attention(small, shape, block_size, held, rules):
    kv_heads, group, dim, v_dim = shape
    values = torch.linspace(-1, 2, kv_heads * group) if "sinks" in rules else None
    layer = layer_of(kv_heads, dim, v_dim, group=group, window=rules.get("window"), softcap=rules.get("softcap"))
    pool = Pool(
        1, [40, 3, 67], layer, block_size=block_size, dtype=torch.float32, held=held, sinks=values, backend=PagedGPU()
    )
    if held == torch.float8_e4m3fn:
        pool.k, pool.v = ([representable(each) for each in numbers] for numbers in (pool.k, pool.v))
    assert pool.run() < 1e-5


@pytest.mark.parametrize(
    "shape, held, at_once, most, in_keys",
    [
        ((20, 576, 512), torch.float32, (1, 2), 1e-5, True),  # in float32 of 16 rows
        ((21, 560, 500), torch.int8, (1, 2), 1e-5, True),
        ((21, 560, 500), torch.int8, (1, 2), 1e-5, False),
        ((21, 576, 512), torch.float16, (1, 1), 4e-3, False),
        ((20, 576, 512), torch.bfloat16, (3, 2), 3e-2, True),
        ((20, 40, 32), torch.bfloat16, (6, 1), 3e-2, True),
        ((20, 40, 32), torch.bfloat16, (6, 1), 3e-2, False),
    ],
    ids=str,
)
def test_latents_of_which_many_heads_share_a_key_equal_dense_attention(
    monkeypatch, shape, held, at_once, most, *, in_keys
):  # fmt: skip
    """With keys of one tile and of two, whose query heads are divided among programs, and with values that are the
    first numbers of keys, or others. `at_once`: queries of an item of a longer row, and the programs that share it."""
    monkeypatch.setattr(gpu_plan, "SPLIT", 32)
    group, dim, v_dim = shape
    layer = layer_of(1, dim, v_dim, group=group, scale=dim**-0.5, values_in_keys=in_keys)
    dtype, of_shape, sharing = torch.float32 if held in LARGEST else held, paged_gpu.attend_shape, {}

    def attend_shape(layer, dtype, queries, *args, **traits):
        found = of_shape(layer, dtype, queries, *args, **traits)._replace(keys=16)
        sharing[queries] = found.sharing
        return found

    monkeypatch.setattr(paged_gpu, "attend_shape", attend_shape)
    pool = Pool(1, [40, 3, 67], layer, block_size=16, dtype=dtype, held=held, backend=PagedGPU())
    assert pool.run() < most
    assert max(sharing.items()) == at_once and min(sharing) == 1


@pytest.mark.parametrize(
    "dtype, held, most",
    [(torch.float16, torch.int8, 4e-3), (torch.bfloat16, torch.int8, 3e-2), (torch.float32, torch.float8_e4m3fn, 1e-5)],
)
def test_values_in_keys_have_the_scales_of_the_keys(small, dtype, held, most):
    layer = layer_of(1, 24, 16, group=12, values_in_keys=True)
    pool = Pool(1, [40, 3, 67], layer, block_size=5, dtype=dtype, held=held, backend=PagedGPU())
    if held == torch.float8_e4m3fn:
        pool.k = [representable(each) for each in pool.k]
        pool.v = [pool.value_of(each) for each in pool.k]
    assert pool.run() < most


@pytest.mark.parametrize("window", [None, 20])
def test_scores_that_are_all_far_below_zero_count_as_any(small, window):
    """Parts and keys that a row does not have weigh nothing, however little the others weigh."""
    layer = layer_of(1, 16, 16, group=2, window=window)
    pool = Pool(3, [70, 33, 40], layer, block_size=16, dtype=torch.float32, backend=PagedGPU())
    pool.q, pool.k = [each.abs() * 9 for each in pool.q], [-each.abs() * 9 for each in pool.k]
    pool.step({0: 69, 1: 32, 2: 39})
    assert pool.step({0: 1, 1: 1, 2: 1}) < 1e-4


def test_float16_is_as_exact_as_its_rounding(small):
    assert Pool(2, [40, 70], layer_of(2, 16, 16), block_size=16, dtype=torch.float16, backend=PagedGPU()).run() < 4e-3


def test_decodes_are_the_same_beside_any_other_rows(small):
    """A part's size is fixed, and the parts are added in order, whichever program finishes last."""

    def last_token(others: dict[int, int]) -> torch.Tensor:
        lengths = [70, 33, 40]
        pool = Pool(3, lengths, layer_of(2, 16, 16), block_size=16, dtype=torch.float32, backend=PagedGPU())
        for row, length in enumerate(lengths):
            pool.step({row: length - 1})
        rows = {0: 1, **others}
        meta = AttentionMeta.of([(pool.blocks[row], lengths[row] - 1, new) for row, new in rows.items()], 16)
        q, k, v = (torch.cat([each[row][-1:] for row in rows]) for each in (pool.q, pool.k, pool.v))
        return pool.cache.attend(0, q, k, v, pool.cache.plan(meta))[0]

    alone = last_token({})
    assert torch.equal(alone, last_token({1: 1}))
    assert torch.equal(alone, last_token({2: 1, 1: 1}))


def test_more_parts_than_the_workspace_holds_are_launched_one_after_another(small, monkeypatch):
    monkeypatch.setattr(gpu_plan, "MAX_PARTS", 4)
    layer = layer_of(1, 16, 16)
    pool = Pool(4, [70, 69, 68], layer, block_size=16, dtype=torch.float32, backend=PagedGPU())
    pool.step({0: 69, 1: 68, 2: 67})
    plan = pool.cache.plan(AttentionMeta.of([(blocks, 67, 1) for blocks in pool.blocks], 16))
    assert [work.num_parts for work in plan.launches((None, 8)).decodes] == [3, 3, 3]
    assert pool.step({0: 1, 1: 1, 2: 1}) < 1e-5


@pytest.mark.parametrize("in_keys", [False, True])
@pytest.mark.parametrize("dtype", LARGEST, ids=str)
def test_a_cache_holds_the_same_numbers_and_scales_as_the_reference(small, dtype, in_keys):
    backend, layer = PagedGPU(), layer_of(1, 24, 16, values_in_keys=in_keys)
    cache = backend.allocate(layer, 2, 4, dtype, CPU)
    k, v = torch.randn(4, 1, 24), torch.randn(4, 1, 16)
    if dtype == torch.float8_e4m3fn:
        k, v = representable(k), representable(v)
    k[1] = 0
    k[2, 0, 3] = float("nan")
    v[3] = 1e-40
    spoil(cache.tensor)
    meta = AttentionMeta.of([([1], 0, 4)], 4)
    backend.attend(cache, torch.randn(4, 2, 24), k, v, backend.plan(meta))
    wants = [quantize(x, dtype)[:, 0] for x in ([k] if in_keys else [k, v])]
    share, sizes = cache.tensor[1, 0], [4 * (want.shape[1] - 4) for want in wants]
    assert len(share) == sum(want.numel() for want in wants)
    *lines, scales = share.split([*sizes, len(share) - sum(sizes)])
    for line, scale, wanted in zip(lines, scales.view(torch.float32).split(4), wants, strict=True):
        found = line.view(4, -1)
        assert torch.equal(found.float(), wanted[:, :-4].float())
        assert torch.equal(scale.nan_to_num(-1), wanted[:, -4:].contiguous().view(torch.float32)[:, 0].nan_to_num(-1))


def test_padding_tokens_are_not_stored(small):
    backend, layer = PagedGPU(), layer_of(1, 16, 16)
    cache = backend.allocate(layer, 1, 4, torch.float32, CPU)
    cache.tensor.fill_(7)
    meta = AttentionMeta.of([([0], 0, 2)], 4)
    meta.slot_mapping[1] = -1
    k = torch.tensor([0.0, 3.0])[:, None, None].expand(2, 1, 16).contiguous()
    backend.attend(cache, torch.zeros(2, 2, 16), k, k, backend.plan(meta))
    assert (cache.tensor == 0).sum() == 32 and (cache.tensor == 7).sum() == 4 * 32 - 32


@pytest.mark.parametrize(
    "layer, dtype, words",
    [
        (layer_of(1, 640, 512), torch.bfloat16, "keys of up to 576 numbers and values of up to 512"),
        (layer_of(1, 576, 576), torch.bfloat16, "keys of up to 576 numbers and values of up to 512"),
        (layer_of(1, 64, 64), torch.float64, "do not compute in float64"),
        (layer_of(1, 16, 16, group=256), torch.bfloat16, "up to 128 query heads"),
    ],
)
def test_models_that_the_kernels_cannot_serve_are_declined(layer, dtype, words):
    assert words in PagedGPU.objection([layer], dtype, dtype, CPU, "auto")
    with pytest.raises(ConfigError, match=words):
        choice.choose("triton", CPU, [layer], dtype)


def test_an_fp8_cache_is_declined_on_a_gpu_that_does_not_convert_fp8(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    layer, dtypes = AttentionLayer(2, 1, 16, 16, scale=0.25), (torch.bfloat16, torch.float8_e4m3fn)
    words = PagedGPU.objection([layer], *dtypes, torch.device("cuda"), "auto")
    assert words == "this GPU does not convert fp8 (`kv_dtype=int8` is as small)"


def test_kernels_that_fail_or_err_are_declined(small, monkeypatch):
    layer = AttentionLayer(2, 1, 16, 16, scale=0.25)
    assert PagedGPU.objection([layer], torch.float32, torch.float32, CPU, "auto") is None
    check("triton")
    monkeypatch.setattr(paged_gpu, "programs", lambda *_: 1 / 0)
    assert "do not run on this device: ZeroDivisionError" in PagedGPU.objection(
        [layer], torch.float32, torch.float32, CPU, "auto"
    )
    monkeypatch.undo()
    monkeypatch.setattr(paged_gpu.Reference, "attend", lambda self, cache, q, k, v, plan: q.new_ones(q.shape))
    assert "wrong results on this device" in PagedGPU.objection([layer], torch.float32, torch.float32, CPU, "auto")


@pytest.mark.parametrize("held", [torch.float32, torch.int8])
def test_nothing_before_a_window_is_read(small, held):
    """In chunks and alone, in one part and in several."""
    check_unread(PagedGPU(), held, 4, 16, [(0, 30), (30, 31), (31, 58), (58, 59), (59, 60)])


@pytest.mark.parametrize(
    "held, shapes",
    [
        (torch.float32, SHARING[0]),
        (torch.int8, SHARING[0]),
        (torch.int8, SHARING[1]),
        (torch.float8_e4m3fn, SHARING[1]),
    ],
)
def test_layers_that_share_a_place_do_not_touch_the_parts_of_others(small, held, shapes):
    check_shared_places(PagedGPU(), held, shapes)


@pytest.mark.parametrize("held, most", [(torch.int8, 0.001), (torch.float8_e4m3fn, 0.005)])
def test_small_weights_do_not_vanish_in_float16(monkeypatch, held, most):
    """The first token has a much larger score than 1,000 others, as in real models with more tokens and larger values.
    Weights relative to it, times a scale of the cache, are less than float16 can hold."""
    launch = paged_gpu.launch
    monkeypatch.setattr(paged_gpu, "launch", lambda *args, **more: launch(*args, **more | {"WIDEN": False}))
    tokens, dim = 1024, 16
    generator = torch.Generator().manual_seed(0)
    layer = AttentionLayer(1, 1, dim, dim, scale=1.0)
    q, k = torch.zeros(2, tokens, 1, dim)
    v = (0.3 + 0.2 * torch.randn(tokens, 1, dim, generator=generator)) / 8
    q[:, :, 0] = 1.0
    k[:, 0, 0] = 0.3 * torch.randn(tokens, generator=generator)
    k[0, 0, 0], v[0] = 8.9, 0.01 * v[0]
    q, k, v = q.half(), k.half(), v.half()
    backend, blocks = PagedGPU(), [*range(tokens // 16)]
    cache = KVCache.allocate(backend, [layer], num_blocks=len(blocks), block_size=16, dtype=held, device=CPU)

    def attend(first: int, count: int) -> torch.Tensor:
        own = slice(first, first + count)
        return cache.attend(0, q[own], k[own], v[own], cache.plan(AttentionMeta.of([(blocks, first, count)], 16)))

    with monkeypatch.context() as only_stored:
        only_stored.setattr(backend, "_attend", lambda cache, q, plan: q)
        attend(0, tokens - 2)
    found = attend(tokens - 2, 2)[-1, 0].double()
    shares = (k[:, 0].double() @ q[-1, 0].double()).softmax(0)
    assert 0.1 < shares[1:].sum() < 0.2
    exact = shares @ v[:, 0].double()
    assert (found - exact).norm() < most * exact.norm()


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gpt_neox"])
def test_an_engine_samples_the_tokens_of_the_reference(tmp_path, monkeypatch, name):
    """Prompts in chunks beside decodes, in our own decoder and in transformers' code. The trials of the kernels and
    sampling have tests of their own."""
    folder = make(name, tmp_path, seed=5)
    for module in (paged_gpu, on_gpu):
        monkeypatch.setattr(module, "trial", lambda *_: None)
    monkeypatch.setattr(logits_choice, "choose", lambda *_: logits_choice.Choice("torch", None))

    def outputs(attention: str) -> list[tuple[int, ...]]:
        config = EngineConfig(
            model=str(folder),
            dtype="float32",
            attention=attention,
            cpu_isa="torch",  # as on a GPU
            block_size=4,
            num_blocks=64,
            max_batched_tokens=16,
        )

        async def run() -> list[tuple[int, ...]]:
            async with LocalEngine(config) as engine:
                return await asyncio.gather(*(output(engine, number, 7 * number) for number in (1, 2, 3)))

        return asyncio.run(run())

    async def output(engine: LocalEngine, number: int, length: int) -> tuple[int, ...]:
        prompt = tuple(number + place for place in range(length))
        request = EngineRequest(id=number, prompt_ids=prompt, params=SamplingParams(max_tokens=6, temperature=0.0))
        return tuple([token async for delta in engine.generate(request) for token in delta.token_ids])

    found = outputs("triton")
    assert found == outputs("reference") and [len(tokens) for tokens in found] == [6, 6, 6]
