"""The response object on the wire, and what stands in it: for the API page, and for tests."""

from __future__ import annotations

from typing import Any, Literal

from ...http.fields import Wire

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
ItemState = Literal["in_progress", "completed", "incomplete"]


class ResponseTopLogprob(Wire):
    """A token that could have been drawn."""

    token: str
    logprob: float
    bytes: list[int]


class ResponseLogprob(ResponseTopLogprob):
    """A token of the text, and the most likely ones in its place."""

    top_logprobs: list[ResponseTopLogprob]


class ResponseText(Wire):
    """The answer's text."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[ResponseLogprob]


class ResponseMessage(Wire):
    """What the model says."""

    id: str
    type: Literal["message"]
    status: ItemState
    role: Literal["assistant"]
    content: list[ResponseText]


class ThoughtText(Wire):
    """What the model thought."""

    type: Literal["reasoning_text"]
    text: str


class ResponseReasoning(Wire):
    """What the model thought before it answered; there is no summary of it."""

    id: str
    type: Literal["reasoning"]
    status: ItemState
    summary: list[Any]
    content: list[ThoughtText]


class ResponseCall(Wire):
    """A call of a function, with its arguments as JSON text."""

    id: str
    type: Literal["function_call"]
    status: ItemState
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str


class ResponseFailure(Wire):
    """Why a response has failed."""

    code: Literal["server_error", "invalid_prompt"]
    message: str


class IncompleteDetails(Wire):
    """Why an answer ended before its end."""

    reason: Literal["max_output_tokens"]


class InputDetails(Wire):
    """What is known about the prompt's tokens."""

    cached_tokens: int
    cache_write_tokens: Literal[0]


class OutputDetails(Wire):
    """What is known about the answer's tokens."""

    reasoning_tokens: int


class ResponseUsage(Wire):
    """What a response cost, in tokens."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ToldReasoning(Wire):
    """How the model was asked to think."""

    effort: str | None
    summary: None


class ResponseAnswer(Wire):
    """The response in one object."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Status
    background: bool
    completed_at: int | None
    error: ResponseFailure | None
    frequency_penalty: float
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[ResponseReasoning | ResponseMessage | ResponseCall]
    parallel_tool_calls: bool
    presence_penalty: float
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ToldReasoning
    safety_identifier: str | None
    service_tier: Literal["default"]
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
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class ResponseEvent(Wire):
    """One event of a stream; its type tells which of the fields it has."""

    type: str
    sequence_number: int
    response: ResponseAnswer | None = None
    output_index: int | None = None
    item: ResponseReasoning | ResponseMessage | ResponseCall | None = None
    item_id: str | None = None
    content_index: int | None = None
    part: ResponseText | ThoughtText | None = None
    delta: str | None = None
    text: str | None = None
    logprobs: list[ResponseLogprob] | None = None
    arguments: str | None = None
    code: str | None = None
    message: str | None = None
    param: str | None = None


class ResponseDeleted(Wire):
    """What is left of a deleted response."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputTokens(Wire):
    """The length of a prompt."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class InputItems(Wire):
    """The conversation up to a response, one page of it."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
