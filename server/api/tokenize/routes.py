"""POST /tokenize, /detokenize and /apply-template: prompts, without generating."""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends, Request, Response

from ...generation.prepare import as_tools, check_token_ids, refusals
from ...http.admission import Caller
from ...http.auth import UserDep
from ...http.body import body
from ...http.disconnect import while_connected
from ...http.errors import CONTEXT_CODE, OPENAI_ERRORS, invalid
from ...http.openapi import Responses, described, returned
from ...loading import LoadedModel
from ...state import AppDep, AppState
from ...tokenization.encoder import Prompts
from ...tokenization.renderer import MAX_CHARACTERS
from ..chat.request import as_dicts
from .request import Detokenized, DetokenizeRequest, Templated, TemplateRequest, TokenizeRequest, Tokens

router = APIRouter(tags=["tokens"])

TokenizeBody = Annotated[TokenizeRequest, Depends(body(TokenizeRequest))]
DetokenizeBody = Annotated[DetokenizeRequest, Depends(body(DetokenizeRequest))]
TemplateBody = Annotated[TemplateRequest, Depends(body(TemplateRequest))]
ERRORS: Responses = {status: OPENAI_ERRORS[status] for status in (400, 401, 404, 408, 413, 429, 503)}
RETURNS = returned(Tokens, "The tokens", ERRORS)


@router.post("/tokenize", response_class=Response, responses=RETURNS, openapi_extra=described(TokenizeRequest))
async def tokenize(payload: TokenizeBody, app: AppDep, caller: UserDep, request: Request) -> Response:
    """Return the token ids of a text, or of a conversation as the chat template renders it."""
    model = loaded(app, payload.model)

    async def work() -> Tokens:
        ids = await encode(model.prompts, caller, payload)
        spelt = await model.prompts.tokens(ids, caller=caller.flow) if payload.return_token_strs else None
        return Tokens(count=len(ids), max_model_len=model.info.max_len, tokens=ids, token_strs=spelt)

    # Encoded with msgspec: with a pydantic model many tokens would block the event loop for ten times as long.
    return Response(msgspec.json.encode(await while_connected(request, work())), media_type="application/json")


@router.post("/detokenize", responses=ERRORS, openapi_extra=described(DetokenizeRequest))
async def detokenize(payload: DetokenizeBody, app: AppDep, caller: UserDep) -> Detokenized:
    """Return the text of token ids, including special tokens."""
    model = loaded(app, payload.model)
    check_token_ids(model.info, payload.tokens, "tokens")
    text = await model.prompts.decode(payload.tokens, skip_special=False, caller=caller.flow)
    if len(text) > MAX_CHARACTERS:  # token ids can have a hundred times as much text as the body
        message = f"their text has {len(text)} characters, and may have {MAX_CHARACTERS}"
        raise invalid(f"Invalid 'tokens': {message}.", "tokens", CONTEXT_CODE)
    return Detokenized(prompt=text)


@router.post("/apply-template", responses=ERRORS, openapi_extra=described(TemplateRequest))
async def apply_template(payload: TemplateBody, app: AppDep, caller: UserDep, request: Request) -> Templated:
    """Return the prompt that the chat template renders for a conversation."""
    prompts = loaded(app, payload.model).prompts

    async def work() -> Templated:
        messages, tools = as_dicts(payload.messages), as_tools(payload.offered)
        text = await prompts.render(messages, tools, caller=caller.flow, **payload.render_options)
        ids = await prompts.encode(text, add_special=False, caller=caller.flow, fits=False)
        return Templated(prompt=text, count=len(ids))

    with refusals("messages"):
        return await while_connected(request, work())


def loaded(app: AppState, name: str | None) -> LoadedModel:
    """Return the model of this name; raises 404 and 503."""
    app.check_model(name)
    return app.require_ready()


async def encode(prompts: Prompts, caller: Caller, payload: TokenizeRequest) -> list[int]:
    with refusals("messages" if payload.prompt is None else "prompt"):
        if payload.prompt is not None:
            special = payload.add_special_tokens is not False
            return await prompts.encode(payload.prompt, special, caller=caller.flow, fits=False)
        messages, tools = as_dicts(payload.messages or []), as_tools(payload.offered)
        return await prompts.chat(messages, tools, caller=caller.flow, fits=False, **payload.render_options)
