"""The engine's clients, with the built-in model: every reader gets an end, whatever happens to the engine."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine import (
    Child,
    EngineConfig,
    EngineDied,
    EngineRequest,
    LocalEngine,
    ModelError,
    ProcessEngine,
    RequestStats,
    SamplingParams,
    TokenDelta,
    supervisor,
)
from server.__main__ import main as pequod
from tests.engine.faulty import FaultyChild, seed

CONFIG = EngineConfig(model="builtin", num_blocks=64, debug=True)
PROMPT = (5, 6, 7)
PROGRAM_S = 240.0  # for a program that imports torch, on any machine


def request(number: int, max_tokens: int = 400, **fields) -> EngineRequest:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, **fields)
    return EngineRequest(id=number, prompt_ids=PROMPT, params=params)


async def read(engine, asked: EngineRequest) -> tuple[list[int], str | None]:
    tokens: list[int] = []
    reason = None
    async for delta in engine.generate(asked):
        tokens += delta.token_ids
        reason = delta.finish_reason
    return tokens, reason


async def test_a_reader_with_unread_tokens_gets_these_and_then_the_error():
    engine = ProcessEngine(CONFIG)
    stream = engine.generate(request(1))
    waiting = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    engine._receive([TokenDelta(id=1, token_ids=(5,))], None)
    assert (await waiting).token_ids == (5,)
    engine._receive([TokenDelta(id=1, token_ids=(6,)), TokenDelta(id=1, token_ids=(7,))], None)
    engine._fail(EngineDied("the engine died"))
    assert (await anext(stream)).token_ids == (6, 7)
    with pytest.raises(EngineDied):
        await asyncio.wait_for(anext(stream), 10)


async def test_the_stats_count_preemptions_in_all_processes_of_the_engine():
    def told(preemptions: int, **fields) -> TokenDelta:
        stats = RequestStats(prompt_tokens=3, cached_tokens=0, output_tokens=1, arrived=0.0, preemptions=preemptions)
        return TokenDelta(id=1, token_ids=(5,), stats=stats, **fields)

    engine = ProcessEngine(CONFIG)
    entry = engine.submit(request(1), lambda: None)
    for preemptions in (0, 2, 3):
        engine._receive([told(preemptions)], None)
    engine._record_death()
    engine._record_death()
    engine._receive([told(1, finish_reason="length")], None)
    delta = entry.take()
    assert delta is not None and delta.stats is not None
    assert delta.stats.preemptions == 4


@pytest.mark.parametrize("kind", [LocalEngine, ProcessEngine])
async def test_closed_engine_raises_for_every_request(kind, monkeypatch):
    monkeypatch.setattr(supervisor, "Child", FaultyChild)
    engine = kind(CONFIG)
    await engine.start()
    await engine.ready()
    # Were this process slow, another one would have come to the end; so it hangs.
    reader = asyncio.create_task(read(engine, request(1, seed=seed("hang", 5))))
    while not engine.status.last_step:
        await asyncio.sleep(0.001)
    await engine.close()
    with pytest.raises(EngineDied, match="closed"):
        await reader
    with pytest.raises(EngineDied, match="closed"):
        await read(engine, request(2))
    with pytest.raises(EngineDied, match="closed"):
        await engine.ready()


async def test_closing_a_loading_engine_wakes_its_waiters():
    for turns in (0, 1, 3):
        engine = ProcessEngine(CONFIG)
        await engine.start()
        waiting = asyncio.create_task(engine.ready())
        for _ in range(turns):
            await asyncio.sleep(0)
        await engine.close()
        with pytest.raises(EngineDied):
            await waiting
        assert engine._child is None or engine._child.process.returncode is not None, "the child was not reaped"


async def test_prestarted_child_serves():
    child = Child()
    engine = ProcessEngine(CONFIG, child)
    await engine.start()
    try:
        await engine.ready()
        assert engine.pid == child.process.pid
        assert (await read(engine, request(1, max_tokens=3)))[1] == "length"
    finally:
        await engine.close()


def is_alive(pid: int) -> bool:
    """Return whether a process is running; a zombie is not."""
    try:
        os.kill(pid, 0)
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_failed_command_leaves_no_child(capsys, monkeypatch):
    started: list[Child] = []
    monkeypatch.setattr("engine.Child", lambda: started.append(Child()) or started[0])
    assert pequod(["serve", "--no-such-flag"]) == 2
    assert "unknown flag --no-such-flag" in capsys.readouterr().err
    assert [child.process.returncode for child in started] == [-signal.SIGKILL]
    started[0].end()  # again


def test_unused_prestarted_child_ends_with_its_parent():
    code = "import engine; child = engine.Child(); print(child.process.pid)"
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, timeout=PROGRAM_S, check=True)
    deadline = time.monotonic() + 30
    while is_alive(int(done.stdout)):
        assert time.monotonic() < deadline, "the child lives on"
        time.sleep(0.05)


async def test_invalid_model_folder_is_reported_and_leaves_no_process(tmp_path):
    with pytest.raises(ModelError, match=r"config\.json"):
        async with LocalEngine(EngineConfig(model=str(tmp_path))):
            pass
    assert [task for task in asyncio.all_tasks() if task.get_name() == "engine"] == []


async def test_abort_by_another_task_ends_the_reader():
    async with LocalEngine(CONFIG) as engine:
        reader = asyncio.create_task(read(engine, request(1, max_tokens=1900)))
        await asyncio.sleep(0.05)
        engine.abort(1)
        assert (await reader)[1] == "abort"
        assert (await read(engine, request(2, max_tokens=3)))[1] == "length"


async def test_reader_with_unread_tokens_gets_engine_died():
    async with LocalEngine(CONFIG) as engine:
        stream = engine.generate(request(1, max_tokens=1900))
        await anext(stream)
        await asyncio.sleep(0.1)
        await engine.close()
        with pytest.raises(EngineDied):
            while True:
                await anext(stream)


async def test_a_value_that_does_not_encode_hurts_only_its_own_request():
    engine = ProcessEngine(CONFIG)
    await engine.start()
    try:
        bad = asyncio.create_task(read(engine, request(1, seed=1 << 70)))
        good = asyncio.create_task(read(engine, request(2, max_tokens=3)))
        with pytest.raises(Exception, match="cannot be sent"):
            await bad
        assert (await good)[1] == "length"
    finally:
        await engine.close()
