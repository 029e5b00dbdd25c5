"""Builds an engine from its config.

`describe` inspects the machine and the model's files. `load` divides the memory, reads the weights and returns a runner
that is ready for its first batch. `assemble` does both on a ModelThread, and returns the engine's loop.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from msgspec.structs import replace

from . import attention, hub, machine_memory, memory, models, roofline
from .attention.cache_memory import Population
from .config import EngineConfig, check
from .kernels.launching import use_device
from .kernels.library import Choice, Kernels, settle
from .kernels.weight_packing import compresses
from .loop import EngineLoop, Outbox, StepOutOfMemory
from .machine_memory import Machine
from .models.checkpoint.weights import Checkpoint
from .out_of_memory import guarded
from .runner import cuda_graphs
from .runner.runner import Runner
from .scheduler import Scheduler
from .step_thread import LoopThread, ModelThread, StepThread
from .types import ConfigError, EngineInfo, MemoryShort, Roofline

if TYPE_CHECKING:
    from .compiling import Compiling
    from .grammar.grammars import Grammars

# Models below this size run on one thread: on two busy cores a decode step of a model with 0.3 M parameters took 13 to
# 100 ms with two threads, and 3 ms with one.
TINY_BYTES = 64 << 20
# Available memory that is left to others before requests need it for the cache.
SPARED_BYTES = 1 << 30
# For the memory of an engine that has ended: a driver may free it after the process is gone.
FREED_S = 10.0
# Sequences per step on a CPU, unless they are set: the number with which a step takes this many times as long as with
# one, up to a maximum.
# With more, the time per token would grow as fast as the throughput.
SLOWDOWN, MAX_SEQS = 2.0, 256


def pick_device(name: str) -> torch.device:
    """Return the device that a setting selects, and make a GPU the current one of this thread.

    Raises ConfigError if this machine does not have the device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ConfigError(f"unknown device {name!r}; known: auto, cpu, cuda, cuda:N")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            why = "finds no GPU" if torch.version.cuda else "is a build for CPUs only"
            raise ConfigError(f"`device={name}` needs a CUDA GPU, but the installed torch {torch.__version__} {why}")
        if (device.index or 0) >= torch.cuda.device_count():
            raise ConfigError(f"there is no {name}: this machine has {torch.cuda.device_count()} CUDA devices")
        use_device(device)
    return device


@dataclass(frozen=True, slots=True)
class Described:
    """What a config selects on this machine, before any weight is read."""

    started: float  # time.monotonic()
    config: EngineConfig  # not resolved
    device: torch.device
    folder: hub.Folder
    spec: models.ModelSpec
    checkpoint: Checkpoint | None  # the headers of the weights, unless only config.json was read
    attention: attention.Choice
    product: Choice
    compiling: Compiling | None  # of the kernels for a GPU

    def arrange(self, machine: Machine, activations: int | None = None) -> memory.Plan:
        """Divide a machine's memory, see memory.arrange. Raises memory.Impossible."""
        return memory.arrange(self.spec, self.config, machine, self.attention.backend, activations)


class Built(NamedTuple):
    """A runner that is ready for its first batch, its properties, and the resolved config."""

    runner: Runner
    info: EngineInfo
    config: EngineConfig


async def assemble(
    config: EngineConfig, outbox: Outbox, model_thread: ModelThread, progress: models.Progress, *, again: bool
) -> tuple[EngineLoop, EngineInfo]:
    """Build an engine and its loop. Loading and `progress` run on the model thread. See `load` for `again`."""
    loop = asyncio.get_running_loop()
    described = await model_thread.call(describe, config)
    config = replace(config, revision=described.folder.revision or config.revision)
    has_weights = asyncio.Event()

    def report(share: float) -> None:
        progress(share)
        if share:
            loop.call_soon_threadsafe(has_weights.set)

    loading = model_thread.call(partial(load, described, report, again=again))
    loading.add_done_callback(lambda _: has_weights.set())
    # Reading a vocabulary holds the GIL, which loading needs least while weights are read.
    await has_weights.wait()
    if loading.done():
        loading.result()  # raises if it has failed
    grammars = asyncio.to_thread(_load_grammars, config, described.spec.vocab_size)
    (runner, info, resolved), loaded_grammars = await asyncio.gather(loading, grammars)
    has_states = bool(described.spec.mixers)
    scheduler = Scheduler(resolved, info.num_blocks, info.vocab_size, groups=info.groups, has_states=has_states)
    thread = await step_thread(described.device, model_thread)
    return EngineLoop(scheduler, runner, outbox, thread, loaded_grammars, when_idle=_when_idle(runner, info)), info


async def step_thread(device: torch.device, model_thread: ModelThread) -> StepThread:
    """Return the thread for the steps of an engine that the model thread has loaded."""
    if device.type == "cpu":
        return model_thread
    await model_thread.close()  # torch then gives its cuBLAS handles, which have workspaces, to this thread
    use_device(device)
    return LoopThread()


