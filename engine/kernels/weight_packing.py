"""Decides whether weights in bfloat16 are compressed for the CPU kernels, see lossless.cpp.

Compressed weights take 24 % less memory and time to read, and time to expand. Results are the same, so the choice may
differ between machines and starts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from ..types import ConfigError
from .library import Kernels
from .matmul import Lossless, Packed

LARGE = 256 << 20  # bytes of weights that exceed every cache
SHAPE, COPIES, TRIALS = (3072, 1024), 16, 3  # 100 MB of weights
MANY_ROWS = 16
GAIN, LOSS = 1.1, 0.97  # of the speed: at least so much more for one row, at most so much less for many


def compresses(
    setting: str, kernels: Kernels | None, dtype: torch.dtype, num_bytes: int, max_seqs: int, *, quantized: bool
) -> bool:
    """Return whether to compress a model's weights, `num_bytes` in `dtype`, if `kernels` compute its matmuls.

    With "auto" it must be faster for one row, and not slower for as many rows as sequences run at once. Both are
    measured, unless the weights might stay in a cache. Raises ConfigError for "lossless" where it is not possible.
    """
    possible = kernels is not None and dtype == torch.bfloat16 and not quantized
    if setting == "lossless" and not possible:
        raise ConfigError(
            "`weight_packing=lossless` needs our CPU kernels and weights in bfloat16 that are not quantized"
        )
    if setting != "auto":
        return setting == "lossless"
    if kernels is None or not possible or num_bytes < LARGE:
        return False
    one, many = speedups(kernels, (1, min(MANY_ROWS, max_seqs)))
    return one >= GAIN and many >= LOSS


def speedups(kernels: Kernels, rows: Sequence[int]) -> list[float]:
    """Return how many times as fast matmuls with compressed weights are, by the number of rows. Takes 0.3 s."""
    weight = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).bfloat16()
    kinds = [[kind(kernels, weight) for _ in range(COPIES)] for kind in (Packed, Lossless)]
    found = []
    for count in rows:
        x = torch.ones(count, SHAPE[1], dtype=torch.bfloat16)
        # The shortest of several times in turns was disturbed least.
        times = [[_seconds(weights, x) for weights in kinds] for _ in range(TRIALS)]
        plain, lossless = (min(times_of_kind) for times_of_kind in zip(*times, strict=True))
        found.append(plain / lossless)
    return found


def _seconds(weights: Sequence[Packed], x: torch.Tensor) -> float:
    started = time.perf_counter()
    for weight in weights:
        weight(x)
    return time.perf_counter() - started
