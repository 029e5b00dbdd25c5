"""POST /v1/completions."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response

from ...generation.http_response import respond
from ...http.auth import UserDep
from ...http.body import body
from ...http.errors import OPENAI_ERRORS
from ...http.openapi import described, events, returned
from ...state import AppDep
from .request import CompletionRequest
from .response import Completion, CompletionWriter

router = APIRouter(tags=["generation"])

CompletionBody = Annotated[CompletionRequest, Depends(body(CompletionRequest))]

STREAM = (
    'data: {"id":"cmpl-1","object":"text_completion","created":1767225600,"model":"builtin",'
    '"system_fingerprint":"fp_0","choices":[{"index":0,"text":" the sea","logprobs":null,"finish_reason":null}]}\n\n'
    "data: [DONE]\n\n"
)
RETURNS = returned(
    Completion,
    "The continuations; with stream true their pieces, as events that each hold a text_completion",
    OPENAI_ERRORS,
    **events(Completion, STREAM),
)


@router.post("/v1/completions", response_class=Response, responses=RETURNS, openapi_extra=described(CompletionRequest))
async def completions(payload: CompletionBody, app: AppDep, caller: UserDep, request: Request) -> Response:
    """Generate continuations of prompts that are texts or token ids."""
    return await respond(
        app, caller, request, payload.resolve(), write=partial(CompletionWriter, payload), prefix="cmpl-"
    )
