"""Generates the HTTP response to a request whose prompts become vectors: embeddings, and the logits that are scores.

The prompts of one request are admitted as one sequence of the queue; a few at a time are in the engine.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from fastapi import Request
from fastapi.responses import Response

from engine import EngineInfo, Pooling, SamplingParams, TokenDelta

from ..http.admission import INPUTS_DEPTH, Caller
from ..http.errors import CONTEXT_CODE, invalid
from ..http.openapi import JsonObject
from ..loading import LoadedModel
from ..observability.tracking import RequestTracker
from ..state import AppState
from .choices import Generation, Reader, unfinished
from .http_response import WholeResponse
from .output import Output, Prompt, PromptTokensDetails, Usage
from .prepare import Scheduled, check_priority, encoded, engine_request, in_time, time_limit

T = TypeVar("T")


class PooledUsage(JsonObject):
    """The number of tokens of all prompts."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


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


def check_length(info: EngineInfo, ids: Sequence[int], subject: str, field: str) -> None:
    """Raise 400 for a prompt that is longer than the context, which it may fill, since nothing is sampled after it."""
    if len(ids) > info.max_len:
        limit = f"this model's maximum context length is {info.max_len} tokens (--max-model-len)"
        message = f"{subject} {len(ids)} tokens, and {limit}"
        raise invalid(f"{message}; truncate_prompt_tokens cuts it.", field, CONTEXT_CODE)


async def respond(app: AppState, caller: Caller, request: Request, model: LoadedModel, pool: Pool[T]) -> Response:
    """Admit a request and return its response, of which nothing has been sent; raises ApiError."""
    began = app.metrics.clock()
    due = time_limit(app, request)
    check_priority(app, pool.request.priority)
    ticket = app.limits.admit_inputs(caller, pool.num_prompts)
    prompts = await in_time(due, request, encoded(model.info, pool.encode(model), pool.field))
    ticket.add_prompt(sum(len(prompt.ids) for prompt in prompts))
    track = RequestTracker(app.metrics, request.state.request_id, 1, [len(prompt.ids) for prompt in prompts], None)
    track.began = began
    params = SamplingParams(max_tokens=0, pooling=pool.pooling)
    results = [
        Result(index, engine_request(app, caller, pool.request, prompt, params), pool.read)
        for index, prompt in enumerate(prompts)
    ]
    window = INPUTS_DEPTH * app.limits.max_seqs
    generation = Generation(
        app.engine, results, 1, track, due, shutdown=app.deadline_passed, window=window, slots=app.limits.input_slots
    )

    def write(_: list[Output], total: Usage) -> JsonObject:
        usage = PooledUsage(total.prompt_tokens, total.total_tokens, total.prompt_tokens_details)
        return pool.write([result.value for result in results], usage)

    return WholeResponse(generation, write)


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
