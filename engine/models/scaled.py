"""Products of activations and weights that are both in fp8 (E4M3), with a scale per row of each: torch._scaled_mm."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

LARGEST = 448.0  # of E4M3
CAPABILITY = (8, 9)  # of GPUs that multiply fp8
MULTIPLE = 16  # rows and columns of a weight are multiples of it
MAX_ERROR = 2e-2  # of the trial: its results are rounded to bfloat16
DELAY_CYCLES = 40_000_000  # of a GPU's clock, about 20 ms


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x: [rows, columns] in fp8, and its scales [rows, 1] in float32. The largest number of a row is exact."""
    x = x.float()
    scales = x.abs().amax(-1, keepdim=True) / LARGEST
    scales = torch.where(scales > 0, scales, 1.0)
    return (x / scales).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scales


def product(x: tuple[Tensor, Tensor], weight: Tensor, scales: Tensor, bias: Tensor) -> Tensor:
    """Return x @ weight.T + bias in bfloat16, [tokens, rows].

    x: see `quantize`. weight: [rows, columns] in fp8, contiguous. scales: [rows] float32. bias: [rows] bfloat16.
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
        return "it needs a CUDA device"
    if torch.cuda.get_device_capability(device) < CAPABILITY:
        return "this GPU does not multiply fp8"
    return trial(device)


@torch.inference_mode()
def trial(device: torch.device) -> str | None:
    """Compute a product whose input is made late, on a stream of its own; return what is wrong with it, or None.

    The row-wise kernel of torch 2.11 is launched on another stream than the current one (pytorch#177651), so that it
    may run before its input is there.
    """
    draw = torch.Generator().manual_seed(0)
    late = torch.randn(2 * MULTIPLE + 1, 128, generator=draw).bfloat16().to(device)
    weight, scales = quantize(torch.randn(3 * MULTIPLE, 128, generator=draw).to(device))
    bias = torch.randn(len(weight), generator=draw).bfloat16().to(device)
    numbers, x_scales = quantize(late)
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
            found = product((x, x_scales), weight, scales.squeeze(1), bias)
        if stream is not None:
            torch.cuda.synchronize(device)
    except (RuntimeError, NotImplementedError) as error:
        return f"torch's product fails: {(str(error).splitlines() or [''])[0][:200]}"
    want = (numbers.double() * x_scales) @ (weight.double() * scales).T + bias
    is_right = float((found.double() - want).norm() / want.norm()) < MAX_ERROR
    return None if is_right else "torch's product does not wait for its input, or is wrong"
