"""The two ways to hold an engine: ProcessEngine (a supervised child process) and LocalEngine (this process).

Both run the same EngineLoop and give the same interface: `start`, `ready`, `generate`, `abort`, `close`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pathlib
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

from msgspec.structs import replace

from . import channel, types
from .config import EngineConfig, check
from .loop import EngineLoop
from .scheduler import Scheduler
from .types import EngineDied, EngineError, EngineInfo, EngineRequest, RequestStats, StepStats, TokenDelta

MAX_RESTARTS = 3  # in a row that do not become ready
BACKOFF_S = 0.5  # before the first restart; doubled for each further one in a row
MAX_DEATHS = 2  # a request that was running at this many deaths of the engine is not handed over again


@dataclass(slots=True, eq=False)
class EngineStatus:
    """How the engine is, as far as its client knows without asking. Times are time.monotonic()."""

    phase: str = "starting"  # starting | loading | ready | restarting | failed | closed
    share: float = 0.0  # of the weights, while loading
    heartbeat: float = 0.0  # when the loop was last known to turn
    last_step: float = 0.0  # when a step was last collected
    running: int = 0
    waiting: int = 0
    restarts: int = 0
    streams_resumed: int = 0
    error: EngineError | None = None


class Engine(Protocol):
    """Tokens in, tokens out."""

    info: EngineInfo | None  # None until it is ready
    status: EngineStatus
    on_step: list[Callable[[StepStats], None]]

    async def start(self) -> None:
        """Begin to load; returns at once."""

    async def ready(self) -> EngineInfo:
        """Wait until requests are taken; raises the EngineError that prevents it."""

    def generate(self, request: EngineRequest) -> AsyncIterator[TokenDelta]:
        """The request's tokens as they come; the delta with a finish_reason is the last. Raises EngineDied."""

    def abort(self, request_id: int) -> None:
        """Stop a request at the next step; ids that are unknown or finished are ignored."""

    async def close(self) -> None:
        """Stop everything; open requests raise EngineDied."""


@dataclass(slots=True, eq=False)
class _Open:
    """A request under way: what was asked, what has come, and what its reader has not yet taken."""

    request: EngineRequest
    output_ids: list[int] = field(default_factory=list)
    unread: list[TokenDelta] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    arrived: float = field(default_factory=time.monotonic)
    started: bool = False  # in this life of the engine
    deaths: int = 0
    begun: RequestStats | None = None  # as told with the first token, in whichever life
    error: EngineError | None = None

    def take(self) -> TokenDelta:
        """Everything unread as one delta: a slow reader costs memory for tokens, not for messages."""
        deltas, self.unread = self.unread, []
        if self.error is None:  # else there is one more thing to tell, and nobody will ring again
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


class _Client(ABC):
    """What both engines share: open requests, their mailboxes, the status, and the task behind them."""

    def __init__(self) -> None:
        self.info: EngineInfo | None = None
        self.status = EngineStatus()
        self.on_step: list[Callable[[StepStats], None]] = []
        self._open: dict[int, _Open] = {}
        self._settled = asyncio.Event()  # ready or failed
        self._task: asyncio.Task[None] | None = None

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
        entry = self._open[request.id] = _Open(request)
        try:
            if self.status.phase == "ready":
                self._send_add(request)
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
        if self.status.phase == "ready":
            self._send_abort(request_id)
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
            if delta.finish_reason:
                del self._open[delta.id]
            entry.unread.append(_whole(delta, entry))
            entry.news.set()
        if stats is not None:
            self.status.last_step = now if stats.rows else self.status.last_step
            self.status.running, self.status.waiting = stats.running, stats.waiting
            for listener in self.on_step:
                listener(stats)

    def _fail(self, error: EngineError, phase: str = "failed") -> None:
        """The engine is gone for good."""
        if self.status.error is None:
            self.status.error = error
        self.status.phase = phase
        for entry in self._open.values():
            entry.error = error
            entry.news.set()
        self._open.clear()
        self._settled.set()


