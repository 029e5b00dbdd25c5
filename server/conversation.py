"""Conversations: messages to a prompt, and what the model's text means, whichever API the messages came by."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence

from .errors import invalid
from .parsers import MessageParser, markers, message_parser, reasoning_opened
from .protocol.common import Json, Prompt
from .protocol.conversation import Conversation, Tool
from .state import Pequod

TAIL = 32  # tokens at a prompt's end, in which a block of reasoning can have been opened


async def encode(app: Pequod, asked: Conversation) -> list[Prompt]:
    """The conversation as the model's chat template writes it."""
    assert app.prompts is not None
    calling = asked.calling
    if calling is not None and app.formats.tools is None:
        raise invalid(
            "Invalid 'tools': the model's chat template knows no tools. The server has --tool-call-parser.", "tools"
        )
    check_effort(app, asked)
    tools = as_tools(calling.in_prompt if calling else ())
    return [Prompt(tuple(await app.prompts.chat(asked.turns, tools, **asked.render_options)))]


def check_effort(app: Pequod, asked: Conversation) -> None:
    """Raise 400 where the effort that is asked for would change nothing."""
    assert app.prompts is not None
    if asked.effort is None or asked.effort[1] == "medium":
        return
    field, effort = asked.effort
    variable = "enable_thinking" if effort == "none" else "reasoning_effort"
    if variable not in app.prompts.template_source and (effort != "none" or app.formats.reasoning is not None):
        raise invalid(f"Invalid '{field}': the model's chat template does not know {variable}.", field)


def as_tools(tools: Iterable[Tool]) -> list[Json] | None:
    """Tools as chat templates read them; None: there are none."""
    return [tool.as_json for tool in tools] or None


def parser(app: Pequod, asked: Conversation, prompt_ids: Sequence[int]) -> MessageParser:
    """What reads an answer to this prompt."""
    calling = asked.calling
    tools = {tool.name: tool.parameters for tool in calling.tools} if calling else {}
    return message_parser(app.formats, tools=tools, opened=is_opened(app, prompt_ids), new_id=new_call_id)


def is_opened(app: Pequod, prompt_ids: Sequence[int]) -> bool:
    """Whether the answer begins inside of a block of reasoning that the prompt has opened."""
    assert app.tokenizer is not None
    return reasoning_opened(app.formats, app.tokenizer.decode(prompt_ids[-TAIL:], skip_special=False))


def hidden_ids(app: Pequod) -> frozenset[int]:
    """Special tokens that have no text in an answer: all but the marks that its parser must see."""
    assert app.tokenizer is not None
    return app.tokenizer.special_ids - app.tokenizer.ids_of(markers(app.formats))


def new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"
