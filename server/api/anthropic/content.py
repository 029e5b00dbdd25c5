"""The content of messages in Anthropic's form, and its translation into turns that chat templates read."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from ...generation.output import Json
from ...http.errors import CONTEXT_CODE, invalid
from ...http.fields import LABEL, Refused, RefusedKinds, Wire, refused
from .. import notes
from ..cache_marks import CacheMark
from ..chat.request import MAX_MESSAGES, MAX_PARTS, Name
from ..sampling import MAX_TEXT, Text

MAX_NAME = 128  # of a tool: agents put the name of the tool's server before it

Effort = Literal["low", "medium", "high", "xhigh", "max"]
ToolName = Annotated[str, Field(min_length=1, max_length=MAX_NAME, pattern=r"^[a-zA-Z0-9_.-]+$")]

# Claude Code's first system block. It reports what has changed since the last request; as a part of the
# prompt it would only prevent prefix cache hits.
ACCOUNTING = "x-anthropic-billing-header:"

# Blocks of Anthropic's own tools, blocks that are not text, and blocks that control a conversation.
OTHER_BLOCKS = """
    advisor_tool_result bash_code_execution_tool_result code_execution_tool_result compaction container_upload document
    fallback image mcp_tool_listing mcp_tool_result mcp_tool_use search_result server_tool_use
    text_editor_code_execution_tool_result tool_addition tool_removal tool_search_tool_result web_fetch_tool_result
    web_search_tool_result
"""


class Block(Wire):
    """A part of a message."""

    cache_control: Annotated[CacheMark | None, LABEL, notes.CACHE] = None


class TextBlock(Block):
    """Text."""

    type: Literal["text"]
    text: Annotated[Text, notes.PROMPT]
    unsupported: ClassVar[dict[str, Refused]] = {"citations": refused([])}


class ThinkingBlock(Block):
    """Thinking of an earlier response; its signature is not checked."""

    type: Literal["thinking"]
    thinking: Annotated[Text, notes.THOUGHT]
    signature: Annotated[Text | None, LABEL] = None
    """Accepted, and not checked."""


class RedactedThinkingBlock(Block):
    """Thinking that another server has encrypted: accepted, and left out of the prompt."""

    type: Literal["redacted_thinking"]
    data: Annotated[Text, LABEL]
    """Accepted, and left out of the prompt."""


class ToolUseBlock(Block):
    """A call that the model made."""

    type: Literal["tool_use"]
    id: Name
    """The id that its result refers to, passed to the chat template; few templates use it."""
    name: Annotated[ToolName, notes.PROMPT]
    input: Annotated[dict[str, Any], notes.PROMPT]
    unsupported: ClassVar[dict[str, Refused]] = {"caller": refused({"type": "direct"}), "toolset_name": refused()}


class ToolReferenceBlock(Block):
    """A tool with defer_loading that the client's search has found: the prompt has its definition here."""

    type: Literal["tool_reference"]
    tool_name: Annotated[ToolName, notes.TOOL_NAME]


ResultBlocks = Annotated[
    list[
        Annotated[
            TextBlock | ToolReferenceBlock,
            Field(discriminator="type"),
            RefusedKinds("type", ("browser_state", "document", "image", "search_result")),
        ]
    ],
    Field(max_length=MAX_PARTS, fail_fast=True),
]


class ToolResultBlock(Block):
    """The result of a tool."""

    type: Literal["tool_result"]
    tool_use_id: Name
    """The id of its call, passed to the chat template with the call's name."""
    content: Annotated[Text | ResultBlocks | None, notes.PROMPT] = None
    is_error: bool | None = None
    """true: the prompt has `Error: ` before the content, or `Error` if there is none."""
    unsupported: ClassVar[dict[str, Refused]] = {"toolset_name": refused()}


