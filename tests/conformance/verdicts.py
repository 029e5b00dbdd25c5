"""What a suite reported, what was expected, and the verdict on each test.

A test that its suite passes is `passed`. Any other test needs a row of expectations.toml whose pattern matches its name
and whose message matches its failure; the row's verdict must then agree with what the server did:

- `refused`: the test failed, and the server refused a request (4xx or 501) wherever the suite shows the status.
- `capability`: the test failed, although the server answered every request with success. The failure is the suite's
  judgement of the text: the model is too small to choose a tool, copy an argument or end a string.
- `inapplicable`: the suite skipped the test, or it failed before any request reached the server.

Whatever is left is a `defect`.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

EXPECTATIONS = Path(__file__).parent / "expectations.toml"

Verdict = Literal["passed", "refused", "capability", "inapplicable", "defect"]
VERDICTS: tuple[Verdict, ...] = ("passed", "refused", "capability", "inapplicable", "defect")


@dataclass(frozen=True)
class Result:
    """What a suite reported for one test; `statuses` are the HTTP statuses the test saw, None where nobody recorded."""

    test: str
    outcome: Literal["passed", "failed", "skipped"]
    message: str = ""
    statuses: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Row:
    """An expectation: tests whose name matches `test` in full may fail with `message`, for `reason`."""

    suite: str
    test: str
    verdict: Verdict
    message: str
    reason: str

    def matches(self, result: Result) -> bool:
        return bool(re.fullmatch(self.test, result.test))

    def explains(self, result: Result) -> bool:
        """Whether the row covers this outcome: same message, and statuses that allow the row's verdict."""
        if result.outcome == "passed" or not re.search(self.message, result.message):
            return False
        statuses = result.statuses
        if self.verdict == "refused":
            refused = statuses is None or any(400 <= status < 500 or status == 501 for status in statuses)
            return result.outcome == "failed" and refused
        if self.verdict == "capability":
            succeeded = bool(statuses) and all(200 <= status < 300 for status in statuses)
            return result.outcome == "failed" and succeeded
        return result.outcome == "skipped" or statuses == ()


@dataclass(frozen=True)
class Judged:
    """A result with its verdict, and the reason where it is not passed."""

    result: Result
    verdict: Verdict
    reason: str = ""


class BadExpectations(Exception):
    """The file of expectations is malformed; the message names the row."""


def expectations(path: Path = EXPECTATIONS) -> list[Row]:
    """Read the rows of every suite, in the file's order."""
    rows = []
    for suite, entries in tomllib.loads(path.read_text()).items():
        for number, entry in enumerate(entries, 1):
            try:
                row = Row(suite=suite, **entry)
                re.compile(row.test)
                re.compile(row.message)
            except (TypeError, re.error) as error:
                raise BadExpectations(f"{path.name}, {suite}, row {number}: {error}") from error
            if row.verdict not in ("refused", "capability", "inapplicable"):
                raise BadExpectations(f"{path.name}, {suite}, row {number}: unknown verdict {row.verdict!r}")
            rows.append(row)
    return rows


def judge(results: Iterable[Result], rows: Iterable[Row]) -> list[Judged]:
    """Judge one suite's results by its rows."""
    rows = list(rows)
    return [_judge(result, [row for row in rows if row.matches(result)]) for result in results]


def _judge(result: Result, rows: list[Row]) -> Judged:
    if result.outcome == "passed":
        return Judged(result, "passed")
    for row in rows:
        if row.explains(result):
            return Judged(result, row.verdict, row.reason)
    return Judged(result, "defect", result.message)


def stale(results: Iterable[Result], rows: Iterable[Row]) -> list[str]:
    """Complaints about rows that hold for no test any more.

    A test that only needs a better model may pass: another processor rounds differently, and a small model then
    writes another text. A refusal that no longer happens is a change of the server.
    """
    results = list(results)
    complaints = []
    for row in rows:
        matching = [result for result in results if row.matches(result)]
        if not matching:
            complaints.append(f"{row.suite}: no test matches {row.test!r}")
        elif row.verdict != "capability":
            complaints += [
                f"{row.suite}: {result.test} passed, but expectations.toml says {row.verdict}"
                for result in matching
                if result.outcome == "passed"
            ]
    return complaints
