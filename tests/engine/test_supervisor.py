"""The supervisor: an engine that dies or hangs is replaced, and only a request that kills it fails."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import re
import shutil
import signal
import threading
import time
from types import SimpleNamespace

import psutil
import pytest
import torch
from msgspec.structs import replace

from engine import (
    EngineConfig,
    EngineDied,
    EngineInfo,
    EngineRequest,
    LocalEngine,
    ProcessEngine,
    SamplingParams,
    channel,
    hub,
    memory,
    models,
    supervisor,
)
from engine.attention import choose
from engine.channel import Alive
from engine.machine_memory import Machine
from engine.supervisor import ending
from tests.engine.faulty import OTHER_MACHINE, FaultyChild, seed, stopping
from tests.fakes import INFO
from tests.live import WAIT_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

CONFIG = EngineConfig(model="builtin", num_blocks=256, max_seqs=16, debug=True)
PROMPT = (5, 6, 7)


def request(number: int, max_tokens: int = 40, **fields) -> EngineRequest:
    params = SamplingParams(max_tokens=max_tokens, **{"temperature": 1.0, "seed": number, **fields})
    return EngineRequest(id=number, prompt_ids=(*PROMPT, number), params=params)


async def read(engine, asked: EngineRequest) -> list[int]:
    tokens: list[int] = []
    async for delta in engine.generate(asked):
        tokens += delta.token_ids
        assert delta.finish_reason in (None, "length"), delta
    return tokens


@pytest.fixture(autouse=True)
def faulty(monkeypatch):
    monkeypatch.setattr(supervisor, "Child", FaultyChild)
    monkeypatch.setattr(supervisor, "BACKOFF_S", 0.05)
    monkeypatch.setattr(supervisor, "LOADING_STALL_S", 300.0)  # a busy machine may take long to start a process


async def undisturbed(numbers: list[int], **fields) -> list[list[int]]:
    async with LocalEngine(CONFIG) as engine:
        return await asyncio.gather(*(read(engine, request(number, **fields)) for number in numbers))


async def with_engine(work, stall_s: float = 60.0, child: FaultyChild | None = None) -> None:
    engine = ProcessEngine(CONFIG, child, stall_s=stall_s)
    await engine.start()
    try:
        await engine.ready()
        await work(engine)
    finally:
        await engine.close()


async def test_of_sixteen_neighbours_of_a_request_that_kills_fifteen_end_byte_for_byte(caplog):
    numbers = list(range(1, 16))
    expected = await undisturbed(numbers)

    async def work(engine: ProcessEngine) -> None:
        poison = asyncio.create_task(read(engine, request(16, seed=seed("segfault", 7))))
        others = [asyncio.create_task(read(engine, request(number))) for number in numbers]
        with pytest.raises(EngineDied, match="while this request was running"):
            await poison
        assert await asyncio.gather(*others) == expected
        assert 2 <= engine.status.restarts <= 8
        assert await read(engine, request(17)) != [], "the engine works on"

    await with_engine(work)
    assert any("was killed by SIGSEGV" in record.getMessage() for record in caplog.records)


async def test_the_log_says_when_the_engine_is_back_and_how_many_requests_continue(caplog):
    caplog.set_level(logging.INFO)

    async def work(engine: ProcessEngine) -> None:
        await (await killed_in_a_stream(engine))

    await with_engine(work, child=stopping(20))
    back = [record.getMessage() for record in caplog.records if "is back" in record.getMessage()]
    assert len(back) == 1
    assert re.fullmatch(r"the engine is back after \d+\.\d s; 1 request continues", back[0])


# An engine that is stopped looks like one whose loop is blocked; the next test stops one.
@pytest.mark.parametrize("kind", ["hang", "block"])
async def test_an_engine_that_hangs_is_replaced_and_its_streams_go_on(kind, caplog):
    expected = await undisturbed([1, 2])

    async def work(engine: ProcessEngine) -> None:
        others = [asyncio.create_task(read(engine, request(number))) for number in (1, 2)]
        with pytest.raises(EngineDied):
            await read(engine, request(3, seed=seed(kind, 5)))
        assert await asyncio.gather(*others) == expected

    await with_engine(work, stall_s=3.0)
    reason = "has work and has made no step" if kind == "hang" else "has given no sign of life"
    assert any(reason in record.getMessage() for record in caplog.records)


async def test_an_engine_that_is_stopped_from_outside_is_replaced_and_no_request_is_lost():
    [expected] = await undisturbed([1], max_tokens=300)

    async def work(engine: ProcessEngine) -> None:
        process = psutil.Process(engine.pid)
        stream = asyncio.create_task(read(engine, request(1, max_tokens=300)))
        while process.status() != psutil.STATUS_STOPPED:
            await asyncio.sleep(0.01)
        engine.stall_s = 1.0  # for this process alone: the next one may be slow
        while not engine.status.restarts:
            await asyncio.sleep(0.01)
        engine.stall_s = 60.0
        assert await stream == expected
        assert engine.status.restarts == 1

    await with_engine(work, child=stopping(20))


async def test_an_engine_that_hangs_while_it_loads_is_replaced(monkeypatch):
    monkeypatch.setattr(supervisor, "LOADING_STALL_S", 2.0)
    engine = ProcessEngine(CONFIG, stall_s=1.0)
    await engine.start()
    try:
        while engine.pid is None:
            await asyncio.sleep(0.001)
        first = engine.pid
        os.kill(first, signal.SIGSTOP)
        while engine.pid == first:
            await asyncio.sleep(0.01)
        monkeypatch.setattr(supervisor, "LOADING_STALL_S", 300.0)  # the next one may be slow
        engine.stall_s = 60.0
        await engine.ready()
        assert engine.pid != first
        assert len(await read(engine, request(1))) == 40
    finally:
        await engine.close()


async def test_an_idle_engine_says_that_it_is_alive_and_has_no_work():
    engine = Watched(CONFIG)
    await engine.start()
    try:
        await engine.ready()
        await read(engine, request(1))
        told = engine.signs
        while engine.signs < told + 2:
            await asyncio.sleep(0.01)
            assert engine.status.stalled_s == 0.0
    finally:
        await engine.close()


async def test_an_engine_without_work_is_no_hanging_one_however_old_its_last_step_is(monkeypatch):
    monkeypatch.setattr(supervisor, "WATCH_S", 0.001)
    engine, kills, looks = ProcessEngine(CONFIG, stall_s=1.0), [], 0

    def limit() -> float:
        nonlocal looks
        looks += 1
        return 1.0

    monkeypatch.setattr(engine, "_silence_limit", limit)
    engine.status.phase = "ready"
    engine.status.last_step = time.monotonic() - 1000
    engine.status.heartbeat = time.monotonic() + 1000  # so that it stays fresh
    watch = asyncio.create_task(engine._watch(SimpleNamespace(process=SimpleNamespace(kill=lambda: kills.append(1)))))
    while looks < 3:
        await asyncio.sleep(0.001)
    assert not kills and not watch.done()
    engine.status.stalled_s = 5000.0  # with work that waited so long it would be killed
    await watch
    assert kills


async def test_time_in_which_the_server_itself_did_not_run_does_not_count(monkeypatch):
    """A container that was paused for longer than the limit goes on with the engine that it has."""
    monkeypatch.setattr(supervisor, "WATCH_S", 0.001)
    engine, kills, now, looks = ProcessEngine(CONFIG, stall_s=60.0), [], 1000.0, 0

    def clock() -> float:
        nonlocal now
        now += 0.01
        return now

    def limit() -> float:
        nonlocal looks
        looks += 1
        return 60.0

    monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=clock))
    monkeypatch.setattr(engine, "_silence_limit", limit)
    engine.status.phase, engine.status.heartbeat = "ready", now
    watch = asyncio.create_task(engine._watch(SimpleNamespace(process=SimpleNamespace(kill=lambda: kills.append(now)))))
    for pause in (0, 100, 100):
        seen, now = looks, now + pause
        while looks < seen + 3:
            await asyncio.sleep(0.001)
    engine.status.stalled_s = 230.0  # of which it was paused for 200
    seen = looks
    while looks < seen + 3:
        await asyncio.sleep(0.001)
    assert not kills and not watch.done()
    engine.status.stalled_s = 265.0
    await watch
    assert kills


async def test_a_pause_without_work_does_not_count_for_a_later_step(monkeypatch):
    monkeypatch.setattr(supervisor, "WATCH_S", 0.001)
    engine, kills = ProcessEngine(CONFIG, stall_s=60.0), []
    engine.status.phase = "ready"
    child = SimpleNamespace(process=SimpleNamespace(kill=lambda: kills.append(True)))
    engine._paused_s = 8 * 3600.0  # the container was paused at night
    engine._handle(Alive("ready"))
    engine._handle(Alive("ready", stalled_s=59.0))
    watch = asyncio.create_task(engine._watch(child))
    await asyncio.sleep(0.1)
    assert not kills
    engine._handle(Alive("ready", stalled_s=61.0))
    await asyncio.wait_for(watch, WAIT_S)
    assert kills


async def test_an_engine_is_replaced_on_a_machine_without_room_for_another_thread(monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    async def work(engine):
        reading = asyncio.create_task(read(engine, request(1, 300)))
        while not engine.status.last_step:
            await asyncio.sleep(0.01)
        with monkeypatch.context() as full:
            full.setattr(threading.Thread, "start", refuse)
            os.kill(engine.pid, signal.SIGKILL)
            assert len(await reading) == 300

    await with_engine(work)


def test_a_slow_machine_has_more_time_for_a_step_than_the_limit():
    engine = ProcessEngine(CONFIG, stall_s=60.0)
    assert engine._step_limit() == 60.0
    assert INFO.roofline is None
    from engine import Roofline

    roofline = Roofline(
        bytes_per_s=1e9, flops_per_s=1e9, pair_flops_per_s=1e9, weights_bytes=100 * 10**9, kv_bytes_per_token=1,
        flops_per_token=1, flops_per_pair=1, flops_per_logit=1,
    )  # fmt: skip
    engine.info = replace(INFO, roofline=roofline)
    assert engine._step_limit() == pytest.approx(400, rel=0.01), "four times the time that reading the weights takes"
    assert engine._silence_limit() == 60.0, "on a CPU heartbeats go on during a step"
    engine.info = replace(engine.info, device="cuda:0")
    assert engine._silence_limit() == engine._step_limit()


async def test_what_the_system_lacks_for_a_moment_is_no_failure_of_the_engine(monkeypatch, caplog):
    monkeypatch.setattr(supervisor, "SCARCE_S", 0.05)
    lacking = 0

    class Scarce(FaultyChild):
        def __init__(self) -> None:
            nonlocal lacking
            if lacking:
                lacking -= 1
                raise OSError(errno.EMFILE, "Too many open files")
            super().__init__()

    monkeypatch.setattr(supervisor, "Child", Scarce)
    [expected] = await undisturbed([1], max_tokens=300)

    async def work(engine: ProcessEngine) -> None:
        nonlocal lacking
        lacking = 3 * supervisor.MAX_RESTARTS
        assert await (await killed_in_a_stream(engine)) == expected
        assert lacking == 0 and engine.status.restarts == 1

    await with_engine(work, child=stopping(20))
    assert any("Too many open files" in record.getMessage() for record in caplog.records)


class Watched(ProcessEngine):
    """Records the Ready message of each child process, and counts signs of life."""

    def __init__(self, config: EngineConfig, child: FaultyChild | None = None) -> None:
        super().__init__(config, child)
        self.lives: list[channel.Ready] = []
        self.signs = 0

    def _handle(self, message: object) -> None:
        if isinstance(message, channel.Ready):
            self.lives.append(message)
        self.signs += isinstance(message, channel.Alive)
        super()._handle(message)


def size_of(info: EngineInfo) -> int:
    """Bytes of memory that an engine's plan counts."""
    config = replace(CONFIG, num_blocks=info.num_blocks)
    spec = models.describe(hub.fetch("builtin", weights=False).path, config)
    backend = choose(info.attention, torch.device("cpu"), spec.layers, spec.dtype, info.product).backend
    return memory.arrange(spec, config, Machine("cpu", 1 << 40, 1 << 40), backend).memory_bytes


