"""Connection: the HTTP protocol of one client's connection, with timeouts, limits and our form of errors."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from .errors import ApiError, unavailable
from .middleware import MAX_HEAD, head_too_large
from .refusals import log_refusal
from .unsent import CUT_OFF, SLOW_READER, Unsent

# For a complete head, from the connection or the first byte of a later request. Otherwise a client that sends a byte
# now and then would hold a descriptor forever.
HEAD_S = 30.0
# For the rest of a request's body after its response: it is read and discarded until it or the connection ends.
REST_S = 10.0
REST_BYTES = 64 << 20
# Requests that wait for the response to an earlier one. With more, the connection is not read until there are fewer:
# the system reports a disconnect only to those who read. Nor is it while more than 64 KiB of a waiting body are here.
MAX_PIPELINED = 16
LOCAL = ("127.0.0.1", 0)  # whose X-Forwarded-For is trusted, unless FORWARDED_ALLOW_IPS says otherwise

log = logging.getLogger("pequod")


class Connection(HttpToolsProtocol):
    """uvicorn's protocol with limits on a request's head, on an unread body and on an unread response, and with our
    error envelope in the responses that do not come from the app."""

    unsent: Unsent

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = False
        self._head_bytes = 0  # of an incomplete head, without the chunk that it began in; between heads, of bodies
        self._header_bytes = 0  # of names and values, also of the trailers of a chunked body
        self._rest_bytes: int | None = None  # received of a body after its response; None: there is no such body
        self._plain_head: bytes | None = None  # parsed instead of the head of an upgrade request: without the upgrade
        self.is_parting = False  # the response is complete, and all further bytes are discarded
        self.max_connections, self.limit_concurrency = self.limit_concurrency, None
        self._timer: asyncio.TimerHandle | None = None
        # Requests without a complete response, in their order: the first one runs. uvicorn knows only the last.
        self._cycles: deque[RequestResponseCycle] = deque()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _Flow(transport, self)
        self.unsent = Unsent(transport, self.loop, self._cut_off)
        if self.client is None:  # of a Unix socket, which only this machine reaches, such as a proxy on it
            self.client = LOCAL
        if self.max_connections is not None and len(self.connections) > self.max_connections:
            self.is_parting = True
            message = "The server has as many connections as it can."
            self._write(unavailable(message, "connections"))
            transport.close()  # at once: its descriptor is one of the last
            return
        self._begin_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._end_idle()
        self.unsent.stop()
        self._disconnect()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._rest_bytes is not None:
            self._rest_bytes += len(data)
            if self._rest_bytes > REST_BYTES:
                self.transport.abort()
        if self.is_parting:
            return
        self._head_bytes += len(data)  # 0 again where a head begins in it
        self._parse(data)
        if self._in_head and self._head_bytes > MAX_HEAD and not self.transport.is_closing():
            self._refuse(head_too_large())

    def _parse(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self._refuse(ApiError(400, "This is not an HTTP/1.1 request.", code="invalid_http"))
        except httptools.HttpParserUpgrade as upgrade:
            if self._plain_head is not None:
                head, self._plain_head = self._plain_head, None
                self.parser = httptools.HttpRequestParser(self)  # the old one reads no body after such a head
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
                self._parse(head + data[upgrade.args[0] :])

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._end_idle()
        self._begin_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_bytes += len(name) + len(value)
        if self._header_bytes > 2 * MAX_HEAD:  # below that, the middleware refuses it
            raise head_too_large()  # ends the parser
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade() and self._get_upgrade() is not None:
            self._plain_head = self._without_upgrade()
            return
        self._end_idle()  # the idle timer was restarted if the previous response ended during this head
        self._in_head = False
        self._stop_timer()
        super().on_headers_complete()
        self.cycle.transport = _CycleTransport(self, self.cycle)
        if self.parser.get_http_version() == "1.0":
            self.cycle.send = _Unchunked(self.cycle)  # type: ignore[method-assign]
        self.cycle.scope["state"][CUT_OFF] = self.unsent.cut_off  # type: ignore[typeddict-item]
        self._cycles.append(self.cycle)
        self.flow.resume_reading()  # uvicorn pauses it for a pipelined request
        self.unsent.look()

    def _without_upgrade(self) -> bytes:
        """The head of the request without its upgrade, which a server may ignore (RFC 9110, 7.8).

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
        if self._rest_bytes is not None:  # the connection is ready for the next request
            self._rest_bytes = None
            self._stop_timer()

    def on_response_complete(self) -> None:
        self._end_idle()
        self._cycles.popleft()
        super().on_response_complete()
        self.flow.resume_reading()  # there is one less in the pipeline
        if self.cycle.response_complete and self.cycle.more_body:
            self._begin_rest()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Write a part of a response."""
        self.unsent.write(data)

    def _cut_off(self, reason: str) -> None:
        """Drop a connection whose client does not read, or not fast enough."""
        log.info("cut off a connection %s", reason)
        for cycle in self._cycles:
            cycle.scope["state"][SLOW_READER] = True  # type: ignore[typeddict-item]
        self._disconnect()
        self.transport.abort()

    def _disconnect(self) -> None:
        """End the running request, and forget those that wait for its response."""
        for cycle in self._cycles:
            cycle.disconnected = True
            cycle.message_event.set()
        self._cycles.clear()
        self.pipeline.clear()

    def part(self) -> None:
        """Close the connection after a response while the client may still be sending.

        The system resets a connection that is closed with unread bytes, and the client may lose the response. So only
        our side is closed, and the client has until the limits of the rest to close its own.
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
        """Do nothing: in uvicorn any byte ends the idle timeout, also a blank line or the rest of a body."""

    def _end_idle(self) -> None:
        super()._unset_keepalive_if_required()

    def _begin_head(self) -> None:
        self._in_head, self._head_bytes, self._header_bytes = True, 0, 0
        late = ApiError(408, "The request did not arrive in time.", code="head_timeout")
        self._set_timer(HEAD_S, lambda: self._refuse(late))

    def _begin_rest(self) -> None:
        if self._rest_bytes is None:
            self._rest_bytes = 0
            self._set_timer(REST_S, self.transport.abort)

    def _refuse(self, error: ApiError) -> None:
        """Respond to bytes that are not a valid request, and close the connection."""
        if self.is_parting or self.transport.is_closing():
            return
        if self.cycle is not None and self.cycle.response_complete and self.cycle.more_body:
            self.part()  # the request with the invalid body has its response already
            return
        if self.cycle is not None and not self.cycle.response_complete:
            if self.cycle.response_started or self.pipeline:  # it would be inside the response to another request
                self.transport.close()
                return
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._write(error)
        self.part()

    def _write(self, error: ApiError) -> None:
        """Write an error response for which there is no request."""
        log_refusal(error)
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


