"""Chat completions on the wire: a conversation in, the assistant's next message out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator
from pydantic_core.core_schema import ValidationInfo

from engine import TokenLogprob

from .common import (
    MAX_LOGPROBS,
    Count,
    Head,
    Json,
    Output,
    Prompt,
    PromptLogprobs,
    Text,
    TokenText,
    Usage,
    Writer,
    number,
)
from .formats import Structured
from .wire import LABEL, MAX_LABEL, OneError, Wire, clash, refused

if TYPE_CHECKING:
    from ..prompts import RenderOptions

MAX_MESSAGES = 4096
MAX_PARTS = 4096
MAX_TOOL_CALLS = 256
MAX_TEMPLATE_KWARGS = 64
# What the server itself tells the template; the fields of the request are the way to set them.
OWN_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message")

Name = Annotated[str, Field(min_length=1, max_length=MAX_LABEL)]


class TextPart(Wire):
    """A part of a message's content; text is the only kind that this server takes."""

    type: Literal["text"]
    text: Text


Parts = Annotated[list[TextPart], Field(min_length=1, max_length=MAX_PARTS, fail_fast=True)]
Content = Text | Parts


class Instruction(Wire):
    """What the application tells the model."""

    role: Literal["system", "developer"]
    content: Content
    name: Name | None = None


class UserMessage(Wire):
    """What the person says."""

    role: Literal["user"]
    content: Content
    name: Name | None = None


class CalledFunction(Wire):
    """A function that the model called, with its arguments as JSON text."""

    name: Name
    arguments: Text


class ToolCall(Wire):
    """One call that the model made."""

    id: Name
    type: Literal["function"]
    function: CalledFunction
    index: Annotated[int, Field(ge=0, le=MAX_TOOL_CALLS)] | None = None  # clients that send streamed calls back keep it


class AssistantMessage(Wire):
    """What the model said before; a message of an earlier answer can be sent back as it came."""

    role: Literal["assistant"]
    content: Content | None = None
    name: Name | None = None
    reasoning_content: Text | None = None
    reasoning: Text | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOL_CALLS, fail_fast=True)] | None = None
    refusal: Annotated[Any, refused()] = None
    annotations: Annotated[Any, refused([])] = None
    audio: Annotated[Any, refused()] = None
    function_call: Annotated[Any, refused()] = None

    @model_validator(mode="after")
    def _says_something(self) -> AssistantMessage:
        if self.content is None and not self.tool_calls:
            raise clash("an assistant message needs content or tool_calls")
        return self


class ToolMessage(Wire):
    """What a tool gave back."""

    role: Literal["tool"]
    content: Content
    tool_call_id: Name
    name: Name | None = None


Message = Annotated[
    Instruction | UserMessage | AssistantMessage | ToolMessage,
    Field(discriminator="role"),
]
Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
TemplateValue = Annotated[bool | int | float | Text, OneError("must be a string, a number, true, false or null")] | None
TemplateKwargs = Annotated[dict[Name, TemplateValue], Field(max_length=MAX_TEMPLATE_KWARGS)]


class TemplateOptions(Wire):
    """How the chat template is to render the messages."""

    chat_template_kwargs: TemplateKwargs | None = None
    """Variables for the chat template."""
    add_generation_prompt: bool | None = None
    """false: the prompt does not begin the assistant's message."""
    continue_final_message: bool | None = None
    """The answer goes on with the last message."""

    chat_template: Annotated[Any, refused(hint="The server has --chat-template.")] = None
    documents: Annotated[Any, refused([])] = None
    tools: Annotated[Any, refused([])] = None

    @field_validator("chat_template_kwargs")
    @classmethod
    def _not_our_own(cls, value: Json | None) -> Json | None:
        if value and any(name in value for name in OWN_VARIABLES):
            raise clash("must not set what the request itself tells the template")
        return value

    @field_validator("continue_final_message")
    @classmethod
    def _continued_or_answered(cls, value: bool | None, info: ValidationInfo) -> bool | None:
        if value and info.data.get("add_generation_prompt"):
            raise clash("must not be true together with add_generation_prompt")
        return value

    @property
    def render_options(self) -> RenderOptions:
        """Arguments for Prompts.chat and Prompts.render. What is continued gets no new answer's beginning."""
        continued = bool(self.continue_final_message)
        begun = self.add_generation_prompt
        return {
            "add_generation_prompt": not continued if begun is None else begun,
            "continue_final_message": continued,
            "template_kwargs": self.chat_template_kwargs,
        }


