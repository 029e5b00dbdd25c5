"""Requests for messages, in Anthropic's form."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec.structs import replace
from pydantic import Field, ValidationInfo, field_validator

from ...generation.request import Calling, ConversationPrompt, GenerationRequest, Tool
from ...grammar.schemas import Grammar, of_schema
from ...http.fields import LABEL, MAX_LABEL, Refused, RefusedKinds, Wire, clash, refused
from ...http.openapi import examples
from ...tokenization.encoder import RenderOptions
from .. import notes
from ..cache_marks import CacheMark
from ..conversation import thinking_variables
from ..response_format import Schema, StructuredOutputs, of_outputs
from ..sampling import MAX_INT, Count, GenerationFields, ModelName, StopTexts, Text
from ..tools import MAX_TOOLS
from .content import (
    AssistantTurn,
    Definitions,
    Effort,
    Messages,
    TextBlock,
    ToolName,
    ToolUseBlock,
    last_effort,
    references,
    turns,
    with_last_thinking,
)

# Tools that Anthropic runs, or whose schemas only its models know.
BUILT_IN_TOOLS = """
    advisor_20260301 bash_20241022 bash_20250124 browser_toolset_20260801 code_execution_20250522
    code_execution_20250825 code_execution_20260120 code_execution_20260521 computer_20241022 computer_20250124
    computer_20251124 computer_toolset_20260801 mcp_toolset memory_20250818 text_editor_20241022 text_editor_20250124
    text_editor_20250429 text_editor_20250728 tool_search_tool_bm25 tool_search_tool_bm25_20251119
    tool_search_tool_regex tool_search_tool_regex_20251119 web_fetch_20250910 web_fetch_20260209 web_fetch_20260309
    web_fetch_20260318 web_search_20250305 web_search_20260209 web_search_20260318
"""


class MessagesTool(Wire):
    """A tool that the client runs: its name, its description, and the JSON schema of its input."""

    type: Literal["custom"] | None = None
    """custom: the client runs it; the only supported kind."""
    name: Annotated[ToolName, notes.PROMPT_AND_CALL]
    description: Annotated[Text | None, notes.PROMPT] = None
    input_schema: Schema
    """The JSON schema of the input, an object."""
    strict: bool | None = None
    """true: the input follows the schema even if the model is free to call the tool or not."""
    defer_loading: bool | None = None
    """true: the tool is in the prompt only where a tool_reference in the result of another tool names it."""
    cache_control: Annotated[CacheMark | None, LABEL, notes.CACHE] = None
    eager_input_streaming: Annotated[bool | None, LABEL] = None
    """Accepted: the input of a call is always streamed as it is generated."""
    unsupported: ClassVar[dict[str, Refused]] = {
        "allowed_callers": refused(["direct"]),
        "input_examples": refused([]),
    }


class AutoToolChoice(Wire):
    """The model decides."""

    type: Literal["auto"]
    disable_parallel_tool_use: bool | None = None
    """true: at most one call."""


class AnyToolChoice(Wire):
    """At least one call."""

    type: Literal["any"]
    disable_parallel_tool_use: bool | None = None
    """true: exactly one call."""


class OneToolChoice(Wire):
    """One call of this tool."""

    type: Literal["tool"]
    name: Annotated[ToolName, notes.TOOL_NAME]
    disable_parallel_tool_use: Annotated[bool | None, LABEL] = None
    """Accepted: it is always one call."""


class NoToolChoice(Wire):
    """No call."""

    type: Literal["none"]


class ThinkingEnabled(Wire):
    """The model reasons, for at most budget_tokens tokens."""

    type: Literal["enabled"]
    budget_tokens: Count
    """The largest number of tokens of the thinking."""
    display: Literal["summarized", "omitted"] | None = None
    """omitted: the response does not contain the text of its thinking."""
    unsupported: ClassVar[dict[str, Refused]] = {"block_binding": refused({})}


class ThinkingAdaptive(Wire):
    """The model reasons without a limit."""

    type: Literal["adaptive"]
    display: Literal["summarized", "omitted"] | None = None
    """omitted: the response does not contain the text of its thinking."""
    unsupported: ClassVar[dict[str, Refused]] = {"block_binding": refused({})}


class ThinkingDisabled(Wire):
    """The model does not reason, if its chat template can turn that off."""

    type: Literal["disabled"]


class MessagesFormat(Wire):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    """The only format."""
    schema_: Annotated[Schema, Field(alias="schema")]
    """The output follows it."""


class OutputConfig(Wire):
    """The reasoning effort and the format of the output."""

    effort: Effort | None = None
    """How much the model is to reason, if its chat template reads `reasoning_effort`; agents send it to every model."""
    format: MessagesFormat | None = None
    """The output text follows a JSON schema."""
    unsupported: ClassVar[dict[str, Refused]] = {"task_budget": refused()}


class KeepThinking(Wire):
    """How much earlier thinking the prompt contains."""

    type: Literal["all", "thinking_turns"]
    """all: that of every turn; thinking_turns: that of the last turns."""
    value: Annotated[int, Field(ge=1, le=MAX_INT)] | None = None
    """The number of turns of the model whose thinking stays; absent: one."""


class ClearThinking(Wire):
    """Leaves the thinking of earlier turns out of the prompt."""

    type: Literal["clear_thinking_20251015"]
    """The only kind of edit."""
    keep: KeepThinking | Literal["all"] | None = None
    """What stays; absent: the thinking of the model's last turn."""

    @property
    def turns(self) -> int | None:
        """The number of turns whose thinking stays; None: all."""
        if isinstance(self.keep, str) or (self.keep and self.keep.type == "all"):
            return None
        return (self.keep and self.keep.value) or 1


