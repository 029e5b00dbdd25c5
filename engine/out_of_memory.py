"""Recognizes errors that mean out of memory, of which torch has several, and frees what can be freed."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TypeVar

import torch

from .loop import StepOutOfMemory

T = TypeVar("T")

# torch.OutOfMemoryError is only for its CUDA allocator. Its CPU allocator, CUDA, cuBLAS and Triton raise RuntimeError.
OUT_OF_MEMORY = (
    "can't allocate memory",
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "Triton Error [CUDA]: out of memory",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that host or device memory ran out."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in OUT_OF_MEMORY)


def guarded(work: Callable[[], T]) -> T:
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
