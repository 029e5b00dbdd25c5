"""InProcess: an httpx transport that calls an ASGI app in this process, and streams its responses.

httpx has a transport of this kind, but it waits for the end of a response before it returns the first byte.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import httpx
from starlette.types import ASGIApp, Message

# Pieces of a response that wait for the reader; the app then waits too, as it does for a slow socket.
MAX_PIECES = 16


class InProcess(httpx.AsyncBaseTransport):
    """Requests go to `app`, whose lifespan is the caller's to run. All use is on one event loop."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Return when the head of the response is there. An exception of the app before that is raised here."""
        exchange = _Exchange(request)
        exchange.task = asyncio.create_task(exchange.run(self.app), name="in-process request")
        try:
            status, headers = await exchange.head
        except BaseException:
            await exchange.aclose()
            raise
        return httpx.Response(status, headers=headers, stream=exchange)


class _Exchange(httpx.AsyncByteStream):
    """One request and the body of its response."""

    task: asyncio.Task[None]

    def __init__(self, request: httpx.Request) -> None:
        self.request = request
        self.head: asyncio.Future[tuple[int, list[tuple[bytes, bytes]]]] = asyncio.get_running_loop().create_future()
        self._pieces: asyncio.Queue[bytes | None] = asyncio.Queue(MAX_PIECES)  # None: the end
        self._is_closed = asyncio.Event()
        self._is_read = False

    async def run(self, app: ASGIApp) -> None:
        url = self.request.url
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": self.request.method,
            "scheme": url.scheme,
            "path": url.path,
            "raw_path": url.raw_path.partition(b"?")[0],
            "query_string": url.query,
            "root_path": "",
            "headers": [(name.lower(), value) for name, value in self.request.headers.raw],
            "server": (url.host, url.port),
            "client": ("127.0.0.1", 0),
        }
        try:
            await app(scope, self._receive, self._send)
        except Exception as error:
            if self.head.done():
                raise
            self.head.set_exception(error)
        finally:
            if not self.head.done():
                self.head.set_exception(httpx.RemoteProtocolError("the app has sent no response"))
            if not self._is_closed.is_set():
                await self._pieces.put(None)

    async def _receive(self) -> Message:
        if not self._is_read:
            self._is_read = True
            return {"type": "http.request", "body": await self.request.aread(), "more_body": False}
        await self._is_closed.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            if not self.head.done():
                self.head.set_result((message["status"], list(message["headers"])))
        elif (body := message.get("body")) and not self._is_closed.is_set():
            await self._pieces.put(body)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (piece := await self._pieces.get()) is not None:
            yield piece
        await self.task  # raises what went wrong after the head

    async def aclose(self) -> None:
        """End the exchange as a client does that closes its connection: the app learns of it and cleans up."""
        self._is_closed.set()
        while not self._pieces.empty():  # a sender that waits for space goes on
            self._pieces.get_nowait()
        with suppress(Exception):
            await self.task
