"""The table, and its place in docs/conformance.md."""

from __future__ import annotations

import datetime
import platform
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .place import ROOT
from .verdicts import VERDICTS, Judged, Verdict

PAGE = ROOT / "docs/conformance.md"
BEGIN, END = "<!-- begin: written by `make conformance ARGS=--write` -->", "<!-- end -->"
HEADINGS: dict[Verdict, str] = {
    "passed": "passed",
    "refused": "refused on purpose",
    "capability": "capability of the small model",
    "inapplicable": "not applicable",
    "defect": "defects",
}


@dataclass(frozen=True)
class SuiteRun:
    """One suite's verdicts, or what it lacks to run."""

    suite: str
    versions: str = ""
    judged: Sequence[Judged] = ()
    seconds: float = 0.0
    missing: str | None = None

    def counts(self) -> dict[Verdict, int]:
        return {verdict: sum(judged.verdict == verdict for judged in self.judged) for verdict in VERDICTS}


def markdown(runs: Sequence[SuiteRun]) -> str:
    """The table, a line per suite, and below it the reason of every test that is not passed."""
    lines = [
        "| suite | versions | tests | " + " | ".join(HEADINGS.values()) + " |",
        "|---|---|" + "---:|" * (len(HEADINGS) + 1),
    ]
    for run in runs:
        if run.missing is not None:
            lines.append(f"| {run.suite} | not run: {run.missing} |" + " |" * (len(HEADINGS) + 1))
            continue
        counts = [str(count) for count in run.counts().values()]
        lines.append(f"| {run.suite} | {run.versions} | {len(run.judged)} | " + " | ".join(counts) + " |")
    for verdict, heading in HEADINGS.items():
        reasons = _reasons(runs, verdict) if verdict != "passed" else {}
        if reasons:
            lines += ["", f"## {heading[0].upper()}{heading[1:]}", "", "| suite | tests | reason |", "|---|---|---|"]
            for (suite, reason), tests in reasons.items():
                cell = _cell(reason.splitlines()[0][:300] if reason else "")
                lines.append(f"| {suite} | {', '.join(f'`{_cell(test)}`' for test in tests)} | {cell} |")
    return "\n".join(lines)


def _reasons(runs: Sequence[SuiteRun], verdict: Verdict) -> dict[tuple[str, str], list[str]]:
    """The tests with a verdict, by suite and reason."""
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for run in runs:
        for judged in run.judged:
            if judged.verdict == verdict:
                found[run.suite, judged.reason].append(judged.result.test)
    return found


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def written(runs: Sequence[SuiteRun]) -> dict[str, Any]:
    """The verdicts as JSON: per suite its versions, seconds and tests, or what it lacks to run."""
    return {
        run.suite: {"missing": run.missing}
        if run.missing is not None
        else {
            "versions": run.versions,
            "seconds": round(run.seconds, 1),
            "tests": {
                judged.result.test: {
                    "verdict": judged.verdict,
                    "reason": judged.reason,
                    "message": judged.result.message[:2000],
                }
                for judged in run.judged
            },
        }
        for run in runs
    }


def write(text: str) -> None:
    """Put the table, its date and its command between the page's two markers."""
    before, begin, rest = PAGE.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{PAGE} lacks the markers {BEGIN!r} and {END!r}")
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    head = f"`make conformance ARGS=--write` on {date}, Python {platform.python_version()}:"
    PAGE.write_text(f"{before}{begin}\n\n{head}\n\n{text}\n\n{end}{after}")
