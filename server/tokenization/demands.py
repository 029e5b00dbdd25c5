"""Demands of some chat templates on tools and calls, which would refuse conversations that the server itself made."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import deque
from typing import Any

from jinja2 import nodes
from pydantic_core import from_json

from ..parsers.formats import BLOCKS, KIMI
from ..parsers.harmony import CHANNEL, MESSAGE, START
from ..parsers.kimi import PREFIX
from .renderer import Message

ID_LENGTH = 9  # of Mistral's ids
# gpt-oss writes the text before a call as a message of its own, after the one with its reasoning.
PREAMBLE = f"{BLOCKS['gpt_oss'].closes}{START}assistant{CHANNEL}commentary{MESSAGE}"


class Demands:
    """What a template demands, judged by its source."""

    def __init__(self, source: str, tree: nodes.Template) -> None:
        loops = any(_is_calls(loop.iter) for loop in tree.find_all(nodes.For))
        self._one_call = not loops and any(_is_first_call(item) for item in tree.find_all(nodes.Getitem))
        self._short_ids = any(map(_compares_id, tree.find_all(nodes.Compare)))
        self._description = any(
            "description" in (attribute_of(added.left), attribute_of(added.right)) for added in tree.find_all(nodes.Add)
        )
        self._one_text = BLOCKS["gpt_oss"].opens in source and any(map(_refuses_two_texts, tree.find_all(nodes.If)))
        self._objects = _iterates_arguments(tree)
        self._numbered_ids = KIMI[1] in source
        roles = {const.value for const in tree.find_all(nodes.Const) if isinstance(const.value, str)}
        self._observations = "observation" in roles and "tool" not in roles and "metadata" in source

    def tools(self, tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the tools, each with a description if the template adds that to other text."""
        return [_described(tool) for tool in tools] if self._description else tools

    def messages(self, messages: list[Message]) -> list[Message]:
        """Return the messages with calls in the form that the template takes; they have been prepared."""
        if self._one_call or self._observations:
            messages = _one_call_each(messages)
        if self._short_ids:
            messages = [_with_short_ids(message) for message in messages]
        if self._numbered_ids:
            messages = _with_numbered_ids(messages)
        if self._observations:
            messages = [each for message in messages for each in _with_metadata(message)]
        if self._objects:
            messages = [_with_objects(message) for message in messages]
        return [_with_one_text(message) for message in messages] if self._one_text else messages


def attribute_of(node: nodes.Node | None) -> str | None:
    """Return the name in `x.name` or `x['name']`; None for other expressions."""
    if isinstance(node, nodes.Getattr):
        return node.attr
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and isinstance(node.arg.value, str):
        return node.arg.value
    return None


def _is_calls(node: nodes.Node) -> bool:
    return attribute_of(node) == "tool_calls" or (isinstance(node, nodes.Name) and node.name == "tool_calls")


def _is_first_call(item: nodes.Getitem) -> bool:
    return isinstance(item.arg, nodes.Const) and item.arg.value == 0 and _is_calls(item.node)


def _compares_id(compare: nodes.Compare) -> bool:
    """Return whether a comparison is that of an id's length with ID_LENGTH."""
    measured = compare.expr
    return (
        isinstance(measured, nodes.Filter)
        and measured.name == "length"
        and attribute_of(measured.node) in ("id", "tool_call_id")
        and any(isinstance(each.expr, nodes.Const) and each.expr.value == ID_LENGTH for each in compare.ops)
    )


def _iterates_arguments(tree: nodes.Template) -> bool:
    """Return whether a template writes a call's arguments one by one: `x.arguments|items` or `x.arguments.items()`."""
    items = [each.node for each in tree.find_all(nodes.Filter) if each.name == "items"]
    items += [each.node for each in tree.find_all(nodes.Getattr) if each.attr == "items"]
    names = {
        each.target.name
        for each in tree.find_all(nodes.Assign)
        if isinstance(each.target, nodes.Name) and attribute_of(each.node) == "arguments"
    }
    return any(attribute_of(each) == "arguments" or getattr(each, "name", None) in names for each in items)


def _refuses_two_texts(condition: nodes.If) -> bool:
    """Return whether a condition refuses messages that have both content and reasoning."""
    read = {attribute_of(node) for node in condition.test.find_all(nodes.Getattr)}
    calls = [call.node for statement in condition.body for call in statement.find_all(nodes.Call)]
    refuses = any(isinstance(function, nodes.Name) and function.name == "raise_exception" for function in calls)
    return read == {"content", "thinking"} and refuses


