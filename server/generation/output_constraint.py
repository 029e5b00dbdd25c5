"""The formats and the grammar of the completion of a conversation, for all APIs."""

from __future__ import annotations

import asyncio
import json
import uuid
from typing import NamedTuple

from ..grammar.checker import Gate, refusal
from ..grammar.rules import TooLong
from ..grammar.schemas import MAX_WRITTEN, Grammar, of_schema
from ..grammar.tool_calls import call_grammar
from ..http.admission import Caller
from ..http.errors import invalid
from ..loading import LoadedModel
from ..parsers.formats import Formats, delimiters, ends_reasoning, reasoning_closed, reasoning_opened
from ..parsers.parts import MessageParser
from ..parsers.select import message_parser
from .output import Json, Prompt
from .request import UNLIMITED, Calling, ConversationPrompt, GenerationRequest

ANY_ARGUMENTS: Json = {"type": "object"}
TAIL = 32  # tokens at a prompt's end that can open a block of reasoning


class Shape(NamedTuple):
    """How a completion is written and parsed."""

    formats: Formats
    grammar: Grammar | None  # of the whole text
    is_opened: bool  # the prompt ends inside a block of reasoning
    calling: Calling | None
    enforces_calls: bool = False  # the grammar makes calls follow the schemas of their tools

    def parser(self) -> MessageParser:
        """Return a parser for one completion."""
        tools = {tool.name: tool.parameters for tool in self.calling.tools} if self.calling else {}
        return message_parser(
            self.formats,
            tools=tools,
            opened=self.is_opened,
            new_id=new_call_id,
            closes_reasoning=self.grammar is not None,
        )


async def output_shape(
    gate: Gate,
    model: LoadedModel,
    caller: Caller,
    request: GenerationRequest,
    *,
    conversation: ConversationPrompt,
    grammar: Grammar | None,
    prompt: Prompt,
) -> Shape:
    """Return the shape of the completion of a conversation; raises 400. `grammar` is the request's own.

    Required calls, strict functions and a limit of the reasoning are enforced by one grammar of the whole text, in the
    model's own format, which includes the request's grammar.
    """
    formats = model.formats
    prompt_tail = model.tokenizer.decode(prompt.ids[-TAIL:], skip_special=False)
    opened = reasoning_opened(formats, prompt_tail)
    calling = conversation.calling
    if grammar is not None and grammar.is_raw:
        if calling is not None and calling.is_required:
            message = f"Invalid '{grammar.field}': cannot be combined with a tool_choice that requires a call."
            raise invalid(message, grammar.field)
        # Such a text has no reasoning, unless the grammar itself ends the block that the prompt has opened.
        return Shape(formats, grammar, opened and (ends_reasoning(formats) or "") in grammar.text, calling)
    is_constrained = grammar is not None or (calling is not None and calling.is_required)
    is_off = conversation.thinks is False or reasoning_closed(formats, prompt_tail)
    budget = thinking_budget(model, request.limit, conversation, prompt, is_constrained=is_constrained, is_off=is_off)
    is_shaped = calling is not None and calling.is_enforced
    is_mixed = grammar is not None and (calling is not None or formats.reasoning is not None)
    if not is_shaped and not is_mixed and budget is None:
        return Shape(formats, grammar, opened, calling)
    field = "tools" if is_shaped else grammar.field if grammar is not None else budget[0] if budget else ""
    # A budget alone does not constrain the content.
    check_accepts_grammars(model, request, field, is_free=not is_shaped and grammar is None)
    tools = await checked_tools(gate, caller, calling) if calling else {}
    try:
        forced = await asyncio.to_thread(
            call_grammar,
            formats,
            tools,
            required=calling is not None and calling.is_required,
            parallel=calling is None or calling.is_parallel,
            opened=opened,
            special=model.tokenizer.added_ids,
            content=None if grammar is None else (grammar.kind, grammar.text),
            budget=None if budget is None else budget[1],
        )
    except TooLong as e:
        name = "the grammar of all functions and formats together"
        raise refusal(
            field, f"{name} has more than {MAX_WRITTEN} characters, which is the most that can be used"
        ) from e
    whole = await gate.check(Grammar(forced.kind, forced.text, field), caller.flow, limit=MAX_WRITTEN)
    return Shape(forced.formats, whole, opened, calling, is_shaped)


def thinking_budget(
    model: LoadedModel,
    limited: tuple[str, int | None],
    conversation: ConversationPrompt,
    prompt: Prompt,
    *,
    is_constrained: bool,
    is_off: bool,
) -> tuple[str, int] | None:
    """Return the field that limits the reasoning, and the limit in tokens; None: no limit. Raises 400.

    `is_constrained`: the content must be a call or follow a schema, so that reasoning must not use up all tokens. By
    default it may use half of those that the request allows or the context has left. `is_off`: the request or the chat
    template has turned it off, so that there is none.
    """
    if model.formats.reasoning is None:
        return None
    can_end = ends_reasoning(model.formats) in model.tokenizer.added_ids
    (field, limit), budget = limited, conversation.thinking_budget
    left = max(0, model.info.max_len - len(prompt.ids))
    most = left if limit is None or limit == UNLIMITED else min(limit, left)
    if is_constrained and can_end and is_off:
        return field, 0
    if budget is None and is_constrained and can_end:
        return field, most // 2
    if budget is None or budget[1] == -1 or budget[1] >= most:
        return None
    if not can_end:
        raise invalid(f"Invalid '{budget[0]}': the delimiters of the model's reasoning are not tokens.", budget[0])
    return budget


async def checked_tools(gate: Gate, caller: Caller, calling: Calling) -> dict[str, Json]:
    """Return the schemas of the tools by name: checked if they must be followed, otherwise of any object."""
    schemas = {}
    for tool in calling.tools:
        schemas[tool.name] = ANY_ARGUMENTS
        if calling.is_required or tool.strict:
            types = tool.parameters.get("type", "object")
            if "object" not in (types if isinstance(types, list) else [types]):
                raise refusal(tool.field, "the arguments are an object, which 'type' at '/type' does not allow")
            grammar = await gate.check(of_schema({**tool.parameters, "type": "object"}, tool.field), caller.flow)
            schemas[tool.name] = json.loads(grammar.text)
    return schemas


def check_accepts_grammars(
    model: LoadedModel, request: GenerationRequest, field: str, *, is_free: bool = False
) -> None:
    """Raise 400 if a grammar cannot be enforced. `is_free`: the content is not constrained and may end anywhere."""
    if not model.tokenizer.takes_grammars:
        raise invalid(f"Invalid '{field}': this model's tokenizer cannot be used with it.", field)
    if request.min_tokens and not is_free:
        message = "cannot be combined with structured output or with tool calls that a grammar enforces"
        raise invalid(f"Invalid 'min_tokens': {message}.", "min_tokens")


def hidden_ids(model: LoadedModel, formats: Formats) -> frozenset[int]:
    """Return the special tokens without text in a completion: all but the delimiters that its parser must see."""
    return model.tokenizer.special_ids - model.tokenizer.ids_of(delimiters(formats))


def new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"
