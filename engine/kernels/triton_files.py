"""Triton's hash of its own files, which is a part of the key of each compiled kernel; it takes up to a second."""

from __future__ import annotations

import importlib.util
from contextlib import suppress
from pathlib import Path
from threading import Lock, Thread

DRIVER_FILES = "/dev/nvidiactl", "/dev/dxg"  # on Linux, and in the Windows subsystem for it
_lock = Lock()


def hash_files() -> None:
    """Let Triton hash its files, once. It keeps the hash, but threads that need it at the same time would each compute
    it, and so take several times as long."""
    with _lock, suppress(Exception):  # another version may have the function elsewhere; a kernel's launch says the rest
        from triton.runtime.cache import triton_key

        triton_key()


def begin_to_hash() -> None:
    """Do so in a thread, where there seems to be a GPU: most of that time needs neither torch nor Python's lock."""
    if importlib.util.find_spec("triton") is not None and any(Path(each).exists() for each in DRIVER_FILES):
        Thread(target=hash_files, name="hash", daemon=True).start()
