"""The harness of `make conformance`: how results are read, judged and shown. The suites themselves are not run."""

import json
import re
import subprocess

import pytest

from tests.conformance import __main__ as command
from tests.conformance import langchain, lm_eval, load, openresponses, page, verdicts
from tests.conformance.place import ROOT, Place, Report, Unavailable
from tests.conformance.verdicts import BadExpectations, Judged, Result, Row


def row(verdict, message="whale", test="a.*"):
    return Row("suite", test, verdict, message, "its reason")


REFUSED, TOO_SMALL, SKIPPED = row("refused"), row("capability"), row("inapplicable")


@pytest.mark.parametrize(
    ("result", "rows", "expected"),
    [
        (Result("a", "passed"), [], "passed"),
        (Result("a", "failed", "a whale", (200, 400)), [REFUSED], "refused"),
        (Result("a", "failed", "a whale", (501,)), [REFUSED], "refused"),
        (Result("a", "failed", "a whale"), [REFUSED], "refused"),
        (Result("a", "failed", "a whale", (200,)), [TOO_SMALL], "capability"),
        (Result("a", "skipped", "a whale", ()), [SKIPPED], "inapplicable"),
        (Result("a", "failed", "a whale", ()), [SKIPPED], "inapplicable"),
        (Result("a1", "failed", "a whale", (200,)), [REFUSED, TOO_SMALL], "capability"),
        # Without a row, with another message or another name.
        (Result("a", "failed", "a whale", (400,)), [], "defect"),
        (Result("a", "failed", "a shark", (400,)), [REFUSED], "defect"),
        (Result("b", "failed", "a whale", (400,)), [REFUSED], "defect"),
        (Result("b a", "failed", "a whale", (400,)), [REFUSED], "defect"),
        (Result("ab", "failed", "a whale", (400,)), [row("refused", test="a")], "defect"),
        (Result("a", "skipped", "a whale", ()), [], "defect"),
        # The server did something else than the row's verdict says.
        (Result("a", "failed", "a whale", (200,)), [REFUSED], "defect"),
        (Result("a", "failed", "a whale", (500,)), [REFUSED], "defect"),
        (Result("a", "failed", "a whale", (200, 400)), [TOO_SMALL], "defect"),
        (Result("a", "failed", "a whale", (200, 500)), [TOO_SMALL], "defect"),
        (Result("a", "failed", "a whale", ()), [TOO_SMALL], "defect"),
        (Result("a", "failed", "a whale"), [TOO_SMALL], "defect"),
        (Result("a", "skipped", "a whale", (200,)), [TOO_SMALL], "defect"),
        (Result("a", "skipped", "a whale", (400,)), [REFUSED], "defect"),
        (Result("a", "failed", "a whale", (200,)), [SKIPPED], "defect"),
    ],
)
def test_a_verdict_needs_a_row_whose_message_and_statuses_agree(result, rows, expected):
    [judged] = verdicts.judge([result], rows)
    assert judged.verdict == expected
    assert judged.reason == {"passed": "", "defect": result.message}.get(expected, "its reason")


def test_a_row_that_covers_no_test_or_a_refusal_that_is_gone_is_stale():
    results = [Result("a1", "passed"), Result("a2", "failed", "whale", (400,))]
    assert verdicts.stale(results, [row("refused", test="a2"), row("capability")]) == []
    assert verdicts.stale(results, [row("refused")]) == ["suite: a1 passed, but expectations.toml says refused"]
    assert verdicts.stale(results, [row("capability", test="b")]) == ["suite: no test matches 'b'"]


def test_the_committed_rows_belong_to_suites():
    rows = verdicts.expectations()
    assert rows and {row.suite for row in rows} <= {*command.SUITES}


@pytest.mark.parametrize(
    ("entry", "complaint"),
    [
        ('verdict = "refused"\nmessage = ""', "reason"),
        ('verdict = "defect"\nmessage = ""\nreason = ""', "unknown verdict 'defect'"),
        ('verdict = "refused"\nmessage = "("\nreason = ""', "unterminated"),
        ('verdict = "refused"\nmessage = ""\nreason = ""\nowner = "me"', "owner"),
    ],
)
def test_a_malformed_row_is_named(tmp_path, entry, complaint):
    path = tmp_path / "rows.toml"
    path.write_text(f'[[whales]]\ntest = "a"\n{entry}\n')
    with pytest.raises(BadExpectations, match=rf"rows\.toml, whales, row 1: .*{complaint}"):
        verdicts.expectations(path)


def done(stdout, status=1):
    return subprocess.CompletedProcess([], status, stdout, "bun is ill")


