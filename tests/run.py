"""`make test` and `make quick`: style, types, the simulator, then the tests; prints how long it took."""

from __future__ import annotations

import subprocess
import sys
import time

CHECKS = [
    ["ruff", "check", "."],
    ["ruff", "format", "--check", "-q", "."],
    ["mypy"],
    ["engine.sim", "--steps", "200000", "--seed", "1"],
]


def main() -> int:
    quick = "--quick" in sys.argv[1:]
    began = time.monotonic()
    failed = []
    for check in CHECKS:
        print("$", *check, flush=True)
        if subprocess.run([sys.executable, "-m", *check], check=False).returncode:
            failed.append(" ".join(check))
    tests = ["pytest", *(["-m", "not slow and not gpu"] if quick else ["-m", "not gpu"])]
    print("$", *tests, flush=True)
    if subprocess.run([sys.executable, "-m", *tests], check=False).returncode:
        failed.append("pytest")
    minutes, seconds = divmod(round(time.monotonic() - began), 60)
    print(f"{minutes} min {seconds} s in all; " + (f"failed: {', '.join(failed)}" if failed else "everything held"))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
