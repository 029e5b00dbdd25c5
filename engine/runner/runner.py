"""Runner: computes the steps that the scheduler decides, and `build`, which makes one from a config."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch
from msgspec.structs import replace

from .. import attention, hub, memory, models, roofline
from ..attention.cpu import Paged
from ..batch import Batch, Entered, Masks, Row, RowError, StepTokens
from ..config import EngineConfig, check
from ..kernels.library import Clock, Kernels
from ..loop import StepOutOfMemory
from ..types import ConfigError, EngineInfo, SamplingParams, TokenLogprob
from .inputs import Inputs, Prepared
from .pooler import Pooler
from .sampler import Sampler

T = TypeVar("T")

# Of the warm-up's two steps on a CPU: nothing is compiled for a step's size there, and the plan of the memory counts
# what a full step takes. Full ones took two seconds for 0.6 billion parameters.
WARM_ROWS, WARM_TOKENS = 2, 16

# Models below this size run on one thread: beside other work on two cores a decode step of a model of 0.3 M parameters
# took 13 to 100 ms with two threads and 3 ms with one.
TINY_BYTES = 64 << 20


@dataclass(slots=True, eq=False)
class Step:
    """A step in flight: its logits are being computed, its tokens are not drawn."""

    runner: Runner
    batch: Batch
    prepared: Prepared | None  # None when the batch has no rows
    outputs: models.Outputs | None  # None when there are no rows, and once they were sampled
    seconds: dict[str, float] = field(default_factory=dict)
    spent: float = 0.0  # what the kernels' clock said when the step began

    def sample(self, masks: Masks | None = None) -> StepTokens:
        """Draw the step's tokens; once."""
        return _guarded(lambda: self._sample(masks))

    def _sample(self, masks: Masks | None) -> StepTokens:
        began = time.perf_counter()
        token_ids: list[list[int]] = [[] for _ in self.batch.rows]
        logprobs: dict[int, list[TokenLogprob]] = {}
        scores: dict[int, list[TokenLogprob]] = {}
        errors: dict[int, RowError] = {}
        embeddings: dict[int, bytes] = {}
        if self.prepared is not None:
            sampler, prepared = self.runner.sampler, self.prepared
            outputs, self.outputs = self.outputs, None
            assert outputs is not None, "a step is sampled once"
            logits = outputs.logits
            for row, places in prepared.scored.items():
                scores[row] = sampler.score(logits[places], int(prepared.slots[row]), self.batch.rows[row].scored)
            if len(prepared.drawing):
                if prepared.draws_at is not None:
                    logits = logits[torch.from_numpy(prepared.draws_at).to(logits.device)]
                slots, lengths = prepared.slots[prepared.drawing], prepared.lengths[prepared.drawing]
                allowed = None
                if masks is not None:
                    allowed = np.searchsorted(prepared.drawing, masks.rows), masks.bits
                drawn = sampler.sample(logits, slots, lengths, allowed)
                rows = prepared.drawing.tolist()
                for row, token_id in zip(rows, drawn.token_ids, strict=True):
                    token_ids[row] = [token_id]
                logprobs = {rows[place]: [entry] for place, entry in drawn.logprobs.items()}
                errors = {rows[place]: error for place, error in drawn.errors.items()}
            if sampler.problems:
                of_slot = enumerate(prepared.slots.tolist())
                errors |= {row: sampler.problems[slot] for row, slot in of_slot if slot in sampler.problems}
            for row in errors:
                token_ids[row] = []
            if prepared.pooled:  # at the end: whatever fails before leaves the sums as they were
                pooled = self.runner.pooler.pool(outputs.hidden, prepared.pooled, prepared.slots, self.batch.rows)
                embeddings = pooled.embeddings
                errors |= pooled.errors
        self.seconds["sample"] = time.perf_counter() - began
        if self.runner.clock:
            self.seconds["kernels"] = self.runner.clock.seconds() - self.spent
        return StepTokens(token_ids, logprobs, scores, errors, self.seconds, embeddings=embeddings)


