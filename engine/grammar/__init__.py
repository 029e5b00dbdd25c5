"""Grammars: constraints on an output, as (kind, text). This package is the only part of the engine that handles text.

Kinds: `json_schema` (a schema as JSON), `regex` (Rust's syntax with ASCII classes, over the whole output), `choice` (a
JSON list of strings), `lark` (llguidance's dialect of Lark). In JSON the separators are ", " and ": " without other
white space, so that a model cannot generate blank lines without end, and text that the schema determines need not be
sampled.

This module is for both the server, which validates grammars with `problem`, and the engine, which compiles the result
of `source`. llguidance is imported lazily, so that importing this module is cheap.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from .ascii import ascii_lark, ascii_regex

if TYPE_CHECKING:
    from llguidance import LLParserLimits
    from llguidance._lib import JsonCompileOptions

KINDS = ("json_schema", "regex", "choice", "lark")
MAX_SOURCE = 64 << 10  # bytes of UTF-8
# A grammar in Lark may hold many schemas: one of 130 kB, of 256 functions, compiles in 40 ms and takes 3 MB.
MAX_LARK = 256 << 10
MAX_SHOWN = 120  # characters of an error of llguidance
GBNF = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)  # no rule in Lark begins like this
QUOTED = re.compile(r"""(["'/])[^"'/]{40,}(?:\1|\Z)""")  # long quotations of the grammar

# `lenient` and `coerce_one_of` would allow outputs that the schema forbids.
JSON_OPTIONS: JsonCompileOptions = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "coerce_one_of": False,
    "lenient": False,
}


class GrammarError(Exception):
    """A grammar cannot be used, or cannot be continued. The text is one sentence without a full stop."""


class GrammarsBusy(Exception):
    """A grammar has waited too long for others to be compiled."""

    def __init__(self) -> None:
        super().__init__("too many grammars are being compiled")


def source(kind: str, text: str) -> str:
    """Convert a grammar to llguidance's format. Raises GrammarError for errors that show without compiling it."""
    from llguidance import LLMatcher

    limit = MAX_LARK if kind == "lark" else MAX_SOURCE
    if len(text.encode("utf-8", "surrogatepass")) > limit:
        raise GrammarError(f"the grammar has more than {limit} bytes")
    match kind:
        case "json_schema":
            try:
                return LLMatcher.grammar_from_json_schema(text, overrides=JSON_OPTIONS)
            except ValueError as error:
                raise GrammarError(shown(str(error))) from None
        case "regex":
            return LLMatcher.grammar_from_regex(ascii_regex(_without_anchors(text)))
        case "choice":
            return LLMatcher.grammar_from_regex("|".join(_literal(each) for each in _choices(text)))
        case "lark":
            if GBNF.search(text):
                raise GrammarError('it is in GBNF, and Lark\'s syntax is expected: start: "yes" | "no"')
            return LLMatcher.grammar_from_lark(ascii_lark(text))
    raise GrammarError(f"unknown kind of grammar {kind!r}; known: {', '.join(KINDS)}")


def problem(kind: str, text: str) -> str | None:
    """Return why a grammar can never be used, in one sentence, or None. Does not check it against a tokenizer."""
    from llguidance import LLMatcher

    try:
        failed, messages = LLMatcher.validate_grammar_with_warnings(source(kind, text), limits=limits())
    except GrammarError as error:
        return str(error)
    return shown(messages[0]) if failed else None


def limits() -> LLParserLimits:
    """Return the limits of a grammar's cost: about 200 ms to compile, and 10 ms per token in the worst case.

    With llguidance's defaults a token can take 240 ms, which delays all other requests. No schema of MaskBench needs
    half of these limits.
    """
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=1_000_000,  # about 50,000 per millisecond
        step_lexer_fuel=50_000,  # about 14,000 per millisecond
        step_max_items=2_000,  # 200 per millisecond in the worst case
        max_items_in_row=1_000,
        max_lexer_states=20_000,  # 1 to 2 kB each in the worst case
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
    """Return a regular expression that matches exactly this text."""
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise GrammarError("a choice is not valid Unicode")
    return "".join(x if x.isalnum() or ord(x) > 127 else f"\\x{{{ord(x):x}}}" for x in text)


def _without_anchors(pattern: str) -> str:
    """Remove anchors, which llguidance does not support: it always matches the whole output."""
    pattern = pattern.removeprefix("^")
    escapes = re.search(r"(\\*)\$\Z", pattern)
    return pattern[:-1] if escapes is not None and len(escapes[1]) % 2 == 0 else pattern


def shown(message: str) -> str:
    """Shorten an error of llguidance: the first line, without advice to programmers and long quotations.

    An error of its library for regular expressions is a drawing, and a later line has the reason.
    """
    lines = message.strip().splitlines() or ["it cannot be read"]
    first = " ".join(lines[0].split())
    reason = next((line.strip() for line in lines if line.strip().startswith("error: ")), "")
    if reason and first.endswith("regex parse error:"):
        first = first.removesuffix("regex parse error:") + reason.removeprefix("error: ")
    first = QUOTED.sub(r"\1...\1", first.partition(". Enable '")[0]).rstrip(".:")
    return first if len(first) <= MAX_SHOWN else first[: MAX_SHOWN - 3] + "..."
