"""Servers that `pequod bench` starts."""

import os
import sys

import pytest

from server.cli.bench import processes
from server.cli.bench.processes import Child


@pytest.fixture
def child():
    started = Child([sys.executable, "-c", "import time; time.sleep(60)"], "http://127.0.0.1:1", "/ready", os.environ)
    yield started
    started.stop()


async def test_a_server_is_quiet_when_it_has_done_what_it_does_without_requests(child, monkeypatch):
    used = [0.0, 0.01, 0.015, 0.0155, 0.0155]  # in intervals of 10 ms: all of a core, half of it, a twentieth
    monkeypatch.setattr(processes, "QUIET_S", 0.01)
    monkeypatch.setattr(processes, "cpu_seconds", lambda pid: used.pop(0))
    await child.quiet()
    assert used == [0.0155]


async def test_a_server_that_is_never_quiet_is_measured_all_the_same(child, monkeypatch):
    monkeypatch.setattr(processes, "QUIET_S", 0.01)
    monkeypatch.setattr(processes, "QUIET_LIMIT_S", 0.05)
    monkeypatch.setattr(processes, "cpu_seconds", lambda pid: processes.time.perf_counter())
    await child.quiet()