class Runner:
    """The model, its KV cache, and what the device knows of each running sequence. The model thread's."""

    def __init__(self, model: models.Model, config: EngineConfig, num_blocks: int) -> None:
        """`config` is resolved. Allocates the cache: `num_blocks` blocks in every layer."""
        assert config.max_len and config.max_seqs and config.max_batched_tokens
        self.model = model
        self.config = config
        self.num_blocks = num_blocks
        self.device = torch.device(config.device)
        spec = model.spec
        backend = attention.select(config.attention, config.cpu_isa)
        self.cache = _guarded(
            lambda: attention.KVCache.allocate(
                backend,
                spec.layers,
                num_blocks=num_blocks,
                block_size=config.block_size,
                dtype=spec.cache_dtype,
                device=self.device,
            )
        )
        max_blocks = -(-config.max_len // config.block_size)
        self.inputs = Inputs(config.max_seqs, max_blocks, config.block_size, self.device)
        self.sampler = Sampler(config.max_seqs, spec.vocab_size, self.device, model.product.kernels)
        self.pooler = Pooler()
        parts = (model.product.kernels, backend)
        self.clock = Clock({part.library for part in parts if isinstance(part, Kernels | Paged)})

    def launch(self, batch: Batch) -> Step:
        """Queue the step's forward pass.

        Raises StepOutOfMemory; what the batch says about sequences that come and go, and about their blocks, is
        known also then.
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
        outputs = self.model.forward(
            prepared.ids,
            prepared.positions,
            prepared.meta,
            self.cache,
            prepared.logits_at,
            hidden_at=prepared.hidden_at,
        )
        # On CUDA the forward pass is only queued here: its time shows as the sampler's, which waits for it.
        seconds = {"prepare": ready - began, "forward": time.perf_counter() - ready}
        return Step(self, batch, prepared, outputs, seconds, spent_before)

    def warm_up(self) -> None:
        """Run both kinds of a step, a decode of all slots and a chunk as long as a step may be; on a CPU short ones.

        The first request then meets warm code, and on a GPU memory that is too small shows now. Only before the first
        batch: it writes over blocks from the first on, and leaves nothing behind but their content.
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
    """Call `work` without autograd; when memory runs out, free what can be freed and raise StepOutOfMemory."""
    try:
        with torch.inference_mode():
            return work()
    except (RuntimeError, MemoryError) as error:
        if not memory.is_out_of_memory(error):
            raise
        message = str(error).split("\n", 1)[0]
    # Not in the except block: there the traceback still holds the tensors of the step.
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    raise StepOutOfMemory(message)


def pick_device(name: str) -> torch.device:
    """The device that a setting means; a ConfigError when this machine does not have it."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ConfigError(f"unknown device {name!r}; known: auto, cpu, cuda, cuda:N")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            why = "finds no GPU" if torch.version.cuda else "is a build for CPUs only"
            raise ConfigError(f"--device {name} needs a CUDA GPU, but the installed torch {torch.__version__} {why}")
        if (device.index or 0) >= torch.cuda.device_count():
            raise ConfigError(f"there is no {name}: this machine has {torch.cuda.device_count()} CUDA devices")
    return device


def build(
    config: EngineConfig,
    progress: models.Progress = lambda share: None,
    described: Callable[[models.ModelSpec], None] = lambda spec: None,
) -> tuple[Runner, EngineInfo, EngineConfig]:
    """Load everything that a config asks for: a runner ready for its first batch, what it is, and the config resolved.

    `described` is told what the model is before its weights are read, for work that can be done beside them.
    Raises ModelError and ConfigError. The memory is measured and divided before the weights take their part of it.
    """
    began = time.monotonic()
    check(config)
    device = pick_device(config.device)
    attention.check(config.attention)
    folder = hub.fetch(config.model, config.revision, weights=True)
    spec = models.describe(folder.path, config, weights=True)
    described(spec)
    backend = attention.choose(config.attention, device, spec.layers, spec.dtype, config.cpu_isa)
    machine = memory.measure(str(device))
    if device.type == "cpu":
        set_threads(config, spec)
    try:
        plan = memory.arrange(spec, config, machine)
        resolved = replace(plan.config, device=str(device), attention=backend.name)
        # With the length that was asked for, not the lowered one: rotary frequencies may depend on it, and what the
        # memory allows today must not change what the model says.
        wanted = replace(resolved, max_len=config.max_len)
        kernels = models.product(config, spec, device).kernels
        limits = _guarded(lambda: roofline.measure(spec, device, kernels))  # while this process does nothing else
        model = _guarded(lambda: models.load(wanted, folder.path, device, progress))
        if device.type == "cuda":
            taken = _profile(model, resolved)
            if taken > plan.activation_bytes:
                plan = memory.arrange(spec, config, machine, taken)
                resolved = replace(plan.config, device=str(device), attention=backend.name)
        runner = Runner(model, replace(resolved, num_blocks=plan.num_blocks), plan.num_blocks)
        runner.warm_up()
    except memory.Impossible as error:
        raise ConfigError(str(error)) from None  # its own class has no place on the wire
    except StepOutOfMemory as error:
        raise ConfigError(f"memory ran out while the model was loaded: {error}") from None
    info = EngineInfo(
        model=config.model,
        architecture=spec.architecture,
        max_len=plan.max_len,
        vocab_size=spec.vocab_size,
        block_size=resolved.block_size,
        num_blocks=plan.num_blocks,
        max_seqs=runner.config.max_seqs or 0,
        max_batched_tokens=runner.config.max_batched_tokens or 0,
        dtype=str(spec.dtype).removeprefix("torch."),
        device=str(device),
        attention=backend.name,
        kv_dtype=str(spec.cache_dtype).removeprefix("torch."),
        implementation=spec.implementation,
        exact=model.product.invariant and runner.cache.backend.invariant,
        num_params=model.num_params,
        weights_bytes=model.weights_bytes,
        kv_bytes_per_token=plan.kv_bytes_per_token,
        weights_hash=model.weights_hash,
        revision=folder.revision,
        load_seconds=time.monotonic() - began,
        torch=str(torch.__version__),
        product=model.product.name,
        product_note=model.product.note,
        product_fix=model.product.fix,
        hidden_size=spec.hidden_size,
        quantization=spec.quantization,
        notes=(*plan.notes, backend.note) if backend.note else plan.notes,
        roofline=limits,
    )
    return runner, info, runner.config


def set_threads(config: EngineConfig, spec: models.ModelSpec) -> None:
    """torch's threads on a CPU; for a tiny model one: its products take less time than to wake a second thread, and
    where the cores are busy every one of them would wait for the slowest thread."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    elif spec.weights_bytes < TINY_BYTES:
        torch.set_num_threads(1)


def _profile(model: models.Model, config: EngineConfig) -> int:
    """Bytes that the two extremes of a step take on a GPU beside weights and cache, measured with a small pool."""
    assert config.max_len and config.max_seqs and config.max_batched_tokens
    tokens = max(min(config.max_batched_tokens, config.max_len), config.max_seqs * config.block_size)
    runner = Runner(model, config, -(-tokens // config.block_size))
    torch.cuda.reset_peak_memory_stats(runner.device)
    before = torch.cuda.memory_allocated(runner.device)
    runner.warm_up()
    return torch.cuda.max_memory_allocated(runner.device) - before
