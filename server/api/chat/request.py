"""Requests for chat completions: the conversation and how it is continued."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec.structs import replace
from pydantic import AfterValidator, BeforeValidator, Field, field_validator
from pydantic_core.core_schema import ValidationInfo

from ...generation.output import Json
from ...generation.request import ConversationPrompt, GenerationRequest
from ...http.fields import LABEL, MAX_LABEL, OneError, Refused, RefusedKinds, Wire, clash, refused
from ...http.openapi import examples
from ...tokenization.encoder import RenderOptions
from .. import notes
from ..cache_marks import CacheLabel, Marked
from ..conversation import Effort, by_effort, is_thinking, thinking_variables
from ..custom_tools import arguments_of
from ..response_format import FormatFields
from ..sampling import MAX_INT, MAX_LOGPROBS, Count, Limit, Text, only_with, same_as
from ..tools import ToolChoiceFields, ToolsField

MAX_MESSAGES = 4096
MAX_PARTS = 4096
MAX_TOOL_CALLS = 256
MAX_TEMPLATE_KWARGS = 64
# Variables of the chat template that fields of the request set.
OWN_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message")

ONLY_TEXT = "only text is"

Name = Annotated[str, Field(min_length=1, max_length=MAX_LABEL)]


class TextPart(Marked):
    """A part of a message's content; text is the only supported kind."""

    type: Literal["text"]
    text: Text
    """Part of the prompt; the template joins the parts."""
    prompt_cache_breakpoint: CacheLabel = None

    unsupported: ClassVar[dict[str, Refused]] = {
        "file": refused(hint=ONLY_TEXT),
        "image_url": refused(hint=ONLY_TEXT),
        "input_audio": refused(hint=ONLY_TEXT),
        "refusal": refused(hint="send it as text"),
    }


Parts = Annotated[
    list[Annotated[TextPart, RefusedKinds("type", ("file", "image_url", "input_audio", "refusal"))]],
    Field(max_length=MAX_PARTS, fail_fast=True),
]
Content = Text | Parts


class Instruction(Marked):
    """A message of the application."""

    role: Literal["system", "developer"]
    content: Content
    """Part of the prompt; later ones are joined to the first."""
    name: Annotated[Name | None, notes.FOR_TEMPLATE] = None


class UserMessage(Marked):
    """A message of the user."""

    role: Literal["user"]
    content: Annotated[Content, notes.PROMPT]
    name: Annotated[Name | None, notes.FOR_TEMPLATE] = None


class CalledFunction(Wire):
    """A function that the model called, with its arguments as JSON text."""

    name: Annotated[Name, notes.PROMPT]
    arguments: Annotated[Text, notes.ARGUMENTS]
    parsed_arguments: Annotated[Any, LABEL, Field(exclude=True)] = None
    """Accepted: the parsed arguments, which the streaming helper of OpenAI's SDK sends back."""


class CalledCustomTool(Wire):
    """A custom tool that the model called, with its input as text."""

    name: Annotated[Name, notes.PROMPT]
    input: Annotated[Text, notes.PROMPT]


class AnyToolCall(Wire):
    """What calls of functions and of custom tools have."""

    id: Annotated[Name, notes.FOR_TEMPLATE]
    index: Annotated[Annotated[int, Field(ge=0, le=MAX_TOOL_CALLS)] | None, LABEL, Field(exclude=True)] = None
    """Accepted: clients that send streamed calls back keep it; the list decides the order."""


class ToolCall(AnyToolCall):
    """A call of a function that the model made."""

    type: Literal["function"] = "function"
    function: CalledFunction
    """The function and its arguments."""


class CustomToolCall(AnyToolCall):
    """A call of a custom tool that the model made."""

    type: Literal["custom"]
    custom: CalledCustomTool
    """The custom tool and its input."""


def _typed(value: Any) -> Any:
    """Add the type of a call without one, which is a function's."""
    return {**value, "type": "function"} if isinstance(value, dict) and "type" not in value else value


AnyCall = Annotated[ToolCall | CustomToolCall, Field(discriminator="type"), BeforeValidator(_typed)]
ToolCalls = Annotated[list[AnyCall], Field(max_length=MAX_TOOL_CALLS, fail_fast=True)]


