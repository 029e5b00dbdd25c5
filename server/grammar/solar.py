"""Rules for completions of Solar Open: messages of reasoning, content and calls."""

from __future__ import annotations

from collections.abc import Mapping

from ..parsers.formats import SOLAR_ENDS
from ..parsers.parts import Schema
from ..parsers.solar import ARGUMENTS, BEGIN, CALL, CALLS, CONTENT, END_CALL, NAMED, ROLE, THINK
from .rules import Lark, quoted

END = SOLAR_ENDS[0]
CALL_ID = "/[a-z0-9]{10}/"


def completion(lark: Lark, tools: Mapping[str, Schema], is_free: bool, parallel: bool) -> str:
    """Return a rule for a completion. The end of its last message ends it too, and is a stop token.

    `tools`: the schemas of the arguments by function. `is_free`: there may be content instead of calls.
    """
    again = f"{lark.delimiter(BEGIN)} {quoted(ROLE)}"
    thought = f"{lark.thought(END)} {again}"
    reasoning = thought if lark.opened else f"({lark.delimiter(THINK)} {thought})?"
    calls = _calls(lark, tools, parallel) if tools else ""
    if not is_free:
        return f"{reasoning} {calls}"
    content = f"{lark.delimiter(CONTENT)} {lark.content()}"
    if not tools:
        return f"{reasoning} {content}"
    preamble = "" if lark.has_content else f"({lark.delimiter(CONTENT)} {lark.until(END)} {again})?"
    return f"{reasoning} ({preamble} {calls} | {content})"


def _calls(lark: Lark, tools: Mapping[str, Schema], parallel: bool) -> str:
    lark.rules["CALL_ID"] = CALL_ID
    named = lark.one_of(
        [f"{quoted(name)} {lark.delimiter(ARGUMENTS)} {lark.schema(schema)}" for name, schema in tools.items()]
    )
    call = f"{lark.delimiter(CALL)} CALL_ID {lark.delimiter(NAMED)} {named} {lark.delimiter(END_CALL)}"
    return f"{lark.delimiter(CALLS)} {call}{f' ({call})*' if parallel else ''}"
