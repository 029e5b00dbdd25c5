"""Requests for embeddings: texts or token ids."""

from __future__ import annotations

import base64
import struct
from typing import Annotated, ClassVar, Literal

import msgspec
from pydantic import Field, Tag, field_validator
from pydantic_core.core_schema import ValidationInfo

from ...http.fields import Refused, Wire, chosen_by, clash, refused
from ...http.openapi import examples
from ..completions.request import Ids, form, listed
from ..sampling import MAX_TEXT, CacheSalt, Count, Limit, ModelName, Priority, User

MAX_INPUTS = 2048  # of one request, as OpenAI has it
AS_TEXT = "send the prompt that /apply-template returns as input"

Text = Annotated[str, Field(min_length=1, max_length=MAX_TEXT)]
Texts = Annotated[list[Text], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]
IdLists = Annotated[list[Ids], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]


class EmbeddingRequest(Wire):
    """POST /v1/embeddings."""

    model_config = examples(
        {"model": "builtin", "input": "The sea is", "dimensions": 8},
        {"model": "builtin", "input": ["a whale", "a ship"], "pooling": "mean", "encoding_format": "base64"},
    )

    model: ModelName = None
    input: Annotated[
        Annotated[Text, Tag("text")]
        | Annotated[Texts, Tag("texts")]
        | Annotated[Ids, Tag("ids")]
        | Annotated[IdLists, Tag("id_lists")],
        chosen_by(form, "a string or an array"),
    ]
    """A text, token ids, or a list of either; the response has a vector for each, in their order."""
    encoding_format: Literal["float", "base64"] | None = None
    """float: numbers; base64: the bytes of little-endian float32, which are shorter."""
    dimensions: Count | None = None
    """The number of leading components to return, normalized to length 1; at most the model's hidden size."""
    pooling: Literal["last", "mean"] | None = None
    """last: the last token's hidden state; mean: the mean over all tokens, which does not use the prefix cache, since
    that has no hidden states."""

    add_special_tokens: bool | None = None
    """false: the tokenizer adds no special tokens to a text."""
    truncate_prompt_tokens: Limit | None = None
    """The length in tokens to which longer inputs are cut; -1: the context's. Absent: they are a 400."""
    truncation_side: Literal["left", "right"] | None = None
    """The end that is cut off: left, the default, keeps the last tokens, right the first; only with
    truncate_prompt_tokens."""
    priority: Priority = None
    cache_salt: CacheSalt = None

    user: User = None

    # vLLM's and llama.cpp's
    unsupported: ClassVar[dict[str, Refused]] = {
        "add_generation_prompt": refused(False, hint=AS_TEXT),
        "chat_template": refused(hint=AS_TEXT),
        "chat_template_kwargs": refused({}, hint=AS_TEXT),
        "content": refused(hint="send input instead"),
        "continue_final_message": refused(False, hint=AS_TEXT),
        "embd_normalize": refused(2, hint="vectors have length 1"),
        "embed_dtype": refused("float32"),
        "endianness": refused("native", "little", hint="base64 is little-endian"),
        "media_io_kwargs": refused({}),
        "messages": refused(hint=AS_TEXT),
        "mm_processor_kwargs": refused({}),
        "normalize": refused(True, hint="vectors have length 1"),
        "padding": refused("do_not_pad"),
        "request_id": refused(hint="send the header X-Request-Id instead"),
        "task": refused("embed"),
        "use_activation": refused(True, hint="vectors have length 1"),
    }

    @field_validator("truncation_side")
    @classmethod
    def _of_something(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and info.data.get("truncate_prompt_tokens") is None:
            raise clash("must be absent unless truncate_prompt_tokens is set")
        return value

    @property
    def inputs(self) -> list[str] | list[list[int]]:
        return listed(self.input)

    def cut(self, ids: list[int], longest: int) -> list[int]:
        """Return the ids cut to the requested length; `longest` is that of the context."""
        most = self.truncate_prompt_tokens
        if most is None:
            return ids
        most = longest if most == -1 else most
        return ids[:most] if self.truncation_side == "right" else ids[-most:]

    def written(self, embedding: bytes) -> msgspec.Raw:
        """Return a vector (float32, little-endian) as JSON; 9 significant digits represent a float32 exactly."""
        if self.encoding_format == "base64":
            return msgspec.Raw(b'"' + base64.b64encode(embedding) + b'"')
        numbers = struct.unpack(f"<{len(embedding) // 4}f", embedding)
        return msgspec.Raw(b"[" + b",".join([b"%.9g" % number for number in numbers]) + b"]")
