"""Conversations: messages to a prompt, whichever API they came by."""

from __future__ import annotations

from collections.abc import Iterable

from .protocol.common import Json, Prompt
from .protocol.conversation import Conversation, Tool
from .state import Pequod


async def encode(app: Pequod, asked: Conversation) -> list[Prompt]:
    """The conversation as the model's chat template writes it."""
    assert app.prompts is not None
    calling = asked.calling
    tools = as_tools(calling.in_prompt if calling else ())
    return [Prompt(tuple(await app.prompts.chat(asked.turns, tools, **asked.render_options)))]


def as_tools(tools: Iterable[Tool]) -> list[Json] | None:
    """Tools as chat templates read them; None: there are none."""
    return [tool.as_json for tool in tools] or None
