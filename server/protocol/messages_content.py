"""What messages hold in Anthropic's form, and what becomes of it: turns as chat templates read them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from .chat import MAX_MESSAGES, MAX_PARTS, Name
from .common import Json
from .sampling import Text
from .wire import LABEL, Wire, refused

MAX_NAME = 128  # of a tool: agents put the name of the tool's server before it

# Agents mark with it what is worth caching; here equal beginnings of prompts are always found.
CacheMark = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=64)]], Field(max_length=8)
]
ToolName = Annotated[str, Field(min_length=1, max_length=MAX_NAME, pattern=r"^[a-zA-Z0-9_.-]+$")]

# Claude Code's first system block. It tells accounting what has changed since the last request; as a part of the
# prompt it would only keep every prompt from beginning like the one before.
ACCOUNTING = "x-anthropic-billing-header:"


class Block(Wire):
    """A part of a message."""

    cache_control: Annotated[CacheMark | None, LABEL] = None


class TextBlock(Block):
    """Text."""

    type: Literal["text"]
    text: Text
    citations: Annotated[Any, refused([])] = None


class ThinkingBlock(Block):
    """What the model thought, as an earlier answer had it; the signature is not looked at."""

    type: Literal["thinking"]
    thinking: Text
    signature: Annotated[Text | None, LABEL] = None


class RedactedThinkingBlock(Block):
    """Thinking that another server has encrypted: accepted, and left out of the prompt."""

    type: Literal["redacted_thinking"]
    data: Annotated[Text, LABEL]


class ToolUseBlock(Block):
    """A call that the model made."""

    type: Literal["tool_use"]
    id: Name
    name: ToolName
    input: dict[str, Any]
    caller: Annotated[Any, refused({"type": "direct"})] = None
    toolset_name: Annotated[Any, refused()] = None


class ToolResultBlock(Block):
    """What a tool gave back."""

    type: Literal["tool_result"]
    tool_use_id: Name
    content: Text | Annotated[list[TextBlock], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    is_error: bool | None = None
    """true: the model reads `Error: ` before the content, and `Error` where there is none."""
    toolset_name: Annotated[Any, refused()] = None


UserBlock = Annotated[TextBlock | ToolResultBlock, Field(discriminator="type")]
AssistantBlock = Annotated[
    TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock, Field(discriminator="type")
]


class UserTurn(Wire):
    """What the person says, and what the tools gave back."""

    role: Literal["user"]
    content: Text | Annotated[list[UserBlock], Field(max_length=MAX_PARTS, fail_fast=True)]


class AssistantTurn(Wire):
    """What the model said before; the content of an earlier answer can be sent back as it came."""

    role: Literal["assistant"]
    content: Text | Annotated[list[AssistantBlock], Field(max_length=MAX_PARTS, fail_fast=True)]


Texts = Text | Annotated[list[TextBlock], Field(max_length=MAX_PARTS, fail_fast=True)]


class SystemTurn(Wire):
    """What the application tells the model in the middle of the conversation."""

    role: Literal["system"]
    content: Texts


Turn = Annotated[UserTurn | AssistantTurn | SystemTurn, Field(discriminator="role")]
Messages = Annotated[list[Turn], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


def turns(system: str | list[TextBlock] | None, messages: list[Turn]) -> list[Json]:
    """The conversation in the form of chat completions; neighbouring messages of one role are one turn."""
    told = [text for text in texts(system or []) if not text.startswith(ACCOUNTING)]
    made: list[Json] = [{"role": "system", "content": content(told)}] if told else []
    names: dict[str, str] = {}  # of the tools, by the id of the call
    for is_answer, group in itertools.groupby(messages, lambda message: message.role == "assistant"):
        parts = [part for message in group for part in blocks(message)]
        if is_answer:
            made.append(said(parts))
            names |= {part.id: part.name for part in parts if isinstance(part, ToolUseBlock)}
        else:
            made += asked(parts, names)
    return made


def blocks(message: UserTurn | AssistantTurn | SystemTurn) -> list[Block]:
    """The parts of a message.

    A late system message stays where it is, as text of the person's turn: few templates take one there, and moved to
    the front, where the server puts those of chat completions, it would change the beginning of every prompt.
    """
    if isinstance(message, SystemTurn):
        text = "\n".join(texts(message.content))
        return [TextBlock(type="text", text=f"<system-reminder>\n{text}\n</system-reminder>")]
    if isinstance(message.content, str):
        return [TextBlock(type="text", text=message.content)]
    return list(message.content)


def said(parts: list[Block]) -> Json:
    """The assistant's turn."""
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


def asked(parts: list[Block], names: dict[str, str]) -> Iterator[Json]:
    """The turns of what the person says and the tools gave back, in their order."""
    for is_result, group in itertools.groupby(parts, lambda part: isinstance(part, ToolResultBlock)):
        if not is_result:
            yield {"role": "user", "content": content(texts(group))}
            continue
        for part in group:
            assert isinstance(part, ToolResultBlock)
            given = texts(part.content or [])
            if part.is_error:
                given = [f"Error: {given[0]}", *given[1:]] if any(given) else ["Error"]
            turn = {"role": "tool", "tool_call_id": part.tool_use_id, "content": content(given)}
            name = names.get(part.tool_use_id)
            yield turn if name is None else {**turn, "name": name}


def texts(parts: str | Iterable[Block]) -> list[str]:
    """The texts among the parts."""
    return [parts] if isinstance(parts, str) else [part.text for part in parts if isinstance(part, TextBlock)]


def content(texts: list[str]) -> str | list[Json]:
    """Texts as the content of a message."""
    return [{"type": "text", "text": text} for text in texts] if len(texts) > 1 else "".join(texts)
