"""Starts child processes that run modules of ours, mostly because these import torch or transformers."""

from __future__ import annotations

import subprocess
import sys

from engine import child_environment


def run_python(
    *arguments: str, timeout_s: float | None = None, capture: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run this Python until it ends. Raises subprocess.TimeoutExpired."""
    command = [sys.executable, *arguments]
    environment = child_environment()
    return subprocess.run(command, capture_output=capture, text=True, timeout=timeout_s, check=False, env=environment)
