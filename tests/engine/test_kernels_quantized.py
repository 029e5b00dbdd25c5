"""Matmuls with quantized weights against torch on the quantized numbers, the bits of their rows, and the selection."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from engine import ConfigError
from engine.kernels import build, library
from engine.kernels.library import Kernels, choose
from engine.kernels.matmul import GROUP, Quantized, quantized_bytes
from tests.engine.test_kernels import CPU, drawn, error, kernels, needs_library, processor

__all__ = ["processor"]

pytestmark = pytest.mark.usefixtures("same_threads_after")


class Kind(NamedTuple):
    """How a weight is quantized."""

    bits: int
    grouped: bool  # whether each group of a row has a scale

    def packed(self, kernels: Kernels, weight: Tensor, bias: Tensor | None = None, **how: Any) -> Quantized:
        return Quantized(kernels, weight, bias, bits=self.bits, grouped=self.grouped, **how)

    @property
    def of_x(self) -> int:
        """The numbers of a row of x that share a scale."""
        return GROUP if self.grouped else 128


KINDS = {
    "int8": Kind(8, grouped=False),
    "int8-grouped": Kind(8, grouped=True),
    "int5": Kind(5, grouped=True),
    "int4": Kind(4, grouped=True),
}
SHAPES = [(1, 1), (31, 2), (33, 65), (64, 128), (130, 77), (500, 257)]


@pytest.fixture(params=[isa for isa in build.variants("quantized") if isa != "amx"])  # test_amx.py compares it
def variant(request) -> Kernels:
    _, features = library.load(build.library())
    if not library._quantizes(request.param, features):
        pytest.skip("this processor has no VNNI")
    return kernels(request.param)


@pytest.fixture(params=KINDS.values(), ids=list(KINDS))
def kind(request) -> Kind:
    return request.param


def in_groups(x: Tensor, size: int) -> Tensor:
    """Return [rows, groups, size] in float32, padded with zeros."""
    return torch.nn.functional.pad(x.float(), (0, -x.shape[1] % size)).unflatten(1, (-1, size))


def heavy(rows: int, columns: int, *, dtype: torch.dtype) -> Tensor:
    """Return random numbers with more large ones than a Gaussian, as trained weights have."""
    return drawn(rows, columns, dtype=dtype) * drawn(rows, columns, dtype=dtype)


def rounded(x: Tensor, size: int) -> Tensor:
    """Return x quantized to 8 bits and back, with a scale for each group."""
    groups = in_groups(x, size)
    top = groups.abs().amax(-1, keepdim=True)
    top = torch.where(top < 2.0**-100, 0.0, top)
    # Not 127 / top, which torch takes for 127 * (1 / top).
    inverse = torch.where(top > 0, torch.full_like(top, 127.0) / top, 0.0)
    return ((groups * inverse).round() * (top / 127)).double().flatten(1)[:, : x.shape[1]]


def in_bytes(weight: Tensor) -> Tensor:
    """Return the weight in 8 bits and back, with a scale for each group, that is a multiple of the row's, in bfloat16:
    what rounding.cpp computes."""
    groups = in_groups(weight, GROUP)
    top = groups.abs().amax(-1, keepdim=True)
    most = torch.full_like(top, 127.0)
    of_row = top.amax(1, keepdim=True)
    unit = torch.where(of_row < 2.0**-100, 0.0, of_row / most[:, :1] / most[:, :1]).bfloat16().float()
    inverse = torch.where(unit > 0, torch.ones_like(unit) / unit, 0.0)
    scale = (top / most * inverse).ceil().clamp(1, 127) * unit
    inverse = torch.where(scale > 0, torch.ones_like(scale) / scale, 0.0)
    return ((groups * inverse).round().clamp(-127, 127) * scale).double().flatten(1)[:, : weight.shape[1]]


def rounded_weight(weight: Tensor, bits: int, importance: Tensor | None = None, *, grouped: bool = False) -> Tensor:
    """Return the weight quantized to `bits` and back, float64: with 8 bits by torch, with fewer by the first kernel."""
    if bits == 8:
        return in_bytes(weight) if grouped else rounded(weight, weight.shape[1])
    kernels = choose("auto", CPU, torch.float32, quantized=True).kernels
    assert kernels is not None
    packed = Quantized(kernels, weight.float(), bits=bits, importance=importance)
    return packed.lookup(torch.arange(len(weight))).double()


def nearest(weight: Tensor, bits: int) -> Tensor:
    """Return the weight rounded to the nearest of 2^bits numbers that span its group."""
    groups = in_groups(weight, GROUP).double()
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    step = (high - low) / (2**bits - 1)
    steps = torch.where(step > 0, ((groups - low) / step).round(), 0.0)
    return (low + steps * step).flatten(1)[:, : weight.shape[1]]


def oracle(
    x: Tensor,
    weight: Tensor,
    kind: Kind,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
) -> Tensor:
    """Return what Quantized computes, in float64 on the quantized numbers."""
    y = rounded(x, kind.of_x) @ rounded_weight(weight, kind.bits, grouped=kind.grouped).T
    if bias is not None:
        y = y + bias.double()
    if gated:
        gate, up = y.chunk(2, dim=-1)
        y = gate * torch.sigmoid(gate) * up
    return y if residual is None else y + residual.double()


# -- numbers --------------------------------------------------------------------------------------------------------


@needs_library
@pytest.mark.parametrize("shape", SHAPES)
def test_products_equal_those_of_quantized_numbers(variant, dtype, kind, shape):
    weight, bias = drawn(*shape, dtype=dtype, scale=shape[1] ** -0.5), drawn(shape[0], dtype=dtype)
    plain, biased = kind.packed(variant, weight), kind.packed(variant, weight, bias)
    wide = kind.packed(variant, weight, bias, wide=True)
    for rows in (1, 2, 3, 5, 12, 13, 29, 100):
        x, residual = drawn(rows, shape[1], dtype=dtype), drawn(rows, shape[0], dtype=dtype)
        rounding = 2**-8 if dtype == torch.bfloat16 else 2**-18
        want = oracle(x, weight, kind)
        assert error(plain(x), want) < rounding
        assert error(plain(x, residual), want + residual.double()) < rounding
        assert error(biased(x, residual), want + bias.double() + residual.double()) < rounding
        assert wide(x).dtype == torch.float32
        assert error(wide(x), want + bias.double()) < 2**-18


@needs_library
@pytest.mark.parametrize("shape", [(2, 1), (6, 5), (32, 64), (66, 31), (512, 192)])
def test_gated_products_equal_those_of_quantized_numbers(variant, dtype, kind, shape):
    weight, bias = drawn(*shape, dtype=dtype, scale=shape[1] ** -0.5), drawn(shape[0], dtype=dtype)
    packed = kind.packed(variant, weight, bias, gated=True)
    for rows in (1, 3, 14):
        x, residual = drawn(rows, shape[1], dtype=dtype), drawn(rows, shape[0] // 2, dtype=dtype)
        rounding = 2**-7 if dtype == torch.bfloat16 else 2**-17
        want = oracle(x, weight, kind, bias=bias, residual=residual, gated=True)
        assert packed(x, residual).shape == (rows, shape[0] // 2)
        assert error(packed(x, residual), want) < rounding


@needs_library
def test_error_matches_the_number_of_bits(variant, dtype, kind):
    """Compared with the plain numbers: the relative error of a Gaussian product."""
    weight, x = drawn(300, 1024, dtype=dtype), drawn(40, 1024, dtype=dtype)
    got, want = kind.packed(variant, weight, wide=True)(x).double(), x.double() @ weight.double().T
    assert (got - want).norm() / want.norm() < {8: 0.012, 5: 0.05, 4: 0.09}[kind.bits]


@needs_library
def test_large_column_of_x_affects_only_its_group(variant, dtype):
    weight, x = drawn(100, 1024, dtype=dtype), drawn(8, 1024, dtype=dtype)
    x[:, 700] = 1000.0
    weight[:, 700] = 0.0
    got, want = Quantized(variant, weight, bits=8, wide=True)(x).double(), x.double() @ weight.double().T
    # Of 1024 numbers the 128 of one group are lost in the large one's steps.
    assert (got - want).norm() / want.norm() < 1.1 * (128 / 1024) ** 0.5


@needs_library
@pytest.mark.parametrize("shape", SHAPES)
def test_lookup_returns_dequantized_rows(variant, dtype, kind, shape):
    weight = drawn(*shape, dtype=dtype)
    packed = kind.packed(variant, weight)
    ids = torch.randint(0, shape[0], (50,))
    assert torch.equal(packed.lookup(ids), rounded_weight(weight, kind.bits, grouped=kind.grouped)[ids].to(dtype))
    for wrong in (-1, shape[0]):
        with pytest.raises(IndexError, match=f"no row {wrong} "):
            packed.lookup(torch.tensor([0, wrong]))


@needs_library
@pytest.mark.parametrize("bits", [5, 4])
def test_a_group_has_as_many_values_as_its_bits_allow_at_equal_distances(variant, bits):
    found = Quantized(variant, heavy(64, 96, dtype=torch.float32), bits=bits).lookup(torch.arange(64))
    for group in in_groups(found, GROUP).flatten(0, 1):
        values = group.unique()
        apart = values.diff() / values.diff().min()
        assert len(values) <= 2**bits
        assert (apart - apart.round()).abs().max() < 1e-3


@needs_library
@pytest.mark.parametrize("bits", [5, 4])
def test_searched_scales_are_better_than_rounding_to_nearest(variant, bits):
    weight, importance = heavy(200, 320, dtype=torch.float32), torch.rand(320).square()
    alike, searched = (
        Quantized(variant, weight, bits=bits, importance=matter).lookup(torch.arange(200))
        for matter in (None, importance)
    )
    before = nearest(weight, bits)
    assert ((alike - weight) ** 2).sum() < 0.94 * ((before - weight) ** 2).sum()
    assert (importance * (searched - weight) ** 2).sum() < 0.84 * (importance * (before - weight) ** 2).sum()
    assert (importance * (searched - weight) ** 2).sum() < 0.95 * (importance * (alike - weight) ** 2).sum()


@needs_library
@pytest.mark.parametrize("bits", [5, 4])
def test_a_weight_of_few_values_keeps_them(variant, bits):
    """Zeros, ones and what is between them at equal distances: the bytes of a row's groups are 127, and exact."""
    steps = torch.randint(0, 2**bits, (40, 64)).float()
    steps[:, [0, 32]], steps[:, [1, 33]] = 0.0, 2.0**bits - 1
    weight = steps * 127 / 4 - 127 / 2
    assert torch.equal(Quantized(variant, weight, bits=bits).lookup(torch.arange(40)), weight)


