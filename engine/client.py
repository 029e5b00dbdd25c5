"""Engine: tokens in, tokens out. The interface, and what both engines share.

ProcessEngine, in a child process, is in supervisor.py, and LocalEngine, in this process, in local.py. Both run the same
EngineLoop behind the same interface: `start`, `ready`, `submit`, `generate`, `abort`, `close`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Protocol

from msgspec.structs import replace

from . import types
from .types import EngineDied, EngineError, EngineInfo, EngineRequest, RequestStats, StepStats, TokenDelta


@dataclass(slots=True, eq=False)
class EngineStatus:
    """The engine's last known status. Times are time.monotonic()."""

    phase: str = "starting"  # starting | loading | ready | restarting | failed | closed
    share: float = 0.0  # of the weights, while loading
    heartbeat: float = 0.0  # time of the last one
    last_step: float = 0.0  # time when the last step was collected
    running: int = 0
    waiting: int = 0
    stalled_s: float = 0.0  # time with work queued and no step collected, as of the heartbeat
    restarts: int = 0
    streams_resumed: int = 0
    error: EngineError | None = None


class Engine(Protocol):
    """Tokens in, tokens out."""

    info: EngineInfo | None  # None until it is ready
    status: EngineStatus
    on_step: list[Callable[[StepStats], None]]

    async def start(self) -> None:
        """Start loading, and return at once."""

    async def ready(self) -> EngineInfo:
        """Wait until requests are accepted; raises the EngineError that prevents it."""

    def submit(self, request: EngineRequest, notify: Callable[[], None]) -> OpenRequest:
        """Submit a request; raises EngineError. `notify` is called when its `take` has something to return or raise."""

    def generate(self, request: EngineRequest) -> AsyncIterator[TokenDelta]:
        """Submit a request and yield its deltas; the last one has a finish_reason. Raises EngineError."""

    def abort(self, request_id: int) -> None:
        """Stop a request at the next step; unknown and finished ids are ignored."""

    async def close(self) -> None:
        """Stop the engine; open requests raise EngineDied."""


@dataclass(slots=True, eq=False)
class OpenRequest:
    """An open request, its output so far, and the deltas that its reader has not read."""

    request: EngineRequest
    notify: Callable[[], None]  # the reader, of an unread delta or an error
    output_ids: list[int] = field(default_factory=list)
    unread: list[TokenDelta] = field(default_factory=list)
    arrived: float = field(default_factory=time.monotonic)
    is_sent: bool = False  # to the current engine process
    was_running: bool = False  # when an engine process died
    started: RequestStats | None = None  # the stats sent with the first token
    preempted: int = 0  # as far as was reported, by all engine processes
    preempted_before: int = 0  # by earlier ones
    error: EngineError | None = None

    def receive(self, delta: TokenDelta) -> None:
        """Add a delta for the reader."""
        self.unread.append(delta)
        self.notify()

    def fail(self, error: EngineError) -> None:
        """End the request with an error, which the reader gets after the unread deltas."""
        self.error = error
        self.notify()

    def take(self) -> TokenDelta | None:
        """Return all unread deltas as one, so that a slow reader costs memory for tokens only; None: there is none.

        Raises the error of a request that has failed, after its last delta.
        """
        if not self.unread:
            if self.error is not None:
                raise self.error
            return None
        deltas, self.unread = self.unread, []
        if self.error is not None:
            self.notify()  # there is more to come
        last = deltas[-1]
        if len(deltas) == 1:
            return last
        logprobs = None
        if any(delta.logprobs is not None for delta in deltas):
            logprobs = tuple(entry for delta in deltas for entry in delta.logprobs or ())
        return replace(
            last,
            token_ids=tuple(t for delta in deltas for t in delta.token_ids),
            logprobs=logprobs,
            prompt_logprobs=deltas[0].prompt_logprobs,
            stats=next((delta.stats for delta in reversed(deltas) if delta.stats), None),
        )


