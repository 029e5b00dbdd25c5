"""The documents agree with the code: the names and paths that they give, and the error codes, limits and metrics."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from server.http import admission as limits
from tests.server.observability.test_metrics import Bench

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGE = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
STATUS = {"unavailable": 503, "refuse": 503, "_check": 503, "not_found": 404}  # of functions that make an ApiError
CODE_AT = {"unavailable": 1, "refuse": 0, "_check": 3, "not_found": 2}


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
    source = (ROOT / "server/state.py").read_text(encoding="utf-8")
    (states,) = re.findall(r"^    state: str  # (.*)$", source, re.M)
    assert set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", section("Health"), re.M)))) == set(
        states.split(" | ")
    )


def test_every_alert_is_listed():
    alerts = re.findall(
        r"^ *- alert: (\w+)$", (ROOT / "docker/prometheus/alerts.yml").read_text(encoding="utf-8"), re.M
    )
    assert re.findall(r"^\| `(\w+)` \|", section("Alerts"), re.M) == alerts


def test_every_reason_of_a_refusal_is_explained():
    reasons = re.search(r"`vllm:admission_rejections_total\{reason\}`: (.*?)\.\n", section("Metrics"), re.S)
    assert set(re.findall(r"`(\w+)`", reasons[1])) == set(limits.REASONS)


def defines(tree: ast.Module | ast.ClassDef, names: list[str]) -> bool:
    """Whether a module or class has the attribute `names[0]`, that one `names[1]`, and so on."""
    for node in tree.body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) if name == names[0]:
                return len(names) == 1
            case ast.ClassDef(name=name) if name == names[0]:
                return len(names) == 1 or defines(node, names[1:])
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)) if name == names[0]:
                return len(names) == 1
    return False


def unresolved(text: str) -> list[str]:
    """The references `path.py:Name.attr` of a document whose file or name does not exist."""
    missing = []
    for path, name in re.findall(r"`([\w./-]+\.py):([A-Za-z_][\w.]*)`", text):
        file = ROOT / path
        if not file.is_file() or not defines(ast.parse(file.read_text(encoding="utf-8")), name.split(".")):
            missing.append(f"{path}:{name}")
    return missing


def test_every_function_that_a_document_names_exists():
    references = {document.name: unresolved(document.read_text(encoding="utf-8")) for document in DOCUMENTS}
    assert not any(references.values()), references


def test_a_reference_to_a_missing_file_or_name_is_found():
    good = "`engine/scheduler.py:Scheduler.schedule` `engine/prefix_cache.py:chain` `engine/types.py:EngineRequest.id`"
    bad = ["engine/missing.py:Scheduler", "engine/scheduler.py:Missing", "engine/scheduler.py:Scheduler.missing"]
    assert unresolved(" ".join([good, *(f"`{reference}`" for reference in bad)])) == bad


REFERENCE = re.compile(r"((?:`\w+`(?:, | and |, and )?)+)(?: \([^()`]*\))? (?:in|of) `([\w./-]+\.(?:py|cpp|h))`")


def unknown_names(text: str) -> list[str]:
    """The references "`name` in `path`" of a document whose file lacks the name; of Python files as a definition."""
    missing = []
    for names, path in REFERENCE.findall(text):
        file = ROOT / path
        if not file.is_file():  # a path relative to the directory of its row
            continue
        source = file.read_text(encoding="utf-8")
        known = set(re.findall(r"\w+", source)) if file.suffix != ".py" else definitions(ast.parse(source))
        missing += [f"{path}: {name}" for name in re.findall(r"`(\w+)`", names) if name not in known]
    return missing


def definitions(tree: ast.Module) -> set[str]:
    """The names of all functions, classes, variables and attributes that a module defines."""
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                found.add(name)
    return found


def test_every_name_in_a_file_that_a_document_gives_exists():
    references = {document.name: unknown_names(document.read_text(encoding="utf-8")) for document in DOCUMENTS}
    assert not any(references.values()), references
    page = (ROOT / "docs/contributing.md").read_text(encoding="utf-8")
    assert len(REFERENCE.findall(page)) > 40


def test_a_name_that_a_file_lacks_is_found():
    text = "`schedule` and `shape` in `engine/scheduler.py`, `BLOCK` of `engine/kernels/matmul.h`"
    assert unknown_names(text) == ["engine/scheduler.py: shape"]


def test_every_path_that_a_document_names_exists():
    roots = "server|engine|tests|configs|docker|benchmarks|docs"
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        paths = re.findall(rf"`((?:{roots})/[\w./-]*)`", text)
        assert not [path for path in paths if not (ROOT / path).exists()], document.name


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives to the headings of a document."""
    titles = [title.replace("`", "") for title in re.findall(r"^#+ (.*)$", text, re.M)]
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_link_between_documents_leads_somewhere():
    for document in DOCUMENTS:
        for path, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", document.read_text(encoding="utf-8")):
            target = (document.parent / path) if path else document
            assert target.exists(), f"{document.name}: {path}"
            assert not anchor or anchor in anchors(target.read_text(encoding="utf-8")), f"{document.name}: #{anchor}"


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_each_reading_path_has_fewer_than_3000_lines():
    done = subprocess.run(["make", "-s", "path"], capture_output=True, text=True, cwd=ROOT, check=True)
    totals = [int(total) for total in re.findall(r"^\s*(\d+) total$", done.stdout, re.M)]
    assert len(totals) == 2, done.stdout
    assert max(totals) < 3000
    assert "engine/batch.py" in done.stdout
