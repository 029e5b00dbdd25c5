"""The response object of the Responses API, its items, and the events of a stream."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, UnsetType

from ...generation.output import CompletionTokensDetails, Logprob
from ...http.fields import Wire
from ...http.openapi import JsonObject
from .items import ItemStatus

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class ResponseText(JsonObject, tag_field="type", tag="output_text"):
    """Text of a message."""

    text: str
    annotations: list[Any]
    logprobs: list[Logprob]


class ReasoningContent(JsonObject, tag_field="type", tag="reasoning_text"):
    """Text of a reasoning item."""

    text: str


class ResponseMessage(JsonObject, tag_field="type", tag="message"):
    """A message of the model."""

    id: str
    status: ItemStatus
    role: Literal["assistant"]
    content: list[ResponseText]


class ResponseReasoning(JsonObject, tag_field="type", tag="reasoning"):
    """The model's reasoning; it has no summary."""

    id: str
    status: ItemStatus
    summary: list[Any]
    content: list[ReasoningContent]


class AnyCall(JsonObject, kw_only=True):
    """What calls of functions and of custom tools have."""

    id: str
    status: ItemStatus
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET


class ResponseCall(AnyCall, kw_only=True, tag_field="type", tag="function_call"):
    """A call of a function, with its arguments as JSON text."""

    arguments: str


class ResponseCustomCall(AnyCall, kw_only=True, tag_field="type", tag="custom_tool_call"):
    """A call of a custom tool, with its input as text."""

    input: str


ResponseItem = ResponseMessage | ResponseReasoning | ResponseCall | ResponseCustomCall


class ResponseError(JsonObject):
    """Why a response has failed."""

    code: Literal["server_error", "invalid_prompt"]
    message: str


class IncompleteDetails(JsonObject):
    """Why the output was cut off."""

    reason: Literal["max_output_tokens"]


class InputTokensDetails(JsonObject):
    """Details of the prompt's tokens. Caching needs no request here, so no token counts as written by one."""

    cached_tokens: int
    cache_write_tokens: Literal[0] = 0


class ResponseUsage(JsonObject):
    """The number of tokens of a prompt and its response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: CompletionTokensDetails
    total_tokens: int


class ReasoningEffort(JsonObject):
    """The effort that the request has set."""

    effort: str | None
    summary: None = None


class ResponseObject(JsonObject, kw_only=True):
    """The response in one object."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Status
    background: bool
    completed_at: int | None = None
    error: ResponseError | None = None
    frequency_penalty: float
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[ResponseItem]
    parallel_tool_calls: bool
    presence_penalty: float
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ReasoningEffort
    safety_identifier: str | None
    service_tier: Literal["default"] = "default"
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None
    user: str | None
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ResponseEvent(JsonObject, kw_only=True):
    """One event of a stream; its type decides which of the fields it has."""

    type: str
    code: str | UnsetType | None = UNSET
    message: str | UnsetType = UNSET
    param: str | UnsetType | None = UNSET
    sequence_number: int
    response: ResponseObject | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    item: ResponseItem | UnsetType = UNSET
    part: ResponseText | ReasoningContent | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    logprobs: list[Logprob] | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    input: str | UnsetType = UNSET


class ResponseDeleted(Wire):
    """The id of a response that was deleted."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class InputTokens(Wire):
    """The number of tokens of a prompt."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class InputItems(JsonObject):
    """A page of the conversation before a response."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
