"""The host's CPU time for a step of rows that sample: what a device that computes faster has to wait for."""

from __future__ import annotations

import statistics
import time
from itertools import pairwise

import torch

from engine import EngineConfig, EngineRequest, SamplingParams, channel
from engine.attention import KVCache
from engine.attention.reference import Reference
from engine.batch import Batch, Sampled, StepResult
from engine.runner.inputs import Inputs
from engine.scheduler import Scheduler

PROMPT = 32  # tokens
PARTS = ("schedule", "prepare", "update", "pack")


class Cost:
    """Runs steps without a model, and measures their parts in microseconds."""

    def __init__(self, rows: int, steps: int, depth: int) -> None:
        length = PROMPT + steps + 2
        config = EngineConfig(
            model="none", max_len=length, max_seqs=rows, max_batched_tokens=max(8192, rows), prefix_caching=True
        )
        self.depth = depth
        self.scheduler = Scheduler(config, rows * -(-length // config.block_size) + 64)
        self.inputs = Inputs(
            max_seqs=rows,
            max_tokens=max(8192, rows),
            max_blocks=-(-length // config.block_size),
            block_size=config.block_size,
            cache=KVCache(Reference(), []),
            device=torch.device("cpu"),
        )
        self.last = torch.zeros(rows, dtype=torch.int64) if depth else None
        self.flight: Batch | None = None
        self.spent: dict[str, list[float]] = {part: [] for part in PARTS}
        for number in range(rows):
            prompt = tuple((number * 7919 + position) % 50_000 for position in range(PROMPT))
            params = SamplingParams(max_tokens=length, stop_ids=(50_001,), temperature=0.7)
            refused = self.scheduler.add(EngineRequest(id=number, prompt_ids=prompt, params=params))
            assert refused is None

    def step(self) -> None:
        marks = [time.thread_time()]
        batch = self.scheduler.schedule()
        assert batch is not None
        marks.append(time.thread_time())
        for entered in batch.entered:
            self.inputs.enter(entered.seq_id)
        self.inputs.append_blocks(batch.rows)
        self.inputs.prepare(batch.rows, self.last)
        marks.append(time.thread_time())
        due, self.flight = (self.flight, batch) if self.depth else (batch, None)
        outcomes = [Sampled([index]) if row.is_sampled else None for index, row in enumerate(due.rows)] if due else []
        marks.append(time.thread_time())
        deltas = self.scheduler.update(due, StepResult(outcomes)) if due else []
        marks.append(time.thread_time())
        channel.pack(deltas, self.scheduler.stats(due or batch, {}, 0.0))
        marks.append(time.thread_time())
        scheduled, prepared, _, updated, packed = (later - mark for mark, later in pairwise(marks))
        for part, seconds in zip(PARTS, (scheduled, prepared, updated, packed), strict=True):
            self.spent[part].append(1e6 * seconds)


def measure(rows: int, depth: int, steps: int = 300) -> dict[str, float]:
    """Return the median CPU time of each part of a step, in microseconds."""
    cost = Cost(rows, steps, depth)
    for _ in range(steps):
        cost.step()
    return {part: statistics.median(times[steps // 3 :]) for part, times in cost.spent.items()}


def report(rows: list[int], depth: int) -> None:
    """Print the cost of a step for each number of rows."""
    print("rows".rjust(5), *(part.rjust(9) for part in (*PARTS, "total")), " CPU microseconds per step")
    for count in rows:
        found = measure(count, depth)
        print(f"{count:5d}", *(f"{value:9.0f}" for value in (*found.values(), sum(found.values()))))
