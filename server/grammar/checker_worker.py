"""The grammar checker's process: `python -m server.grammar.checker_worker FD PARENT WIDTH`, started by checker.py.

A grammar is a program that strangers send: compiling it may take long, fill the memory or overflow the stack of the
library that does it. Each one is checked in a fork of this process, which has limits on its CPU time and memory and a
stack of its own; whatever happens there costs that one request. A fork takes a few milliseconds, for everything has
been imported before.
"""

from __future__ import annotations

import gc
import os
import resource
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Literal

import msgspec
from msgspec import Struct

from engine import GrammarTrial, begin_child

from .schemas import wrong

# Compiling recurses along the references of a grammar. The deepest chains that fit into the largest grammar need less
# than 64 MB; untouched pages cost nothing.
STACK_BYTES = 512 << 20
MEMORY_BYTES = 512 << 20  # of one check, beside its stack and what this process has mapped itself

# What ends a check before its time, by the signal that ended its process: SIGPROF is that of its CPU time's limit.
TOO_LONG = "it takes too long to compile"
TOO_LARGE = "it is too large or too deeply nested to be compiled"


class Job(Struct, frozen=True, array_like=True):
    """A grammar to check within `cpu_s` seconds of CPU time."""

    id: int
    kind: str
    text: str
    cpu_s: float


class Verdict(Struct, frozen=True, array_like=True):
    """The result of a check."""

    id: int
    problem: str | None  # half a sentence; None: the grammar can be used
    seconds: float  # of CPU time that the check took
    ended: Literal["done", "time", "crash", "killed"]


class Frames:
    """Messages over a blocking socket: four bytes of length, then msgpack."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def receive(self) -> Job | None:
        """Return the next job; None when the server is gone."""
        head = self._read(4)
        body = head and self._read(int.from_bytes(head, "little"))
        return msgspec.msgpack.decode(body, type=Job) if body else None

    def send(self, verdict: Verdict) -> None:
        body = msgspec.msgpack.encode(verdict)
        self._sock.sendall(len(body).to_bytes(4, "little") + body)

    def _read(self, size: int) -> bytes | None:
        data = b""
        while len(data) < size:
            piece = self._sock.recv(size - len(data))
            if not piece:
                return None
            data += piece
        return data


def check(problem: Callable[[str, str], str | None], job: Job) -> Verdict:
    """Check a grammar, on a thread with a large stack."""
    found: list[str | None] = []
    began = time.process_time()

    def work() -> None:
        found.append(wrong(job.kind, job.text) or problem(job.kind, job.text))

    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    seconds = time.process_time() - began
    # A panic of the library ends the thread without a result.
    return Verdict(job.id, found[0], seconds, "done") if found else Verdict(job.id, TOO_LARGE, seconds, "crash")


def run_child(problem: Callable[[str, str], str | None], job: Job, pipe: int) -> None:
    """In a fork: check one grammar under its limits, write the verdict, and end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the library writes its panics there, with pieces of the grammar
    most = mapped_bytes() + STACK_BYTES + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, job.cpu_s)
    os.write(pipe, msgspec.msgpack.encode(check(problem, job)))


def mapped_bytes() -> int:
    """Return the virtual memory of this process; 0 if the system does not report it."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return 0


def verdict_of(job_id: int, pid: int, written: bytes) -> Verdict:
    """Return the verdict that a fork wrote, or the one that its exit status implies."""
    _, status = os.waitpid(pid, 0)
    if os.WIFEXITED(status) and written:
        return msgspec.msgpack.decode(written, type=Verdict)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF:
        return Verdict(job_id, TOO_LONG, 0.0, "time")
    # The kernel when memory is short, or a fork that could not begin: this says nothing about the grammar.
    if os.WIFEXITED(status) or os.WTERMSIG(status) == signal.SIGKILL:
        return Verdict(job_id, TOO_LARGE, 0.0, "killed")
    return Verdict(job_id, TOO_LARGE, 0.0, "crash")


def serve(sock: socket.socket, width: int) -> None:
    """Fork for each job that comes, and send each verdict when its fork has ended, until the server goes."""
    frames = Frames(sock)
    problem = GrammarTrial(width).problem
    problem("regex", "a")  # what is made at the first use is made here, and not in every fork
    wrong("json_schema", '{"type": "object"}')
    gc.freeze()
    running: dict[int, tuple[Job, int, list[bytes]]] = {}  # by the pipe's descriptor
    with selectors.DefaultSelector() as selector:
        selector.register(sock, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd != sock.fileno():
                    job, pid, written = running[key.fd]
                    if piece := os.read(key.fd, 1 << 16):
                        written.append(piece)
                        continue
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    del running[key.fd]
                    frames.send(verdict_of(job.id, pid, b"".join(written)))
                    continue
                new = frames.receive()
                if new is None:
                    return
                ours, theirs = os.pipe()
                pid = os.fork()
                if pid == 0:
                    try:
                        run_child(problem, new, theirs)
                    finally:
                        os._exit(0)
                os.close(theirs)
                running[ours] = new, pid, []
                selector.register(ours, selectors.EVENT_READ)


def main() -> None:
    fd, [width] = begin_child(signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    with socket.socket(fileno=fd) as sock:
        serve(sock, int(width))


if __name__ == "__main__":
    main()
