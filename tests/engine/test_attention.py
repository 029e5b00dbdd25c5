"""The paged reference against dense attention, over random schedules of chunks and single tokens."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine import ConfigError
from engine.attention import AttentionBackend, AttentionLayer, AttentionMeta, KVCache, check, choice, create, reference
from engine.attention.layer import LARGEST
from engine.attention.reference import Reference, dequantize, quantize

CPU = torch.device("cpu")


def dense(q: Tensor, k: Tensor, v: Tensor, *, scale: float, window=None, softcap=None, sinks=None) -> Tensor:
    """Return the attention of one sequence: q [new, heads, dim] are its last tokens, k and v [all, kv_heads, dim]
    all."""
    new, heads, _ = q.shape
    k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    position, key = torch.arange(k.shape[0] - new, k.shape[0])[:, None], torch.arange(k.shape[0])
    hidden = key > position
    if window:
        hidden |= key <= position - window
    scores = scores.masked_fill(hidden, -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(-1, 1, 1).expand(heads, new, 1)], -1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : k.shape[0]], v)


def spoil(cache: Tensor) -> Tensor:
    """Fill with NaN; an int8 or fp8 cache with bytes that are NaN as a scale."""
    if cache.dtype not in LARGEST:
        return cache.fill_(math.nan)
    cache.view(torch.int8).fill_(-1)
    return cache


def layer_of(kv_heads: int, dim: int, v_dim: int, *, group: int = 2, **more: Any) -> AttentionLayer:
    """A layer with `group` query heads for each KV head."""
    return AttentionLayer(kv_heads * group, kv_heads, dim, v_dim, **{"scale": 0.3, **more})


class Pool:
    """Sequences with random keys and values in one cache whose unused memory is NaN, their blocks scattered.

    `held` is the cache's dtype. Results are compared with dense attention over the cached keys and values.
    """

    def __init__(
        self,
        seed: int,
        lengths: list[int],
        layer: AttentionLayer,
        *,
        block_size: int,
        dtype: torch.dtype,
        held: torch.dtype | None = None,
        backend: AttentionBackend | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        self.layer = layer if sinks is None else replace(layer, sinks="sinks")
        self.sinks = sinks
        self.random, draw = random.Random(seed), torch.Generator().manual_seed(seed)
        self.lengths, self.block_size = lengths, block_size
        needs = [-(-length // block_size) for length in lengths]
        free = list(range(sum(needs) + 3))
        self.random.shuffle(free)
        self.blocks = [[free.pop() for _ in range(need)] for need in needs]

        def numbers(heads: int, dim: int) -> list[Tensor]:
            return [torch.randn(n, heads, dim, generator=draw, dtype=torch.float64).to(dtype) for n in lengths]

        self.q = numbers(layer.num_heads, layer.head_dim)
        self.k = numbers(layer.num_kv_heads, layer.head_dim)
        self.v = [self.value_of(k) for k in self.k]
        if not layer.values_in_keys:
            self.v = numbers(layer.num_kv_heads, layer.v_head_dim)
        self.backend = backend or Reference()
        self.cache = KVCache.allocate(
            self.backend,
            [self.layer],
            num_blocks=sum(needs) + 3,
            block_size=block_size,
            dtype=held or dtype,
            device=CPU,
            sinks=None if sinks is None else {"sinks": sinks},
        )
        self.held = held or dtype
        spoil(self.cache.layers[0].tensor)
        self.done = [0] * len(lengths)

    def value_of(self, key: Tensor) -> Tensor:
        """Return the first numbers of keys."""
        return key[..., : self.layer.v_head_dim]

    def step(self, rows: dict[int, int]) -> float:
        """Run this many tokens of each sequence in one call; returns the largest difference from dense attention."""
        meta = AttentionMeta.of([(self.blocks[s], self.done[s], new) for s, new in rows.items()], self.block_size)
        q, k, v = (
            torch.cat([x[s][self.done[s] : self.done[s] + new] for s, new in rows.items()])
            for x in (self.q, self.k, self.v)
        )
        out, worst, at = self.cache.attend(0, q, k, v, self.cache.plan(meta)), 0.0, 0
        for s, new in rows.items():
            if new == 0:
                continue
            start, end = self.done[s], self.done[s] + new
            k, v = (
                dequantize(quantize(x, self.held), torch.float64) if self.held in LARGEST else x.double()
                for x in (self.k[s][:end], self.v[s][:end])
            )
            if self.layer.values_in_keys:
                v = self.value_of(k)
            layer = {name: getattr(self.layer, name) for name in ("scale", "window", "softcap")}
            want = dense(self.q[s][start:end].double(), k, v, sinks=self.sinks, **layer)
            difference = (out[at : at + new].double() - want).abs().max().item()
            assert not math.isnan(difference)
            worst, at, self.done[s] = max(worst, difference), at + new, end
        return worst

    def run(self) -> float:
        """Run all sequences to the end in random chunks, many of them single tokens."""
        worst = 0.0
        while open_ := [s for s, length in enumerate(self.lengths) if self.done[s] < length]:
            chosen = [s for s in open_ if self.random.random() < 0.8] or open_
            sizes = {s: self.random.choice([1, 1, 2, 3, 17]) for s in chosen}
            worst = max(worst, self.step({s: min(n, self.lengths[s] - self.done[s]) for s, n in sizes.items()}))
        return worst


@pytest.mark.parametrize("held", [torch.float64, torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("window", [None, 1, 5, 20])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_mixed_rows_equal_dense_attention(window, softcap, with_sinks, held):
    for seed, (block_size, heads, group, dim, v_dim) in enumerate(
        [(16, 2, 2, 8, 8), (4, 1, 12, 16, 16), (1, 4, 1, 8, 24), (5, 2, 3, 16, 8)]
    ):
        layer = layer_of(heads, dim, v_dim, group=group, window=window, softcap=softcap)
        lengths = [40, 3, 17, 1, 65]
        sinks = torch.linspace(-1, 2, heads * group, dtype=torch.float64) if with_sinks else None
        pool = Pool(seed, lengths, layer, block_size=block_size, dtype=torch.float64, held=held, sinks=sinks)
        assert pool.run() < 1e-12


@pytest.mark.parametrize("held", [torch.float64, torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("rules", [{}, {"window": 5}, {"softcap": 5.0}], ids=str)
def test_values_that_are_the_first_numbers_of_keys_are_read_from_the_keys(rules, held):
    for seed, (block_size, heads, group, dim, v_dim) in enumerate([(16, 1, 12, 24, 16), (5, 2, 3, 17, 17)]):
        layer = layer_of(heads, dim, v_dim, group=group, values_in_keys=True, **rules)
        pool = Pool(seed, [40, 3, 17, 1, 65], layer, block_size=block_size, dtype=torch.float64, held=held)
        assert pool.run() < 1e-12
        size = dim + 4 if held in LARGEST else dim
        assert pool.cache.layers[0].tensor.shape[1:] == (heads, block_size * size)


@pytest.mark.parametrize("held", LARGEST, ids=str)
def test_values_in_keys_are_rounded_by_the_scale_of_the_whole_key(held):
    """A key whose last number is ten times as large as the largest of its value: int8 rounds the value ten times as
    coarsely as if it had a scale of its own. fp8 keeps its relative error, until numbers become subnormal."""
    k = torch.randn(64, 1, 24, generator=torch.Generator().manual_seed(0)).clamp(-2, 2)
    k[..., 0], k[..., 20] = 2.0, 20.0
    v, backend, errors = k[..., :16], Reference(), []
    for in_keys in (False, True):
        layer = layer_of(1, 24, 16, group=1, window=1, values_in_keys=in_keys)  # so that it returns the token's value
        cache = backend.allocate(layer, 4, 16, held, CPU)
        plan = backend.plan(AttentionMeta.of([([0, 1, 2, 3], 0, 64)], 16))
        errors.append((backend.attend(cache, torch.zeros(64, 1, 24), k, v, plan) - v).abs().max().item())
    own, shared = errors
    step = 2 / 127 if held == torch.int8 else 2 / 8
    assert own <= step / 2 * 1.001
    assert step < shared <= 10 * step / 2 * 1.001 if held == torch.int8 else shared <= step / 2 * 1.001


@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)], ids=str
)
def test_other_types_are_as_exact_as_their_rounding(dtype, limit):
    lengths = [200, 30, 31, 90]
    assert Pool(1, lengths, layer_of(2, 32, 32), block_size=16, dtype=dtype).run() < limit
    layer = layer_of(2, 32, 32, softcap=20.0)
    assert Pool(1, lengths, layer, block_size=16, dtype=dtype, sinks=torch.zeros(4)).run() < limit


def test_decode_beside_much_longer_and_shorter_rows():
    pool = Pool(2, [700, 2, 350, 40, 41, 16], layer_of(2, 8, 8), block_size=16, dtype=torch.float64)
    pool.step({s: length - 1 for s, length in enumerate(pool.lengths)})
    assert pool.step({5: 1, 0: 1, 3: 1, 1: 1, 4: 1, 2: 1}) < 1e-12


def test_splitting_the_work_does_not_change_the_result(monkeypatch):
    monkeypatch.setattr(reference, "GATHER_NUMBERS", 600)
    monkeypatch.setattr(reference, "SCORE_NUMBERS", 500)
    pool = Pool(3, [90, 33, 34, 60], layer_of(2, 8, 8), block_size=4, dtype=torch.float64)
    assert pool.run() < 1e-12
    pool = Pool(4, [90, 33, 34, 60], layer_of(2, 8, 8, window=7), block_size=4, dtype=torch.float64)
    assert pool.run() < 1e-12


def test_a_block_moves_as_bytes():
    pool = Pool(5, [20], layer_of(2, 8, 8), block_size=8, dtype=torch.float64)
    pool.step({0: 19})
    cache, spare = pool.cache.layers[0].tensor, ({0, 1, 2, 3, 4, 5} - set(pool.blocks[0])).pop()
    assert cache[0].is_contiguous()
    cache[spare] = cache[pool.blocks[0][1]]
    cache[pool.blocks[0][1]] = math.nan
    pool.blocks[0][1] = spare
    assert pool.step({0: 1}) < 1e-12


DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [1e-30, 1e-4, 1.0, 1e4, 3e37])
def test_int8_error_is_at_most_half_a_step(dtype, scale):
    scale = min(scale, torch.finfo(dtype).max / 10)
    x = (torch.randn(50, 3, 33, dtype=torch.float64) * scale).to(dtype)
    held = quantize(x)
    assert held.dtype == torch.int8 and held.shape == (50, 3, 37)
    step = x.double().abs().amax(-1, keepdim=True) / 127
    assert ((dequantize(held, torch.float64) - x.double()).abs() <= step * 0.50001).all()
    found = dequantize(held, dtype)
    # What is largest stays as it is, but for the rounding of a quotient and of a product.
    at = x.abs().argmax(-1, keepdim=True)
    rtol = 3 * max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    torch.testing.assert_close(found.gather(-1, at), x.gather(-1, at), rtol=rtol, atol=torch.finfo(dtype).tiny)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 3e37])
def test_fp8_error_is_at_most_a_sixteenth(scale):
    x = torch.randn(50, 3, 33) * scale
    held = quantize(x, torch.float8_e4m3fn)
    assert held.dtype == torch.float8_e4m3fn and held.shape == (50, 3, 37)
    step = x.abs().amax(-1, keepdim=True).double() / 448
    error = (dequantize(held, torch.float64) - x.double()).abs()
    assert (error <= (x.double().abs() / 16).maximum(step / 1024) * 1.0001).all()
    at = x.abs().argmax(-1, keepdim=True)
    torch.testing.assert_close(dequantize(held, torch.float32).gather(-1, at), x.gather(-1, at), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", LARGEST, ids=str)
def test_nan_infinity_and_tiny_numbers_are_quantized(dtype):
    tiny, small = torch.finfo(torch.float32).tiny, (LARGEST[dtype] - 1) * torch.finfo(torch.float32).tiny
    x = torch.tensor([[0.0, -0.0], [1e-39, -1e-45], [small, 1.0 * tiny], [math.nan, 1.0], [-math.inf, 1.0]])
    found = dequantize(quantize(x, dtype), torch.float32)
    assert (found[:3] == 0).all() and found[3:].isnan().all()
    large = small + 2 * tiny
    assert dequantize(quantize(torch.tensor([[large, 0.0]]), dtype), torch.float32)[0, 0] == pytest.approx(large)


def test_an_outlier_sequence_in_int8_does_not_change_another():
    pool = Pool(6, [20, 30], layer_of(2, 8, 8), block_size=8, dtype=torch.float32, held=torch.int8)
    pool.k[0][3] = math.nan
    meta = AttentionMeta.of([(pool.blocks[s], 0, n) for s, n in enumerate(pool.lengths)], 8)
    out = pool.cache.attend(0, *(torch.cat(x) for x in (pool.q, pool.k, pool.v)), pool.cache.plan(meta))
    assert out[3:20].isnan().all() and not out[20:].isnan().any()


def test_what_a_token_takes():
    layer = layer_of(2, 8, 24)
    assert [layer.bytes(dtype) for dtype in (torch.float32, torch.bfloat16, torch.int8)] == [256, 128, 2 * (12 + 28)]
    assert layer.bytes(torch.float8_e4m3fn) == layer.bytes(torch.int8)
    latents = layer_of(1, 24, 16, values_in_keys=True)
    assert [latents.bytes(dtype) for dtype in (torch.float32, torch.bfloat16, torch.int8)] == [96, 48, 28]
    for each in (layer, latents):
        for dtype in (torch.float32, torch.bfloat16, torch.int8):
            assert Reference().allocate(each, 3, 5, dtype, CPU).tensor.nbytes == 15 * each.bytes(dtype)


class Picky(Reference):
    """A backend that serves small heads alone, and is slower than the one before it."""

    drawback = "picky computes attention, slower"

    @classmethod
    def objection(cls, layers, dtype, cache_dtype, device, isa):
        return "its heads are large" if max(layer.head_dim for layer in layers) > 8 else None


class Refusing(Reference):
    @classmethod
    def objection(cls, layers, dtype, cache_dtype, device, isa):
        return "it refuses everything"


def test_auto_is_the_first_backend_of_the_device_that_can_serve_the_model(monkeypatch):
    table = {name: choice.Entry(f"{__name__}:{name}", ("cpu",)) for name in ("Refusing", "Picky", "Reference")}
    monkeypatch.setattr(choice, "BACKENDS", table)
    small, large = [layer_of(2, 8, 8)], [layer_of(2, 8, 8), layer_of(2, 16, 16)]
    assert choice.choose("auto", CPU, small, torch.float32) == choice.Choice(
        "Picky", Picky, "picky computes attention, slower: it refuses everything"
    )
    assert choice.choose("auto", CPU, large, torch.float32) == choice.Choice(
        "Reference", Reference, f"{Reference.drawback}: it refuses everything"
    )
    assert choice.choose("Picky", CPU, small, torch.float32).note == ""
    with pytest.raises(ConfigError, match="the attention backend Picky cannot be used: its heads are large"):
        choice.choose("Picky", CPU, large, torch.float32)
    with pytest.raises(ConfigError, match="the attention backend auto cannot be used"):
        choice.choose("auto", torch.device("cuda"), small, torch.float32)


def test_backends_are_made_by_name():
    assert isinstance(create("reference"), Reference)
    assert create("reference") is not create("reference")
    check("auto")
    with pytest.raises(ConfigError, match="unknown attention backend 'flash'; known: auto, cpu, triton, reference"):
        check("flash")
