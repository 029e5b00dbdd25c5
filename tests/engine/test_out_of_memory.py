"""Memory that runs out at any allocation of a run: no request gets other tokens, and no block is lost."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine import Pooling
from engine.batch import Batch, Masks, StepResult
from engine.config import EngineConfig, resolve
from engine.loop import EngineLoop
from engine.loop import Step as LoopStep
from engine.runner import Runner
from engine.scheduler import Scheduler
from engine.step_thread import ModelThread
from engine.types import EngineRequest, SamplingParams
from tests.engine.test_kernels import needs_library
from tests.engine.test_loop import Outbox
from tests.engine.test_runner import MeanModel
from tests.live import WAIT_S
from tests.models import load_model, make

GREEDY = SamplingParams(max_tokens=4, temperature=0.0)
REQUESTS = [
    EngineRequest(id=1, prompt_ids=(3, 1, 4, 1, 5, 9, 2), params=SamplingParams(max_tokens=3, seed=1, top_k=5)),
    EngineRequest(id=2, prompt_ids=(2, 7), params=SamplingParams(max_tokens=5, temperature=0.0, frequency_penalty=1.0)),
    EngineRequest(id=3, prompt_ids=(1, 8), params=SamplingParams(max_tokens=3, seed=2, logprobs=2, min_tokens=3)),
    EngineRequest(
        id=4, prompt_ids=(3, 1, 4, 1), params=SamplingParams(max_tokens=2, temperature=0.0, prompt_logprobs=1)
    ),
    EngineRequest(id=5, prompt_ids=(6, 2, 8), params=SamplingParams(max_tokens=1, pooling=Pooling())),
]
LATER = EngineRequest(id=6, prompt_ids=(5, 3, 5), params=GREEDY)
RUNS = 15  # in which the memory runs out at another allocation, for each model and mode
NO_MEMORY = "the step that this request was in ran out of memory"


class Memory(TorchDispatchMode):
    """Counts the tensors that are allocated. Allocation number `fails_at` fails."""

    def __init__(self, fails_at: int | None) -> None:
        super().__init__()
        self.count, self.fails_at = 0, fails_at

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {
            each.untyped_storage()._cdata for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)
        }
        made = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
        if any(each.untyped_storage()._cdata not in given for each in made):
            self.count += 1
            if self.count == self.fails_at:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return result


class Step:
    """A step whose tensors come from a Memory."""

    def __init__(self, step: LoopStep, memory: Memory) -> None:
        self.step, self.memory = step, memory

    def sample(self, masks: Masks | None = None) -> Step:
        with self.memory:
            self.step.sample(masks)
        return self

    def result(self) -> StepResult:
        return self.step.result()


class Tight:
    """A runner whose tensors come from a Memory."""

    def __init__(self, runner: Runner, memory: Memory) -> None:
        self.runner, self.memory = runner, memory

    def launch(self, batch: Batch) -> Step:
        with self.memory:
            return Step(self.runner.launch(batch), self.memory)


class Told(Outbox):
    """What each request was told: its tokens, log-probabilities and vector, and how it ended."""

    def __init__(self) -> None:
        super().__init__()
        self.told: dict[int, list[Any]] = {}
        self.ends: dict[int, tuple[str, str | None]] = {}

    def send(self, deltas: Any, stats: Any) -> None:
        super().send(deltas, stats)
        for delta in deltas:
            kept = self.told.setdefault(delta.id, [])
            kept += [*delta.token_ids, *(delta.logprobs or ()), *(delta.prompt_logprobs or ())]
            kept += [] if delta.embedding is None else [delta.embedding]
            if delta.finish_reason:
                self.ends[delta.id] = (delta.finish_reason, delta.error)


async def run(model: Any, config: EngineConfig, fails_at: int | None = None) -> tuple[Told, Memory]:
    """Serve REQUESTS at once, then LATER, with memory that runs out once."""
    memory, outbox = Memory(fails_at), Told()
    scheduler = Scheduler(config, num_blocks=16, vocab_size=model.spec.vocab_size)
    thread = ModelThread()
    loop = EngineLoop(scheduler, Tight(Runner(model, config, 16), memory), outbox, thread)
    task = asyncio.create_task(loop.run())
    try:
        for requests in (REQUESTS, [LATER]):
            for request in requests:
                loop.add(request)
            async with asyncio.timeout(WAIT_S):
                while not all(request.id in outbox.ends for request in requests):
                    outbox.ended.clear()
                    wait = asyncio.ensure_future(outbox.ended.wait())
                    await asyncio.wait({wait, task}, return_when=asyncio.FIRST_COMPLETED)
                    wait.cancel()
                    if task.done():
                        task.result()  # raises what has ended the loop
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await thread.close()
    assert scheduler.is_idle and scheduler.pool.num_held == 0
    return outbox, memory


@pytest.fixture(scope="module", params=["torch", pytest.param("kernels", marks=needs_library)])
def computed(request, tmp_path_factory):
    """A model and its configuration: of one operation in torch, or a decoder with our kernels. Both are exact."""
    settings = {"max_len": 64, "max_seqs": 4, "max_batched_tokens": 8, "block_size": 4, "debug": True}
    if request.param == "torch":
        return MeanModel(), EngineConfig(model="mean", attention="reference", cpu_isa="torch", **settings)
    folder = make("qwen3", tmp_path_factory.mktemp("models") / "qwen3")
    config = EngineConfig(model=str(folder), dtype="float32", attention="cpu", **settings)
    return load_model(config, folder), config


@pytest.mark.parametrize("ahead", [False, True], ids=["collected", "ahead"])
async def test_memory_that_runs_out_at_any_allocation_costs_one_request_at_most(computed, ahead):
    model, config = computed
    config = resolve(replace(config, async_scheduling=ahead), "cpu", 64)
    undisturbed, memory = await run(model, config)
    assert {reason for reason, _ in undisturbed.ends.values()} == {"length", "stop"}
    assert all(undisturbed.told[request.id] for request in REQUESTS)
    failed = []
    for number in range(1, memory.count + 1, max(1, memory.count // RUNS)):
        outbox, _ = await run(model, config, fails_at=number)
        errors = [id_ for id_, end in outbox.ends.items() if end == ("error", NO_MEMORY)]
        assert len(errors) <= 1, number
        failed += errors
        for request in (*REQUESTS, LATER):
            told, whole = outbox.told[request.id], undisturbed.told[request.id]
            if request.id in errors:
                assert told == whole[: len(told)], number
            else:
                assert (told, outbox.ends[request.id]) == (whole, undisturbed.ends[request.id]), number
    # A step that was launched ahead of another one is tried again alone.
    assert failed and (len(set(failed)) > 3 or ahead)
