"""InProcess: an httpx transport that calls an ASGI app and, unlike httpx.ASGITransport, streams its responses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import httpx
from starlette.types import ASGIApp, Message

from .waiting import PATIENT

# Chunks of a response that are queued for a slow reader; then the app waits, as for a slow socket.
MAX_CHUNKS = 16


class InProcess(httpx.AsyncBaseTransport):
    """Sends requests to `app`, whose lifespan the caller runs. For use on one event loop."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self._open: set[_Exchange] = set()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Return as soon as the head of the response is there. Raises exceptions of the app until then."""
        exchange = _Exchange(request)
        exchange.task = asyncio.create_task(exchange.run(self.app), name="in-process request")
        self._open.add(exchange)
        exchange.task.add_done_callback(lambda _: self._open.discard(exchange))
        try:
            status, headers = await exchange.head
        except BaseException:
            await exchange.aclose()
            raise
        return httpx.Response(status, headers=headers, stream=exchange)

    async def aclose(self) -> None:
        """Disconnect from all responses that have not ended; returns when the app has ended them."""
        await asyncio.gather(*[exchange.aclose() for exchange in self._open], return_exceptions=True)


class _Exchange(httpx.AsyncByteStream):
    """One request and the body of its response."""

    task: asyncio.Task[None]

    def __init__(self, request: httpx.Request) -> None:
        self.request = request
        self.head: asyncio.Future[tuple[int, list[tuple[bytes, bytes]]]] = asyncio.get_running_loop().create_future()
        self._chunks: asyncio.Queue[bytes | None] = asyncio.Queue(MAX_CHUNKS)  # None: the end
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
            "extensions": {PATIENT: {}},
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
                await self._chunks.put(None)

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
            await self._chunks.put(body)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (chunk := await self._chunks.get()) is not None:
            yield chunk
        await self.task  # raises an exception of the app after the head

    async def aclose(self) -> None:
        """Disconnect, as a client that closes its connection; returns when the app has ended."""
        self._is_closed.set()
        while not self._chunks.empty():  # wakes a sender that waits for space
            self._chunks.get_nowait()
        with suppress(Exception):
            await self.task
