"""`make conformance`: other projects' suites and load clients against a live server; prints the table.

Exits with 1 when there is a defect, or when a row of expectations.toml holds no longer.
"""

from __future__ import annotations

import argparse
import functools
import json
import pathlib
import sys
import time
from collections.abc import Callable

from . import langchain, lm_eval, load, openresponses, page, verdicts
from .page import SuiteRun
from .place import Place, Report, Unavailable

SUITES: dict[str, Callable[[Place], Report]] = {
    "openresponses": openresponses.run,
    "langchain": langchain.run,
    "lm-eval": lm_eval.run,
    **{name: functools.partial(load.run, name=name) for name in load.CLIENTS},
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("--python", help="the interpreter that has the server (default: this one)")
    parser.add_argument("--suite", action="append", choices=SUITES, help="only this one; can be repeated")
    parser.add_argument("--json", metavar="FILE", help="write every test's verdict there")
    parser.add_argument(
        "--write", action="store_true", help=f"write the table into {page.PAGE.name}; needs every suite"
    )
    options = parser.parse_args()
    names = options.suite or [*SUITES]
    if options.write and {*names} != {*SUITES}:
        parser.error("--write needs every suite; leave out --suite")
    rows = verdicts.expectations()
    runs, complaints = [], []
    with Place(options.python) as place:
        for name in names:
            own = [row for row in rows if row.suite == name]
            runs.append(run_suite(name, place, own))
            if runs[-1].missing is None:
                complaints += verdicts.stale([judged.result for judged in runs[-1].judged], own)
    text = page.markdown(runs)
    print(f"\n{text}")
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(page.written(runs), indent=1) + "\n")
    if options.write:
        page.write(text)
    defects = [(run.suite, judged) for run in runs for judged in run.judged if judged.verdict == "defect"]
    for suite, judged in defects:
        print(f"\nDEFECT {suite}, {judged.result.test}: {judged.reason[:2000]}")
    for complaint in complaints:
        print(f"\nSTALE EXPECTATION {complaint}")
    return 1 if defects or complaints else 0


def run_suite(name: str, place: Place, rows: list[verdicts.Row]) -> SuiteRun:
    """Run one suite and judge its results by its rows."""
    began = time.monotonic()
    try:
        report = SUITES[name](place)
    except Unavailable as missing:
        print(f"{name}: not run: {missing}", file=sys.stderr, flush=True)
        return SuiteRun(name, missing=str(missing))
    judged = verdicts.judge(report.results, rows)
    run = SuiteRun(name, report.versions, judged, time.monotonic() - began)
    counts = ", ".join(f"{count} {verdict}" for verdict, count in run.counts().items() if count)
    print(f"{name} ({report.versions}): {counts}, {run.seconds:.0f} s", file=sys.stderr, flush=True)
    return run


if __name__ == "__main__":
    sys.exit(main())