@needs_library
def test_a_large_column_of_a_weight_costs_other_groups_nothing(variant, dtype):
    weight = drawn(60, 96, dtype=dtype)
    weight[:, 40] = 30.0
    apart = [*range(32), *range(64, 96)]
    alone, grouped = (
        Quantized(variant, weight, bits=8, grouped=grouped).lookup(torch.arange(60)) for grouped in (False, True)
    )
    off = [((found.float() - weight.float())[:, apart]).norm() for found in (alone, grouped)]
    assert off[1] < off[0] / 5
    assert (grouped.float() - weight.float()).abs().max() < 30 / 127 / 1.9


@needs_library
@pytest.mark.parametrize("bits", [5, 4])
def test_groups_without_importance_are_rounded_too(variant, dtype, bits):
    weight, importance = drawn(64, 64, dtype=dtype), torch.ones(64)
    importance[:32] = 0.0
    got = Quantized(variant, weight, bits=bits, importance=importance).lookup(torch.arange(64))
    for columns in (slice(32), slice(32, 64)):
        part = weight[:, columns].float()
        assert (got[:, columns].float() - part).norm() < {5: 0.06, 4: 0.12}[bits] * part.norm()


@needs_library
@pytest.mark.parametrize("shape", SHAPES)
def test_weights_are_quantized_alike_on_every_instruction_set(dtype, kind, shape):
    weight = heavy(*shape, dtype=dtype)
    features = library.load(build.library())[1]
    able = [isa for isa in library.best_first(features) if library._quantizes(isa, features)]
    rows = [kind.packed(kernels(isa), weight).lookup(torch.arange(shape[0])) for isa in able]
    assert all(torch.equal(other, rows[0]) for other in rows)