class ReasoningDetail(Wire):
    """A piece of reasoning in OpenRouter's form."""

    type: Literal["reasoning.text", "reasoning.summary", "reasoning.encrypted"]
    text: Text | None = None
    """The model's reasoning, passed to the chat template."""
    summary: Text | None = None
    """A summary of it."""
    data: Annotated[Text | None, LABEL] = None
    """Accepted: encrypted reasoning cannot be read here."""
    id: Annotated[Name | None, LABEL] = None
    """Accepted: the id of the piece."""
    format: Annotated[Name | None, LABEL] = None
    """Accepted: the provider that wrote it."""
    index: Annotated[Annotated[int, Field(ge=0, le=MAX_INT)] | None, LABEL] = None
    """Accepted: the list decides the order."""
    signature: Annotated[Text | None, LABEL] = None
    """Accepted: signatures are not checked."""


class AssistantMessage(Marked):
    """A message of the model; one of an earlier response can be sent back unchanged."""

    role: Literal["assistant"]
    content: Content | None = None
    """Part of the prompt; absent or null: empty, as some clients store a turn that ended after its reasoning."""
    name: Annotated[Name | None, notes.FOR_TEMPLATE] = None
    reasoning_content: Annotated[Text | None, notes.THOUGHT] = None
    reasoning: Text | None = None
    """The same under the name that other servers use."""
    reasoning_details: Annotated[list[ReasoningDetail], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    """The same in OpenRouter's form; used if neither of the other two is there."""
    tool_calls: ToolCalls | None = None
    """The calls that the model made; part of the prompt."""
    unsupported: ClassVar[dict[str, Refused]] = {
        "refusal": refused(hint="send it as content"),
        "annotations": refused([]),
        "audio": refused(),
        "function_call": refused(hint="send tool_calls instead"),
    }
    # Clients add these to the messages that they return, and their users send them back.
    parsed: Annotated[Any, LABEL, Field(exclude=True)] = None
    """Accepted: the parsed content, which `.parse()` of OpenAI's SDK adds."""
    provider_specific_fields: Annotated[Any, LABEL, Field(exclude=True)] = None
    """Accepted: LiteLLM puts fields there that are not OpenAI's."""
    cot_id: Annotated[Any, LABEL, Field(exclude=True)] = None
    """Accepted: VS Code's id of the reasoning."""
    cot_summary: Annotated[Any, LABEL, Field(exclude=True)] = None
    """Accepted: VS Code repeats the reasoning here."""


class ToolMessage(Marked):
    """The result of a tool."""

    role: Literal["tool"]
    content: Annotated[Content, notes.PROMPT]
    tool_call_id: Annotated[Name, notes.CALL_ID]
    name: Annotated[Name | None, notes.FOR_TEMPLATE] = None


Message = Annotated[
    Instruction | UserMessage | AssistantMessage | ToolMessage,
    Field(discriminator="role"),
    RefusedKinds("role", ("function",)),
]
Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
TemplateValue = Annotated[bool | int | float | Text, OneError("must be a string, a number, true, false or null")] | None


def _not_our_own(value: Json) -> Json:
    if any(name in value for name in OWN_VARIABLES):
        raise clash("must not set what the request itself tells the template")
    return value


TemplateKwargs = Annotated[
    dict[Name, TemplateValue], Field(max_length=MAX_TEMPLATE_KWARGS), AfterValidator(_not_our_own)
]


class TemplateOptions(ToolsField):
    """How the chat template renders the messages."""

    chat_template_kwargs: Annotated[TemplateKwargs | None, notes.TEMPLATE_VARIABLES] = None
    add_generation_prompt: bool | None = None
    """false: the prompt does not begin the assistant's message."""
    continue_final_message: bool | None = None
    """true: the response continues the last message."""

    unsupported: ClassVar[dict[str, Refused]] = {
        "chat_template": refused(hint="start the server with --chat-template"),
        "documents": refused([], hint="send their texts in a message"),
    }

    @field_validator("continue_final_message")
    @classmethod
    def _continued_or_answered(cls, value: bool | None, info: ValidationInfo) -> bool | None:
        if value and info.data.get("add_generation_prompt"):
            raise clash("must not be true together with add_generation_prompt")
        return value

    @property
    def render_options(self) -> RenderOptions:
        """Arguments for Prompts.chat and Prompts.render. A message that is continued gets no generation prompt."""
        continued = bool(self.continue_final_message)
        prompted = self.add_generation_prompt
        return {
            "add_generation_prompt": not continued if prompted is None else prompted,
            "continue_final_message": continued,
            "template_kwargs": self.chat_template_kwargs,
        }


Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=MAX_LABEL)]], Field(max_length=16)
]


