"""Products in fp8 by torch, on the CPU with an emulation of torch._scaled_mm; interpreted_scaled.py has our kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from engine.models.gpu import measured_tiles, scaled
from engine.models.gpu.form import Form
from engine.models.gpu.tiles import MOST_ROWS
from engine.models.gpu.weights import GPUProduct, GPUWeight, random_weight

CPU = torch.device("cpu")
GROUP = scaled.GROUP
calls: list[tuple[int, int]] = []
written: list[int] = []  # addresses of results


def emulated(x: Tensor, weight: Tensor, **options: Any) -> Tensor:
    """Compute as torch._scaled_mm documents it, and insist on what its kernels for rows and for blocks need."""
    a, b = options["scale_a"], options["scale_b"]
    assert x.dtype == weight.dtype == torch.float8_e4m3fn and x.is_contiguous() and weight.t().is_contiguous()
    assert x.shape[1] == weight.shape[0] and x.shape[1] % 16 == weight.shape[1] % 16 == 0
    assert options["out_dtype"] == torch.bfloat16 and a.dtype == b.dtype == torch.float32
    calls.append((len(x), weight.shape[1]))
    if a.shape == (len(x), 1):
        bias = options["bias"]
        assert b.shape == (1, weight.shape[1]) and a.is_contiguous() and b.is_contiguous()
        assert bias.shape == (weight.shape[1],) and bias.is_contiguous() and bias.dtype == torch.bfloat16
        assert not options["use_fast_accum"]
        return (x.float() @ weight.float() * a * b + bias).bfloat16()
    groups = x.shape[1] // GROUP
    assert groups % 4 == 0, "torch's result is wrong then, and it says nothing"
    assert len(x) % 16 == 0 and a.shape == (len(x), groups) and a.stride() == (1, len(x))
    assert b.shape == (groups, -(-weight.shape[1] // GROUP)) and b.t().is_contiguous()
    wide = x.float() * a.repeat_interleave(GROUP, 1)
    scales = b.repeat_interleave(GROUP, 0).repeat_interleave(GROUP, 1)[:, : weight.shape[1]]
    written.append(options["out"].data_ptr())
    options["out"].copy_(wide @ (weight.float() * scales))
    return options["out"]


@pytest.fixture(autouse=True)
def emulation(monkeypatch):
    calls.clear()
    written.clear()
    monkeypatch.setattr(torch, "_scaled_mm", emulated)


def error(found: Tensor, want: Tensor) -> float:
    return float((found.double() - want.double()).norm() / want.double().norm())


def test_rows_are_quantized_with_scales_of_their_own():
    x = torch.tensor([[1.0, -2.0, 0.5], [0.0, 0.0, 0.0], [1e5, 3.0, 0.0]]).bfloat16()
    numbers, scales = scaled.quantize_rows(x)
    assert numbers.float().abs().amax(-1).tolist() == [448.0, 0.0, 448.0]
    torch.testing.assert_close(numbers.float() * scales, x.float(), rtol=2**-4, atol=1e-2 * 1e5 / 448)


@pytest.mark.parametrize("rows, columns", [(48, 128), (80, 384)])
def test_torch_multiplies_many_rows_by_a_weight_with_a_scale_per_row(rows, columns):
    weight, plain = random_weight(Form(8, is_float=True), rows, columns, torch.Generator().manual_seed(0))
    bias, x = torch.randn(rows).bfloat16(), torch.randn(MOST_ROWS + 1, columns).bfloat16()
    product = GPUProduct([weight], bias, torch.bfloat16)
    assert product.can_scale
    product.scale(by_torch={False: True})
    found = product(x)
    numbers, scales = scaled.quantize_rows(x)
    assert error(found, (numbers.double() * scales) @ plain.double().T + bias) < 5e-3  # one rounding to bfloat16
    assert error(found, x.double() @ plain.double().T + bias) < 4e-2  # that of activations in fp8
    assert calls == [(len(x), rows)]


@pytest.mark.parametrize(
    "form",
    [
        Form(8),
        Form(8, 64, is_float=True),
        Form(8, is_float=True, weights_only=True),
        Form(8, is_float=True),
        Form(4, 32),
    ],
)
@pytest.mark.parametrize(
    "rows, columns, options", [(32, 128, {}), (33, 128, {}), (32, 72, {}), (32, 128, {"wide": True})]
)
def test_only_fp8_with_a_scale_per_row_or_block_of_even_sizes_is(form, rows, columns, options):
    weight, _ = random_weight(form, rows, columns, torch.Generator().manual_seed(0))
    is_even = (rows, columns, options) == (32, 128, {})
    product = GPUProduct([weight], None, torch.bfloat16, **options)
    assert product.can_scale == (is_even and form == Form(8, is_float=True))


def test_scales_must_be_the_same_in_whole_blocks():
    form, draw = Form(8, GROUP, is_float=True), torch.Generator().manual_seed(0)
    weight, _ = random_weight(form, 2 * GROUP + 16, GROUP, draw)
    assert weight.may_scale and not weight.can_scale
    weight, _ = random_weight(form, 2 * GROUP + 16, GROUP, draw, in_blocks=True)
    assert weight.can_scale
    weight.tensors[1][0, 2 * GROUP + 3] *= 2
    assert not weight.can_scale


@pytest.mark.parametrize("columns, is_by_torch", [(4 * GROUP, True), (7 * GROUP, False), (2 * GROUP, False)])
def test_torch_takes_a_multiple_of_four_blocks_of_columns(columns, is_by_torch):
    weight, _ = random_weight(
        Form(8, GROUP, is_float=True), GROUP, columns, torch.Generator().manual_seed(0), in_blocks=True
    )
    weight.scale(by_torch=True)
    assert weight.is_scaled and weight.is_by_torch == is_by_torch


@pytest.mark.parametrize("is_wrong", [False, True])
@pytest.mark.parametrize("form", [Form(8, is_float=True), Form(8, GROUP, is_float=True)])
def test_a_product_of_torch_that_is_wrong_for_a_shape_is_not_used(monkeypatch, form, is_wrong):
    weight, plain = random_weight(form, 32, 4 * GROUP, torch.Generator().manual_seed(0), in_blocks=True)
    product = GPUProduct([weight], None, torch.bfloat16)
    product.scale(by_torch={False: True, True: True})
    monkeypatch.setattr(GPUWeight, "_dequantize", lambda _, x, bias, out: out.copy_(x.float() @ plain.T))
    monkeypatch.setattr(scaled, "quantize", lambda x: scaled.Quantized(*scaled._groups(x)))  # without Triton
    if is_wrong:
        monkeypatch.setattr(
            torch, "_scaled_mm", lambda x, w, **options: emulated(x, w, **options).mul_(1.0 + torch.eye(32)[0])
        )
    assert measured_tiles.choose([product], torch.bfloat16) != is_wrong
    assert weight.is_scaled and weight.is_by_torch != is_wrong and len(calls) == 1


def test_a_wrong_product_of_torchs_is_no_candidate(monkeypatch):
    form, seen = Form(8, GROUP, is_float=True), []
    weight, _ = random_weight(form, 32, 4 * GROUP, torch.Generator().manual_seed(0), in_blocks=True)
    product = GPUProduct([weight], None, torch.bfloat16)
    product.scale(by_torch={True: True})

    def fastest(products, dtype):
        seen.extend(tile for rows in (128, 256) for tile in measured_tiles._candidates(weight, rows, dtype))
        return weight.tiles

    monkeypatch.setattr(measured_tiles, "_is_right", lambda *_: False)
    monkeypatch.setattr(measured_tiles, "fastest", fastest)
    assert not measured_tiles.choose([product], torch.bfloat16)
    assert seen and not any(isinstance(tile, scaled.ByTorch) for tile in seen)


def test_parts_that_are_not_in_fp8_stay_as_they_are_if_torchs_product_is_wrong(monkeypatch):
    draw = torch.Generator().manual_seed(0)
    parts = [random_weight(form, 32, GROUP, draw)[0] for form in (Form(8), Form(8, is_float=True))]
    product = GPUProduct(parts, None, torch.bfloat16)
    product.scale(by_torch={False: True})
    monkeypatch.setattr(measured_tiles, "_is_right", lambda *_: False)
    assert not measured_tiles.choose([product], torch.bfloat16)
    assert [(part.is_scaled, part.is_by_torch) for part in parts] == [(False, False), (True, False)]


def test_tiles_of_weights_in_fp8_go_to_such_weights_alone():
    draw, form = torch.Generator().manual_seed(0), Form(8, GROUP, is_float=True)
    products = [
        GPUProduct([random_weight(form, 256, GROUP, draw, in_blocks=each)[0]], None, torch.bfloat16)
        for each in (True, False)
    ]
    for product in products:
        product.scale(by_torch={True: False})
    assert products[0].kind != products[1].kind


def test_padding_is_written_behind_the_result_and_not_copied(monkeypatch):
    monkeypatch.setattr(scaled, "quantize", lambda x: scaled.Quantized(*scaled._groups(x)))  # without Triton
    weight, _ = random_weight(
        Form(8, GROUP, is_float=True), 32, 4 * GROUP, torch.Generator().manual_seed(0), in_blocks=True
    )
    weight.scale(by_torch=True)
    weight.is_biased = False
    x = torch.randn(19, 4 * GROUP).bfloat16()
    room, apart = torch.empty(scaled.padded(19), 32, dtype=torch.bfloat16), torch.empty(19, 48, dtype=torch.bfloat16)
    found = []
    for out in (room[:19], apart[:, :32]):
        weight._multiply_by_torch(x, torch.zeros(32), out)
        found.append(out)
    assert (
        torch.equal(*found) and written[0] == room.data_ptr() and written[1] not in (room.data_ptr(), apart.data_ptr())
    )


@pytest.mark.parametrize("is_blocked", [False, True])
def test_the_trial_finds_a_product_that_does_not_wait_for_its_input_or_fails(monkeypatch, is_blocked):
    assert scaled.trial(CPU, is_blocked=is_blocked) is None
    monkeypatch.setattr(
        torch, "_scaled_mm", lambda x, *args, **options: emulated(torch.zeros_like(x), *args, **options)
    )
    wrong = "torch's product does not wait for its input, or is wrong"
    assert scaled.trial(CPU, is_blocked=is_blocked) == wrong

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED\nmore")

    monkeypatch.setattr(torch, "_scaled_mm", fails)
    assert scaled.trial(CPU, is_blocked=is_blocked) == "torch's product fails: CUBLAS_STATUS_NOT_SUPPORTED"
    assert scaled.objection(CPU) == scaled.objection_to_torch(CPU, is_blocked=is_blocked) == "it needs a CUDA device"
