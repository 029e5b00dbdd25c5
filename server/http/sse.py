"""Server-sent events: bytes of one event, of a keep-alive comment and of the end of a stream; and a reader of them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx buffers a response unless told not to
}
HEARTBEAT = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"

# Several clients split lines wherever Unicode sees a line end. In JSON these characters stand only inside
# strings, where the escape means the same; in UTF-8 none of the sequences can begin inside another character.
_LINE_ENDS = ((b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"), (b"\xc2\x85", b"\\u0085"))


def frame(data: str | bytes, event: str | None = None) -> bytes:
    """One event that carries JSON text; `event` names its type."""
    body = data.encode() if isinstance(data, str) else data
    for raw, escaped in _LINE_ENDS:
        if raw in body:
            body = body.replace(raw, escaped)
    if b"\n" in body or b"\r" in body:  # indented JSON: each line is a data field of its own
        body = b"\ndata: ".join(body.splitlines())
    head = f"event: {event}\n".encode() if event else b""
    return head + b"data: " + body + b"\n\n"


async def read_events(chunks: AsyncIterator[bytes]) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects of a stream, to its [DONE]; ValueError for an event that is no JSON.

    Lines end at line feeds and nowhere else.
    """
    rest = b""
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            event = json.loads(data)
            if isinstance(event, dict):
                yield event
