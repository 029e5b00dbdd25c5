"""From a parsed request to the bytes of its answer: the one line that all APIs which generate share.

`answer` checks everything that can be known before the first byte. Its Answer then runs a Generation and writes the
outputs, as one JSON object or as a stream of events: a stream's deltas, joined, are the answer in one piece.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
from fastapi import Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from ..http import sse
from ..http.admission import Caller
from ..http.disconnect import while_connected
from ..http.errors import deadline, from_exception
from ..http.openapi import JsonObject
from ..observability.tracking import RequestTracker
from ..state import AppState
from .choices import Generation, Gone
from .output import Head, Output, Prompt, TokenText, Usage, Writer
from .prepare import check_fields, engine_requests, make_choices, prepare, time_limit
from .request import GenerationRequest

WRITE_TIMEOUT_S = 30.0  # for a client that has stopped reading
LEFT_OUT_HEADER = "X-Pequod-Left-Out"

MakeWriter = Callable[[Head, list[Prompt], TokenText], Writer]


async def answer(
    app: AppState,
    caller: Caller,
    request: Request,
    asked: GenerationRequest,
    *,
    write: MakeWriter,
    prefix: str,
    default_max_tokens: int | None = None,
) -> Answer:
    """Take a request in, or raise the ApiError that it deserves; nothing has been sent when this returns.

    `write` makes the API's Writer; `prefix` begins the answer's id. Where the request sets no
    limit, an answer has at most `default_max_tokens` tokens, None: as many as fit.
    """
    began = app.metrics.clock()
    name = app.check_model(asked.model)
    model = app.require_ready()
    due = time_limit(app, request)
    check_fields(app, model.info, asked)
    # The ticket is the caller's: it ends with the HTTP request, however that ends. Nothing slow comes before it.
    ticket = app.limits.admit(caller, asked.num_prompts * asked.num_choices)
    preparing = prepare(app, model, caller, asked, ticket=ticket, default_max_tokens=default_max_tokens)
    try:
        async with asyncio.timeout(due and due.left_s):
            prompts, shaped, grammar, max_tokens, bad_words = await while_connected(request, preparing)
    except TimeoutError:
        raise deadline() from None
    head = Head(
        f"{prefix}{uuid.uuid4().hex}",
        int(time.time()),
        name,
        model.fingerprint,
        request.state.request_id,
        model.default_sampling,
    )
    requests = engine_requests(
        app, model, caller, asked, prompts, max_tokens=max_tokens, grammar=grammar, bad_words=bad_words
    )
    track = RequestTracker(
        app.metrics,
        request.state.request_id,
        asked.num_choices,
        [len(prompt.ids) for prompt in prompts],
        max(max_tokens),
    )
    track.began = began  # the client waits since then, not since its prompt was tokenized
    choices = make_choices(model, asked, requests, grammar, shaped)
    generation = Generation(app.engine, choices, asked.num_choices, track, due, cut=app.deadline_passed)
    return Answer(generation, write(head, prompts, model.tokenizer.token_text), asked)


class Answer(Response):
    """Runs a Generation while it is being sent; an error before the first byte leaves as an ordinary exception."""

    def __init__(self, generation: Generation, writer: Writer, asked: GenerationRequest) -> None:
        super().__init__()
        self.generation = generation
        self.writer = writer
        self.request = asked

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self.generation.running(receive):
            if self.request.stream:
                await Stream(self.generation, self.writer, self.request, send).run()
            else:
                await self._send_whole(scope, receive, send)

    async def _send_whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        outputs: list[list[Output]] = [[] for _ in self.generation.choices]
        async for taken in self.generation.outputs():
            for output in taken:
                outputs[output.choice].append(output)
        usage = self.generation.usage()

        def written() -> bytes:
            return msgspec.json.encode(self.writer.whole([Output.join(each) for each in outputs], usage))

        body = written() if self.request.scoring is None else await asyncio.to_thread(written)
        response = Response(body, media_type="application/json", headers=notes(self.writer.prompts))
        await response(scope, receive, lambda message: self._send_patiently(send, message))

    async def _send_patiently(self, send: Send, message: Any) -> None:
        await patiently(self.generation, send, message)


class Stream:
    """Writes a generation as server-sent events.

    The head waits for the first token or for HEARTBEAT_S, so that whatever fails until then has its own status.
    """

    def __init__(self, generation: Generation, writer: Writer, asked: GenerationRequest, send: Send) -> None:
        self.generation = generation
        self.writer = writer
        self.request = asked
        self.send = send
        self.has_begun = False

    async def run(self) -> None:
        try:
            async for outputs in self.generation.outputs():
                await self._begin()
                await self._write(await self._frames(outputs) if outputs else sse.HEARTBEAT)
            await self._write(self._events(self.writer.closing(self.generation.usage())) + self.writer.end, more=False)
        except Gone:
            raise
        except Exception as error:
            if not self.has_begun:
                raise
            self.generation.stop(error, "error")
            # The status has gone: the error is the last event, never a cut connection.
            failure = self.writer.failure(from_exception(error), self.generation.usage())
            await self._write(failure + self.writer.end, more=False)

    async def _begin(self) -> None:
        if self.has_begun:
            return
        self.has_begun = True
        told = sse.HEADERS | notes(self.writer.prompts)
        headers = [(name.lower().encode(), value.encode()) for name, value in told.items()]
        await patiently(self.generation, self.send, {"type": "http.response.start", "status": 200, "headers": headers})
        usage = self._running()
        if usage is not None:  # none of the first tokens has been sent yet
            usage.completion_tokens, usage.total_tokens = 0, usage.prompt_tokens
        await self._write(self._events(self.writer.opening(usage)))

    async def _frames(self, outputs: list[Output]) -> bytes:
        running = self._running()

        def written() -> bytes:
            return b"".join(self._events(self.writer.chunks(output, running)) for output in outputs)

        has_scores = any(output.prompt_logprobs for output in outputs)
        return await asyncio.to_thread(written) if has_scores else written()

    def _running(self) -> Usage | None:
        """Usage so far, where every chunk is to tell it."""
        return self.generation.usage() if self.request.continuous_usage else None

    def _events(self, chunks: Iterable[JsonObject]) -> bytes:
        return b"".join(self.writer.frame(chunk) for chunk in chunks)

    async def _write(self, data: bytes, more: bool = True) -> None:
        if data or not more:
            await patiently(self.generation, self.send, {"type": "http.response.body", "body": data, "more_body": more})


def notes(prompts: list[Prompt]) -> dict[str, str]:
    """Headers that say what of the request is not part of its prompts."""
    left_out = sorted({prompt.left_out for prompt in prompts} - {""})
    return {LEFT_OUT_HEADER: ", ".join(left_out)} if left_out else {}


async def patiently(generation: Generation, send: Send, message: Any) -> None:
    """Send, or raise Gone when the client has not read for WRITE_TIMEOUT_S."""
    try:
        async with asyncio.timeout(WRITE_TIMEOUT_S):
            await send(message)
    except TimeoutError:
        generation.stop(Gone(), "slow_reader")
        raise Gone from None
    except OSError:
        generation.stop(Gone(), "disconnect")
        raise Gone from None
