"""The phases of an engine step by which metrics, the step log and `pequod bench` report its time."""

from __future__ import annotations

PHASES = ("schedule", "prepare", "forward", "sample", "publish")  # consecutive; together the whole step
KERNELS = "kernels"  # the part of these phases spent in our CPU kernels
