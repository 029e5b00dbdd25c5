"""The memory of a KV cache on the CPU: huge pages, and pages that are there before requests need them."""

from __future__ import annotations

import ctypes
import errno
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import cast

from torch import Tensor

# madvise(2). Huge pages need one page-table walk for 2 MB of keys and values instead of for 4 KB.
HUGE_PAGES, POPULATE_WRITE = 14, 23
HUGE_BYTES = 2 << 20


@cache
def _madvise() -> Callable[[int, int, int], int]:
    function = ctypes.CDLL(None, use_errno=True).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return cast(Callable[[int, int, int], int], function)


def _pages(tensor: Tensor) -> range:
    """Return the addresses of the huge pages that lie wholly in the memory of a tensor."""
    memory = tensor.untyped_storage()  # a layer's cache may be some parts of it
    first = -(-memory.data_ptr() // HUGE_BYTES) * HUGE_BYTES
    return range(first, (memory.data_ptr() + memory.nbytes()) // HUGE_BYTES * HUGE_BYTES, HUGE_BYTES)


def request_huge_pages(tensor: Tensor) -> None:
    """Request huge pages for a large tensor. An error is ignored: it works without them."""
    if pages := _pages(tensor):
        _madvise()(pages.start, len(pages) * HUGE_BYTES, HUGE_PAGES)


class Population:
    """Makes the system provide the memory of a cache while there is no work.

    Memory is provided when it is first written to. On virtual machines that get theirs on demand, this took an eighth
    of a prompt's time. Blocks are first taken in their order, so the first pages of each layer come first. What lies
    beyond `limit_bytes` is provided on demand: a server that is used by one person should not hold all that it may.
    """

    LIMIT_BYTES = 2 << 30
    # A request that arrives meanwhile waits this long.
    TURN_S = 0.05

    def __init__(self, tensors: Sequence[Tensor], limit_bytes: int = LIMIT_BYTES) -> None:
        memories = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
        self._pages = _in_turn(list(memories.values()), limit_bytes)

    def advance(self) -> bool:
        """Populate pages for TURN_S; returns whether there are more. There are none without support by the system."""
        until = time.monotonic() + self.TURN_S
        for page in self._pages:
            if _madvise()(page, HUGE_BYTES, POPULATE_WRITE) and ctypes.get_errno() not in (errno.EINTR, errno.EAGAIN):
                return False  # Linux before 5.14, or out of memory
            if time.monotonic() >= until:
                return True
        return False


def _in_turn(tensors: Sequence[Tensor], limit_bytes: int) -> Iterator[int]:
    """Yield the first page of each tensor, then the second of each, and so on."""
    if os.uname().sysname != "Linux" or not tensors:
        return
    pages = [_pages(tensor) for tensor in tensors]
    for turn in range(min(limit_bytes // HUGE_BYTES // len(tensors), max(map(len, pages)))):
        yield from (each[turn] for each in pages if turn < len(each))