class CacheOptions(Wire):
    """How OpenAI's server is to cache the prompt."""

    mode: Annotated[Literal["implicit", "explicit"] | None, LABEL, notes.CACHE] = None
    ttl: Annotated[Name | None, LABEL] = None
    """Accepted: cached prefixes stay until their memory is needed."""
    comparison_response_id: Annotated[Name | None, LABEL] = None
    """Accepted: there are no diagnostics of the cache."""
    unsupported: ClassVar[dict[str, Refused]] = {"prewarm": refused(False)}


class Labels(Wire):
    """Fields of chat completions and responses that only OpenAI's own server uses."""

    metadata: Annotated[Metadata | None, LABEL] = None
    """Accepted, and part of the response."""
    prompt_cache_key: Annotated[Name | None, LABEL, notes.CACHE] = None
    prompt_cache_options: Annotated[CacheOptions | None, LABEL, notes.CACHE] = None
    safety_identifier: Annotated[Name | None, LABEL, notes.ACCOUNTING] = None
    service_tier: Annotated[
        Literal["auto", "default", "flex", "priority", "scale", "fast", "ultrafast"] | None, LABEL
    ] = None
    """There is one tier; the response says default."""


class ThinkingSwitch(Wire):
    """Whether the model is to reason, in the form of agents that were written for Anthropic's models."""

    type: Literal["enabled", "disabled"]
    """Passed to the chat template as enable_thinking."""
    budget_tokens: Annotated[Count | None, notes.REASONING_LIMIT] = None


class ReasoningSettings(Wire):
    """How the model is to reason, in OpenRouter's form."""

    effort: Effort | None = None
    """As reasoning_effort."""
    max_tokens: Annotated[Annotated[int, Field(ge=0, le=MAX_INT)] | None, notes.REASONING_LIMIT] = None
    enabled: bool | None = None
    """Passed to the chat template as enable_thinking."""
    exclude: bool | None = None
    """true: the response does not contain its reasoning, which is still generated and counted."""