class _Flow(FlowControl):
    """Flow control of a connection that is not read while its pipeline is full."""

    def __init__(self, transport: asyncio.Transport, connection: Connection) -> None:
        super().__init__(transport)
        self._connection = connection

    def resume_reading(self) -> None:
        if len(self._connection.pipeline) < MAX_PIPELINED:
            super().resume_reading()


class _Unchunked:
    """Sends the response of one request cycle without chunks, which HTTP/1.0 does not have (RFC 9112, 6.1).

    A body without a length ends where the connection does, which uvicorn never keeps open for HTTP/1.0.
    """

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._send = cycle.send
        self._has_length = True  # of the body, known with the head

    async def __call__(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self._has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            if not self._has_length:
                self._cycle.chunked_encoding = False
        elif message["type"] == "http.response.body" and not self._has_length:
            self._cycle.expected_content_length = len(message.get("body", b""))  # uvicorn compares and subtracts it
        await self._send(message)


class _CycleTransport(asyncio.Transport):
    """The transport of one request cycle: closing it does not interrupt a body that is still arriving."""

    def __init__(self, connection: Connection, cycle: RequestResponseCycle) -> None:
        super().__init__()
        self._connection = connection
        self._cycle = cycle
        self._transport = connection.transport

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._connection.write(data)

    def is_closing(self) -> bool:
        return self._connection.is_parting or self._transport.is_closing()

    def close(self) -> None:
        if self._transport.is_closing():
            return
        # After the head of an upgrade request the parser sees no body.
        if self._cycle.more_body or self._connection.parser.should_upgrade():
            self._connection.part()
        else:
            self._transport.close()
