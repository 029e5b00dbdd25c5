"""ProcessEngine: the engine in a child process, which is watched and replaced when it dies or hangs."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
import socket
import time

from msgspec.structs import replace

from . import channel, types
from .client import Client, OpenRequest
from .config import EngineConfig, check
from .process import spawn
from .suspects import Suspects
from .types import EngineDied, EngineError, EngineRequest, MemoryShort, ModelError

MAX_RESTARTS = 3  # consecutive restarts after which the engine was not ready
BACKOFF_S = 0.5  # before the first restart; doubled for each consecutive one
# Time without a step while work is queued, or without a heartbeat, after which the engine is replaced.
STALL_S = 60.0
# The minimum while it loads, when imports and the first read of large files delay heartbeats.
LOADING_STALL_S = 15.0
WATCH_S = 0.25
# A look that comes so much later than planned: this process did not run, and most likely the engine did not, either, as
# in a container that was paused.
PAUSE_S = 1.0
EXIT_S = 0.01  # interval between polls of a process's exit
END_S = 1.0  # between the closing of a process's socket and its exit
# Until a killed process has exited and freed its memory. A process that the kernel cannot end must not block restarts.
KILLED_S = 30.0
# A step of a large model on a slow machine may take longer than STALL_S: its limit is this multiple of its roofline.
SLOW_STEP_FACTOR = 4.0
# Temporary lack of descriptors, processes or memory. It does not count as a failure of the engine.
SCARCE = (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM)
SCARCE_S = 1.0  # before the next attempt

log = logging.getLogger("pequod.engine")


class Child:
    """A started engine process. It waits for a `Load` message, and ends with its parent."""

    MODULE = "engine.worker"

    def __init__(self) -> None:
        """Raises OSError if the process cannot be started."""
        self.ours, theirs = socket.socketpair()
        try:
            with theirs:
                self.process = spawn(self.MODULE, theirs.fileno())
        except BaseException:
            self.ours.close()
            raise

    def end(self) -> None:
        """Kill the process if it still runs, and reap it. May be called more than once."""
        self.ours.close()
        self.process.kill()
        self.process.wait()


class ProcessEngine(Client):
    """The engine in a child process, restarted when it dies or hangs; open requests then continue where they were."""

    def __init__(self, config: EngineConfig, child: Child | None = None, stall_s: float = STALL_S) -> None:
        """`child`: the first process, if it was started early. Its owner must end it if the engine is never started.

        `stall_s`: see STALL_S.
        """
        super().__init__()
        self.config = check(config)
        self.stall_s = stall_s
        self._early, self._child = child, child
        self._channel: channel.Channel | None = None
        self._suspects = Suspects()
        self._paused_s = 0.0  # since the last step, or since there is work: time in which this process did not run
        self._down_since: float | None = None  # while a process that was ready is being replaced

    @property
    def pid(self) -> int | None:
        """The child's process id."""
        return self._child.process.pid if self._child else None

    # The child processes

    async def _run(self) -> None:
        """Run one child process after the other, until the engine cannot be restarted."""
        failures = 0
        while True:
            reason: EngineError | None = None
            is_scarce = False
            try:
                await self._run_child()
            except OSError as error:
                is_scarce = error.errno in SCARCE
                reason = EngineDied(f"the engine could not be started again: {error}")
                log.error("the engine cannot be started: %s", error.strerror or error)
            except EngineError as error:
                if self.info is None:
                    self._fail(error)  # it was never ready: a setting or the model is wrong
                    return
                is_scarce = isinstance(error, MemoryShort)  # at first there was enough
                log.error("the engine cannot be started again: %s", str(error).partition("\n")[0])
                reason = EngineDied(f"the engine could not be started again: {error}")
            except Exception as error:
                self._fail(EngineDied(f"the engine's supervisor failed: {type(error).__name__}: {error}"))
                raise
            # An engine that was ready is always restarted: if a request crashes it, Suspects finds that request.
            if self.status.phase == "ready":
                failures, self._down_since = 0, time.monotonic()
            elif not is_scarce:
                failures += 1
            if failures > MAX_RESTARTS:
                self._fail(reason or EngineDied(f"the engine died {failures} times in a row before it was ready"))
                return
            self.status.phase = "restarting" if self.info else "loading"
            self._record_death()
            await asyncio.sleep(SCARCE_S if is_scarce else BACKOFF_S * 2 ** max(0, failures - 1))
            self.status.restarts += not is_scarce

    async def _run_child(self) -> None:
        """Run a child process until it dies. Raises the EngineError that it reports."""
        child, self._early = self._early or Child(), None
        self._child = child
        self._channel = channel.Channel(channel.Upward)
        self.status.heartbeat, self.status.stalled_s, self._paused_s = time.monotonic(), 0.0, 0.0
        watch = asyncio.create_task(self._watch(child), name="watch")
        try:
            await self._channel.open(child.ours)
            self._channel.send(channel.Load(self.config, again=self.info is not None))
            while (message := await self._channel.receive()) is not None:
                self._handle(message)
            await self._log_end(child)
        finally:
            watch.cancel()
            self._channel.close()
            child.process.kill()
            await self._wait_for_exit(child)

    async def _wait_for_exit(self, child: Child) -> None:
        """Wait until a process that has been killed is gone."""
        if not await _has_ended(child, KILLED_S):
            log.error("the engine's process %d was killed and does not end", child.process.pid)

    async def _log_end(self, child: Child) -> None:
        """Log how a process whose socket is closed has ended; it may not have exited yet."""
        await _has_ended(child, END_S)
        log.error("the engine's process %d %s", child.process.pid, ending(child.process.returncode))

    async def _watch(self, child: Child) -> None:
        """Kill the child if it hangs. It is then replaced like one that has died."""
        while True:
            due = time.monotonic() + WATCH_S
            await asyncio.sleep(WATCH_S)
            late_s = time.monotonic() - due
            if late_s > PAUSE_S:
                self.status.heartbeat = min(time.monotonic(), self.status.heartbeat + late_s)
                self._paused_s += late_s
            silent_s = time.monotonic() - self.status.heartbeat
            stalled_s = self.status.stalled_s + silent_s - self._paused_s if self.status.stalled_s else 0.0
            is_ready = self.status.phase == "ready"
            if silent_s > (self._silence_limit() if is_ready else max(self.stall_s, LOADING_STALL_S)):
                log.error("the engine has given no sign of life for %.0f s and is replaced", silent_s)
            elif stalled_s > self._step_limit():
                log.error("the engine has work and has made no step for %.0f s, and is replaced", stalled_s)
            else:
                continue
            child.process.kill()
            return

    def _silence_limit(self) -> float:
        """Return the maximum time without a heartbeat of an engine that is ready, in seconds."""
        return self.stall_s if self.info is None or self.info.beats_during_steps else self._step_limit()

    def _step_limit(self) -> float:
        """Return the maximum time of a step, in seconds."""
        info = self.info
        if info is None or info.roofline is None:
            return self.stall_s
        tokens, context = info.max_batched_tokens, info.num_tokens
        minimum = info.roofline.seconds(tokens, context, tokens * min(info.max_len, context), info.max_seqs)
        return max(self.stall_s, SLOW_STEP_FACTOR * minimum)

    def _handle(self, message: object) -> None:
        self.status.heartbeat = time.monotonic()
        match message:
            case channel.Tokens():
                self.status.stalled_s = self._paused_s = 0.0
                self._receive(channel.unpack(message), message.stats)
            case channel.Started():
                for request_id in message.ids:
                    if request_id in self._open:
                        self._suspects.ran(request_id)
                    else:
                        self._suspects.ran_closed()
            case channel.Alive():
                self.status.stalled_s = message.stalled_s
                if not message.stalled_s:  # without work there is no step that a pause has delayed
                    self._paused_s = 0.0
                if self.status.phase != "ready":  # during a restart the phase stays "restarting"
                    self.status.phase = "restarting" if self.info else message.phase
                    self.status.share = message.share
            case channel.Ready():
                self._accept(message)
            case channel.Failed():
                error = getattr(types, message.kind)(message.message)
                raise error

    def _accept(self, ready: channel.Ready) -> None:
        """Start sending requests to a child that is ready."""
        if self.info is None:
            # Later processes get the config that the first one has resolved: the same revision of a hub's branch, the
            # kernels that were measured to be faster, the same number of blocks. Resumed outputs then have the same
            # bits.
            self.info, self.config = ready.info, ready.config
        elif ready.info.weights_hash != self.info.weights_hash:
            raise ModelError(f"the weights of {self.config.model} have changed since the start")
        self.status.phase, self.status.share = "ready", 1.0
        self._settled.set()
        if self._down_since is not None:
            seconds, self._down_since = time.monotonic() - self._down_since, None
            number = sum(entry.was_running or bool(entry.output_ids) for entry in self._open.values())
            which = "1 request continues" if number == 1 else f"{number} requests continue"
            log.info("the engine is back after %.1f s; %s", seconds, which)
        self._send_all()

    # Requests

    def _send_all(self) -> None:
        """Send the engine every open request that may run and has not been sent."""
        for entry in list(self._open.values()):
            if not entry.is_sent:
                self._send(entry)

    def _send(self, entry: OpenRequest) -> None:
        """Send the engine a request with its output so far, unless Suspects makes it wait."""
        request_id = entry.request.id
        if not self._suspects.may_run(request_id):
            return
        params = entry.request.params
        if entry.output_ids:  # the prompt's logprobs came with the first token
            params = replace(params, prompt_logprobs=None)
        output_ids = (*entry.request.output_ids, *entry.output_ids)
        entry.is_sent = True
        try:
            self._send_add(replace(entry.request, output_ids=output_ids, params=params))
        except Exception as error:  # a value cannot be encoded
            self._end(entry, types.RequestError(f"the request cannot be sent: {error}"))
            return
        if entry.was_running or entry.output_ids:
            entry.was_running = False
            self.status.streams_resumed += 1

    def _came(self, entry: OpenRequest, tokens: int) -> None:
        if tokens and self._suspects.came(entry.request.id, tokens):
            self._send_all()

    def _ended(self, entry: OpenRequest) -> None:
        if self._suspects.ended(entry.request.id) and self.status.phase == "ready":
            self._send_all()

    def _end(self, entry: OpenRequest, error: EngineError) -> None:
        """End a request with an error."""
        del self._open[entry.request.id]
        entry.fail(error)
        self._ended(entry)

    def _record_death(self) -> None:
        """Record which requests were running when the child died; fails the one that crashed it, if that is known."""
        self.status.running = self.status.waiting = 0
        for entry in self._open.values():
            entry.was_running |= self._suspects.has_run(entry.request.id)
            entry.preempted_before = entry.preempted
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


async def _has_ended(child: Child, seconds: float) -> bool:
    """Return whether a process exits within `seconds`.

    Polls rather than waiting in a thread, because a machine that is out of threads must be able to restart the engine.
    """
    until = time.monotonic() + seconds
    while child.process.poll() is None:
        if time.monotonic() >= until:
            return False
        await asyncio.sleep(EXIT_S)
    return True


def ending(code: int | None) -> str:
    """Describe how a process has ended, from its exit code; None: it has not."""
    if code is None:
        return "has closed its socket"
    if code >= 0:
        return f"has ended with exit code {code}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"