def _when_idle(runner: Runner, info: EngineInfo) -> Callable[[], bool] | None:
    """Return what the engine does while it has no work, see EngineLoop."""
    if runner.graphs is not None:
        return runner.graphs.capture_next
    if runner.device.type != "cpu" or info.weights_bytes < TINY_BYTES:  # whose prompts take milliseconds
        return None
    population = Population([layer.tensor for layer in runner.cache.layers])
    return lambda: machine_memory.measure("cpu").available > SPARED_BYTES and population.advance()


def _load_grammars(config: EngineConfig, width: int) -> Grammars | None:
    """Return what compiles grammars; None without llguidance, which everything else can do without."""
    try:
        from .grammar.grammars import Grammars
    except ModuleNotFoundError as error:
        if error.name != "llguidance":
            raise
        return None
    return Grammars(config, width)


def build(config: EngineConfig, progress: models.Progress = lambda share: None) -> Built:
    """Describe and load a config; see `describe` and `load`."""
    return load(describe(config), progress)


def describe(config: EngineConfig, *, weights: bool = True) -> Described:
    """Return what a config selects; without `weights` only config.json is read. Raises ModelError and ConfigError."""
    started = time.monotonic()
    check(config)
    device = pick_device(config.device)
    attention.check(config.attention)
    reads_weights = weights and config.load_format != "dummy"
    offline = config.local_files_only
    folder = hub.fetch(config.model, config.revision, weights=reads_weights, local_files_only=offline)
    checkpoint = None
    if weights:
        spec, checkpoint = models.examine(folder.path, config)
    else:
        spec = models.describe(folder.path, config)
    spec = models.fit(spec, config, device, checkpoint)
    compiling = _begin_to_compile(spec, config, device) if weights else None
    try:
        if compiling is not None:
            compiling.wait("attention")  # which is tried now
        backend = attention.choose(
            config.attention, device, spec.layers, spec.dtype, config.cpu_isa, cache_dtype=spec.cache_dtype
        )
        spec = dataclasses.replace(spec, layers=[backend.backend.as_cached(layer) for layer in spec.layers])
        product = models.product(config, spec, device)
        if config.batch_invariant:
            from .models.gpu import invariance  # needs all that the native decoder does

            attending = attention.create(backend.name, config.cpu_isa, invariant=True)
            if reason := invariance.objection(spec, device, product, attending):
                raise ConfigError(_variance(reason))
    except BaseException:
        if compiling is not None:
            compiling.cancel()
        raise
    return Described(started, config, device, folder, spec, checkpoint, backend, product, compiling)


def _begin_to_compile(spec: models.ModelSpec, config: EngineConfig, device: torch.device) -> Compiling | None:
    if device.type != "cuda":
        return None
    from . import compiling  # needs all that the native decoder does

    return compiling.begin(spec, config, device)


def load(described: Described, progress: models.Progress = lambda share: None, *, again: bool = False) -> Built:
    """Load the weights, and return a runner that is ready. Raises ModelError and ConfigError.

    Memory is measured and divided before weights are allocated. Building an engine from the resolved config gives the
    same results, bit for bit. `again`: the config has been resolved by an earlier process; all available memory may
    then be used, because other programs may have grown since.
    """
    config, device, spec = described.config, described.device, described.spec
    backend, product, checkpoint = described.attention, described.product, described.checkpoint
    assert checkpoint is not None, "described without weights"
    set_threads(described)

    def compiled(group: str) -> None:
        if described.compiling is not None:
            described.compiling.wait(group)

    try:
        machine, plan = _plan(described, again=again)
        compressed = guarded(lambda: _compresses(plan.config, spec, product.kernels))
        if product.kernels is not None:
            product.kernels.lossless = compressed
        # Measured now, while this process does nothing else, except that kernels for a GPU are compiled.
        limits = guarded(lambda: roofline.measure(spec, device, product.kernels))
        if device.type == "cpu" and config.max_seqs is None and limits is not None:
            plan = _with_more_seqs(described, machine, plan, limits)
        model = guarded(
            lambda: models.load(spec, checkpoint, device, product, progress, has_read=partial(compiled, "layers"))
        )
        compiled("logits")
        if device.type == "cuda":
            taken = _profile(model, replace(plan.config, device=str(device), attention=backend.name))
            if taken > plan.activation_bytes:
                plan = described.arrange(machine, taken)
        resolved = replace(
            plan.config,
            num_blocks=plan.num_blocks,
            num_snapshots=plan.config.num_snapshots,
            revision=described.folder.revision or config.revision,
            device=str(device),
            dtype=str(spec.dtype).removeprefix("torch."),
            implementation=spec.implementation,
            attention=backend.name,
            cpu_isa=settle(config.cpu_isa, device),
            products=model.product.setting,
            weight_packing="lossless" if compressed else "none",
            rope_len=spec.serve_len,
            gguf_activations="int16" if spec.activation_bytes == 2 else "int8",
        )
        runner = Runner(model, resolved, plan.num_blocks, cuda_graphs.device_for(resolved), plan.activation_bytes)
        if config.batch_invariant and not _is_exact(runner):
            raise ConfigError(_variance(model.product.note or runner.sampling.note))
        runner.warm_up()
    except memory.Impossible as error:
        raise MemoryShort(str(error)) from None  # a class that the server knows
    except StepOutOfMemory as error:
        raise MemoryShort(f"memory ran out while the model was loaded: {error}") from None
    finally:
        if described.compiling is not None:
            described.compiling.cancel()
    rounds = spec.in_blocks and not spec.on_gpu  # activations
    info = EngineInfo(
        model=config.model,
        architecture=spec.architecture,
        max_len=plan.max_len,
        vocab_size=spec.vocab_size,
        block_size=resolved.block_size,
        num_blocks=plan.num_blocks,
        max_seqs=resolved.max_seqs or 0,
        max_batched_tokens=resolved.max_batched_tokens or 0,
        dtype=resolved.dtype,
        device=str(device),
        attention=backend.name,
        kv_dtype=str(spec.cache_dtype).removeprefix("torch."),
        implementation=spec.implementation,
        exact=_is_exact(runner),
        num_params=model.num_params,
        weights_bytes=model.weights_bytes - model.saved_bytes,
        weight_packing=resolved.weight_packing,
        kv_bytes_per_token=plan.kv_bytes_per_token,
        weights_hash=model.weights_hash,
        revision=described.folder.revision,
        load_seconds=time.monotonic() - described.started,
        torch=str(torch.__version__),
        product=model.product.name,
        product_note=model.product.note,
        product_fix=model.product.fix,
        sampling=runner.sampling.name,
        graphs=0 if runner.graphs is None else runner.graphs.num_captured,
        hidden_size=spec.hidden_size,
        quantization=f"{spec.quantization}-{resolved.gguf_activations}" if rounds else spec.quantization,
        notes=(*plan.notes, *spec.notes, *filter(None, [backend.note, runner.sampling.note, runner.graphs_note])),
        groups=spec.groups,
        roofline=limits and replace(limits, weights_bytes=limits.weights_bytes - model.saved_bytes),
    )
    return Built(runner, info, resolved)


