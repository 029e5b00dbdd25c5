"""Waiting with a time limit that costs nothing when there is nothing to wait for."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Awaitable, Coroutine, Generator
from typing import Any, TypeVar

T = TypeVar("T")

# An ASGI extension: the client is in this process and may read as slowly as it likes.
PATIENT = "pequod.patient"


async def within(seconds: float | None, coroutine: Coroutine[Any, Any, T] | Awaitable[T]) -> T:
    """Await a coroutine, and cancel it with a TimeoutError if it takes longer; None: it may take any time.

    `asyncio.timeout` alone sets a timer and cancels it each time, which takes longer than writing a token to a socket
    whose buffer has room. So the coroutine is first run by hand, up to where it waits.
    """
    steps = coroutine.__await__()
    try:
        waits_for = next(steps)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    async with asyncio.timeout(seconds):
        return await _rest(steps, waits_for)


@types.coroutine
def _rest(steps: Generator[Any, Any, T], waits_for: Any) -> Generator[Any, Any, T]:
    """Run on from a first step that waits, as `yield from` does."""
    while True:
        try:
            value = yield waits_for
        except BaseException as error:
            step, argument = steps.throw, error
        else:
            step, argument = steps.send, value  # type: ignore[assignment]
        try:
            waits_for = step(argument)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
