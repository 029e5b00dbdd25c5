"""The items of a response's input, and how they become the messages of a chat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from ...generation.output import Json
from ...http.fields import LABEL, MAX_LABEL, Refused, RefusedKinds, Wire, refused
from .. import notes
from ..cache_marks import CacheLabel
from ..chat.request import MAX_MESSAGES, MAX_PARTS, Name
from ..custom_tools import arguments_of
from ..sampling import Text
from ..tools import MAX_TOOLS
from .tools import AnyTool, in_namespace

MAX_ITEMS = MAX_MESSAGES  # of one request, and of a whole conversation

ItemId = Annotated[str, Field(min_length=1, max_length=MAX_LABEL)]
ItemStatus = Literal["in_progress", "completed", "incomplete"]
NOT_TEXT = RefusedKinds("type", ("input_file", "input_image"))
# Items of OpenAI's own tools, and items that control a conversation.
OTHER_ITEMS = """
    apply_patch_call apply_patch_call_output code_interpreter_call compaction compaction_trigger
    computer_call computer_call_output configuration_update file_search_call image_generation_call local_shell_call
    local_shell_call_output mcp_approval_request mcp_approval_response mcp_call mcp_list_tools program program_output
    shell_call shell_call_output tool_search_call tool_search_output web_search_call
"""


class InputText(Wire):
    """Text that the model reads."""

    type: Literal["input_text"]
    text: Annotated[Text, notes.PROMPT]
    prompt_cache_breakpoint: CacheLabel = None


class OutputText(Wire):
    """Text of an earlier response, unchanged."""

    type: Literal["output_text"]
    text: Annotated[Text, notes.PROMPT]
    annotations: Annotated[list[Any] | None, LABEL, notes.KEPT] = None
    logprobs: Annotated[list[Any] | None, LABEL, notes.KEPT] = None


class Refusal(Wire):
    """A refusal of an earlier response, which becomes text."""

    type: Literal["refusal"]
    refusal: Annotated[Text, notes.PROMPT]


InputTexts = Annotated[list[Annotated[InputText, NOT_TEXT]], Field(max_length=MAX_PARTS, fail_fast=True)]
MessagePart = Annotated[InputText | OutputText | Refusal, Field(discriminator="type"), NOT_TEXT]
MessageParts = Annotated[list[MessagePart], Field(max_length=MAX_PARTS, fail_fast=True)]


class KeptItem(Wire):
    """What every item but a reference has."""

    id: Annotated[ItemId | None, notes.ITEM_ID] = None
    status: Annotated[ItemStatus | None, LABEL, notes.KEPT] = None


class MessageItem(KeptItem):
    """A message; one of an earlier response can be sent back unchanged."""

    type: Literal["message"] = "message"
    role: Literal["user", "system", "developer", "assistant"]
    content: Annotated[Text | MessageParts, notes.PROMPT]
    phase: Annotated[Literal["commentary", "final_answer"] | None, LABEL, notes.KEPT] = None


class CallItem(KeptItem):
    """What calls of functions and of custom tools have."""

    call_id: Annotated[Name, notes.FOR_TEMPLATE]
    name: Annotated[Name, notes.PROMPT]
    namespace: Name | None = None
    """The group that the function or tool belongs to; part of the prompt."""

    unsupported: ClassVar[dict[str, Refused]] = {
        "async": refused(False),
        "async_": refused(False),  # as the Python SDK's model_dump names it
        "caller": refused({"type": "direct"}),
    }


class FunctionCallItem(CallItem):
    """A call that the model made, with its arguments as JSON text."""

    type: Literal["function_call"]
    arguments: Annotated[Text, notes.ARGUMENTS]


class CustomCallItem(CallItem):
    """A call of a custom tool, with its input as text."""

    type: Literal["custom_tool_call"]
    input: Annotated[Text, notes.PROMPT]


class CallOutputItem(KeptItem):
    """What the results of calls have."""

    call_id: Annotated[Name, notes.CALL_ID]
    output: Annotated[Text | InputTexts, notes.PROMPT]
    name: Annotated[Name | None, LABEL] = None
    """Accepted: the call already has it."""

    unsupported: ClassVar[dict[str, Refused]] = {"caller": refused({"type": "direct"})}


class FunctionCallOutputItem(CallOutputItem):
    """The result of a function call."""

    type: Literal["function_call_output"]
    namespace: Annotated[Name | None, LABEL] = None
    """Accepted: the call already has it."""


class CustomCallOutputItem(CallOutputItem):
    """The result of a custom tool's call."""

    type: Literal["custom_tool_call_output"]


class ReasoningText(Wire):
    """Text of the model's reasoning."""

    type: Literal["reasoning_text"]
    text: Annotated[Text, notes.THOUGHT]


class SummaryText(Wire):
    """A summary of the model's reasoning."""

    type: Literal["summary_text"]
    text: Annotated[Text, notes.THOUGHT]


