"""Recorder: captures work on CPU tensors as CUDA graphs do on a GPU, and fails where they would be wrong.

A capture keeps operations and addresses, not values. So a replay fails if a tensor that existed before the capture has
been freed since, even if another one has replaced it. A capture fails if it reads a tensor on the host or copies from
there. What a capture allocates is poisoned when it ends and after each replay: on a GPU other graphs use that memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from engine.runner.cuda_graphs import DeviceMemory

HOST_READS = {
    "item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__", "__contains__",
    "_local_scalar_dense", "pin_memory", "tensor", "as_tensor",
}  # fmt: skip


class Uncapturable(RuntimeError):
    """An operation that is not allowed while a graph is captured."""


class Freed(RuntimeError):
    """A tensor of a graph does not exist any more."""


class Outside:
    """A tensor that existed before a capture, which does not keep it."""

    def __init__(self, tensor: Tensor) -> None:
        self.storage = StorageWeakRef(tensor.untyped_storage())
        self.dtype, self.device = tensor.dtype, tensor.device
        self.place = tensor.storage_offset(), tuple(tensor.shape), tensor.stride()

    def tensor(self) -> Tensor:
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        if storage is None:
            raise Freed(f"a tensor {self.place[1]} of {self.dtype} has been freed since the capture")
        return torch.empty(0, dtype=self.dtype, device=self.device).set_(storage, *self.place)


class Tape(TorchDispatchMode):
    """The operations of a capture."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self._calls: list[Callable[[], None]] = []
        self._pool: dict[int, Tensor] = {}  # by storage, what was allocated

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.name().removeprefix("aten::").partition(".")[0]
        masked = name.startswith("index") and any(
            isinstance(each, Tensor) and each.dtype == torch.bool for each in tree_leaves(args[1])
        )
        if name in HOST_READS or masked:  # the number of a mask's elements must be known on the host
            raise Uncapturable(f"{name} waits for the device")
        result = func(*args, **kwargs)
        given = {each.untyped_storage()._cdata for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        made = [
            each
            for each in tree_leaves(result)
            if isinstance(each, Tensor) and each.untyped_storage()._cdata not in given
        ]
        for tensor in made:
            self._pool[tensor.untyped_storage()._cdata] = tensor
        if "empty" in name or not (made or func._schema.is_mutable):
            return result  # an allocation or a view
        self.names.append(name)
        args, kwargs = self.kept((args, kwargs))

        def again() -> None:
            own_args, own_kwargs = found((args, kwargs))
            new = [each for each in tree_leaves(func(*own_args, **own_kwargs)) if isinstance(each, Tensor)]
            for target, tensor in zip(made, new, strict=False):
                target.copy_(tensor)

        self._calls.append(again)
        return result

    def launch(self, kernel: Any, grid: Any, args: Any, options: Any) -> None:
        """Run and record one of our kernels, without the interpreter's operations."""
        self.names.append(kernel.fn.__name__)
        args = self.kept(args)
        self._calls.append(lambda: kernel[grid](*found(args), **options))
        with _disable_current_modes():
            kernel[grid](*found(args), **options)

    def kept(self, values: Any) -> Any:
        def keep(value: Any) -> Any:
            is_outside = isinstance(value, Tensor) and value.untyped_storage()._cdata not in self._pool
            return Outside(value) if is_outside else value

        return tree_map(keep, values)

    @torch.inference_mode()
    def replay(self) -> None:
        for call in self._calls:
            call()
        self.poison()

    @torch.inference_mode()
    def poison(self) -> None:
        for tensor in self._pool.values():
            whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
            whole.fill_(math.nan if tensor.is_floating_point() else -(1 << 30))


def found(values: Any) -> Any:
    return tree_map(lambda value: value.tensor() if isinstance(value, Outside) else value, values)


class NoHostReads(TorchFunctionMode):
    """Raises for what reads a tensor on the host, also where a CPU tensor needs no operation for it."""

    def __init__(self) -> None:
        super().__init__()
        self.is_paused = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        to_host = name == "to" and any(str(each) == "cpu" for each in (*args[1:], *(kwargs or {}).values()))
        if not self.is_paused and (name in HOST_READS or to_host):
            raise Uncapturable(f"{name} waits for the device or copies from the host")
        return func(*args, **(kwargs or {}))


class Recorder:
    """A GraphDevice, see engine/runner/cuda_graphs.py."""

    def __init__(self, *, fails_at: int | None = None, bytes_per_graph: int = 0) -> None:
        self.fails_at, self.bytes_per_graph = fails_at, bytes_per_graph
        self.tapes: list[Tape] = []
        self.sizes: list[int] = []  # of the captures
        self.replayed: list[Tape] = []
        self._tape: Tape | None = None
        self._reads = NoHostReads()

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        work()
        if len(self.tapes) + 1 == self.fails_at:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.\nMore lines")
        tape = self._tape = Tape()
        try:
            with self._reads, tape:
                work()
        finally:
            self._tape = None
        tape.poison()
        self.tapes.append(tape)

        def replay() -> None:
            self.replayed.append(tape)
            tape.replay()

        return replay

    def memory(self) -> DeviceMemory:
        reserved = self.bytes_per_graph * len(self.tapes)
        return DeviceMemory(reserved, (1 << 40) - reserved)

    @contextmanager
    def kernels(self, *modules: Any) -> Iterator[None]:
        """Record the launches of the kernels of these modules."""
        recorder = self

        class Recorded:
            def __init__(self, kernel: Any) -> None:
                self.kernel = kernel

            def __getitem__(self, grid: Any) -> Any:
                def launch(*args: Any, **options: Any) -> None:
                    if recorder._tape is None:
                        self.kernel[grid](*args, **options)
                        return
                    recorder._reads.is_paused = True
                    try:
                        recorder._tape.launch(self.kernel, grid, args, options)
                    finally:
                        recorder._reads.is_paused = False

                return launch

        replaced = [
            (module, name, kernel)
            for module in modules
            for name, kernel in vars(module).items()
            if getattr(getattr(kernel, "fn", None), "__module__", "") == module.__name__ and not name.startswith("_")
        ]
        for module, name, kernel in replaced:
            setattr(module, name, Recorded(kernel))
        try:
            yield
        finally:
            for module, name, kernel in replaced:
                setattr(module, name, kernel)
