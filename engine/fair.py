"""FairLock: a lock whose waiters are served in turns, one caller after the other: no caller can fill the line."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress


class FairLock:
    """One holder at a time. Callers take turns; the requests of one caller are served in their order.

    Whoever arrives waits for at most one turn of each other caller, however many requests those have queued.
    Not thread-safe: all of its users run on one event loop.
    """

    def __init__(self) -> None:
        self._is_held = False
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()  # by caller, the next one first

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their turn."""
        return sum(map(len, self._waiting.values()))

    @asynccontextmanager
    async def turn(self, caller: str) -> AsyncIterator[None]:
        """Hold the lock. A request that is cancelled while it waits leaves the line."""
        await self._acquire(caller)
        try:
            yield
        finally:
            self._release()

    async def _acquire(self, caller: str) -> None:
        if not self._is_held:
            self._is_held = True
            return
        mine = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(caller, deque()).append(mine)
        try:
            await mine
        except asyncio.CancelledError:
            if mine.cancelled():
                self._leave(caller, mine)
            else:  # the turn came in the same moment
                self._release()
            raise

    def _leave(self, caller: str, mine: asyncio.Future[None]) -> None:
        line = self._waiting.get(caller, deque())
        with suppress(ValueError):  # a release has passed over it already
            line.remove(mine)
        if not line:
            self._waiting.pop(caller, None)

    def _release(self) -> None:
        """Give the lock to the next in line, which then holds it, or to nobody."""
        while self._waiting:
            caller, line = self._waiting.popitem(last=False)
            next_in_line = line.popleft()
            if line:
                self._waiting[caller] = line  # after all other callers
            if not next_in_line.done():  # else it was cancelled, and has not run since
                next_in_line.set_result(None)
                return
        self._is_held = False
