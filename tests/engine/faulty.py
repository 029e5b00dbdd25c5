"""An engine process that injects faults: a request's seed encodes the fault and the number of output tokens before it.

`python -m tests.engine.faulty` in the place of `python -m engine.worker`, through FaultyChild. With OTHER_MACHINE in
the environment it finds another machine: memory of so many bytes, on which the other instruction set is the faster one.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

from engine import memory, worker
from engine.batch import Batch, StepResult
from engine.loop import EngineLoop, StepOutOfMemory
from engine.supervisor import Child

BASE = 10_000_000
OTHER_MACHINE = "PEQUOD_TEST_OTHER_MACHINE"
KINDS = ("segfault", "exit", "stop", "hang", "spin", "memory")


def seed(kind: str, tokens: int) -> int:
    """Return the seed of a request that triggers this fault after this many output tokens."""
    return BASE * (KINDS.index(kind) + 1) + tokens


class FaultyChild(Child):
    MODULE = "tests.engine.faulty"


def hang() -> None:
    threading.Event().wait()


def spin() -> None:
    while True:
        time.sleep(0)


def out_of_memory() -> None:
    raise StepOutOfMemory


ACTS: dict[str, Callable[[], object]] = {
    "segfault": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "exit": lambda: os._exit(3),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "hang": hang,  # on the model thread: the loop turns on
    "spin": spin,  # on the loop's thread
    "memory": out_of_memory,
}


def install() -> None:
    compute, result = EngineLoop._compute, EngineLoop._result

    def due(loop: EngineLoop, batch: Batch) -> list[str]:
        found = []
        for row in batch.rows:
            seq = loop.scheduler.by_id[row.seq_id]
            kind, at = divmod(seq.request.params.seed, BASE)
            if kind and seq.num_output == at and row.is_sampled:
                found.append(KINDS[kind - 1])
        return found

    def faulty_compute(loop: EngineLoop, batch: Batch, masks: object) -> StepResult:
        for kind in due(loop, batch):
            if kind != "spin":
                ACTS[kind]()
        return compute(loop, batch, masks)

    async def faulty_result(loop: EngineLoop, batch: Batch) -> StepResult:
        if "spin" in due(loop, batch):
            spin()
        return await result(loop, batch)

    EngineLoop._compute, EngineLoop._result = faulty_compute, faulty_result


def move(size: int) -> None:
    """Let this process find another machine, with `size` bytes of memory."""
    from engine.kernels import library

    best_first = library.best_first
    library.best_first = lambda features: best_first(features)[::-1]
    memory.measure = lambda device: memory.Machine("cpu", size, size)


if __name__ == "__main__":
    install()
    if OTHER_MACHINE in os.environ:
        move(int(os.environ[OTHER_MACHINE]))
    worker.main()