class ChatRequest(TemplateOptions, Structured):
    """POST /v1/chat/completions."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"model": "builtin", "messages": [{"role": "user", "content": "What is continuous batching?"}]},
                {
                    "model": "builtin",
                    "messages": [
                        {"role": "system", "content": "Answer in one sentence."},
                        {"role": "user", "content": "What is 7 + 5?"},
                    ],
                    "temperature": 0.7,
                    "max_completion_tokens": 64,
                    "stream": True,
                    "stream_options": {"include_usage": True},
                },
            ]
        }
    )

    messages: Messages
    """The conversation; contents are texts or parts of type text."""

    max_completion_tokens: Count | None = None
    """The most tokens of an answer; absent: as many as fit."""
    logprobs: bool | None = None
    """The answer has the log-probability of each token, in the model's own distribution."""
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """Beside it those of this many most likely tokens."""

    metadata: Annotated[
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=MAX_LABEL)]],
            Field(max_length=16),
        ]
        | None,
        LABEL,
    ] = None
    """Accepted, and part of the answer."""
    prompt_cache_key: Annotated[Name | None, LABEL] = None
    """Accepted: equal beginnings of prompts are found without it."""
    safety_identifier: Annotated[Name | None, LABEL] = None
    """Accepted for accounting elsewhere."""
    service_tier: Annotated[Literal["auto", "default"] | None, LABEL] = None
    """There is one tier; the answer says default."""
    store: Annotated[Literal[False] | None, LABEL] = None
    """Nothing is stored."""

    add_special_tokens: Annotated[Any, refused(False)] = None
    audio: Annotated[Any, refused()] = None
    echo: Annotated[Any, refused(False)] = None
    function_call: Annotated[Any, refused("none", "auto")] = None
    functions: Annotated[Any, refused([])] = None
    include_reasoning: Annotated[Any, refused(True)] = None
    modalities: Annotated[Any, refused(["text"])] = None
    moderation: Annotated[Any, refused()] = None
    parallel_tool_calls: Annotated[Any, refused(True)] = None
    prediction: Annotated[Any, refused()] = None
    prompt_cache_options: Annotated[Any, refused({})] = None
    prompt_cache_retention: Annotated[Any, refused("in_memory", "in-memory", "24h")] = None
    mm_processor_kwargs: Annotated[Any, refused({})] = None
    media_io_kwargs: Annotated[Any, refused({})] = None
    reasoning_effort: Annotated[Any, refused("medium")] = None
    return_prompt_text: Annotated[Any, refused(False, hint="POST /apply-template tells it.")] = None
    tool_choice: Annotated[Any, refused("none", "auto")] = None
    verbosity: Annotated[Any, refused("medium")] = None
    web_search_options: Annotated[Any, refused()] = None

    @field_validator("max_completion_tokens")
    @classmethod
    def _one_limit(cls, value: int | None, info: ValidationInfo) -> int | None:
        older = info.data.get("max_tokens")
        if value is not None and older is not None and value != older:
            raise clash("must be the same as max_tokens where both are given")
        return value

    @field_validator("top_logprobs")
    @classmethod
    def _with_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value and not info.data.get("logprobs"):
            raise clash("must be absent unless logprobs is true")
        return value

    @property
    def prompt_field(self) -> str:
        return "messages"

    @property
    def limit(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


def as_dicts(messages: list[Message]) -> list[Json]:
    """Messages as chat templates read them."""
    return [message.model_dump(exclude_none=True) for message in messages]


class ChatWriter(Writer):
    """chat.completion and chat.completion.chunk."""

    def __init__(self, request: ChatRequest, head: Head, prompts: list[Prompt], token_text: TokenText) -> None:
        super().__init__(head, prompts, token_text)
        self.request = request

    def opening(self, usage: Json | None) -> list[Json]:
        """The role, for each choice: it stands in the first delta."""
        role = {"role": "assistant", "content": "", "refusal": None}
        chunks = [self._chunk([self._choice(i, role)], usage) for i in range(self.request.num_choices)]
        if self.request.return_token_ids:
            chunks[0]["prompt_token_ids"] = self.prompts[0].ids
        return chunks

    def chunks(self, output: Output, usage: Json | None) -> list[Json]:
        """The text in one chunk, the end in one of its own, as OpenAI has it."""
        chunks = []
        is_told = output.token_ids and (output.logprobs or self.request.return_token_ids)
        if output.text or is_told or self._prompt_logprobs(output):
            choice = self._choice(output.choice, {"content": output.text}) | self._logprobs(output) | self._ids(output)
            chunks.append(self._chunk([choice], usage) | self._prompt_logprobs(output))
        if output.finish_reason:
            chunks.append(self._chunk([self._choice(output.choice, {}, output.finish_reason)], usage))
        return chunks

    def closing(self, usage: Json) -> list[Json]:
        return [self._chunk([], usage)] if self.request.include_usage else []

    def whole(self, outputs: list[Output], usage: Json) -> Json:
        choices = [
            {
                "index": output.choice,
                "message": {"role": "assistant", "content": output.text, "refusal": None},
                "logprobs": None,
                "finish_reason": output.finish_reason,
            }
            | self._logprobs(output)
            | self._ids(output)
            for output in outputs
        ]
        answer = self._object("chat.completion", choices) | {"usage": usage} | self._prompt_logprobs(outputs[0])
        if self.request.return_token_ids:
            answer["prompt_token_ids"] = self.prompts[0].ids
        if self.request.metadata is not None:
            answer["metadata"] = self.request.metadata
        return answer

    def _object(self, kind: str, choices: list[Json]) -> Json:
        head = self.head
        answer: Json = {
            "id": head.id,
            "object": kind,
            "created": head.created,
            "model": head.model,
            "system_fingerprint": head.fingerprint,
            "choices": choices,
        }
        if self.request.service_tier is not None:
            answer["service_tier"] = "default"
        return answer

    def _chunk(self, choices: list[Json], usage: Json | None = None) -> Json:
        chunk = self._object("chat.completion.chunk", choices)
        if usage is not None or self.request.include_usage:
            chunk["usage"] = usage
        return chunk

    def _choice(self, index: int, delta: Json, finish_reason: str | None = None) -> Json:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}

    def _ids(self, output: Output) -> Json:
        return {"token_ids": output.token_ids} if self.request.return_token_ids else {}

    def _prompt_logprobs(self, output: Output) -> Json:
        """The prompt is told once, with the first choice."""
        told = self.scores(self.prompts[0], output.prompt_logprobs, self.request.prompt_logprobs)
        return {} if told is None or output.choice else {"prompt_logprobs": told}

    def _logprobs(self, output: Output) -> Json:
        if self.request.num_logprobs is None:
            return {}
        pairs = zip(output.token_ids, output.logprobs, strict=True)
        return {"logprobs": {"content": [self._entry(token, entry) for token, entry in pairs], "refusal": None}}

    def _entry(self, token_id: int, entry: TokenLogprob) -> Json:
        top = zip(entry.top_ids, entry.top_logprobs, strict=True)
        return {
            **self._token(token_id, entry.logprob),
            "top_logprobs": [self._token(other, logprob) for other, logprob in top],
        }

    def _token(self, token_id: int, logprob: float) -> Json:
        text, data = self.token_text(token_id)
        return {"token": text, "logprob": number(logprob), "bytes": list(data)}


class TopLogprob(Wire):
    """A token that could have been drawn."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogprob(TopLogprob):
    """A token that was drawn, and the most likely ones in its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Wire):
    """One entry per token, the one that ended the answer included."""

    content: list[ChatLogprob] | None
    refusal: None = None


class AnswerMessage(Wire):
    """The assistant's message."""

    role: Literal["assistant"]
    content: str | None
    refusal: None = None


class ChatChoice(Wire):
    """One of n answers."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"]
    token_ids: list[int] | None = None


class ChatAnswer(Wire):
    """The answer in one object."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    service_tier: Literal["default"] | None = None
    metadata: dict[str, str] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class Delta(Wire):
    """What a chunk adds to the message."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    refusal: None = None


class ChunkChoice(Wire):
    """A choice's part of a chunk."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    token_ids: list[int] | None = None


class ChatChunk(Wire):
    """One event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoice]
    usage: Usage | None = None
    service_tier: Literal["default"] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None
