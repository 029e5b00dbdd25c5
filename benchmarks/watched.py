"""Runs `python -m server`, and on SIGUSR1 writes the number of its asyncio tasks to the file that TASKS_FILE names.

soak.py needs it, because tasks are the only resource that cannot be counted from outside.
"""

from __future__ import annotations

import asyncio
import os
import pathlib
import signal
import sys

from server.__main__ import main

TASKS_FILE = "SOAK_TASKS_FILE"


def _write(*_: object) -> None:
    path = pathlib.Path(os.environ[TASKS_FILE])
    part = path.with_suffix(".part")
    part.write_text(str(len(asyncio.all_tasks())))
    part.rename(path)  # so that a reader never sees a partial file


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, _write)
    sys.exit(main())
