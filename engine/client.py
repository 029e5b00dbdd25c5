"""Engine: tokens in, tokens out. The interface, what all engines share, and LocalEngine, which runs in this process.

ProcessEngine, in a child process, is in supervisor.py. Both run the same EngineLoop behind the same interface: `start`,
`ready`, `generate`, `abort`, `close`.
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
from .config import EngineConfig, check
from .loop import EngineLoop
from .step_thread import ModelThread
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

    def generate(self, request: EngineRequest) -> AsyncIterator[TokenDelta]:
        """Yield the request's tokens as they are sampled; the last delta has a finish_reason. Raises EngineDied."""

    def abort(self, request_id: int) -> None:
        """Stop a request at the next step; unknown and finished ids are ignored."""

    async def close(self) -> None:
        """Stop the engine; open requests raise EngineDied."""


@dataclass(slots=True, eq=False)
class Open:
    """An open request, its output so far, and the deltas that its reader has not read."""

    request: EngineRequest
    output_ids: list[int] = field(default_factory=list)
    unread: list[TokenDelta] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    arrived: float = field(default_factory=time.monotonic)
    is_sent: bool = False  # to the current engine process
    was_running: bool = False  # when an engine process died
    started: RequestStats | None = None  # the stats sent with the first token
    error: EngineError | None = None

    def take(self) -> TokenDelta:
        """Return all unread deltas as one, so that a slow reader costs memory for tokens only."""
        deltas, self.unread = self.unread, []
        if self.error is None:  # else the error is still to be read, and nothing will set the event again
            self.news.clear()
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
        self._open: dict[int, Open] = {}
        self._settled = asyncio.Event()  # ready or failed
        self._task: asyncio.Task[None] | None = None

    def _send(self, entry: Open) -> None:
        """Send the engine a request that it does not have."""
        entry.is_sent = True
        self._send_add(entry.request)

    def _came(self, entry: Open, tokens: int) -> None:
        """Handle new tokens of a request that has not finished."""
        del entry, tokens  # only an engine that can be restarted counts them

    def _ended(self, entry: Open) -> None:
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

    async def generate(self, request: EngineRequest) -> AsyncIterator[TokenDelta]:
        if self.status.error is not None:
            raise self.status.error
        if request.id in self._open:
            raise types.RequestError(f"request id {request.id} is in use")
        entry = self._open[request.id] = Open(request)
        try:
            if self.status.phase == "ready":
                self._send(entry)
            while True:
                await entry.news.wait()
                if entry.error is not None and not entry.unread:
                    raise entry.error
                delta = entry.take()
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
        entry.unread.append(TokenDelta(id=request_id, finish_reason="abort"))  # for a reader that did not ask for it
        entry.news.set()

    def _receive(self, deltas: list[TokenDelta], stats: StepStats | None) -> None:
        now = time.monotonic()
        self.status.heartbeat = now
        for delta in deltas:
            entry = self._open.get(delta.id)
            if entry is None:  # aborted meanwhile
                continue
            entry.output_ids += delta.token_ids
            entry.unread.append(_whole(delta, entry))
            entry.news.set()
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
            entry.error = error
            entry.news.set()
        self._open.clear()
        self._settled.set()


def _whole(delta: TokenDelta, entry: Open) -> TokenDelta:
    """Return a delta whose stats cover the whole request, even if an engine was restarted meanwhile."""
    if delta.stats is None:
        return delta
    if entry.started is None:
        entry.started = delta.stats
    started = entry.started
    stats = replace(
        delta.stats,
        arrived=entry.arrived,
        scheduled=started.scheduled,
        first_token=started.first_token,
        cached_tokens=started.cached_tokens,
        output_tokens=len(entry.output_ids),
    )
    return replace(delta, stats=stats)


class LocalEngine(Client):
    """The engine on the caller's event loop, for tests and offline use. Use as `async with LocalEngine(config)`.

    On CUDA each step blocks that loop, and the engine's device must stay the current one of its thread.
    """

    def __init__(self, config: EngineConfig) -> None:
        super().__init__()
        self.config = check(config)
        self._model_thread = ModelThread()
        self._loop: EngineLoop | None = None

    async def __aenter__(self) -> LocalEngine:
        await self.start()
        try:
            await self.ready()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _run(self) -> None:
        from .build import assemble

        self.status.phase = "loading"
        try:
            self._loop, info = await assemble(
                self.config, _LocalOutbox(self), self._model_thread, self._progress, again=False
            )
            self.info = info
            self.status.phase, self.status.share = "ready", 1.0
            self._settled.set()
            for entry in list(self._open.values()):
                self._send(entry)
            await self._loop.run()
        except EngineError as error:
            self._fail(error)
        except Exception as error:
            self._fail(EngineDied(f"the engine failed: {type(error).__name__}: {error}"))
            raise

    def _progress(self, share: float) -> None:
        self.status.share = share

    def _send_add(self, request: EngineRequest) -> None:
        assert self._loop is not None
        self._loop.add(request)

    def _send_abort(self, request_id: int) -> None:
        assert self._loop is not None
        self._loop.abort(request_id)

    async def close(self) -> None:
        await super().close()
        await self._model_thread.close()


class _LocalOutbox:
    def __init__(self, client: LocalEngine) -> None:
        self._client = client

    def started(self, ids: list[int]) -> None:
        """Do nothing: only a supervisor, which outlives the engine, needs this."""

    def send(self, deltas: list[TokenDelta], stats: StepStats | None) -> None:
        self._client._receive(deltas, stats)

    async def drained(self) -> None:
        # Readers share this event loop. Let them run once per step, or a burst of steps would starve them.
        await asyncio.sleep(0)
