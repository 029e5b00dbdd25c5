"""Products of a single row in Triton's interpreter; test_paged_gpu.py runs this file.

    TRITON_INTERPRET=1 python -m pytest tests/engine/interpreted_single.py

The interpreter has none of the instructions for several numbers at once, so the kernels convert them one by one here.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.models.executor import Eager
from engine.models.families.family import NormKind
from engine.models.gpu import executor as on_gpu
from engine.models.gpu import products as gpu_products
from engine.models.gpu import stored_rows
from engine.models.gpu.executor import OnGPU
from engine.models.gpu.form import ROUNDED, Form
from engine.models.gpu.gates import is_gated
from engine.models.gpu.products import after_norm, before_residual
from engine.models.gpu.single import MOST_COLUMNS, REGISTERS, ROWS, SINGLES, Row, Single, _quantized
from engine.models.gpu.skinny import AS_STORED, AsStored, Tiles, multiply
from engine.models.gpu.weights import GPUProduct, random_weight, relative
from engine.models.layers import ACTIVATIONS, Gated, Linear
from engine.models.norms import RMSNorm, make_norm
from tests.engine.interpreted_layers import cache_of, inside, model_of, step
from tests.engine.interpreter import prepare
from tests.engine.test_attention import CPU

prepare()
SMALL, ROW = Single(1, 64), Row(8, 8)
FORMS = [
    ROUNDED[8],
    ROUNDED[4],
    Form(4, 128, has_zeros=True, scale=torch.float16),
    Form(8, 32, has_zeros=True, scale=torch.float16),
    Form(8, is_float=True),
    Form(8, 128, is_float=True),
]
WIDE = NormKind(is_wide=True, offset=1.0)


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def norm_of(size: int, dtype: torch.dtype = torch.float16, kind: NormKind | None = None) -> RMSNorm:
    norm = make_norm(size, 1e-6, dtype, CPU, kind or NormKind())
    norm.weight.copy_(numbers(size, seed=7))
    return norm


def expected(x: Tensor, weight: Tensor, bias: Tensor, norm: RMSNorm | None, activation: str) -> Tensor:
    """Return the product in float64, of what torch's norm returns."""
    found = (x if norm is None else norm(x)).double() @ weight.double().T + bias.double()
    if not is_gated(activation):
        return found.relu().square() if activation else found
    gate, up = found.chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate) * up


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("activation", ["", "silu", "gelu_pytorch_tanh", "relu2"])
@pytest.mark.parametrize("columns, rows", [(64, 40), (200, 33), (8200, 5)])  # the last ones in several steps
def test_a_row_is_normalized_multiplied_gated_and_added(columns, rows, activation, has_norm):
    x, weight = inside(numbers(1, columns)), numbers(rows * (1 + is_gated(activation)), columns)
    bias, residual = numbers(len(weight)), numbers(1, rows, seed=3)
    norm, stream = norm_of(columns) if has_norm else None, inside(residual.clone())
    want = expected(x, weight, bias, norm, activation)
    assert multiply(
        x, weight, SMALL, bias=bias, residual=stream, activation=activation, norm=norm, scale=0.5
    ) is stream  # fmt: skip
    assert relative(stream, 0.5 * want + residual.double()) < 5e-4
    alone = multiply(x, weight, SMALL, bias=bias, activation=activation, norm=norm, dtype=torch.float32)
    assert alone.dtype == torch.float32 and relative(alone, want) < 5e-4


@pytest.mark.parametrize("single", SINGLES)
def test_every_tile_of_a_plain_weight_computes_the_product(single):
    x, weight = inside(numbers(1, 1030, dtype=torch.float32)), numbers(70, 1030, dtype=torch.float32)
    assert relative(multiply(x, weight, single), x.double() @ weight.double().T) < 1e-6


@pytest.mark.parametrize("activation, has_norm", [("", False), ("", True), ("silu", True), ("relu2", False)])
@pytest.mark.parametrize("columns, rows", [(200, 40), (1024, 24), (4100, 24)])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_a_quantized_weight_does_the_same(form, columns, rows, activation, has_norm):
    weight, plain = random_weight(form, rows * (1 + is_gated(activation)), columns, torch.Generator().manual_seed(1))
    weight.use({1: ROW})
    product, x = GPUProduct([weight], numbers(len(plain)), torch.float16), inside(numbers(1, columns))
    norm, residual = norm_of(columns) if has_norm else None, numbers(1, rows, seed=3)
    assert product.fuses(x, is_gated=bool(activation))
    found = product.fused(x, activation=activation, norm=norm)
    assert relative(found, expected(x, plain, product.bias, norm, activation)) < 5e-4
    if not activation:
        stream = inside(residual.clone())
        assert product.fused(x, residual=stream, norm=norm) is stream
        assert relative(stream, expected(x, plain, product.bias, norm, "") + residual.double()) < 5e-4