@needs_library
@pytest.mark.parametrize("bits", [5, 4])
def test_group_of_zeros_in_a_row(variant, dtype, bits):
    weight = drawn(40, 96, dtype=dtype)
    weight[:, 32:64] = 0
    got = Quantized(variant, weight, bits=bits).lookup(torch.arange(40))
    assert torch.equal(got, rounded_weight(weight, bits).to(dtype)) and not got[:, 32:64].any()


@needs_library
def test_rows_and_channels_of_zeros(variant, dtype, kind):
    weight, x = drawn(70, 130, dtype=dtype), drawn(20, 130, dtype=dtype)
    weight[3], weight[69], x[5], x[19] = 0, 0, 0, 0
    got = kind.packed(variant, weight)(x)
    for zeros in (got[5], got[19], got[:, 3], got[:, 69]):
        assert torch.equal(zeros, torch.zeros_like(zeros))
    nothing = kind.packed(variant, torch.zeros_like(weight))
    assert torch.equal(nothing(x), torch.zeros_like(got))
    assert torch.equal(nothing.lookup(torch.arange(70)), torch.zeros_like(weight))


@needs_library
def test_nan_stays_in_its_row_and_column(variant, dtype, kind):
    weight, x = drawn(70, 133, dtype=dtype), drawn(30, 133, dtype=dtype)
    clean = kind.packed(variant, weight)(x)
    x[5, 132], x[17, 0], x[20, 128] = float("nan"), float("inf"), -float("inf")
    got = kind.packed(variant, weight)(x)
    broken = [5, 17, 20]
    others = [row for row in range(30) if row not in broken]
    assert got[broken].isnan().all() and torch.equal(got[others], clean[others])
    weight[69, 1], weight[2, 132] = float("nan"), float("inf")
    got = kind.packed(variant, weight)(x[others])
    whole = [column for column in range(70) if column not in (69, 2)]
    assert got[:, [69, 2]].isnan().all() and torch.equal(got[:, whole], clean[others][:, whole])