UserBlock = Annotated[
    TextBlock | ToolResultBlock,
    Field(discriminator="type"),
    RefusedKinds("type", ("redacted_thinking", "thinking", "tool_use", *OTHER_BLOCKS.split())),
]
AssistantBlock = Annotated[
    TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock,
    Field(discriminator="type"),
    RefusedKinds("type", ("tool_result", *OTHER_BLOCKS.split())),
]


class UserTurn(Wire):
    """A message of the user with results of tools."""

    role: Literal["user"]
    content: Annotated[Text | Annotated[list[UserBlock], Field(max_length=MAX_PARTS, fail_fast=True)], notes.PROMPT]


class AssistantTurn(Wire):
    """A message of the model; the content of an earlier response can be sent back unchanged."""

    role: Literal["assistant"]
    content: Annotated[
        Text | Annotated[list[AssistantBlock], Field(max_length=MAX_PARTS, fail_fast=True)], notes.PROMPT
    ]


SystemBlock = Annotated[TextBlock, RefusedKinds("type", ("tool_addition", "tool_removal"))]
Texts = Text | Annotated[list[SystemBlock], Field(max_length=MAX_PARTS, fail_fast=True)]


class TurnConfig(Wire):
    """How the model is to go on after a message of the application."""

    effort: Effort | None = None
    """How much the model is to reason, in place of the request's own effort; the last of several counts."""
    unsupported: ClassVar[dict[str, Refused]] = {"format": refused(), "task_budget": refused()}


class SystemTurn(Wire):
    """A message of the application in the middle of the conversation."""

    role: Literal["system"]
    content: Texts
    """Part of the prompt at its position, as a reminder in the user's turn."""
    output_config: TurnConfig | None = None
    """The reasoning effort from here on."""

    unsupported: ClassVar[dict[str, Refused]] = {"clear_at": refused("never")}