def test_openresponses_results_have_the_statuses_that_the_suite_saw():
    tests = [
        {"id": "good", "status": "passed", "errors": []},
        {"id": "words", "status": "failed", "errors": ["Expected a call"], "response": {"status": "completed"}},
        {"id": "image", "status": "failed", "errors": ["HTTP 400: [object Object]"], "response": {"error": "no image"}},
        {"id": "socket", "status": "failed", "errors": ["WebSocket connection failed"]},
    ]
    assert openresponses.read(done(json.dumps({"results": tests}))) == [
        Result("the suite runs", "passed"),
        Result("good", "passed", "", (200,)),
        Result("words", "failed", "Expected a call", (200,)),
        Result("image", "failed", 'HTTP 400: [object Object] {"error": "no image"}', (400,)),
        Result("socket", "failed", "WebSocket connection failed", None),
    ]


@pytest.mark.parametrize("stdout", ["", "error: no zod", '{"summary": {}}'])
def test_openresponses_output_without_results_is_one_failure(stdout):
    [result] = openresponses.read(done(stdout))
    assert (result.outcome, result.statuses) == ("failed", None) and "bun is ill" in result.message


def test_junit_results_have_outcome_message_and_statuses(tmp_path):
    def case(name, inside="", statuses="200"):
        recorded = f'<properties><property name="statuses" value="{statuses}" /></properties>'
        return f'<testcase classname="tests.x.TestChat" name="{name}">{recorded}{inside}</testcase>'

    report = tmp_path / "report.xml"
    cases = [
        case("good"),
        case("bad", '<failure message="no whale">line 1</failure>', "200 400"),
        case("broken", '<error message="no fixture">line 2</error>', ""),
        case("left", '<skipped message="no images">line 3</skipped>', ""),
        '<testcase classname="tests.x.TestChat" name="recorded"><skipped message="no tape">line 4</skipped></testcase>',
    ]
    report.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    assert langchain.read(report) == [
        Result("TestChat.good", "passed", "", (200,)),
        Result("TestChat.bad", "failed", "no whale\nline 1", (200, 400)),
        Result("TestChat.broken", "failed", "no fixture\nline 2", ()),
        Result("TestChat.left", "skipped", "no images\nline 3", ()),
        Result("TestChat.recorded", "skipped", "no tape\nline 4", None),
    ]


def sample(*responses, text="the whale"):
    requests = {f"gen_args_{n}": {"arg_0": "It was", "arg_1": text} for n in range(len(responses))}
    return {"arguments": requests, "resps": [[response] for response in responses]}


@pytest.mark.parametrize(
    ("task", "theirs", "ours", "agree"),
    [
        # Two tokens, so 2e-5 is allowed.
        (lm_eval.CHOICE, [["-3.0", "True"], ["-9.0", "False"]], [["-3.00001", "True"], ["-9.0", "False"]], True),
        (lm_eval.CHOICE, [["-3.0", "True"], ["-9.0", "False"]], [["-3.0", "True"], ["-9.00003", "False"]], False),
        (lm_eval.CHOICE, [["-3.0", "True"]], [["-3.0", "False"]], False),
        (lm_eval.ROLLING, ["-3.0"], ["-3.00001"], True),
        (lm_eval.ROLLING, ["-3.0"], ["-2.99997"], False),
        (lm_eval.GENERATE, ["Lily. She"], [" Lily. She"], True),
        (lm_eval.GENERATE, ["Lily. She"], [" Lily. He"], False),
    ],
)
def test_backends_agree_within_the_tolerance_of_each_token(task, theirs, ours, agree):
    result = lm_eval.compare(
        "local-completions", (task, 3), sample(*theirs), sample(*ours), lambda text: len(text.split())
    )
    assert result.test == f"local-completions: {task.removeprefix('pequod_')} 3"
    assert (result.outcome == "passed") == agree == (not result.message)


def test_a_document_without_a_sample_does_not_agree():
    result = lm_eval.compare("local-completions", (lm_eval.ROLLING, 0), sample("-3.0"), None, len)
    assert (result.outcome, result.message) == ("failed", "Pequod has no sample of it")


