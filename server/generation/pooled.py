"""Generates the HTTP response to a request whose prompts become vectors: embeddings, and the logits that are scores.

The prompts of one request are admitted as one sequence of the queue; a few at a time are in the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import msgspec
from fastapi import Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from engine import EngineRequest, Pooling, SamplingParams, TokenDelta

from ..http.admission import INPUTS_DEPTH, Caller
from ..http.disconnect import while_connected
from ..http.errors import deadline
from ..http.openapi import JsonObject
from ..loading import LoadedModel
from ..observability.tracking import RequestTracker
from ..state import AppState
from .choices import Generation, Reader, unfinished
from .http_response import patiently
from .output import Output, Prompt, PromptTokensDetails
from .prepare import check_priority, encoded, time_limit

T = TypeVar("T")


class PooledUsage(JsonObject):
    """The number of tokens of all prompts."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Scheduled(Protocol):
    """The fields of a request that say when its prompts run and which cached prefixes they share."""

    priority: int | None
    cache_salt: str | None


@dataclass(frozen=True)
class Pool(Generic[T]):
    """What an API does with the prompts of a request and with their vectors."""

    request: Scheduled
    num_prompts: int
    field: str  # of the request, to blame for a prompt that cannot be encoded
    encode: Callable[[LoadedModel], Awaitable[list[Prompt]]]  # raises ApiError, TemplateError, TextTooLong
    pooling: Pooling
    read: Callable[[bytes], T]  # converts a vector when it arrives: to convert all at the end would delay other streams
    write: Callable[[list[T], PooledUsage], JsonObject]  # the response, from the results in the prompts' order


async def respond(app: AppState, caller: Caller, request: Request, model: LoadedModel, pool: Pool[T]) -> Response:
    """Admit a request and return its response, of which nothing has been sent; raises ApiError."""
    began = app.metrics.clock()
    due = time_limit(app, request)
    check_priority(app, pool.request.priority)
    ticket = app.limits.admit_inputs(caller, pool.num_prompts)
    try:
        async with asyncio.timeout(due and due.left_s):
            prompts = await while_connected(request, encoded(pool.encode(model), pool.field))
    except TimeoutError:
        raise deadline() from None
    ticket.add_prompt(sum(len(prompt.ids) for prompt in prompts))
    track = RequestTracker(app.metrics, request.state.request_id, 1, [len(prompt.ids) for prompt in prompts], None)
    track.began = began
    params = SamplingParams(max_tokens=0, pooling=pool.pooling)
    salt = app.keys.salt_for(caller, pool.request.cache_salt)
    requests = [
        EngineRequest(
            id=app.new_id(),
            prompt_ids=prompt.ids,
            params=params,
            priority=pool.request.priority or 0,
            cache_salt=salt,
            flow=caller.flow,
            weight=caller.weight,
        )
        for prompt in prompts
    ]
    results = [Result(index, each, pool.read) for index, each in enumerate(requests)]
    window = INPUTS_DEPTH * app.limits.max_seqs
    generation = Generation(
        app.engine, results, 1, track, due, shutdown=app.deadline_passed, window=window, slots=app.limits.input_slots
    )
    return PooledResponse(generation, results, pool.write)


@dataclass(eq=False)
class Result(Reader, Generic[T]):
    """What an API makes of the vector of one prompt."""

    convert: Callable[[bytes], T]
    value: T = field(init=False)

    def read(self, delta: TokenDelta) -> Output:
        if delta.embedding is None:
            raise unfinished(delta)
        self.stats = delta.stats
        self.value = self.convert(delta.embedding)
        return Output(self.index, finish_reason=delta.finish_reason)


class PooledResponse(Response, Generic[T]):
    """Waits for all vectors and sends the response; errors are raised as exceptions."""

    def __init__(
        self, generation: Generation, results: list[Result[T]], write: Callable[[list[T], PooledUsage], JsonObject]
    ) -> None:
        super().__init__()
        self.generation = generation
        self.results = results
        self.write = write

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self.generation.running(receive):
            async for _ in self.generation.outputs():
                pass
            total = self.generation.usage()
            usage = PooledUsage(total.prompt_tokens, total.total_tokens, total.prompt_tokens_details)
            body = msgspec.json.encode(self.write([result.value for result in self.results], usage))
            response = Response(body, media_type="application/json")
            await response(scope, receive, lambda message: patiently(self.generation, send, message))