async def killed_in_a_stream(engine: ProcessEngine) -> asyncio.Task[list[int]]:
    """A stream of 300 tokens whose engine, which has stopped in it, has just been killed."""
    stream = asyncio.create_task(read(engine, request(1, max_tokens=300)))
    while not engine.status.last_step:
        await asyncio.sleep(0.001)
    os.kill(engine.pid, signal.SIGKILL)
    return stream


async def test_a_restarted_engine_is_the_first_one_again_on_a_machine_that_has_changed(monkeypatch):
    """Less memory than a first start would ask for, and other kernels that are measured to be faster."""
    [expected] = await undisturbed([1], max_tokens=300)
    engine = Watched(EngineConfig(model="builtin", max_seqs=16, debug=True), stopping(20))
    await engine.start()
    try:
        info = await engine.ready()
        monkeypatch.setenv(OTHER_MACHINE, str(size_of(info) + (1 << 20)))
        assert await (await killed_in_a_stream(engine)) == expected
        first, second = engine.lives
        assert second.config == first.config == engine.config
        same = {"load_seconds": 0.0, "roofline": None}
        assert replace(second.info, **same) == replace(first.info, **same)
    finally:
        await engine.close()

    assert first.config.num_blocks == info.num_blocks
    for name in ("device", "dtype", "attention", "implementation", "cpu_isa", "products"):
        assert getattr(first.config, name) != "auto", name