def test_lm_eval_samples_are_read_by_task_and_document(tmp_path):
    folder = tmp_path / "some__model"
    folder.mkdir()
    lines = [{"doc_id": 0, "resps": []}, {"doc_id": 1, "resps": []}]
    (folder / "samples_pequod_choice_2026-01-01T00-00-00.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert lm_eval.read(tmp_path) == {("pequod_choice", 0): lines[0], ("pequod_choice", 1): lines[1]}


def test_a_client_that_counts_otherwise_than_the_server_fails():
    before, after = load.Counts(1, 100, 10), load.Counts(17, 1124, 522)
    assert [*load.checks("chat", load.Counts(16, 1024, 511), before, after)] == [
        Result("chat: requests", "passed"),
        Result("chat: prompt tokens", "passed"),
        Result("chat: generated tokens", "failed", "the client counted 511, Pequod 512"),
    ]
    assert [result.test for result in load.checks("embeddings", load.Counts(16, None, None), before, after)] == [
        "embeddings: requests"
    ]


JUDGED = [Judged(Result("a|b", "failed"), "refused", "no | here"), Judged(Result("c", "passed"), "passed")]
RUNS = [page.SuiteRun("whales", "whales 1.0", JUDGED), page.SuiteRun("sharks", missing="no sea")]


def test_the_table_has_a_line_for_each_suite_and_a_reason_for_each_test_that_is_not_passed():
    text = page.markdown(RUNS)
    assert "| whales | whales 1.0 | 2 | 1 | 1 | 0 | 0 | 0 |" in text
    assert "| sharks | not run: no sea |" in text
    assert (
        "## Refused on purpose\n\n| suite | tests | reason |\n|---|---|---|\n| whales | `a\\|b` | no \\| here |" in text
    )
    assert "## Defects" not in text and "## Passed" not in text
    assert len({line.count("|") for line in text.split("\n\n")[0].splitlines()}) == 1


def test_the_table_is_written_between_the_markers_of_the_page(tmp_path, monkeypatch):
    path = tmp_path / "page.md"
    monkeypatch.setattr(page, "PAGE", path)
    path.write_text(f"before\n{page.BEGIN}\nold\n{page.END}\nafter\n")
    for text in ("one", "two"):
        page.write(text)
        written = path.read_text()
        assert written.startswith("before\n") and written.endswith("\nafter\n") and f"\n\n{text}\n\n" in written
    assert "old" not in written and "one" not in written
    path.write_text("no markers")
    with pytest.raises(SystemExit, match="lacks the markers"):
        page.write("three")
    assert path.read_text() == "no markers"


def test_the_committed_page_has_the_markers_and_every_suite():
    text = (ROOT / "docs/conformance.md").read_text()
    assert text.count(page.BEGIN) == text.count(page.END) == 1
    assert not [name for name in command.SUITES if not re.search(rf"^\| {name} \| ", text, re.M)]


def test_a_suite_that_lacks_something_is_not_run_and_says_what(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("OPEN_RESPONSES_DIR", raising=False)
    monkeypatch.delenv("PEQUOD_TEST_DATA", raising=False)
    with Place(environments=tmp_path) as place:
        missing = {name: command.run_suite(name, place, []).missing for name in command.SUITES}
        monkeypatch.setenv("OPEN_RESPONSES_DIR", str(tmp_path))
        with pytest.raises(Unavailable, match=r"has no bin/compliance-test\.ts"):
            openresponses.run(place)
        monkeypatch.setenv("PEQUOD_TEST_DATA", str(tmp_path))
        with pytest.raises(Unavailable, match="models/stories260k"):
            lm_eval.run(place)
    assert missing["openresponses"] == "OPEN_RESPONSES_DIR does not name a checkout of openresponses/openresponses"
    assert missing["lm-eval"] == "PEQUOD_TEST_DATA does not name a folder with models/stories260k"
    for name in ("langchain", *load.CLIENTS):
        assert missing[name] == f".venv-conformance-{name} is missing; `make conformance` makes it"
    shown = capsys.readouterr().err
    assert all(f"{name}: not run: {reason}\n" in shown for name, reason in missing.items())


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (Result("a", "passed"), "| whales | whales 1.0 | 1 | 1 | 0 | 0 | 0 | 0 |"),
        (Result("a", "failed", "no whale"), "DEFECT whales, a: no whale"),
        (Result("b", "passed"), "STALE EXPECTATION whales: no test matches 'a'"),
    ],
)
def test_the_command_fails_on_a_defect_and_on_a_stale_row(tmp_path, monkeypatch, capsys, result, said):
    monkeypatch.setattr(command, "SUITES", {"whales": lambda place: Report("whales 1.0", [result])})
    monkeypatch.setattr(verdicts, "expectations", lambda: [Row("whales", "a", "capability", "text", "its reason")])
    monkeypatch.setattr("sys.argv", ["conformance", "--json", str(tmp_path / "out.json")])
    assert command.main() == (0 if said.startswith("|") else 1)
    assert said in capsys.readouterr().out
    [test] = json.loads((tmp_path / "out.json").read_text())["whales"]["tests"].values()
    assert test["verdict"] == ("defect" if result.outcome == "failed" else "passed")


def test_the_table_of_some_suites_is_not_written_into_the_page(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["conformance", "--suite", "vllm", "--write"])
    with pytest.raises(SystemExit):
        command.main()
    assert "--write needs every suite" in capsys.readouterr().err


def test_the_makefile_has_an_environment_for_each_suite():
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(r"^SUITES \?= (.*)$", makefile, re.M)[1].split() == [*command.SUITES]
    files = {path.stem for path in (ROOT / "tests/conformance/requirements").iterdir()}
    assert files == {*command.SUITES}
