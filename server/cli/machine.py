"""What kind of machine this is."""

from __future__ import annotations

import platform
from pathlib import Path


def cpu_facts() -> tuple[str, set[str]]:
    """The CPU's name and its instruction-set flags."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() or platform.machine(), {"asimd"} if platform.machine() == "arm64" else set()
    fields = [[part.strip() for part in line.split(":", 1)] for line in lines if ":" in line]
    facts = {key: value for key, value in reversed(fields)}  # the first core's
    flags = set((facts.get("flags") or facts.get("Features") or "").split())
    return facts.get("model name") or platform.machine(), flags