def _whole(delta: TokenDelta, entry: _Open) -> TokenDelta:
    """A delta with figures of the whole request, also when the engine saw only its second life."""
    if delta.stats is None:
        return delta
    if entry.begun is None:
        entry.begun = delta.stats
    begun = entry.begun
    stats = replace(
        delta.stats,
        arrived=entry.arrived,
        scheduled=begun.scheduled,
        first_token=begun.first_token,
        cached_tokens=begun.cached_tokens,
        output_tokens=len(entry.output_ids),
    )
    return replace(delta, stats=stats)


class LocalEngine(_Client):
    """The engine on the caller's event loop, for tests and offline use. Use as `async with LocalEngine(config)`."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__()
        self.config = check(config)
        self._model_thread = ThreadPoolExecutor(1, thread_name_prefix="model")
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
        from .grammar.grammars import Grammars
        from .runner import build

        self.status.phase = "loading"
        try:
            runner, info, config = await asyncio.get_running_loop().run_in_executor(
                self._model_thread, build, self.config, self._progress
            )
            grammars = await asyncio.get_running_loop().run_in_executor(
                self._model_thread, Grammars, config, info.vocab_size
            )
            scheduler = Scheduler(config, info.num_blocks, info.vocab_size)
            self._loop = EngineLoop(scheduler, runner, _LocalOutbox(self), self._model_thread, grammars)
            self.info = info
            self.status.phase, self.status.share = "ready", 1.0
            self._settled.set()
            for entry in list(self._open.values()):
                self._loop.add(entry.request)
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
        await asyncio.get_running_loop().run_in_executor(None, self._model_thread.shutdown)


class _LocalOutbox:
    def __init__(self, client: LocalEngine) -> None:
        self._client = client

    def started(self, ids: list[int]) -> None:
        """Nobody survives this process, so nobody needs to know."""

    def send(self, deltas: list[TokenDelta], stats: StepStats | None) -> None:
        self._client._receive(deltas, stats)

    async def drained(self) -> None:
        # Readers share this event loop: let them run once per step, or a burst of steps would starve them.
        await asyncio.sleep(0)


class Child:
    """The engine's process, started; it waits to be told what to load, and ends with its parent."""

    def __init__(self) -> None:
        """Raises OSError when the system gives no process."""
        self.ours, theirs = socket.socketpair()
        self._environment = dict(os.environ)
        # The child must find this very package, from whichever directory the server was started.
        path = os.pathsep.join([str(pathlib.Path(__file__).parent.parent), *filter(None, [os.getenv("PYTHONPATH")])])
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "engine.worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                # Nor may it import from that directory, which can be the folder of a model that a stranger made.
                env={**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
            )

    def news(self) -> dict[str, str | None]:
        """What has changed in our environment since the child was started; None: it is gone."""
        gone: dict[str, str | None] = dict.fromkeys(self._environment.keys() - os.environ.keys())
        return gone | {name: value for name, value in os.environ.items() if self._environment.get(name) != value}

    def end(self) -> None:
        """Also one that an engine has had, or that has ended."""
        self.ours.close()
        self.process.kill()
        self.process.wait()


