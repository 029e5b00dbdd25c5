"""Tools for models whose chat template knows none: described in the instructions, called and answered as plain text.

The calls have the form of Hermes' models, which many models without a form of their own have seen: a JSON object with
the function's name and its arguments between <tool_call> and </tool_call>.
"""

from __future__ import annotations

import contextlib
import json
import re
from typing import Any

from ..parsers.formats import MARKS

Json = dict[str, Any]

FORMAT = "hermes"
OPENS, CLOSES = MARKS[FORMAT]
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
    """Whether a chat template writes the tools that it is given into the prompt."""
    return re.search(r"\btools\b", template) is not None


def described(turns: list[Json], tools: list[Json] | None, *, takes_system: bool) -> list[Json]:
    """The messages with the tools, calls and results as text.

    `takes_system` false: the template has no place for instructions, which then begin the first message of the user.
    """
    spoken = _merged([_spoken(turn) for turn in turns])
    if not tools:
        return spoken
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = DESCRIPTION.format(tools=listed, opens=OPENS, closes=CLOSES)
    if not takes_system:
        index = next((i for i, turn in enumerate(spoken) if turn["role"] == "user"), None)
        if index is None:
            return [{"role": "user", "content": text}, *spoken]
        return [*spoken[:index], _begun(spoken[index], text), *spoken[index + 1 :]]
    if spoken and spoken[0]["role"] in ("system", "developer"):
        return [_begun(spoken[0], text, after=True), *spoken[1:]]
    return [{"role": "system", "content": text}, *spoken]


def _spoken(turn: Json) -> Json:
    """A message without calls and results: they are in its text."""
    if turn["role"] == "tool":
        content = f"<tool_response>\n{_text(turn.get('content'))}\n</tool_response>"
        return {"role": "user", "content": content, RESULT: True}
    calls = turn.get("tool_calls")
    if not calls:
        return turn
    written = [_text(turn.get("content")), *(_call(call["function"]) for call in calls)]
    rest = {name: value for name, value in turn.items() if name != "tool_calls"}
    return {**rest, "content": "\n".join(filter(None, written))}


RESULT = "result"  # marks what has been the result of a call, until several in a row are put together


def _merged(turns: list[Json]) -> list[Json]:
    """Results in a row as one message: many templates want users and assistants by turns."""
    merged: list[Json] = []
    for turn in turns:
        if RESULT in turn and merged and RESULT in merged[-1]:
            merged[-1] = {**merged[-1], "content": merged[-1]["content"] + "\n" + turn["content"]}
        else:
            merged.append(turn)
    return [{name: value for name, value in turn.items() if name != RESULT} for turn in merged]


def _call(function: Json) -> str:
    """A call as the model writes it."""
    arguments = function["arguments"]
    with contextlib.suppress(ValueError, RecursionError):  # a call that was cut off stays as it was
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    return f"{OPENS}\n{json.dumps({'name': function['name'], 'arguments': arguments}, ensure_ascii=False)}\n{CLOSES}"


def _text(content: Any) -> str:
    """Content, text or parts of it, as one text."""
    if isinstance(content, list):
        return "\n".join(part.get("text", "") for part in content)
    return content or ""


def _begun(turn: Json, text: str, *, after: bool = False) -> Json:
    """A message with another text before its own, or after it."""
    own = _text(turn.get("content"))
    return {**turn, "content": "\n\n".join(filter(None, (own, text) if after else (text, own)))}