@needs_library
def test_huge_numbers(variant, dtype, kind):
    weight, x = torch.full((40, 150), 1e30).to(dtype), torch.full((13, 150), 1e30).to(dtype)
    for sign in (1, -1):
        got = kind.packed(variant, sign * weight)(x)
        # With fewer bits NaN: the sum of stored numbers may be zero, and is multiplied by the product of the scales.
        assert (got == sign * float("inf")).all() if kind.bits == 8 else not got.isfinite().any()
    x = torch.full((13, 150), 1e5).to(dtype)
    assert error(kind.packed(variant, weight)(x), oracle(x, weight, kind)) < 2**-7
    weight, x = (weight * 1e-33).to(dtype), torch.full((1, 150), 3e38 if kind.bits == 8 else 3e36).to(dtype)
    assert error(kind.packed(variant, weight)(x), oracle(x, weight, kind)) < 2**-7


@needs_library
@pytest.mark.parametrize("size", [1e-39, 1e-32, 1e-29, 1e-25])
def test_tiny_numbers(variant, dtype, kind, size):
    """A group is zero below 2^-100, and quantized as usual above."""
    weight, x = drawn(40, 80, dtype=dtype) * size, drawn(3, 80, dtype=dtype)
    got = kind.packed(variant, weight)(x)
    assert error(got, oracle(x, weight, kind), size) < 2**-7
    assert (got == 0).all() == (size < 1e-30)
    weight, x = weight / size, x * size
    got = kind.packed(variant, weight)(x)
    assert error(got, oracle(x, weight, kind), size) < 2**-6
    assert (got == 0).all() == (size < 1e-30)


@needs_library
def test_no_rows_and_wrong_tensors(variant, dtype, kind):
    packed = kind.packed(variant, drawn(40, 24, dtype=dtype))
    assert packed(torch.empty(0, 24, dtype=dtype)).shape == (0, 40)
    assert packed.lookup(torch.empty(0, dtype=torch.int64)).shape == (0, 24)
    x = drawn(3, 24, dtype=dtype)
    for wrong in (x[0], x[:, :23], x.double(), x[None]):
        with pytest.raises(ValueError, match=r"not \[rows, 24\]"):
            packed(wrong)


