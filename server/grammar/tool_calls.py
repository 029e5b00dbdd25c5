"""Grammars of whole completions: calls in the model's own format with arguments that are valid by construction, the
schema of the content, and a budget for the reasoning before them.

They are in llguidance's dialect of Lark: a call's syntax is literal, and its arguments are an embedded JSON schema. An
added token of the model's vocabulary is written as <[id]>, since llguidance does not match such tokens by their text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from ..parsers import minimax
from ..parsers.formats import CALL_DELIMITERS, DEEPSEEK, HUNYUAN, IN_MESSAGES, KIMI, Formats, in_messages
from ..parsers.gemma import PREFIX
from ..parsers.harmony import CHANNEL, CONSTRAIN, ENDS, MESSAGE, START
from ..parsers.kimi import PREFIX as KIMI_PREFIX
from ..parsers.parts import Schema
from ..parsers.qwen_coder import END_FUNCTION, FUNCTION
from . import solar, tagged
from .gemma import Inexpressible, Writer
from .rules import Lark, TooLong, expression, quoted
from .schemas import walk

ANNOTATIONS = ("description", "title", "default", "examples", "$comment", "deprecated", "readOnly", "writeOnly")
COMPOSED = ("allOf", "anyOf", "oneOf", "$ref", "patternProperties", "additionalProperties", "unevaluatedProperties")
NO_ARGUMENTS: Schema = {"type": "object", "properties": {}}
LINE, NAME = "\n", "name"


class Forced(NamedTuple):
    """A grammar in the form that the engine accepts, and the formats in which it makes the model write."""

    kind: str
    text: str
    formats: Formats


def call_grammar(
    formats: Formats,
    tools: Mapping[str, Schema],
    *,
    required: bool,
    parallel: bool,
    opened: bool,
    special: Mapping[str, int],
    content: tuple[str, str] | None = None,
    budget: int | None = None,
) -> Forced:
    """Return a grammar that makes a model call its tools with arguments that follow their schemas.

    `required`: the completion must be calls; otherwise it may be text too, but a call that begins must be valid, and
    `tools` may be empty. `parallel`: there may be several calls. `opened`: the prompt ends inside a block of reasoning,
    which the model may write in any case if its format has one. `special`: ids of all added tokens of the vocabulary
    by their texts, whether they are flagged as special or not. `content`: the grammar of a completion without
    calls (`json_schema`, `regex` or `choice`) and its text; None: any text. `budget`: the maximum number of reasoning
    tokens, without the delimiter that ends the reasoning, which must be a single token.

    Arguments that the format cannot carry, or not within MAX_WRITTEN characters, are written as JSON. Raises TooLong if
    that is too long as well.
    """
    if formats.tools is None:
        formats = formats._replace(tools=in_messages(formats) or "json")
    try:
        return _forced(Lark(special, formats, opened, content, budget), tools, not required, parallel)
    except (Inexpressible, TooLong):
        formats = formats._replace(tools="json")
        return _forced(Lark(special, formats, opened, content, budget), tools, not required, parallel)


def _forced(lark: Lark, tools: Mapping[str, Schema], is_free: bool, parallel: bool) -> Forced:
    """Write a grammar. Raises TooLong, and Inexpressible if its format cannot carry valid arguments by construction."""
    writer = WRITERS[lark.formats.tools or "json"] if tools or lark.formats.tools in IN_MESSAGES else _no_calls
    lark.rules["start"] = writer(lark, tools, is_free, parallel) + lark.ending()
    return Forced("lark", lark.text, lark.formats)


def arguments(schema: Schema) -> Schema:
    """Return the schema of a call's arguments without its annotations.

    The arguments are an object. If the schema lists its properties, with all that it requires, and has no COMPOSED
    keyword, no others are allowed.
    """
    schema = json.loads(json.dumps(schema or NO_ARGUMENTS))
    for _, node, _ in walk(schema):
        for keyword in ANNOTATIONS:
            node.pop(keyword, None)
    schema["type"] = "object"
    required, properties = schema.get("required", []), schema.get("properties")
    is_listed = (
        isinstance(properties, dict) and isinstance(required, list) and all(key in properties for key in required)
    )
    if is_listed and not any(keyword in schema for keyword in COMPOSED):
        schema["additionalProperties"] = False
    return schema


class Syntax(NamedTuple):
    """How a format writes calls; all fields but `first` are rules."""

    first: str  # the delimiter that begins the calls
    opens: str
    call: str
    between: str
    closes: str


def _delimited(lark: Lark, tools: Mapping[str, Schema], is_free: bool, parallel: bool) -> str:
    """Write formats in which a delimiter begins the calls."""
    syntax = SYNTAXES[lark.formats.tools or ""](lark, tools)
    more = f"({syntax.between} {syntax.call})*" if parallel else ""
    calls = f"{syntax.opens} {syntax.call} {more} {syntax.closes}"
    if not is_free:
        return f"{lark.reasoning()} {lark.lead()} {lark.delimiter(syntax.first)} {calls}"
    before = lark.delimiter(syntax.first) if lark.has_content else lark.until(syntax.first)
    return f"{lark.reasoning()} ({before} {calls} | {lark.content()})"


def _bare(lark: Lark, tools: Mapping[str, Schema], is_free: bool, parallel: bool) -> str:
    """Write formats without delimiters: a completion that does not begin with a bracket is text."""
    if lark.formats.tools == "llama3_json":
        call = _object(lark, tools, "parameters")
        calls = f'{call} ("; " {call})*' if parallel else call
    else:
        call = _object(lark, tools)
        calls = f'"[" {call} (", " {call})* "]"' if parallel else call
    if not is_free:
        return f"{lark.reasoning()} {calls}"
    if lark.has_content:
        return f"{lark.reasoning()} ({calls} | {lark.content()})"
    lark.rules["PROSE"] = r"/(?s:[ \t\r\n]*[^ \t\r\n{\[].*)/"
    return f"{lark.reasoning()} ({calls} | PROSE)?"


def _harmony(lark: Lark, tools: Mapping[str, Schema], is_free: bool, parallel: bool) -> str:
    """Write gpt-oss: a call ends the completion, so there is at most one. The end of its last message ends it too."""
    del parallel
    end, again = lark.thought(ENDS[0]), f'{lark.delimiter(START)} "assistant"'
    opens = f"{lark.delimiter(CHANNEL)} "
    thought = f'"analysis" {lark.delimiter(MESSAGE)} {end} {again}'
    begun = f"{end} {again}" if lark.opened else ""
    calls = [
        f'{quoted(f"commentary to=functions.{name} ")} {lark.delimiter(CONSTRAIN)} "json" {lark.delimiter(MESSAGE)} '
        + lark.schema(arguments(schema))
        for name, schema in tools.items()
    ]
    if not is_free:
        return f"{begun} ({opens} {thought})? {opens} {lark.one_of(calls)}"
    preamble = f'({opens} "commentary" {lark.delimiter(MESSAGE)} {lark.until(ENDS[0])} {again})?'
    final = f'"final" {lark.delimiter(MESSAGE)} {lark.content()}'
    messages = f"{lark.one_of(calls)} | {final}" if calls else final
    return f"{begun} ({opens} {thought})? {'' if lark.has_content else preamble} {opens} ({messages})"


def _solar(lark: Lark, tools: Mapping[str, Schema], is_free: bool, parallel: bool) -> str:
    return solar.completion(lark, {name: arguments(each) for name, each in tools.items()}, is_free, parallel)


def _glm4(lark: Lark, tools: Mapping[str, Schema], is_free: bool, parallel: bool) -> str:
    """Write GLM-4-0414: a call begins a message, and text never begins like one."""
    again = CALL_DELIMITERS["glm4"][0]
    calls = [f"{quoted(name + LINE)} {lark.schema(arguments(schema))}" for name, schema in tools.items()]
    call = lark.one_of(calls)
    several = f"{call} ({lark.delimiter(again)} {call})*" if parallel else call
    if not is_free:
        return f"{lark.reasoning()} {several}"
    if lark.has_content:
        return f"{lark.reasoning()} ({several} | {lark.content()})"
    names = "|".join(re.escape(name) for name in tools)
    lark.rules["PROSE"] = "/(?s:.*)/ & ~" + expression(rf"(?s:[ \t\r\n]*({names})[ ]*\n.*)")
    return f"{lark.reasoning()} ({several} | {lark.until(again, 'PROSE')} {several} | PROSE?)"


def _no_calls(lark: Lark, tools: Mapping[str, Schema], is_free: bool, parallel: bool) -> str:
    """Write completions of requests without tools."""
    del tools, is_free, parallel
    return f"{lark.reasoning()} {lark.content()}"


def _hermes(lark: Lark, tools: Mapping[str, Schema]) -> Syntax:
    opens, closes = CALL_DELIMITERS["hermes"]
    call = f'"\\n" {_object(lark, tools)} "\\n" {lark.delimiter(closes)}'
    return Syntax(opens, "", call, f'"\\n" {lark.delimiter(opens)}', "")


def _mistral(lark: Lark, tools: Mapping[str, Schema]) -> Syntax:
    return Syntax(CALL_DELIMITERS["mistral"][0], r"/ ?\[/", _object(lark, tools), '", "', '"]"')


def _mistral_v11(lark: Lark, tools: Mapping[str, Schema]) -> Syntax:
    first, _, between = CALL_DELIMITERS["mistral_v11"]
    calls = [f"{quoted(name)} {lark.delimiter(between)} {lark.schema(arguments(tools[name]))}" for name in tools]
    return Syntax(first, "", lark.one_of(calls), lark.delimiter(first), "")


def _deepseek(lark: Lark, tools: Mapping[str, Schema]) -> Syntax:
    first, opens, between, closes, last = DEEPSEEK
    is_old = lark.formats.tools == "deepseek_v3"
    calls = []
    for name, schema in tools.items():
        value = lark.schema(arguments(schema))
        if is_old:
            call = f'"function" {lark.delimiter(between)} {quoted(f"{name}{LINE}```json{LINE}")} {value} "\\n```"'
        else:
            call = f"{quoted(name)} {lark.delimiter(between)} {value}"
        calls.append(call)
    call = f"{lark.delimiter(opens)} {lark.one_of(calls)} {lark.delimiter(closes)}"
    return Syntax(first, "", call, quoted(LINE) if is_old else "", lark.delimiter(last))


def _kimi(lark: Lark, tools: Mapping[str, Schema]) -> Syntax:
    first, opens, between, closes, last = KIMI
    lark.rules["NUMBER"] = "/[0-9]{1,4}/"
    calls = [
        f"{quoted(f'{KIMI_PREFIX}{name}:')} NUMBER {lark.delimiter(between)} {lark.schema(arguments(schema))}"
        for name, schema in tools.items()
    ]
    call = f"{lark.delimiter(opens)} {lark.one_of(calls)} {lark.delimiter(closes)}"
    return Syntax(first, "", call, "", lark.delimiter(last))


def _gemma(lark: Lark, tools: Mapping[str, Schema]) -> Syntax:
    opens, closes, _ = CALL_DELIMITERS["gemma4"]
    calls = []
    for name, schema in tools.items():
        stripped = arguments(schema)
        calls.append(f"{quoted(PREFIX + name)} {Writer(lark, stripped).value(stripped)}")
    return Syntax(opens, "", f"{lark.one_of(calls)} {lark.delimiter(closes)}", lark.delimiter(opens), "")


def _list(lark: Lark, tools: Mapping[str, Schema]) -> Syntax:
    delimiters = CALL_DELIMITERS[lark.formats.tools or ""]
    return Syntax(delimiters[0], '"["', _object(lark, tools), '", "', f'"]" {lark.delimiter(delimiters[-1])}')


def _hunyuan(lark: Lark, tools: Mapping[str, Schema]) -> Syntax:
    first, opens, closes, last = HUNYUAN
    calls = [
        f'{quoted(f"{name}{LINE}```json{LINE}")} {lark.schema(arguments(schema))} "\\n```"'
        for name, schema in tools.items()
    ]
    call = f"{lark.delimiter(opens)} {lark.one_of(calls)} {lark.delimiter(closes)}"
    return Syntax(first, "", call, quoted(LINE), lark.delimiter(last))


def _coder(lark: Lark, tools: Mapping[str, Schema]) -> Syntax:
    opens, closes = CALL_DELIMITERS[lark.formats.tools or ""]
    tags = tagged.coder((opens, closes), LINE if lark.formats.tools == "qwen3_coder" else "")
    calls = []
    for name, schema in tools.items():
        written = tagged.parameters(lark, tags, arguments(schema))
        calls.append(f"{quoted(f'{FUNCTION}{name}>{LINE}')} {written} {quoted(END_FUNCTION + LINE)}")
    call = f"{quoted(LINE)} {lark.one_of(calls)} {lark.delimiter(closes)}"
    return Syntax(opens, "", call, f"{quoted(LINE)} {lark.delimiter(opens)}", "")


def _glm(lark: Lark, tools: Mapping[str, Schema]) -> Syntax:
    opens, closes = CALL_DELIMITERS["glm45"][:2]
    tags = tagged.glm45(lark)
    calls = [f"{quoted(name)} LINE? {tagged.parameters(lark, tags, arguments(tools[name]))}" for name in tools]
    call = f"{lark.one_of(calls)} {lark.delimiter(closes)}"
    return Syntax(opens, "", call, f"LINE? {lark.delimiter(opens)}", "")


def _minimax(lark: Lark, tools: Mapping[str, Schema]) -> Syntax:
    calls = []
    for name, schema in tools.items():
        written = tagged.parameters(lark, tagged.minimax_m2(), arguments(schema))
        opens = quoted(f"{minimax.FUNCTION}{name}{minimax.END_TAG}{LINE}")
        calls.append(f"{opens} {written} {quoted(minimax.END_FUNCTION + LINE)}")
    return Syntax(minimax.OPENS, quoted(LINE), lark.one_of(calls), "", lark.delimiter(minimax.CLOSES))


SYNTAXES: dict[str, Callable[[Lark, Mapping[str, Schema]], Syntax]] = {
    "hermes": _hermes,
    "mistral": _mistral,
    "mistral_v11": _mistral_v11,
    "qwen3_coder": _coder,
    "seed_oss": _coder,
    "glm45": _glm,
    "minimax_m2": _minimax,
    "nemotron_json": _list,
    "hunyuan": _hunyuan,
    "hunyuan_a13b": _list,
    "deepseek_v3": _deepseek,
    "deepseek_v31": _deepseek,
    "kimi_k2": _kimi,
    "gemma4": _gemma,
}
WRITERS: dict[str, Callable[[Lark, Mapping[str, Schema], bool, bool], str]] = {
    **dict.fromkeys(SYNTAXES, _delimited),
    "llama3_json": _bare,
    "json": _bare,
    "glm4": _glm4,
    "gpt_oss": _harmony,
    "solar_open": _solar,
}


def _object(lark: Lark, tools: Mapping[str, Schema], key: str = "arguments") -> str:
    """Return a rule for one call as a JSON object."""
    # Split as llguidance splits JSON: where the completion may be another object, both are read in the same pieces.
    calls = []
    for name, schema in tools.items():
        pieces = ["{", quoted(NAME), ": ", quoted(name), ", ", quoted(key), ": "]
        calls.append(f'{" ".join(map(quoted, pieces))} {lark.schema(arguments(schema))} "}}"')
    return lark.one_of(calls)
