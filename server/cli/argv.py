"""Hides API keys in the command line of this process, which every user of the machine can read."""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

# Fields of /proc/self/stat, counted from the process's state: the addresses of the arguments in memory (proc(5)).
ARG_START, ARG_END = 45, 46


def hide(secrets: Iterable[str]) -> None:
    """Overwrite these texts in the process list, if the system allows it (Linux)."""
    if sys.platform != "linux":
        return
    with suppress(OSError, ValueError, IndexError):
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = int(fields[ARG_START]), int(fields[ARG_END])
        shown = Path("/proc/self/cmdline").read_bytes()
        if ctypes.string_at(start, end - start) != shown:
            return
        for secret in filter(None, secrets):
            for match in re.finditer(re.escape(secret.encode()), shown):
                ctypes.memset(start + match.start(), ord("x"), match.end() - match.start())
