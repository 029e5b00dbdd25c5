"""An engine process that injects faults: a request's seed encodes the fault and the number of output tokens before it.

`python -m tests.engine.faulty` in the place of `python -m engine.worker`, through FaultyChild. With OTHER_MACHINE in
the environment it finds another machine: memory of so many bytes, on which the other instruction set is the faster one.
With STOPS_AT it stops before the step of this number, as SIGSTOP stops a process, and does not go on.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from unittest.mock import patch

from engine import machine_memory, worker
from engine.batch import Batch
from engine.loop import EngineLoop, Flight
from engine.supervisor import Child

BASE = 10_000_000
OTHER_MACHINE = "PEQUOD_TEST_OTHER_MACHINE"
STOPS_AT = "PEQUOD_TEST_STOPS_AT"
KINDS = ("segfault", "exit", "hang", "block", "memory")


def seed(kind: str, tokens: int) -> int:
    """Return the seed of a request that triggers this fault after this many output tokens."""
    return BASE * (KINDS.index(kind) + 1) + tokens


class FaultyChild(Child):
    MODULE = "tests.engine.faulty"


def stopping(step: int) -> FaultyChild:
    """Start a process that stops before this step, so that a test which is slow itself still finds it at work.

    A process that replaces it does not stop.
    """
    with patch.dict(os.environ, {STOPS_AT: str(step)}):
        return FaultyChild()


def hang() -> None:
    threading.Event().wait()


ACTS: dict[str, Callable[[], object]] = {
    "segfault": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "exit": lambda: os._exit(3),
    "hang": hang,  # on the model thread: the loop turns on
    "block": hang,  # on the loop's thread
}


def install() -> None:
    launch, begin = EngineLoop._launch, EngineLoop._begin
    stops_at = int(os.environ.get(STOPS_AT, "0"))

    def due(loop: EngineLoop, batch: Batch) -> list[str]:
        found = []
        for row in batch.rows:
            seq = loop.scheduler.by_id.get(row.seq_id)
            if seq is not None and row.is_sampled:
                kind, at = divmod(seq.request.params.seed, BASE)
                if kind and row.end == seq.prompt_len + at:
                    found.append(KINDS[kind - 1])
        return found

    def faulty_launch(loop: EngineLoop, flight: Flight) -> None:
        if flight.batch.step == stops_at:
            os.kill(os.getpid(), signal.SIGSTOP)
            hang()
        for kind in due(loop, flight.batch):
            if kind == "memory":
                return  # nothing was launched
            if kind != "block":
                ACTS[kind]()
        launch(loop, flight)

    def faulty_begin(loop: EngineLoop, batch: Batch, schedule_s: float) -> Flight:
        flight = begin(loop, batch, schedule_s)
        if "block" in due(loop, batch):
            ACTS["block"]()
        return flight

    EngineLoop._launch, EngineLoop._begin = faulty_launch, faulty_begin


def move(size: int) -> None:
    """Let this process find another machine, with `size` bytes of memory."""
    from engine.kernels import library

    best_first = library.best_first
    library.best_first = lambda features: best_first(features)[::-1]
    machine_memory.measure = lambda device: machine_memory.Machine("cpu", size, size)


if __name__ == "__main__":
    install()
    if OTHER_MACHINE in os.environ:
        move(int(os.environ[OTHER_MACHINE]))
    worker.main()
