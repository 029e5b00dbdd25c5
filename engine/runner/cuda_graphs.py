"""CudaGraphs: captures work on a GPU in CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple, Protocol

import torch

from ..config import EngineConfig


class DeviceMemory(NamedTuple):
    """Memory of a device in bytes, while torch holds none that it does not use."""

    reserved: int  # by torch, in this process
    free: int  # other processes change it, too


class GraphDevice(Protocol):
    """Captures work on a device, to be replayed on the same memory."""

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Run `work`, then capture it; returns what queues it again, on the current stream.

        `work` may read and write tensors that exist already and will continue to. What it allocates is lost when it
        ends: captures share that memory. It neither waits for the device nor copies from or to the host. Raises
        whatever a failed capture raises.
        """
        ...

    def memory(self) -> DeviceMemory:
        """Return the device's memory, after torch has returned what it does not use."""
        ...


def device_for(config: EngineConfig) -> GraphDevice | None:
    """Return what captures the steps of an engine, or None; `config` is resolved."""
    if config.enforce_eager or not config.device.startswith("cuda"):
        return None
    return CudaGraphs(torch.device(config.device))


class CudaGraphs:
    """A GraphDevice. To be used on one thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # One stream for all captures: cuBLAS has a workspace per stream, whose address the graphs contain.
        self._stream = torch.cuda.Stream(device)
        # One pool of memory: replays follow each other on one stream, so they can use the same intermediate results.
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        try:
            return self._capture(work)
        except BaseException:
            # If the end of a capture fails, torch leaves its allocator as it is during a capture, where it refuses to
            # release memory; the next lack of memory would end this process. It raises if there is nothing to end.
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(self._device.index or 0, self._pool)
            raise

    def _capture(self, work: Callable[[], None]) -> Callable[[], None]:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        # Also restores the current stream if the capture fails: then torch.cuda.graph does not.
        with torch.cuda.stream(self._stream):
            # What is allowed only outside of a capture happens now: Triton compiles and loads kernels for these
            # arguments, cuBLAS chooses and loads its own and allocates its workspace for this stream, and buffers grow.
            work()
            graph = torch.cuda.CUDAGraph()
            # Synchronizes first. Other threads of this process may allocate memory meanwhile: in the default mode,
            # "global", their calls would make the capture fail.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                work()
        current.wait_stream(self._stream)
        return graph.replay

    def memory(self) -> DeviceMemory:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        # The allocator counts what the graphs' pool and cuBLAS's workspace take, and nothing of other processes.
        return DeviceMemory(torch.cuda.memory_reserved(self._device), torch.cuda.mem_get_info(self._device)[0])
