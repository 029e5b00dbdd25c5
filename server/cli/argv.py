"""The command line as other users of the machine see it: keys that were given as flags are overwritten there."""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

# Of /proc/self/stat, counted from the process's state on: where the arguments begin and end in memory (proc(5)).
ARG_START, ARG_END = 45, 46


def hide(secrets: Iterable[str]) -> None:
    """Overwrite each of these texts in the list of processes, where the system lets a process do that (Linux)."""
    if sys.platform != "linux":
        return
    with suppress(OSError, ValueError, IndexError):
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = int(fields[ARG_START]), int(fields[ARG_END])
        shown = Path("/proc/self/cmdline").read_bytes()
        if ctypes.string_at(start, end - start) != shown:
            return
        for secret in filter(None, secrets):
            for found in re.finditer(re.escape(secret.encode()), shown):
                ctypes.memset(start + found.start(), ord("x"), found.end() - found.start())
