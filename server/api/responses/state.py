"""The state of the Responses API: stored responses and background jobs."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import Depends, Request

from ...settings import Settings
from .background import Background
from .response import interrupted
from .store import Store


class ResponsesState:
    """The state in `app.state.responses`, which build_app creates."""

    def __init__(self, settings: Settings) -> None:
        self.background = Background()
        self.store = Store(
            settings.response_store, settings.max_stored_responses, settings.max_stored_bytes, interrupted
        )

    async def close(self) -> None:
        """Write what the store still holds; background jobs must have been stopped before."""
        await asyncio.to_thread(self.store.close)


async def responses_state(request: Request) -> ResponsesState:
    """Return the state of a request's app. A coroutine, since FastAPI would call a function in a thread."""
    state: ResponsesState = request.app.state.responses
    return state


ResponsesDep = Annotated[ResponsesState, Depends(responses_state)]
