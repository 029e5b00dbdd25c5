"""`build`: everything that a config asks for, from the device to a runner that is ready for its first batch."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import torch
from msgspec.structs import replace

from . import attention, hub, memory, models, roofline
from .config import EngineConfig, check
from .kernels.library import settle
from .loop import StepOutOfMemory
from .runner.runner import Runner, _guarded
from .types import ConfigError, EngineInfo, MemoryShort

# Models below this size run on one thread: beside other work on two cores a decode step of a model of 0.3 M parameters
# took 13 to 100 ms with two threads and 3 ms with one.
TINY_BYTES = 64 << 20


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
    *,
    again: bool = False,
) -> tuple[Runner, EngineInfo, EngineConfig]:
    """Load everything that a config asks for: a runner ready for its first batch, what it is, and the config resolved.

    `described` is told what the model is before its weights are read, for work that can be done beside them.
    Raises ModelError and ConfigError. The memory is measured and divided before the weights take their part of it.

    The resolved config makes the same engine once more, bit for bit. `again` says that it does: what others have taken
    since of the memory that was left to them is then no reason to refuse.
    """
    began = time.monotonic()
    check(config)
    device = pick_device(config.device)
    attention.check(config.attention)
    folder = hub.fetch(config.model, config.revision, weights=True)
    spec, checkpoint = models.examine(folder.path, config)
    described(spec)
    backend = attention.choose(config.attention, device, spec.layers, spec.dtype, config.cpu_isa)
    machine = memory.measure(str(device))
    if again:
        machine = dataclasses.replace(machine, share=1.0)
    if device.type == "cpu":
        set_threads(config, spec)
    try:
        plan = memory.arrange(spec, config, machine)
        resolved = replace(plan.config, device=str(device), attention=backend.name)
        product = models.product(config, spec, device)
        # While this process does nothing else.
        limits = _guarded(lambda: roofline.measure(spec, device, product.kernels))
        model = _guarded(lambda: models.load(spec, checkpoint, device, product, progress))
        if device.type == "cuda":
            taken = _profile(model, resolved)
            if taken > plan.activation_bytes:
                plan = memory.arrange(spec, config, machine, taken)
                resolved = replace(plan.config, device=str(device), attention=backend.name)
        resolved = replace(
            resolved,
            num_blocks=plan.num_blocks,
            revision=folder.revision or config.revision,
            dtype=str(spec.dtype).removeprefix("torch."),
            implementation=spec.implementation,
            cpu_isa=settle(config.cpu_isa, device),
            products=model.product.name,
            rope_len=spec.serve_len,
        )
        runner = Runner(model, resolved, plan.num_blocks)
        runner.warm_up()
    except memory.Impossible as error:
        raise MemoryShort(str(error)) from None  # its own class has no place on the wire
    except StepOutOfMemory as error:
        raise MemoryShort(f"memory ran out while the model was loaded: {error}") from None
    info = EngineInfo(
        model=config.model,
        architecture=spec.architecture,
        max_len=plan.max_len,
        vocab_size=spec.vocab_size,
        block_size=resolved.block_size,
        num_blocks=plan.num_blocks,
        max_seqs=runner.config.max_seqs or 0,
        max_batched_tokens=runner.config.max_batched_tokens or 0,
        dtype=resolved.dtype,
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
        sampling="torch" if runner.sampling is None else runner.sampling.isa,
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
