"""What the answer to a conversation must look like, and what reads it, whichever API the messages came by."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Sequence
from typing import NamedTuple

from ..grammar.checker import Gate, refusal
from ..grammar.schemas import MAX_SOURCE, Grammar, constraining
from ..grammar.tool_calls import call_grammar
from ..http.admission import Caller
from ..http.errors import invalid
from ..loading import LoadedModel
from ..parsers import Formats, MessageParser, delimiters, ends_reasoning, message_parser, reasoning_opened
from .output import Json, Prompt
from .request import UNLIMITED, Calling, ConversationPrompt, GenerationRequest

ANY_ARGUMENTS: Json = {"type": "object"}
TAIL = 32  # tokens at a prompt's end, in which a block of reasoning can have been opened


class Shape(NamedTuple):
    """What an answer is written by and read with."""

    formats: Formats
    grammar: Grammar | None  # of the whole text
    is_opened: bool  # the prompt ends inside of a block of reasoning
    calling: Calling | None

    def parser(self) -> MessageParser:
        """What reads an answer."""
        tools = {tool.name: tool.parameters for tool in self.calling.tools} if self.calling else {}
        return message_parser(self.formats, tools=tools, opened=self.is_opened, new_id=new_call_id)


async def shape(
    gate: Gate,
    model: LoadedModel,
    caller: Caller,
    asked: GenerationRequest,
    *,
    conversation: ConversationPrompt,
    grammar: Grammar | None,
    prompt: Prompt,
) -> Shape:
    """How the answer to a conversation looks, where `grammar` is what the request says of it; raises 400.

    Calls that must be made, or whose functions are strict, and an end to the reasoning are grammars too: one of the
    whole text, in the model's own format.
    """
    formats, opened = model.formats, is_opened(model, prompt.ids)
    calling = conversation.calling
    if grammar is not None and grammar.is_raw:
        if calling is not None and calling.is_required:
            message = f"Invalid '{grammar.field}': must be absent where tool_choice asks for a call."
            raise invalid(message, grammar.field)
        return Shape(formats, grammar, opened, calling)
    is_formed = grammar is not None or (calling is not None and calling.is_required)
    budget = thinking_budget(model, asked.limit, conversation, prompt, is_formed=is_formed)
    is_shaped = calling is not None and (calling.is_required or any(tool.strict for tool in calling.tools))
    is_mixed = grammar is not None and (calling is not None or formats.reasoning is not None)
    if not is_shaped and not is_mixed and budget is None:
        return Shape(formats, grammar, opened, calling)
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
    return Shape(forced.formats, whole, opened, calling)


def thinking_budget(
    model: LoadedModel,
    limited: tuple[str, int | None],
    conversation: ConversationPrompt,
    prompt: Prompt,
    *,
    is_formed: bool,
) -> tuple[str, int] | None:
    """The field that bounds the reasoning, and its most tokens; None: nothing does. Raises 400.

    `is_formed`: the output must be a call or follow a schema. Then reasoning that took all tokens would leave nothing
    of use: unless the request says how much may be thought, it is half of the tokens that it asks for, or of those that
    the context has left. No reasoning is begun where the request has switched thinking off.
    """
    if model.formats.reasoning is None:
        return None
    can_end = ends_reasoning(model.formats) in model.tokenizer.added_ids
    (field, limit), budget = limited, conversation.thinking_budget
    room = max(0, model.info.max_len - len(prompt.ids))
    most = room if limit is None or limit == UNLIMITED else min(limit, room)
    if is_formed and can_end and conversation.thinks is False:
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
            schemas[tool.name] = constraining({**tool.parameters, "type": "object"})
            await gate.check(Grammar("json_schema", json.dumps(schemas[tool.name]), tool.field), caller.flow)
    return schemas


def check_takes_grammars(model: LoadedModel, asked: GenerationRequest, field: str, *, is_free: bool = False) -> None:
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


def is_opened(model: LoadedModel, prompt_ids: Sequence[int]) -> bool:
    """Whether the answer begins inside of a block of reasoning that the prompt has opened."""
    return reasoning_opened(model.formats, model.tokenizer.decode(prompt_ids[-TAIL:], skip_special=False))


def hidden_ids(model: LoadedModel, formats: Formats) -> frozenset[int]:
    """Special tokens that have no text in an answer: all but the marks that its parser must see."""
    return model.tokenizer.special_ids - model.tokenizer.ids_of(delimiters(formats))


def new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"
