"""Completions on the wire: prompts as text or token ids in, their continuations out."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag, field_validator
from pydantic_core.core_schema import ValidationInfo

from .common import (
    Head,
    Json,
    Output,
    Prompt,
    Text,
    TokenId,
    TokenText,
    Usage,
    Wire,
    Writer,
    clash,
    number,
    refused,
)
from .formats import Structured

MAX_PROMPTS = 256  # of one request: as many as wait in the default queue
MAX_PROMPT_IDS = 1 << 20  # tokens; a bound for the parser, the model's own is far below
DEFAULT_MAX_TOKENS = 16

Ids = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_PROMPT_IDS, fail_fast=True)]
Texts = Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
IdLists = Annotated[list[Ids], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]


def _form(value: Any) -> str:
    """Which form a prompt has, by its first element: trying all of them would cost an error per token."""
    if not isinstance(value, list):
        return "text"
    first = value[0] if value else ""
    return "texts" if isinstance(first, str) else "id_lists" if isinstance(first, list) else "ids"


class CompletionRequest(Structured):
    """POST /v1/completions."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"model": "builtin", "prompt": "The sea is", "max_tokens": 16},
                {
                    "model": "builtin",
                    "prompt": [[11, 12], [13]],
                    "temperature": 0,
                    "n": 2,
                    "stop": ["."],
                    "logprobs": 2,
                },
            ]
        }
    )

    prompt: Annotated[
        Annotated[Text, Tag("text")]
        | Annotated[Texts, Tag("texts")]
        | Annotated[Ids, Tag("ids")]
        | Annotated[IdLists, Tag("id_lists")],
        Discriminator(_form),
    ]

    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None

    return_tokens_as_token_ids: Annotated[Any, refused(False)] = None
    suffix: Annotated[Any, refused()] = None

    @field_validator("echo")
    @classmethod
    def _without_logprobs(cls, value: bool | None, info: ValidationInfo) -> bool | None:
        if value and info.data.get("logprobs") is not None:
            raise clash("this server does not support it together with logprobs yet")
        return value

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts, each by itself."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt

    @property
    def num_prompts(self) -> int:
        return len(self.prompts)

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs


class CompletionWriter(Writer):
    """text_completion, whole and in chunks. Choices are numbered prompt by prompt."""

    def __init__(self, request: CompletionRequest, head: Head, prompts: list[Prompt], token_text: TokenText) -> None:
        super().__init__(head, prompts, token_text)
        self.request = request

    def opening(self, usage: Json | None) -> list[Json]:
        """The prompts, where the answer begins with them."""
        if not (self.request.echo or self.request.return_token_ids):
            return []
        choices = [self._choice(i, self._echo(i)) | self._prompt_ids(i) for i in range(self._num_choices)]
        return [self._chunk([choice], usage) for choice in choices]

    def chunks(self, output: Output, usage: Json | None) -> list[Json]:
        """The text in one chunk, the end in one of its own."""
        chunks = []
        if output.text or (output.token_ids and (output.logprobs or self.request.return_token_ids)):
            choice = self._choice(output.choice, output.text) | self._logprobs(output) | self._ids(output)
            chunks.append(self._chunk([choice], usage))
        if output.finish_reason:
            chunks.append(self._chunk([self._choice(output.choice, "", output.finish_reason)], usage))
        return chunks

    def closing(self, usage: Json) -> list[Json]:
        return [self._chunk([], usage)] if self.request.include_usage else []

    def whole(self, outputs: list[Output], usage: Json) -> Json:
        choices = [
            self._choice(output.choice, self._echo(output.choice) + output.text, output.finish_reason)
            | self._logprobs(output)
            | self._prompt_ids(output.choice)
            | self._ids(output)
            for output in outputs
        ]
        return self._object(choices) | {"usage": usage}

    @property
    def _num_choices(self) -> int:
        return len(self.prompts) * self.request.num_choices

    def _prompt(self, index: int) -> Prompt:
        return self.prompts[index // self.request.num_choices]

    def _object(self, choices: list[Json]) -> Json:
        head = self.head
        return {
            "id": head.id,
            "object": "text_completion",
            "created": head.created,
            "model": head.model,
            "system_fingerprint": head.fingerprint,
            "choices": choices,
        }

    def _chunk(self, choices: list[Json], usage: Json | None = None) -> Json:
        chunk = self._object(choices)
        if usage is not None or self.request.include_usage:
            chunk["usage"] = usage
        return chunk

    def _choice(self, index: int, text: str, finish_reason: str | None = None) -> Json:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}

    def _echo(self, index: int) -> str:
        return self._prompt(index).echo

    def _prompt_ids(self, index: int) -> Json:
        return {"prompt_token_ids": self._prompt(index).ids} if self.request.return_token_ids else {}

    def _ids(self, output: Output) -> Json:
        return {"token_ids": output.token_ids} if self.request.return_token_ids else {}

    def _logprobs(self, output: Output) -> Json:
        if self.request.logprobs is None:
            return {}
        top = []
        for token_id, entry in zip(output.token_ids, output.logprobs, strict=True):
            # The drawn token is always among them, so that there is one more where it is not likely.
            pairs = [*zip(entry.top_ids, entry.top_logprobs, strict=True), (token_id, entry.logprob)]
            texts: dict[str, float] = {}
            for other, logprob in pairs:
                texts.setdefault(self.token_text(other)[0], number(logprob))
            top.append(texts)
        return {
            "logprobs": {
                "tokens": [self.token_text(token_id)[0] for token_id in output.token_ids],
                "token_logprobs": [number(entry.logprob) for entry in output.logprobs],
                "top_logprobs": top,
                "text_offset": output.offsets,
            }
        }


class CompletionLogprobs(Wire):
    """Columns with one element per token, the one that ended the answer included."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(Wire):
    """One continuation of one prompt, or a chunk's part of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class CompletionAnswer(Wire):
    """The answer in one object, or one event of a stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
