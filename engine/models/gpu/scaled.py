"""Products of activations and weights that are both in fp8 (E4M3): of few rows by kernels/gpu/scaled.py, of many by
torch._scaled_mm."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from ...attention.paged_gpu import dependence, is_interpreted
from ...kernels.launching import gpu_kernels, launch

LARGEST = 448.0  # of E4M3
CAPABILITY = (8, 9)  # of GPUs that multiply fp8
BLOCK_CAPABILITY = (9, 0)  # of those for which torch multiplies it with a scale per block
MULTIPLE = 16  # rows and columns of a weight are multiples of it, and rows of x are padded to one
GROUP = 128  # columns of x that share a scale, and rows and columns of a block of a weight
BLOCKS = 4  # blocks of columns: torch 2.11 takes scales for a multiple of them, and is wrong without a word otherwise
TOKENS = 16  # per program that quantizes x
MAX_ERROR = 2e-2  # of the trial: its results are rounded to bfloat16
LOSS = 6e-2  # of a product by activations in fp8: with 3 bits of a mantissa about 2.6 %
DELAY_CYCLES = 40_000_000  # of a GPU's clock, about 20 ms


class Narrow(NamedTuple):
    """How the kernel computes a product with x in fp8: rows of x and of the weight per program."""

    tokens: int
    rows: int
    warps: int
    stages: int
    parts: int = 1  # of each sum, which that many programs compute


class ByTorch(NamedTuple):
    """torch computes a product with x in fp8."""


class Quantized(NamedTuple):
    """x in fp8 with a scale for each GROUP columns; rows of zeros make the tokens a multiple of MULTIPLE."""

    numbers: Tensor  # [padded, columns]
    scales: Tensor  # [groups, padded] float32


class Stored(NamedTuple):
    """A weight for the kernel."""

    numbers: Tensor  # [rows, columns] in fp8
    scales: Tensor  # [groups, rows] float32, the same in blocks of GROUP by GROUP; or [1, rows]
    arrived: Tensor  # int32 for each tile of a product in parts, zero before and after


# By the largest number of rows of x. On an H200 each of them is the fastest for some weight, or nearly so. With few
# rows torch is at best as fast, and the next kernel starts only when torch's has ended.
CANDIDATES: dict[int, tuple[Narrow | ByTorch, ...]] = {
    16: (Narrow(16, 64, 4, 4, 4), Narrow(16, 64, 4, 4, 2), Narrow(16, 128, 4, 4)),
    32: (Narrow(32, 64, 4, 4, 4), Narrow(32, 64, 4, 4, 2), Narrow(32, 128, 4, 4)),
    64: (Narrow(64, 64, 4, 4, 2), Narrow(64, 64, 4, 4), Narrow(64, 128, 4, 3)),
    128: (Narrow(128, 64, 4, 4), Narrow(128, 64, 4, 4, 2), ByTorch()),
    256: (Narrow(128, 64, 4, 4), Narrow(128, 64, 4, 4, 2), ByTorch()),
}
TILE_ROWS, TILE_TOKENS = 64, 128  # of tiles that take the most counters of arrival


def padded(tokens: int) -> int:
    """Return the number of rows that torch multiplies for this many rows of x."""
    return -(-tokens // MULTIPLE) * MULTIPLE


def quantize(x: Tensor) -> Quantized:
    """Return x: [tokens, columns], of which columns are a multiple of GROUP, in fp8."""
    tokens, columns = x.shape
    x, rows = x if x.stride(1) == 1 else x.contiguous(), padded(tokens)
    numbers = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(columns // GROUP, rows, dtype=torch.float32, device=x.device)
    launch(gpu_kernels("scaled").quantize, (-(-rows // TOKENS), columns // GROUP),
        x, numbers, scales, tokens, rows, columns, x.stride(0), TOKENS=TOKENS, num_warps=4, **dependence(x.device),
    )  # fmt: skip
    return Quantized(numbers, scales)


def multiply(x: Quantized, weight: Stored, bias: Tensor, out: Tensor, narrow: Narrow) -> None:
    """Write x @ weight.T + bias to out [tokens, rows], of which only rows must be contiguous."""
    numbers, scales, arrived = weight
    tokens, (rows, columns) = len(out), numbers.shape
    groups = columns // GROUP
    parts, tiles = min(narrow.parts, groups), (-(-rows // narrow.rows), -(-tokens // narrow.tokens))
    assert parts == 1 or math.prod(tiles) <= len(arrived)
    sums = torch.empty((parts, tokens, rows) if parts > 1 else (0,), dtype=torch.float32, device=out.device)
    launch(gpu_kernels("scaled").multiply, (tiles[0], parts, tiles[1]),
        x.numbers, x.scales, numbers, scales, bias, out, sums, arrived,
        tokens, len(x.numbers), rows, columns, out.stride(0), BLOCKED=len(scales) > 1,
        TOKENS=narrow.tokens, ROWS=narrow.rows, STAGES=narrow.stages, WIDEN=is_interpreted(),
        num_warps=narrow.warps, **dependence(out.device),
    )  # fmt: skip


def product(x: Quantized, weight: Tensor, blocks: Tensor, out: Tensor) -> None:
    """Write x @ weight.T to out [padded, rows] in bfloat16, by torch.

    weight: [rows, columns] in fp8. blocks: its scales, [blocks of rows, blocks of columns] float32. All are contiguous.
    """
    torch._scaled_mm(x.numbers, weight.t(), scale_a=x.scales.t(), scale_b=blocks.t(), out_dtype=torch.bfloat16, out=out)


def multiply_by_torch(x: Tensor, weight: Tensor, blocks: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Write x @ weight.T + bias to out [tokens, rows], of which only rows must be contiguous; see `product`.

    The padding's results are stored after those of x in the memory of a contiguous out, if that has room for them.
    """
    shape = padded(len(x)), len(weight)
    has_room = out.is_contiguous() and out.storage_offset() == 0
    has_room = has_room and out.untyped_storage().nbytes() >= math.prod(shape) * out.itemsize
    whole = out.as_strided(shape, (len(weight), 1)) if has_room else out.new_empty(shape)
    product(quantize(x), weight, blocks, whole)
    if bias is not None:
        whole += bias
    if not has_room:
        out.copy_(whole[: len(x)])


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x: [rows, columns] in fp8, and its scales [rows, 1] in float32. The largest number of a row is exact."""
    x = x.float()
    scales = x.abs().amax(-1, keepdim=True) / LARGEST
    scales = torch.where(scales > 0, scales, 1.0)
    return (x / scales).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scales


def product_of_rows(x: tuple[Tensor, Tensor], weight: Tensor, scales: Tensor, bias: Tensor) -> Tensor:
    """Return x @ weight.T + bias in bfloat16, [tokens, rows], by torch.

    x: see `quantize_rows`. weight: [rows, columns] in fp8, contiguous. scales: [rows] float32. bias: [rows] bfloat16.
    """
    numbers, x_scales = x
    return torch._scaled_mm(
        numbers,
        weight.t(),
        scale_a=x_scales,
        scale_b=scales[None].contiguous(),
        bias=bias.contiguous(),
        out_dtype=torch.bfloat16,
        use_fast_accum=False,  # it adds with 14 bits
    )


def objection(device: torch.device) -> str | None:
    """Return why a device cannot compute such products, or None."""
    if device.type != "cuda":
        return None if is_interpreted() else "it needs a CUDA device"
    if torch.cuda.get_device_capability(device) < CAPABILITY:
        return "this GPU does not multiply fp8"
    return None


def objection_to_torch(device: torch.device, *, is_blocked: bool) -> str | None:
    """Return why torch cannot compute such products on a device that can, or None. `is_blocked`: of weights with a
    scale per block, not per row."""
    if device.type != "cuda":
        return "it needs a CUDA device"
    if is_blocked and torch.cuda.get_device_capability(device) < BLOCK_CAPABILITY:
        return "this GPU does not multiply fp8 with a scale per block"
    return trial(device, is_blocked=is_blocked)


@torch.inference_mode()
def trial(device: torch.device, *, is_blocked: bool) -> str | None:
    """Compute a product whose input is made late, on a stream of its own; return what is wrong with it, or None.

    The row-wise kernel of torch 2.11 is launched on another stream than the current one (pytorch#177651), so that it
    may run before its input is there.
    """
    draw = torch.Generator().manual_seed(0)
    # Scales of different sizes: one in the place of another shows.
    powers = 2.0 ** torch.arange(4).repeat_interleave(GROUP)
    late = (torch.randn(2 * MULTIPLE + 1, 4 * GROUP, generator=draw) * powers.flip(0)).bfloat16().to(device)
    plain = (torch.randn(2 * GROUP, 4 * GROUP, generator=draw) * powers).to(device)
    plain[:GROUP] *= 16
    bias = torch.randn(len(plain), generator=draw).bfloat16().to(device)
    weight, scales = quantize_rows(plain)
    blocks = plain.abs().view(2, GROUP, 4, GROUP).amax((1, 3)) / LARGEST
    if is_blocked:
        scales = blocks.repeat_interleave(GROUP, 0).repeat_interleave(GROUP, 1)
        weight = (plain / scales).to(torch.float8_e4m3fn)
        groups = Quantized(*_groups(late))
        numbers, x_scales = groups.numbers, groups.scales.t().repeat_interleave(GROUP, 1)
    else:
        numbers, x_scales = quantize_rows(late)
    x = torch.zeros_like(numbers)
    stream = None
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        stream = torch.cuda.Stream(device)
    try:
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            if stream is not None:
                torch.cuda._sleep(DELAY_CYCLES)
            x.view(torch.uint8).copy_(numbers.view(torch.uint8))
            if is_blocked:
                found = torch.empty(len(x), len(weight), dtype=torch.bfloat16, device=device)
                product(Quantized(x, groups.scales), weight, blocks, found)
                found += bias
            else:
                found = product_of_rows((x, x_scales), weight, scales.squeeze(1), bias)
        if stream is not None:
            torch.cuda.synchronize(device)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        return f"torch's product fails: {(str(error).splitlines() or [''])[0][:200]}"
    want = (numbers.double() * x_scales) @ (weight.double() * scales).T + bias
    is_right = float((found.double() - want).norm() / want.norm()) < MAX_ERROR
    return None if is_right else "torch's product does not wait for its input, or is wrong"


def _groups(x: Tensor) -> tuple[Tensor, Tensor]:
    """Do as `quantize`, by torch."""
    x = torch.nn.functional.pad(x.float(), (0, 0, 0, padded(len(x)) - len(x)))
    groups = x.view(len(x), -1, GROUP)
    scales = groups.abs().amax(-1) / LARGEST
    scales = torch.where(scales > 0, scales, 1.0)
    return (groups / scales[..., None]).to(torch.float8_e4m3fn).view(x.shape), scales.t().contiguous()
