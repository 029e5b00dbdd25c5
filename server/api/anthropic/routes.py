"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's form, which coding agents use."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response

from ...generation.http_response import respond
from ...http.auth import UserDep
from ...http.body import body
from ...http.errors import OPENAI_ERRORS
from ...http.openapi import described, events, returned
from ...state import AppDep
from .. import conversation
from .errors import MessagesError
from .request import CountTokensRequest, MessagesRequest
from .response import Message, MessagesEvent, MessagesWriter, TokenCount

router = APIRouter(tags=["generation"])

MessagesBody = Annotated[MessagesRequest, Depends(body(MessagesRequest))]
CountTokensBody = Annotated[CountTokensRequest, Depends(body(CountTokensRequest))]

STREAM = (
    'event: message_start\ndata: {"type":"message_start","message":{"id":"msg_1","type":"message","role":"assistant",'
    '"model":"builtin","content":[],"stop_reason":null,"stop_sequence":null,"usage":{"input_tokens":14,'
    '"cache_creation_input_tokens":0,"cache_read_input_tokens":0,"output_tokens":0,"output_tokens_details":'
    '{"thinking_tokens":0},"service_tier":"standard"}}}\n\n'
    'event: ping\ndata: {"type":"ping"}\n\n'
    'event: content_block_start\ndata: {"type":"content_block_start","index":0,"content_block":{"type":"text",'
    '"text":""}}\n\n'
    'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta",'
    '"text":"Hello"}}\n\n'
    'event: content_block_stop\ndata: {"type":"content_block_stop","index":0}\n\n'
    'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":"end_turn","stop_sequence":null},'
    '"usage":{"input_tokens":14,"cache_creation_input_tokens":0,"cache_read_input_tokens":0,"output_tokens":2,'
    '"output_tokens_details":{"thinking_tokens":0},"service_tier":"standard"}}\n\n'
    'event: message_stop\ndata: {"type":"message_stop"}\n\n'
)
ERRORS: dict[int | str, dict[str, Any]] = {
    status: returned(MessagesError, error["description"], {})[200] for status, error in OPENAI_ERRORS.items()
}
RETURNS = returned(
    Message,
    "The message; with stream true the events that make it",
    ERRORS,
    **events(MessagesEvent, STREAM, is_typed=True),
)
COUNT_ERRORS: dict[int | str, dict[str, Any]] = {status: ERRORS[status] for status in (400, 401, 404, 413, 503)}


@router.post("/v1/messages", response_class=Response, responses=RETURNS, openapi_extra=described(MessagesRequest))
async def messages(payload: MessagesBody, app: AppDep, caller: UserDep, request: Request) -> Response:
    """Generate the next message of a conversation, in Anthropic's form."""
    return await respond(app, caller, request, payload.resolve(), write=partial(MessagesWriter, payload), prefix="msg_")


@router.post("/v1/messages/count_tokens", responses=COUNT_ERRORS, openapi_extra=described(CountTokensRequest))
async def count_tokens(payload: CountTokensBody, app: AppDep, caller: UserDep, request: Request) -> TokenCount:
    """Count the tokens of the prompt of such a message, without generating."""
    count = await conversation.count_tokens(
        app, caller, request, payload.model, payload.prompt_source, field="messages"
    )
    return TokenCount(input_tokens=count)
