"""The client of an OpenAI-compatible server that `pequod chat`, `complete` and `bench` share."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from .commands import UsageError

if TYPE_CHECKING:
    import httpx

CONNECT_S = 10.0


def base_url(url: str) -> str:
    """Return the server's URL without /v1, with which it may be given. Raises UsageError."""
    base = url.rstrip("/").removesuffix("/v1")
    if not base.startswith(("http://", "https://")):
        raise UsageError(f"--url {url[:64]} is not a URL such as http://127.0.0.1:8000")
    return base


def open_client(url: str, key: str | None, silence_s: float, limits: httpx.Limits | None = None) -> httpx.AsyncClient:
    """Return a client of the server at a base URL. A request fails after `silence_s` seconds without a byte."""
    import httpx

    return httpx.AsyncClient(
        base_url=url,
        headers={"Authorization": f"Bearer {key}"} if key else {},
        timeout=httpx.Timeout(silence_s, connect=CONNECT_S),
        limits=limits or httpx.Limits(),
    )


def error_field(body: object, name: str) -> str | None:
    """Return `message` or `code` of an error in OpenAI's form; a message is also found in other servers' forms."""
    if not isinstance(body, dict):
        return None
    error = body.get("error", body.get("detail", body.get("message")) if name == "message" else None)
    value = error.get(name) if isinstance(error, dict) else error if name == "message" else None
    return None if value is None else str(value)


def parsed(content: bytes) -> Any:
    """Return a body parsed as JSON, or None if it is not JSON."""
    try:
        return json.loads(content)
    except ValueError:
        return None