class ContextManagement(Wire):
    """What is left out of a long conversation."""

    edits: (
        Annotated[
            list[Annotated[ClearThinking, RefusedKinds("type", ("clear_tool_uses_20250919", "compact_20260112"))]],
            Field(max_length=16, fail_fast=True),
        ]
        | None
    ) = None
    """Edits of the conversation; it stays as it is in the client."""


class MessagesPrompt(Wire):
    """The fields that make the prompt, which messages and count_tokens share."""

    system: Text | Annotated[list[TextBlock], Field(fail_fast=True)] | None = None
    """The application's message. A block with Claude Code's accounting header is left out."""
    messages: Messages
    """The conversation: texts, tool calls, their results and earlier thinking. A last message of the assistant is
    continued by the response."""
    tools: Annotated[
        Annotated[
            list[Annotated[MessagesTool, RefusedKinds("type", tuple(BUILT_IN_TOOLS.split()))]],
            Field(max_length=MAX_TOOLS, fail_fast=True),
        ]
        | None,
        Field(validate_default=True),
    ] = None
    """Tools that the model may call, and the client runs."""
    tool_choice: (
        Annotated[AutoToolChoice | AnyToolChoice | OneToolChoice | NoToolChoice, Field(discriminator="type")] | None
    ) = None
    """auto: the model decides; any: at least one call; tool: one call of this one; none: no call, and the prompt does
    not contain the tools. disable_parallel_tool_use: at most one call."""
    thinking: (
        Annotated[
            ThinkingEnabled | ThinkingAdaptive | ThinkingDisabled,
            Field(discriminator="type"),
            RefusedKinds("type", ("between_tools",)),
        ]
        | None
    ) = None
    """Passed to the chat template as `enable_thinking`; absent: the template's default, and at most half of max_tokens
    if the output must follow a schema or be a call. budget_tokens limits the thinking; display omitted leaves its text
    out of the response."""
    output_config: OutputConfig | None = None
    """The reasoning effort and the format of the output."""
    context_management: ContextManagement | None = None
    """What is left out of the prompt."""

    cache_control: Annotated[CacheMark | None, LABEL, notes.CACHE] = None
    unsupported: ClassVar[dict[str, Refused]] = {
        "billing_policy": refused(),
        "chat_template_kwargs": refused({}, hint="send thinking or output_config.effort instead"),
        "compaction": refused(),
        "mcp_servers": refused([]),
        "speed": refused("standard"),
    }

    @field_validator("messages")
    @classmethod
    def _can_go_on(cls, value: Messages) -> Messages:
        last = value[-1]
        if isinstance(last, AssistantTurn) and any(isinstance(part, ToolUseBlock) for part in last.content):
            raise clash("must not end with a tool_use: its tool_result comes next")
        return value

    @field_validator("tools")
    @classmethod
    def _names_differ(cls, value: list[MessagesTool] | None) -> list[MessagesTool] | None:
        if value and len({tool.name for tool in value}) < len(value):
            raise clash("must not hold two tools of the same name")
        if value and all(tool.defer_loading for tool in value):
            raise clash("must hold a tool without defer_loading")
        return value

    @field_validator("tools")
    @classmethod
    def _has_those_referred_to(
        cls, value: list[MessagesTool] | None, info: ValidationInfo
    ) -> list[MessagesTool] | None:
        if references(info.data.get("messages") or []) - {tool.name for tool in value or ()}:
            raise clash("must hold every tool that a tool_reference in the messages names")
        return value

    @field_validator("tool_choice")
    @classmethod
    def _among_the_tools(cls, value: Any, info: ValidationInfo) -> Any:
        names = [tool.name for tool in info.data.get("tools") or ()]
        if isinstance(value, AnyToolChoice) and not names:
            raise clash("must be absent, none or auto where there are no tools")
        if isinstance(value, OneToolChoice) and value.name not in names:
            raise clash("must name one of the tools")
        return value

    @property
    def prompt_source(self) -> ConversationPrompt:
        edits = self.context_management.edits if self.context_management else None
        kept = min((edit.turns for edit in edits or () if edit.turns is not None), default=None)
        messages = self.messages if kept is None else with_last_thinking(self.messages, kept)
        tools = {tool.name: described(tool, index).as_json for index, tool in enumerate(self.tools or ())}
        definitions = Definitions(tools)
        own = turns(self.system, messages, definitions)
        return ConversationPrompt(
            own, self.render_options, self.calling, self.thinks, self.thinking_budget, definitions.num_characters
        )

    @property
    def render_options(self) -> RenderOptions:
        own = self.output_config.effort if self.output_config else None
        effort = last_effort(self.messages) or own
        goes_on = isinstance(self.messages[-1], AssistantTurn)
        return {
            "template_kwargs": thinking_variables(self.thinks, effort, None),
            "add_generation_prompt": not goes_on,
            "continue_final_message": goes_on,
        }

    @property
    def thinks(self) -> bool:
        # Like Anthropic's models, which reason only if the request says so.
        return self.thinking is not None and not isinstance(self.thinking, ThinkingDisabled)

    @property
    def thinking_budget(self) -> tuple[str, int] | None:
        if isinstance(self.thinking, ThinkingEnabled):
            return "thinking.budget_tokens", self.thinking.budget_tokens
        return None

    @property
    def calling(self) -> Calling | None:
        choice = self.tool_choice
        if not self.tools or isinstance(choice, NoToolChoice):
            return None
        tools = tuple(described(tool, index) for index, tool in enumerate(self.tools))
        deferred = {tool.name for tool in self.tools if tool.defer_loading}
        listed = tuple(tool for tool in tools if tool.name not in deferred)
        if isinstance(choice, OneToolChoice):
            named = tuple(tool for tool in tools if tool.name == choice.name)
            return Calling(named, is_required=True, is_parallel=False, described=listed)
        is_parallel = choice is None or not choice.disable_parallel_tool_use
        if isinstance(choice, AnyToolChoice):  # of a tool that is not in the prompt a model knows nothing
            deferred -= references(self.messages)
            tools = tuple(tool for tool in tools if tool.name not in deferred)
        return Calling(tools, isinstance(choice, AnyToolChoice), is_parallel, described=listed)


