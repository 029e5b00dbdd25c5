"""Grammars: what an answer may look like, as (kind, text). The one room of the engine in which there is text.

Kinds: `json_schema` (a schema as JSON), `regex` (Rust's syntax, over the whole answer), `choice` (a JSON list of
strings), `lark` (llguidance's dialect of Lark). JSON is written with ", " and ": " and no other white space between
its parts: a model cannot lose itself in blank lines, and whatever the schema fixes needs no draw.

This file is what both sides of the seam need: the server asks `problem` at its door, the engine compiles what
`source` gives. llguidance is imported where it is used; importing this costs nothing.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llguidance import LLParserLimits
    from llguidance._lib import JsonCompileOptions

KINDS = ("json_schema", "regex", "choice", "lark")
MAX_SOURCE = 64 << 10  # bytes of UTF-8
MAX_SHOWN = 120  # characters of what llguidance says
QUOTED = re.compile(r"""(["'/])[^"'/]{40,}(?:\1|\Z)""")  # what it repeats of the grammar

# `lenient` and `coerce_one_of` would let answers through that the schema forbids.
JSON_OPTIONS: JsonCompileOptions = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "coerce_one_of": False,
    "lenient": False,
}


class GrammarError(Exception):
    """A grammar, or what is left of it part-way, cannot be used; its text is one sentence without a full stop."""


class GrammarsBusy(Exception):
    """So many grammars are being compiled that one has waited too long."""

    def __init__(self) -> None:
        super().__init__("too many grammars are being compiled")


def source(kind: str, text: str) -> str:
    """llguidance's own form of a grammar; raises GrammarError where that can be seen without compiling it."""
    from llguidance import LLMatcher

    if len(text.encode("utf-8", "surrogatepass")) > MAX_SOURCE:
        raise GrammarError(f"the grammar has more than {MAX_SOURCE} bytes")
    match kind:
        case "json_schema":
            try:
                return LLMatcher.grammar_from_json_schema(text, overrides=JSON_OPTIONS)
            except ValueError as error:
                raise GrammarError(shown(str(error))) from None
        case "regex":
            return LLMatcher.grammar_from_regex(_without_anchors(text))
        case "choice":
            return LLMatcher.grammar_from_regex("|".join(_literal(each) for each in _choices(text)))
        case "lark":
            return LLMatcher.grammar_from_lark(text)
    raise GrammarError(f"unknown kind of grammar {kind!r}; known: {', '.join(KINDS)}")


def problem(kind: str, text: str) -> str | None:
    """Why a grammar can never be used, in one sentence; None when it probably can: a tokenizer is not asked."""
    from llguidance import LLMatcher

    try:
        failed, messages = LLMatcher.validate_grammar_with_warnings(source(kind, text), limits=limits())
    except GrammarError as error:
        return str(error)
    return shown(messages[0]) if failed else None


def limits() -> LLParserLimits:
    """What a grammar may cost: 200 milliseconds to compile, and ten for each token at the worst.

    llguidance's own limits let one token take 240 ms, in which nobody else's comes. No schema of MaskBench needs half
    of what these allow.
    """
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=1_000_000,  # about 50,000 a millisecond
        step_lexer_fuel=50_000,  # about 14,000 a millisecond
        step_max_items=2_000,  # 200 a millisecond at the worst
        max_items_in_row=1_000,
        max_lexer_states=20_000,  # 1 to 2 kB each, in the worst answer
        max_grammar_size=500_000,
        verbose_errors=False,
    )


def _choices(text: str) -> list[str]:
    try:
        choices: Any = json.loads(text)
    except ValueError:
        choices = None
    if not (isinstance(choices, list) and choices and all(isinstance(each, str) for each in choices)):
        raise GrammarError("the choices are not a list of strings")
    return choices


def _literal(text: str) -> str:
    """A regular expression for exactly this text."""
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise GrammarError("a choice is not valid Unicode")
    return "".join(x if x.isalnum() or ord(x) > 127 else f"\\x{{{ord(x):x}}}" for x in text)


def _without_anchors(pattern: str) -> str:
    """llguidance matches the whole answer and knows no anchors; many people write them all the same."""
    pattern = pattern.removeprefix("^")
    escapes = re.search(r"(\\*)\$\Z", pattern)
    return pattern[:-1] if escapes is not None and len(escapes[1]) % 2 == 0 else pattern


def shown(message: str) -> str:
    """The beginning of what llguidance says, without the advice to programmers and without long quotations."""
    first = " ".join((message.strip().splitlines() or ["it cannot be read"])[0].split())
    first = QUOTED.sub(r"\1...\1", first.partition(". Enable '")[0]).rstrip(".:")
    return first if len(first) <= MAX_SHOWN else first[: MAX_SHOWN - 3] + "..."
