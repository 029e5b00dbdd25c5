"""What the seconds of an engine's step are told by: in metrics, in the step log, and by `pequod bench`."""

from __future__ import annotations

PHASES = ("schedule", "prepare", "forward", "sample", "publish")  # one after the other, together the whole step
KERNELS = "kernels"  # told beside the phases, of which it is a part: the time in our CPU kernels
