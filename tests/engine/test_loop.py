"""EngineLoop with a runner that computes nothing: order of events, aborts in flight, failures."""

import asyncio
import socket
import threading

import pytest

from engine import channel, loop
from engine.batch import Batch, Sampled, StepResult
from engine.config import EngineConfig
from engine.loop import EngineLoop, StepOutOfMemory
from engine.scheduler import Scheduler
from engine.step_thread import LoopThread, ModelThread
from engine.types import EngineRequest, SamplingParams
from tests.live import WAIT_S


class Runner:
    """Samples token 9; can be blocked during a step and made to fail."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.go = threading.Event()
        self.go.set()
        self.in_step = threading.Event()
        self.raises: list[Exception | None] = []
        self.threads: set[str] = set()

    def launch(self, batch: Batch) -> "Step":
        self.calls.append(("launch", batch.step))
        return Step(self, batch)


class Step:
    def __init__(self, runner: Runner, batch: Batch) -> None:
        self.runner = runner
        self.batch = batch

    def sample(self, masks=None) -> None:
        runner = self.runner
        runner.threads.add(threading.current_thread().name)
        runner.in_step.set()
        assert runner.go.wait(10)
        error = runner.raises.pop(0) if runner.raises else None
        if error:
            raise error

    def result(self) -> StepResult:
        self.runner.calls.append(("result", self.batch.step))
        return StepResult(
            [Sampled([9]) if row.is_sampled else None for row in self.batch.rows], seconds={"forward": 0.25}
        )


class Outbox:
    def __init__(self) -> None:
        self.events: list = []
        self.ended = asyncio.Event()

    def started(self, ids) -> None:
        if ids:
            self.events.append(("started", *ids))

    def send(self, deltas, stats) -> None:
        self.events += [(delta.id, delta.finish_reason, *delta.token_ids) for delta in deltas]
        self.stats = stats or getattr(self, "stats", None)
        if any(delta.finish_reason for delta in deltas):
            self.ended.set()

    async def drained(self) -> None:
        pass


class Bench:
    def __init__(self, when_idle=None, thread=None, **config) -> None:
        self.runner, self.outbox = Runner(), Outbox()
        settings = EngineConfig(
            model="t", max_len=64, max_seqs=4, max_batched_tokens=16, block_size=4, debug=True, **config
        )
        self.scheduler = Scheduler(settings, num_blocks=16, vocab_size=100)
        self.thread = thread or ModelThread()
        self.loop = EngineLoop(self.scheduler, self.runner, self.outbox, self.thread, when_idle=when_idle)

    def add(self, request_id: int, prompt=(1, 2), max_tokens: int = 2) -> None:
        self.loop.add(EngineRequest(id=request_id, prompt_ids=prompt, params=SamplingParams(max_tokens=max_tokens)))

    async def __aenter__(self) -> "Bench":
        self.task = asyncio.create_task(self.loop.run())
        return self

    async def __aexit__(self, *_) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        if isinstance(self.thread, ModelThread):
            await self.thread.close()

    async def end(self) -> None:
        await asyncio.wait_for(self.outbox.ended.wait(), WAIT_S)
        self.outbox.ended.clear()


on_both = pytest.mark.parametrize("thread", [ModelThread, LoopThread])


async def test_a_request_is_announced_before_its_first_step_and_ends_once():
    async with Bench() as bench:
        bench.add(1)
        await bench.end()
        assert bench.outbox.events == [("started", 1), (1, None, 9), (1, "length", 9)]
        assert bench.runner.threads == {"model"}
        assert bench.outbox.stats.seconds.keys() >= {"schedule", "forward", "publish"}


async def test_messages_are_read_during_a_step_and_an_abort_ends_a_request_that_is_in_it():
    async with Bench() as bench:
        bench.runner.go.clear()
        bench.add(1, max_tokens=1000)
        await asyncio.to_thread(bench.runner.in_step.wait, WAIT_S)
        bench.loop.abort(1)
        bench.add(2)
        assert bench.outbox.events == [("started", 1), (1, "abort")]
        await bench.end()
        bench.runner.go.set()
        await bench.end()
        assert bench.outbox.events[2:] == [("started", 2), (2, None, 9), (2, "length", 9)]
        assert bench.scheduler.pool.num_held == 0


@pytest.mark.parametrize("is_ahead", [False, True])
async def test_a_step_on_the_loops_own_thread_lets_the_next_one_have_what_came_during_it(is_ahead):
    ours, theirs = socket.socketpair()
    pipe = channel.Channel(channel.Downward)
    await pipe.open(theirs)
    request = EngineRequest(id=2, prompt_ids=(1, 2), params=SamplingParams(max_tokens=1))
    frame = channel.Channel(channel.Upward)._encoder.encode(channel.Add(request))

    async with Bench(thread=LoopThread(), async_scheduling=is_ahead) as bench:

        async def listen() -> None:
            while isinstance(message := await pipe.receive(), channel.Add):
                bench.loop.add(message.request)

        def launch(batch: Batch) -> Step:
            if batch.step == 2:
                ours.sendall(len(frame).to_bytes(4, "little") + frame)
            batches.append([row.seq_id for row in batch.rows])
            return Step(bench.runner, batch)

        batches: list[list[int]] = []
        bench.runner.launch = launch  # type: ignore[method-assign]
        listening = asyncio.create_task(listen())
        bench.add(1, max_tokens=9)
        await bench.end()
        assert batches[:3] == [[1], [1], [1, 2]]
        assert bench.runner.threads == {threading.current_thread().name}
        ours.close()
        await asyncio.wait_for(listening, WAIT_S)
    pipe.close()


async def test_request_that_can_never_run_fails_at_once():
    async with Bench() as bench:
        bench.add(1, prompt=(1,) * 64)
        assert bench.outbox.events == [(1, "error")]


async def test_what_can_wait_is_done_on_the_model_thread_when_there_is_no_work(monkeypatch):
    monkeypatch.setattr(loop, "QUIET_S", 0.01)
    calls, go, was_called = [], threading.Event(), asyncio.Event()
    running = asyncio.get_running_loop()

    def when_idle():
        calls.append(threading.current_thread().name)
        running.call_soon_threadsafe(was_called.set)
        assert go.wait(10)
        return len(calls) < 3

    async with Bench(when_idle) as bench:
        await asyncio.wait_for(was_called.wait(), WAIT_S)
        monkeypatch.setattr(loop, "QUIET_S", 1000.0)  # or the next call could come before this test looks
        bench.add(1)
        go.set()
        await bench.end()
        assert bench.outbox.events[-1] == (1, "length", 9)
        assert len(calls) == 1, "a request waits for one call at most"
        monkeypatch.setattr(loop, "QUIET_S", 0.01)
        bench.add(2)
        await bench.end()
        while len(calls) < 3:
            await asyncio.sleep(0.01)
        bench.add(3)
        await bench.end()
        await asyncio.sleep(0.05)
        assert calls == ["model"] * 3, "it is not called again when it has done all"


@on_both
async def test_out_of_memory_fails_one_request_and_the_loop_goes_on(thread):
    async with Bench(thread=thread()) as bench:
        bench.runner.raises = [StepOutOfMemory()]
        bench.add(1, prompt=(1, 2, 3))
        bench.add(2)
        await bench.end()
        assert (1, "error") in bench.outbox.events
        await bench.end()
        assert bench.outbox.events[-1] == (2, "length", 9)


@on_both
async def test_any_other_failure_of_a_step_ends_the_loop(thread):
    async with Bench(thread=thread()) as bench:
        bench.runner.raises = [RuntimeError("broken")]
        bench.add(1)
        with pytest.raises(RuntimeError, match="broken"):
            await asyncio.wait_for(asyncio.shield(bench.task), WAIT_S)


@on_both
async def test_a_step_is_launched_before_the_one_before_it_is_collected(thread):
    async with Bench(async_scheduling=True, thread=thread()) as bench:
        bench.add(1, max_tokens=3)
        await bench.end()
        assert bench.outbox.events == [("started", 1), (1, None, 9), (1, None, 9), (1, "length", 9)]
    one, two, three = range(1, 4)
    assert bench.runner.calls == [
        ("launch", one), ("launch", two), ("result", one), ("launch", three), ("result", two), ("result", three),
    ]  # fmt: skip


@on_both
async def test_each_step_is_collected_before_the_next_one_without_asynchronous_scheduling(thread):
    async with Bench(thread=thread()) as bench:
        bench.add(1, max_tokens=2)
        await bench.end()
    assert bench.runner.calls == [("launch", 1), ("result", 1), ("launch", 2), ("result", 2)]


@on_both
async def test_a_step_that_runs_out_of_memory_ahead_of_another_is_tried_again_and_fails_nobody(thread):
    async with Bench(async_scheduling=True, thread=thread()) as bench:
        bench.runner.raises = [None, StepOutOfMemory()]
        bench.add(1, max_tokens=3)
        await bench.end()
        assert bench.outbox.events == [("started", 1), (1, None, 9), (1, None, 9), (1, "length", 9)]
        assert bench.runner.calls[:4] == [("launch", 1), ("launch", 2), ("result", 1), ("launch", 3)]


@on_both
async def test_a_step_that_runs_out_of_memory_alone_fails_a_request(thread):
    async with Bench(async_scheduling=True, thread=thread()) as bench:
        bench.runner.raises = [None, StepOutOfMemory(), StepOutOfMemory()]
        bench.add(1, max_tokens=3)
        await bench.end()
        assert bench.outbox.events == [("started", 1), (1, None, 9), (1, "error")]


class Grammars:
    """Of whose rows all have a grammar that allows everything."""

    def rows(self, batch: Batch) -> list[int]:
        return list(range(len(batch.rows)))

    def masks(self, batch: Batch, rows: list[int]) -> None:
        return None

    def close(self) -> None:
        pass


@pytest.mark.parametrize("is_ahead", [False, True])
async def test_a_failure_to_launch_a_step_with_grammars_ends_the_loop_with_its_reason(monkeypatch, is_ahead):
    def fail(self, batch: Batch) -> None:
        raise ValueError("no device")

    monkeypatch.setattr(Runner, "launch", fail)
    async with Bench(async_scheduling=is_ahead) as bench:
        bench.loop.grammars = Grammars()
        bench.add(1)
        with pytest.raises(ValueError, match="no device"):
            await asyncio.wait_for(bench.task, WAIT_S)
    assert bench.outbox.events == [("started", 1)]
