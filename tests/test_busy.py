"""benchmarks/busy.py: its competitors end with the measurement, and its ratios."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from benchmarks import busy

ROOT = Path(__file__).parent.parent


def children() -> set[int]:
    """Return this process's children."""
    return {child.pid for child in psutil.Process().children()}


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def test_competitors_run_within_the_block_and_are_gone_after_it():
    before = children()
    with pytest.raises(KeyError), busy.competitors(2):
        competitors = children() - before
        assert len(competitors) == 2 and all(map(is_running, competitors))
        raise KeyError
    assert not any(map(is_running, competitors))


def test_competitors_end_when_the_measurement_is_killed():
    code = """
import psutil, time
from benchmarks import busy
with busy.competitors(2):
    print(*(child.pid for child in psutil.Process().children()), flush=True)
    time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) as measurement:
        assert measurement.stdout is not None
        competitors = [int(pid) for pid in measurement.stdout.readline().split()]
        measurement.kill()
    try:
        assert len(competitors) == 2
        for _ in range(600):
            if not any(map(is_running, competitors)):
                return
            time.sleep(0.1)
        pytest.fail("competitors outlive the measurement")
    finally:
        for pid in filter(is_running, competitors):
            os.kill(pid, signal.SIGKILL)


def test_a_ratio_is_compared_with_what_the_scheduler_grants():
    found = {0: [(0.1, 0.1), (0.2, 0.3), (0.3, 0.2)], 4: [(0.6, 0.2)], 16: [(3.6, 0.4)]}  # seconds, CPU seconds
    quiet, four, sixteen = busy.judged(found, threads=2, cores=2)
    assert (quiet["ratio"], quiet["fair_ratio"], quiet["of_fair"]) == (1, 1, 1)
    assert (four["ratio"], four["fair_ratio"]) == pytest.approx((3, 3))
    assert (sixteen["ratio"], sixteen["fair_ratio"], sixteen["of_fair"]) == pytest.approx((18, 9, 2))
    assert [row["cpu_seconds_per_token"] for row in (quiet, four, sixteen)] == [0.2, 0.2, 0.4]


def test_the_quiet_machine_is_always_measured():
    assert busy.counts("4,16,4") == [0, 4, 16]


def test_a_negative_number_of_competitors_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["busy", "model", "--competitors", "-1"])
    with pytest.raises(SystemExit):
        busy.main()
    assert "competitors" in capsys.readouterr().err
