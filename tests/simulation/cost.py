"""The host's CPU time for a step of rows that sample: what a device that computes faster has to wait for.

The engine's loop, scheduler and runner are real, and so is the packing of messages. At depth 0 steps run on a
ModelThread, as on a CPU, and at depth 1 on the loop's, as on CUDA. The model computes nothing, and its vocabulary is so
small that sampling costs little more than calling the kernel. What the operating system does to move a message to the
server, and what the server does with it, is not counted.
"""

from __future__ import annotations

import asyncio
import statistics
import time
import types
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from engine import EngineConfig, EngineRequest, SamplingParams, attention, channel
from engine.batch import Batch
from engine.cache_groups import CacheGroups
from engine.config import resolve
from engine.kernels.library import Choice, settle
from engine.loop import EngineLoop
from engine.models import Forward, Outputs
from engine.process import freeze
from engine.runner import Runner
from engine.scheduler import Scheduler
from engine.step_thread import LoopThread, ModelThread
from engine.types import StepStats, TokenDelta

BLOCK = 16  # tokens
PROMPT = 32  # tokens of the shortest one; they have BLOCK lengths, so that each step fills some blocks
VOCAB = 16
LAYERS = [attention.AttentionLayer(1, 1, 16, 16, scale=1.0)]
PARTS = ("schedule", "launch", "sample", "collect", "update", "publish", "rest")


class Constant:
    """A model that computes nothing: its logits do not depend on the tokens."""

    def __init__(self, rows: int) -> None:
        self.spec = types.SimpleNamespace(
            vocab_size=VOCAB,
            layers=LAYERS,
            mixers=[],
            groups=CacheGroups(),
            dtype=torch.float32,
            cache_dtype=torch.float32,
        )
        self.sinks: dict[str, torch.Tensor] = {}
        self.product = Choice(None)
        self.executors: list[Any] = []
        self.logits = torch.rand(rows, VOCAB, generator=torch.Generator().manual_seed(1))

    def forward(self, forward: Forward) -> Outputs:
        return Outputs(self.logits[: forward.logits_at.numel()].clone())


class Cost:
    """Runs an engine, and measures the parts of its steps in microseconds. It is the engine's runner and outbox."""

    def __init__(self, rows: int, steps: int, depth: int) -> None:
        cpu = torch.device("cpu")
        length = PROMPT + BLOCK + steps
        unresolved = EngineConfig(
            model="none",
            block_size=BLOCK,
            max_seqs=rows,
            max_batched_tokens=max(8192, rows),
            async_scheduling=bool(depth),
            attention=attention.choose("auto", cpu, LAYERS, torch.float32).name,
            cpu_isa=settle("auto", cpu),
        )
        config = resolve(unresolved, "cpu", length)
        num_blocks = rows * -(-length // config.block_size)
        self.scheduler = Scheduler(config, num_blocks)
        self.runner = Runner(Constant(rows), config, num_blocks)  # type: ignore[arg-type]
        self.encoder = channel.Channel(channel.Downward)  # not open: it encodes messages and sends them nowhere
        self.steps = steps
        self.spent: list[dict[str, float]] = []  # of each step
        self.current: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        self.began = 0.0
        self.is_done = asyncio.Event()
        for number in range(rows):
            prompt = tuple((number * 7919 + at) % VOCAB for at in range(PROMPT + number % BLOCK))
            params = SamplingParams(max_tokens=steps, stop_ids=(VOCAB,), temperature=0.7, seed=number)
            refused = self.scheduler.add(EngineRequest(id=number, prompt_ids=prompt, params=params))
            assert refused is None

    def timed(self, part: str, work: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call `work`, and add the CPU time of its thread to a part of the step."""
        began = time.thread_time()
        try:
            return work(*args, **options)
        finally:
            self.current[part] += 1e6 * (time.thread_time() - began)

    def launch(self, batch: Batch) -> Any:
        step = self.timed("launch", self.runner.launch, batch)
        return types.SimpleNamespace(
            sample=partial(self.timed, "sample", step.sample), result=partial(self.timed, "collect", step.result)
        )

    def started(self, ids: list[int]) -> None:
        if ids:
            self.encoder.send(channel.Started(ids))

    def send(self, deltas: list[TokenDelta], stats: StepStats | None) -> None:
        self.encoder.send(channel.pack(deltas, stats))

    async def drained(self) -> None:
        """End a step: the loop calls this once in each."""
        total, self.began = 1e6 * (time.process_time() - self.began), time.process_time()
        self.current["rest"] = total - sum(self.current.values())
        self.spent.append(self.current)
        self.current = dict.fromkeys(PARTS, 0.0)
        if self.scheduler.is_idle:
            self.is_done.set()

    async def run(self) -> None:
        """Run all requests to their ends."""
        thread = LoopThread() if self.scheduler.config.async_scheduling else ModelThread()
        loop = EngineLoop(self.scheduler, self, self, thread)
        for part, owner, name in (
            ("schedule", self.scheduler, "schedule"),
            ("update", self.scheduler, "update"),
            ("publish", loop, "_publish"),
        ):
            setattr(owner, name, partial(self.timed, part, getattr(owner, name)))
        freeze()  # as the worker does
        task = asyncio.create_task(loop.run())
        await self.is_done.wait()
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        if isinstance(thread, ModelThread):
            await thread.close()


def measure(rows: int, depth: int, steps: int = 300) -> dict[str, float]:
    """Return the median CPU time of each part of a step, in microseconds."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        cost = Cost(rows, steps, depth)
        asyncio.run(cost.run())
    finally:
        torch.set_num_threads(threads)
    steady = cost.spent[steps // 3 : steps - 1]
    return {part: statistics.median(spent[part] for spent in steady) for part in PARTS}


def report(rows: list[int], depth: int) -> None:
    """Print the cost of a step for each number of rows."""
    print("rows".rjust(5), *(part.rjust(9) for part in (*PARTS, "total")), " CPU microseconds per step")
    for count in rows:
        found = measure(count, depth)
        print(f"{count:5d}", *(f"{value:9.0f}" for value in (*found.values(), sum(found.values()))))
