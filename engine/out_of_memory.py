"""How an error says that memory ran out: torch has several ways."""

from __future__ import annotations

# torch has a class for its own CUDA allocator alone: its CPU allocator, the CUDA runtime and cuBLAS raise RuntimeError.
OUT_OF_MEMORY = ("can't allocate memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that host or device memory ran out."""
    import torch

    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in OUT_OF_MEMORY)
