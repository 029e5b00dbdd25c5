"""Products in fp8 with a scale per row, on the CPU with an emulation of torch._scaled_mm."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from engine.models import gpu_weights, scaled
from engine.models.gpu_form import Form
from engine.models.gpu_weights import SCALED_ROWS, GPUProduct, random_weight

CPU = torch.device("cpu")
calls: list[tuple[int, int]] = []


def emulated(x: Tensor, weight: Tensor, **options: Any) -> Tensor:
    """Compute as torch._scaled_mm documents it, and insist on what its row-wise kernel needs."""
    a, b, bias = options["scale_a"], options["scale_b"], options["bias"]
    assert x.dtype == weight.dtype == torch.float8_e4m3fn and x.is_contiguous() and weight.t().is_contiguous()
    assert x.shape[1] == weight.shape[0] and x.shape[1] % 16 == weight.shape[1] % 16 == 0
    assert a.shape == (len(x), 1) and b.shape == (1, weight.shape[1]) and a.dtype == b.dtype == torch.float32
    assert a.is_contiguous() and b.is_contiguous() and bias.shape == (weight.shape[1],) and bias.is_contiguous()
    assert options["out_dtype"] == bias.dtype == torch.bfloat16 and not options["use_fast_accum"]
    calls.append((len(x), weight.shape[1]))
    return (x.float() @ weight.float() * a * b + bias).bfloat16()


@pytest.fixture(autouse=True)
def emulation(monkeypatch):
    calls.clear()
    monkeypatch.setattr(torch, "_scaled_mm", emulated)


def test_rows_are_quantized_with_scales_of_their_own():
    x = torch.tensor([[1.0, -2.0, 0.5], [0.0, 0.0, 0.0], [1e5, 3.0, 0.0]]).bfloat16()
    numbers, scales = scaled.quantize(x)
    assert numbers.float().abs().amax(-1).tolist() == [448.0, 0.0, 448.0]
    torch.testing.assert_close(numbers.float() * scales, x.float(), rtol=2**-4, atol=1e-2 * 1e5 / 448)


@pytest.mark.parametrize("rows, columns, piece", [(48, 64, 1 << 26), (80, 112, 32 * 112), (32, 144, 1)])
def test_many_rows_are_multiplied_in_fp8(monkeypatch, rows, columns, piece):
    monkeypatch.setattr(gpu_weights, "PIECE_NUMBERS", piece)
    weight, plain = random_weight(Form(8, is_float=True), rows, columns, torch.Generator().manual_seed(0))
    bias, x = torch.randn(rows).bfloat16(), torch.randn(SCALED_ROWS + 1, columns).bfloat16()
    product = GPUProduct([weight], bias, torch.bfloat16)
    assert product.can_scale
    product.scale()
    found = product(x)
    numbers, scales = scaled.quantize(x)
    want = (numbers.double() * scales) @ plain.double().T + bias
    assert float((found.double() - want).norm() / want.norm()) < 5e-3  # one rounding to bfloat16
    exact = x.double() @ plain.double().T + bias
    assert float((found.double() - exact).norm() / exact.norm()) < 4e-2  # that of activations in fp8
    assert sum(count for _, count in calls) == rows and all(tokens == len(x) for tokens, _ in calls)


@pytest.mark.parametrize(
    "form, rows, columns, options",
    [
        (Form(8), 32, 64, {}),
        (Form(8, 128, is_float=True), 32, 128, {}),
        (Form(8, is_float=True), 33, 64, {}),
        (Form(8, is_float=True), 32, 72, {}),
        (Form(8, is_float=True), 32, 64, {"wide": True}),
    ],
)
def test_other_weights_are_not(form, rows, columns, options):
    weight, _ = random_weight(form, rows, columns, torch.Generator().manual_seed(0))
    assert not GPUProduct([weight], None, torch.bfloat16, **options).can_scale


def test_the_trial_finds_a_product_that_does_not_wait_for_its_input_or_fails(monkeypatch):
    assert scaled.trial(CPU) is None
    monkeypatch.setattr(
        torch, "_scaled_mm", lambda x, *args, **options: emulated(torch.zeros_like(x), *args, **options)
    )
    assert scaled.trial(CPU) == "torch's product does not wait for its input, or is wrong"

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED\nmore")

    monkeypatch.setattr(torch, "_scaled_mm", fails)
    assert scaled.trial(CPU) == "torch's product fails: CUBLAS_STATUS_NOT_SUPPORTED"
    assert scaled.objection(CPU) == "it needs a CUDA device"
