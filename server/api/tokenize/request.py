"""Requests and responses about tokens: text to ids, ids to text, and the prompt that a chat template renders."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field, model_validator

from ...http.fields import Refused, Wire, clash, refused
from ...http.openapi import JsonObject, examples
from ..chat.request import Messages, TemplateOptions
from ..completions.request import MAX_PROMPT_IDS
from ..sampling import ModelName, Text, TokenId


class TokenizeRequest(TemplateOptions):
    """POST /tokenize: a text, or a conversation."""

    model_config = examples(
        {"prompt": "The sea is", "return_token_strs": True}, {"messages": [{"role": "user", "content": "Hello"}]}
    )

    model: ModelName = None
    prompt: Text | None = None
    """The text; instead of messages."""
    messages: Messages | None = None
    """The conversation, which the chat template renders; instead of prompt."""
    add_special_tokens: bool | None = None
    """false: the text does not get the tokens that the tokenizer puts around one."""
    return_token_strs: bool | None = None
    """true: the response has the vocabulary's spelling of each token."""

    @model_validator(mode="after")
    def _one_of_them(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise clash("give either prompt or messages")
        if self.messages is not None and self.add_special_tokens:
            raise clash("add_special_tokens goes with prompt: a chat template writes them itself")
        given = TemplateOptions.model_fields.keys() & {name for name, value in self if value is not None}
        if self.messages is None and given:
            raise clash("chat template options go with messages")
        return self


class Tokens(JsonObject):
    """Token ids, their number, and the length of the context."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeRequest(Wire):
    """POST /detokenize."""

    model_config = examples({"tokens": [11, 12]})

    model: ModelName = None
    tokens: Annotated[list[TokenId], Field(max_length=MAX_PROMPT_IDS, fail_fast=True)]
    """The token ids."""


class Detokenized(Wire):
    """The tokens' text, including special tokens."""

    prompt: str


class TemplateRequest(TemplateOptions):
    """POST /apply-template."""

    model_config = examples({"messages": [{"role": "user", "content": "Hello"}]})

    model: ModelName = None
    messages: Messages
    """The conversation."""
    unsupported: ClassVar[dict[str, Refused]] = {"add_special_tokens": refused(False)}


class Templated(Wire):
    """The prompt that the chat template renders."""

    prompt: str
    count: int
