"""Recognizes errors that mean out of memory, of which torch has several."""

from __future__ import annotations

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
    import torch

    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in OUT_OF_MEMORY)
