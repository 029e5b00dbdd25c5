"""Scores the documents of a request and writes the response."""

from __future__ import annotations

import math
import struct
import time
import uuid
from collections.abc import Callable
from functools import partial
from typing import Literal

from fastapi import Request
from fastapi.responses import Response
from msgspec import UNSET, UnsetType

from engine import Pooling

from ...generation import pooled
from ...generation.output import Prompt
from ...http.admission import MAX_OPEN_TOKENS, Caller
from ...http.errors import invalid
from ...http.openapi import JsonObject
from ...loading import LoadedModel
from ...state import AppState
from ...tokenization import reranker
from ...tokenization.renderer import TemplateError
from .request import Pair, RerankRequest, ScoreRequest, ScoringRequest

NO_RERANKER = (
    "This model is not a reranker: its chat template does not ask whether a document is relevant to a query, to be "
    "answered yes or no. Serve a model such as Qwen3-Reranker, or set the template with --chat-template."
)


class RankedDocument(JsonObject):
    """A document as it came."""

    text: str


class RankedResult(JsonObject):
    """The relevance of one document."""

    index: int
    relevance_score: float
    document: RankedDocument | UnsetType = UNSET


class RankedResults(JsonObject):
    """The most relevant documents first; equals in their order in the request."""

    id: str
    model: str
    usage: pooled.PooledUsage
    results: list[RankedResult]


class Score(JsonObject):
    """The relevance of one pair."""

    index: int
    object: Literal["score"]
    score: float


class ScoreList(JsonObject):
    """The relevance of each pair, in their order."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: pooled.PooledUsage


async def rerank(app: AppState, caller: Caller, request: Request, body: RerankRequest) -> Response:
    """Admit a request and return its response, of which nothing has been sent; raises ApiError."""
    name, texts = app.check_model(body.model), body.texts

    def write(scores: list[float], usage: pooled.PooledUsage) -> RankedResults:
        order = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n]
        keeps = body.return_documents is not False
        results = [
            RankedResult(index, scores[index], RankedDocument(texts[index]) if keeps else UNSET) for index in order
        ]
        return RankedResults(f"rerank-{uuid.uuid4().hex}", name, usage, results)

    return await respond(app, caller, request, body, pairs=body.pairs, field="documents", write=write)


async def score(app: AppState, caller: Caller, request: Request, body: ScoreRequest) -> Response:
    """Admit a request and return its response, of which nothing has been sent; raises ApiError."""
    name = app.check_model(body.model)

    def write(scores: list[float], usage: pooled.PooledUsage) -> ScoreList:
        data = [Score(index, "score", value) for index, value in enumerate(scores)]
        return ScoreList(f"score-{uuid.uuid4().hex}", "list", int(time.time()), name, data, usage)

    return await respond(app, caller, request, body, pairs=body.pairs, field="text_2", write=write)


async def respond(
    app: AppState,
    caller: Caller,
    request: Request,
    body: ScoringRequest,
    *,
    pairs: list[Pair],
    field: str,
    write: Callable[[list[float], pooled.PooledUsage], JsonObject],
) -> Response:
    """Score the pairs of a request, whose documents are in `field`; raises ApiError."""
    model = app.require_ready()
    if model.reranker is None:
        raise invalid(NO_RERANKER, "model")
    pool = pooled.Pool(
        request=body,
        num_prompts=len(pairs),
        field=field,
        encode=partial(encode, caller, body, pairs, field),
        pooling=Pooling(kind="logits", token_ids=model.reranker.answer_ids),
        read=relevance,
        write=write,
    )
    return await pooled.respond(app, caller, request, model, pool)


def relevance(logits: bytes) -> float:
    """Return the probability of yes, from the float32 logits of yes and no."""
    yes, no = struct.unpack("<2f", logits)
    odds = math.exp(min(yes, no) - max(yes, no))  # of the less likely answer, at most 1: nothing overflows
    return (1 if yes >= no else odds) / (1 + odds)


async def encode(
    caller: Caller, body: ScoringRequest, pairs: list[Pair], field: str, model: LoadedModel
) -> list[Prompt]:
    """Encode a prompt for each pair, cut if the request says so; raises 400 for one that is longer than the context."""
    cut = Cut(caller, body, model)
    prompts = []
    total = 0
    for index, pair in enumerate(pairs):
        turns = reranker.conversation(*pair, body.instruction)
        ids = await model.prompts.chat(turns, caller=caller.flow, fits=not body.cuts)
        if body.cuts:
            ids = await cut(pair.query, ids)
        pooled.check_length(model.info, ids, f"Document {index} makes a prompt of", field)
        total += len(ids)
        # The query is part of each prompt, so the size of the body is no bound for them.
        if total > MAX_OPEN_TOKENS:
            message = f"The prompts, each of which has the query, have more than {MAX_OPEN_TOKENS} tokens together"
            raise invalid(f"{message}; send fewer documents in a request.", field)
        prompts.append(Prompt(tuple(ids)))
    return prompts


class Cut:
    """Cuts the documents of one request. The part of the prompt after a document, which asks for the answer, stays."""

    def __init__(self, caller: Caller, body: ScoringRequest, model: LoadedModel) -> None:
        self._caller = caller
        self._body = body
        self._model = model
        self._around: dict[str, tuple[int, list[int]]] = {}  # by query: tokens before a document, and the ids after it

    async def __call__(self, query: str, ids: list[int]) -> list[int]:
        """Return the prompt cut to the length that the request sets. Raises 400 if that leaves nothing of a document,
        and TemplateError if the template does not keep documents as they are."""
        longest, per_document = self._body.truncate_prompt_tokens, self._body.max_document
        limits = [self._model.info.max_len if longest == -1 else longest] if longest is not None else []
        if limits and per_document is None and len(ids) <= limits[0]:
            return ids
        if query not in self._around:
            self._around[query] = await self._measure(query)
        before, after = self._around[query]
        if per_document is not None:
            limits.append(before + per_document + len(after))
        limit = min(limits)
        if len(ids) <= limit:
            return ids
        if limit <= before + len(after):
            message = f"the template and the query alone have {before + len(after)} tokens"
            raise invalid(f"Invalid 'truncate_prompt_tokens': {message}.", "truncate_prompt_tokens")
        if ids[-len(after) :] != after:
            raise TemplateError(reranker.UNCUTTABLE)
        return ids[: limit - len(after)] + after

    async def _measure(self, query: str) -> tuple[int, list[int]]:
        prompts, flow = self._model.prompts, self._caller.flow
        turns = reranker.conversation(query, reranker.MARK, self._body.instruction)
        before, after = reranker.around(await prompts.render(turns, caller=flow))
        # A space before the document becomes part of its first token.
        head = await prompts.encode(before.rstrip(" "), False, caller=flow, fits=False)
        return len(head), await prompts.encode(after, False, caller=flow, fits=False)
