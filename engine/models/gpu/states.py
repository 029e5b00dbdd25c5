"""What the launches of Triton kernels for layers that keep states have in common: their constants, and trials."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...attention.gpu_cache import power_of_two
from ...attention.paged_gpu import MAX_ERROR, is_interpreted, lack
from ..mixers.states import MixerShape, Segments
from .weights import relative

# A program of a recurrence is one warp, so that its sums need no shared memory, and has as much of the matrix. With
# twice as much it computes a token in nearly twice the time, and there are too few programs for one row.
MATRIX = 2048
MIN_COLUMNS, MAX_COLUMNS = 8, 32  # 8: a sector of memory
MAX_DIM = 256  # of a head: with more a program would not hold its part of the matrix in registers
CONVOLVED_TOKENS, CONVOLVED_CHANNELS, SEARCHED_ROWS = 16, 128, 64  # by a program, at once
WINDOW_TILE = 256
# Tokens, source and target of the segments of a trial's rows: a row without segments; new rows; rows that continue,
# also from a state that is overwritten; copies; snapshots within the reach of the convolution, and beyond.
TRIAL_STATES, TRIAL_EPS = 8, 1e-6
TRIAL_ROWS = (
    (),
    ((7, -1, 0),),
    ((1, 1, 1),),
    ((2, 2, 3), (0, 3, 4), (1, 4, 2)),
    ((0, 5, 6),),
    ((1, -1, 7), (20, 7, 7)),
)


def recurrence(key_dim: int, value_dim: int) -> dict[str, int]:
    """Return the constants and options of a recurrence with heads of these sizes."""
    key_p = power_of_two(key_dim)
    columns = min(max(MATRIX // key_p, MIN_COLUMNS), MAX_COLUMNS, power_of_two(value_dim))
    return {
        "KEY_DIM": key_dim, "VALUE_DIM": value_dim, "KEY_P": key_p, "COLUMNS": columns,
        "PARTS": -(-value_dim // columns),
        "num_warps": 1, "maxnreg": 255,  # with a limit of its own the assembler would rather spill some
    }  # fmt: skip


def windows(shape: MixerShape) -> dict[str, int]:
    """Return the constants of a kernel that writes windows."""
    before = shape.taps - 1
    return {
        "CHANNELS": shape.channels, "BEFORE": before, "BEFORE_P": power_of_two(max(before, 1)), "TILE": WINDOW_TILE,
        "PARTS": -(-shape.channels // WINDOW_TILE),
    }  # fmt: skip


def dtype_limitation(dtype: torch.dtype) -> str | None:
    """Return why the kernels do not compute in this dtype, or None."""
    return None if dtype in MAX_ERROR else f"the Triton kernels do not compute in {str(dtype).removeprefix('torch.')}"


def objection(limitation: str | None, device: torch.device, trial: Callable[[], str | None]) -> str | None:
    """Return why the kernels cannot compute a layer, or None: its limitation, what this machine lacks, or the result of
    a trial."""
    if device.type != "cuda" and not is_interpreted():
        return "the Triton kernels need a CUDA device"
    return limitation or lack() or trial()


@torch.inference_mode()
def compare(
    name: str,
    dtype: torch.dtype,
    device: torch.device,
    computes: Sequence[Callable[..., Tensor]],
    tensors: Callable[[int], tuple[Any, ...]],
) -> str | None:
    """Compute a step by the kernels and by torch; return why the kernels cannot be used, or None.

    name: of what they compute. computes: both functions. tensors: returns their arguments before the segments for a
    number of tokens, the states last.

    The compiled kernels are kept, so this costs a start no more than their first use would.
    """
    segments = Segments.of(TRIAL_ROWS, device)
    results = []
    try:
        for compute in computes:
            args = tensors(segments.begin_list[-1])
            results.append((compute(*args, segments), *args[-1]))
        errors = [relative(ours, want) for ours, want in zip(*results, strict=True) if want.numel()]
    except Exception as problem:  # whatever Triton's compiler, the driver or an old GPU raises
        lines = (str(problem).strip().splitlines() or [""])[0]
        return f"the Triton kernels do not run on this device: {type(problem).__name__}: {lines[:200]}"
    wrong = [error for error in errors if not error < MAX_ERROR[dtype]]  # or it is no number
    if wrong:
        return f"the Triton kernels compute wrong results of {name} on this device (relative error {wrong[0]:.2g})"
    return None


def fill(tensors: Iterable[Tensor | None], device: torch.device) -> None:
    """Fill tensors with random numbers, which are always the same."""
    generator = torch.Generator(device).manual_seed(0)
    for each in tensors:
        if each is not None:
            each.normal_(generator=generator)
