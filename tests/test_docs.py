"""The operators' page agrees with the code: error codes, limits and metrics."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path

from server.http import admission as limits
from tests.server.observability.test_metrics import Bench

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
STATUS = {"unavailable": 503, "refuse": 503, "not_found": 404}  # of functions that make an ApiError
CODE_AT = {"unavailable": 1, "refuse": 0, "not_found": 2}


def section(title: str) -> str:
    (text,) = [part for part in PAGE.split("\n## ")[1:] if part.splitlines()[0] == title]
    return text


def raised() -> Iterator[tuple[int, str]]:
    """Status and code of each error that the server's source makes with both written out."""
    for path in (ROOT / "server").rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(call, ast.Call):
                continue
            name = getattr(call.func, "id", getattr(call.func, "attr", ""))
            status = call.args[0] if name == "ApiError" else ast.Constant(STATUS.get(name))
            codes = [keyword.value for keyword in call.keywords if keyword.arg == "code"]
            if name in CODE_AT:
                codes += call.args[CODE_AT[name] : CODE_AT[name] + 1]
            if name == "not_found":
                codes = codes or [ast.Constant("not_found")]  # its default
            for code in codes:
                if (
                    isinstance(status, ast.Constant)
                    and isinstance(status.value, int)
                    and isinstance(code, ast.Constant)
                ):
                    yield status.value, {"queue": "queue_full"}.get(code.value, code.value)


def test_every_error_has_its_status_and_code_in_the_table():
    rows = re.findall(r"^\| (\d{3}) \| (.*?) \|", section("Errors"), re.M)
    listed = {(int(status), code) for status, codes in rows for code in re.findall(r"`(\w+)`", codes)}
    made = set(raised())
    assert len(made) > 20
    assert made == listed


def test_the_limits_are_those_of_the_code():
    text = section("Overload")
    assert f"({limits.MAX_OPEN_TOKENS:,})" in text
    assert f"| {limits.MAX_OPEN_INPUTS:,} |" in text
    assert f"| {limits.MAX_OPEN_BODIES} times" in text
    assert limits.SMALL_BODY == 64 << 10


def test_every_metric_is_listed_and_no_other():
    bench = Bench()
    bench.answer()
    bench.engine.status.last_step = bench.clock.now
    bench.engine.pid = os.getpid()
    families = set(re.findall(r"^# HELP (\S+)", bench.metrics.render().decode(), re.M))
    families.add("pequod:roofline_fraction")  # only where the machine has been measured
    assert set(re.findall(r"`((?:pequod|vllm):\w+|http_\w+)", section("Metrics"))) == families


def test_every_state_of_ready_is_explained():
    source = (ROOT / "server/health.py").read_text(encoding="utf-8")
    (states,) = re.findall(r"^    state: str  # (.*)$", source, re.M)
    assert set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", section("Health"), re.M)))) == set(
        states.split(" | ")
    )


def test_every_reason_of_a_refusal_is_explained():
    reasons = re.search(r"`vllm:admission_rejections_total\{reason\}`: (.*?)\.\n", section("Metrics"), re.S)
    assert set(re.findall(r"`(\w+)`", reasons[1])) == set(limits.REASONS)
