"""benchmarks/soak.py, kill.py and overload.py: how they judge, and that each runs against a server."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys

import pytest

from benchmarks import kill
from benchmarks.kill import FAULTS, RESTARTED, has_cgroups
from benchmarks.overload import Window, goodput
from benchmarks.soak import COUNTS, grown, judge
from benchmarks.traffic import Answer
from server.cli.bench.client import Shot


def rounds(resident_kib, **counts):
    """Samples at every second."""
    fixed = dict.fromkeys(COUNTS, 5)
    return [
        {"at_s": at, "resident_kib": {"server": kib}, **fixed, **{name: each[at] for name, each in counts.items()}}
        for at, kib in enumerate(resident_kib)
    ]


def test_memory_that_grows_after_the_warm_up_is_reported_and_a_jump_in_it_is_not():
    assert grown(judge(rounds([100, 200, 300, 400, 500, *[500] * 5]))) == []
    assert grown(judge(rounds([500 + 5 * n for n in range(10)]))) == ["server"]
    assert grown(judge(rounds([500, 500, 500, 500, 500, 500, 620, 500, 500, 500]))) == []


def test_a_slope_is_given_with_its_interval():
    (memory,) = judge(rounds([500 + n for n in range(20)]))["memory"].values()
    assert memory["slope_kib_per_minute"] == 60
    assert memory["interval"] == [60, 60]


def test_a_count_that_does_not_come_back_has_grown():
    kib = [500] * 12
    assert grown(judge(rounds(kib, tasks=[7] * 6 + [7, 9, 7, 8, 7, 7]))) == []
    assert grown(judge(rounds(kib, tasks=[7] * 6 + [7, 9, 7, 8, 8, 9]))) == ["tasks"]


def chunk(text, **more):
    return {"choices": [{"index": 0, "delta": {"content": text}, **more}]}


def test_a_hash_is_of_the_text_and_not_of_its_pieces():
    whole, parts, other = Answer(), Answer(), Answer()
    whole.add(chunk("the sea", finish_reason="stop"))
    for event in (chunk("the "), chunk("sea"), chunk("", finish_reason="stop")):
        parts.add(event)
    other.add(chunk("the sea", finish_reason="length"))
    assert whole.hash == parts.hash != other.hash


def test_goodput_counts_the_tokens_of_whole_answers_within_the_window():
    done = Shot(0, 8, 4, sent=0.0, times=[0.5, 1.5, 2.5, 3.5], sizes=[1, 2, 1, 1])
    cut = Shot(0, 8, 4, sent=0.0, times=[1.5], sizes=[1], error="cut")
    assert goodput([done, cut], Window(ramp=1.0, seconds=2.0)) == 1.5


def test_a_fault_that_does_not_exist_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["kill", "--faults", "kill,nosuch"])
    with pytest.raises(SystemExit) as leave:
        kill.main()
    assert leave.value.code == 2
    assert "--faults nosuch: must be of kill, stop" in capsys.readouterr().err


@pytest.mark.parametrize(("problem", "code"), [({}, 0), ({"not_done": "ProcessLookupError: "}, 1)])
def test_a_fault_that_was_not_injected_fails_the_benchmark(monkeypatch, problem, code):
    async def measure(*_):
        counted = {"fault": "kill", "pause_s": 1.0, "open_streams": 9, "streams_resumed": 9, "engine_restarts": 1}
        return {"alone_as_together": True, "rounds": [{**counted, "changed": {}, **problem}]}

    monkeypatch.setattr(sys, "argv", ["kill", "--faults", "kill"])
    monkeypatch.setattr(kill, "Server", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(kill, "measure", measure)
    assert kill.main() == code


def measured(tmp_path, name, *arguments):
    """A benchmark's result, and its exit code."""
    path = tmp_path / "result.json"
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", *arguments, "--json", str(path)],
        env={**os.environ, "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert path.is_file(), done.stdout + done.stderr
    found = json.loads(path.read_text())
    assert found["command"].startswith(f"python -m benchmarks.{name} ")
    return found, done.returncode


@pytest.mark.slow
@pytest.mark.timeout(1200)  # several starts of a server
def test_soak_runs(tmp_path):
    found, _ = measured(tmp_path, "soak", "--seconds", "2", "--round", "0.7")  # all of it is warm-up
    assert found["failed"] == {}
    assert {"server", "engine.worker"} <= found["memory"].keys()
    assert all(min(found["counts"][name]) > 0 for name in COUNTS)


@pytest.mark.slow
@pytest.mark.timeout(1200)  # several starts of a server
def test_kill_changes_no_stream(tmp_path):
    faults = [name for name in FAULTS if name != "stop" and (name != "memory" or has_cgroups())]
    # A busy machine stops every process now and then: an engine that only waits must not count as hanging.
    arguments = ["--rounds", "1", "--tokens", "200", "--stall-seconds", "60", "--faults", ",".join(faults)]
    found, code = measured(tmp_path, "kill", *arguments)
    assert code == 0
    assert found["faults"].keys() == {*faults}
    for fault, row in found["faults"].items():
        assert (row["rounds"], row["not_done"], row["changed"]) == (1, 0, 0)
        assert row["streams"] > 0
        assert row["restarts"] == (fault in RESTARTED)


@pytest.mark.slow
@pytest.mark.timeout(1200)  # several starts of a server
def test_overload_runs(tmp_path):
    # Whether the figures hold is not asked of a test.
    found, _ = measured(tmp_path, "overload", "--seconds", "2", "--ramp", "3", "--rounds", "1")
    assert found["failed"] == []
    assert found["overload"][0]["offered_per_s"] > 0
    assert found["live_max_s"] > 0


@pytest.mark.slow
@pytest.mark.timeout(1200)  # several starts of a server
def test_streams_runs(tmp_path):
    found, code = measured(
        tmp_path, "streams", "--streams", "32", "--tokens", "60", "--interval-ms", "5", "--rounds", "1"
    )
    assert code == 0
    (result,) = found["results"]
    assert 0.8 < result["tokens_per_event"] < 60  # the first and the last event have no token
    assert result["rounds"][0]["tokens_per_s"] > 0
