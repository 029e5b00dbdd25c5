"""Server-sent events: the bytes of an event, a keep-alive comment and the end of a stream, and a reader."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import httpx

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx buffers a response unless told not to
}
HEARTBEAT = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"

# Several clients split lines at every line end of Unicode. In JSON these characters occur only in strings, where the
# escape means the same; in UTF-8 none of the sequences can begin inside another character.
_LINE_ENDS = ((b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"), (b"\xc2\x85", b"\\u0085"))


def frame(data: str | bytes, event: str | None = None) -> bytes:
    """Return the bytes of an event with JSON text; `event` is its type."""
    body = escaped(data.encode() if isinstance(data, str) else data)
    if b"\n" in body or b"\r" in body:  # indented JSON: each line is a data field of its own
        body = b"\ndata: ".join(body.splitlines())
    head = f"event: {event}\n".encode() if event else b""
    return head + b"data: " + body + b"\n\n"


def escaped(body: bytes) -> bytes:
    """Return JSON text without characters at which clients split lines."""
    if body.isascii():
        return body
    for raw, replacement in _LINE_ENDS:
        if raw in body:
            body = body.replace(raw, replacement)
    return body


class EventStream:
    """The events of a streamed response, as pairs of the arrival time, time.perf_counter(), and the JSON.

    Only line feeds end lines. Raises ValueError at an event that is not JSON.
    """

    def __init__(self, response: httpx.Response) -> None:
        self._response = response
        self.is_complete = False  # [DONE] has arrived

    async def __aiter__(self) -> AsyncIterator[tuple[float, Any]]:
        rest = b""
        async for chunk in self._response.aiter_bytes():
            now = time.perf_counter()
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    self.is_complete = True
                else:
                    yield now, json.loads(data)
