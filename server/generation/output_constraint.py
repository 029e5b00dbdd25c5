"""Conversations: messages to a prompt, and what the model's text means, whichever API the messages came by."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..api.conversation import Calling, Conversation, Tool
from ..api.sampling import UNLIMITED, Drawing
from ..grammar.checker import Gate, refusal
from ..grammar.schemas import MAX_SOURCE, Grammar
from ..grammar.tool_calls import call_grammar
from ..http.admission import Caller
from ..http.errors import invalid
from ..loading import LoadedModel
from ..parsers import Formats, MessageParser, ends_reasoning, markers, message_parser, reasoning_opened
from ..tokenization.encoder import Prompts, TextTooLong
from ..tokenization.generic_tools import FORMAT as GENERIC
from .output import Json, Prompt

ANY_ARGUMENTS: Json = {"type": "object"}
TAIL = 32  # tokens at a prompt's end, in which a block of reasoning can have been opened


async def encode(model: LoadedModel, caller: Caller, asked: Conversation, *, fits: bool = True) -> list[Prompt]:
    """The conversation as the model's chat template writes it; `fits`: it must fit the context."""
    prompts = model.prompts
    calling = asked.calling
    if calling is not None:
        check_takes_tools(model)
    tools = as_tools(calling.in_prompt if calling else ())
    ids: list[int] = []
    error: TextTooLong | None = None
    try:
        ids = await prompts.chat(asked.turns, tools, caller=caller.flow, fits=fits, **asked.render_options)
    except TextTooLong as raised:
        error = raised
    is_long = error is not None or (fits and prompts.max_len is not None and len(ids) >= prompts.max_len)
    if is_long and calling is not None and not calling.is_required and not await fit_alone(prompts, caller, tools):
        # Some chat interfaces send more tools with every message than a small model's context holds. The model may
        # answer without them. Where the conversation has become too long, though, the client must hear of it.
        ids = await prompts.chat(asked.turns, None, caller=caller.flow, fits=fits, **asked.render_options)
        return [Prompt(tuple(ids), left_out="tools")]
    if error is not None:
        raise error
    return [Prompt(tuple(ids))]


async def fit_alone(prompts: Prompts, caller: Caller, tools: list[Json] | None) -> bool:
    """Whether the context has room for these tools and anything else."""
    try:
        ids = await prompts.chat([{"role": "user", "content": ""}], tools, caller=caller.flow)
    except TextTooLong:
        return False
    return prompts.max_len is None or len(ids) < prompts.max_len


def check_takes_tools(model: LoadedModel) -> None:
    """Raise 400 where the operator has chosen a parser with which no call could be read."""
    if model.formats.tools is None:
        raise invalid("Invalid 'tools': this server runs with --tool-call-parser none.", "tools")
    if model.formats.tools != GENERIC and not model.prompts.renders_tools:
        raise invalid(
            "Invalid 'tools': the model's chat template renders no tools, and those that are described to the model "
            f"without it are called in the format of --tool-call-parser {GENERIC}.",
            "tools",
        )


def as_tools(tools: Iterable[Tool]) -> list[Json] | None:
    """Tools as chat templates read them; None: there are none."""
    return [tool.as_json for tool in tools] or None


class Shape(NamedTuple):
    """What an answer is written by and read with."""

    formats: Formats
    grammar: Grammar | None  # of the whole text
    is_opened: bool  # the prompt ends inside of a block of reasoning


async def shape(
    gate: Gate, model: LoadedModel, caller: Caller, asked: Conversation, *, grammar: Grammar | None, prompt: Prompt
) -> Shape:
    """How the answer to a prompt looks, where `grammar` is what the request says of it; raises 400.

    Calls that must be made, or whose functions are strict, and an end to the reasoning are grammars too: one of the
    whole text, in the model's own format.
    """
    formats, opened = model.formats, is_opened(model, prompt.ids)
    calling = asked.calling
    if grammar is not None and grammar.is_raw:
        if calling is not None and calling.is_required:
            message = f"Invalid '{grammar.field}': must be absent where tool_choice asks for a call."
            raise invalid(message, grammar.field)
        return Shape(formats, grammar, opened)
    is_formed = grammar is not None or (calling is not None and calling.is_required)
    budget = thinking_budget(model, asked, prompt, is_formed=is_formed)
    is_shaped = calling is not None and (calling.is_required or any(tool.strict for tool in calling.tools))
    is_mixed = grammar is not None and (calling is not None or formats.reasoning is not None)
    if not is_shaped and not is_mixed and budget is None:
        return Shape(formats, grammar, opened)
    field = "tools" if is_shaped else grammar.field if grammar is not None else budget[0] if budget else ""
    # A budget alone leaves the answer free.
    check_takes_grammars(model, asked, field, is_free=not is_shaped and grammar is None)
    tools = await checked_tools(gate, caller, calling) if calling else {}
    forced = await asyncio.to_thread(
        call_grammar,
        formats,
        tools,
        required=calling is not None and calling.is_required,
        parallel=calling is None or calling.is_parallel,
        opened=opened,
        special=model.tokenizer.added_ids,
        content=None if grammar is None else grammar.text,
        budget=None if budget is None else budget[1],
    )
    if len(forced.text) > MAX_SOURCE:
        what = "the grammar of all functions and formats together"
        raise refusal(field, f"{what} has {len(forced.text)} characters, and at most {MAX_SOURCE} can be used")
    whole = await gate.check(Grammar(forced.kind, forced.text, field), caller.flow)
    return Shape(forced.formats, whole, opened)


