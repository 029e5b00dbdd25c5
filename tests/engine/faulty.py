"""An engine process that injects faults: a request's seed encodes the fault and the number of output tokens before it.

FaultyChild starts `python -m tests.engine.faulty` instead of `python -m engine.worker`.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

from engine import worker
from engine.batch import Batch, StepTokens
from engine.loop import EngineLoop, StepOutOfMemory
from engine.supervisor import Child

BASE = 10_000_000
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
    compute, tokens = EngineLoop._compute, EngineLoop._tokens

    def due(loop: EngineLoop, batch: Batch) -> list[str]:
        found = []
        for row in batch.rows:
            seq = loop.scheduler.by_id[row.seq_id]
            kind, at = divmod(seq.request.params.seed, BASE)
            if kind and seq.num_output == at and row.draws:
                found.append(KINDS[kind - 1])
        return found

    def faulty_compute(loop: EngineLoop, batch: Batch, masks: object) -> StepTokens:
        for kind in due(loop, batch):
            if kind != "spin":
                ACTS[kind]()
        return compute(loop, batch, masks)

    async def faulty_tokens(loop: EngineLoop, batch: Batch) -> StepTokens:
        if "spin" in due(loop, batch):
            spin()
        return await tokens(loop, batch)

    EngineLoop._compute, EngineLoop._tokens = faulty_compute, faulty_tokens


if __name__ == "__main__":
    install()
    worker.main()
