"""What a request says that goes on with a conversation, whichever API's form it came in."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal

from fastapi import Request

from ..generation.output import Json
from ..generation.prepare import encode_conversation, text_error
from ..generation.request import Calling, ConversationPrompt, Tool
from ..http.admission import Caller
from ..http.disconnect import while_connected
from ..http.fields import clash
from ..state import Pequod
from ..tokenization.encoder import TextTooLong
from ..tokenization.renderer import SWITCHES, TemplateError

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


def check_choice(choice: Any, chosen: Collection[str], names: Collection[str]) -> None:
    """Raise unless a tool_choice, which names the functions `chosen`, goes with tools of these `names`."""
    if choice is None or choice in ("none", "auto"):
        return
    if not names:
        raise clash("must be absent, none or auto where there are no tools")
    if not {*chosen} <= {*names}:
        raise clash("must name functions that are among the tools")


def calling_of(
    tools: tuple[Tool, ...], choice: Any, chosen: Collection[str], *, mode: str | None, parallel: bool | None
) -> Calling | None:
    """What a tool_choice means: a word, or the functions `chosen`, of which one must be called (`mode` None) or those
    that may be (auto) or must be (required); `parallel` false: at most one call."""
    if not tools or choice == "none":
        return None
    is_parallel = parallel is not False
    if not chosen:
        return Calling(tools, choice == "required", is_parallel)
    some = tuple(tool for tool in tools if tool.name in chosen)
    return Calling(some, mode != "auto", is_parallel and mode is not None, told=tools)


async def count_tokens(
    app: Pequod, caller: Caller, request: Request, model: str | None, source: ConversationPrompt, *, field: str
) -> int:
    """Return the number of tokens of a conversation's prompt; `field` is the one that an error names."""
    app.check_model(model)
    encoding = encode_conversation(app.require_ready(), caller, source, fits=False)
    try:
        [prompt] = await while_connected(request, encoding)
    except (TemplateError, TextTooLong) as error:
        raise text_error(error, field) from None
    return len(prompt.ids)


def thinking_variables(thinks: bool | None, effort: str | None, own: Json | None) -> Json | None:
    """What the template is told about thinking, under the names that templates have for it.

    `own`, the variables of the request itself, count before all others.
    """
    told: Json = {}
    if thinks is not None:
        told |= dict.fromkeys(SWITCHES, thinks)
    if effort is not None and effort != "none":
        told["reasoning_effort"] = effort
    return (told | (own or {})) or None


def is_thinking(own: Json | None, *others: bool | None) -> bool | None:
    """Whether the model is to think: as the request's own variables say, or the first of the others that says it."""
    for name in SWITCHES:
        if isinstance(value := (own or {}).get(name), bool):
            return value
    return next((value for value in others if value is not None), None)


def by_effort(effort: str | None) -> bool | None:
    """Whether a model that can only be told to think or not to think does so at this effort."""
    return None if effort is None else effort != "none"
