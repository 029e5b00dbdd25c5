"""Matmuls with weights in GGUF blocks against float64 on the numbers that the gguf package reads from the blocks."""

from __future__ import annotations

import random

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor

from engine.kernels import build, library
from engine.kernels.blocks import FORMATS, Q4_Z, Blocks, in_several_formats
from engine.kernels.library import Kernels
from engine.kernels.matmul import BlockRows
from tests.engine.test_kernels import drawn, error, kernels, needs_library
from tests.engine.test_kernels_quantized import in_groups, rounded

pytestmark = [pytest.mark.usefixtures("same_threads_after"), needs_library]

SHAPES = [(1, 256), (33, 512), (130, 256), (64, 1024)]


@pytest.fixture(params=build.variants("blocks"))
def variant(request) -> Kernels:
    _, features = library.load(build.library())
    if not library._quantizes(request.param, features):
        pytest.skip("this processor has no VNNI")
    return kernels(request.param)


@pytest.fixture(params=FORMATS, ids=lambda number: FORMATS[number].name)
def number(request) -> int:
    return request.param


def in_blocks(
    rows: int, columns: int, number: int, dtype: torch.dtype, *, seed: int = 0, interleaved: int = 0
) -> BlockRows:
    """Return random blocks: every bit pattern is a weight, except scales that are not finite."""
    form = FORMATS[number]
    bits = np.random.default_rng(seed)
    blocks = bits.integers(0, 256, (rows * columns // form.block, form.block_bytes), dtype=np.uint8)
    if form.is_coded:
        blocks[:, 0] = bits.integers(108, 124, len(blocks))
    for start in {"MXFP4": [], "Q6_K": [208]}.get(
        form.name, [0, 2] if form.name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else [0]
    ):
        scales = (bits.normal(size=len(blocks)) / (64 if form.block == 32 else 64 * 64)).astype(np.float16)
        blocks[:, start : start + 2] = scales.view(np.uint8).reshape(-1, 2)
    data = torch.from_numpy(blocks.reshape(rows, -1))
    return BlockRows(data, (rows, columns), number, dtype, interleaved)


def plain(part: BlockRows) -> Tensor:
    """Return the numbers of the blocks, of GGUF types according to the gguf package, float64 [rows, columns]."""
    if part.format == Q4_Z:
        blocks = part.data.unflatten(1, (-1, 19))
        scales = blocks[..., :2].contiguous().view(torch.float16).double()
        zeros, nibbles = blocks[..., 2:3].view(torch.int8), blocks[..., 3:]
        weight = (scales * (torch.cat((nibbles & 15, nibbles >> 4), -1) + zeros.double())).flatten(1)
    else:
        weight = torch.from_numpy(gguf.dequantize(part.data.numpy(), Type(part.format))).double()
    if part.interleaved:
        weight = weight.unflatten(0, (-1, part.interleaved // 2, 2)).transpose(1, 2).flatten(0, 2)
    return weight


def rounded_finely(x: Tensor, size: int) -> Tensor:
    """Return x quantized to two bytes and back: what the first rounds away is rounded to 1/128 of its step."""
    groups = in_groups(x, size)
    step = groups.abs().amax(-1, keepdim=True) / 127
    coarse = (groups / step).round()
    return ((coarse + ((groups / step - coarse) * 128).round() / 128) * step).double().flatten(1)


def products(x: Tensor, part: BlockRows, activation_bytes: int = 1) -> Tensor:
    to_bytes = rounded if activation_bytes == 1 else rounded_finely
    return to_bytes(x, FORMATS[part.format].group) @ plain(part).T


def test_the_table_of_formats_is_that_of_the_gguf_package():
    for number, form in FORMATS.items():
        if number == Q4_Z:
            continue  # our own
        assert Type(number).name == form.name
        assert gguf.GGML_QUANT_SIZES[Type(number)] == (form.block, form.block_bytes)


@pytest.mark.parametrize("shape", SHAPES)
def test_products_equal_those_of_the_numbers_in_the_blocks(variant, dtype, number, shape):
    part, bias = in_blocks(*shape, number, dtype), drawn(shape[0], dtype=dtype)
    packed, biased = Blocks(variant, [part]), Blocks(variant, [part], bias)
    wide = Blocks(variant, [part], bias, wide=True)
    for rows in (1, 2, 3, 5, 12, 13, 29, 100):
        x, residual = drawn(rows, shape[1], dtype=dtype), drawn(rows, shape[0], dtype=dtype)
        rounding = 2**-8 if dtype == torch.bfloat16 else 2**-15
        want = products(x, part)
        assert error(packed(x), want) < rounding
        assert error(biased(x, residual), want + bias.double() + residual.double()) < rounding
        assert error(wide(x), want + bias.double()) < 2**-15


@pytest.mark.parametrize("fill", [0x00, 0x7F, 0x80, 0xFF])
@pytest.mark.parametrize("activation_bytes", [1, 2])
def test_sums_of_the_largest_products_fit(variant, number, activation_bytes, fill):
    part = in_blocks(20, 256, number, torch.float32)
    form = FORMATS[number]
    scales = {"Q4_1": 4, "Q5_1": 4, "Q4_K": 16, "Q5_K": 16, "MXFP4": 1}.get(form.name, 2)
    blocks = part.data.view(-1, form.block_bytes)
    blocks[:, slice(192) if form.name == "Q6_K" else slice(scales, None)] = fill
    packed = Blocks(variant, [part], wide=True, activation_bytes=activation_bytes)
    for rows in (1, 2, 5, 6):
        for x in (torch.ones(rows, 256), -torch.ones(rows, 256), torch.full((rows, 256), 0.99606)):
            x[:, ::16] = x[:, ::16].sign()  # the last x is then rounded by nearly half a step
            assert error(packed(x), products(x, part, activation_bytes)) < 2**-15


@pytest.mark.parametrize("activation_bytes", [1, 2])
def test_avx_vnni_computes_the_bits_of_avx2(dtype, number, activation_bytes):
    part = in_blocks(77, 512, number, dtype)
    one, other = (Blocks(kernels(isa), [part], activation_bytes=activation_bytes) for isa in ("avx2", "avxvnni"))
    for rows in (1, 2, 3, 4, 5, 6, 11, 300):
        x = drawn(rows, 512, dtype=dtype)
        assert torch.equal(one(x), other(x)), rows


@pytest.mark.parametrize("shape", SHAPES)
def test_activations_of_two_bytes_are_rounded_less(variant, dtype, number, shape):
    part, bias = in_blocks(*shape, number, dtype), drawn(shape[0], dtype=dtype)
    packed = Blocks(variant, [part], bias, wide=True, activation_bytes=2)
    joined = in_several_formats(variant, [part, in_blocks(8, shape[1], 8, dtype)], activation_bytes=2)
    for rows in (1, 2, 3, 5, 12, 13, 29, 100):
        x = drawn(rows, shape[1], dtype=dtype)
        exact = x.double() @ plain(part).T
        assert error(packed(x), products(x, part, 2) + bias.double()) < 2**-10
        assert error(packed(x), exact + bias.double()) < 2**-7
        assert error(joined(x)[:, : shape[0]], exact) < 2**-7


def test_looked_up_rows_are_the_numbers_in_the_blocks(variant, dtype, number):
    part = in_blocks(77, 512, number, dtype)
    ids = torch.tensor([0, 76, 15, 16, 31, 32, 40])
    assert torch.equal(Blocks(variant, [part]).lookup(ids), plain(part).float().to(dtype)[ids])
    with pytest.raises(IndexError, match="no row 77 among 77"):
        Blocks(variant, [part]).lookup(torch.tensor([77]))


def test_halves_of_interleaved_heads_are_separated(variant, dtype, number):
    parts = [in_blocks(96, 256, number, dtype, interleaved=32), in_blocks(64, 256, number, dtype, seed=1)]
    packed = Blocks(variant, parts)
    want = torch.cat([plain(part) for part in parts]).float().to(dtype)
    assert torch.equal(packed.lookup(torch.arange(160)), want)


def test_gated_products_equal_those_of_the_numbers_in_the_blocks(variant, dtype, number):
    parts = [in_blocks(48, 256, number, dtype, seed=seed) for seed in (1, 2)]
    packed = Blocks(variant, parts, gated=True)
    for rows in (1, 4, 17):
        x = drawn(rows, 256, dtype=dtype, scale=0.1)
        gate, up = (products(x, part) for part in parts)
        assert error(packed(x), gate * torch.sigmoid(gate) * up) < (2**-7 if dtype == torch.bfloat16 else 2**-14)


def test_joined_formats_are_columns_of_one_result(variant, dtype):
    parts = [in_blocks(rows, 512, number, dtype, seed=rows) for rows, number in ((64, 12), (30, 12), (33, 14), (7, 8))]
    bias = drawn(134, dtype=dtype)
    joined, apart = in_several_formats(variant, parts, bias), [Blocks(variant, [part]) for part in parts]
    assert joined.num_bytes > 0
    for rows in (1, 3, 20):
        x, residual = drawn(rows, 512, dtype=dtype), drawn(rows, 134, dtype=dtype)
        want = torch.cat([products(x, part) for part in parts], dim=1) + bias.double()
        assert error(joined(x), want) < (2**-8 if dtype == torch.bfloat16 else 2**-15)
        assert error(joined(x, residual), want + residual.double()) < (2**-8 if dtype == torch.bfloat16 else 2**-15)
    unbiased = in_several_formats(variant, parts)
    assert torch.equal(unbiased(x), torch.cat([one(x) for one in apart], dim=1))


def test_columns_may_be_stored_in_another_order(variant, dtype, number):
    one, other = (torch.randperm(512, generator=torch.Generator().manual_seed(seed)).int() for seed in (1, 2))
    plain_parts = [in_blocks(rows, 512, number, dtype, seed=rows) for rows in (64, 30)]
    parts = [part._replace(order=order) for part, order in zip(plain_parts, (one, other), strict=True)]
    first, second = (Blocks(variant, [part]) for part in plain_parts)
    ordered, joined = Blocks(variant, parts[:1]), in_several_formats(variant, parts)
    for rows in (1, 2, 3, 13, 100):
        x, residual = drawn(rows, 512, dtype=dtype), drawn(rows, 64, dtype=dtype)
        assert torch.equal(ordered(x, residual), first(x[:, one], residual))
        assert torch.equal(joined(x), torch.cat([first(x[:, one]), second(x[:, other])], dim=1))
    ids = torch.tensor([3, 0, 63])
    assert torch.equal(ordered.lookup(ids)[:, one], first.lookup(ids))
    with pytest.raises(ValueError, match="columns in several orders"):
        Blocks(variant, parts)


@pytest.mark.parametrize("activation_bytes", [1, 2])
def test_a_row_has_the_same_bits_in_any_batch(variant, dtype, number, activation_bytes):
    packed = Blocks(variant, [in_blocks(200, 512, number, dtype)], activation_bytes=activation_bytes)
    x = drawn(64, 512, dtype=dtype)
    whole = packed(x)
    order = list(range(64))
    random.Random(1).shuffle(order)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for size in (1, 2, 3, 5, 13):
            for start in range(0, 60, size):
                rows = order[start : start + size]
                assert torch.equal(packed(x[rows]), whole[rows])


@pytest.mark.parametrize("activation_bytes", [1, 2])
def test_numbers_that_are_not_finite_stay_so(variant, dtype, number, activation_bytes):
    part = in_blocks(40, 256, number, dtype)
    packed = Blocks(variant, [part], activation_bytes=activation_bytes)
    for bad in (float("inf"), float("nan")):
        x = drawn(5, 256, dtype=dtype)
        clean = packed(x)
        x[2, 17] = bad
        y = packed(x)
        assert not y[2].isfinite().any()
        assert torch.equal(y[[0, 1, 3, 4]], clean[[0, 1, 3, 4]])
    assert not packed(torch.zeros(1, 256, dtype=dtype)).any()


def test_parts_of_several_formats_are_refused_where_they_need_one(variant, dtype):
    with pytest.raises(ValueError, match="several formats"):
        Blocks(variant, [in_blocks(8, 256, 12, dtype), in_blocks(8, 256, 14, dtype)])