async def test_a_restart_waits_for_memory_that_is_not_free_yet(monkeypatch, caplog):
    monkeypatch.setattr(supervisor, "SCARCE_S", 0.05)
    [expected] = await undisturbed([1], max_tokens=300)

    async def work(engine: ProcessEngine) -> None:
        monkeypatch.setenv(OTHER_MACHINE, str(1 << 20))
        stream = await killed_in_a_stream(engine)
        while "cannot be started again" not in caplog.text:
            await asyncio.sleep(0.01)
        assert engine.status.phase == "restarting"
        monkeypatch.setenv(OTHER_MACHINE, str(1 << 40))
        assert await stream == expected
        assert engine.status.restarts == 1

    await with_engine(work, child=stopping(20))
    assert "of memory that can be had now" in caplog.text


async def test_an_engine_whose_weights_have_changed_is_not_started_again(monkeypatch, tmp_path):
    """A stream would go on with another model's tokens."""
    folder = shutil.copytree(hub.fetch("builtin", weights=True).path, tmp_path / "model")
    monkeypatch.setattr(supervisor, "MAX_RESTARTS", 1)
    engine = ProcessEngine(replace(CONFIG, model=str(folder)), stopping(20))
    await engine.start()
    try:
        await engine.ready()
        with (folder / "model.safetensors").open("r+b") as file:
            file.seek(-2, os.SEEK_END)
            file.write(b"\x00\x00")
        with pytest.raises(EngineDied, match=r"could not be started again: the weights of .* have changed"):
            await (await killed_in_a_stream(engine))
    finally:
        await engine.close()


