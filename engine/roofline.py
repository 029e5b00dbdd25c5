"""Measures a machine's limits, and computes the minimum time of a model's steps from its shape."""

from __future__ import annotations

import contextlib
import mmap
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from msgspec.structs import replace
from torch.nn import functional as F

from . import memory, models
from .kernels.library import Kernels
from .models.layers import Linear, Quantization
from .models.precision import BITS
from .types import Roofline

Pick = Callable[[list[float]], float]

# Sizes that exceed the caches, whose speed would be measured otherwise: for the start of an engine, and for benchmarks.
QUICK_BYTES, QUICK_READS = 48 << 20, 2
BYTES, READS = 192 << 20, 5
# Rows, inputs and outputs of a matmul. The quick one takes a few milliseconds on two cores.
QUICK_SHAPE, QUICK_MATMULS = (256, 512, 512), 2
# On a GPU, which is faster and has caches of up to 50 MB.
CUDA_BYTES, CUDA_SHAPE = 1 << 30, (8192, 8192, 8192)
SHAPES, MATMULS = ((512, 1024, 3072),), 3


def measure(
    spec: models.ModelSpec, device: torch.device, kernels: Kernels | None = None, *, quick: bool = True
) -> Roofline | None:
    """Return the limits of a model on a device with torch's number of threads, or None if its shape is not enough.

    `kernels` compute the matmuls, unless torch does. `quick` takes about 20 ms, for the start of an engine.
    """
    work = shape(spec)
    if work is None:
        return None
    reads = read_rate(device, QUICK_BYTES, QUICK_READS, min) if quick else read_rate(device, BYTES, READS)
    shapes, times = ((QUICK_SHAPE,), QUICK_MATMULS) if quick else (SHAPES, MATMULS)
    # Weights of any dtype can be multiplied in float32, so a slow matmul in another dtype is no limit of the machine.
    dtypes = {spec.dtype, torch.float32} if device.type == "cpu" else {spec.dtype}
    plain = max(matrix_rate(device, dtype, each, times) for dtype in dtypes for each in shapes)
    ours = max((packed_rate(kernels, spec, each, times) for each in shapes), default=0.0) if kernels else 0.0
    # Attention is not measured. Without quantization it multiplies as fast as the layers.
    pairs = max(plain, ours) if spec.quantization == "none" else plain
    return replace(work, bytes_per_s=reads, flops_per_s=max(plain, ours), pair_flops_per_s=pairs)


def shape(spec: models.ModelSpec) -> Roofline | None:
    """Return the work of a model's steps, with rates of 1; None for models with experts, of which a step reads some."""
    experts = memory.first(spec.source, "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    heads = memory.first(spec.source, "num_attention_heads", "n_head")
    if experts or heads is None:
        return None
    hidden, _ = memory.widths(spec.source)
    table = spec.vocab_size * hidden
    tied = spec.decoder.tied if spec.decoder is not None else spec.source.get("tie_word_embeddings", True)
    read = spec.num_params if tied else spec.num_params - table
    others = 0 if spec.decoder is None else spec.decoder.looked_up
    looked_up = (0 if tied else table) * spec.dtype.itemsize if spec.decoder is None else spec.looked_up_bytes
    return Roofline(
        bytes_per_s=1.0,
        flops_per_s=1.0,
        pair_flops_per_s=1.0,
        weights_bytes=spec.weights_bytes - looked_up,
        kv_bytes_per_token=sum(layer.bytes(spec.cache_dtype) for layer in spec.attended),
        flops_per_token=2 * (read - table - others),
        # Scores and the sum of values: two matmuls over all heads.
        flops_per_pair=sum(2 * heads * (layer.head_dim + layer.v_head_dim) for layer in spec.attended),
        flops_per_logit=2 * table,
    )


def read_rate(device: torch.device, size: int, reads: int, pick: Pick = statistics.median) -> float:
    """Return bytes per second: of a sum over memory on a CPU, of a copy (reads plus writes) on a GPU.

    `pick` selects one of the times; of few, the shortest was disturbed least.
    """
    if device.type == "cuda":
        size = min(CUDA_BYTES, torch.cuda.mem_get_info(device)[0] // 8)  # on a small GPU the model needs the rest
        source = torch.randn(size // 4, device=device)
        target = torch.empty_like(source)
        return 2 * (size // 4 * 4) / _seconds(lambda: target.copy_(source), reads, device, pick)
    # Request huge pages: page faults of small ones would dominate a quick measurement.
    block = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            block.madvise(mmap.MADV_HUGEPAGE)
    numbers = torch.frombuffer(block, dtype=torch.int64)
    numbers[:: mmap.PAGESIZE // 8] = 1  # unwritten pages would all be the same page of zeros
    return size / _seconds(numbers.sum, reads, device, pick)


def matrix_rate(device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int], times: int) -> float:
    """Return operations per second of torch's matmul of (rows, inputs) with weights of (outputs, inputs)."""
    rows, inputs, outputs = shape
    numbers = torch.ones
    if device.type == "cuda":
        rows, inputs, outputs = CUDA_SHAPE
        numbers = torch.randn  # a GPU multiplies equal numbers faster, because that takes less power
    x = numbers(rows, inputs, dtype=dtype, device=device)
    weight = numbers(outputs, inputs, dtype=dtype, device=device)
    return 2 * rows * inputs * outputs / _seconds(lambda: F.linear(x, weight), times, device, min)


def packed_rate(kernels: Kernels, spec: models.ModelSpec, shape: tuple[int, int, int], times: int) -> float:
    """Return operations per second of the kernels' matmul, with weights quantized like the model's."""
    rows, inputs, outputs = shape
    linear = Linear(outputs, inputs, False, spec.dtype, torch.device("cpu"))
    linear.weight.fill_(1)
    bits = 4 if spec.in_blocks else BITS.get(spec.quantization, (None, None))[0]
    linear.pack(kernels, quantization=None if bits is None else Quantization(bits))
    x = torch.ones(rows, inputs, dtype=spec.dtype)
    return 2 * rows * inputs * outputs / _seconds(lambda: linear(x), times, x.device, min)


def _seconds(work: Callable[[], Any], times: int, device: torch.device, pick: Pick) -> float:
    """Return the selected time of some work, after a warm-up run."""
    taken = []
    for _ in range(times + 1):
        if device.type == "cuda":
            # A host's clock would count the launch as well, which takes longer than a small kernel.
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            events[0].record()
            work()
            events[1].record()
            events[1].synchronize()
            taken.append(events[0].elapsed_time(events[1]) / 1000)
        else:
            started = time.perf_counter()
            work()
            taken.append(time.perf_counter() - started)
    return pick(taken[1:])