def thinking_budget(
    model: LoadedModel, asked: Conversation, prompt: Prompt, *, is_formed: bool
) -> tuple[str, int] | None:
    """The field that bounds the reasoning, and its most tokens; None: nothing does. Raises 400.

    `is_formed`: the output must be a call or follow a schema. Then reasoning that took all tokens would leave nothing
    of use: unless the request says how much may be thought, it is half of the tokens that it asks for, or of those that
    the context has left. No reasoning is begun where the request has switched thinking off.
    """
    if model.formats.reasoning is None:
        return None
    can_end = ends_reasoning(model.formats) in model.tokenizer.added_ids
    (field, limit), budget = asked.limit, asked.thinking_budget
    room = max(0, model.info.max_len - len(prompt.ids))
    most = room if limit is None or limit == UNLIMITED else min(limit, room)
    if is_formed and can_end and asked.thinks is False:
        return field, 0
    if budget is None and is_formed and can_end:
        return field, most // 2
    if budget is None or budget[1] == -1 or budget[1] >= most:
        return None
    if not can_end:
        raise invalid(f"Invalid '{budget[0]}': the marks of the model's reasoning are not tokens.", budget[0])
    return budget


async def checked_tools(gate: Gate, caller: Caller, calling: Calling) -> dict[str, Json]:
    """Names and schemas of the tools, those that must be followed checked; the others' arguments are any object."""
    schemas = {}
    for tool in calling.tools:
        schemas[tool.name] = ANY_ARGUMENTS
        if calling.is_required or tool.strict:
            types = tool.parameters.get("type", "object")
            if "object" not in (types if isinstance(types, list) else [types]):
                raise refusal(
                    tool.field, "the arguments of a function are an object, and 'type' at '/type' says otherwise"
                )
            schemas[tool.name] = {**tool.parameters, "type": "object"}
            await gate.check(Grammar("json_schema", json.dumps(schemas[tool.name]), tool.field), caller.flow)
    return schemas


def check_takes_grammars(model: LoadedModel, asked: Drawing, field: str, *, is_free: bool = False) -> None:
    """Raise 400 where no grammar can be followed. `is_free`: the end of the answer is not the grammar's matter."""
    if not model.tokenizer.takes_grammars:
        raise invalid(f"Invalid '{field}': this model's tokenizer cannot be used with it.", field)
    if is_free:
        return
    if asked.min_tokens:
        raise invalid("Invalid 'min_tokens': must be absent where the answer has to follow a grammar.", "min_tokens")
    if asked.stops:
        # What a stop string cuts off may be what makes the answer valid.
        stops = asked.stop_field
        raise invalid(f"Invalid '{stops}': must be absent where the answer has to follow a grammar.", stops)


def parser(asked: Conversation, shape: Shape) -> MessageParser:
    """What reads an answer."""
    calling = asked.calling
    tools = {tool.name: tool.parameters for tool in calling.tools} if calling else {}
    return message_parser(shape.formats, tools=tools, opened=shape.is_opened, new_id=new_call_id)


def is_opened(model: LoadedModel, prompt_ids: Sequence[int]) -> bool:
    """Whether the answer begins inside of a block of reasoning that the prompt has opened."""
    return reasoning_opened(model.formats, model.tokenizer.decode(prompt_ids[-TAIL:], skip_special=False))


def hidden_ids(model: LoadedModel, formats: Formats) -> frozenset[int]:
    """Special tokens that have no text in an answer: all but the marks that its parser must see."""
    return model.tokenizer.special_ids - model.tokenizer.ids_of(markers(formats))


def new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"
