"""Encodes the inputs of a request for embeddings and writes the response."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal

import msgspec
from fastapi import Request
from fastapi.responses import Response

from engine import EngineInfo, Pooling

from ...generation import pooled
from ...generation.output import Prompt
from ...generation.prepare import check_token_ids
from ...http.admission import Caller
from ...http.errors import invalid
from ...http.openapi import JsonObject
from ...loading import LoadedModel
from ...state import AppState
from .request import EmbeddingRequest

VECTOR = msgspec.Meta(extra_json_schema={"anyOf": [{"type": "array", "items": {"type": "number"}}, {"type": "string"}]})


class Embedding(JsonObject):
    """The vector of one input."""

    object: Literal["embedding"]
    index: int
    embedding: Annotated[msgspec.Raw, VECTOR]


class EmbeddingList(JsonObject):
    """A vector for each input, in their order."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: pooled.PooledUsage


async def embed(app: AppState, caller: Caller, request: Request, body: EmbeddingRequest) -> Response:
    """Admit a request and return its response, of which nothing has been sent; raises ApiError."""
    name = app.check_model(body.model)
    model = app.require_ready()
    check_vector(model.info, body)

    def write(vectors: list[msgspec.Raw], usage: pooled.PooledUsage) -> EmbeddingList:
        data = [Embedding("embedding", index, vector) for index, vector in enumerate(vectors)]
        return EmbeddingList("list", data, name, usage)

    pool = pooled.Pool(
        request=body,
        num_prompts=len(body.inputs),
        field="input",
        encode=partial(encode, caller, body),
        pooling=Pooling(kind=body.pooling or "last", dimensions=body.dimensions),
        read=body.written,
        write=write,
    )
    return await pooled.respond(app, caller, request, model, pool)


def check_vector(info: EngineInfo, body: EmbeddingRequest) -> None:
    """Raise 400 unless the model has vectors of the requested size."""
    if not info.hidden_size:
        raise invalid(f"There are no embeddings here: {info.architecture} returns no hidden states.", "model")
    if (body.dimensions or 0) > info.hidden_size:
        message = f"{body.dimensions} are requested, and this model's vectors have {info.hidden_size}"
        raise invalid(f"Invalid 'dimensions': {message}.", "dimensions")


async def encode(caller: Caller, body: EmbeddingRequest, model: LoadedModel) -> list[Prompt]:
    """Encode the inputs; raises 400 if one is longer than the context."""
    prompts: list[Prompt] = []
    for given in body.inputs:
        if isinstance(given, str):
            special, fits = body.add_special_tokens is not False, body.truncate_prompt_tokens is None
            ids = await model.prompts.encode(given, special, caller=caller.flow, fits=fits)
        else:
            check_token_ids(model.info, given, "input")
            ids = given
        ids = body.cut(ids, model.info.max_len)
        pooled.check_length(model.info, ids, f"Input {len(prompts)} has", "input")
        prompts.append(Prompt(tuple(ids)))
    return prompts
