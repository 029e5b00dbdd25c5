"""The simulation of the whole server: one seed gives one trace, a failure names its replay, each fault happens."""

import os
import subprocess
import sys

import pytest

from engine import client
from tests.simulation import __main__ as simulation


def run(hash_seed: str, *args: str) -> list[str]:
    env = {**os.environ, "PYTHONHASHSEED": hash_seed}
    command = [sys.executable, "-m", "tests.simulation", "--workers", "1", *args]
    return subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout.splitlines()


def test_the_trace_depends_on_the_seed_alone():
    one, two = run("1", "--steps", "1500", "--seed", "3"), run("2", "--steps", "1500", "--seed", "3")
    assert one[-1].startswith("trace ") and one[-1] == two[-1]
    assert run("1", "--steps", "1500", "--seed", "4")[-1] != one[-1]


def test_every_fault_of_the_plan_happens_and_most_requests_are_answered():
    _, counts, _ = simulation.simulate(2, 0, 1, 5000, 150)
    for fault in ("die", "hang", "stop", "loading", "scarce", "outside", "memory", "drain"):
        assert counts[f"fault {fault}"], fault
    assert counts["streams resumed"] and counts["requests blamed"] and counts["preemptions"]
    assert counts["request complete"] > 500
    for outcome in ("gone", "cancelled", "slow", "503 draining", "503 engine_died", "500 engine_error"):
        assert counts[f"request {outcome}"], outcome


def test_every_check_holds_when_steps_are_launched_ahead():
    steps, counts, _ = simulation.simulate(1, 0, 1, 5000, 150, depth=1)
    assert steps >= 5000
    assert counts["request complete"] > 300
    for seen in ("void rows", "preemptions", "streams resumed", "fault memory", "fault die"):
        assert counts[seen], seen


@pytest.mark.parametrize("depth", ["0", "1"])
def test_the_cost_of_a_step_is_printed_for_each_number_of_rows(depth, capsys):
    simulation.main(["--loop", "--rows", "1,3", "--depth", depth])
    head, *lines = capsys.readouterr().out.splitlines()
    names = ["rows", "schedule", "launch", "sample", "collect", "update", "publish", "rest", "total"]
    assert head.split()[: len(names)] == names
    assert [int(line.split()[0]) for line in lines] == [1, 3]


def test_a_failure_says_how_to_replay_it(monkeypatch, capsys):
    monkeypatch.setattr(client.Client, "abort", lambda *_: None)
    with pytest.raises(AssertionError):
        simulation.main(["--steps", "2000", "--workers", "1", "--seed", "1"])
    assert "replay with:\npython -m tests.simulation --seed 1 --episode" in capsys.readouterr().out
