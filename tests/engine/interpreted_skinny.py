"""Products of few rows in Triton's interpreter; test_paged_gpu.py runs this file.

    TRITON_INTERPRET=1 python -m pytest tests/engine/interpreted_skinny.py

The interpreter truncates where a GPU rounds to bfloat16, so results are compared in float32 and float16.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from engine.kernels.gpu import skinny as skinny_kernels
from engine.models import layers
from engine.models.executor import Eager
from engine.models.gpu import executor as on_gpu
from engine.models.gpu import products as gpu_products
from engine.models.gpu import skinny
from engine.models.gpu.executor import OnGPU
from engine.models.gpu.skinny import CANDIDATES, Tile, Tiles, fastest, multiply, tiles_of
from engine.models.layers import ACTIVATIONS, Linear
from tests.engine.interpreted_layers import CHUNKS, DECODES, MIXED, cache_of, inside, model_of, step
from tests.engine.interpreter import prepare
from tests.engine.recorder import Recorder
from tests.engine.test_attention import CPU

prepare()
SMALL = Tile(16, 16, 2, 2)
IN_PARTS = Tile(16, 16, 2, 2, columns=32, parts=3)


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(shape[0])).to(dtype)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float16, 2e-3)])
@pytest.mark.parametrize("tokens, rows, columns", [(1, 16, 128), (3, 40, 200), (17, 33, 64)])
def test_bias_and_product_are_those_in_float64(tokens, rows, columns, dtype, tolerance):
    x, weight = inside(numbers(tokens, columns, dtype=dtype)), numbers(rows, columns, dtype=dtype)
    bias, want = numbers(rows, dtype=dtype), x.double() @ weight.double().T
    for found, wanted in (
        (multiply(x, weight, SMALL, bias=bias), want + bias.double()), (multiply(x, weight, SMALL), want)
    ):  # fmt: skip
        assert float((found.double() - wanted).norm() / wanted.norm()) < tolerance


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_gate_is_computed_with_its_product(activation):
    x, weight, bias = inside(numbers(3, 72)), numbers(2 * 24, 72), numbers(48)
    gate, up = (x @ weight.T + bias).chunk(2, dim=-1)
    found = multiply(x, weight, SMALL, bias=bias, activation=activation)
    torch.testing.assert_close(found, ACTIVATIONS[activation](gate) * up, rtol=1e-4, atol=1e-4)


def test_without_a_gate_the_product_is_squared_above_0_also_if_it_is_computed_in_parts():
    x, weight, bias = inside(numbers(3, 300)), numbers(24, 300), numbers(24)
    want = (x @ weight.T + bias).relu().square()
    for tile in (SMALL, SMALL._replace(parts=2), SMALL._replace(parts=2, is_serial=True)):
        found = multiply(x, weight, tile, bias=bias, activation="relu2")
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)


def test_the_residual_is_added_in_place_and_rounded_once():
    x, weight, residual = numbers(3, 64, dtype=torch.float16), numbers(24, 64, dtype=torch.float16), numbers(3, 24)
    stream = inside(residual.half())
    want = (residual.half().double() + x.double() @ weight.double().T).half()
    assert multiply(x, weight, SMALL, residual=stream) is stream
    torch.testing.assert_close(stream, want, rtol=1e-3, atol=0)


def test_a_scaled_product_is_added_to_the_residual():
    x, weight, bias, residual = numbers(3, 64), numbers(24, 64), numbers(24), numbers(3, 24)
    stream = inside(residual.clone())
    multiply(x, weight, SMALL, bias=bias, residual=stream, scale=0.22)
    torch.testing.assert_close(stream, residual + 0.22 * (x @ weight.T + bias), rtol=1e-5, atol=1e-5)


def test_results_can_be_wide_and_rows_of_x_can_lie_apart():
    x, weight = numbers(3, 128, dtype=torch.float16), numbers(24, 64, dtype=torch.float16)
    found = multiply(x[:, 64:], weight, SMALL, dtype=torch.float32)
    torch.testing.assert_close(found.double(), x[:, 64:].double() @ weight.double().T, rtol=1e-5, atol=1e-5)


@pytest.fixture
def ordered(monkeypatch):
    """Products of tiles that add in one order, as matrix units do: numpy's order depends on a row's place."""

    def dot(_: Any, a: Any, b: Any, total: Any, *__: Any) -> Any:
        product = (a.data[:, :, None].astype(np.float32) * b.data[None].astype(np.float32)).sum(1)
        return TensorHandle(total.data + product, total.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)


@pytest.mark.parametrize("parts, columns", [(2, 200), (4, 128), (4, 300)])
def test_sums_in_parts_are_added_in_one_order_whichever_part_is_last(parts, columns, monkeypatch):
    tile, whole = Tile(16, 16, 2, 2, columns=64, parts=parts), Tile(16, 16, 2, 2, columns=64)
    x, weight, bias, residual = numbers(19, columns), numbers(40, columns), numbers(40), numbers(19, 40)
    stream = inside(residual.clone())
    for _ in range(2):  # the counters are left at zero
        found = multiply(x, weight, tile, bias=bias)
        torch.testing.assert_close(found, multiply(x, weight, whole, bias=bias), rtol=1e-5, atol=1e-5)
    multiply(x, weight, tile, bias=bias, residual=stream)
    torch.testing.assert_close(stream, residual + found, rtol=1e-5, atol=1e-5)
    assert not skinny._arrived(x.device).any()


def test_the_head_of_few_rows_is_computed_by_what_was_faster(monkeypatch):
    head, times = Linear(50, 64, False, torch.float32, CPU), iter([3.0, 1.0, 1.0, 2.0])
    head.weight.copy_(numbers(50, 64))
    for module in (on_gpu, skinny):
        monkeypatch.setattr(module, "CANDIDATES", {1: (SMALL,), 16: (SMALL,)})
    monkeypatch.setattr(on_gpu, "is_measurable", lambda weight: True)
    monkeypatch.setattr(on_gpu, "seconds", lambda works, device: next(times))
    on_gpu.choose_head(head)
    used = []
    monkeypatch.setattr(layers, "multiply", lambda x, *args, **more: used.append(len(x)) or multiply(x, *args, **more))
    for rows in (1, 2, 16, 17):
        x = numbers(rows, 64)
        torch.testing.assert_close(head(x), x @ head.weight.T, rtol=1e-5, atol=1e-5)
    assert used == [1]


def test_tiles_that_do_not_fit_into_the_memory_of_a_gpu_are_not_tried(monkeypatch):
    for part, rows in itertools.product(Tiles._fields, CANDIDATES):
        assert skinny.candidates(part, rows, CPU)
    monkeypatch.setattr(skinny, "shared_memory", lambda device: 99 << 10)  # of GPUs for desktops
    assert skinny.candidates("gate_up", 16, CPU) == [Tile(16, 16, 2, 5)]
    assert set(skinny.candidates("down", 16, CPU)) > set(skinny.candidates("qkv", 16, CPU)) > {Tile(16, 16, 2, 5)}


@pytest.mark.usefixtures("ordered")
@pytest.mark.parametrize("tile", [SMALL, Tile(32, 16, 4, 2)])
def test_a_row_has_the_same_bits_among_any_others(tile):
    x, weight = numbers(70, 136), numbers(48, 136)
    whole = multiply(x, weight, tile, activation="silu")
    for first, last in [(0, 1), (5, 6), (69, 70), (3, 20), (1, 66)]:
        part = multiply(x[first:last].contiguous(), weight, tile, activation="silu")
        assert torch.equal(part, whole[first:last])


def test_rows_that_do_not_exist_are_neither_read_nor_written():
    x, weight = inside(numbers(2, 64)), inside(numbers(20, 64))
    out = torch.full((4, 20), math.inf)
    multiply(x, weight, SMALL, residual=out[1:3].zero_())
    assert out[0].isinf().all() and out[3].isinf().all() and not out[1:3].isnan().any()


def test_a_product_can_be_captured_and_replayed():
    recorder, x, weight, out = Recorder(), numbers(3, 64), numbers(2 * 24, 64), torch.zeros(3, 24)
    with recorder.kernels(skinny_kernels), torch.inference_mode():
        replay = recorder.capture(lambda: out.copy_(multiply(x, weight, SMALL, activation="silu")))
        x.mul_(-2)
        replay()
    gate, up = (x @ weight.T).chunk(2, dim=-1)
    torch.testing.assert_close(out, ACTIVATIONS["silu"](gate) * up, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama-bias", "qwen3"])
def test_steps_of_few_rows_take_eight_launches_and_equal_torch(tmp_path, monkeypatch, name):
    model, calls = model_of(name, tmp_path), []
    norm = gpu_products.add_norm
    monkeypatch.setattr(gpu_products, "add_norm", lambda *args: calls.append("norm") or norm(*args))
    monkeypatch.setattr(gpu_products, "gated", lambda *_: calls.append("gate"))
    tile = SMALL
    few = OnGPU(model.spec, model.embedding, model.layers, model.rotaries, choices={16: Tiles(tile, tile, tile, tile)})
    eager = next(executor for executor in model.executors if isinstance(executor, Eager))
    ours, torchs = cache_of(model), cache_of(model)
    with torch.inference_mode():
        for rows in (CHUNKS, MIXED, DECODES):
            found, want = few.run(step(model, rows, ours)), eager.run(step(model, rows, torchs))
            torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)
    assert calls == ["norm"] * (3 * 2 * len(model.layers))


@pytest.mark.parametrize("parts", [("qkv",), ("output",), ("gate_up", "down"), ("qkv", "gate_up")])
def test_each_product_can_be_torchs_or_ours(tmp_path, parts):
    model = model_of("qwen3", tmp_path)
    choices = {16: Tiles(**dict.fromkeys(parts, SMALL))}
    mixed = OnGPU(model.spec, model.embedding, model.layers, model.rotaries, choices=choices)
    eager = next(executor for executor in model.executors if isinstance(executor, Eager))
    with torch.inference_mode():
        found, want = (each.run(step(model, CHUNKS, cache_of(model))) for each in (mixed, eager))
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)


def test_the_number_of_rows_and_the_measured_times_choose_the_tiles():
    first, second, *_ = CANDIDATES[16]
    choices = {16: Tiles(qkv=first), 64: Tiles(qkv=second)}
    assert [tiles_of(choices, rows).qkv for rows in (1, 16, 17, 64, 65)] == [first, first, second, second, None]
    assert fastest({None: 10.0, first: 9.0, second: 8.0}) == second
    assert fastest({None: 10.0, first: 9.9}) is None  # within the noise


@pytest.fixture
def measurable(monkeypatch):
    """Let products be chosen as on a GPU, by these times."""
    times = {None: 2.0, SMALL: 1.0}
    monkeypatch.setattr(on_gpu, "is_measurable", lambda weight: True)
    monkeypatch.setattr(on_gpu, "choose_head", lambda head: None)
    only_small(monkeypatch)
    found = {**dict.fromkeys(Tiles._fields, times), "down": {None: 1.0}}
    monkeypatch.setattr(on_gpu, "measured", lambda *_: found)


def only_small(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (on_gpu, skinny):
        monkeypatch.setattr(module, "CANDIDATES", {16: (SMALL,)})
    monkeypatch.setattr(skinny, "IN_PARTS", {16: (IN_PARTS,)})


@pytest.mark.usefixtures("measurable")
def test_a_loaded_model_computes_the_products_that_were_faster(tmp_path, monkeypatch):
    model = model_of("qwen3", tmp_path)
    parts = model.spec, model.embedding, model.layers, model.rotaries
    assert on_gpu.choose(*parts) == {16: Tiles(SMALL, SMALL, SMALL, None)}
    calls = []
    monkeypatch.setattr("engine.models.layers.multiply", lambda *args, **_: calls.append(args) or multiply(*args, **_))
    with torch.inference_mode():
        model.executors[0].run(step(model, DECODES, cache_of(model)))
    assert len(calls) == 3 * len(model.layers)


@pytest.mark.usefixtures("measurable")
def test_a_kernel_that_fails_or_errs_leaves_the_products_to_torch(tmp_path, monkeypatch):
    model = model_of("qwen3", tmp_path)
    parts = model.spec, model.embedding, model.layers, model.rotaries
    monkeypatch.setattr("engine.models.layers.multiply", lambda *args, **options: multiply(*args, **options).neg_())
    assert "wrong results" in on_gpu.choose(*parts)
    monkeypatch.setattr("engine.models.layers.multiply", lambda *_, **__: 1 / 0)
    model = model_of("qwen3", tmp_path / "again")
    assert "torch computes all products: the Triton kernels do not run" in model.product.note


@pytest.mark.usefixtures("measurable")
def test_a_measurement_that_fails_leaves_the_products_to_torch(tmp_path, monkeypatch):
    def fails(*_: Any) -> None:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    monkeypatch.setattr(on_gpu, "measured", fails)
    model = model_of("qwen3", tmp_path)
    assert "could not be measured: CUDA error: operation not permitted" in model.product.note


def test_each_product_is_measured_with_every_tile_on_weights_of_several_layers(tmp_path, monkeypatch):
    model, counts = model_of("qwen3", tmp_path), []

    def seconds(works: Any, device: torch.device) -> float:
        for work in works:
            work()
        counts.append(len(works))
        return float(len(counts))

    monkeypatch.setattr(on_gpu, "seconds", seconds)
    only_small(monkeypatch)
    found = on_gpu.measured(model.layers, 16, "silu")
    assert {part: list(times) for part, times in found.items()} == {
        "qkv": [None, SMALL], "output": [None, SMALL, IN_PARTS], "gate_up": [None, SMALL],
        "down": [None, SMALL, IN_PARTS],
    }  # fmt: skip
    assert counts == [len(model.layers)] * 10