@pytest.mark.parametrize("row", ROWS)
def test_every_tile_of_a_quantized_weight_computes_the_product(row):
    """Programs compute several tiles, one after the other."""
    for form in (ROUNDED[4], Form(8, 128, is_float=True)):
        weight, plain = random_weight(form, 1500, 192, torch.Generator().manual_seed(1))
        product, x = GPUProduct([weight], None, torch.float16), inside(numbers(1, 192))
        assert relative(product.multiply_in(row, x), x.double() @ plain.double().T) < 5e-4


def test_the_parts_of_a_weight_are_computed_one_after_the_other():
    draw = torch.Generator().manual_seed(2)
    (first, plain), (last, other) = random_weight(ROUNDED[4], 40, 256, draw), random_weight(ROUNDED[8], 9, 256, draw)
    product, x = GPUProduct([first, last], numbers(49), torch.float16), inside(numbers(1, 256))
    want = expected(x, torch.cat([plain, other]), product.bias, None, "")
    assert relative(product(x), want) < 5e-4
    stream = torch.zeros(1, 49, dtype=torch.float16)
    assert relative(product.fused(x, residual=inside(stream)), want) < 5e-4
    assert not product.fuses(x, is_gated=True), "gate and up are the rows of one weight"


@pytest.mark.parametrize("what", ["float32", "rows", "columns", "order", "alike"])
def test_what_the_kernel_does_not_take_is_computed_by_the_others(what):
    columns = 66 if what == "columns" else 64
    weight, plain = random_weight(Form(8), 40, columns, torch.Generator().manual_seed(2))
    dtype = torch.float32 if what == "float32" else torch.float16
    product, x = GPUProduct([weight], None, dtype), numbers(2 if what == "rows" else 1, columns, dtype=dtype)
    if what == "order":
        weight.order = torch.arange(columns).flip(0)
        plain = plain[:, weight.order]
    if what == "alike":
        product.unify()
    assert not product.fuses(x, is_gated=False)
    assert relative(product(x), x.double() @ plain.double().T) < 5e-4


def linear_of(form: Form, outputs: int, columns: int, gate: str = "") -> tuple[Linear, Tensor]:
    """Return a layer with a quantized weight, and the weight."""
    weight, plain = random_weight(form, outputs * (2 if gate else 1), columns, torch.Generator().manual_seed(4))
    linear: Linear
    if gate:
        linear = Gated(outputs, columns, False, torch.float16, CPU, activation=gate)
    else:
        linear = Linear(outputs, columns, False, torch.float16, CPU)
    linear._use([weight], wide=False)
    return linear, plain


@pytest.mark.parametrize("kind", [NormKind(), WIDE, NormKind(is_centered=True)], ids=["plain", "wide", "centered"])
def test_a_norm_that_the_kernel_does_not_compute_has_a_kernel_of_its_own(kind, monkeypatch):
    linear, plain = linear_of(Form(8), 24, 64, "silu")
    norm, x, calls = norm_of(64, kind=kind), inside(numbers(1, 64)), []
    own = gpu_products.add_norm
    monkeypatch.setattr(gpu_products, "add_norm", lambda *args: calls.append("norm") or own(*args))
    found = after_norm(linear, AsStored(), x, None, norm, activation="silu")
    assert relative(found, expected(x, plain, torch.zeros(48), norm, "silu")) < 2e-3
    assert calls == ([] if kind == NormKind() else ["norm"])


def test_a_row_that_is_added_before_the_norm_is_added_once():
    linear, plain = linear_of(Form(8), 24, 64)
    norm, x, added = norm_of(64), numbers(1, 64), numbers(1, 64, seed=5)
    want, stream = norm(x + added), inside(x.clone())
    found = after_norm(linear, AsStored(), stream, added, norm, activation="")
    assert torch.equal(stream, x + added)
    assert relative(found, expected(want, plain, torch.zeros(24), None, "")) < 5e-4
    assert before_residual(linear, None, stream, torch.zeros(1, 24)) is not None, "the next norm adds it"


def few(model: Any, choices: Any) -> OnGPU:
    return OnGPU(model.spec, model.embedding, model.layers, model.rotaries, choices=choices)


@pytest.mark.parametrize("name", ["llama-bias", "qwen3"])
def test_steps_of_one_row_take_six_launches_per_layer_and_equal_torch(tmp_path, monkeypatch, name):
    model, calls = model_of(name, tmp_path), []
    monkeypatch.setattr(gpu_products, "add_norm", lambda *_: calls.append("norm"))
    monkeypatch.setattr(gpu_products, "gated", lambda *_: calls.append("gate"))
    eager = next(executor for executor in model.executors if isinstance(executor, Eager))
    ours, torchs = cache_of(model), cache_of(model)
    executor = few(model, {1: Tiles(SMALL, SMALL, SMALL, SMALL)})
    with torch.inference_mode():
        for length in range(3):
            row = [([0, 1], length, 1)]
            found, want = executor.run(step(model, row, ours)), eager.run(step(model, row, torchs))
            torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)
    assert calls == []


