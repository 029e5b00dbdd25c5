"""The state of the Responses API: stored responses, and background jobs, which generate without a connection."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request
from starlette.types import Message

from ...generation.choices import Generation
from ...http.admission import Ticket
from ...http.errors import from_exception, unavailable
from ...settings import Settings
from .response import ResponsesWriter, interrupted
from .store import Store


class Cancelled(Exception):
    """The response was cancelled by a request."""


@dataclass(eq=False)
class Job:
    """One response in progress. Its writer has it kept whenever its status changes."""

    generation: Generation
    writer: ResponsesWriter

    async def run(self) -> None:
        """Generate until the response has ended or failed."""
        failure: Exception | None = None
        has_begun = False
        self.generation.start(no_client)
        try:
            async for taken in self.generation.outputs():
                if taken and not has_begun:
                    has_begun = True
                    self.writer.keep("in_progress")
                for output in taken:
                    self.writer.chunks(output, None)
        except Exception as error:
            self.generation.stop(error, "error")
            failure = error
        finally:
            await self.generation.close()
        usage = self.generation.usage()
        if failure is None:
            self.writer.closing(usage)
        elif isinstance(failure, Cancelled):
            self.writer.cancelled(usage)
        else:
            self.writer.failed(from_exception(failure), usage)


class ResponsesState:
    """The state in `app.state.responses`, which build_app creates: stored responses and background jobs."""

    def __init__(self, settings: Settings) -> None:
        self.store = Store(
            settings.response_store, settings.max_stored_responses, settings.max_stored_bytes, interrupted
        )
        self._jobs: dict[str, tuple[Job, asyncio.Task[None]]] = {}

    async def close(self) -> None:
        """Write what the store still holds; the jobs must have been stopped before."""
        await asyncio.to_thread(self.store.close)

    def start(self, id: str, job: Job, tickets: list[Ticket]) -> None:
        """Start a job; the tickets are released when it has ended."""

        async def work() -> None:
            try:
                await job.run()
            finally:
                del self._jobs[id]
                for ticket in tickets:
                    ticket.release()

        self._jobs[id] = job, asyncio.create_task(work(), name="background")

    async def cancel(self, id: str) -> None:
        """Stop a job, abort its engine requests and keep the response as it is. Unknown ids are ignored."""
        if id in self._jobs:
            await self._stop(id, Cancelled(), "cancelled")

    async def stop(self) -> None:
        """Stop all jobs before the server exits."""
        error = unavailable("The server shut down before the response was complete.", "draining")
        await asyncio.gather(*(self._stop(id, error, "drain") for id in [*self._jobs]))

    async def _stop(self, id: str, failure: Exception, cause: str) -> None:
        if id not in self._jobs:  # it has ended meanwhile
            return
        job, task = self._jobs[id]
        job.generation.stop(failure, cause)
        await asyncio.wait([task])


async def no_client() -> Message:
    """Receive as if from a client that never disconnects."""
    await asyncio.Event().wait()
    raise AssertionError


async def responses_state(request: Request) -> ResponsesState:
    """Return the state of a request's app. A coroutine, since FastAPI would call a function in a thread."""
    state: ResponsesState = request.app.state.responses
    return state


ResponsesDep = Annotated[ResponsesState, Depends(responses_state)]
