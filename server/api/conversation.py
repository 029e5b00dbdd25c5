"""What the APIs with conversations share: tool_choice, token counts, and whether and how much the model reasons."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal

from fastapi import Request

from ..generation.output import Json
from ..generation.prepare import encode_conversation, refusals
from ..generation.request import Calling, ConversationPrompt, Tool
from ..http.admission import Caller
from ..http.disconnect import while_connected
from ..http.fields import clash
from ..state import AppState
from ..tokenization.renderer import SWITCHES

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def check_choice(choice: Any, chosen: Collection[str], names: Collection[str]) -> None:
    """Raise unless a tool_choice, which names the functions `chosen`, is valid for tools of these `names`."""
    if choice is None or choice in ("none", "auto"):
        return
    if not names:
        raise clash("must be absent, none or auto where there are no tools")
    if not {*chosen} <= {*names}:
        raise clash("names a function that is not in `tools`")


def calling_of(
    tools: tuple[Tool, ...], choice: Any, chosen: Collection[str], *, mode: str | None, parallel: bool | None
) -> Calling | None:
    """Return how a response may call tools.

    The choice is a word or the functions `chosen`: one of them must be called (`mode` None), or they may (auto) or must
    (required) be. `parallel` false: at most one call.
    """
    if not tools or choice == "none":
        return None
    is_parallel = parallel is not False
    if not chosen:
        return Calling(tools, choice == "required", is_parallel)
    some = tuple(tool for tool in tools if tool.name in chosen)
    return Calling(some, mode != "auto", is_parallel and mode is not None, described=tools)


async def count_tokens(
    app: AppState, caller: Caller, request: Request, model: str | None, source: ConversationPrompt, *, field: str
) -> int:
    """Return the number of tokens of a conversation's prompt; `field` is the one that an error names."""
    app.check_model(model)
    encoding = encode_conversation(app.require_ready(), caller, source, fits=False)
    with refusals(field):
        [prompt] = await while_connected(request, encoding)
    return len(prompt.ids)


def thinking_variables(thinks: bool | None, effort: str | None, own: Json | None) -> Json | None:
    """Return the chat template's variables for reasoning, under all names that templates use; `own` overrides them."""
    variables: Json = {}
    if thinks is not None:
        variables |= dict.fromkeys(SWITCHES, thinks)
    if effort is not None and effort != "none":
        variables["reasoning_effort"] = effort
    return (variables | (own or {})) or None


def is_thinking(own: Json | None, *others: bool | None) -> bool | None:
    """Whether the model is to reason: the request's own variables decide, then the first of the others that is set."""
    for name in SWITCHES:
        if isinstance(value := (own or {}).get(name), bool):
            return value
    return next((value for value in others if value is not None), None)


def by_effort(effort: str | None) -> bool | None:
    """Whether a model whose reasoning can only be turned on or off reasons at this effort."""
    return None if effort is None else effort != "none"
