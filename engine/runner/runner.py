"""Runner: computes the steps that the scheduler decides."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from .. import attention, models
from ..batch import Batch, Entered, Masks, Outcome, Row, Sampled, StepResult
from ..config import EngineConfig
from ..kernels.library import Clock, for_sampling
from ..loop import StepOutOfMemory
from ..out_of_memory import is_out_of_memory
from ..types import SamplingParams, TokenLogprob
from .inputs import Inputs, Prepared
from .pooler import Pooler
from .sampler import Sampler

T = TypeVar("T")

# The size of the warm-up's two steps on a CPU, where nothing is compiled for a step's size and the memory plan already
# counts what a full step takes. Full steps took two seconds for 0.6 billion parameters.
WARM_ROWS, WARM_TOKENS = 2, 16


@dataclass(slots=True, eq=False)
class Step:
    """A step in flight: its logits are being computed, and no token has been sampled."""

    runner: Runner
    batch: Batch
    prepared: Prepared | None  # None when the batch has no rows
    outputs: models.Outputs | None  # None without rows, and after sampling
    seconds: dict[str, float] = field(default_factory=dict)
    spent: float = 0.0  # reading of the kernels' clock when the step began

    def sample(self, masks: Masks | None = None) -> StepResult:
        """Sample the step's tokens; may be called once."""
        return _guarded(lambda: self._sample(masks))

    def _sample(self, masks: Masks | None) -> StepResult:
        began = time.perf_counter()
        rows = self.batch.rows
        outcomes: list[Outcome] = [None] * len(rows)
        prompt_logprobs: dict[int, list[TokenLogprob]] = {}
        if self.prepared is not None:
            sampler, prepared = self.runner.sampler, self.prepared
            outputs, self.outputs = self.outputs, None
            assert outputs is not None, "a step is sampled once"
            for row, places in prepared.scored.items():
                slot = int(prepared.slots[row])
                prompt_logprobs[row] = sampler.score(outputs.logits[places], slot, rows[row].scored)
            if len(prepared.sampled_rows):
                self._sample_rows(outputs.logits, masks, outcomes)
            for row, slot in enumerate(prepared.slots.tolist() if sampler.problems else ()):
                outcomes[row] = sampler.problems.get(slot, outcomes[row])
            if prepared.pooled:  # last: if anything before it fails, the sums are unchanged
                pooled = self.runner.pooler.pool(outputs.hidden, prepared.pooled, prepared.slots, rows)
                for row, outcome in pooled.items():
                    outcomes[row] = outcomes[row] or outcome
        self.seconds["sample"] = time.perf_counter() - began
        if self.runner.clock:
            self.seconds["kernels"] = self.runner.clock.seconds() - self.spent
        return StepResult(outcomes, prompt_logprobs, self.seconds)

    def _sample_rows(self, logits: Tensor, masks: Masks | None, outcomes: list[Outcome]) -> None:
        """Sample a token for each row whose last position has logits."""
        prepared = self.prepared
        assert prepared is not None
        if prepared.sampled_logits is not None:
            logits = logits[torch.from_numpy(prepared.sampled_logits).to(logits.device)]
        slots, lengths = prepared.slots[prepared.sampled_rows], prepared.lengths[prepared.sampled_rows]
        allowed = None if masks is None else (np.searchsorted(prepared.sampled_rows, masks.rows), masks.bits)
        tokens = self.runner.sampler.sample(logits, slots, lengths, allowed)
        for index, row in enumerate(prepared.sampled_rows.tolist()):
            logprob = tokens.logprobs.get(index)
            sampled = Sampled([tokens.token_ids[index]], None if logprob is None else [logprob])
            outcomes[row] = tokens.errors.get(index, sampled)


