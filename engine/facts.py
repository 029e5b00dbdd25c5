"""`python -m engine.facts`: prints what torch finds on this machine as one JSON object, for `pequod doctor`."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import sysconfig
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch


def facts() -> dict[str, Any]:
    """Return torch's version and its devices, and what Triton needs to compile and start kernels on a GPU."""
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda or torch.version.hip,
        "threads": torch.get_num_threads(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "devices": [device(index) for index in range(torch.cuda.device_count())],
        "driver": driver(),
        "triton": version("triton") if importlib.util.find_spec("triton") else None,
        "compiler": os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang"),
        "headers": (Path(sysconfig.get_path("include")) / "Python.h").is_file(),
    }


def device(index: int) -> dict[str, Any]:
    """Return a GPU's properties; its free memory is None if the GPU cannot be used now."""
    found = torch.cuda.get_device_properties(index)
    free = None
    with contextlib.suppress(RuntimeError):  # such as one that another process uses exclusively
        free = torch.cuda.mem_get_info(index)[0]
    capability = f"{found.major}.{found.minor}"
    return {"name": found.name, "bytes": found.total_memory, "free": free, "capability": capability}


def driver(file: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    """Return the version of NVIDIA's kernel driver, or None if there is none."""
    with contextlib.suppress(OSError, StopIteration):
        words = file.read_text().split("\n", 1)[0].split()
        return next(word for word in words if word[0].isdigit() and "." in word)
    return None


if __name__ == "__main__":
    print(json.dumps(facts()))
