"""Children of a command: Pythons that run our modules, mostly because these import torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def child_environment() -> dict[str, str]:
    """The environment of a child that runs a module of ours, from whichever directory this one was started.

    Nothing is imported from that directory: it may be the folder of a model that a stranger made.
    """
    root = str(Path(__file__).parent.parent)
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}


def run_python(*words: str, timeout_s: float | None = None, capture: bool = True) -> subprocess.CompletedProcess[str]:
    """Run this Python with these words to its end; raises subprocess.TimeoutExpired."""
    return subprocess.run(
        [sys.executable, *words],
        capture_output=capture,
        text=True,
        timeout=timeout_s,
        check=False,
        env=child_environment(),
    )