class Runner:
    """The model, its KV cache, and the device's state of each running sequence. Used on the model thread only."""

    def __init__(self, model: models.Model, config: EngineConfig, num_blocks: int) -> None:
        """`config` is resolved. Allocates the cache: `num_blocks` blocks in every layer."""
        assert config.max_len and config.max_seqs and config.max_batched_tokens
        self.model = model
        self.config = config
        self.num_blocks = num_blocks
        self.device = torch.device(config.device)
        spec = model.spec
        backend = attention.create(config.attention, config.cpu_isa)
        self.cache = _guarded(
            lambda: attention.KVCache.allocate(
                backend,
                spec.layers,
                num_blocks=num_blocks,
                block_size=config.block_size,
                dtype=spec.cache_dtype,
                device=self.device,
                sinks=model.sinks,
            )
        )
        max_blocks = -(-config.max_len // config.block_size)
        self.inputs = Inputs(
            max_seqs=config.max_seqs,
            max_tokens=config.max_batched_tokens,
            max_blocks=max_blocks,
            block_size=config.block_size,
            cache=self.cache,
            device=self.device,
        )
        self.sampling = for_sampling(config.cpu_isa, self.device, spec.dtype)  # None: torch
        self.sampler = Sampler(config.max_seqs, spec.vocab_size, self.device, self.sampling, config.logprobs_mode)
        self.pooler = Pooler()
        parts = (model.product.kernels, self.sampling, backend)
        self.clock = Clock({part.library for part in parts if part is not None and part.library is not None})

    def launch(self, batch: Batch) -> Step:
        """Queue the step's forward pass.

        Raises StepOutOfMemory; the sequences that enter and leave, and their new blocks, are recorded all the same.
        """
        return _guarded(lambda: self._launch(batch))

    def _launch(self, batch: Batch) -> Step:
        began, spent_before = time.perf_counter(), self.clock.seconds()
        for seq_id in batch.left:
            slot = self.inputs.leave(seq_id)
            self.sampler.remove(slot)
            self.pooler.remove(slot)
        for entered in batch.entered:
            slot = self.inputs.enter(entered.seq_id)
            self.sampler.add(slot, entered)
            self.pooler.add(slot, entered)
        if not batch.rows:
            return Step(self, batch, None, None, spent=spent_before)
        self.inputs.append_blocks(batch.rows)
        prepared = self.inputs.prepare(batch.rows)
        for slot, row in zip(prepared.slots.tolist(), batch.rows, strict=True):
            self.sampler.observe(slot, row.start, row.token_ids)
        ready = time.perf_counter()
        outputs = self.model.forward(prepared.forward)
        # On CUDA the forward pass is only queued here: its time counts as the sampler's, which waits for it.
        seconds = {"prepare": ready - began, "forward": time.perf_counter() - ready}
        return Step(self, batch, prepared, outputs, seconds, spent_before)

    def warm_up(self) -> None:
        """Run two steps of the largest size, a decode of all slots and a chunk; small ones on a CPU.

        The first request then runs warm code, and on a GPU a lack of memory shows now. To be called before the first
        batch, since it overwrites the first blocks; nothing else of it remains.
        """
        block_size, budget = self.config.block_size, self.config.max_batched_tokens or 1
        seqs = min(self.config.max_seqs or 1, self.num_blocks)
        chunk = min(budget, self.config.max_len or 1, self.num_blocks * block_size)
        if self.device.type == "cpu":
            seqs, chunk = min(seqs, WARM_ROWS), min(chunk, WARM_TOKENS)
        params = SamplingParams(max_tokens=1, top_p=0.9, logprobs=0)
        decode = [Row(-1 - index, 0, [0], [index], 1) for index in range(seqs)]
        prompt = [Row(-1, 0, [0] * chunk, list(range(-(-chunk // block_size))), 1)]
        for rows in (decode, prompt):
            length = len(rows[0].token_ids)
            entered = [Entered(row.seq_id, params, length, []) for row in rows]
            self.launch(Batch(0, rows, entered)).sample()
            self.launch(Batch(0, [], [], [row.seq_id for row in rows])).sample()


def _guarded(work: Callable[[], T]) -> T:
    """Call `work` without autograd. If memory runs out, free what can be freed and raise StepOutOfMemory."""
    try:
        with torch.inference_mode():
            return work()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        message = str(error).split("\n", 1)[0]
    # Not in the except block, where the traceback still references the tensors of the step.
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    raise StepOutOfMemory(message)
