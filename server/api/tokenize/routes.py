"""POST /tokenize, /detokenize and /apply-template: what the model sees, without generating."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request

from ...generation.prepare import as_tools, check_token_ids, text_error
from ...http.admission import Caller
from ...http.auth import UserDep
from ...http.body import body
from ...http.disconnect import while_connected
from ...http.errors import OPENAI_ERRORS
from ...http.openapi import described
from ...loading import LoadedModel
from ...state import AppDep, AppState
from ...tokenization.encoder import Prompts, TextTooLong
from ...tokenization.renderer import TemplateError
from ..chat.request import as_dicts
from .request import Detokenized, DetokenizeRequest, Templated, TemplateRequest, TokenizeRequest, Tokens

router = APIRouter(tags=["tokens"])
ERRORS: dict[int | str, dict[str, Any]] = {
    status: OPENAI_ERRORS[status] for status in (400, 401, 404, 408, 413, 429, 503)
}


@router.post("/tokenize", responses=ERRORS, openapi_extra=described(TokenizeRequest))
async def tokenize(
    asked: Annotated[TokenizeRequest, Depends(body(TokenizeRequest))], app: AppDep, caller: UserDep, request: Request
) -> Tokens:
    """Token ids of a text, or of a conversation as the chat template writes it."""
    model = loaded(app, asked.model)
    ids = await while_connected(request, encode(model.prompts, caller, asked))
    return Tokens(
        count=len(ids),
        max_model_len=model.info.max_len,
        tokens=ids,
        token_strs=await model.prompts.tokens(ids, caller=caller.flow) if asked.return_token_strs else None,
    )


@router.post("/detokenize", responses=ERRORS, openapi_extra=described(DetokenizeRequest))
async def detokenize(
    asked: Annotated[DetokenizeRequest, Depends(body(DetokenizeRequest))], app: AppDep, caller: UserDep
) -> Detokenized:
    """The text of token ids, special tokens written out."""
    model = loaded(app, asked.model)
    check_token_ids(model.info, asked.tokens, "tokens")
    return Detokenized(prompt=await model.prompts.decode(asked.tokens, skip_special=False, caller=caller.flow))


@router.post("/apply-template", responses=ERRORS, openapi_extra=described(TemplateRequest))
async def apply_template(
    asked: Annotated[TemplateRequest, Depends(body(TemplateRequest))], app: AppDep, caller: UserDep, request: Request
) -> Templated:
    """The prompt that the chat template makes of a conversation."""
    prompts = loaded(app, asked.model).prompts

    async def work() -> Templated:
        messages, tools = as_dicts(asked.messages), as_tools(asked.offered)
        text = await prompts.render(messages, tools, caller=caller.flow, **asked.render_options)
        ids = await prompts.encode(text, add_special=False, caller=caller.flow, fits=False)
        return Templated(prompt=text, count=len(ids))

    try:
        return await while_connected(request, work())
    except (TemplateError, TextTooLong) as error:
        raise text_error(error, "messages") from None


def loaded(app: AppState, name: str | None) -> LoadedModel:
    """The model of this name; raises 404 and 503."""
    app.check_model(name)
    return app.require_ready()


async def encode(prompts: Prompts, caller: Caller, asked: TokenizeRequest) -> list[int]:
    try:
        if asked.prompt is not None:
            special = asked.add_special_tokens is not False
            return await prompts.encode(asked.prompt, special, caller=caller.flow, fits=False)
        messages, tools = as_dicts(asked.messages or []), as_tools(asked.offered)
        return await prompts.chat(messages, tools, caller=caller.flow, fits=False, **asked.render_options)
    except (TemplateError, TextTooLong) as error:
        raise text_error(error, "messages" if asked.prompt is None else "prompt") from None
