"""Launches of Triton kernels, and their compilation before there is anything to launch."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import torch

Job = Callable[[], object]  # launches kernels with tensors on META
META = torch.device("meta")
THREADS = 8  # at most: a kernel takes a core for a second or two, and some memory


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Launch a kernel for a grid of programs; with tensors on the meta device compile it instead.

    A kernel is compiled for the types of its arguments, for what divides its integers and addresses, and for its
    constants and options. So code that launches kernels, if it runs on tensors without memory, compiles what it will
    launch.
    """
    if args[0].is_meta:
        _compile_launcher(kernel.warmup(*args, grid=grid, **options))
    else:
        kernel[grid](*args, **options)


def _compile_launcher(compiled: Any) -> None:
    """Compile the C function that launches a kernel, which Triton otherwise does when it is first launched. It is kept,
    as the kernel is."""
    from triton.runtime import driver

    launcher = getattr(driver.active, "launcher_cls", None)
    if launcher is not None and compiled is not None:
        launcher(compiled.src, compiled.metadata)


def use_device(device: torch.device) -> None:
    """Make a GPU this thread's current one, for which Triton compiles and launches, and which events use."""
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)  # torch refuses a device without an index


class Compiling:
    """Jobs in threads, in groups that can be waited for. They are begun in their order."""

    def __init__(self, jobs: Mapping[str, Sequence[Job]], device: torch.device) -> None:
        pool = ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1), "compile")
        self._futures: dict[str, list[Future[None]]] = {
            group: [pool.submit(_run, job, device) for job in members] for group, members in jobs.items()
        }
        pool.shutdown(wait=False)  # its threads end with the last job

    def wait(self, group: str) -> None:
        """Wait until the jobs of a group have ended."""
        for future in self._futures[group]:
            future.result()

    def cancel(self) -> None:
        """Begin no more jobs."""
        for members in self._futures.values():
            for future in members:
                future.cancel()


@torch.inference_mode()
def _run(job: Job, device: torch.device) -> None:
    use_device(device)
    with suppress(Exception):  # what fails here fails in a trial, too, which says so
        job()
