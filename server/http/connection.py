"""Connection: one client's connection, from bytes to HTTP. What the parser cannot read is answered as an error too."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from . import retry
from .errors import ApiError, unavailable
from .middleware import MAX_HEAD, head_too_large

# From the connection, or the first byte of a further request, until its head is complete. Whoever sends a byte now
# and then would otherwise hold a descriptor for good.
HEAD_S = 30.0
# From an answer that does not wait for its request's body until that body's end, or the client's: so long and so many
# bytes are read and dropped.
REST_S = 10.0
REST_BYTES = 64 << 20


class Connection(HttpToolsProtocol):
    """uvicorn's protocol with bounds on a request's head and on what nobody reads, and with our envelope in what it
    answers by itself."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = False
        self._head_bytes = 0  # of what is not yet complete, the chunk that it began in left out
        self._header_bytes = 0  # of names and values, also of the trailers of a chunked body
        self._rest_bytes: int | None = None  # of a request that is answered already; None: there is none
        self._plain_head: bytes | None = None  # of a request that asks for another protocol: it is parsed in its place
        self.is_parting = False  # all is said, and whatever still comes is dropped
        self.most_connections, self.limit_concurrency = self.limit_concurrency, None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.most_connections is not None and len(self.connections) > self.most_connections:
            self.is_parting = True
            message = "The server has as many connections as it can."
            self._answer(unavailable(message, "connections", retry.CONNECTIONS_S))
            transport.close()  # at once: its descriptor is one of the last
            return
        self._begin_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._end_idle()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._rest_bytes is not None:
            self._rest_bytes += len(data)
            if self._rest_bytes > REST_BYTES:
                self.transport.abort()
        if self.is_parting:
            return
        has_begun = self._in_head
        self._parse(data)
        if has_begun and self._in_head and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD:
                self._refuse(head_too_large())

    def _parse(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self._refuse(ApiError(400, "This is not an HTTP/1.1 request.", code="invalid_http"))
        except httptools.HttpParserUpgrade as upgrade:
            if self._plain_head is not None:
                head, self._plain_head = self._plain_head, None
                self.parser = httptools.HttpRequestParser(self)  # the other one reads no body after such a head
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
                self._parse(head + data[upgrade.args[0] :])

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._end_idle()
        self._begin_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_bytes += len(name) + len(value)
        if self._header_bytes > 2 * MAX_HEAD:  # a head that is a little too large gets further, to the door's answer
            raise head_too_large()  # to the parser, which ends
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade() and self._get_upgrade() is not None:
            self._plain_head = self._without_upgrade()
            return
        self._end_idle()  # it began again if the answer before this request ended within its head
        self._in_head = False
        self._stop_timer()
        super().on_headers_complete()
        self.cycle.transport = _Outlet(self, self.cycle)

    def _without_upgrade(self) -> bytes:
        """The head of the request without its wish for another protocol, which a server may ignore (RFC 9110, 7.8).

        Java's client sends `Upgrade: h2c` with its first request to each server.
        """
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        dropped = (b"upgrade", b"http2-settings")
        for name, value in self.headers:
            if name == b"connection":
                kept = [token for token in value.split(b",") if token.strip().lower() not in dropped]
                lines.append(b"connection:" + b",".join(kept))
            elif name not in dropped:
                lines.append(b"%s: %s" % (name, value))
        return b"\r\n".join([*lines, b"", b""])

    def on_message_complete(self) -> None:
        if self._plain_head is not None:
            return
        super().on_message_complete()
        if self._rest_bytes is not None:  # the next request may come
            self._rest_bytes = None
            self._stop_timer()

    def on_response_complete(self) -> None:
        self._end_idle()
        super().on_response_complete()
        if self.cycle.response_complete and self.cycle.more_body:
            self._begin_rest()

    def part(self) -> None:
        """Close the connection behind an answer while the client may still send.

        The system resets a connection that is closed with bytes unread, and the client may lose the answer. So it is
        told that nothing more comes, and has until the bounds of the rest to hang up.
        """
        if self.is_parting or self.transport.is_closing():
            return
        self.is_parting = True
        self._in_head = False
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()
        self._begin_rest()

    def _unset_keepalive_if_required(self) -> None:
        """Nothing: uvicorn would let any byte end the wait for a next request, also blank lines and a body's rest."""

    def _end_idle(self) -> None:
        super()._unset_keepalive_if_required()

    def _begin_head(self) -> None:
        self._in_head, self._head_bytes, self._header_bytes = True, 0, 0
        self._set_timer(HEAD_S, self._head_is_late)

    def _head_is_late(self) -> None:
        self._refuse(ApiError(408, "The request did not arrive in time.", code="head_timeout"))

    def _begin_rest(self) -> None:
        if self._rest_bytes is None:
            self._rest_bytes = 0
            self._set_timer(REST_S, self.transport.abort)

    def _refuse(self, error: ApiError) -> None:
        """Answer what never became a request, and hang up."""
        if self.is_parting or self.transport.is_closing():
            return
        if self.cycle is not None and self.cycle.response_complete and self.cycle.more_body:
            self.part()  # the request whose body ends badly has its answer
            return
        if self.cycle is not None and not self.cycle.response_complete:
            if self.cycle.response_started or self.pipeline:  # this would stand amid the answer to another request
                self.transport.close()
                return
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._answer(error)
        self.part()

    def _answer(self, error: ApiError) -> None:
        """Write an error by hand, where there is no request that it could be the response to."""
        body = error.body()
        lines = [f"HTTP/1.1 {error.status} Refused", "Content-Type: application/json", f"Content-Length: {len(body)}"]
        if error.retry_after is not None:
            lines.append(f"Retry-After: {error.retry_after}")
        self.transport.write("\r\n".join([*lines, "Connection: close", "", ""]).encode() + body)

    def _set_timer(self, seconds: float, late: Callable[[], None]) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, late)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _Outlet(asyncio.Transport):
    """The transport as one request's cycle has it: closing it does not cut off a body that is on its way."""

    def __init__(self, connection: Connection, cycle: RequestResponseCycle) -> None:
        super().__init__()
        self._connection = connection
        self._cycle = cycle
        self._transport = connection.transport

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._transport.write(data)

    def is_closing(self) -> bool:
        return self._connection.is_parting or self._transport.is_closing()

    def close(self) -> None:
        if self._transport.is_closing():
            return
        # Behind a head that asks for another protocol the parser takes nothing for a body.
        if self._cycle.more_body or self._connection.parser.should_upgrade():
            self._connection.part()
        else:
            self._transport.close()
