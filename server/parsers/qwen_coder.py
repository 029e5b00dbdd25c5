"""Calls of Qwen3-Coder: tags for the function and for each parameter, whose values they enclose verbatim.

Values have no quotes, so their types are known only from the function's schema.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from .formats import MARKS
from .parts import Schema
from .scanner import END, NOTHING, Edged, Scanner, Script

FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
MAX_TAG = 256  # characters: names of functions have at most 64, of parameters seldom half as many
MAX_STEPS = 64  # from a schema to others when looking for its types
LITERALS = {"True": "true", "False": "false", "None": "null"}  # Python's, which models write too
TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


class Coder(Scanner):
    """The outer delimiter may be missing: the model sometimes omits it."""

    opens = (MARKS["qwen3_coder"][0], FUNCTION)
    closes = (END_FUNCTION, MARKS["qwen3_coder"][1])

    def call(self, mark: str, letter: str) -> Script[str]:
        if mark != FUNCTION:
            letter = yield from self.white(letter)
            is_there, letter = yield from self.literal(FUNCTION, letter)
            if not is_there:
                return letter
        name, letter = yield from self.name(letter)
        if letter != ">" or name not in self.tools:
            return letter
        say = self.say_call(name)
        say("{")
        letter = yield
        return (yield from self._parameters(self.tools[name], letter, say))

    def _parameters(self, schema: Schema, letter: str, say: Callable[[str], None]) -> Script[str]:
        """Read all parameters. Arguments cut off by the end of the text stay open: half a call must not look whole.

        Of a parameter that is given twice the first one counts: it has been told when the second one comes.
        """
        names: set[str] = set()
        while True:
            self.record("", letter)
            letter = yield from self.white(letter)
            tag, letter = yield from self._tag(letter)
            if tag.startswith(PARAMETER):
                self.forget()
                name = tag[len(PARAMETER) : -1]
                if name in names:
                    letter = yield from self._value(types(schema, name), letter, lambda _: None)
                    continue
                say(f"{', ' if names else ''}{_quoted(name)}: ")
                names.add(name)
                letter = yield from self._value(types(schema, name), letter, say)
                continue
            if letter != END or tag:
                say("}")
            if tag == END_FUNCTION:
                self.forget()
            return letter

    def _tag(self, letter: str) -> Script[tuple[str, str]]:
        """Read one of the two tags that may follow, or nothing."""
        letters: list[str] = []
        while letter not in (END, "\n") and len(letters) < MAX_TAG:
            letters.append(letter)
            tag = "".join(letters)
            letter = yield
            if tag == END_FUNCTION or (tag.startswith(PARAMETER) and tag.endswith(">")):
                return tag, letter
            if not (PARAMETER.startswith(tag) or END_FUNCTION.startswith(tag) or tag.startswith(PARAMETER)):
                break
        return "", letter

    def _value(self, types: frozenset[str], letter: str, say: Callable[[str], None]) -> Script[str]:
        """Read one value, without the line ends around it, and emit it as JSON."""
        is_text = types == {"string"}
        if is_text:
            say('"')
        if letter == "\n":
            letter = yield
        value = Raw()
        said = Edged((lambda text: say(_quoted(text)[1:-1])) if is_text else value.add, NOTHING, frozenset("\n"))
        mark = yield from self.until((END_PARAMETER,), letter, said)
        while mark != END and value.is_quoted and "string" not in types:
            said.add(mark)
            mark = yield from self.until((END_PARAMETER,), (yield), said)
        if mark == END:
            said.flush()
            if not is_text:
                say(value.text)
            return END
        said.flush(but=1)
        say('"' if is_text else as_json(value.text, types))
        return (yield)


class Raw:
    """A value that is not a string; inside JSON quotes its closing tag is ordinary text."""

    def __init__(self) -> None:
        self.is_quoted = False
        self._letters: list[str] = []
        self._is_escaped = False
        self._can_be_json = False

    def add(self, text: str) -> None:
        for letter in text:
            if not self._letters:
                self._can_be_json = letter in '{["'
            self._letters.append(letter)
            if self.is_quoted and not self._is_escaped and letter == "\\":
                self._is_escaped = True
                continue
            if letter == '"' and not self._is_escaped and self._can_be_json:
                self.is_quoted = not self.is_quoted
            self._is_escaped = False

    @property
    def text(self) -> str:
        return "".join(self._letters)


def types(schema: Schema, name: str) -> frozenset[str]:
    """Return the JSON types that a parameter may have; empty if unknown."""
    properties = schema.get("properties")
    todo: list[Any] = [properties.get(name) if isinstance(properties, dict) else None]
    found: set[str] = set()
    for _ in range(MAX_STEPS):
        if not todo:
            return frozenset(found)
        here = todo.pop()
        if not isinstance(here, dict):
            return frozenset()
        listed = here.get("type")
        values = here.get("enum") if isinstance(here.get("enum"), list) else [here["const"]] if "const" in here else []
        if isinstance(listed, str):
            found.add(listed)
        elif isinstance(listed, list):
            found |= {each for each in listed if isinstance(each, str)}
        elif values:
            found |= {TYPES.get(type(value), "null") for value in values}
        elif isinstance(reference := here.get("$ref"), str):
            todo.append(_at(schema, reference))
        elif isinstance(inner := here.get("anyOf") or here.get("oneOf") or here.get("allOf"), list):
            todo += inner
        else:
            return frozenset()
    return frozenset()


def as_json(text: str, types: frozenset[str]) -> str:
    """Return a value as JSON: a string (or null) if the types allow one, else the JSON it parses as, else a string."""
    if "string" in types and not (text == "null" and "null" in types):
        return _quoted(text)
    bare = text.strip()
    bare = LITERALS.get(bare, bare)
    try:
        json.loads(bare, parse_constant=_no_json)
    except (ValueError, RecursionError):
        return _quoted(text)
    return bare


def _at(schema: Schema, reference: str) -> Any:
    here: Any = schema
    for part in reference.removeprefix("#").split("/")[1:]:
        here = here.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(here, dict) else None
    return here


def _no_json(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
