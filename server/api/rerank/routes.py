"""POST /v1/rerank and POST /v1/score, with the paths that clients of other servers use."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response

from ...http.auth import UserDep
from ...http.body import body
from ...http.errors import OPENAI_ERRORS
from ...http.openapi import described, returned
from ...state import AppDep
from .request import RerankRequest, ScoreRequest
from .response import RankedResults, ScoreList
from .response import rerank as rerank_documents
from .response import score as score_pairs

router = APIRouter(tags=["generation"])

RerankBody = Annotated[RerankRequest, Depends(body(RerankRequest))]
ScoreBody = Annotated[ScoreRequest, Depends(body(ScoreRequest))]

RANKS = returned(RankedResults, "The most relevant documents, with their scores from 0 to 1", OPENAI_ERRORS)
SCORES = returned(ScoreList, "A score from 0 to 1 for each pair", OPENAI_ERRORS)


# Decorators apply from the bottom: the path that is described comes first among the routes.
@router.post("/v2/rerank", response_class=Response, include_in_schema=False)
@router.post("/rerank", response_class=Response, include_in_schema=False)
@router.post("/v1/rerank", response_class=Response, responses=RANKS, openapi_extra=described(RerankRequest))
async def rerank(payload: RerankBody, app: AppDep, caller: UserDep, request: Request) -> Response:
    """Order documents by their relevance to a query, with a reranker."""
    return await rerank_documents(app, caller, request, payload)


@router.post("/score", response_class=Response, include_in_schema=False)
@router.post("/v1/score", response_class=Response, responses=SCORES, openapi_extra=described(ScoreRequest))
async def score(payload: ScoreBody, app: AppDep, caller: UserDep, request: Request) -> Response:
    """Score the relevance of documents to queries, with a reranker."""
    return await score_pairs(app, caller, request, payload)
