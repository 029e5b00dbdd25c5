"""FairLock: a lock that serves callers in turn, so that no caller can fill the queue."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress


class FairLock:
    """A lock that is acquired round-robin among callers, and in FIFO order among the requests of one caller.

    A caller's first request waits for at most one request of each other caller, however many they have queued. Not
    thread-safe: all users must run on one event loop.
    """

    def __init__(self) -> None:
        self._is_held = False
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()  # by caller, the next one first

    @property
    def num_waiting(self) -> int:
        """The number of waiting requests."""
        return sum(map(len, self._waiting.values()))

    @asynccontextmanager
    async def turn(self, caller: str) -> AsyncIterator[None]:
        """Hold the lock. A request that is cancelled while it waits leaves the queue."""
        await self._acquire(caller)
        try:
            yield
        finally:
            self._release()

    async def _acquire(self, caller: str) -> None:
        if not self._is_held:
            self._is_held = True
            return
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(caller, deque()).append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.cancelled():
                self._leave(caller, waiter)
            else:  # it acquired the lock before the cancellation was delivered
                self._release()
            raise

    def _leave(self, caller: str, waiter: asyncio.Future[None]) -> None:
        queue = self._waiting.get(caller, deque())
        with suppress(ValueError):  # a release has skipped it already
            queue.remove(waiter)
        if not queue:
            self._waiting.pop(caller, None)

    def _release(self) -> None:
        """Pass the lock to the next waiting request, or free it if none waits."""
        while self._waiting:
            caller, queue = self._waiting.popitem(last=False)
            waiter = queue.popleft()
            if queue:
                self._waiting[caller] = queue  # after all other callers
            if not waiter.done():  # else it was cancelled, and its task has not run since
                waiter.set_result(None)
                return
        self._is_held = False
