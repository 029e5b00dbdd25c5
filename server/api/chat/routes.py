"""POST /v1/chat/completions."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response

from ...generation.http_response import answer
from ...http.auth import UserDep
from ...http.body import body, described, streamed
from ...http.errors import OPENAI_ERRORS
from ...state import AppDep
from .request import ChatRequest
from .response import ChatAnswer, ChatChunk, ChatWriter

router = APIRouter(tags=["generation"])

STREAM = (
    'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1767225600,"model":"builtin",'
    '"system_fingerprint":"fp_0","choices":[{"index":0,"delta":{"content":"Hello"},"logprobs":null,'
    '"finish_reason":null}]}\n\ndata: [DONE]\n\n'
)
ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {
        "model": ChatAnswer,
        "description": "The answer; with stream true its pieces, as events that each hold a chat.completion.chunk",
        "content": streamed(ChatChunk, STREAM),
    },
    **OPENAI_ERRORS,
}


@router.post("/v1/chat/completions", response_class=Response, responses=ANSWERS, openapi_extra=described(ChatRequest))
async def chat(
    asked: Annotated[ChatRequest, Depends(body(ChatRequest))], app: AppDep, caller: UserDep, request: Request
) -> Response:
    """The next message of a conversation."""
    return await answer(app, caller, request, asked.resolve(), write=partial(ChatWriter, asked), prefix="chatcmpl-")
