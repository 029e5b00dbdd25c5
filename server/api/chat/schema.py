"""The response object of chat completions and the chunks of a stream."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, UnsetType

from ...generation.output import FinishReason, Logprob, PromptLogprobs, StopReason, Usage
from ...http.openapi import JsonObject


class ChatLogprobs(JsonObject):
    """One entry per token, including the one that ended the completion."""

    content: list[Logprob] | None
    refusal: None = None


class FunctionCall(JsonObject):
    """The name of a function and its arguments as JSON text."""

    name: str
    arguments: str


class MessageCall(JsonObject, tag_field="type", tag="function"):
    """A call of a function."""

    id: str
    function: FunctionCall


class CustomCall(JsonObject):
    """The name of a custom tool and its input as text."""

    name: str
    input: str


class MessageCustomCall(JsonObject, tag_field="type", tag="custom"):
    """A call of a custom tool."""

    id: str
    custom: CustomCall


class ChatMessage(JsonObject):
    """The assistant's message."""

    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    """The same as reasoning_content, which some clients read under this name."""
    tool_calls: list[MessageCall | MessageCustomCall] | UnsetType = UNSET


class ChatChoice(JsonObject, kw_only=True):
    """One of n completions."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: StopReason
    token_ids: tuple[int, ...] | UnsetType = UNSET


class ChatCompletion(JsonObject, kw_only=True):
    """All choices in one object."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    service_tier: Literal["default"] | UnsetType = UNSET
    usage: Usage
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET
    metadata: dict[str, str] | UnsetType = UNSET


class DeltaFunction(JsonObject):
    """The first piece of a call has its name; every piece may have more of its arguments."""

    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class DeltaCustom(JsonObject):
    """The first piece of a call of a custom tool has its name; the input comes whole, when the call is complete."""

    name: str | UnsetType = UNSET
    input: str | UnsetType = UNSET


class DeltaCall(JsonObject, kw_only=True):
    """What a chunk adds to call number `index`."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function", "custom"] | UnsetType = UNSET
    function: DeltaFunction | UnsetType = UNSET
    custom: DeltaCustom | UnsetType = UNSET


class Delta(JsonObject):
    """What a chunk adds to the message."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    refusal: UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    """The same as reasoning_content, which some clients read under this name."""
    tool_calls: list[DeltaCall] | UnsetType = UNSET


class ChunkChoice(JsonObject):
    """A choice's part of a chunk."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: StopReason | UnsetType = UNSET
    token_ids: tuple[int, ...] | UnsetType = UNSET


class ChatCompletionChunk(JsonObject, kw_only=True):
    """One event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoice]
    service_tier: Literal["default"] | UnsetType = UNSET
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
