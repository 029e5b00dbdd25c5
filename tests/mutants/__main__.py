"""`make mutants`: sow each fault of mutants.toml into a copy of the tree and run its check, which must fail.

Exits with 1 when a mutant survives, or when its place in the code is not found.
"""

from __future__ import annotations

import argparse
import datetime
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from .table import Mutant, mutants, plant

PAGE = Path(__file__).parent / "RESULTS.md"
LIMIT_S = 900


class Verdict(NamedTuple):
    mutant: Mutant
    is_caught: bool
    seconds: float
    said: str  # by the check that has caught it; or why there is no verdict


def run(mutant: Mutant, *, is_planted: bool = True) -> tuple[int | None, str]:
    """The exit code of a mutant's check in a copy of the tree, None when it does not end; and its output."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as place:
        plant(mutant if is_planted else None, Path(place))
        env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": place, **mutant.env}
        try:
            done = subprocess.run(
                [sys.executable, "-m", *mutant.command], cwd=place, env=env, text=True, timeout=LIMIT_S, check=False,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return None, f"no end within {LIMIT_S} s"
    return done.returncode, done.stdout


def tried(mutant: Mutant) -> Verdict:
    """Whether a mutant's check fails as a check does: by an assertion or an exception, not for want of a file."""
    began = time.monotonic()
    code, output = run(mutant)
    verdict = Verdict(mutant, code == 1, time.monotonic() - began, last_error(output) if code else "")
    print(f"{'caught  ' if verdict.is_caught else 'SURVIVED'} {mutant.name} ({verdict.seconds:.0f} s)", flush=True)
    if not verdict.is_caught:
        print(f"    {mutant.file}: {mutant.why}; exit code {code} of python -m {' '.join(mutant.command)}", flush=True)
    return verdict


def last_error(output: str) -> str:
    """What a check says at last: its exception, in one line."""
    lines = [line.removeprefix("E").strip() for line in output.splitlines()]
    errors = [line for line in lines if line.partition(":")[0].endswith(("Error", "Deadlock", "Failed"))]
    return (errors[-1] if errors else lines[-1] if lines else "").partition(": ")[2][:90]


def page(verdicts: list[Verdict]) -> str:
    caught = sum(verdict.is_caught for verdict in verdicts)
    rows = [
        f"| {v.mutant.name} | `{v.mutant.file}` | {v.mutant.why} | {v.mutant.check} | "
        f"{v.said.replace('|', '/') if v.is_caught else '**survived**'} |"
        for v in verdicts
    ]
    return "\n".join(
        [
            "# Mutants",
            "",
            f"{caught} of {len(verdicts)} caught, {datetime.datetime.now(datetime.UTC):%Y-%m-%d}, by `make mutants`. "
            "The faults themselves are in `mutants.toml`.",
            "",
            "| mutant | file | what would be wrong | check | what the check says |",
            "|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", help="only these mutants")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--write", action="store_true", help=f"write the table into {PAGE.name}; needs all mutants")
    args = parser.parse_args()
    chosen = [mutant for mutant in mutants() if not args.names or mutant.name in args.names]
    if unknown := {*args.names} - {mutant.name for mutant in chosen}:
        parser.error(f"no such mutant: {', '.join(sorted(unknown))}")
    if args.write and args.names:
        parser.error("--write needs all mutants")
    for mutant in chosen:
        mutant.source()
    checks = list({mutant.check: mutant for mutant in chosen}.values())  # one mutant of each check
    with ThreadPoolExecutor(args.workers) as pool:
        sound = list(pool.map(lambda mutant: run(mutant, is_planted=False), checks))
        for mutant, (code, output) in zip(checks, sound, strict=True):
            if code:
                print(f"without any mutant, python -m {' '.join(mutant.command)} fails:\n{output}")
                return 1
        verdicts = list(pool.map(tried, chosen))
    survivors = [verdict.mutant.name for verdict in verdicts if not verdict.is_caught]
    print(
        f"{len(verdicts) - len(survivors)} of {len(verdicts)} caught" + "".join(f"\nsurvived: {s}" for s in survivors)
    )
    if args.write:
        PAGE.write_text(page(verdicts))
    return 1 if survivors else 0


if __name__ == "__main__":
    raise SystemExit(main())
