"""Starts child processes that run modules of ours, mostly because these import torch or transformers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def child_environment() -> dict[str, str]:
    """The environment of a child that runs a module of ours, from any directory.

    The child imports nothing from the current directory, which may be an untrusted model folder.
    """
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    path = os.pathsep.join([str(Path(__file__).parent.parent), *filter(None, given)])  # an empty entry is the directory
    return {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}


def run_python(
    *arguments: str, timeout_s: float | None = None, capture: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run this Python until it ends. Raises subprocess.TimeoutExpired."""
    command = [sys.executable, *arguments]
    environment = child_environment()
    return subprocess.run(command, capture_output=capture, text=True, timeout=timeout_s, check=False, env=environment)
