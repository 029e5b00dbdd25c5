"""Upload: reads tensors from files into memory that the CPU cannot read directly, or in another dtype."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import nullcontext
from dataclasses import dataclass, field
from queue import SimpleQueue

import torch
from torch import Tensor

PIECE_BYTES = 16 << 20  # read at once: enough for full disk speed, and small compared with a model
# Threads that read for a GPU. One thread reads 2 to 3 GB/s from the page cache, a PCIe link takes 25 and more.
READERS = 6


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive numbers of a tensor: where they are in an open file, and where they belong."""

    descriptor: int
    offset: int
    dtype: torch.dtype  # in the file
    target: Tensor  # [numbers], in any dtype


@dataclass(slots=True, eq=False)
class _Buffer:
    bytes: Tensor
    copied: torch.cuda.Event | None = None  # on a GPU: the last copy from this buffer
    view: memoryview = field(init=False)

    def __post_init__(self) -> None:
        self.view = self.bytes.numpy().data


def pieces(descriptor: int, offset: int, dtype: torch.dtype, target: Tensor) -> Iterable[Piece]:
    """Split a tensor, [numbers], into pieces of at most PIECE_BYTES in the file."""
    count = PIECE_BYTES // dtype.itemsize
    for start in range(0, target.numel(), count):
        yield Piece(descriptor, offset + start * dtype.itemsize, dtype, target[start : start + count])


class Upload:
    """Copies pieces to one device.

    For a GPU several threads read into pinned buffers, and the copies from these run on a stream of their own, so that
    reading and copying overlap. For the CPU one thread and one buffer suffice: converting uses all cores.
    """

    def __init__(self, device: torch.device, readers: int | None = None) -> None:
        self.device = device
        self._on_gpu = device.type == "cuda"
        readers = readers or (READERS if self._on_gpu else 1)
        self._pool = ThreadPoolExecutor(readers, thread_name_prefix="weights")
        self._buffers: SimpleQueue[_Buffer] = SimpleQueue()
        # With a second buffer a reader fills one while the other is being copied.
        for _ in range(2 * readers if self._on_gpu else readers):
            self._buffers.put(_Buffer(torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=self._on_gpu)))
        self._stream = torch.cuda.Stream(device) if self._on_gpu else None
        self._failed = threading.Event()

    def run(self, work: Iterable[Piece], progress: Callable[[int], None]) -> None:
        """Copy all pieces; `progress` is called with the size of each in the file, in bytes.

        Kernels that are queued on the device's current stream afterwards see the copies. Raises OSError, see read_all.
        """
        if self._stream is not None:  # the targets may still be in use by earlier kernels
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
        futures = {self._pool.submit(self._copy, piece): piece for piece in work}
        try:
            for future in as_completed(futures):
                future.result()
                piece = futures[future]
                progress(piece.target.numel() * piece.dtype.itemsize)
        except BaseException:
            self._failed.set()  # the pieces that wait are skipped
            raise
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)

    def close(self) -> None:
        """Wait for the copies and free the buffers."""
        self._pool.shutdown()
        if self._stream is not None:
            self._stream.synchronize()

    def _copy(self, piece: Piece) -> None:
        if self._failed.is_set():
            return
        buffer = self._buffers.get()
        try:
            if buffer.copied is not None:
                buffer.copied.synchronize()
            num_bytes = piece.target.numel() * piece.dtype.itemsize
            read_all(piece.descriptor, buffer.view[:num_bytes], piece.offset)
            numbers = buffer.bytes[:num_bytes].view(piece.dtype)
            with torch.inference_mode(), torch.cuda.stream(self._stream) if self._stream else nullcontext():
                if piece.dtype != piece.target.dtype:  # a GPU converts faster, and torch would convert before the copy
                    numbers = numbers.to(self.device, non_blocking=True)
                piece.target.copy_(numbers, non_blocking=True)
                if self._stream is not None:
                    buffer.copied = self._stream.record_event(buffer.copied)
        finally:
            self._buffers.put(buffer)


def read_all(descriptor: int, target: memoryview, offset: int) -> None:
    """Fill `target` from a file: one read may return less. Raises OSError with the descriptor as its `filename`."""
    while len(target):
        try:
            count = os.preadv(descriptor, [target], offset)
        except OSError as error:
            raise OSError(error.errno, error.strerror, descriptor) from None
        if not count:
            raise OSError(0, "it ends early", descriptor)
        target, offset = target[count:], offset + count