async def test_an_abort_of_a_request_that_waits_for_its_turn_ends_it():
    async def work(engine: ProcessEngine) -> None:
        poison = asyncio.create_task(read(engine, request(16, seed=seed("exit", 0))))
        stream = engine.generate(request(1, max_tokens=1500))
        reading = asyncio.create_task(anext(stream))
        while engine.status.restarts < 2:
            await asyncio.sleep(0.01)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await stream.aclose()
        with pytest.raises(EngineDied):
            await poison
        assert len(await read(engine, request(2))) == 40
        assert not engine._open

    await with_engine(work)


async def test_closing_an_engine_is_no_error_of_its_own(caplog):
    caplog.set_level(logging.INFO)

    async def work(engine: ProcessEngine) -> None:
        await read(engine, request(1))

    await with_engine(work)
    assert not [record for record in caplog.records if record.name == "pequod.engine"]


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (0, "has ended with exit code 0"),
        (3, "has ended with exit code 3"),
        (-11, "was killed by SIGSEGV"),
        (-9, "was killed by SIGKILL"),
        (-200, "was killed by signal 200"),
        (None, "has closed its socket"),
    ],
)
def test_how_a_process_has_ended(code, text):
    assert ending(code) == text


def test_the_engine_dies_with_its_parent_while_its_model_thread_hangs():
    """Its loop is blocked too, so that it cannot detect that its socket is closed."""
    import subprocess
    import sys

    code = f"""
import asyncio, os
from engine import EngineRequest, SamplingParams
from engine.supervisor import ProcessEngine
from engine import supervisor
from tests.engine.faulty import FaultyChild
from tests.engine.test_supervisor import CONFIG
supervisor.Child = FaultyChild

async def main():
    engine = ProcessEngine(CONFIG)
    await engine.start()
    await engine.ready()
    params = SamplingParams(max_tokens=9, seed={seed("block", 2)})
    count = 0
    async for delta in engine.generate(EngineRequest(id=1, prompt_ids=(5,), params=params)):
        count += len(delta.token_ids)
        if count == 2:
            await asyncio.sleep(0.3)
            print(engine.pid, flush=True)
            os._exit(0)

asyncio.run(main())
"""
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=240, check=True
    )
    from tests.live import alive

    deadline = time.monotonic() + 20
    while alive(int(done.stdout)):
        assert time.monotonic() < deadline, "the engine has outlived its parent"
        time.sleep(0.02)
