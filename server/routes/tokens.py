"""POST /tokenize, /detokenize and /apply-template: what the model sees, without generating."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends

from ..answer import check_token_ids, text_error
from ..body import body, described
from ..conversation import as_tools
from ..errors import OPENAI_ERRORS
from ..limits import user
from ..prompts import TextTooLong
from ..protocol.chat import as_dicts
from ..protocol.tokens import Detokenized, DetokenizeRequest, Templated, TemplateRequest, TokenizeRequest, Tokens
from ..rendering import TemplateError
from ..state import AppDep, Pequod

router = APIRouter(tags=["tokens"], dependencies=[Depends(user)])
ERRORS: dict[int | str, dict[str, Any]] = {status: OPENAI_ERRORS[status] for status in (400, 401, 404, 413, 503)}


@router.post("/tokenize", responses=ERRORS, openapi_extra=described(TokenizeRequest))
async def tokenize(asked: Annotated[TokenizeRequest, Depends(body(TokenizeRequest))], app: AppDep) -> Tokens:
    """Token ids of a text, or of a conversation as the chat template writes it."""
    check(app, asked.model)
    assert app.prompts is not None and app.engine.info is not None
    ids = await encode(app, asked)
    return Tokens(
        count=len(ids),
        max_model_len=app.engine.info.max_len,
        tokens=ids,
        token_strs=await app.prompts.tokens(ids) if asked.return_token_strs else None,
    )


@router.post("/detokenize", responses=ERRORS, openapi_extra=described(DetokenizeRequest))
async def detokenize(asked: Annotated[DetokenizeRequest, Depends(body(DetokenizeRequest))], app: AppDep) -> Detokenized:
    """The text of token ids, special tokens written out."""
    check(app, asked.model)
    assert app.prompts is not None and app.engine.info is not None
    check_token_ids(app.engine.info, asked.tokens, "tokens")
    return Detokenized(prompt=await app.prompts.decode(asked.tokens, skip_special=False))


@router.post("/apply-template", responses=ERRORS, openapi_extra=described(TemplateRequest))
async def apply_template(asked: Annotated[TemplateRequest, Depends(body(TemplateRequest))], app: AppDep) -> Templated:
    """The prompt that the chat template makes of a conversation."""
    check(app, asked.model)
    assert app.prompts is not None
    try:
        text = await app.prompts.render(as_dicts(asked.messages), as_tools(asked.offered), **asked.render_options)
        ids = await app.prompts.encode(text, add_special=False)
    except (TemplateError, TextTooLong) as error:
        raise text_error(error, "messages") from None
    return Templated(prompt=text, count=len(ids))


def check(app: Pequod, model: str | None) -> None:
    """Raise unless this server has the model and has loaded it."""
    app.check_model(model)
    app.require_ready()


async def encode(app: Pequod, asked: TokenizeRequest) -> list[int]:
    assert app.prompts is not None
    try:
        if asked.prompt is not None:
            return await app.prompts.encode(asked.prompt, asked.add_special_tokens is not False)
        return await app.prompts.chat(as_dicts(asked.messages or []), as_tools(asked.offered), **asked.render_options)
    except (TemplateError, TextTooLong) as error:
        raise text_error(error, "messages" if asked.prompt is None else "prompt") from None
