"""Unsent: the bytes of responses that wait in this process for clients to read, bounded in time and in memory."""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import termios
from collections.abc import Callable

WRITE_TIMEOUT_S = 30.0  # for a client that has stopped reading
# Of all connections together. Whole responses, such as stored ones, have megabytes and are written in one piece.
MAX_UNSENT = 256 << 20
LARGE = 64 << 10  # with more than that in the transport, whoever writes in pieces waits
# Keys in the `state` of a request's scope: whether its connection was cut off because the client does not read, and
# `Unsent.cut_off` of the connection, for those who wait for the client.
SLOW_READER, CUT_OFF = "slow_reader", "cut_off"
_writes = itertools.count()


class Unsent:
    """The written bytes of one connection that its client has not read.

    Calls `cut_off` if it reads none for WRITE_TIMEOUT_S. uvicorn only waits before a write, and an idle connection is
    closed when its last response has been read, so that without this it could stay for as long as the client likes.
    """

    # All of this process that were given a large write and may have some of it left.
    _large: set[Unsent] = set()

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, cut_off: Callable[[str], None]):
        """cut_off: called with the reason."""
        self._transport = transport
        self._loop = loop
        self._cut_off = cut_off
        self._is_cut_off = False
        self._has_tls = transport.get_extra_info("sslcontext") is not None
        self._num_written = 0
        self._written_before = 0  # with TLS: of _num_written, what the client has read for certain
        self._last_write = -1  # its number among all writes
        self._num_read = 0  # when the timer was started
        self._timer: asyncio.TimerHandle | None = None

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._transport.write(data)
        self._num_written += len(data)
        self._last_write = next(_writes)
        if self._timer is None:
            self._watch()
        if len(data) > LARGE:
            self._large.add(self)
            self.bound()

    def look(self) -> None:
        """Look what is left, when a request comes: then the client has most likely read the response before."""
        if self._has_tls:
            self.num_bytes()

    def num_bytes(self) -> int:
        """The bytes in this process. With TLS, whose transport does not count what it has encrypted, an upper bound:
        what was written since the client was last seen to have read all."""
        if self._is_cut_off:
            return 0
        if not self._has_tls:
            return self._transport.get_write_buffer_size()
        if self._in_system() == 0:
            self._written_before = self._num_written
        return self._num_written - self._written_before

    def _in_system(self) -> int:
        """The bytes that the system has not yet sent to the client's; 0 where it does not say."""
        try:
            found = fcntl.ioctl(self._transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
        except OSError:
            return 0
        return int.from_bytes(found, "little")

    def _watch(self) -> None:
        # With TLS only the close has a limit: 30 s, of the event loop.
        if not self._has_tls and (num_bytes := self.num_bytes()):
            # The system takes a megabyte at a time into its own buffer, which a slow client needs minutes to read.
            self._num_read = self._num_written - num_bytes - self._in_system()
            self._timer = self._loop.call_later(WRITE_TIMEOUT_S, self._check)

    def _check(self) -> None:
        num_read, self._timer = self._num_read, None
        self._watch()
        if self._timer is not None and self._num_read <= num_read:  # nothing has been read of what was there
            self.cut_off("whose client does not read")

    def cut_off(self, reason: str) -> None:
        """Drop the connection. `reason` completes the sentence of the log."""
        self._is_cut_off = True
        self.stop()
        self._cut_off(reason)

    def stop(self) -> None:
        """Stop watching, when the connection has ended."""
        self._large.discard(self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    @classmethod
    def bound(cls) -> None:
        """Cut off connections until all together have at most MAX_UNSENT: first whose last write is the longest ago.

        The last of all stays: its client has not had the time to read.
        """
        left = [(each, each.num_bytes()) for each in cls._large]
        waiting = [pair for pair in left if pair[1] > LARGE]
        cls._large.intersection_update(each for each, _ in waiting)
        waiting.sort(key=lambda pair: pair[0]._last_write)
        excess = sum(num_bytes for _, num_bytes in waiting) - MAX_UNSENT
        for each, num_bytes in waiting[:-1]:
            if excess <= 0:
                return
            excess -= num_bytes
            each.cut_off("because too much waits for clients to read")
