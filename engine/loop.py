"""EngineLoop: the background loop that turns requests into tokens, one step after the other."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from .batch import Batch, StepTokens
from .scheduler import Scheduler
from .types import EngineRequest, StepStats, TokenDelta


class StepOutOfMemory(Exception):
    """A step did not fit into memory; the next, smaller one may."""


class Step(Protocol):
    """A step in flight on the device."""

    def sample(self) -> StepTokens: ...


class Runner(Protocol):
    """What computes a step. Its methods run on the model thread alone."""

    def launch(self, batch: Batch) -> Step: ...


class Outbox(Protocol):
    """Where tokens go. `started` comes before the first step of a request, `drained` waits for a slow reader."""

    def started(self, ids: list[int]) -> None: ...
    def send(self, deltas: list[TokenDelta], stats: StepStats | None) -> None: ...
    async def drained(self) -> None: ...


class EngineLoop:
    """Schedules on the event loop's thread, computes on a thread of its own, so that mail is read meanwhile."""

    def __init__(self, scheduler: Scheduler, runner: Runner, outbox: Outbox, model_thread: ThreadPoolExecutor) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.outbox = outbox
        self.model_thread = model_thread
        self.debug = scheduler.config.debug
        self._mail = asyncio.Event()
        self._publish_s = 0.0

    async def run(self) -> None:
        """Step for ever; ends by cancellation or with the exception that a step raised."""
        while True:
            began = time.perf_counter()
            batch = self.scheduler.schedule()
            if batch is None:
                await self._idle()
                continue
            self.outbox.started([entered.seq_id for entered in batch.entered])
            scheduled = time.perf_counter()
            told = batch
            try:
                tokens = await asyncio.get_running_loop().run_in_executor(self.model_thread, self._compute, batch)
                deltas = self.scheduler.update(batch, tokens)
            except StepOutOfMemory:
                tokens, deltas = None, self.scheduler.abandon(batch)
                told = Batch(batch.step, [])  # nothing of it counts
            self._publish(told, tokens, deltas, scheduled - began)
            await self.outbox.drained()

    def _compute(self, batch: Batch) -> StepTokens:
        return self.runner.launch(batch).sample()

    def _publish(self, batch: Batch, tokens: StepTokens | None, deltas: list[TokenDelta], schedule_s: float) -> None:
        began = time.perf_counter()
        seconds = {"schedule": schedule_s, "publish": self._publish_s, **(tokens.seconds if tokens else {})}
        self.outbox.send(deltas, self.scheduler.stats(batch, seconds, time.time()))
        self._publish_s = time.perf_counter() - began  # told with the next step: this one's frame has gone
        if self.debug:
            self.scheduler.check()

    async def _idle(self) -> None:
        """Wait for mail; never spin. Nothing runs, so the books must add up now."""
        pool = self.scheduler.pool
        if self.scheduler.is_idle and pool.num_held:
            raise AssertionError(f"{pool.num_held} blocks are held and nobody runs")
        self._mail.clear()
        await self._mail.wait()

    def add(self, request: EngineRequest) -> None:
        self._answer(self.scheduler.add(request))

    def abort(self, request_id: int) -> None:
        self._answer(self.scheduler.abort(request_id))

    def _answer(self, delta: TokenDelta | None) -> None:
        if delta is not None:
            # With stats of a step without rows: when this was the last request, no further step would tell its blocks.
            self.outbox.send([delta], self.scheduler.stats(Batch(0, []), {}, time.time()))
        self._mail.set()
