"""StepThread: where the engine's loop has its steps launched and collected, a thread of their own or the loop's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class StepThread(Protocol):
    """Runs one call after another, in the order in which they were made, also those whose future was cancelled."""

    def call(self, work: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        """Return the future of a call's result, which belongs to the running event loop."""
        ...


class LoopThread:
    """A StepThread for a device that computes beside the host: the event loop's own thread, which calls at once.

    Waking another thread twice took a third of the host's time for a step of few rows. While a call waits for the
    device, the event loop does nothing else: it reads no message and sends no heartbeat.
    """

    def call(self, work: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        result, failure = None, None
        try:
            result = work(*args)
        except BaseException as error:
            failure = error
        # Two turns of the event loop: in the first one it reads what has come meanwhile, and in the second one the
        # requests in it are queued, so that the next step can have them. More than one read: see Channel.read_on.
        loop.call_soon(loop.call_soon, _settle, future, result, failure)
        del failure  # whose traceback refers to this frame
        return future


class ModelThread:
    """A StepThread of its own, on which an engine is loaded, and on a CPU computes while its event loop reads messages.

    ThreadPoolExecutor does the same, but its locks and its second future took 35 µs of each step.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[asyncio.Future[Any], Callable[..., Any], tuple[Any, ...]] | None] = SimpleQueue()
        self._thread: Thread | None = None  # started by the first call
        self._is_closed = False

    def call(self, work: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        if self._is_closed:
            raise RuntimeError("the model thread has been closed")
        if self._thread is None:
            # A daemon: a process does not wait at its end for a call that hangs.
            self._thread = Thread(target=self._run, name="model", daemon=True)
            self._thread.start()
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._calls.put((future, work, args))
        return future

    async def close(self) -> None:
        """Wait until all calls have returned, and end the thread."""
        if not self._is_closed:
            self._is_closed = True
            self._calls.put(None)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        while (queued := self._calls.get()) is not None:
            future, work, args = queued
            result, failure = None, None
            try:
                result = work(*args)
            except BaseException as error:
                failure = error
            with suppress(RuntimeError):  # the event loop has been closed
                future.get_loop().call_soon_threadsafe(_settle, future, result, failure)
            del queued, future, work, args, result, failure  # while this waits, it must not keep the memory of a step


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():  # it was cancelled
        return
    if error is None:
        future.set_result(result)
    elif isinstance(error, StopIteration):  # which a future refuses
        failure = RuntimeError(f"a call has raised {error!r}")
        failure.__cause__ = error
        future.set_exception(failure)
    else:
        future.set_exception(error)
