"""Products in fp8 in Triton's interpreter; test_paged_gpu.py runs this file.

    TRITON_INTERPRET=1 python -m pytest tests/engine/interpreted_scaled.py

torch's own products are emulated as in test_scaled.py.
"""

from __future__ import annotations

import pytest
import torch

from engine.kernels.gpu import scaled as kernels
from engine.models.gpu import measured_tiles, scaled
from engine.models.gpu.form import Form
from engine.models.gpu.scaled import ByTorch, Narrow
from engine.models.gpu.tiles import MOST_ROWS, TILES, candidates
from engine.models.gpu.weights import GPUProduct, random_weight
from tests.engine.interpreter import prepare
from tests.engine.test_scaled import calls, emulated, error

prepare()
GROUP = scaled.GROUP
BLOCKS, ROWS = Form(8, GROUP, is_float=True), Form(8, is_float=True)


def test_kernels_have_the_constants_of_their_launches():
    assert (kernels.GROUP.value, kernels.LARGEST.value) == (GROUP, scaled.LARGEST)


def groups(x: torch.Tensor) -> torch.Tensor:
    """Return x as its groups hold it in fp8."""
    parts = x.float().view(len(x), -1, GROUP)
    scales = parts.abs().amax(-1, keepdim=True) / scaled.LARGEST
    scales = torch.where(scales > 0, scales, 1.0)
    return ((parts / scales).to(torch.float8_e4m3fn).float() * scales).view(x.shape)


@pytest.mark.parametrize("tokens", [1, 5, 16, 33])
def test_groups_are_quantized_with_scales_of_their_own_and_padded_with_zeros(tokens):
    x = torch.randn(tokens, 3 * GROUP).bfloat16()
    x[0, :GROUP] = 0
    found = scaled.quantize(x)
    rows = scaled.padded(tokens)
    assert found.numbers.shape == (rows, 3 * GROUP) and found.scales.shape == (3, rows)
    plain = found.numbers.float().view(rows, 3, GROUP) * found.scales.t()[..., None]
    assert torch.equal(plain.view(rows, -1)[:tokens], groups(x))
    assert not found.numbers[tokens:].float().any() and not found.numbers[0, :GROUP].float().any()
    assert torch.equal(found.scales[0, :1], torch.ones(1))


# The last one has several tiles of tokens.
TILES_TRIED = Narrow(16, 64, 4, 4, 4), Narrow(16, 128, 4, 4), Narrow(64, 64, 4, 4, 2), Narrow(8, 64, 4, 4, 3)


@pytest.mark.parametrize("tile", TILES_TRIED)
@pytest.mark.parametrize("form", [BLOCKS, ROWS])
@pytest.mark.parametrize("tokens, rows, columns", [(2, 144, 3 * GROUP), (16, 80, 5 * GROUP)])
def test_a_product_in_fp8_is_that_of_the_numbers_of_both(tile, form, tokens, rows, columns):
    weight, plain = random_weight(form, rows, columns, torch.Generator().manual_seed(0), in_blocks=True)
    bias, x = torch.randn(rows).bfloat16(), torch.randn(tokens, columns).bfloat16()
    product = GPUProduct([weight], bias, torch.bfloat16)
    product.scale(by_torch={True: False, False: False})
    wide = torch.full((tokens, rows + 16), torch.nan, dtype=torch.bfloat16)
    for _ in range(2):  # what counts the parts is zero again
        weight.multiply_in(tile, x, bias, wide[:, :rows])
        assert error(wide[:, :rows], groups(x).double() @ plain.double().T + bias) < 5e-3
    assert wide[:, rows:].isnan().all()
    assert 1e-3 < error(wide[:, :rows], x.double() @ plain.double().T + bias) < 4e-2


@pytest.mark.parametrize("tokens", [2, 40, 200, MOST_ROWS + 1])
@pytest.mark.parametrize("has_bias", [False, True])
def test_each_number_of_rows_is_multiplied_in_fp8_but_one_alone(monkeypatch, tokens, has_bias):
    calls.clear()
    monkeypatch.setattr(torch, "_scaled_mm", emulated)
    draw = torch.Generator().manual_seed(0)
    weights = [random_weight(BLOCKS, rows, 4 * GROUP, draw, in_blocks=True) for rows in (GROUP, 48)]
    x = torch.randn(tokens, 4 * GROUP).bfloat16()
    for count in (1, 2):
        parts, plain = [weight for weight, _ in weights[:count]], torch.cat([each for _, each in weights[:count]])
        bias = torch.randn(len(plain)).bfloat16() if has_bias else None
        product, zeros = GPUProduct(parts, bias, torch.bfloat16), torch.zeros(len(plain))
        product.scale(by_torch={True: True})
        added = zeros if bias is None else bias
        found = product(x)
        assert found.shape == (tokens, len(plain))
        assert error(found, groups(x).double() @ plain.double().T + added) < 6e-3
        assert error(product(x[:1]), x[:1].double() @ plain.double().T + added) < 5e-3
    padded = scaled.padded(tokens)
    assert calls == ([(padded, GROUP), (padded, GROUP), (padded, 48)] if tokens > MOST_ROWS else [])


def test_without_torchs_product_many_rows_are_multiplied_by_a_dequantized_weight():
    weight, plain = random_weight(ROWS, 64, GROUP, torch.Generator().manual_seed(0))
    product, x = GPUProduct([weight], None, torch.bfloat16), torch.randn(MOST_ROWS + 1, GROUP).bfloat16()
    product.scale(by_torch={False: False})
    assert error(product(x), x.double() @ plain.double().T) < 5e-3


def test_tiles_of_weights_in_fp8_are_measured_beside_that_of_others():
    weight, _ = random_weight(ROWS, 64, GROUP, torch.Generator().manual_seed(0))
    assert measured_tiles._candidates(weight, 128, torch.bfloat16) == [*candidates(128, ROWS)]
    weight.scale(by_torch=True)
    found = measured_tiles._candidates(weight, 128, torch.bfloat16)
    assert found == [TILES[128], *scaled.CANDIDATES[128]] and ByTorch() in found
    assert ByTorch() not in measured_tiles._candidates(weight, 128, torch.float16)
    assert measured_tiles._candidates(weight, 1, torch.bfloat16) == [*candidates(1, ROWS)]
