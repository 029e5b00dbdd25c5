"""Launches of Triton kernels, and their compilation before there is anything to launch."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from .triton_files import hash_files

Job = Callable[[], object]  # launches kernels with tensors on META
META = torch.device("meta")
THREADS = 8  # at most: a kernel takes a core for a second or two, and some memory


NONE: Mapping[str, Any] = MappingProxyType({})
# Options of launches that do not have their own. Triton's default for the first one differs from version to version;
# with it a multiplication and an addition are one instruction, which rounds once.
DEFAULTS: Mapping[str, Any] = MappingProxyType({"enable_fp_fusion": True})


@functools.cache
def _compiled() -> dict[tuple[Any, ...], tuple[Any, tuple[Any, ...], Any]]:
    """Return compiled kernels with the values of their constants, by what they were compiled for; and the objects that
    are keys by their ids, so that no others get these."""
    return {}


@functools.cache
def gpu_kernels(name: str) -> Any:
    """Return a module of kernels/gpu. It is imported when it is first used: Triton may not be installed.

    An import in a function would look it up at each launch, in ten times as long.
    """
    return importlib.import_module(f".gpu.{name}", __package__)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, constants: Mapping[str, Any] = NONE, **options: Any) -> None:
    """Launch a kernel for a grid of programs; with tensors on the meta device compile it instead.

    A kernel is compiled for the types of its arguments, for what divides its integers and addresses, and for its
    constants and options. So code that launches kernels, if it runs on tensors without memory, compiles what it will
    launch. The arguments come before the constants, as in the kernel's signature.

    constants: further options, in a dictionary that is made once and never changed, as it is known by its id.

    Triton finds a compiled kernel by itself, but takes several times as long for it.
    """
    if args[0].is_meta:
        _compile_launcher(kernel.warmup(*args, grid=grid, **{**DEFAULTS, **constants, **options}))
        return
    # A kernel's own hash is that of its source.
    key = [id(kernel), id(constants), args[0].get_device(), *options, *options.values()]
    for each in args:  # what a kernel is compiled for of an argument, or more
        if isinstance(each, Tensor):
            key.append(each.dtype)
            if each.data_ptr() % 16:
                key.append("not aligned")
        elif isinstance(each, int):
            key.append((each % 16 == 0, each == 1, each >> 31))
        else:
            key.append(type(each))
    found = _compiled().get(tuple(key))
    if found is None:
        options = {**DEFAULTS, **constants, **options}
        compiled = kernel[grid](*args, **options)
        if compiled is not None:  # the interpreter compiles nothing
            values = tuple(options[name] for name in kernel.arg_names[len(args) :])
            _compiled()[tuple(key)] = compiled, values, (kernel, constants)
        return
    compiled, values, _ = found
    compiled[(*grid, 1, 1)[:3]](*args, *values)


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
        hash_files()
        job()
