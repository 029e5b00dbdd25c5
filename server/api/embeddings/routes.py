"""POST /v1/embeddings."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response

from ...http.auth import UserDep
from ...http.body import body
from ...http.errors import OPENAI_ERRORS
from ...http.openapi import described, returned
from ...state import AppDep
from .request import EmbeddingRequest
from .response import EmbeddingList, embed

router = APIRouter(tags=["generation"])

EmbeddingBody = Annotated[EmbeddingRequest, Depends(body(EmbeddingRequest))]

RETURNS = returned(EmbeddingList, "A vector of length 1 for each input", OPENAI_ERRORS)


@router.post("/v1/embeddings", response_class=Response, responses=RETURNS, openapi_extra=described(EmbeddingRequest))
async def embeddings(payload: EmbeddingBody, app: AppDep, caller: UserDep, request: Request) -> Response:
    """Compute vectors of texts or token ids from the model's last hidden states."""
    return await embed(app, caller, request, payload)
