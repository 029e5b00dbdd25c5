"""POST /v1/chat/completions."""

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
from .request import ChatRequest
from .response import ChatWriter
from .schema import ChatCompletion, ChatCompletionChunk

router = APIRouter(tags=["generation"])

ChatBody = Annotated[ChatRequest, Depends(body(ChatRequest))]

STREAM = (
    'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1767225600,"model":"builtin",'
    '"system_fingerprint":"fp_0","choices":[{"index":0,"delta":{"content":"Hello"},"logprobs":null,'
    '"finish_reason":null}]}\n\ndata: [DONE]\n\n'
)
RETURNS = returned(
    ChatCompletion,
    "The completion; with stream true its pieces, as events that each hold a chat.completion.chunk",
    OPENAI_ERRORS,
    **events(ChatCompletionChunk, STREAM),
)


@router.post("/v1/chat/completions", response_class=Response, responses=RETURNS, openapi_extra=described(ChatRequest))
async def chat(payload: ChatBody, app: AppDep, caller: UserDep, request: Request) -> Response:
    """Generate the next message of a conversation."""
    return await respond(
        app, caller, request, payload.resolve(), write=partial(ChatWriter, payload), prefix="chatcmpl-"
    )