class ChatRequest(TemplateOptions, ToolChoiceFields, Labels, FormatFields):
    """POST /v1/chat/completions."""

    model_config = examples(
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
    )

    messages: Messages
    """The conversation; the content of a message is a text or parts of type text."""

    max_completion_tokens: Limit | None = None
    """The largest number of tokens of a completion; absent or -1: as many as the context holds."""
    logprobs: bool | None = None
    """true: the response has the log-probability of each token, in the model's own distribution."""
    top_logprobs: Annotated[Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None, notes.TOP_LOGPROBS] = None

    reasoning_effort: Annotated[Effort | None, notes.EFFORT] = None
    enable_thinking: bool | None = None
    """Whether the model is to reason, if its chat template can turn that on and off; as in chat_template_kwargs."""
    thinking: ThinkingSwitch | None = None
    """The same in the form of some agents."""
    reasoning: ReasoningSettings | None = None
    """The same in OpenRouter's form."""
    include_reasoning: bool | None = None
    """false: the response does not contain its reasoning, which is still generated and counted."""
    thinking_token_budget: Annotated[Annotated[int, Field(ge=-1, le=MAX_INT)] | None, notes.REASONING_BUDGET] = None
    thinking_budget: Annotated[int, Field(ge=-1, le=MAX_INT)] | None = None
    """thinking_token_budget, under the name of Qwen's own API."""

    store: Annotated[bool | None, LABEL] = None
    """Accepted: nothing is stored."""
    prediction: Annotated[Any, LABEL] = None
    """Accepted: it could only make the response faster."""
    verbosity: Annotated[Literal["low", "medium", "high"] | None, LABEL, notes.VERBOSITY] = None

    unsupported: ClassVar[dict[str, Refused]] = {
        "add_special_tokens": refused(False),
        "audio": refused(),
        "echo": refused(False),
        "function_call": refused("none", "auto", hint="send tool_choice instead"),
        "functions": refused([], hint="send tools instead"),
        "modalities": refused(["text"]),
        "moderation": refused(),
        "prompt_cache_retention": refused("in_memory", "in-memory", "24h"),
        "mm_processor_kwargs": refused({}),
        "media_io_kwargs": refused({}),
        "return_prompt_text": refused(False, hint="POST /apply-template returns it"),
        "web_search_options": refused(),
    }

    _one_limit = field_validator("max_completion_tokens")(same_as("max_tokens"))
    _one_budget = field_validator("thinking_budget")(same_as("thinking_token_budget"))
    _with_logprobs = field_validator("top_logprobs")(only_with("logprobs"))

    @property
    def prompt_source(self) -> ConversationPrompt:
        turns = as_dicts(self.messages)
        return ConversationPrompt(turns, self.render_options, self.calling, self.thinks, self.budget)

    def resolve(self) -> GenerationRequest:
        request = replace(super().resolve(), prompt_field="messages", num_logprobs=self.num_logprobs)
        if self.max_completion_tokens is None:
            return request
        return replace(request, limit=("max_completion_tokens", self.max_completion_tokens))

    @property
    def render_options(self) -> RenderOptions:
        variables = thinking_variables(self.thinks, self.effort, self.chat_template_kwargs)
        return {**super().render_options, "template_kwargs": variables}

    @property
    def effort(self) -> Effort | None:
        """How much the model is to reason."""
        return self.reasoning_effort or (self.reasoning.effort if self.reasoning else None)

    @property
    def thinks(self) -> bool | None:
        switched = self.thinking.type == "enabled" if self.thinking else None
        enabled = self.reasoning.enabled if self.reasoning else None
        own = self.chat_template_kwargs
        return is_thinking(own, self.enable_thinking, switched, enabled, by_effort(self.effort))

    @property
    def budget(self) -> tuple[str, int] | None:
        """The field that limits the reasoning, and its value."""
        for name in ("thinking_token_budget", "thinking_budget"):
            if (budget := getattr(self, name)) is not None:
                return name, budget
        if self.reasoning and self.reasoning.max_tokens is not None:
            return "reasoning.max_tokens", self.reasoning.max_tokens
        if self.thinking and self.thinking.budget_tokens is not None:
            return "thinking.budget_tokens", self.thinking.budget_tokens
        return None

    @property
    def tells_reasoning(self) -> bool:
        """Whether the response contains the text of the reasoning."""
        is_excluded = self.reasoning is not None and self.reasoning.exclude is True
        return self.include_reasoning is not False and not is_excluded

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


def as_dicts(messages: list[Message]) -> list[Json]:
    """Return messages as chat templates read them."""
    turns = [message.model_dump(exclude_none=True) for message in messages]
    for turn in turns:
        if "tool_calls" in turn:
            turn["tool_calls"] = [as_function_call(call) for call in turn["tool_calls"]]
        if turn["role"] == "assistant" and "tool_calls" not in turn:
            turn.setdefault("content", "")  # which templates add to texts
        details = turn.pop("reasoning_details", ())
        if details and not ("reasoning" in turn or "reasoning_content" in turn):
            texts = (detail.get("text") or detail.get("summary") for detail in details)
            turn["reasoning_content"] = "\n".join(text for text in texts if text)
    return turns


def as_function_call(call: Json) -> Json:
    """Return a call as chat templates read it; for the model a custom tool is a function."""
    if call["type"] == "function":
        return call
    name, text = call["custom"]["name"], call["custom"]["input"]
    return {"id": call["id"], "type": "function", "function": {"name": name, "arguments": arguments_of(text)}}
