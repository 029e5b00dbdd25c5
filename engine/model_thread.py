"""ModelThread: the thread on which the engine loads and computes, so that its event loop reads messages meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

T = TypeVar("T")


class ModelThread:
    """Runs one call after another, in the order in which they were queued.

    An executor does the same with locks and futures for threads of any kind. They would take 35 µs of each step.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[asyncio.Future[Any], Callable[..., Any], tuple[Any, ...]] | None] = SimpleQueue()
        # A daemon: a process does not wait at its end for a call that hangs.
        Thread(target=self._run, name="model", daemon=True).start()

    def call(self, work: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        """Queue a call, and return the future of its result. To be called on an event loop, which the future is of."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._calls.put((future, work, args))
        return future

    async def close(self) -> None:
        """Wait until all calls have returned, and end the thread. No other call may follow."""
        ended = self.call(lambda: None)
        self._calls.put(None)
        await ended

    def _run(self) -> None:
        while (queued := self._calls.get()) is not None:
            future, work, args = queued
            try:
                outcome = work(*args), None
            except BaseException as error:
                outcome = None, error
            with suppress(RuntimeError):  # the event loop has been closed
                future.get_loop().call_soon_threadsafe(_settle, future, *outcome)
            del queued, future, work, args, outcome  # while this waits, it must not keep the memory of a step


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():  # whoever waited for it was cancelled
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
