"""A thread for native code that releases the GIL, which callers use in turns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from engine import FairLock

T = TypeVar("T")


class NativePanic(Exception):
    """A native library has panicked, with an error that is not an Exception."""


class WorkerThread:
    """A thread that works for callers in turns."""

    def __init__(self, name: str) -> None:
        self._lock = FairLock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)

    async def run(self, caller: str, work: Callable[[], T]) -> T:
        async with self._lock.turn(caller):
            return await asyncio.get_running_loop().run_in_executor(self._thread, _guarded, work)

    def begin(self, work: Callable[[], object]) -> None:
        """Submit work and ignore its result."""
        self._thread.submit(work)

    def close(self) -> None:
        """Cancel work that has not started."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def _guarded(work: Callable[[], T]) -> T:
    try:
        return work()
    except Exception:
        raise
    except BaseException as error:
        raise NativePanic(type(error).__name__) from None
