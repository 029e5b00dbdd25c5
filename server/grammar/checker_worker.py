"""The grammar checker's process: `python -m server.grammar.checker_worker FD PARENT WIDTH`, started by checker.py.

A grammar is an untrusted program: compiling it may take long, fill the memory or overflow the stack of the library.
Each one is checked in a fork of this process with limits on its CPU time and memory and a stack of its own, so that
only its own request can fail. A fork takes a few milliseconds, since everything has been imported before.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import selectors
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Literal

import msgspec
from msgspec import Struct

from engine import GrammarTrial, begin_child

from .schemas import find_problem

# Compiling recurses along the references of a grammar. The deepest chains that fit into the largest grammar or schema
# of a request need less than 64 MB; untouched pages cost nothing.
STACK_BYTES = 512 << 20
MEMORY_BYTES = 512 << 20  # of one check, in addition to its stack and to what this process has mapped

# The problems of grammars whose check was ended by the limit on its CPU time, and by anything else.
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


def check(problem: Callable[[str, str], str | None], job: Job) -> Verdict:
    """Check a grammar on a thread with a large stack. `problem` compiles it."""
    found: list[str | None] = []
    began = time.process_time()

    def work() -> None:
        found.append(find_problem(job.kind, job.text) or problem(job.kind, job.text))

    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    seconds = time.process_time() - began
    # A panic of the library ends the thread without a result.
    return Verdict(job.id, found[0], seconds, "done") if found else Verdict(job.id, TOO_LARGE, seconds, "crash")


def run_child(problem: Callable[[str, str], str | None], job: Job, pipe: int) -> None:
    """In a fork, check one grammar under its limits and write the verdict to a pipe."""
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
    # The kernel killed it for lack of memory, or the fork could not start: this is no property of the grammar.
    if os.WIFEXITED(status) or os.WTERMSIG(status) == signal.SIGKILL:
        return Verdict(job_id, TOO_LARGE, 0.0, "killed")
    return Verdict(job_id, TOO_LARGE, 0.0, "crash")


def serve(server: Connection, width: int) -> None:
    """Fork for each job and send its verdict when the fork has ended. Raises EOFError when the server has ended."""
    problem = GrammarTrial(width).problem
    problem("regex", "a")  # initializes what would otherwise be initialized in every fork
    find_problem("json_schema", '{"type": "object"}')
    gc.freeze()
    running: dict[int, tuple[Job, int, list[bytes]]] = {}  # by the pipe's descriptor
    with selectors.DefaultSelector() as selector:
        selector.register(server, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd != server.fileno():
                    job, pid, written = running[key.fd]
                    if piece := os.read(key.fd, 1 << 16):
                        written.append(piece)
                        continue
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    del running[key.fd]
                    server.send_bytes(msgspec.msgpack.encode(verdict_of(job.id, pid, b"".join(written))))
                    continue
                new = msgspec.msgpack.decode(server.recv_bytes(), type=Job)
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
    with Connection(fd) as server, contextlib.suppress(EOFError):
        serve(server, int(width))


if __name__ == "__main__":
    main()
