"""Tools for models whose chat template does not support them: instructions, calls and results as plain text.

The calls have the format of Hermes' models, which many models have been trained on: a JSON object with the function's
name and arguments between <tool_call> and </tool_call>.
"""

from __future__ import annotations

import contextlib
import json
import re
from typing import Any

from ..parsers.formats import CALL_DELIMITERS

Json = dict[str, Any]

FORMAT = "hermes"
OPENS, CLOSES = CALL_DELIMITERS[FORMAT]
DESCRIPTION = """You can call functions. Each line between <tools> and </tools> describes one of them as JSON.
<tools>
{tools}
</tools>
To call a function, write a JSON object with its name and its arguments between {opens} and {closes}:
{opens}
{{"name": "the function's name", "arguments": {{"argument": "value"}}}}
{closes}
The result then comes between <tool_response> and </tool_response>. Answer in words where no function helps."""


def renders_tools(template: str) -> bool:
    """Whether a chat template writes its tools into the prompt."""
    return re.search(r"\btools\b", template) is not None


def described(turns: list[Json], tools: list[Json] | None, *, takes_system: bool) -> list[Json]:
    """The messages, with tools, calls and results as text.

    If the template ignores system messages (`takes_system` false), the description begins the user's first message.
    """
    plain = _merged([_plain(turn) for turn in turns])
    if not tools:
        return plain
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = DESCRIPTION.format(tools=lines, opens=OPENS, closes=CLOSES)
    if takes_system:
        if plain and plain[0]["role"] in ("system", "developer"):
            return [_joined(plain[0], _text(plain[0].get("content")), text), *plain[1:]]
        return [{"role": "system", "content": text}, *plain]
    index = next((i for i, turn in enumerate(plain) if turn["role"] == "user"), None)
    if index is None:
        return [{"role": "user", "content": text}, *plain]
    return [*plain[:index], _joined(plain[index], text, _text(plain[index].get("content"))), *plain[index + 1 :]]


def _plain(turn: Json) -> Json:
    """A message with its calls or result as text."""
    if turn["role"] == "tool":
        content = f"<tool_response>\n{_text(turn.get('content'))}\n</tool_response>"
        return {"role": "user", "content": content, RESULT: True}
    calls = turn.get("tool_calls")
    if not calls:
        return turn
    written = [_text(turn.get("content")), *(_call(call["function"]) for call in calls)]
    rest = {name: value for name, value in turn.items() if name != "tool_calls"}
    return {**rest, "content": "\n".join(filter(None, written))}


RESULT = "result"  # set in a message that was the result of a call, until consecutive ones are merged


def _merged(turns: list[Json]) -> list[Json]:
    """Merge consecutive results into one message: many templates require that user and assistant alternate."""
    merged: list[Json] = []
    for turn in turns:
        if RESULT in turn and merged and RESULT in merged[-1]:
            merged[-1] = {**merged[-1], "content": merged[-1]["content"] + "\n" + turn["content"]}
        else:
            merged.append(turn)
    return [{name: value for name, value in turn.items() if name != RESULT} for turn in merged]


def _call(function: Json) -> str:
    """A call as text, in the model's format."""
    arguments = function["arguments"]
    with contextlib.suppress(ValueError, RecursionError):  # a truncated call stays as it is
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    return f"{OPENS}\n{json.dumps({'name': function['name'], 'arguments': arguments}, ensure_ascii=False)}\n{CLOSES}"


def _text(content: Any) -> str:
    """The text of a message's content."""
    if isinstance(content, list):
        return "\n".join(part.get("text", "") for part in content)
    return content or ""


def _joined(turn: Json, *texts: str) -> Json:
    """The message with these texts as paragraphs."""
    return {**turn, "content": "\n\n".join(filter(None, texts))}
