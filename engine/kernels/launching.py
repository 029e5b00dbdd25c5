"""Launches of Triton kernels."""

from __future__ import annotations

from typing import Any


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Launch a kernel for a grid of programs; with tensors on the meta device compile it instead.

    A kernel is compiled for the types of its arguments, for what divides its integers and addresses, and for its
    constants and options. So code that launches kernels, if it runs on tensors without memory, compiles what it will
    launch.
    """
    if args[0].is_meta:
        kernel.warmup(*args, grid=grid, **options)
    else:
        kernel[grid](*args, **options)
