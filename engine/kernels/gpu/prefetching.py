"""Loads to a cache ahead of time, in Triton kernels."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def prefetch(pointers):
    """Bring lines to the second-level cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def prefetch_near(pointer):
    """Bring a line to the first-level cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L1 [$1]; mov.u32 $0, 0;", "=r,l", [pointer], dtype=tl.int32, is_pure=False, pack=1
    )
