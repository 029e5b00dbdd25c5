"""The items of a response's input: what was said, thought and called so far, and the messages that they make."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from .chat import MAX_MESSAGES, MAX_PARTS, Name
from .common import Json
from .sampling import Text
from .wire import LABEL, MAX_LABEL, Wire, refused

MAX_ITEMS = MAX_MESSAGES  # of one request, and of a conversation with all that came before

ItemId = Annotated[str, Field(min_length=1, max_length=MAX_LABEL)]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class InputText(Wire):
    """Text that the model reads."""

    type: Literal["input_text"]
    text: Text


class OutputText(Wire):
    """Text of an earlier answer, as it came."""

    type: Literal["output_text"]
    text: Text
    annotations: Annotated[list[Any] | None, LABEL] = None
    logprobs: Annotated[list[Any] | None, LABEL] = None


class Refusal(Wire):
    """An earlier answer that declined; the model reads it as text."""

    type: Literal["refusal"]
    refusal: Text


MessagePart = Annotated[InputText | OutputText | Refusal, Field(discriminator="type")]
MessageParts = Annotated[list[MessagePart], Field(max_length=MAX_PARTS, fail_fast=True)]


class MessageItem(Wire):
    """What somebody says; a message of an earlier answer can be sent back as it came."""

    type: Literal["message"] = "message"
    role: Literal["user", "system", "developer", "assistant"]
    content: Text | MessageParts
    id: ItemId | None = None
    status: ItemStatus | None = None
    phase: Annotated[Literal["commentary", "final_answer"] | None, LABEL] = None


class FunctionCallItem(Wire):
    """A call that the model made, with its arguments as JSON text."""

    type: Literal["function_call"]
    call_id: Name
    name: Name
    arguments: Text
    id: ItemId | None = None
    status: ItemStatus | None = None


class FunctionCallOutputItem(Wire):
    """What a called function gave back."""

    type: Literal["function_call_output"]
    call_id: Name
    output: Text | Annotated[list[InputText], Field(max_length=MAX_PARTS, fail_fast=True)]
    id: ItemId | None = None
    status: ItemStatus | None = None


class ReasoningText(Wire):
    """What the model thought."""

    type: Literal["reasoning_text"]
    text: Text


class SummaryText(Wire):
    """What the model thought, in short."""

    type: Literal["summary_text"]
    text: Text


class ReasoningItem(Wire):
    """What the model thought before it answered; where it has no content the template gets its summary."""

    type: Literal["reasoning"]
    id: ItemId | None = None
    summary: Annotated[list[SummaryText], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    content: Annotated[list[ReasoningText], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    encrypted_content: Annotated[Any, refused()] = None
    status: ItemStatus | None = None


class ItemReference(Wire):
    """An item of a stored response, input or output, by its id."""

    type: Literal["item_reference"] = "item_reference"
    id: ItemId


def typed(value: Any) -> Any:
    """An item that has a role and no type is a message, and one that has only an id a reference."""
    if not isinstance(value, dict) or value.get("type") is not None:
        return value
    return {**value, "type": "item_reference" if value.keys() - {"type"} == {"id"} else "message"}


Item = Annotated[
    MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem | ItemReference,
    Field(discriminator="type"),
    BeforeValidator(typed),
]
Items = Annotated[list[Item], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)]


def as_turns(items: list[Json]) -> list[Json]:
    """Items as messages of a chat: what the model thought, said and called in one go is one message.

    A thought that was cut off before the model said anything is a message of its own.
    """
    turns: list[Json] = []
    thought: list[str] = []  # for the assistant's next message
    for item in items:
        kind = item["type"]
        if kind == "reasoning":
            thought.append(reasoning_text(item))
            continue
        if thought and not (kind == "function_call" or item.get("role") == "assistant"):
            turns.append({"role": "assistant", "content": "", "reasoning_content": "\n".join(thought)})
            thought = []
        if kind == "function_call":
            call = {"name": item["name"], "arguments": item["arguments"]}
            asked = {"id": item["call_id"], "type": "function", "function": call}
            if thought or not turns or turns[-1]["role"] != "assistant":
                turns.append({"role": "assistant", "content": ""})
            turns[-1].setdefault("tool_calls", []).append(asked)
        elif kind == "function_call_output":
            turns.append({"role": "tool", "tool_call_id": item["call_id"], "content": plain(item["output"])})
        else:
            turns.append({"role": item["role"], "content": plain(item["content"])})
        if thought:
            turns[-1]["reasoning_content"] = "\n".join(thought)
            thought = []
    return turns


def reasoning_text(item: Json) -> str:
    """What a reasoning item says."""
    return "\n".join(part["text"] for part in item.get("content") or item.get("summary") or ())


def plain(content: str | list[Json]) -> str | list[Json]:
    """Content as chat templates read it."""
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": part["refusal" if part["type"] == "refusal" else "text"]} for part in content]
