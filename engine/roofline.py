"""What a model's steps could take at best on a machine: its rates measured, and bytes and operations by the shape."""

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
from .models.layers import Linear
from .models.spec import BITS
from .types import Roofline

Pick = Callable[[list[float]], float]

# More than caches hold, or their speed would be taken for the memory's: what a start can afford, what a measurement.
QUICK_BYTES, QUICK_READS = 48 << 20, 2
BYTES, READS = 192 << 20, 5
# Rows, inputs and outputs of a product; the quick one takes single milliseconds on two cores.
QUICK_SHAPE, QUICK_PRODUCTS = (256, 512, 512), 2
CUDA_TIMES = 4  # larger on a GPU, whose caches are as large as 50 MB, and where all of this takes next to no time
SHAPES, PRODUCTS = ((512, 1024, 3072),), 3


def measure(
    spec: models.ModelSpec, device: torch.device, kernels: Kernels | None = None, *, quick: bool = True
) -> Roofline | None:
    """The limits of a model on a device, with the threads that torch is set to; None where its shape does not tell.

    `kernels`: what computes its products, where that is not torch. Quick: some 20 ms, for the start of an engine.
    """
    asked = shape(spec)
    if asked is None:
        return None
    reads = read_rate(device, QUICK_BYTES, QUICK_READS, min) if quick else read_rate(device, BYTES, READS)
    shapes, times = ((QUICK_SHAPE,), QUICK_PRODUCTS) if quick else (SHAPES, PRODUCTS)
    # Weights of any dtype can be multiplied in float32, so a slow product in a narrow one is no limit of the machine.
    dtypes = {spec.dtype, torch.float32} if device.type == "cpu" else {spec.dtype}
    plain = max(matrix_rate(device, dtype, each, times) for dtype in dtypes for each in shapes)
    ours = max((packed_rate(kernels, spec, each, times) for each in shapes), default=0.0) if kernels else 0.0
    # Attention has no product of its own to measure; without quantization it multiplies as the layers do.
    pairs = max(plain, ours) if spec.quantization == "none" else plain
    return replace(asked, bytes_per_s=reads, flops_per_s=max(plain, ours), pair_flops_per_s=pairs)


def shape(spec: models.ModelSpec) -> Roofline | None:
    """What a model's steps ask for, with rates of 1; None for models with experts, of which a step reads some."""
    experts = memory.first(spec.source, "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    heads = memory.first(spec.source, "num_attention_heads", "n_head")
    if experts or heads is None:
        return None
    hidden, _ = memory.widths(spec.source)
    table = spec.vocab_size * hidden
    tied = spec.decoder.tied if spec.decoder is not None else spec.source.get("tie_word_embeddings", True)
    read = spec.num_params if tied else spec.num_params - table
    looked_up = 0 if tied else table * spec.dtype.itemsize
    return Roofline(
        bytes_per_s=1.0,
        flops_per_s=1.0,
        pair_flops_per_s=1.0,
        weights_bytes=spec.weights_bytes - looked_up,
        kv_bytes_per_token=spec.kv_bytes_per_token,
        flops_per_token=2 * (read - table),
        # Scores and the sum of values: two products of the width of all heads.
        flops_per_pair=sum(2 * heads * (layer.head_dim + layer.v_head_dim) for layer in spec.layers),
        flops_per_logit=2 * table,
    )


def read_rate(device: torch.device, size: int, reads: int, pick: Pick = statistics.median) -> float:
    """Bytes per second: on a CPU of a sum over memory, on a GPU of a copy (what is read and what is written).

    `pick` chooses among the times; of few, the shortest is the one that neighbours disturbed least.
    """
    if device.type == "cuda":
        size *= CUDA_TIMES
        source = torch.ones(size, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        return 2 * size / _seconds(lambda: target.copy_(source), reads, device, pick)
    # Huge pages where the system gives them: the pages of a plain allocation would take most of a quick measurement.
    block = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            block.madvise(mmap.MADV_HUGEPAGE)
    numbers = torch.frombuffer(block, dtype=torch.int64)
    numbers[:: mmap.PAGESIZE // 8] = 1  # until it is written, all pages are one page of zeros
    return size / _seconds(numbers.sum, reads, device, pick)


def matrix_rate(device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int], times: int) -> float:
    """Operations per second of a product of (rows, inputs) with weights of (outputs, inputs)."""
    rows, inputs, outputs = shape
    if device.type == "cuda":
        rows, inputs, outputs = (CUDA_TIMES * each for each in shape)
    x = torch.ones(rows, inputs, dtype=dtype, device=device)
    weight = torch.ones(outputs, inputs, dtype=dtype, device=device)
    return 2 * rows * inputs * outputs / _seconds(lambda: F.linear(x, weight), times, device, min)


def packed_rate(kernels: Kernels, spec: models.ModelSpec, shape: tuple[int, int, int], times: int) -> float:
    """The same of our own kernels' product, of weights that are rounded as the model's are."""
    rows, inputs, outputs = shape
    linear = Linear(outputs, inputs, False, spec.dtype, torch.device("cpu"))
    linear.weight.fill_(1)
    linear.pack(kernels, bits=BITS[spec.quantization][0])
    x = torch.ones(rows, inputs, dtype=spec.dtype)
    return 2 * rows * inputs * outputs / _seconds(lambda: linear(x), times, x.device, min)


def _seconds(work: Callable[[], Any], times: int, device: torch.device, pick: Pick) -> float:
    """The picked time of some work, after a first one that does not count."""
    taken = []
    for _ in range(times + 1):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - began)
    return pick(taken[1:])
