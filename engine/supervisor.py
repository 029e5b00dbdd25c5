"""ProcessEngine: the engine in a child process, watched, and replaced when it dies or hangs."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import subprocess
import time

from msgspec.structs import replace

from . import channel, types
from .client import Client, Open
from .config import EngineConfig, check
from .process import spawn
from .suspects import Suspects
from .types import EngineDied, EngineError, EngineRequest, MemoryShort, ModelError

MAX_RESTARTS = 3  # in a row that do not become ready
BACKOFF_S = 0.5  # before the first restart; doubled for each further one in a row
STALL_S = 60.0  # without a step while there is work, or without a sign of life, after which the engine is replaced
# While it loads: imports and the first reading of large files keep it silent for longer.
LOADING_STALL_S = 15.0
WATCH_S = 0.25
END_S = 1.0  # between the end of a process's socket and its own
# Until a killed process is gone, with its memory. One that the kernel cannot end must not hold up the event loop.
KILLED_S = 30.0
# A step of a large model on a slow machine may take longer than STALL_S. It has this many times its own limit.
SLOW_STEP_FACTOR = 4.0
# What the system lacks for a moment: no fault of the engine, which is started again as soon as there is enough.
SCARCE = (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM)
SCARCE_S = 1.0  # until it is tried again

log = logging.getLogger("pequod.engine")


class Child:
    """The engine's process, started; it waits to be told what to load, and ends with its parent."""

    MODULE = "engine.worker"

    def __init__(self) -> None:
        """Raises OSError when the system gives no process."""
        self._environment = dict(os.environ)
        self.ours, theirs = socket.socketpair()
        try:
            with theirs:
                self.process = spawn(self.MODULE, theirs.fileno())
        except BaseException:
            self.ours.close()
            raise

    def news(self) -> dict[str, str | None]:
        """What has changed in our environment since the child was started; None: it is gone."""
        gone: dict[str, str | None] = dict.fromkeys(self._environment.keys() - os.environ.keys())
        return gone | {name: value for name, value in os.environ.items() if self._environment.get(name) != value}

    def end(self) -> None:
        """Also one that an engine has had, or that has ended."""
        self.ours.close()
        self.process.kill()
        self.process.wait()


