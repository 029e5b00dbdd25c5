"""EngineLoop: the background loop that turns requests into tokens, step by step."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

from .batch import Batch, Masks, StepResult
from .grammar import GrammarError, GrammarsBusy
from .scheduler import Scheduler
from .types import EngineRequest, ErrorCode, StepStats, TokenDelta

if TYPE_CHECKING:
    from .grammar.grammars import Grammars


class StepOutOfMemory(Exception):
    """A step did not fit into memory; the next, smaller one may."""


class Step(Protocol):
    """A step in flight on the device."""

    def sample(self, masks: Masks | None = None) -> StepResult: ...


class Runner(Protocol):
    """Computes steps. Its methods are called on the model thread only."""

    def launch(self, batch: Batch) -> Step: ...


class Outbox(Protocol):
    """Sends tokens to the server. `started` precedes a request's first step; `drained` waits for a slow reader."""

    def started(self, ids: list[int]) -> None: ...
    def send(self, deltas: list[TokenDelta], stats: StepStats | None) -> None: ...
    async def drained(self) -> None: ...


class EngineLoop:
    """Schedules on the event loop's thread and computes on the model thread, so that messages are read meanwhile."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        outbox: Outbox,
        model_thread: ThreadPoolExecutor,
        grammars: Grammars | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.grammars = grammars
        self.runner = runner
        self.outbox = outbox
        self.model_thread = model_thread
        self.debug = scheduler.config.debug
        self._wakeup = asyncio.Event()
        self._compiling: dict[int, asyncio.Task[None]] = {}  # by request id; the scheduler does not have these yet
        self._publish_s = 0.0
        self._waits_since: float | None = None  # time.monotonic() since which a step is due; None: nothing to compute

    def stalled_s(self) -> float:
        """Return for how many seconds there has been work without a step being collected."""
        return 0.0 if self._waits_since is None else time.monotonic() - self._waits_since

    async def run(self) -> None:
        """Run steps until cancelled. Raises what a step raises."""
        try:
            while True:
                await self._step()
        finally:
            for task in self._compiling.values():
                task.cancel()
            if self.grammars is not None:
                self.grammars.close()

    async def _step(self) -> None:
        began = time.perf_counter()
        self._waits_since = self._waits_since or time.monotonic()
        batch = self.scheduler.schedule()
        if batch is None:
            await self._idle()
            return
        self.outbox.started([entered.seq_id for entered in batch.entered])
        scheduled = time.perf_counter()
        reported = batch
        try:
            result = await self._result(batch)
            deltas = self.scheduler.update(batch, result)
        except StepOutOfMemory:
            result, deltas = None, self.scheduler.abandon(batch)
            reported = Batch(batch.step, [])  # nothing was computed
        self._publish(reported, result, deltas, scheduled - began)
        self._waits_since = None  # waiting for a slow server is no stall
        await self.outbox.drained()

    async def _result(self, batch: Batch) -> StepResult:
        """Compute a step on the model thread. The masks of rows with a grammar are computed here meanwhile."""
        rows = self.grammars.rows(batch) if self.grammars is not None else []
        masks: Future[Masks] | None = Future() if rows else None
        computing = asyncio.get_running_loop().run_in_executor(self.model_thread, self._compute, batch, masks)
        if self.grammars is None or masks is None:
            return await computing
        began = time.perf_counter()
        try:
            masks.set_result(self.grammars.masks(batch, rows))
        except BaseException as error:
            masks.set_exception(error)  # the model thread waits for it
        seconds = time.perf_counter() - began
        result = self.grammars.advance(batch, rows, await computing, self.scheduler.output_left)
        result.seconds["masks"] = seconds
        return result

    def _compute(self, batch: Batch, masks: Future[Masks] | None) -> StepResult:
        step = self.runner.launch(batch)
        return step.sample() if masks is None else step.sample(masks.result())

    def _publish(self, batch: Batch, result: StepResult | None, deltas: list[TokenDelta], schedule_s: float) -> None:
        began = time.perf_counter()
        self._forget(deltas)
        seconds = {"schedule": schedule_s, "publish": self._publish_s, **(result.seconds if result else {})}
        self.outbox.send(deltas, self.scheduler.stats(batch, seconds, time.time()))
        self._publish_s = time.perf_counter() - began  # reported with the next step: this one's message has been sent
        if self.debug:
            self.scheduler.check()

    async def _idle(self) -> None:
        """Wait for a request. Nothing runs, so no block may be held."""
        self._waits_since = None
        pool = self.scheduler.pool
        if self.scheduler.is_idle and pool.num_held:
            raise AssertionError(f"{pool.num_held} blocks are held and no sequence runs")
        self._wakeup.clear()
        await self._wakeup.wait()

    def add(self, request: EngineRequest) -> None:
        if request.params.grammar is None:
            self._respond(self.scheduler.add(request))
        elif request.id in self._compiling:
            error = f"request id {request.id} is in use"
            self._respond(TokenDelta(id=request.id, finish_reason="error", error=error))
        else:
            self.outbox.started([request.id])  # compiling a grammar may crash this process
            self._compiling[request.id] = asyncio.create_task(self._compile(request), name="grammar")

    async def _compile(self, request: EngineRequest) -> None:
        """Compile a request's grammar, then put it into the queue."""
        try:
            if self.grammars is None:
                raise GrammarError("this engine has no support for grammars")
            matcher = await self.grammars.compile(request)
            forced = matcher.begin(self.scheduler.output_limit(request) - 1)
        except GrammarError as error:
            delta: TokenDelta | None = TokenDelta(
                id=request.id, finish_reason="error", error=str(error), field="grammar"
            )
        except GrammarsBusy as error:
            delta = TokenDelta(id=request.id, finish_reason="error", error=str(error), code=ErrorCode.GRAMMARS_BUSY)
        except Exception as error:  # a bug; the request must still end
            message = f"the grammar cannot be compiled: {type(error).__name__}"
            delta = TokenDelta(id=request.id, finish_reason="error", error=message)
        else:
            delta = self.scheduler.add(request, forced)
            if delta is None:
                self.grammars.add(request.id, matcher)
        del self._compiling[request.id]
        self._respond(delta)

    def abort(self, request_id: int) -> None:
        task = self._compiling.pop(request_id, None)
        if task is None:
            self._respond(self.scheduler.abort(request_id))
        else:
            task.cancel()
            self._respond(TokenDelta(id=request_id, finish_reason="abort"))

    def _forget(self, deltas: list[TokenDelta]) -> None:
        for delta in deltas:
            if delta.finish_reason and self.grammars is not None:
                self.grammars.remove(delta.id)

    def _respond(self, delta: TokenDelta | None) -> None:
        if delta is not None:
            self._forget([delta])
            # With the figures of an empty step: after the last request no other step reports that its blocks are free.
            self.outbox.send([delta], self.scheduler.stats(Batch(0, []), {}, time.time()))
        self._wakeup.set()
