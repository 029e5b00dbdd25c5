"""Cancels work when its client disconnects, also before there is a response."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from fastapi import Request
from starlette.requests import ClientDisconnect

T = TypeVar("T")

SOON_S = 0.05  # shorter work is not watched: that would cost more than it could save


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await work for a request whose body was read; if its client disconnects, cancel it and raise ClientDisconnect."""
    task = asyncio.create_task(work)
    watch: asyncio.Task[None] | None = None
    try:
        done, _ = await asyncio.wait({task}, timeout=SOON_S)
        if not done:
            watch = asyncio.create_task(_disconnected(request))
            await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        tasks: list[asyncio.Task[Any]] = [task] if watch is None else [task, watch]
        for each in tasks:
            each.cancel()
        await asyncio.wait(tasks)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
