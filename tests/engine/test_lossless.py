"""Weights compressed without loss: the same bits as plain weights, on every instruction set."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from engine import ConfigError, EngineConfig
from engine.build import build as build_engine
from engine.kernels import build, weight_packing
from engine.kernels.matmul import Lossless, Packed, Packing
from tests.engine.test_exact import serve
from tests.engine.test_kernels import kernels, needs_library
from tests.models import make

pytestmark = [needs_library, pytest.mark.usefixtures("same_threads_after")]

# Columns and rows of the weight. Panels are 32 or 16 rows wide; 8 units of two columns are expanded at once.
SHAPES = [(1, 1), (2, 3), (16, 32), (17, 33), (31, 2), (65, 100), (130, 77), (1000, 257)]
ROWS = (1, 2, 3, 4, 6, 7, 12, 13, 25, 100)


@pytest.fixture(params=build.variants("lossless"))
def variant(request):
    return kernels(request.param)


def bits(numbers: Tensor) -> list[int]:
    return numbers.view(torch.int16 if numbers.dtype == torch.bfloat16 else torch.int32).flatten().tolist()


def normal(rows: int, columns: int) -> Tensor:
    return (torch.randn(rows, columns) * 0.02).bfloat16()


def assert_same(variant, weight: Tensor, **options) -> Lossless:
    plain, lossless = Packed(variant, weight, **options), Lossless(variant, weight, **options)
    rows = torch.arange(len(weight) // 2 if options.get("gated") else len(weight))
    if not options.get("gated"):
        assert bits(lossless.lookup(rows)) == bits(weight)
    for count in ROWS:
        x = torch.randn(count, weight.shape[1]).bfloat16()
        residual = None if options.get("wide") else torch.randn(count, plain.outputs).bfloat16()
        assert bits(lossless(x, residual)) == bits(plain(x, residual)), count
    return lossless


@pytest.mark.parametrize("shape", SHAPES)
def test_results_have_the_bits_of_plain_weights(variant, shape):
    weight = normal(shape[1], shape[0])
    assert_same(variant, weight, bias=torch.randn(shape[1]))
    assert_same(variant, weight, wide=True)
    assert_same(variant, torch.cat([weight, normal(*weight.shape)]), gated=True)


def test_numbers_with_rare_exponents_are_kept(variant):
    weight = normal(70, 333)
    places = [(0, 0), (0, 1), (1, 15), (1, 16), (31, 17), (32, 31), (69, 332), (69, 331), (40, 0)]
    rare = [1e38, -1e-38, 3e-45, -0.0, 0.0, 1e30, -1e30, float("inf"), float("-inf")]
    for place, number in zip(places, rare, strict=True):
        weight[place] = number
    assert assert_same(variant, weight).saved_bytes > 0


def test_nan_keeps_its_bits(variant):
    weight = normal(40, 64)
    weight.view(torch.int16)[3, 5] = 0x7FC1
    lossless = Lossless(variant, weight)
    assert lossless.saved_bytes > 0 and bits(lossless.lookup(torch.arange(40))) == bits(weight)
    y = lossless(torch.ones(1, 64).bfloat16())
    assert y[0, 3].isnan() and int(y.isnan().sum()) == 1


def test_a_weight_takes_a_quarter_less_memory(variant):
    lossless, plain = Lossless(variant, normal(512, 1024)), Packed(variant, normal(512, 1024))
    assert lossless.num_bytes == plain.num_bytes - lossless.saved_bytes < 0.765 * plain.num_bytes


def test_a_weight_that_cannot_be_compressed_is_packed_as_it_is(variant):
    every_exponent = torch.randint(-(2**15), 2**15, (64, 128), dtype=torch.int16).view(torch.bfloat16)
    weight = torch.where(every_exponent.isnan(), 1.0, every_exponent).bfloat16()
    packing = Packing(variant)
    first, second = Lossless(variant, [weight], packing=packing), Lossless(variant, [normal(64, 128)], packing=packing)
    packing.run()
    assert first.saved_bytes == 0 < second.saved_bytes and packing.num_bytes == 2 * 64 * 128 * 2
    x, plain = torch.full((3, 128), 1e-30).bfloat16(), Packed(variant, weight)
    assert bits(first(x)) == bits(plain(x)) and bits(first.lookup(torch.arange(64))) == bits(weight)


def test_with_fewer_threads_than_planned_results_are_the_same(variant):
    lossless, x = Lossless(variant, normal(3000, 256)), torch.randn(40, 256).bfloat16()
    torch.set_num_threads(1)
    alone = bits(lossless(x))
    torch.set_num_threads(7)
    assert bits(lossless(x)) == alone


def test_a_missing_row_is_an_error(variant):
    lossless = Lossless(variant, normal(10, 8))
    with pytest.raises(IndexError, match="there is no row 10 among 10"):
        lossless.lookup(torch.tensor([3, 10]))


# -- the choice -----------------------------------------------------------------------------------------------------

GIGABYTE = 1 << 30


KERNELS = SimpleNamespace()


def chosen(setting: str, kernels_of_cpu=KERNELS, dtype=torch.bfloat16, size=GIGABYTE, quantized=False) -> bool:
    return weight_packing.compresses(setting, kernels_of_cpu, dtype, size, 4, quantized=quantized)


@pytest.mark.parametrize("speedups, expected", [((1.3, 1.0), True), ((1.05, 1.2), False), ((1.4, 0.9), False)])
def test_auto_compresses_where_one_row_gains_and_many_do_not_lose(monkeypatch, speedups, expected):
    asked = []

    def measured(_, rows):
        asked.append(rows)
        return list(speedups)

    monkeypatch.setattr(weight_packing, "speedups", measured)
    assert chosen("auto") is expected and asked == [(1, 4)]


def test_auto_measures_nothing_where_compression_is_impossible_or_useless(monkeypatch):
    monkeypatch.setattr(weight_packing, "speedups", lambda *_: pytest.fail("measured"))
    assert not chosen("auto", None) and not chosen("auto", dtype=torch.float32)
    assert not chosen("auto", size=1 << 20) and not chosen("auto", quantized=True) and not chosen("none")


@pytest.mark.parametrize("given", [{"kernels_of_cpu": None}, {"dtype": torch.float32}, {"quantized": True}])
def test_what_cannot_be_compressed_is_refused(given):
    with pytest.raises(ConfigError, match="`weight_packing=lossless` needs our CPU kernels and weights in bfloat16"):
        chosen("lossless", **given)


def test_speedups_are_measured(variant, monkeypatch):
    monkeypatch.setattr(weight_packing, "COPIES", 2)
    assert all(0.01 < ratio < 100 for ratio in weight_packing.speedups(variant, (1, 16)))


@pytest.mark.parametrize("name", ["qwen3", "llama-bias", "mixtral", "gpt2"])
async def test_a_model_computes_the_same_bits(name, tmp_path):
    folder = make(name, tmp_path, dtype=torch.bfloat16)
    found = {}
    for packing in ("none", "lossless"):
        config = EngineConfig(model=str(folder), device="cpu", dtype="bfloat16", weight_packing=packing, num_blocks=64)
        found[packing], *_ = await serve(config, together=True)
    assert found["none"] == found["lossless"]


@pytest.mark.parametrize("packing", ["none", "lossless"])
def test_an_engine_says_how_its_weights_are_packed(packing):
    config = EngineConfig(model="builtin", device="cpu", dtype="bfloat16", weight_packing=packing, num_blocks=64)
    _, info, resolved = build_engine(config)
    assert resolved.weight_packing == info.weight_packing == packing
    plain = 2 * info.num_params
    assert info.roofline is not None
    for size in (info.weights_bytes, info.roofline.weights_bytes):
        assert (
            (0.7 if packing == "lossless" else 0.99) * plain < size < (0.9 if packing == "lossless" else 1.01) * plain
        )