Turn = Annotated[UserTurn | AssistantTurn | SystemTurn, Field(discriminator="role")]
Messages = Annotated[list[Turn], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class Definitions:
    """The definitions of tools, by which references to them are replaced.

    A small body can refer to a long definition thousands of times. So each is written once, and all references together
    may be as long as the texts of a body. Callers compare `num_characters` with the model's context, which may be less.
    """

    def __init__(self, tools: Mapping[str, Json]) -> None:
        self._tools = tools
        self._texts: dict[str, str] = {}
        self.num_characters = 0  # of all references so far

    def text(self, name: str) -> str:
        """Return the definition of a tool for one more reference; raises 400 if that makes the prompt too long."""
        if name not in self._texts:
            self._texts[name] = json.dumps(self._tools[name], ensure_ascii=False)
        self.num_characters += len(self._texts[name])
        if self.num_characters > MAX_TEXT:
            message = f"the definitions of tools, one for each tool_reference, have more than {MAX_TEXT} characters"
            raise invalid(f"Invalid 'messages': {message} together.", "messages", CONTEXT_CODE)
        return self._texts[name]


def turns(system: str | list[TextBlock] | None, messages: list[Turn], definitions: Definitions) -> list[Json]:
    """Return the conversation in the form of chat completions; successive messages of one role are one turn.
    `definitions`: what references to tools are replaced by. Raises 400 if that makes the conversation too long.

    A tool found late is defined where it was found, and not in the list at the front, where chat templates put tools:
    the prompt before it stays as it is, and in the prefix cache.
    """
    instructions = [text for text in texts(system or []) if not text.startswith(ACCOUNTING)]
    made: list[Json] = [{"role": "system", "content": content(instructions)}] if instructions else []
    names: dict[str, str] = {}  # of the tools, by the id of the call
    for is_answer, group in itertools.groupby(messages, lambda message: message.role == "assistant"):
        parts = [part for message in group for part in blocks(message)]
        if is_answer:
            made.append(assistant_turn(parts))
            names |= {part.id: part.name for part in parts if isinstance(part, ToolUseBlock)}
        else:
            made += user_turns(parts, names, definitions)
    return made


def references(messages: list[Turn]) -> set[str]:
    """Return the names of the tools that results refer to."""
    results = [part for message in messages for part in blocks(message) if isinstance(part, ToolResultBlock)]
    parts = [part for result in results if isinstance(result.content, list) for part in result.content]
    return {part.tool_name for part in parts if isinstance(part, ToolReferenceBlock)}


def last_effort(messages: list[Turn]) -> Effort | None:
    """Return the effort that the last message with one asks for."""
    configs = [message.output_config for message in messages if isinstance(message, SystemTurn)]
    return next((config.effort for config in reversed(configs) if config and config.effort), None)


def with_last_thinking(messages: list[Turn], count: int) -> list[Turn]:
    """Return the conversation with the thinking of the model's last `count` turns alone. A turn ends where the user
    says something; the results of tools do not end it."""
    made, kept, has_thinking = list(messages), 0, False
    for index in reversed(range(len(made))):
        message = made[index]
        if not isinstance(message, AssistantTurn):
            is_said = any(not isinstance(part, ToolResultBlock) for part in blocks(message))
            kept, has_thinking = kept + (has_thinking and is_said), has_thinking and not is_said
        elif any(isinstance(part, ThinkingBlock) for part in blocks(message)):
            has_thinking = True
            if kept >= count:
                rest = [part for part in blocks(message) if not isinstance(part, ThinkingBlock)]
                made[index] = message.model_copy(update={"content": rest})
    return made


def blocks(message: UserTurn | AssistantTurn | SystemTurn) -> list[Block]:
    """Return the parts of a message.

    A late system message stays where it is, as text of the user's turn: few templates accept one there, and moved to
    the front, where the server puts those of chat completions, it would change the beginning of every prompt.
    """
    if isinstance(message, SystemTurn):
        text = "\n".join(texts(message.content))
        return [TextBlock(type="text", text=f"<system-reminder>\n{text}\n</system-reminder>")]
    if isinstance(message.content, str):
        return [TextBlock(type="text", text=message.content)]
    return list(message.content)


def assistant_turn(parts: list[Block]) -> Json:
    turn: Json = {"role": "assistant", "content": content(texts(parts))}
    thinking = "\n".join(part.thinking for part in parts if isinstance(part, ThinkingBlock) and part.thinking)
    if thinking:
        turn["reasoning_content"] = thinking
    calls = [part for part in parts if isinstance(part, ToolUseBlock)]
    if calls:
        turn["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": json.dumps(call.input)}}
            for call in calls
        ]
    return turn


def user_turns(parts: list[Block], names: dict[str, str], definitions: Definitions) -> Iterator[Json]:
    """Yield the turns of the user's texts and of the tools' results, in their order."""
    for is_result, group in itertools.groupby(parts, lambda part: isinstance(part, ToolResultBlock)):
        if not is_result:
            yield {"role": "user", "content": content(texts(group))}
            continue
        for part in group:
            assert isinstance(part, ToolResultBlock)
            given = texts(part.content or [], definitions)
            if part.is_error:
                given = [f"Error: {given[0]}", *given[1:]] if any(given) else ["Error"]
            turn = {"role": "tool", "tool_call_id": part.tool_use_id, "content": content(given)}
            name = names.get(part.tool_use_id)
            yield turn if name is None else {**turn, "name": name}


def texts(parts: str | Iterable[Block], definitions: Definitions | None = None) -> list[str]:
    if isinstance(parts, str):
        return [parts]
    made = []
    for part in parts:
        if isinstance(part, TextBlock):
            made.append(part.text)
        elif isinstance(part, ToolReferenceBlock) and definitions is not None:
            made.append(definitions.text(part.tool_name))
    return made


def content(texts: list[str]) -> str | list[Json]:
    """Return texts as the content of a message."""
    return [{"type": "text", "text": text} for text in texts] if len(texts) > 1 else "".join(texts)
