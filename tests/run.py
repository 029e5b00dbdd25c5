"""`make test` and `make quick`: style, types, the simulators, then the tests; prints how long it took."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

CHECKS = [
    ["ruff", "check", "."],
    ["ruff", "format", "--check", "-q", "."],
    ["mypy"],
    # In as many steps every mutant is found; `make sim` makes more.
    ["tests.simulation.scheduler", "--steps", "50000", "--seed", "1"],
    ["tests.simulation", "--steps", "50000", "--seed", "1"],
]
# A worker of the tests takes up to 2 GB with its servers.
MAX_WORKERS = 8
# Threads of torch that wait for each other sleep, for the cores belong to other workers' tests.
# Spinning, they take twice the time of the products that they wait for.
SLEEPING = {"OMP_WAIT_POLICY": "PASSIVE"}


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def checked(check: list[str]) -> bool:
    """Whether a check holds; what it says is shown in one piece, for others run beside it."""
    began = time.monotonic()
    command = [sys.executable, "-m", *check]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    print(f"$ {' '.join(check)} ({time.monotonic() - began:.0f} s)\n{done.stdout}", end="", flush=True)
    return not done.returncode


def tested(quick: bool) -> bool:
    """Whether the tests hold: a file's tests in one worker, for they share servers, the files that take long first."""
    # One more than cores, because tests wait: for servers that start, for time limits, for processes that end.
    workers = ["-n", str(min(cores() + 1, MAX_WORKERS)), "--dist", "loadfile", "--no-loadscope-reorder"]
    command = ["pytest", *workers, "-m", "not slow and not gpu" if quick else "not gpu"]
    print("$", *command, flush=True)
    env = {**SLEEPING, **os.environ}
    # Hundreds of processes import the same modules, and would compile each again.
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    return not subprocess.run([sys.executable, "-m", *command], env=env, check=False).returncode


def main() -> int:
    quick = "--quick" in sys.argv[1:]
    began = time.monotonic()
    with ThreadPoolExecutor(cores()) as pool:
        held = list(pool.map(checked, CHECKS))
    failed = [" ".join(check) for check, holds in zip(CHECKS, held, strict=True) if not holds]
    if not tested(quick):
        failed.append("pytest")
    minutes, seconds = divmod(round(time.monotonic() - began), 60)
    print(f"{minutes} min {seconds} s in all; " + (f"failed: {', '.join(failed)}" if failed else "everything held"))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
