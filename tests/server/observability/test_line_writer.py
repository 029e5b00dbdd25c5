"""Log lines: a reader who does not read them stops nothing, and what is dropped is counted."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest
from msgspec.structs import replace

from engine import StepStats
from server.observability import line_writer as lines_module
from server.observability.line_writer import LineWriter
from server.observability.logs import StepLog
from tests.fakes import FakeEngine, model_folder, serving
from tests.live import eventually, held_port
from tests.server.wire import CHAT, QUESTION

ROOT = Path(__file__).parents[3]


@pytest.fixture
def pipe():
    """A pipe whose reader does nothing, and its writing end as a text file."""
    reader, writer = os.pipe()
    file = os.fdopen(writer, "w", buffering=1)
    yield reader, file
    os.close(reader)  # a thread that waits for it to be read goes on
    with contextlib.suppress(OSError):
        file.close()


def test_lines_are_written_in_their_order(tmp_path):
    with (tmp_path / "log").open("w") as file:
        writer = LineWriter(file)
        for i in range(1000):
            writer.write(f"line {i}")
        writer.close()
        assert writer.dropped == 0
    assert (tmp_path / "log").read_text().splitlines() == [f"line {i}" for i in range(1000)]


def test_unread_lines_are_dropped_and_counted_and_no_writer_waits(pipe, monkeypatch):
    monkeypatch.setattr(lines_module, "MAX_LINES", 100)
    monkeypatch.setattr(lines_module, "CLOSE_S", 0.05)
    _, file = pipe
    writer = LineWriter(file)
    for _ in range(3000):
        writer.write("x" * 99)  # 300 kB; a pipe holds 64
    assert 3000 - 100 - 700 <= writer.dropped < 3000
    writer.close()  # ends all the same
    assert writer._thread.is_alive()


def test_a_reader_that_comes_back_gets_what_comes_then(pipe, monkeypatch):
    monkeypatch.setattr(lines_module, "MAX_LINES", 10)
    reader, file = pipe
    writer = LineWriter(file)
    for _ in range(2000):
        writer.write("x" * 99)
    read: list[bytes] = []

    def drain() -> None:
        while not read or b"the last" not in read[-1]:
            read.append(os.read(reader, 1 << 16))

    thread = threading.Thread(target=drain)
    thread.start()
    eventually(writer._lines.empty)
    writer.write("the last")
    thread.join(30)
    assert read[-1].endswith(b"the last\n")
    writer.close()


def test_a_file_that_cannot_be_written_blocks_no_writer(tmp_path):
    full = open("/dev/full", "w", buffering=1)
    writer = LineWriter(full)
    writer.write("lost")
    eventually(lambda: writer.dropped == 1)
    assert writer.error is not None and "space" in str(writer.error)
    writer.close()
    with contextlib.suppress(OSError):
        full.close()


async def test_a_step_log_on_a_full_disk_ends_and_says_so(caplog):
    engine = FakeEngine()
    log = StepLog(Path("/dev/full"))
    engine.on_step.append(log.write)
    async for _ in engine.generate(_request()):
        await asyncio.sleep(0.01)
    eventually(lambda: log._writer.error is not None)
    async for _ in engine.generate(_request()):
        pass
    assert log._is_broken
    log.close()
    assert [r.getMessage() for r in caplog.records if "step log" in r.getMessage()] == [
        "the step log ends here: No space left on device"
    ]


def _request():
    from engine import EngineRequest, SamplingParams

    return EngineRequest(id=1, prompt_ids=(1, 2, 3), params=SamplingParams(max_tokens=5))


async def test_the_step_log_has_a_line_for_each_step_that_computed_something(tmp_path):
    steps: list[StepStats] = []
    engine = FakeEngine()
    engine.on_step.append(steps.append)
    async for _ in engine.generate(_request()):
        pass
    log = StepLog(tmp_path / "steps")
    for rows in (((1, 7),), (), ((1, 1),)):  # the second one as after an abort between two steps
        log.write(replace(steps[0], rows=rows))
    log.close()
    lines = [json.loads(line) for line in (tmp_path / "steps").read_text().splitlines()]
    assert [line["rows"] for line in lines] == [[[1, 7]], [[1, 1]]]
    assert lines[0].keys() == set(StepStats.__struct_fields__)


def test_a_handler_that_fails_to_format_costs_one_line(capsys):
    from server.observability import logs

    before = logging.getLogger().handlers[:], logging.getLogger().level
    try:
        writer = logs.configure("text", "info")
        logging.getLogger("pequod.x").info("%d", "no number")
        logging.getLogger("pequod.x").info("still here")
        writer.close()
        assert capsys.readouterr().err.endswith("info still here\n")
    finally:
        logging.basicConfig(handlers=before[0], level=before[1], force=True)


async def test_dropped_lines_are_a_metric(tmp_path):
    async with serving(model_folder(tmp_path / "m"), step_log=tmp_path / "steps") as (client, app):
        app.state.pequod.metrics.step_log._writer.dropped = 7
        text = (await client.get("/metrics")).text
        assert re.search(r'^pequod:log_lines_dropped_total\{log="steps"\} 7\.0$', text, re.MULTILINE)
        assert re.search(r'^pequod:log_lines_dropped_total\{log="server"\} \d', text, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_server_with_an_unread_stderr_keeps_responding():
    held = held_port()
    port = held.getsockname()[1]
    child = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "server",
            "serve",
            "builtin",
            "--port",
            str(port),
            "--log-format",
            "json",
            "--drain-seconds",
            "1",
        ],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:

            def is_ready() -> bool:
                try:
                    return client.get("/ready").status_code == 200
                except httpx.TransportError:
                    return False

            eventually(is_ready, 240)
            body = {"messages": QUESTION, "max_tokens": 1}
            # A line has some 250 bytes: 600 of them are more than the pipe holds.
            for _ in range(600):
                assert client.post(CHAT, json=body).status_code == 200
            assert client.get("/live").status_code == 200
        child.terminate()
        assert child.wait(60) == 0
    finally:
        child.kill()
        child.communicate()
        held.close()
