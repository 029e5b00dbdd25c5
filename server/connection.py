"""Connection: one client's connection, from bytes to HTTP. What the parser cannot read is answered as an error too."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from .door import MAX_HEAD, head_too_large
from .errors import ApiError

# From the connection, or the first byte of a further request, until its head is complete. Whoever sends a byte now
# and then would otherwise hold a descriptor for good.
HEAD_S = 30.0


class Connection(HttpToolsProtocol):
    """uvicorn's protocol with bounds on a request's head, and with our envelope in what it answers by itself."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = False
        self._head_bytes = 0  # of what is not yet complete, the chunk that it began in left out
        self._header_bytes = 0  # of names and values, also of the trailers of a chunked body
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._begin_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        has_begun = self._in_head
        super().data_received(data)
        if has_begun and self._in_head and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD:
                self._refuse(head_too_large())

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._begin_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_bytes += len(name) + len(value)
        if self._header_bytes > 2 * MAX_HEAD:  # a head that is a little too large gets further, to the door's answer
            raise head_too_large()  # to the parser, which ends
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._end_head()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, "This is not an HTTP/1.1 request.", code="invalid_http"))

    def _begin_head(self) -> None:
        self._end_head()
        self._in_head, self._head_bytes, self._header_bytes = True, 0, 0
        self._timer = self.loop.call_later(HEAD_S, self._head_is_late)

    def _end_head(self) -> None:
        self._in_head = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _head_is_late(self) -> None:
        self._refuse(ApiError(408, "The request did not arrive in time.", code="head_timeout"))

    def _refuse(self, error: ApiError) -> None:
        """Answer what never became a request, and hang up."""
        if self.transport.is_closing():
            return
        body = error.body()
        head = f"HTTP/1.1 {error.status} Refused\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        self.transport.write(head.encode() + b"Connection: close\r\n\r\n" + body)
        self.transport.close()