@needs_library
def test_num_bytes_is_the_memory_of_weights_and_scales(variant, dtype, kind):
    for rows, columns in ((64, 256), (96, 64), (32, 33)):
        packed = kind.packed(variant, drawn(rows, columns, dtype=dtype))
        assert packed.num_bytes == quantized_bytes(rows, columns, **kind._asdict())
    of_scales = 4 if not kind.grouped else 34 if kind.bits == 8 else 68
    assert quantized_bytes(100, 1024, **kind._asdict()) == 100 * (1024 * kind.bits // 8 + of_scales)


# -- bits -----------------------------------------------------------------------------------------------------------


@needs_library
def test_avx_vnni_computes_the_bits_of_avx2(dtype, kind):
    weight = drawn(130, 300, dtype=dtype)
    one, other = (kind.packed(kernels(isa), weight) for isa in ("avx2", "avxvnni"))
    for rows in (1, 2, 3, 4, 5, 6, 7, 200):
        x = drawn(rows, 300, dtype=dtype)
        assert torch.equal(one(x), other(x)), rows


@needs_library
@pytest.mark.parametrize("shape", [(96, 64), (250, 129), (700, 300)])
def test_a_row_has_the_same_bits_in_any_batch_and_on_any_threads(variant, dtype, kind, shape):
    packed = kind.packed(variant, drawn(*shape, dtype=dtype), drawn(shape[0], dtype=dtype))
    x, residual = drawn(500, shape[1], dtype=dtype), drawn(500, shape[0], dtype=dtype)
    torch.set_num_threads(1)
    alone = torch.cat([packed(x[i : i + 1], residual[i : i + 1]) for i in range(len(x))])
    dice = random.Random(0)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for rows in [*range(1, 50, 1 if shape[0] < 200 else 5), 193, 479, 480, 481, 500]:
            start = dice.randint(0, len(x) - rows)
            got = packed(x[start : start + rows], residual[start : start + rows])
            assert torch.equal(got, alone[start : start + rows]), (threads, rows)


@needs_library
def test_gated_rows_have_the_same_bits_in_any_batch(variant, dtype, kind):
    packed = kind.packed(variant, drawn(2 * 90, 130, dtype=dtype), gated=True)
    x = drawn(100, 130, dtype=dtype)
    alone = torch.cat([packed(x[i : i + 1]) for i in range(len(x))])
    for rows in range(1, 101):
        assert torch.equal(packed(x[100 - rows :]), alone[100 - rows :])


@needs_library
def test_a_weight_is_rounded_the_same_on_any_threads(variant, dtype, kind):
    weight = drawn(200, 131, dtype=dtype)
    torch.set_num_threads(1)
    one = kind.packed(variant, weight)
    torch.set_num_threads(3)
    three = kind.packed(variant, weight.t().contiguous().t())
    assert torch.equal(one.panels, three.panels) and torch.equal(one.scales, three.scales)


# -- the choice -----------------------------------------------------------------------------------------------------


@needs_library
def test_avx512_requires_vnni(processor):
    processor("avx2", "avx512", "vnni")
    assert choose("auto", CPU, torch.bfloat16, quantized=True).name == "avx512"
    processor("avx2", "avx512")
    assert choose("auto", CPU, torch.bfloat16, quantized=True).name == "avx2"
    with pytest.raises(ConfigError, match="avx512 computes no products of quantized weights on this processor; avx2"):
        choose("avx512", CPU, torch.bfloat16, quantized=True)


@needs_library
def test_tiles_multiply_quantized_weights(processor):
    processor("avx2", "avx512", "avx512bf16", "fast dot", "tiles", "vnni", "amx", "fast tiles")
    choice = choose("auto", CPU, torch.bfloat16, quantized=True)
    assert (choice.name, choice.invariant, choice.note) == ("amx", True, "")


@needs_library
def test_quantized_weights_without_kernels_are_refused(processor, monkeypatch):
    processor("avx2")
    for asked, device, dtype, why in (
        ("torch", CPU, torch.bfloat16, "`cpu_isa=torch` disables them"),
        ("auto", torch.device("cuda"), torch.bfloat16, "this engine runs on cuda"),
        ("auto", CPU, torch.float64, "float32 and bfloat16, not float64: set `dtype=bfloat16`"),
        ("sse", CPU, torch.float32, "unknown instruction set 'sse'"),
    ):
        with pytest.raises(ConfigError, match=why):
            choose(asked, device, dtype, quantized=True)
    processor()
    with pytest.raises(ConfigError, match="this processor has no AVX2"):
        choose("auto", CPU, torch.float32, quantized=True)

    def missing(**_):
        raise build.BuildError("no C++ compiler was found")

    monkeypatch.setattr(build, "library", missing)
    with pytest.raises(ConfigError, match=r"need our CPU kernels, and there are none: no C\+\+ compiler"):
        choose("auto", CPU, torch.float32, quantized=True)
