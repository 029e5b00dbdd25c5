"""Facts about the CPU."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def cpu_facts() -> tuple[str, set[str], int]:
    """Return the CPU's name, its instruction-set flags, and the number of cores that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() or platform.machine(), {"asimd"} if platform.machine() == "arm64" else set(), cores
    fields = [[part.strip() for part in line.split(":", 1)] for line in lines if ":" in line]
    facts = {key: value for key, value in reversed(fields)}  # the first core's
    flags = set((facts.get("flags") or facts.get("Features") or "").split())
    return facts.get("model name") or platform.machine(), flags, cores
