"""`python -m server` that, at SIGUSR1, writes the number of its asyncio tasks into the file that TASKS_FILE names.

For soak.py: everything else that may leak can be counted from outside.
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
    part.rename(path)  # whoever waits for the file sees it whole


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, _write)
    sys.exit(main())
