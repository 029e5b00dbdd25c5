"""POST /v1/completions."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response

from ...generation.http_response import answer, check_token_ids
from ...generation.output import Prompt
from ...http.admission import Caller
from ...http.auth import UserDep
from ...http.body import body, described, streamed
from ...http.errors import OPENAI_ERRORS
from ...loading import LoadedModel
from ...state import AppDep
from .request import DEFAULT_MAX_TOKENS, CompletionAnswer, CompletionRequest, CompletionWriter

router = APIRouter(tags=["generation"])

STREAM = (
    'data: {"id":"cmpl-1","object":"text_completion","created":1767225600,"model":"builtin",'
    '"system_fingerprint":"fp_0","choices":[{"index":0,"text":" the sea","logprobs":null,"finish_reason":null}]}\n\n'
    "data: [DONE]\n\n"
)
ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {
        "model": CompletionAnswer,
        "description": "The continuations; with stream true their pieces, as events that each hold a text_completion",
        "content": streamed(CompletionAnswer, STREAM),
    },
    **OPENAI_ERRORS,
}


@router.post("/v1/completions", response_class=Response, responses=ANSWERS, openapi_extra=described(CompletionRequest))
async def completions(
    asked: Annotated[CompletionRequest, Depends(body(CompletionRequest))],
    app: AppDep,
    caller: UserDep,
    request: Request,
) -> Response:
    """Continuations of prompts that are texts or token ids."""
    return await answer(
        app,
        caller,
        request,
        asked,
        encode=encode,
        write=CompletionWriter,
        prefix="cmpl-",
        default_max_tokens=DEFAULT_MAX_TOKENS,
    )


async def encode(model: LoadedModel, caller: Caller, asked: CompletionRequest) -> list[Prompt]:
    """The prompts as token ids, each with its text where the answer is to begin with it."""
    prompts = []
    for given in asked.prompts:
        text = ""
        offsets: list[int] = []
        if isinstance(given, str):
            special = asked.add_special_tokens is not False
            if asked.echo:
                text = given
                ids, offsets = await model.prompts.echoed(given, special, caller=caller.flow)
            else:
                ids = await model.prompts.encode(given, special, caller=caller.flow)
        else:
            check_token_ids(model.info, given, "prompt")
            ids = given
            if asked.echo:
                skips = asked.skip_special_tokens is not False
                text, offsets = await model.prompts.spelt(ids, skips, caller=caller.flow)
        prompts.append(Prompt(tuple(ids), text, tuple(offsets)))
    return prompts
