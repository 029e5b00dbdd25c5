"""What the status of an engine's process says while the process loads, is replaced or does nothing."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from engine import EngineConfig, ProcessEngine, StepStats, supervisor
from engine.types import MemoryShort
from tests.engine.faulty import stopping
from tests.engine.test_supervisor import CONFIG, killed_in_a_stream, with_engine

STEP = StepStats(
    step=1, time=0.0, rows=((1, 3),), budget=64, prompt_tokens=3, decode_tokens=0, running=1, waiting=0, blocks_free=1,
    blocks_cached=0, blocks_held=1, blocks_total=2, preempted=0, prefix_queries=3, prefix_hits=0,
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_while_an_engine_is_replaced_nothing_runs_in_it(monkeypatch):
    monkeypatch.setattr(supervisor, "LOADING_STALL_S", 300.0)  # a busy machine may take long to start a process

    async def work(engine: ProcessEngine) -> None:
        stream = await killed_in_a_stream(engine)
        assert engine.status.running == 1
        while engine.status.phase != "restarting":
            await asyncio.sleep(0.001)
        assert (engine.status.running, engine.status.waiting) == (0, 0)
        assert len(await stream) == 300

    await with_engine(work, child=stopping(20))


async def test_an_engine_that_loads_has_more_time_for_a_sign_of_life(monkeypatch):
    """Imports and the first read of a large file delay heartbeats, also if the limit of a step is short."""
    monkeypatch.setattr(supervisor, "WATCH_S", 0.001)
    monkeypatch.setattr(supervisor, "LOADING_STALL_S", 1000.0)
    engine, kills, looks = ProcessEngine(CONFIG, stall_s=1.0), [], 0

    def limit() -> float:
        nonlocal looks
        looks += 1
        return 1.0

    monkeypatch.setattr(engine, "_step_limit", limit)
    engine.status.phase, engine.status.heartbeat = "loading", time.monotonic() - 10
    watch = asyncio.create_task(engine._watch(SimpleNamespace(process=SimpleNamespace(kill=lambda: kills.append(1)))))
    while looks < 3 and not watch.done():
        await asyncio.sleep(0.001)
    assert not kills and not watch.done()
    engine.status.heartbeat = time.monotonic() - 2000
    await watch
    assert kills


async def test_what_computed_nothing_is_no_step():
    """As after an abort between two steps: a hanging engine would look alive while its clients give up."""
    engine = ProcessEngine(CONFIG)
    engine._receive([], STEP)
    last = engine.status.last_step
    assert last > 0
    engine._receive([], replace(STEP, step=2, rows=(), running=0))
    assert (engine.status.last_step, engine.status.running) == (last, 0)


async def test_what_memory_does_not_allow_is_told_with_its_ways_out():
    engine = ProcessEngine(EngineConfig(model="builtin", kv_cache_memory=1 << 10))
    await engine.start()
    try:
        with pytest.raises(MemoryShort) as caught:
            await engine.ready()
        assert str(caught.value).count("\ntry: ") == 3
    finally:
        await engine.close()
