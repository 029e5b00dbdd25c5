"""Launches of kernels/gpu/single.py: products of a single row on a GPU, with the norm before and what comes after."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...attention.gpu_cache import power_of_two
from ...attention.paged_gpu import FP8_CAPABILITY, dependence, is_interpreted, multiprocessors
from ...kernels.launching import gpu_kernels, launch
from ..norms import RMSNorm
from .form import Form
from .gates import Clamp, gate_constants, is_gated

MOST_STEP = 4096  # columns of a plain weight that a program multiplies at once
QUAD = 4  # numbers of 16 bits in an int64
MOST_COLUMNS = 1 << 15  # of a quantized weight: more are more than the registers of a program hold
REGISTERS = 1 << 16  # of a multiprocessor
LEAST_WARPS, THREAD_COLUMNS = 4, 64  # of a program, and of x per thread, for quantized weights


class Single(NamedTuple):
    """What a program computes of a product with a plain weight."""

    warps: int
    numbers: int  # of the weight, per thread at once


class Row(NamedTuple):
    """What a program computes of a product with a quantized weight."""

    words: int  # of 32 bits, of the weight, per thread at once
    warps: int  # of a multiprocessor's programs together: each computes several tiles, so all run at once


# On an H200 each of them is the fastest for some weight, or nearly so.
SINGLES = Single(4, 128), Single(8, 128), Single(8, 64), Single(4, 64)
ROWS = Row(32, 16), Row(32, 12), Row(16, 16)


def takes(norm: RMSNorm, x: Tensor) -> bool:
    """Return whether the kernels compute a norm of x."""
    return not norm.kind.is_centered and norm.gain.dtype == x.dtype


def multiply(
    x: Tensor,
    weight: Tensor,
    single: Single,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str = "",
    clamp: Clamp | None = None,
    norm: RMSNorm | None = None,
    scale: float = 1.0,
) -> None:
    """Do as skinny.multiply for a single row, and write to out, [1, rows]. `norm`: of x, before the product."""
    assert len(x) == 1
    x, rows = x.contiguous(), out.shape[1]
    own, many = _plain(x.shape[1], single, activation, clamp, (bias is not None, residual is not None))
    launch(gpu_kernels("single").multiply, (-(-rows // many),),
        x, weight, x if bias is None else bias, x if residual is None else residual,
        x if norm is None else norm.gain, out, rows, 0.0 if norm is None else norm.eps, scale,
        constants=own, NORM=norm is not None, WIDE=norm is not None and norm.kind.is_wide, **dependence(x.device),
    )  # fmt: skip


@functools.cache
def _plain(
    columns: int, single: Single, activation: str, clamp: Clamp | None, traits: tuple[bool, bool]
) -> tuple[dict[str, Any], int]:
    """Return the constants of a launch, and the rows of a program."""
    bias, add = traits
    padded = power_of_two(columns)
    step = min(padded, MOST_STEP)
    rows = max(1, 32 * single.warps * single.numbers // (step * (2 if is_gated(activation) else 1)))
    constants = {
        "COLUMNS": columns, "COLUMNS_P": padded, "STEP": step, "ROWS": rows, "BIAS": bias, "ADD": add,
        **gate_constants(activation, clamp), "num_warps": single.warps,
    }  # fmt: skip
    return constants, rows


def multiply_quantized(
    x: Tensor,
    weight: tuple[Tensor, Tensor, Tensor],  # see GPUWeight.tensors
    form: Form,
    row: Row,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str = "",
    norm: RMSNorm | None = None,
) -> None:
    """Do as `multiply`, for x whose numbers have 16 bits and whose columns are a multiple of four."""
    assert len(x) == 1
    numbers, scales, zeros = weight
    x, rows, slices = x[0].contiguous(), scales.shape[1], 1 if form.is_float else numbers.shape[0]
    gain = x if norm is None else norm.gain
    packed = not is_interpreted() and (not form.is_float or _converts(x.device))
    constants = _quantized(len(x), form, row, activation, packed)
    programs = max(1, row.warps // constants["num_warps"]) * multiprocessors(x.device)
    launch(gpu_kernels("single").multiply_quantized, (min(programs, -(-rows // constants["ROWS"])),),
        x, x.view(torch.int64), numbers.view(torch.int32), scales, zeros, x if bias is None else bias,
        x if residual is None else residual, gain.view(torch.int64), out, rows, slices,
        0.0 if norm is None else norm.eps,
        constants=constants, BIAS=bias is not None, ADD=residual is not None,
        NORM=norm is not None, WIDE=norm is not None and norm.kind.is_wide, **dependence(x.device),
    )  # fmt: skip


@functools.cache
def _quantized(columns: int, form: Form, row: Row, activation: str, packed: bool) -> dict[str, Any]:
    """Return the constants of a launch."""
    # A thread keeps up to 64 columns of x in registers.
    num_warps = max(LEAST_WARPS, power_of_two(-(-columns // (32 * THREAD_COLUMNS))))
    stored = form.slices(columns) * form.slice  # columns
    words = stored * form.bits // 32
    step = min(power_of_two(words), 4 * 32 * num_warps)  # a thread loads four words
    chunks = -(-words // step)
    at_once = row.words // 2 if form.has_zeros else row.words  # zero points take registers, too
    rows = max(2 if is_gated(activation) else 1, 32 * num_warps * at_once // (step * chunks))
    return {
        "COLUMNS": columns, "COLUMNS_P": power_of_two(columns), "BITS": form.bits, "FLOAT": form.is_float,
        "ZEROS": form.has_zeros, "SLICE": stored if form.is_float else form.slice, "GROUP": form.group,
        "WORDS": step, "CHUNKS": chunks,
        "ROWS": 1 << rows.bit_length() - 1, **gate_constants(activation, None), "PACKED": packed,
        "num_warps": num_warps,
        "maxnreg": REGISTERS // (32 * max(row.warps, num_warps)),  # so that all programs run at once
    }  # fmt: skip


def _converts(device: torch.device) -> bool:
    """Return whether a GPU converts fp8."""
    # Without memory x is compiled for the current GPU, see launching.py.
    return torch.cuda.get_device_capability(None if device.type == "meta" else device) >= FP8_CAPABILITY