def test_a_mixture_is_tried_with_one_row_at_a_time(tmp_path, monkeypatch):
    """Several tokens show more than one, of which another expert may be chosen."""
    model, counts = model_of("qwen3_moe", tmp_path), []
    parts = model.spec, model.embedding, model.layers, model.rotaries
    run = OnGPU.run
    monkeypatch.setattr(OnGPU, "run", lambda self, forward: counts.append(len(forward.ids)) or run(self, forward))
    assert on_gpu.trial(*parts, choices={1: Tiles(qkv=SMALL)}) is None
    assert counts == [1] * on_gpu.MANY_TOKENS
    monkeypatch.setattr("engine.models.layers.multiply", lambda *args, **more: multiply(*args, **more).neg_())
    assert "wrong results" in str(on_gpu.trial(*parts, choices={1: Tiles(qkv=SMALL)}))


@pytest.mark.parametrize(
    "times, chosen",
    [
        ([3.0, 2.0, 2.5], AS_STORED[1]),
        ([3.0, 2.9, 2.0], AS_STORED[1]._replace(gate_up=None)),
        ([2.0, 3.0, 1.99], None),
    ],
)
def test_products_compute_what_is_around_them_where_that_is_faster(tmp_path, monkeypatch, times, chosen):
    model, left = quantized(tmp_path), iter(times)

    def seconds(works: Any, device: torch.device) -> float:
        for work in works:
            work()
        return next(left)

    monkeypatch.setattr(stored_rows, "seconds", seconds)
    found = stored_rows.fastest(model.layers, "silu")
    assert found == ({} if chosen is None else {1: chosen})
    monkeypatch.setattr(stored_rows, "seconds", lambda *_: 1 / 0)
    assert stored_rows.fastest(model.layers, "silu") == {}, "a measurement that fails changes nothing"


def quantized(folder: Any) -> Any:
    """Return a model in float16 whose weights have 8 bits."""
    model = model_of("qwen3", folder, dtype="float16")
    for linear in (linear for layer in model.layers for linear in layer.linears):
        weight, _ = random_weight(Form(8), *linear.weight.shape, torch.Generator().manual_seed(4))
        weight._scales.mul_(0.05)
        linear._use([weight], wide=False)
    return model


@pytest.mark.parametrize("tiles", [AS_STORED[1], AS_STORED[1]._replace(gate_up=None)])
def test_a_quantized_model_computes_the_same_with_what_is_around_its_products(tmp_path, tiles):
    model = quantized(tmp_path)
    caches = [cache_of(model) for _ in range(2)]
    with torch.inference_mode():
        for rows in ([([0, 1], 0, 1)], [([0, 1], 1, 1)], [([0, 1], 2, 1), ([2, 3], 0, 1)]):
            fused, apart = (
                few(model, each).run(step(model, rows, cache))
                for each, cache in zip(({1: tiles}, {}), caches, strict=True)
            )
            assert not fused.isnan().any() and relative(fused, apart) < 5e-3


def test_no_other_row_is_read_or_written():
    weight = inside(numbers(20, 64))
    out = torch.full((3, 20), math.inf, dtype=torch.float16)
    multiply(inside(numbers(1, 64)), weight, SMALL, residual=out[1:2].zero_())
    assert out[0].isinf().all() and out[2].isinf().all() and not out[1].isnan().any()


def test_a_head_of_which_no_row_is_asked_returns_none():
    """A chunk of a prompt without its end has no logits."""
    head = Linear(50, 64, False, torch.float16, CPU)
    head.weight.copy_(numbers(50, 64))
    head.use_for_few({1: SMALL})
    assert head(numbers(1, 64)).shape == (1, 50)
    assert head(torch.zeros(0, 64, dtype=torch.float16)).shape == (0, 50)
    weight, _ = random_weight(ROUNDED[4], 50, 64, torch.Generator().manual_seed(2))
    assert GPUProduct([weight], None, torch.float16)(torch.zeros(0, 64, dtype=torch.float16)).shape == (0, 50)


def test_programs_fit_into_a_multiprocessor_with_any_number_of_columns():
    for columns in (64, 8193, 16384, MOST_COLUMNS):
        for row in ROWS:
            constants = _quantized(columns, ROUNDED[4], row, "", True)
            assert constants["num_warps"] <= 16 and constants["maxnreg"] * constants["num_warps"] * 32 <= REGISTERS
            assert constants["CHUNKS"] * constants["WORDS"] * 8 >= columns
    weight, _ = random_weight(ROUNDED[4], 3, MOST_COLUMNS + 64, torch.Generator().manual_seed(2))
    assert weight.row(numbers(1, MOST_COLUMNS + 64)) is None, "other kernels compute it"