class ReasoningItem(KeptItem):
    """The model's reasoning; if it has no content, the chat template gets its summary."""

    type: Literal["reasoning"]
    summary: Annotated[list[SummaryText], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    """Passed to the chat template if there is no content."""
    content: Annotated[list[ReasoningText], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    """The model's reasoning, passed to the chat template, which may leave it out of the prompt."""
    encrypted_content: Annotated[Text | None, LABEL, Field(exclude=True)] = None
    """Accepted: another server's encrypted reasoning cannot be read here, and is not stored."""


class AdditionalToolsItem(Wire):
    """Tools in an item of the conversation: the prompt has them behind those of the field `tools`."""

    type: Literal["additional_tools"]
    id: Annotated[ItemId | None, notes.ITEM_ID] = None
    role: Literal["developer"]
    """Who has added them; one value."""
    tools: Annotated[list[AnyTool], Field(max_length=MAX_TOOLS, fail_fast=True)]
    """Functions and custom tools that the model may call in this response and in those that continue it."""


class ItemReference(Wire):
    """An item of a stored response, input or output, by its id."""

    type: Literal["item_reference"] = "item_reference"
    id: ItemId
    """The id of an item of the continued conversation, or one that the server made for an item of another stored
    response."""


def typed(value: Any) -> Any:
    """Add the type of an item without one: with a role it is a message, with only an id a reference."""
    if not isinstance(value, dict) or value.get("type") is not None:
        return value
    return {**value, "type": "item_reference" if value.keys() - {"type"} == {"id"} else "message"}


Item = Annotated[
    MessageItem
    | FunctionCallItem
    | FunctionCallOutputItem
    | CustomCallItem
    | CustomCallOutputItem
    | ReasoningItem
    | AdditionalToolsItem
    | ItemReference,
    Field(discriminator="type"),
    BeforeValidator(typed),
    RefusedKinds("type", tuple(OTHER_ITEMS.split())),
]
Items = Annotated[list[Item], Field(max_length=MAX_ITEMS, fail_fast=True)]


def without_repeats(items: list[Json], before: Mapping[str, Json]) -> list[Json]:
    """Return the items without the outputs that the conversation before them, by ids, already has.

    Clients send outputs again by mistake, beside the id of the response that has them. A message of a user stays even
    then: a client may give all of them one id, and the same text twice can be meant.
    """
    contents: dict[str, Any] = {}  # of earlier items, which can be long, and many items may have one id

    def is_repeat(item: Json) -> bool:
        earlier = before.get(item.get("id", ""))
        if earlier is None or earlier["type"] != item["type"] or item.get("role", "assistant") != "assistant":
            return False
        if item is not earlier and item["id"] not in contents:
            contents[item["id"]] = content_of(earlier)
        return item is earlier or bool(content_of(item) == contents[item["id"]])

    return [item for item in items if not is_repeat(item)]


def content_of(item: Json) -> Any:
    """Return the part of an item that a repetition has in common with it."""
    if item["type"] == "reasoning":
        return reasoning_text(item)
    return item["tools"] if item["type"] == "additional_tools" else as_turns([item])


def as_turns(items: list[Json]) -> list[Json]:
    """Return items as messages of a chat: successive reasoning, text and calls of the model are one message.

    A thought that was cut off before the model said anything is a message of its own.
    """
    turns: list[Json] = []
    thought: list[str] = []  # for the assistant's next message
    for item in items:
        kind = item["type"]
        if kind == "additional_tools":
            continue
        if kind == "reasoning":
            if text := reasoning_text(item):  # encrypted reasoning has none
                thought.append(text)
            continue
        is_call = kind in ("function_call", "custom_tool_call")
        if thought and not (is_call or item.get("role") == "assistant"):
            turns.append({"role": "assistant", "content": "", "reasoning_content": "\n".join(thought)})
            thought = []
        if is_call:
            arguments = item["arguments"] if kind == "function_call" else arguments_of(item["input"])
            call = {"name": in_namespace(item.get("namespace"), item["name"]), "arguments": arguments}
            tool_call = {"id": item["call_id"], "type": "function", "function": call}
            if thought or not turns or turns[-1]["role"] != "assistant":
                turns.append({"role": "assistant", "content": ""})
            turns[-1].setdefault("tool_calls", []).append(tool_call)
        elif kind in ("function_call_output", "custom_tool_call_output"):
            turns.append({"role": "tool", "tool_call_id": item["call_id"], "content": plain(item["output"])})
        else:
            turns.append({"role": item["role"], "content": plain(item["content"])})
        if thought:
            turns[-1]["reasoning_content"] = "\n".join(thought)
            thought = []
    return turns


def of_current_turn(items: list[Json]) -> list[Json]:
    """Return the items without the reasoning before the last message of the user."""
    said = [index for index, item in enumerate(items) if item.get("role") == "user"]
    last = said[-1] if said else 0
    return [item for index, item in enumerate(items) if index > last or item["type"] != "reasoning"]


def reasoning_text(item: Json) -> str:
    return "\n".join(part["text"] for part in item.get("content") or item.get("summary") or ())


def plain(content: str | list[Json]) -> str | list[Json]:
    """Return content as chat templates read it."""
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": part["refusal" if part["type"] == "refusal" else "text"]} for part in content]
