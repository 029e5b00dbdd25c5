"""Layers with sliding windows: they are in groups of their own, whose blocks are freed when a window has passed."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest
import torch

from engine import machine_memory, plan
from engine.attention import AttentionLayer, AttentionMeta, KVCache
from engine.attention.cpu import Paged
from engine.attention.layer import LARGEST
from engine.attention.metadata import Tables
from engine.attention.reference import Reference
from engine.blocks import BlockPool
from engine.cache_groups import CacheGroups
from engine.config import EngineConfig
from engine.machine_memory import Machine
from engine.models import describe
from engine.models import spec as model_spec
from engine.prefix_cache import PrefixCache
from engine.types import ConfigError
from tests.engine.test_attention import spoil
from tests.engine.test_exact import serve
from tests.engine.test_prefix_cache import compute, sequence
from tests.engine.test_scheduler import Driver
from tests.models import make

CPU = torch.device("cpu")
LONG = 131072


# -- groups -------------------------------------------------------------------------------------------------------


def pattern(num_layers: int, every: int, window: int) -> list[int | None]:
    """Of every `every` layers, the last one attends to all tokens."""
    return [None if (index + 1) % every == 0 else window for index in range(num_layers)]


@pytest.mark.parametrize(
    ("windows", "groups", "places"),
    [
        (pattern(62, 6, 1024), 7, 10),  # Gemma 3 27B: 10 and 52 layers
        (pattern(34, 6, 1024), 7, 5),
        (pattern(26, 6, 512), 7, 4),
        (pattern(42, 2, 4096), 2, 21),  # Gemma 2, gpt-oss
        (pattern(32, 4, 4096), 4, 8),  # Cohere 2, OLMo 3
        ([None] * 28, 1, 28),
        ([4096] * 32, 1, 32),
        ([LONG] * 12, 1, 12),
        ([None] * 27 + [64], 1, 28),  # nothing to gain
    ],
)
def test_layers_are_divided_by_their_windows(windows, groups, places):
    found = CacheGroups.of(windows, LONG)
    assert (len(found.windows), max(found.places) + 1) == (groups, places)
    own = {(group, place) for group, place in zip(found.of_layer, found.places, strict=True)}
    assert len(own) == len(windows), "no two layers of a group share a tensor"
    if groups > 1:
        assert [found.windows[group] for group in found.of_layer] == windows
    assert found.block_bytes(16, 1000 * len(windows)) == 16 * 1000 * places


def test_layers_that_groups_do_not_suit_are_one_group_with_the_widest_window():
    assert CacheGroups.of([8, None, 8], 100, [3, 4, 3]).windows == (None,), "a sixth of 12 would be wasted"
    assert CacheGroups.of([8, 16, 8], 100, [1, 1, 2]).windows == (16,), "a window with layers of two sizes"
    assert CacheGroups.of([100, 100], 100).windows == (None,), "no sequence leaves the window"


@pytest.mark.parametrize(
    ("num_layers", "every", "sizes", "groups", "places"),
    [
        (60, 6, (2, 1), 7, 9),  # Gemma 4 31B: two of the ten layers without a window take as much as one of the others
        (48, 6, (4, 1), 8, 6),
        (15, 5, (1, 2), 3, 3),  # those of a small one that have keys and values of their own
    ],
)
def test_layers_that_take_less_memory_share_a_place(num_layers, every, sizes, groups, places):
    windows = pattern(num_layers, every, 1024)
    each = [sizes[window is None] for window in windows]
    found = CacheGroups.of(windows, LONG, each)
    assert (len(found.windows), max(found.places) + 1) == (groups, places)
    shares = list(zip(found.of_layer, found.places, found.shares, strict=True))
    assert len({(group, place, part) for group, place, (_, part) in shares}) == num_layers
    for (_, _, (parts, part)), size in zip(shares, each, strict=True):
        assert parts * size == max(sizes) and 0 <= part < parts
    assert found.block_bytes(16, 100 * sum(each)) == 16 * 100 * max(sizes) * places


@pytest.mark.parametrize(
    ("pattern_of", "sizes", "groups", "parts", "size"),
    [
        ((60, 6), (8320, 4128), 7, (1, 2), 9 * 8320),  # Gemma 4 with an int8 cache: each key and value has a scale
        ((15, 5), (520, 1032), 3, (2, 1), 3 * 1040),
        ((30, 6), (4160, 2064), 8, (1, 2), 4 * 4160),
        ((60, 6), (6, 10), 7, (2, 1), 5 * 12),  # places of 12 hold two small layers, places of 10 only one
        ((60, 6), (10, 6), 6, (1, 1), 10 * 10),
        ((60, 6), (9, 10), 6, (1, 1), 10 * 10),
        ((6, 6), (6, 10), 1, (1, 1), 40),  # 48 with a fifth that no layer uses
        ((4, 2), (5, 8), 1, (1, 1), 26),
    ],
)
def test_a_place_may_be_larger_than_the_layers_that_share_it(pattern_of, sizes, groups, parts, size):
    windows = pattern(*pattern_of, 1024)
    each = [sizes[window is None] for window in windows]
    found = CacheGroups.of(windows, LONG, each)
    assert len(found.windows) == groups and found.block_bytes(16, sum(each)) == 16 * size
    assert [count for count, _ in found.shares] == [parts[window is None] for window in windows]
    kept: Counter[int] = Counter()
    for group in range(groups):
        of_place: Counter[int] = Counter()
        for own, place, taken in zip(found.of_layer, found.places, each, strict=True):
            of_place[place] += taken * (own == group)
        kept |= of_place
    assert sum(kept.values()) <= size, "a block holds each group's layers"


@pytest.mark.parametrize("windows", [(None,), (7,), (None, 9), (9, None, 3, None), (1, 2)])
@pytest.mark.parametrize(("block_size", "chunk"), [(1, 1), (4, 6), (16, 3)])
def test_the_longest_sequence_is_what_the_blocks_are_enough_for(windows, block_size, chunk):
    groups = CacheGroups(windows, tuple(range(len(windows))))
    for num_blocks in range(1, 60):
        longest = groups.longest(num_blocks, block_size, chunk)
        if longest is None:
            assert groups.blocks_for(10_000, block_size, chunk) <= num_blocks
        else:
            assert not longest or groups.blocks_for(longest, block_size, chunk) <= num_blocks
            assert groups.blocks_for(longest + 1, block_size, chunk) > num_blocks


# -- blocks of sequences ------------------------------------------------------------------------------------------

TWO = CacheGroups((None, 6), (0, 1))


def windowed(num_blocks: int) -> PrefixCache:
    return PrefixCache(BlockPool(num_blocks), groups=TWO, chunk=8)


def test_a_prefix_needs_all_blocks_of_one_group_and_the_window_of_the_other():
    cache = windowed(40)
    first = sequence(1, range(30))
    cache.start(first, [])
    compute(cache, first, 30)
    full, narrow = first.block_ids[0::2], first.block_ids[1::2]
    assert cache.pool.num_held == 8 + 2, (
        "token 30 attends to 25 and later ones in the window, which blocks 6 and 7 have"
    )
    hits = cache.match(sequence(2, range(30)))
    assert hits is not None and hits[0::2] == full[:7] and hits[1::2] == [-1] * 5 + narrow[5:7]

    second = sequence(2, range(30))
    cache.start(second, hits)
    second.num_computed = second.capacity  # as the scheduler records it
    assert cache.pool.num_held == 11 and second.capacity == 28, "block 5 of the window is held again"
    cache.check([first, second])
    for seq in (first, second):
        cache.release(seq)
    assert cache.pool.num_held == 0
    cache.check([])


def test_a_prefix_ends_where_the_blocks_of_a_window_are_evicted():
    cache = windowed(16)
    first = sequence(1, range(22))
    cache.start(first, [])
    compute(cache, first, 22)  # six blocks of each group, of which four of the window are released
    assert (cache.pool.num_held, cache.pool.num_cached, cache.pool.num_free) == (8, 4, 4)
    short = sequence(2, [*range(12), 99, 99])
    assert len(cache.match(short) or ()) == 6, "three blocks"
    assert cache.pool.take(4 + 2)  # evicts the two that were released first: the last ones, back to front
    assert len(cache.match(short) or ()) == 4, (
        "the window of a token at 12 needs block 2, that of a token at 8 does not"
    )
    assert len(cache.match(sequence(3, range(22))) or ()) == 4, "that of a token at 20 needs block 3"


def test_a_long_output_holds_few_blocks_in_groups_with_a_window():
    driver = Driver(num_blocks=100, block_size=4, max_len=300, groups=CacheGroups((None, 10), (0, 1)))
    driver.add("a", prompt=5, max_tokens=250)
    most = 0
    while driver.launch():
        driver.collect()
        length = len(driver.scheduler.running[0].tokens) if driver.scheduler.running else 0
        if length:
            most = max(most, driver.scheduler.pool.num_held - -(-(length - 1) // 4))
    assert driver.deltas[-1].finish_reason == "length"
    assert 2 <= most <= -(-10 // 4) + 2
    assert driver.scheduler.pool.num_held == 0


def test_a_request_runs_that_would_not_fit_with_all_blocks_of_its_windows():
    groups = CacheGroups((None, 10, 10), (0, 1, 2))
    driver = Driver(num_blocks=58, block_size=4, max_len=200, max_batched_tokens=8, groups=groups)
    assert driver.scheduler.max_len == 192, "48 blocks, and five for each window"
    driver.add("a", prompt=150, max_tokens=42)
    while driver.launch():
        driver.collect()
    assert driver.deltas[-1].finish_reason == "length" and driver.deltas[-1].stats.preemptions == 0


# -- the memory plan ----------------------------------------------------------------------------------------------

GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_hidden_layers": 26,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "vocab_size": 262144,
    "max_position_embeddings": 32768,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "query_pre_attn_scalar": 256,
    "torch_dtype": "bfloat16",
}


def test_a_context_fits_that_did_not_fit_with_all_blocks_of_all_layers(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(GEMMA3))
    machine = Machine("cpu", 64 * 10**9, 64 * 10**9)
    monkeypatch.setattr(machine_memory, "measure", lambda device: machine)
    settings = {"model": str(tmp_path), "device": "cpu", "max_len": 32768, "kv_cache_memory": 300 << 20}
    found, code = plan._result(json.dumps(settings))
    assert code == 0 and found["max_len"] == 32768
    # Four layers have all tokens, and 24 places in six groups up to 512 + 256.
    block = 16 * 4 * 2 * 256 * 2
    assert found["num_blocks"] == (300 << 20) // block and found["kv_cache_bytes"] == found["num_blocks"] * block
    needed = 32768 // 16 + 6 * ((512 + 256 - 3) // 16 + 2)
    assert found["num_tokens"] == found["num_blocks"] * 32768 // needed
    assert found["full_length_users"] == pytest.approx(found["num_blocks"] / needed, abs=0.01)

    monkeypatch.setattr(CacheGroups, "of", lambda windows, *_, **__: CacheGroups((None,), (0,) * len(windows)))
    found, code = plan._result(json.dumps(settings))
    assert code == 2 and "one request of 32768 tokens needs" in found["error"]


def test_fewer_blocks_than_groups_are_refused(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(GEMMA3))
    monkeypatch.setattr(machine_memory, "measure", lambda device: Machine("cpu", 64 * 10**9, 64 * 10**9))
    found, code = plan._result(json.dumps({"model": str(tmp_path), "device": "cpu", "num_blocks": 6}))
    assert code == 2 and "holds 0 tokens" in found["error"]


# -- attention ----------------------------------------------------------------------------------------------------


def backends() -> list:
    try:
        return [Reference(), Paged.create("auto")]
    except ConfigError:
        return [Reference()]


def check_unread(backend, held: torch.dtype, block_size: int, dim: int, steps: list[tuple[int, int]]) -> None:
    """Compute a sequence in these steps, (start, end), of layers in two groups that share a tensor.

    Where blocks before the window are replaced by one that is full of NaN, the results must have the same bits.
    """
    dtype = torch.float32 if held in LARGEST else held
    layers = [AttentionLayer(4, 2, dim, dim, 0.3, window) for window in (None, 21, 21)]
    groups, length = CacheGroups((None, 21), (0, 1, 1)), steps[-1][1]
    num_blocks = -(-length // block_size)
    cache = KVCache.allocate(
        backend, layers, num_blocks=2 * num_blocks + 1, block_size=block_size, dtype=held, device=CPU, groups=groups
    )
    addresses = [layer.tensor.data_ptr() for layer in cache.layers]
    assert addresses[0] == addresses[1] != addresses[2]
    draw = torch.Generator().manual_seed(1)
    q = torch.randn(length, 4, dim, generator=draw).to(dtype)
    k, v = (torch.randn(length, 2, dim, generator=draw).to(dtype) for _ in range(2))
    full, narrow, bad = list(range(num_blocks)), list(range(num_blocks, 2 * num_blocks)), 2 * num_blocks
    for layer in cache.layers:
        spoil(layer.tensor)
    untouched = cache.layers[1].tensor[: len(full)].clone()

    def attend(layer: int, start: int, end: int, *, is_freed: bool) -> torch.Tensor:
        first = max(0, start - 21 + 1) // block_size if is_freed else 0
        one, other = (
            AttentionMeta.of([(blocks[: -(-end // block_size)], start, end - start)], block_size)
            for blocks in (full, [bad] * first + narrow[first:])
        )
        meta = replace(one, others=(Tables(other.slot_mapping, other.block_table),))
        return cache.attend(layer, q[start:end], k[start:end], v[start:end], cache.plan(meta))

    for layer in (1, 2):
        for start, end in steps:
            kept, found = (attend(layer, start, end, is_freed=is_freed) for is_freed in (False, True))
            assert not found.isnan().any() and torch.equal(kept, found), (start, end)
    now = cache.layers[1].tensor[: len(full)]
    assert torch.equal(now.view(torch.uint8), untouched.view(torch.uint8)), "the blocks of the other group"


@pytest.mark.parametrize("backend", backends(), ids=lambda backend: type(backend).__name__)
@pytest.mark.parametrize("held", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize(("block_size", "dim"), [(16, 16), (4, 16), (32, 32), (5, 24)])
def test_nothing_before_a_window_is_read(backend, held, block_size, dim):
    steps = [(0, 50), (50, 51), (51, 70), (70, 133), *((at, at + 1) for at in range(133, 200))]
    check_unread(backend, held, block_size, dim, steps)


# KV heads and head sizes of two layers that share a place, and of one that has a place alone. Without scales, in turn:
# both sides fill it, the third layer leaves a gap, the first two do.
SHARING = [((2, 8), (2, 8), (2, 16)), ((2, 16), (2, 16), (2, 24)), ((1, 16), (1, 16), (3, 16))]


def check_shared_places(backend, held: torch.dtype, shapes: tuple[tuple[int, int], ...], block_size: int = 4) -> None:
    """Layers of three shapes, see SHARING, compute the same as each in a cache of its own."""
    dtype = torch.float32 if held in LARGEST else held
    layers = [
        AttentionLayer(6, *shape, shape[1], 0.3, window) for shape, window in zip(shapes, (9, 9, None), strict=True)
    ]
    groups = CacheGroups((9, None), (0, 0, 1), (2, 2, 1))
    cache = KVCache.allocate(
        backend, layers, num_blocks=12, block_size=block_size, dtype=held, device=CPU, groups=groups
    )
    assert len({layer.tensor.untyped_storage().data_ptr() for layer in cache.layers}) == 1
    alone = [
        KVCache.allocate(backend, [layer], num_blocks=12, block_size=block_size, dtype=held, device=CPU)
        for layer in layers
    ]
    for each in (cache, *alone):
        for layer in each.layers:
            spoil(layer.tensor)
    draw = torch.Generator().manual_seed(1)

    def plans(start: int, end: int) -> tuple[AttentionMeta, AttentionMeta]:
        one, other = (
            AttentionMeta.of([(blocks[: -(-end // block_size)], start, end - start)], block_size)
            for blocks in ([7, 2, 9, 0, 4], [1, 11, 3, 5, 8])
        )
        return replace(one, others=(Tables(other.slot_mapping, other.block_table),)), other

    for start, end in ((0, 9), (9, 10), (10, 17), (17, 18)):
        meta, other = plans(start, end)
        shared = cache.plan(meta)
        for index, (heads, dim) in enumerate(shapes):
            q = torch.randn(end - start, 6, dim, generator=draw).to(dtype)
            k, v = (torch.randn(end - start, heads, dim, generator=draw).to(dtype) for _ in range(2))
            plan_alone = alone[index].plan(other if index == 2 else replace(meta, others=()))
            found, want = cache.attend(index, q, k, v, shared), alone[index].attend(0, q, k, v, plan_alone)
            assert not found.isnan().any() and torch.equal(found, want), (start, index)


@pytest.mark.parametrize("backend", backends(), ids=lambda backend: type(backend).__name__)
@pytest.mark.parametrize("held", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("shapes", SHARING)
@pytest.mark.parametrize("block_size", [4, 16])
def test_layers_that_share_a_place_do_not_touch_the_parts_of_others(backend, held, shapes, block_size):
    check_shared_places(backend, held, shapes, block_size)


@pytest.mark.parametrize(
    ("name", "dtype", "more"),
    [
        ("gemma2", "bfloat16", {}),
        ("gemma3_text", "bfloat16", {"kv_dtype": "int8"}),
        ("mistral", "float32", {}),
        ("smollm3-window", "bfloat16", {}),
        ("gpt_oss", "float32", {}),
        ("gemma4_text", "bfloat16", {}),
        ("gemma4_text-small", "float32", {}),
        ("gemma4_text-small", "bfloat16", {"kv_dtype": "int8"}),
        ("gemma4_text-small", "float32", {"kv_dtype": "int8", "attention": "reference"}),
    ],
)
async def test_freed_blocks_change_no_bit(tmp_path, name, dtype, more, monkeypatch):
    """Alone, in a batch, in chunks, after hits in the cache, and when requests are preempted."""
    folder = make(name, tmp_path, dtype=getattr(torch, dtype))
    base = {"model": str(folder), "device": "cpu", "dtype": dtype, "max_seqs": 8, "threads": 1, "debug": True}
    base |= more
    assert any(describe(folder, EngineConfig(**base)).groups.windows), "there are blocks to free"
    with monkeypatch.context() as patch:
        whole = property(lambda self: CacheGroups((None,), (0,) * len(self.layers)))
        patch.setattr(model_spec.ModelSpec, "groups", whole)
        kept, exact, _ = await serve(EngineConfig(**base, num_blocks=64, prefix_caching=False), together=False)
    found, _, _ = await serve(EngineConfig(**base, num_blocks=64, prefix_caching=False), together=False)
    assert found == kept
    for settings in (
        {"num_blocks": 300, "block_size": 4, "max_batched_tokens": 9},
        {"num_blocks": 300, "block_size": 4, "async_scheduling": True},
        {"num_blocks": 42, "max_batched_tokens": 32},
    ):
        found, _, _ = await serve(EngineConfig(**base, **settings), together=True)
        assert [tokens for tokens, _ in found] == [tokens for tokens, _ in kept]
        assert found == kept or not exact
