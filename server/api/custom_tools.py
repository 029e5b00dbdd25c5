"""Custom tools, whose input is a text: the model calls them as functions with one argument, `input`."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from functools import cached_property
from typing import Literal

from pydantic_core import PydanticCustomError

from ..generation.output import Json
from ..generation.request import Tool
from ..grammar.lark import as_regex
from ..grammar.schemas import MAX_SOURCE
from ..http.fields import Wire, clash
from .sampling import Text

LONGEST_ESCAPE = 12  # of a character in JSON: two of \ud83d


class InputGrammar(Wire):
    """A grammar of a custom tool's input. Every input that is not cut off follows it."""

    syntax: Literal["lark", "regex"]
    """lark: rules without recursion, of texts, regular expressions and terminals of `%import common`."""
    definition: Text
    """The grammar, also part of the prompt."""

    @cached_property
    def pattern(self) -> str:
        """The grammar as a regular expression; raises ValueError, half a sentence."""
        return f"^(?:{as_regex(self.definition) if self.syntax == 'lark' else self.definition})$"


def check_grammars(grammars: Sequence[tuple[str, InputGrammar]]) -> None:
    """Raise unless the grammars of a request's tools, each with the field of its definition, can be enforced."""
    if sum(len(grammar.definition) for _, grammar in grammars) > MAX_SOURCE:
        raise clash("must not hold grammars of more than 65536 characters, those of all tools together")
    for field, grammar in grammars:
        try:
            _ = grammar.pattern
        except ValueError as problem:
            message = "must hold grammars that can be enforced, which {field} is not: {problem}"
            raise PydanticCustomError("clash", message, {"field": field, "problem": str(problem)}) from None


def as_function(name: str, description: str | None, grammar: InputGrammar | None, field: str) -> Tool:
    """Return a custom tool as the function that the model calls.

    `field` is where the request has the grammar's definition or, without a grammar, the tool. Raises ValueError, half a
    sentence, for a grammar that `check_grammars` refuses.
    """
    if grammar is None:
        return Tool(name, description, of_input({}), strict=True, field=field)
    shown = {"description": f"A text that follows this {grammar.syntax} grammar:\n{grammar.definition}"}
    return Tool(name, description, of_input({"pattern": grammar.pattern}), True, field, of_input(shown))


def of_input(schema: Json) -> Json:
    """Return the schema of a custom tool's arguments; `schema` has more keywords of the input's."""
    properties = {"input": {"type": "string", **schema}}
    return {"type": "object", "properties": properties, "required": ["input"], "additionalProperties": False}


def arguments_of(text: str) -> str:
    """Return the input of a custom tool as the arguments of the function that the model calls."""
    return json.dumps({"input": text}, ensure_ascii=False)


def input_of(arguments: str) -> str:
    """Return the input of a custom tool in the function's arguments, which may be cut off anywhere."""
    for end in range(len(arguments), max(-1, len(arguments) - LONGEST_ESCAPE), -1):
        for rest in ("", '"}'):
            with contextlib.suppress(ValueError, LookupError, TypeError, RecursionError):
                return str(json.loads(arguments[:end] + rest)["input"])
    return ""
