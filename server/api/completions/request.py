"""Requests for completions: prompts as text or token ids."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from msgspec.structs import replace
from pydantic import Field, Tag, ValidationInfo, field_validator

from ...generation.request import UNLIMITED, GenerationRequest, TextPrompts
from ...http.fields import Refused, chosen_by, clash, refused
from ...http.openapi import examples
from ..response_format import FormatFields
from ..sampling import MAX_INT, MAX_LOGPROBS, MAX_TEXT, Text, TokenId

MAX_PROMPTS = 256  # of one request: as many as wait in the default queue
MAX_PROMPT_IDS = 1 << 20  # tokens; a bound for the parser, the model's own is far below
DEFAULT_MAX_TOKENS = 16

Ids = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_PROMPT_IDS, fail_fast=True)]
Texts = Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
IdLists = Annotated[list[Ids], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]


def form(value: Any) -> str | None:
    """Return the form of a prompt, by its first element: trying all of them would cost an error per token."""
    if not isinstance(value, list):
        return "text" if isinstance(value, str) else None
    first = value[0] if value else ""
    return "texts" if isinstance(first, str) else "id_lists" if isinstance(first, list) else "ids"


def listed(value: Any) -> list[str] | list[list[int]]:
    """Return the prompts of a value of any form as a list."""
    return [value] if form(value) in ("text", "ids") else value


class CompletionRequest(FormatFields):
    """POST /v1/completions."""

    model_config = examples(
        {"model": "builtin", "prompt": "The sea is", "max_tokens": 16},
        {"model": "builtin", "prompt": [[11, 12], [13]], "temperature": 0, "n": 2, "stop": ["."], "logprobs": 2},
    )

    prompt: Annotated[
        Annotated[Text, Tag("text")]
        | Annotated[Texts, Tag("texts")]
        | Annotated[Ids, Tag("ids")]
        | Annotated[IdLists, Tag("id_lists")],
        chosen_by(form, "a string or an array"),
    ]
    """A text, token ids, or a list of either; each gets n completions."""

    max_tokens: Annotated[int, Field(ge=UNLIMITED, le=MAX_INT)] | None = None
    """The largest number of tokens of a completion; absent: 16; -1: as many as the context holds. 0 only with echo: the
    prompt is scored and nothing is generated."""
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """The response has the log-probability of each token, and of this many most likely ones at its position."""
    echo: bool | None = None
    """The completion begins with the prompt; with logprobs, these begin with the prompt's."""
    suffix: Text | None = None
    """The completion goes between the prompt, which must be a text, and this text; for models with tokens for it."""
    add_special_tokens: bool | None = None
    """false: the tokenizer adds no special tokens to a prompt that is a text."""

    unsupported: ClassVar[dict[str, Refused]] = {
        "prompt_embeds": refused(),
        "thinking_token_budget": refused(-1),
    }

    @field_validator("suffix")
    @classmethod
    def _between_texts(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value and info.data.get("echo"):
            raise clash("must be absent with echo")
        if value and form(info.data.get("prompt", "")) not in ("text", "texts"):
            raise clash("must be absent unless the prompt is a text")
        if value and len(listed(info.data["prompt"])) * len(value) > MAX_TEXT:
            raise clash(f"must have at most {MAX_TEXT} characters together with its copies after the other prompts")
        return value

    @property
    def prompt_source(self) -> TextPrompts:
        return TextPrompts(
            listed(self.prompt),
            add_special=self.add_special_tokens is not False,
            skip_special=self.skip_special_tokens is not False,
            echo=bool(self.echo),
            suffix=self.suffix or "",
        )

    @property
    def is_scored(self) -> bool:
        """Whether the completion waits for the prompt's log-probabilities."""
        return self.prompt_logprobs is not None or (bool(self.echo) and self.logprobs is not None)

    def resolve(self) -> GenerationRequest:
        request = super().resolve()
        scoring = request.scoring
        if self.echo and self.logprobs is not None and (scoring is None or 0 <= scoring[1] < self.logprobs):
            scoring = "logprobs", self.logprobs
        return replace(
            request,
            limit=("max_tokens", DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens),
            num_logprobs=self.logprobs,
            scoring=scoring,
            only_scores=bool(self.echo) and self.max_tokens == 0,
        )