class Client(ABC):
    """The common part of both engines: open requests, their unread deltas, the status, and the engine's task."""

    def __init__(self) -> None:
        self.info: EngineInfo | None = None
        self.status = EngineStatus()
        self.on_step: list[Callable[[StepStats], None]] = []
        self._open: dict[int, OpenRequest] = {}
        self._settled = asyncio.Event()  # ready or failed
        self._task: asyncio.Task[None] | None = None

    def _send(self, entry: OpenRequest) -> None:
        """Send the engine a request that it does not have."""
        entry.is_sent = True
        self._send_add(entry.request)

    def _came(self, entry: OpenRequest, tokens: int) -> None:
        """Handle new tokens of a request that has not finished."""
        del entry, tokens  # only an engine that can be restarted counts them

    def _ended(self, entry: OpenRequest) -> None:
        """Handle the end of a request."""
        del entry

    @abstractmethod
    def _send_add(self, request: EngineRequest) -> None: ...

    @abstractmethod
    def _send_abort(self, request_id: int) -> None: ...

    @abstractmethod
    async def _run(self) -> None: ...

    async def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="engine")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await self._task
        self._fail(EngineDied("the engine was closed"), phase="closed")

    async def ready(self) -> EngineInfo:
        await self._settled.wait()
        if self.status.error is not None:
            raise self.status.error
        assert self.info is not None
        return self.info

    def submit(self, request: EngineRequest, notify: Callable[[], None]) -> OpenRequest:
        if self.status.error is not None:
            raise self.status.error
        if request.id in self._open:
            raise types.RequestError(f"request id {request.id} is in use")
        entry = self._open[request.id] = OpenRequest(request, notify)
        if self.status.phase == "ready":
            try:
                self._send(entry)
            except BaseException:
                del self._open[request.id]
                raise
        return entry

    async def generate(self, request: EngineRequest) -> AsyncIterator[TokenDelta]:
        news = asyncio.Event()
        entry = self.submit(request, news.set)
        try:
            while True:
                await news.wait()
                news.clear()
                if (delta := entry.take()) is not None:
                    yield delta
                    if delta.finish_reason:
                        return
        finally:
            if self._open.get(request.id) is entry:
                self.abort(request.id)

    def abort(self, request_id: int) -> None:
        entry = self._open.pop(request_id, None)
        if entry is None:
            return
        if self.status.phase == "ready" and entry.is_sent:
            self._send_abort(request_id)
        self._ended(entry)
        entry.receive(TokenDelta(id=request_id, finish_reason="abort"))  # for a reader that did not ask for it

    def _receive(self, deltas: list[TokenDelta], stats: StepStats | None) -> None:
        now = time.monotonic()
        self.status.heartbeat = now
        for delta in deltas:
            entry = self._open.get(delta.id)
            if entry is None:  # aborted meanwhile
                continue
            entry.output_ids += delta.token_ids
            entry.receive(_whole(delta, entry))
            if delta.finish_reason:
                del self._open[delta.id]
                self._ended(entry)
            else:
                self._came(entry, len(delta.token_ids))
        if stats is not None:
            self.status.last_step = now if stats.rows else self.status.last_step
            self.status.running, self.status.waiting = stats.running, stats.waiting
            for listener in self.on_step:
                listener(stats)

    def _fail(self, error: EngineError, phase: str = "failed") -> None:
        """Record that the engine has stopped for good."""
        if self.status.error is None:
            self.status.error = error
        self.status.phase = phase
        for entry in self._open.values():
            entry.fail(error)
        self._open.clear()
        self._settled.set()


def _whole(delta: TokenDelta, entry: OpenRequest) -> TokenDelta:
    """Return a delta whose stats cover the whole request, even if an engine was restarted meanwhile."""
    if delta.stats is None:
        return delta
    started = entry.started = entry.started or delta.stats
    entry.preempted = entry.preempted_before + delta.stats.preemptions
    stats = replace(
        delta.stats,
        arrived=entry.arrived,
        scheduled=started.scheduled,
        first_token=started.first_token,
        cached_tokens=started.cached_tokens,
        output_tokens=len(entry.output_ids),
        preemptions=entry.preempted,
    )
    return replace(delta, stats=stats)