def described(tool: MessagesTool, index: int) -> Tool:
    """Return a tool in the form that generation reads."""
    return Tool(tool.name, tool.description, tool.input_schema, bool(tool.strict), f"tools[{index}].input_schema")


class MessagesRequest(MessagesPrompt, GenerationFields):
    """POST /v1/messages."""

    model_config = examples(
        {
            "model": "builtin",
            "max_tokens": 100,
            "messages": [{"role": "user", "content": "What is continuous batching?"}],
        },
        {
            "model": "builtin",
            "max_tokens": 32000,
            "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
            "messages": [{"role": "user", "content": [{"type": "text", "text": "What is 7 + 5?"}]}],
            "temperature": 0,
            "stream": True,
        },
    )

    max_tokens: Annotated[int, Field(ge=0, le=MAX_INT)]
    """The largest number of tokens of the output, within the context. 0: the prompt is only computed into the cache."""
    stop_sequences: Annotated[StopTexts | None, notes.STOP] = None
    output_format: MessagesFormat | None = None
    """The same as output_config.format, for older clients."""
    structured_outputs: Annotated[StructuredOutputs | None, notes.STRUCTURED] = None

    metadata: Annotated[
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=MAX_LABEL)] | None],
            Field(max_length=16),
        ]
        | None,
        LABEL,
    ] = None
    """Accepted for accounting elsewhere."""
    diagnostics: Annotated[
        Annotated[dict[Literal["previous_message_id"], Annotated[str, Field(max_length=MAX_LABEL)] | None], ()] | None,
        LABEL,
    ] = None
    """Accepted: cache hits are in the usage."""
    service_tier: Annotated[Literal["auto", "standard_only"] | None, LABEL] = None
    """There is one tier; the usage says standard."""

    unsupported: ClassVar[dict[str, Refused]] = {
        "container": refused(),
        "fallback_credit_token": refused(),
        "fallbacks": refused([]),
        "inference_geo": refused(),
        "thread": refused(),
    }

    @field_validator("output_format", "structured_outputs")
    @classmethod
    def _one_format(cls, value: Any, info: ValidationInfo) -> Any:
        config = info.data.get("output_config")
        if value is not None and (info.data.get("output_format") or (config and config.format)):
            raise clash("must be absent where another field says what the answer looks like")
        return value

    def resolve(self) -> GenerationRequest:
        return replace(
            super().resolve(),
            prompt_field="messages",
            limit=("max_tokens", self.max_tokens),
            only_scores=self.max_tokens == 0,
            stops=self.stop_sequences or [],
            grammar=self._grammar(),
        )

    def _grammar(self) -> Grammar | None:
        config = self.output_config
        if config is not None and config.format is not None:
            return of_schema(config.format.schema_, "output_config.format.schema")
        if self.output_format is not None:
            return of_schema(self.output_format.schema_, "output_format.schema")
        return of_outputs(self.structured_outputs)

    @property
    def tells_thinking(self) -> bool:
        """Whether the response contains the text of its thinking."""
        return getattr(self.thinking, "display", None) != "omitted"


class CountTokensRequest(MessagesPrompt):
    """POST /v1/messages/count_tokens."""

    model_config = examples({"model": "builtin", "messages": [{"role": "user", "content": "What is 7 + 5?"}]})

    model: ModelName = None
