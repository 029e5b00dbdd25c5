"""Runner: computes the steps that the scheduler decides."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from .. import attention, graph_sizes, memory, models
from ..batch import PENDING, Batch, Entered, Masks, Outcome, Row, RowError, Sampled, StepResult
from ..config import EngineConfig
from ..kernels.library import Clock
from ..models.decoder import Decoder
from ..out_of_memory import guarded
from ..types import SamplingParams
from . import graphs, logits_choice
from .changes import on_device
from .cuda_graphs import GraphDevice
from .graphs import Graphs
from .inputs import Inputs, Prepared
from .pooler import Pooler, QueuedPooling
from .queued import QueuedScores, QueuedTokens
from .sampler import Sampler
from .state_inputs import StateInputs

# The size of the warm-up's two steps on a CPU, where nothing is compiled for a step's size and the memory plan already
# counts what a full step takes. Full steps took two seconds for 0.6 billion parameters.
WARM_ROWS, WARM_TOKENS = 2, 16


@dataclass(slots=True, eq=False)
class Step:
    """A step in flight. `sample` queues what follows its forward pass, and `result` waits for all of it."""

    runner: Runner
    batch: Batch
    prepared: Prepared | None  # None when the batch has no rows
    outputs: models.Outputs | None  # None without rows, and after sampling
    before: Step | None  # what samples the tokens that are PENDING in this step; None after sampling
    seconds: dict[str, float] = field(default_factory=dict)
    spent: float = 0.0  # reading of the kernels' clock when the step began
    tokens: QueuedTokens | None = None
    scores: dict[int, QueuedScores] = field(default_factory=dict)  # by row
    pooled: list[QueuedPooling] = field(default_factory=list)
    problems: dict[int, RowError] = field(default_factory=dict)  # row -> why its parameters are invalid
    collected: StepResult | None = None

    def sample(self, masks: Masks | None = None) -> Step:
        """Queue the sampling of the step's tokens; may be called once, before the next step is launched.

        Raises StepOutOfMemory. Waits for the step before if a penalty needs to know the token that it samples.
        """
        guarded(lambda: self._sample(masks))
        return self

    def result(self) -> StepResult:
        """Wait for the step, which has been sampled, and return what it has computed."""
        if self.collected is None:
            self.collected = self._collect()
        return self.collected

    def _sample(self, masks: Masks | None) -> None:
        self._observe_pending()  # may wait for the step before, which counts as that step's time
        began = time.perf_counter()
        if self.prepared is not None:
            sampler, layout, rows = self.runner.sampler, self.prepared.layout, self.batch.rows
            outputs, self.outputs = self.outputs, None
            assert outputs is not None, "a step is sampled once"
            for row, places in layout.scored.items():
                scores = sampler.score(outputs.logits[places], int(layout.slots[row]), rows[row].scored)
                if scores is not None:
                    self.scores[row] = scores
            if len(layout.sampled_rows):
                self.tokens = self._sample_rows(outputs.logits, masks)
            for row, slot in enumerate(layout.slots.tolist() if sampler.problems else ()):
                if slot in sampler.problems:
                    self.problems[row] = sampler.problems[slot]
            pooler = self.runner.pooler
            if layout.pooled_logits:
                self.pooled.append(pooler.select(outputs.logits, layout.pooled_logits, layout.slots))
            if layout.pooled:  # last: if anything before it fails, the sums are unchanged
                self.pooled += pooler.pool(outputs.hidden, layout.pooled, layout.slots, rows)
        self.seconds["sample"] = time.perf_counter() - began
        if self.runner.clock:
            self.seconds["kernels"] = self.runner.clock.seconds() - self.spent

    def _observe_pending(self) -> None:
        """Count the tokens that were PENDING when this step was launched."""
        before, self.before = self.before, None
        sampler = self.runner.sampler
        if before is None or self.prepared is None or not sampler.has_histories:
            return
        for slot, row in zip(self.prepared.layout.slots.tolist(), self.batch.rows, strict=True):
            if row.token_ids[-1] == PENDING and sampler.has_history(slot):
                before.result()
                sampler.observe(slot, row.start, [int(self.runner.known[slot])])

    def _sample_rows(self, logits: Tensor, masks: Masks | None) -> QueuedTokens:
        """Sample a token for each row whose last position has logits."""
        assert self.prepared is not None
        runner, layout = self.runner, self.prepared.layout
        if layout.sampled_logits is not None:
            logits = logits[on_device(layout.sampled_logits, logits.device)]
        slots, lengths = layout.slots[layout.sampled_rows], self.prepared.lengths[layout.sampled_rows]
        allowed = None if masks is None else (np.searchsorted(layout.sampled_rows, masks.rows), masks.bits)
        tokens = runner.sampler.sample(logits, slots, lengths, allowed)
        draws = runner.sampler.draw_graphs
        if runner.last is not None and not (
            draws is not None and draws.draws(logits)
        ):  # a row that failed has a negative id: the next step computes nothing of use for it
            runner.last.index_copy_(0, layout.sampled_slots, tokens.ids.clamp(min=0))
        return tokens

    def _collect(self) -> StepResult:
        began = time.perf_counter()
        outcomes: list[Outcome] = [None] * len(self.batch.rows)
        if self.tokens is not None:
            assert self.prepared is not None
            tokens, layout = self.tokens.tokens(), self.prepared.layout
            sampled: list[Outcome] = [Sampled([token_id]) for token_id in tokens.token_ids]
            for index, logprob in tokens.logprobs.items():
                sampled[index] = Sampled([tokens.token_ids[index]], [logprob])
            for index, error in tokens.errors.items():
                sampled[index] = error
            if len(sampled) == len(outcomes):
                outcomes = sampled
            else:
                for row, outcome in zip(layout.sampled_rows.tolist(), sampled, strict=True):
                    outcomes[row] = outcome
            if self.runner.sampler.has_histories:
                self.runner.known[layout.slots[layout.sampled_rows]] = tokens.token_ids
        for row, problem in self.problems.items():
            outcomes[row] = problem
        for queued in self.pooled:
            for row, embedded in queued.outcomes().items():
                outcomes[row] = outcomes[row] or embedded
        prompt_logprobs = {row: scores.scores() for row, scores in self.scores.items()}
        if self.prepared is not None:
            self.seconds["sample"] += time.perf_counter() - began
        return StepResult(outcomes, prompt_logprobs, self.seconds)


class Runner:
    """The model, its KV cache, and the device's state of each running sequence. Used by one thread at a time."""

    def __init__(
        self,
        model: models.Model,
        config: EngineConfig,
        num_blocks: int,
        graph_device: GraphDevice | None = None,
        step_bytes: int | None = None,
    ) -> None:
        """`config` is resolved. Allocates the cache: `num_blocks` blocks, which all groups of layers share.

        `graph_device` captures the steps of models for which that is possible; None: all steps are launched.
        `step_bytes`: the memory that a step takes, to be left by captures; None: as estimated.
        """
        assert config.max_len and config.max_seqs and config.max_batched_tokens
        self.model, self.config, self.num_blocks = model, config, num_blocks
        self.device = torch.device(config.device)
        spec = model.spec
        backend = attention.create(config.attention, config.cpu_isa, invariant=config.batch_invariant)
        self.cache = guarded(
            lambda: attention.KVCache.allocate(
                backend,
                spec.layers,
                num_blocks=num_blocks,
                block_size=config.block_size,
                dtype=spec.cache_dtype,
                device=self.device,
                sinks=model.sinks,
                groups=spec.groups,
            )
        )
        max_blocks = -(-config.max_len // config.block_size)
        captured = None if graph_device is None else graphs.capturable(model, self.cache)
        self._graphs_objection = f"there are no CUDA graphs: {captured}" if isinstance(captured, str) else ""
        has_graphs = graph_device is not None and not self._graphs_objection
        buckets = graph_sizes.of(spec, config) if has_graphs else None
        self.inputs = Inputs(
            max_seqs=config.max_seqs,
            max_tokens=config.max_batched_tokens,
            max_blocks=max_blocks,
            block_size=config.block_size,
            cache=self.cache,
            device=self.device,
            padded=0 if buckets is None else buckets.largest,
            states=guarded(lambda: StateInputs.of(spec, config, self.device)),
        )
        self.graphs: Graphs | None = None
        if graph_device is not None and captured is not None and not isinstance(captured, str) and buckets is not None:
            self.graphs = Graphs(
                captured,
                spec,
                self.cache,
                self.inputs.buffers,
                sizes=buckets,
                device=graph_device,
                max_len=config.max_len,
                reserve=memory.graph_reserve(spec, config, type(backend)),
                step_bytes=step_bytes or memory.activation_bytes(spec, config, type(backend)),
                others=self.inputs.others,
                states=self.inputs.states,
            )
            model.executors.insert(0, self.graphs)
        self.sampling = logits_choice.choose(config.cpu_isa, self.device, spec.dtype, spec.vocab_size)
        self.sampler = Sampler(
            config.max_seqs, spec.vocab_size, self.device, self.sampling.backend, config.logprobs_mode
        )
        self.pooler = Pooler()
        # By slot, the last sampled token, which the row after it reads on the device, and one number more, for padding.
        # None: each step is collected before the next one is launched, so the row has the token.
        self.last: Tensor | None = None
        if config.async_scheduling:
            self.last = torch.zeros(config.max_seqs + 1, dtype=torch.int64, device=self.device)
        if self.graphs is not None and isinstance(model, Decoder):
            rows = graph_sizes.draws(config.max_seqs, config.max_batched_tokens)
            self.graphs.add_draws(model, rows, self.sampling.backend, self.last)
            self.sampler.draw_graphs = self.graphs.draws
        self.known = np.zeros(config.max_seqs, np.int64)  # the same of collected steps, for penalties
        self._launched: Step | None = None
        parts = (model.product.kernels, self.sampling, backend)
        self.clock = Clock({part.library for part in parts if part is not None and part.library is not None})

    @property
    def graphs_note(self) -> str:
        """Why no steps are captured in graphs, or only some, or empty."""
        return self._graphs_objection or ("" if self.graphs is None else self.graphs.problem)

    def launch(self, batch: Batch) -> Step:
        """Queue the step's forward pass. The step before may be in flight, if it has been sampled.

        Raises StepOutOfMemory; the sequences that enter and leave, and their new blocks, are recorded all the same.
        """
        return guarded(lambda: self._launch(batch))

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
            return Step(self, batch, None, None, None, spent=spent_before)
        self.inputs.append_blocks(batch.rows)
        prepared = self.inputs.prepare(batch.rows, self.last)
        if self.sampler.has_histories:
            for slot, row in zip(prepared.layout.slots.tolist(), batch.rows, strict=True):
                self.sampler.observe(slot, row.start, row.token_ids)
        ready = time.perf_counter()
        outputs = self.model.forward(prepared.forward)
        # On CUDA the forward pass is only queued here: its time counts as the sampler's, whose result waits for it.
        seconds = {"prepare": ready - began, "forward": time.perf_counter() - ready}
        step = Step(self, batch, prepared, outputs, self._launched, seconds, spent_before)
        self._launched = step if self.last is not None else None
        return step

    def warm_up(self) -> None:
        """Run two steps of the largest size, a decode of all slots and a chunk; small ones on a CPU.

        The first request then runs warm code, and on a GPU a lack of memory shows now. To be called before the first
        batch, since it overwrites the first blocks; nothing else of it remains.
        """
        block_size, budget, groups = self.config.block_size, self.config.max_batched_tokens or 1, self.cache.num_groups
        seqs = min(self.config.max_seqs or 1, self.num_blocks)
        chunk = min(budget, self.config.max_len or 1, self.num_blocks * block_size)
        if self.device.type == "cpu":
            seqs, chunk = min(seqs, WARM_ROWS), min(chunk, WARM_TOKENS)
        params = SamplingParams(max_tokens=1, top_p=0.9, logprobs=0)
        # Groups of layers may overwrite each other's blocks: the results are not used.
        decode = [Row(-1 - index, 0, [0], [index] * groups, 1) for index in range(seqs)]
        blocks = [index for index in range(-(-chunk // block_size)) for _ in range(groups)]
        prompt = [Row(-1, 0, [0] * chunk, blocks, 1)]
        for rows in (decode, prompt):
            length = len(rows[0].token_ids)
            entered = [Entered(row.seq_id, params, length, []) for row in rows]
            self.launch(Batch(0, rows, entered)).sample().result()
            self.launch(Batch(0, [], [], [row.seq_id for row in rows])).sample().result()
        self._launched = None  # this step refers to the runner, which may be one that only measures memory
        if self.graphs is not None:
            guarded(self.graphs.capture_first)
