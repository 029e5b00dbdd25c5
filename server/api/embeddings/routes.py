"""POST /v1/embeddings."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response

from ...http.auth import UserDep
from ...http.body import body, described
from ...http.errors import OPENAI_ERRORS
from ...state import AppDep
from .request import EmbeddingAnswer, EmbeddingRequest
from .response import embed

router = APIRouter(tags=["generation"])

ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"model": EmbeddingAnswer, "description": "A vector of length 1 for each input"},
    **OPENAI_ERRORS,
}


@router.post("/v1/embeddings", response_class=Response, responses=ANSWERS, openapi_extra=described(EmbeddingRequest))
async def embeddings(
    asked: Annotated[EmbeddingRequest, Depends(body(EmbeddingRequest))], app: AppDep, caller: UserDep, request: Request
) -> Response:
    """Vectors of texts or token ids, from the last hidden states of the model that is served."""
    return await embed(app, caller, request, asked)