def _described(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    if not isinstance(function, dict) or "description" in function:
        return tool
    return {**tool, "function": {"name": function.get("name"), "description": "", **function}}


def _one_call_each(messages: list[Message]) -> list[Message]:
    """Split messages with several calls: each call is followed by its own result."""
    split: list[Message] = []
    index = 0
    while index < len(messages):
        message, index = messages[index], index + 1
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            split.append(message)
            continue
        results: list[Message] = []
        while index < len(messages) and messages[index].get("role") == "tool":
            results.append(messages[index])
            index += 1
        unused = {id(result): result for result in results}
        by_call: dict[Any, list[Message]] = {}
        for result in reversed(results):
            by_call.setdefault(result.get("tool_call_id"), []).append(result)
        for call in calls:
            split.append({**message, "tool_calls": [call]})
            if own := by_call.get(call.get("id")):
                split.append(unused.pop(id(own.pop())))
            message = {"role": "assistant", "content": message["content"][:0]}
        split += unused.values()
    return split


def _with_short_ids(message: Message) -> Message:
    if "tool_calls" in message:
        calls = [{**call, "id": _short(call["id"])} if "id" in call else call for call in message["tool_calls"]]
        message = {**message, "tool_calls": calls}
    if "tool_call_id" in message:
        message = {**message, "tool_call_id": _short(message["tool_call_id"])}
    return message


def _short(call_id: Any) -> Any:
    """Return an id of ID_LENGTH letters and digits, always the same one for a longer or shorter id."""
    if not isinstance(call_id, str) or (len(call_id) == ID_LENGTH and call_id.isascii() and call_id.isalnum()):
        return call_id
    return hashlib.sha256(call_id.encode("utf-8", "surrogatepass")).hexdigest()[:ID_LENGTH]


def _with_numbered_ids(messages: list[Message]) -> list[Message]:
    """Replace ids by those that Kimi K2 writes, functions.NAME:0, counted through the whole conversation.

    A client may repeat an id. Results then belong to the calls of the last message that has it, in their order.
    """
    count = itertools.count()
    numbered: dict[Any, deque[str]] = {}  # by the client's id
    renamed: list[Message] = []
    for turn in messages:
        message = turn
        if calls := turn.get("tool_calls"):
            numbered |= {call.get("id"): deque() for call in calls}
            made = []
            for call in calls:
                new = f"{PREFIX}{(call.get('function') or {}).get('name')}:{next(count)}"
                numbered[call.get("id")].append(new)
                made.append({**call, "id": new})
            message = {**turn, "tool_calls": made}
        elif own := numbered.get(turn.get("tool_call_id")):
            message = {**turn, "tool_call_id": own.popleft() if len(own) > 1 else own[0]}
        renamed.append(message)
    return renamed


def _with_metadata(message: Message) -> list[Message]:
    """Return a call or a result as GLM-4-0414 has it: a message with the name of the function, and an observation.

    A message has at most one call. The text before it is a message of its own.
    """
    if message.get("role") == "tool":
        return [{**message, "role": "observation"}]
    if not message.get("tool_calls"):
        return [message]
    content = message["content"]
    function = message["tool_calls"][0].get("function") or {}
    written = function.get("arguments", {})
    text = written if isinstance(written, str) else json.dumps(written, ensure_ascii=False)
    call = {
        "role": message["role"],
        "metadata": function.get("name"),
        "content": [{"type": "text", "text": text}] if isinstance(content, list) else text,
    }
    before = {key: value for key, value in message.items() if key != "tool_calls"}
    return [before, call] if content else [call]


def _with_objects(message: Message) -> Message:
    """Replace arguments that are text, as those of a truncated call: the template writes them one by one."""
    if "tool_calls" not in message:
        return message
    return {**message, "tool_calls": [_with_object(call) for call in message["tool_calls"]]}


def _with_object(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(text := function.get("arguments"), str):
        return call
    try:
        written = from_json(text, allow_partial="trailing-strings")
    except ValueError:
        written = None
    return {
        **call,
        "function": {**function, "arguments": written if isinstance(written, dict) else {"arguments": text}},
    }


def _with_one_text(message: Message) -> Message:
    """Move the content before a call to the end of the reasoning, as the message of gpt-oss that it was."""
    content, thinking = message["content"], message.get("thinking")
    if not (thinking and content and isinstance(content, str) and message.get("tool_calls")):
        return message
    return {**message, "content": "", "thinking": f"{thinking}{PREAMBLE}{content}"}
