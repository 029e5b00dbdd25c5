"""Comparing calls: all in turns, so that a machine that slows down slows all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from torch import Tensor

LEAST, MOST = 3, 50  # rounds


def interleaved(cases: dict[str, Callable[[int], Tensor]], copies: int, seconds: float) -> dict[str, float]:
    """The median time of one call of each, all called in turns; the first round warms up and is not counted."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    began = time.perf_counter()
    for round_ in range(MOST):
        if round_ > LEAST and time.perf_counter() - began > seconds:
            break
        for name, call in cases.items():
            start = time.perf_counter()
            call(round_ % copies)
            if round_:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(each) for name, each in times.items()}