class ProcessEngine(Client):
    """The engine in a child process, restarted when it dies or hangs; every open request then goes on where it was."""

    def __init__(self, config: EngineConfig, child: Child | None = None, stall_s: float = STALL_S) -> None:
        """`child`: one that was started early, for the first life; who started it ends it where no life comes.

        `stall_s`: seconds without a step, while there is work, or without a sign of life, after which the process is
        killed and replaced.
        """
        super().__init__()
        self.config = check(config)
        self.stall_s = stall_s
        self._early, self._child = child, child
        self._channel: channel.Channel | None = None
        self._suspects = Suspects()

    @property
    def pid(self) -> int | None:
        """The child's process id."""
        return self._child.process.pid if self._child else None

    # Lives of the child

    async def _run(self) -> None:
        """Supervise: one life of the child after the other."""
        failures = 0
        while True:
            reason: EngineError | None = None
            is_scarce = False
            try:
                await self._live()
            except OSError as error:
                is_scarce = error.errno in SCARCE
                reason = EngineDied(f"the engine could not be started again: {error}")
                log.error("the engine cannot be started: %s", error.strerror or error)
            except EngineError as error:
                if self.info is None:
                    self._fail(error)  # nothing was ever served: the setting or the model is wrong
                    return
                is_scarce = isinstance(error, MemoryShort)  # it was enough at first
                log.error("the engine cannot be started again: %s", str(error).partition("\n")[0])
                reason = EngineDied(f"the engine could not be started again: {error}")
            except Exception as error:
                self._fail(EngineDied(f"the engine's supervisor failed: {type(error).__name__}: {error}"))
                raise
            # An engine that was ready is worth another try whatever killed it: a request that kills is failed itself.
            if self.status.phase == "ready":
                failures = 0
            elif not is_scarce:
                failures += 1
            if failures > MAX_RESTARTS:
                self._fail(reason or EngineDied(f"the engine died {failures} times in a row before it was ready"))
                return
            self.status.phase = "restarting" if self.info else "loading"
            self._bury()
            await asyncio.sleep(SCARCE_S if is_scarce else BACKOFF_S * 2 ** max(0, failures - 1))
            self.status.restarts += not is_scarce

    async def _live(self) -> None:
        """One life of the child; returns when it has died, raises the EngineError with which it gave up."""
        child, self._early = self._early or Child(), None
        self._child = child
        self._channel = channel.Channel(channel.Upward)
        self.status.heartbeat, self.status.stalled_s = time.monotonic(), 0.0
        watch = asyncio.create_task(self._watch(child), name="watch")
        try:
            await self._channel.open(child.ours)
            self._channel.send(channel.Load(self.config, child.news(), again=self.info is not None))
            while (message := await self._channel.receive()) is not None:
                self._take(message)
            await self._log_end(child)
        finally:
            watch.cancel()
            self._channel.close()
            child.process.kill()
            await self._buried(child)

    async def _buried(self, child: Child) -> None:
        """Wait for the end of a process that has been killed."""
        try:
            await asyncio.to_thread(child.process.wait, KILLED_S)
        except subprocess.TimeoutExpired:
            log.error("the engine's process %d was killed and does not end", child.process.pid)

    async def _log_end(self, child: Child) -> None:
        """Its socket is closed: say how the process has ended, which it does in a moment if it has not."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(child.process.wait, END_S)
        log.error("the engine's process %d %s", child.process.pid, ending(child.process.returncode))

    async def _watch(self, child: Child) -> None:
        """Kill a child that hangs; what then comes is the same as for one that has died."""
        while True:
            await asyncio.sleep(WATCH_S)
            silent_s = time.monotonic() - self.status.heartbeat
            stalled_s = self.status.stalled_s + silent_s if self.status.stalled_s else 0.0
            is_ready = self.status.phase == "ready"
            if silent_s > (self.stall_s if is_ready else max(self.stall_s, LOADING_STALL_S)):
                log.error("the engine has given no sign of life for %.0f s and is replaced", silent_s)
            elif stalled_s > self._step_limit():
                log.error("the engine has work and has made no step for %.0f s, and is replaced", stalled_s)
            else:
                continue
            child.process.kill()
            return

    def _step_limit(self) -> float:
        """Seconds that a step may take."""
        info = self.info
        if info is None or info.roofline is None:
            return self.stall_s
        tokens, context = info.max_batched_tokens, info.num_blocks * info.block_size
        least = info.roofline.seconds(tokens, context, tokens * min(info.max_len, context), info.max_seqs)
        return max(self.stall_s, SLOW_STEP_FACTOR * least)

    def _take(self, message: object) -> None:
        self.status.heartbeat = time.monotonic()
        match message:
            case channel.Tokens():
                self.status.stalled_s = 0.0
                self._receive(channel.unpack(message), message.stats)
            case channel.Started():
                for request_id in message.ids:
                    if request_id in self._open:
                        self._suspects.ran(request_id)
                    else:
                        self._suspects.ran_closed()
            case channel.Alive():
                self.status.stalled_s = message.stalled_s
                if self.status.phase != "ready":  # a restart stays one until requests are taken again
                    self.status.phase = "restarting" if self.info else message.phase
                    self.status.share = message.share
            case channel.Ready():
                self._begin(message)
            case channel.Failed():
                error = getattr(types, message.kind)(message.message)
                raise error

    def _begin(self, ready: channel.Ready) -> None:
        """The child takes requests."""
        if self.info is None:
            # Every later life gets the config that the first one has made of ours: the same files of a hub's branch,
            # kernels that were measured to be faster, as many blocks. Outputs that are half sent go on bit for bit.
            self.info, self.config = ready.info, ready.config
        elif ready.info.weights_hash != self.info.weights_hash:
            raise ModelError(f"the weights of {self.config.model} are others than at the start")
        self.status.phase, self.status.share = "ready", 1.0
        self._settled.set()
        self._send_all()

    # Requests

    def _send_all(self) -> None:
        """Give the engine every open request that it may have and does not have yet."""
        for entry in list(self._open.values()):
            if not entry.is_sent:
                self._send(entry)

    def _send(self, entry: Open) -> None:
        """Give the engine a request, with the tokens that its reader already has; later, if it must wait."""
        request_id = entry.request.id
        if not self._suspects.may_run(request_id):
            return
        params = entry.request.params
        if entry.output_ids:  # the prompt's scores came with the first token
            params = replace(params, prompt_logprobs=None)
        output_ids = (*entry.request.output_ids, *entry.output_ids)
        entry.is_sent = True
        try:
            self._send_add(replace(entry.request, output_ids=output_ids, params=params))
        except Exception as error:  # values that do not encode
            self._end(entry, types.RequestError(f"the request cannot be sent: {error}"))
            return
        if entry.was_running or entry.output_ids:
            entry.was_running = False
            self.status.streams_resumed += 1

    def _came(self, entry: Open, tokens: int) -> None:
        if tokens and self._suspects.came(entry.request.id, tokens):
            self._send_all()

    def _ended(self, entry: Open) -> None:
        if self._suspects.ended(entry.request.id) and self.status.phase == "ready":
            self._send_all()

    def _end(self, entry: Open, error: EngineError) -> None:
        """End a request with an error."""
        del self._open[entry.request.id]
        entry.error = error
        entry.news.set()
        self._ended(entry)

    def _bury(self) -> None:
        """The child is dead: note who was running, and fail the one that has killed it, if that is known."""
        self.status.running = self.status.waiting = 0
        for entry in self._open.values():
            entry.was_running |= self._suspects.has_run(entry.request.id)
            entry.is_sent = False
        guilty = self._suspects.died(self._open)
        if guilty is not None:
            log.error("engine request %d has killed the engine several times and is ended", guilty)
            self._end(self._open[guilty], EngineDied("the engine died several times while this request was running"))

    def _send_add(self, request: EngineRequest) -> None:
        assert self._channel is not None
        self._channel.send(channel.Add(request))

    def _send_abort(self, request_id: int) -> None:
        assert self._channel is not None
        self._channel.send(channel.Abort(request_id))


def ending(code: int | None) -> str:
    """How a process has ended, from its exit code; None: it has not."""
    if code is None:
        return "has closed its socket"
    if code >= 0:
        return f"has ended with exit code {code}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"
