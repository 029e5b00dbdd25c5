"""Gate: checks grammars before a request is admitted, in a process that a grammar may crash."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import socket
import subprocess
from collections import OrderedDict
from contextlib import suppress

import msgspec

from engine import FairLock, spawn

from ..http.errors import ApiError, invalid, unavailable
from .checker_worker import Job, Verdict
from .schemas import MAX_SOURCE, Grammar

CODE = "invalid_grammar"
# Limits on the CPU time of a check. Nearly all grammars take a few milliseconds. Slower ones are checked again in a
# queue of their own, so that they do not delay the others; the slowest of the size that requests may have take 0.3 s.
QUICK_S, SLOW_S = 0.025, 1.0
WAIT_S = 30.0  # for the checks that are queued before this one, and for itself
MAX_VERDICTS = 1024  # in the cache

log = logging.getLogger("pequod.server")


class Gone(Exception):
    """The checker's process has died."""


class Checker:
    """The checker's process, started for the first grammar and restarted when it has died."""

    def __init__(self) -> None:
        self.width = 1 << 18  # of the model's logits; set when the model is loaded
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._pending: dict[int, asyncio.Future[Verdict]] = {}
        self._ids = itertools.count(1)

    async def check(self, kind: str, text: str, cpu_s: float) -> Verdict:
        """Check a grammar; raises Gone when the process dies, OSError when it cannot be started."""
        async with self._starting:
            if self._writer is None:
                await self._start()
        assert self._writer is not None
        job = Job(next(self._ids), kind, text, cpu_s)
        verdict = self._pending[job.id] = asyncio.get_running_loop().create_future()
        body = msgspec.msgpack.encode(job)
        self._writer.write(len(body).to_bytes(4, "big") + body)  # the worker's end is a multiprocessing Connection
        try:
            return await asyncio.shield(verdict)
        except asyncio.CancelledError:
            # The fork runs until its limits end it, and the next caller must not start another one meanwhile.
            await asyncio.wait([verdict])
            verdict.exception()
            raise
        finally:
            self._pending.pop(job.id, None)

    async def _start(self) -> None:
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                # On this thread: the kernel kills the child when the thread that started it ends.
                self._process = spawn("server.grammar.checker_worker", theirs.fileno(), str(self.width))
            reader, self._writer = await asyncio.open_connection(sock=ours)
        except BaseException:
            ours.close()
            raise
        self._reading = asyncio.create_task(self._read(reader), name="grammar checker")

    async def _read(self, reader: asyncio.StreamReader) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                size = int.from_bytes(await reader.readexactly(4), "big")
                verdict = msgspec.msgpack.decode(await reader.readexactly(size), type=Verdict)
                if verdict.id in self._pending and not self._pending[verdict.id].done():
                    self._pending[verdict.id].set_result(verdict)
        log.error("the grammar checker has died and will be restarted")
        self._end()

    def _end(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        for waiting in self._pending.values():
            if not waiting.done():
                waiting.set_exception(Gone())

    async def close(self) -> None:
        """Stop the process; waiting callers get an error."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        self._end()


class Gate:
    """Admits valid grammars. Callers take turns, and verdicts are cached."""

    def __init__(self) -> None:
        self.checker = Checker()
        self._quick, self._slow = FairLock(), FairLock()
        self._verdicts: OrderedDict[bytes, Verdict] = OrderedDict()  # by digest, least recently used first
        self._checking: dict[bytes, tuple[asyncio.Task[Verdict], list[None]]] = {}  # with one entry per waiter

    async def check(self, grammar: Grammar, caller: str, *, limit: int = MAX_SOURCE) -> Grammar:
        """Return the grammar with the CPU time that compiling it takes; raises 400, or 503 if others take too long.

        `limit`: in bytes.
        """
        if grammar.problem is not None:
            raise refusal(grammar.field, grammar.problem)
        if len(grammar.text.encode("utf-8", "surrogatepass")) > limit:
            raise refusal(grammar.field, f"it has more than {limit} bytes")
        try:
            async with asyncio.timeout(WAIT_S):
                verdict = await self._verdict(grammar, caller)
        except TimeoutError:
            raise busy() from None
        except (Gone, OSError):
            raise unavailable("Grammars cannot be checked at the moment.", "grammars_unavailable") from None
        if verdict.problem is not None:
            raise refusal(grammar.field, verdict.problem)
        return grammar._replace(compile_s=verdict.seconds)

    async def _verdict(self, grammar: Grammar, caller: str) -> Verdict:
        digest = hashlib.sha256(f"{grammar.kind}\0{grammar.text}".encode("utf-8", "surrogatepass")).digest()
        if digest in self._verdicts:
            self._verdicts.move_to_end(digest)
            return self._verdicts[digest]
        if digest not in self._checking:
            self._checking[digest] = asyncio.create_task(self._check(grammar, caller, digest)), []
        task, waiters = self._checking[digest]
        waiters.append(None)
        try:
            # Others may wait for the same grammar: the check is cancelled only when the last of them disconnects.
            return await asyncio.shield(task)
        finally:
            waiters.pop()
            if not waiters:
                self._forget(digest, task)  # the next request with this grammar starts a new check
                task.cancel()

    async def _check(self, grammar: Grammar, caller: str, digest: bytes) -> Verdict:
        try:
            async with self._quick.turn(caller):
                verdict = await self._check_twice(grammar, QUICK_S)
            if verdict.ended == "time":
                async with self._slow.turn(caller):
                    verdict = await self._check_twice(grammar, SLOW_S)
            if verdict.ended == "crash":
                log.warning("checking a grammar of %d characters ended the checker's fork", len(grammar.text))
            self._verdicts[digest] = verdict
            if len(self._verdicts) > MAX_VERDICTS:
                self._verdicts.popitem(last=False)
            return verdict
        finally:
            self._forget(digest, asyncio.current_task())

    def _forget(self, digest: bytes, task: object) -> None:
        if digest in self._checking and self._checking[digest][0] is task:
            del self._checking[digest]

    async def _check_twice(self, grammar: Grammar, cpu_s: float) -> Verdict:
        """Check a grammar; retry once if something other than the grammar ended the checker or its fork."""
        for _ in range(2):
            with suppress(Gone):
                verdict = await self.checker.check(grammar.kind, grammar.text, cpu_s)
                if verdict.ended != "killed":
                    return verdict
        raise Gone


def refusal(field: str, problem: str) -> ApiError:
    """400 for a grammar; `problem` is half a sentence."""
    return invalid(f"Invalid '{field}': {problem}.", field, CODE)


def busy() -> ApiError:
    """503: a grammar has waited too long to be checked or compiled."""
    return unavailable("Too many grammars are being compiled.", "grammars_busy")