def _is_exact(runner: Runner) -> bool:
    """Return whether a request has the same tokens and bits in any batch."""
    # Torch's log-probabilities depend on where a row of logits begins.
    parts = runner.model.product.invariant, runner.cache.backend.invariant, runner.sampling.backend is not None
    return all(parts)


def _variance(reason: str) -> str:
    return f"`batch_invariant` cannot be kept here, so leave it out: {reason}"


def _compresses(config: EngineConfig, spec: models.ModelSpec, kernels: Kernels | None) -> bool:
    """Return whether the weights are compressed. Raises ConfigError if they should be and cannot."""
    quantized = spec.quantization != "none"
    max_seqs = config.max_seqs or 1
    return compresses(config.weight_packing, kernels, spec.dtype, spec.weights_bytes, max_seqs, quantized=quantized)


def _plan(described: Described, *, again: bool) -> tuple[Machine, memory.Plan]:
    """Measure and divide the memory; see `load` for `again`."""
    deadline = time.monotonic() + FREED_S
    while True:
        machine = machine_memory.measure(str(described.device))
        if again:
            machine = dataclasses.replace(machine, share=1.0)
        try:
            return machine, described.arrange(machine)
        except memory.Impossible:
            if not again or time.monotonic() > deadline:
                raise
        time.sleep(FREED_S / 50)


def _with_more_seqs(described: Described, machine: Machine, plan: memory.Plan, limits: Roofline) -> memory.Plan:
    """Return the plan for as many sequences per step as a CPU computes in twice the time of one, a power of two.

    The plan remains as it is if that number is lower, if there is not the memory for it, or if the
    states of so many would take more of it than the KV cache.
    """
    config, rows = described.config, limits.rows(SLOWDOWN)
    seqs = min(1 << rows.bit_length() - 1, MAX_SEQS, config.max_batched_tokens or MAX_SEQS)
    if seqs <= (plan.config.max_seqs or 0):
        return plan
    try:
        more = dataclasses.replace(described, config=replace(config, max_seqs=seqs)).arrange(machine)
    except memory.Impossible:
        return plan
    is_small = seqs * described.spec.state_bytes <= more.kv_cache_bytes
    return more if more.max_len == plan.max_len and is_small else plan


def set_threads(described: Described) -> None:
    """Set torch's number of threads on a CPU. Tiny models get one: their matmuls take less time than waking a second
    thread, and on busy cores each matmul would wait for the slowest thread."""
    if described.device.type != "cpu":
        return
    if described.config.threads is not None:
        torch.set_num_threads(described.config.threads)
    elif described.spec.weights_bytes < TINY_BYTES:
        torch.set_num_threads(1)


def _profile(model: models.Model, config: EngineConfig) -> int:
    """Return the maximum bytes that a step needs on a GPU beside weights and cache, measured with a small pool."""
    assert config.max_len and config.max_seqs and config.max_batched_tokens
    tokens = max(min(config.max_batched_tokens, config.max_len), config.max_seqs * config.block_size)
    runner = Runner(model, config, -(-tokens // config.block_size))
    torch.cuda.reset_peak_memory_stats(runner.device)
    before = torch.cuda.memory_allocated(runner.device)
    runner.warm_up()
    return torch.cuda.max_memory_allocated(runner.device) - before
