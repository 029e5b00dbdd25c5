"""Virtual time: an event loop whose clock jumps to the next timer, and a socketpair that obeys it."""

from __future__ import annotations

import asyncio
import contextlib
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

START_S = 1000.0
LONGEST_S = 200_000.0  # that an episode takes; only heartbeats are left to come long before
END = b""  # in a queue of bytes: the end of the file


class Deadlock(AssertionError):
    """Every task waits, and no timer is set."""


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop that never sleeps: when nothing is ready its clock jumps to the next timer.

    Everything runs on one thread, so that one seed gives one order of events.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = START_S
        self.failure: BaseException | None = None
        self._clock_resolution = 1e-9
        self._selector = self  # what BaseEventLoop waits on
        self.set_exception_handler(self._report)

    def time(self) -> float:
        return self.now

    def select(self, timeout: float | None) -> list[Any]:
        """Jump to the next timer; in the place of a selector's method, which would sleep."""
        if timeout is None:
            raise Deadlock("every task waits for something that will never come")
        if self.now > START_S + LONGEST_S:
            raise Deadlock("for days only periodic timers have fired")
        if timeout > 0:
            self.now = max(self.now, self._scheduled[0].when())
        return []

    def fail(self, error: BaseException) -> None:
        """Stop the simulation: a check did not hold."""
        self.failure = self.failure or error
        self.stop()

    def _report(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.fail(context.get("exception") or AssertionError(context["message"]))

    def run(self, main: Any) -> None:
        """Run a coroutine to its end; raises what it raises, and what any callback or `fail` has raised before."""
        asyncio.set_event_loop(None)
        try:
            self.run_until_complete(main)
        except RuntimeError:
            if self.failure is None:
                raise
        finally:
            for task in asyncio.all_tasks(self):
                task._log_destroy_pending = False
                with contextlib.suppress(BaseException):  # of a simulation that has failed: what it says now is noise
                    task.get_coro().close()
            self._ready.clear()
            self._scheduled.clear()
            self.close()
        if self.failure is not None:
            raise self.failure

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        assert executor is None, "only asyncio.to_thread is simulated"
        future = self.create_future()
        self.call_soon(resolve, future, func, args)
        return future

    async def create_connection(self, protocol_factory: Callable[[], Any], *_: Any, sock: Any, **__: Any) -> Any:
        protocol = protocol_factory()
        sock.attach(protocol)
        return sock, protocol

    def _process_events(self, event_list: list[Any]) -> None:
        """`select` returns none."""

    def _write_to_self(self) -> None:
        """There is no other thread that could have to wake this one."""


def resolve(future: asyncio.Future[Any], func: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Put the outcome of a call into a future that nobody has cancelled meanwhile."""
    if future.done():
        return
    try:
        future.set_result(func(*args))
    except BaseException as error:
        future.set_exception(error)


class Socket(asyncio.Transport):
    """One end of a socketpair; what is written arrives at the other end in order, after a latency, in any pieces."""

    def __init__(self, loop: VirtualLoop, latency: Callable[[], float], cut: Callable[[bytes], int]) -> None:
        """`latency`: seconds that some bytes take; `cut`: after how many of them the other end is woken first."""
        super().__init__()
        self.peer: Socket | None = None
        self._loop, self._latency, self._cut = loop, latency, cut
        self._protocol: Any = None
        self._sent: deque[bytes] = deque()  # on their way
        self._come: deque[bytes] = deque()  # before anybody reads
        self._due = 0.0
        self._unsent = 0
        self._high = 1 << 16
        self._is_paused = False
        self._is_closed = False

    @classmethod
    def pair(cls, *args: Any) -> tuple[Socket, Socket]:
        ours, theirs = cls(*args), cls(*args)
        ours.peer, theirs.peer = theirs, ours
        return ours, theirs

    def attach(self, protocol: Any) -> None:
        self._protocol = protocol
        protocol.connection_made(self)
        while self._come:
            self._receive(self._come.popleft())

    def write(self, data: Any) -> None:
        if self._is_closed or not data:
            return
        data = bytes(data)
        at = self._cut(data)
        for piece in (data[:at], data[at:]):
            if piece:
                self._queue(piece)
        if self._unsent > self._high and not self._is_paused:
            self._is_paused = True
            self._protocol.pause_writing()

    def _queue(self, piece: bytes) -> None:
        self._due = max(self._due, self._loop.now + self._latency())
        self._unsent += len(piece)
        self._sent.append(piece)
        self._loop.call_at(self._due, self._deliver)

    def _deliver(self) -> None:
        piece = self._sent.popleft()
        self._unsent -= len(piece)
        assert self.peer is not None
        self.peer._receive(piece)
        if self._is_paused and not self._is_closed and self._unsent <= self._high // 4:
            self._is_paused = False
            self._protocol.resume_writing()

    def _receive(self, piece: bytes) -> None:
        if self._is_closed:
            return
        if self._protocol is None:
            self._come.append(piece)
        elif piece:
            self._protocol.data_received(piece)
        else:
            self._protocol.eof_received()

    def close(self) -> None:
        """What was written still arrives, then the end of the file."""
        if not self._is_closed:
            self._is_closed = True
            self._queue(END)
            if self._protocol is not None:
                self._loop.call_soon(self._protocol.connection_lost, None)

    def is_closing(self) -> bool:
        return self._is_closed

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = high or 1 << 16

    def pause_reading(self) -> None:
        """A reader with too much in hand stops reading; the frames of a simulation are never that large."""
        raise AssertionError("a frame is larger than the simulation allows for")


@contextlib.contextmanager
def virtual_time(loop: VirtualLoop, *modules: types.ModuleType) -> Iterator[None]:
    """Let modules that ask `time` for the time see the loop's."""
    clock = types.SimpleNamespace(monotonic=loop.time, time=loop.time, perf_counter=loop.time)
    with contextlib.ExitStack() as stack:
        for module in modules:
            stack.enter_context(mock.patch.object(module, "time", clock))
        yield
