"""Generates the HTTP response to a GenerationRequest, for all APIs that generate text.

`respond` does all checks, before the first byte is sent. The GeneratedResponse runs a Generation and sends its outputs
as one JSON object or as a stream of events, whose deltas add up to that object.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from fastapi import Request
from fastapi.responses import Response
from starlette.types import Message, Receive, Scope, Send

from ..http import sse
from ..http.admission import Caller
from ..http.errors import from_exception
from ..http.openapi import JsonObject
from ..http.unsent import CUT_OFF, SLOW_READER, WRITE_TIMEOUT_S
from ..http.waiting import PATIENT, within
from ..observability.tracking import RequestTracker
from ..state import AppState
from .choices import Generation, Gone
from .output import Head, Output, Prompt, TokenText, Usage, Writer
from .prepare import check_fields, in_time, make_choices, prepare, time_limit
from .request import GenerationRequest

LEFT_OUT_HEADER = "X-Pequod-Left-Out"

MakeWriter = Callable[[Head, list[Prompt], TokenText], Writer]
CutOff = Callable[[str], None]  # drops the connection, with a reason for the log


async def respond(
    app: AppState, caller: Caller, http_request: Request, request: GenerationRequest, *, write: MakeWriter, prefix: str
) -> GeneratedResponse:
    """Admit a request and return its response, of which nothing has been sent; raises ApiError.

    `write` creates the API's Writer; `prefix` begins the response's id.
    """
    began = app.metrics.clock()
    name = app.check_model(request.model)
    model = app.require_ready()
    due = time_limit(app, http_request)
    check_fields(app, model.info, request)
    # The ticket is the caller's and is released at the end of the HTTP request. Nothing slow precedes it.
    ticket = app.limits.admit(caller, request.num_prompts * request.num_choices)
    prepared = await in_time(due, http_request, prepare(app, model, caller, request, ticket))
    request_id = http_request.state.request_id
    head = Head(
        f"{prefix}{uuid.uuid4().hex}", int(time.time()), name, model.fingerprint, request_id, model.default_sampling
    )
    lengths = [len(prompt.ids) for prompt in prepared.prompts]
    track = RequestTracker(app.metrics, request_id, request.num_choices, lengths, max(prepared.max_tokens))
    track.began = began  # the client has been waiting since then, not since its prompt was tokenized
    choices = make_choices(app, model, caller, request, prepared)
    generation = Generation(app.engine, choices, request.num_choices, track, due, shutdown=app.deadline_passed)
    return GeneratedResponse(generation, write(head, prepared.prompts, model.tokenizer.token_text), request)


class WholeResponse(Response):
    """Waits for all outputs of a Generation and sends one JSON object; errors are raised as exceptions."""

    def __init__(self, generation: Generation, write: Callable[[list[Output], Usage], JsonObject]) -> None:
        """`write` returns the object; one output per choice, in their order."""
        super().__init__()
        self.generation = generation
        self.write = write
        self.in_thread = False  # encoding takes long
        self.notes: dict[str, str] = {}  # further headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        patience_s = None if PATIENT in (scope.get("extensions") or {}) else WRITE_TIMEOUT_S

        async def watch() -> Message:
            message = await receive()
            if message["type"] == "http.disconnect" and scope["state"].get(SLOW_READER):
                self.generation.stop(Gone(), "slow_reader")
            return message

        async with self.generation.running(watch):
            cut_off = scope["state"].get(CUT_OFF)
            await self.run(scope, receive, partial(patiently, self.generation, send, patience_s, cut_off=cut_off))

    async def run(self, scope: Scope, receive: Receive, send: Send) -> None:
        outputs: list[list[Output]] = [[] for _ in self.generation.choices]
        async for taken in self.generation.outputs():
            for output in taken:
                outputs[output.choice].append(output)
        usage = self.generation.usage()

        def encode() -> bytes:
            return msgspec.json.encode(self.write([Output.join(choice) for choice in outputs], usage))

        body = await asyncio.to_thread(encode) if self.in_thread else encode()
        response = Response(body, media_type="application/json", headers=self.notes)
        await response(scope, receive, send)


class GeneratedResponse(WholeResponse):
    """Runs a Generation while it is being sent; errors before the first byte are raised as exceptions."""

    def __init__(self, generation: Generation, writer: Writer, request: GenerationRequest) -> None:
        super().__init__(generation, writer.whole)
        self.writer = writer
        self.request = request
        self.in_thread = request.scoring is not None
        self.notes = notes(writer.prompts)

    async def run(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.request.stream:
            await Stream(self.generation, self.writer, self.request, send).run()
        else:
            await super().run(scope, receive, send)


@dataclass(eq=False)
class Stream:
    """Sends a generation as server-sent events.

    The head is sent with the first token or after HEARTBEAT_S, so that earlier errors have a status of their own.
    """

    generation: Generation
    writer: Writer
    request: GenerationRequest
    send: Send
    has_begun: bool = False

    async def run(self) -> None:
        try:
            async for outputs in self.generation.outputs():
                if not self.has_begun:
                    await self._begin()
                data = await self._encode(outputs)
                # There is no data if the client is not shown these tokens: hidden reasoning, for example.
                await self._write(data or (sse.HEARTBEAT if self.generation.is_silent else b""))
            await self._write(self._events(self.writer.closing(self.generation.usage())) + self.writer.end, more=False)
        except Gone:
            raise
        except Exception as error:
            if not self.has_begun:
                raise
            self.generation.stop(error, "error")
            # The status has been sent, so the error is the last event. The connection is never just cut.
            failure = self.writer.failure(from_exception(error), self.generation.usage())
            await self._write(failure + self.writer.end, more=False)

    async def _begin(self) -> None:
        self.has_begun = True
        names = sse.HEADERS | notes(self.writer.prompts)
        headers = [(name.lower().encode(), value.encode()) for name, value in names.items()]
        await self.send({"type": "http.response.start", "status": 200, "headers": headers})
        usage = self._usage()
        if usage is not None:  # none of the first tokens has been sent
            usage.completion_tokens, usage.total_tokens = 0, usage.prompt_tokens
        await self._write(self._events(self.writer.opening(usage)))

    async def _encode(self, outputs: list[Output]) -> bytes:
        usage = self._usage()

        def encode() -> bytes:
            return b"".join([self.writer.events(output, usage) for output in outputs])

        for output in outputs:
            if output.prompt_logprobs:
                return await asyncio.to_thread(encode)
        return encode()

    def _usage(self) -> Usage | None:
        """Return the usage so far, if every chunk is to report it."""
        return self.generation.usage() if self.request.continuous_usage else None

    def _events(self, chunks: Iterable[JsonObject]) -> bytes:
        return b"".join(self.writer.frame(chunk) for chunk in chunks)

    async def _write(self, data: bytes, more: bool = True) -> None:
        if data or not more:
            await self.send({"type": "http.response.body", "body": data, "more_body": more})
            self.generation.sent()


def notes(prompts: list[Prompt]) -> dict[str, str]:
    """Return the header that names the fields omitted from the prompts."""
    left_out = sorted({prompt.left_out for prompt in prompts} - {""})
    return {LEFT_OUT_HEADER: ", ".join(left_out)} if left_out else {}


async def patiently(
    generation: Generation, send: Send, patience_s: float | None, message: Any, *, cut_off: CutOff | None = None
) -> None:
    """Send a message; raises Gone if the client does not read for that long or has disconnected."""
    try:
        await within(patience_s, send(message))
    except TimeoutError:
        generation.stop(Gone(), "slow_reader")
        if cut_off is not None:
            cut_off("whose client does not read, or not fast enough")
        raise Gone from None
    except OSError:
        generation.stop(Gone(), "disconnect")
        raise Gone from None
