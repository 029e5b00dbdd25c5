"""Compares calls by running them in turn, so that a machine that slows down slows all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from torch import Tensor

MIN_ROUNDS, MAX_ROUNDS = 3, 50


def interleaved(cases: dict[str, Callable[[int], Tensor]], copies: int, seconds: float) -> dict[str, float]:
    """Return the median time of one call of each case. The first round is a warm-up and is not counted."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    started = time.perf_counter()
    for round_ in range(MAX_ROUNDS):
        if round_ > MIN_ROUNDS and time.perf_counter() - started > seconds:
            break
        for name, call in cases.items():
            start = time.perf_counter()
            call(round_ % copies)
            if round_:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(each) for name, each in times.items()}
