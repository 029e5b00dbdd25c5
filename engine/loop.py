"""EngineLoop: the background loop that turns requests into tokens, step by step."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from .batch import Batch, Masks, StepResult
from .grammar import GrammarError, GrammarsBusy
from .scheduler import Scheduler
from .step_thread import StepThread
from .types import EngineRequest, ErrorCode, StepStats, TokenDelta

if TYPE_CHECKING:
    from .grammar.grammars import Grammars


# Without work for this long, the engine is idle: less than a user takes to react to a response.
QUIET_S = 0.2


class StepOutOfMemory(Exception):
    """A step did not fit into memory; the next, smaller one may."""


class Step(Protocol):
    """A step in flight on the device."""

    def sample(self, masks: Masks | None = None) -> object:
        """Queue the sampling of its tokens. Called once, before the next step is launched."""
        ...

    def result(self) -> StepResult:
        """Wait for the sampled tokens."""
        ...


class Runner(Protocol):
    """Computes steps. Its methods, and those of a Step, are called on the StepThread only."""

    def launch(self, batch: Batch) -> Step: ...


class Outbox(Protocol):
    """Sends tokens to the server. `started` precedes a request's first step; `drained` waits for a slow reader."""

    def started(self, ids: list[int]) -> None: ...
    def send(self, deltas: list[TokenDelta], stats: StepStats | None) -> None: ...
    async def drained(self) -> None: ...


@dataclass(slots=True, eq=False)
class Flight:
    """A step from its schedule to its collection."""

    batch: Batch
    schedule_s: float
    grammar_rows: list[int]  # that sample with a grammar
    masks_s: float = 0.0
    step: Step | None = None  # once it has been launched; None: it ran out of memory


class EngineLoop:
    """Schedules on the event loop's thread, and launches and collects steps on a StepThread.

    With asynchronous scheduling each step is launched before the one before it is collected: while the device computes
    one step, the host updates the sequences with the tokens of the last one and prepares the next one.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        outbox: Outbox,
        thread: StepThread,
        grammars: Grammars | None = None,
        *,
        when_idle: Callable[[], bool] | None = None,
    ) -> None:
        """`when_idle` is called on the StepThread while there is no work, until it returns false."""
        self.scheduler, self.grammars = scheduler, grammars
        self.runner, self.outbox, self.thread = runner, outbox, thread
        self.is_ahead = bool(scheduler.config.async_scheduling)
        self.debug = scheduler.config.debug
        self._flight: Flight | None = None  # the step that was launched and not collected
        self._when_idle = when_idle
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
        """Launch the next step and collect the one before it; without asynchronous scheduling, collect the same one."""
        began = time.perf_counter()
        self._waits_since = self._waits_since or time.monotonic()
        batch = self.scheduler.schedule()
        before, self._flight = self._flight, None
        if batch is None and before is None:
            await self._idle()
            return
        flight = None if batch is None else self._begin(batch, time.perf_counter() - began)
        turn = self.thread.call(self._turn, flight, before)
        if before is not None:
            self._collect(before, await turn)
        if flight is not None and before is not None and flight.step is None:
            self._abandon(flight, may_fit=True)  # the one before held memory, too
        elif flight is not None:
            await self._finish(flight, turn)
        self._waits_since = None  # waiting for a slow server is no stall
        await self.outbox.drained()

    def _begin(self, batch: Batch, schedule_s: float) -> Flight:
        self.outbox.started([entered.seq_id for entered in batch.entered])
        return Flight(batch, schedule_s, self.grammars.rows(batch) if self.grammars is not None else [])

    async def _finish(self, flight: Flight, turn: asyncio.Future[StepResult | None]) -> None:
        """Sample the rows with a grammar; then collect the step, or leave it in flight."""
        if flight.grammar_rows:  # the masks depend on the tokens of the step before, which has been collected
            launched, turn = turn, self.thread.call(self._sample, flight, self._masks(flight))
            await launched  # raises why it failed
        result = await turn
        if flight.step is None:
            self._abandon(flight)
        elif self.is_ahead:
            self._flight = flight
        else:
            self._collect(flight, result)

    def _turn(self, flight: Flight | None, before: Flight | None) -> StepResult | None:
        """Launch a step. Return the result of the one before it, or of the same one if it can be collected now."""
        due = before
        if flight is not None:
            self._launch(flight)
            if not self.is_ahead and not flight.grammar_rows:
                due = flight
        return None if due is None or due.step is None else due.step.result()

    def _launch(self, flight: Flight) -> None:
        with suppress(StepOutOfMemory):
            step = self.runner.launch(flight.batch)
            if not flight.grammar_rows:
                step.sample()
            flight.step = step

    def _sample(self, flight: Flight, masks: Masks | None) -> StepResult | None:
        """Sample a step with grammars, and return its result if it is to be collected now."""
        step, flight.step = flight.step, None
        if step is None:
            return None
        with suppress(StepOutOfMemory):
            step.sample(masks)
            flight.step = step
        return None if self.is_ahead or flight.step is None else step.result()

    def _masks(self, flight: Flight) -> Masks | None:
        assert self.grammars is not None
        began = time.perf_counter()
        rows = self._awaited(flight)
        masks = self.grammars.masks(flight.batch, rows) if rows else None
        flight.masks_s = time.perf_counter() - began
        return masks

    def _awaited(self, flight: Flight) -> list[int]:
        """Return the rows with a grammar whose tokens are still needed."""
        return [row for row in flight.grammar_rows if self.scheduler.is_awaited(flight.batch.rows[row])]

    def _collect(self, flight: Flight, result: StepResult | None) -> None:
        assert result is not None
        if self.grammars is not None and flight.grammar_rows:
            rows = self._awaited(flight)
            result = self.grammars.advance(flight.batch, rows, result, self.scheduler.output_left)
            result.seconds["masks"] = flight.masks_s
        deltas = self.scheduler.update(flight.batch, result)
        self._publish(flight.batch, deltas, {"schedule": flight.schedule_s, **result.seconds})

    def _abandon(self, flight: Flight, *, may_fit: bool = False) -> None:
        """Discard a step that ran out of memory."""
        deltas = self.scheduler.abandon(flight.batch, may_fit=may_fit)
        self._publish(Batch(flight.batch.step, []), deltas, {"schedule": flight.schedule_s})  # nothing was computed

    def _publish(self, batch: Batch, deltas: list[TokenDelta], seconds: dict[str, float]) -> None:
        began = time.perf_counter()
        self._forget(deltas)
        seconds["publish"] = self._publish_s
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
        while self._when_idle is not None and not await self._woken(QUIET_S):
            if not await self.thread.call(self._when_idle):
                self._when_idle = None
        await self._wakeup.wait()

    async def _woken(self, seconds: float) -> bool:
        """Return whether there was a reason to wake up within this time."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._wakeup.wait(), seconds)
        return self._wakeup.is_set()

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
                raise GrammarError("grammars need llguidance, which is not installed")
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
        for request_id in [delta.id for delta in deltas if delta.finish_reason]:
            if self.grammars is not None:
                self.grammars.remove(request_id)

    def _respond(self, delta: TokenDelta | None) -> None:
        if delta is not None:
            self._forget([delta])
            # With the figures of an empty step: after the last request no other step reports that its blocks are free.
            self.outbox.send([delta], self.scheduler.stats(Batch(0, []), {}, time.time()))
        self._wakeup.set()
