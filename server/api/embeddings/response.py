"""Generates embeddings and writes the response, as generation/http_response.py does for text."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Annotated, Literal

import msgspec
from fastapi import Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from engine import EngineInfo, EngineRequest, Pooling, SamplingParams, TokenDelta

from ...generation.choices import Generation, Reader, unfinished
from ...generation.http_response import patiently
from ...generation.output import Output, Prompt, PromptTokensDetails
from ...generation.prepare import check_priority, check_token_ids, encoded, time_limit
from ...http.admission import INPUTS_DEPTH, Caller
from ...http.disconnect import while_connected
from ...http.errors import CONTEXT_CODE, deadline, invalid
from ...http.openapi import JsonObject
from ...loading import LoadedModel
from ...observability.tracking import RequestTracker
from ...state import AppState
from .request import EmbeddingRequest

VECTOR = msgspec.Meta(extra_json_schema={"anyOf": [{"type": "array", "items": {"type": "number"}}, {"type": "string"}]})


class Embedding(JsonObject):
    """The vector of one input."""

    object: Literal["embedding"]
    index: int
    embedding: Annotated[msgspec.Raw, VECTOR]


class EmbeddingUsage(JsonObject):
    """The number of tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class EmbeddingList(JsonObject):
    """A vector for each input, in their order."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


async def embed(app: AppState, caller: Caller, request: Request, body: EmbeddingRequest) -> Response:
    """Admit a request and return its response, of which nothing has been sent; raises ApiError."""
    began = app.metrics.clock()
    name = app.check_model(body.model)
    model = app.require_ready()
    due = time_limit(app, request)
    check_priority(app, body.priority)
    check_vector(model.info, body)
    ticket = app.limits.admit_inputs(caller, len(body.inputs))
    try:
        async with asyncio.timeout(due and due.left_s):
            prompts = await while_connected(request, encoded(encode(model, caller, body), "input"))
    except TimeoutError:
        raise deadline() from None
    check_lengths(model.info, prompts)
    ticket.add_prompt(sum(len(prompt.ids) for prompt in prompts))
    track = RequestTracker(app.metrics, request.state.request_id, 1, [len(prompt.ids) for prompt in prompts], None)
    track.began = began
    requests = engine_requests(app, caller, body, prompts)
    vectors = [Vector(index, each, body) for index, each in enumerate(requests)]
    window = INPUTS_DEPTH * app.limits.max_seqs
    generation = Generation(
        app.engine, vectors, 1, track, due, shutdown=app.deadline_passed, window=window, slots=app.limits.input_slots
    )
    return Embeddings(generation, vectors, name)


def check_vector(info: EngineInfo, body: EmbeddingRequest) -> None:
    """Raise 400 unless the model has vectors of the requested size."""
    if not info.hidden_size:
        raise invalid(f"There are no embeddings here: {info.architecture} tells no hidden states.", "model")
    if (body.dimensions or 0) > info.hidden_size:
        message = f"{body.dimensions} are asked for, and this model's vectors have {info.hidden_size}"
        raise invalid(f"Invalid 'dimensions': {message}.", "dimensions")


async def encode(model: LoadedModel, caller: Caller, body: EmbeddingRequest) -> list[Prompt]:
    prompts = []
    for given in body.inputs:
        if isinstance(given, str):
            special, fits = body.add_special_tokens is not False, body.truncate_prompt_tokens is None
            ids = await model.prompts.encode(given, special, caller=caller.flow, fits=fits)
        else:
            check_token_ids(model.info, given, "input")
            ids = given
        prompts.append(Prompt(tuple(body.cut(ids, model.info.max_len))))
    return prompts


def check_lengths(info: EngineInfo, prompts: list[Prompt]) -> None:
    """Raise 400 if an input is longer than the context. It may fill the context, since nothing is sampled after it."""
    for index, prompt in enumerate(prompts):
        if len(prompt.ids) > info.max_len:
            lengths = f"{len(prompt.ids)} tokens, and the context holds {info.max_len} (--max-model-len)"
            raise invalid(f"Input {index} has {lengths}; truncate_prompt_tokens cuts it.", "input", CONTEXT_CODE)


def engine_requests(
    app: AppState, caller: Caller, body: EmbeddingRequest, prompts: list[Prompt]
) -> list[EngineRequest]:
    pooling = Pooling(kind=body.pooling or "last", dimensions=body.dimensions)
    params = SamplingParams(max_tokens=0, pooling=pooling)
    salt = app.keys.salt_for(caller, body.cache_salt)
    return [
        EngineRequest(
            id=app.new_id(),
            prompt_ids=prompt.ids,
            params=params,
            priority=body.priority or 0,
            cache_salt=salt,
            flow=caller.flow,
            weight=caller.weight,
        )
        for prompt in prompts
    ]


@dataclass(eq=False)
class Vector(Reader):
    """The vector of one input, encoded when it arrives: encoding all at the end would delay every other stream."""

    body: EmbeddingRequest
    written: msgspec.Raw = field(default_factory=lambda: msgspec.Raw(b"null"), init=False)

    def read(self, delta: TokenDelta) -> Output:
        if delta.embedding is None:
            raise unfinished(delta)
        self.stats = delta.stats
        self.written = self.body.written(delta.embedding)
        return Output(self.index, finish_reason=delta.finish_reason)


class Embeddings(Response):
    """Waits for all vectors and sends them; errors are raised as exceptions."""

    def __init__(self, generation: Generation, vectors: list[Vector], model: str) -> None:
        super().__init__()
        self.generation = generation
        self.vectors = vectors
        self.model = model

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self.generation.running(receive):
            async for _ in self.generation.outputs():
                pass
            data = [Embedding("embedding", vector.index, vector.written) for vector in self.vectors]
            total = self.generation.usage()
            usage = EmbeddingUsage(total.prompt_tokens, total.total_tokens, total.prompt_tokens_details)
            body = msgspec.json.encode(EmbeddingList("list", data, self.model, usage))
            response = Response(body, media_type="application/json")
            await response(scope, receive, lambda message: patiently(self.generation, send, message))