class ProcessEngine(_Client):
    """The engine in a child process, restarted when it dies; every open request then goes on where it was."""

    def __init__(self, config: EngineConfig, child: Child | None = None) -> None:
        """`child`: one that was started early, for the first life; who started it ends it where no life comes."""
        super().__init__()
        self.config = check(config)
        self._early, self._child = child, child
        self._channel: channel.Channel | None = None

    @property
    def pid(self) -> int | None:
        """The child's process id."""
        return self._child.process.pid if self._child else None

    async def _run(self) -> None:
        """Supervise: one life of the child after the other."""
        failures = 0
        while True:
            reason: EngineError | None = None
            try:
                await self._live()
            except (EngineError, OSError) as error:
                if self.info is None and isinstance(error, EngineError):
                    self._fail(error)  # nothing was ever served: the setting or the model is wrong
                    return
                reason = EngineDied(f"the engine could not be started again: {error}")
            except Exception as error:
                self._fail(EngineDied(f"the engine's supervisor failed: {type(error).__name__}: {error}"))
                raise
            # An engine that was ready is worth another try whatever killed it: a request that kills is failed itself.
            failures = 0 if self.status.phase == "ready" else failures + 1
            if failures > MAX_RESTARTS:
                self._fail(reason or EngineDied(f"the engine died {failures} times in a row before it was ready"))
                return
            self.status.phase = "restarting"
            self._bury()
            await asyncio.sleep(BACKOFF_S * 2 ** max(0, failures - 1))
            self.status.restarts += 1

    async def _live(self) -> None:
        """One life of the child; returns when it has died, raises the EngineError with which it gave up."""
        child, self._early = self._early or Child(), None
        self._child = child
        self._channel = channel.Channel(channel.Upward)
        try:
            await self._channel.open(child.ours)
            self._channel.send(channel.Load(self.config, child.news()))
            while (message := await self._channel.receive()) is not None:
                self._take(message)
        finally:
            self._channel.close()
            child.process.kill()
            child.process.wait()

    def _take(self, message: object) -> None:
        self.status.heartbeat = time.monotonic()
        match message:
            case channel.Tokens():
                self._receive(channel.unpack(message), message.stats)
            case channel.Started():
                for request_id in message.ids:
                    if request_id in self._open:
                        self._open[request_id].started = True
            case channel.Alive():
                if self.status.phase != "ready":  # a restart stays one until requests are taken again
                    self.status.phase = "restarting" if self.info else message.phase
                    self.status.share = message.share
            case channel.Ready():
                self.info = message.info
                # A restart serves the very files of the first start, wherever a branch of the hub has gone since.
                self.config = replace(self.config, revision=message.info.revision or self.config.revision)
                if message.info.product.startswith("avx512"):
                    # Whether avx512bf16 or avx512 is faster was measured: another answer would change the bits of what
                    # is half told.
                    self.config = replace(self.config, cpu_isa=message.info.product)
                self.status.phase, self.status.share = "ready", 1.0
                self._settled.set()
                self._hand_over()
            case channel.Failed():
                error = getattr(types, message.kind)(message.message)
                raise error

    def _hand_over(self) -> None:
        """Give the new engine every open request, each with the tokens that its reader already has."""
        for entry in list(self._open.values()):
            params = entry.request.params
            if entry.output_ids:  # the prompt's scores came with the first token
                params = replace(params, prompt_logprobs=None)
            output_ids = (*entry.request.output_ids, *entry.output_ids)
            try:
                self._send_add(replace(entry.request, output_ids=output_ids, params=params))
            except Exception as error:  # values that do not encode
                del self._open[entry.request.id]
                entry.error = types.RequestError(f"the request cannot be sent: {error}")
                entry.news.set()
                continue
            if entry.deaths or entry.output_ids:
                self.status.streams_resumed += 1

    def _bury(self) -> None:
        """The child is dead: note who ran, and fail who ran at two deaths, for it may be the cause."""
        self.status.running = self.status.waiting = 0
        for entry in list(self._open.values()):
            entry.deaths += entry.started
            entry.started = False
            if entry.deaths >= MAX_DEATHS:
                del self._open[entry.request.id]
                entry.error = EngineDied(f"the engine died {entry.deaths} times while this request was running")
                entry.news.set()

    def _send_add(self, request: EngineRequest) -> None:
        assert self._channel is not None
        self._channel.send(channel.Add(request))

    def _send_abort(self, request_id: int) -> None:
        assert self._channel is not None
        self._channel.send(channel.Abort(request_id))
