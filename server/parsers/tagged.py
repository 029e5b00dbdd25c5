"""Values between tags: they have no quotes, so their types are known only from the function's schema."""

from __future__ import annotations

import ast
import json
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from typing import Any

from .parts import Schema
from .references import referred
from .scanner import END, NOTHING, Scanner, Script, Trimmer

MAX_TAG = 256  # characters: names of functions have at most 64, of parameters seldom 32
MAX_LEFT = 64  # names of parameters that are looked for at each character; with more, any tag of a parameter counts
MAX_STEPS = 64  # schemas that are visited to find a parameter's types
LITERALS = {"True": "true", "False": "false", "None": "null"}  # Python's, which models write too
NULLS = {"null", "None"}
MAX_LITERAL = 1 << 14  # characters of a list or dict of Python's, each of which takes its parser 500 bytes and 1 μs
TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


class Tagged(Scanner, ABC):
    """Reads the values of parameters. A format defines the ends of a value, and how arguments are written."""

    on_lines = False  # whether values have lines of their own: the line ends around them are syntax

    @abstractmethod
    def value_ends(self, types: frozenset[str], left: Collection[str] | None) -> tuple[str, ...]:
        """Return what may end a value: its closing tag, and what follows if the model forgets that.

        `left`: the parameters that may follow; None: any.
        """

    @abstractmethod
    def is_end(self, end: str, types: frozenset[str], char: str) -> Script[tuple[bool, str]]:
        """Return whether what may end a value does, judged by the text after it, which is read as far as necessary."""

    def end_of_value(
        self, ends: tuple[str, ...], types: frozenset[str], char: str, into: Trimmer
    ) -> Script[tuple[str, str]]:
        """Read a value up to its end; return this end, with what has been read after it, and the next character."""
        withheld = ""
        while True:
            end = yield from self.until(ends, char, into, withheld)
            if end == END:
                return END, END
            char = yield
            self.record(end, char)
            found, char = yield from self.is_end(end, types, char)
            record = "".join(self._record or [])
            text, begun = record[: len(record) - len(char)], self._begun(ends)
            self.forget()
            if found:
                return text, char
            if char == END and self._cut_before is not None:
                return END, END
            withheld = begun if char != END else ""
            into.add(text[: len(text) - len(withheld)])

    def parameter(
        self, schema: Schema, name: str, names: set[str], char: str, emit: Callable[[str], None]
    ) -> Script[tuple[str, str]]:
        """Read the value of a parameter and emit both, unless it is among `names`, to which it is added.

        If a parameter occurs twice, its first value counts, which has been emitted before the second one begins.
        """
        is_new = name not in names
        if is_new:
            emit(f"{', ' if names else ''}{quoted(name)}: ")
            names.add(name)
        listed = schema.get("properties")
        left = [each for each in listed if each not in names] if isinstance(listed, dict) and listed else None
        if left is not None and len(left) > MAX_LEFT:
            left = None
        kinds = types(schema, name)
        return (yield from self._value(kinds, self.value_ends(kinds, left), char, emit if is_new else lambda _: None))

    def _value(
        self, types: frozenset[str], ends: tuple[str, ...], char: str, emit: Callable[[str], None]
    ) -> Script[tuple[str, str]]:
        """Read one value and emit it as JSON; return its end, END if there is none, and the next character."""
        is_text = types == {"string"}
        if is_text:
            emit('"')
        if self.on_lines and char == "\n":
            char = yield
        value = Raw()
        trail = frozenset("\n") if self.on_lines else NOTHING
        trimmed = Trimmer((lambda text: emit(quoted(text)[1:-1])) if is_text else value.add, NOTHING, trail)
        end, char = yield from self.end_of_value(ends, types, char, trimmed)
        while end != END and value.is_quoted and "string" not in types and not self._lacks_quote(end, char):
            trimmed.add(end)
            end, char = yield from self.end_of_value(ends, types, char, trimmed)
        if end == END:
            trimmed.flush(but=int(self._cut_before is not None))  # the line end may belong to the tag
            if not is_text:
                emit(value.text)
            return END, END
        trimmed.flush(but=int(not end.startswith("\n")))
        emit('"' if is_text else as_json(value.text, types))
        return end, char

    def _lacks_quote(self, end: str, char: str) -> bool:
        """Return whether a tag inside quotes ends the value: next to a line end, which JSON cannot have there."""
        return end.startswith("\n") or char == "\n" or (char == END and self._cut_before is None)


class Raw:
    """A value that is not a string; inside JSON quotes its closing tag is ordinary text."""

    def __init__(self) -> None:
        self.is_quoted = False
        self._chars: list[str] = []
        self._is_escaped = False
        self._can_be_json = False

    def add(self, text: str) -> None:
        for char in text:
            if not self._chars:
                self._can_be_json = char in '{["'
            self._chars.append(char)
            if self.is_quoted and not self._is_escaped and char == "\\":
                self._is_escaped = True
                continue
            if char == '"' and not self._is_escaped and self._can_be_json:
                self.is_quoted = not self.is_quoted
            self._is_escaped = False

    @property
    def text(self) -> str:
        return "".join(self._chars)


def types(schema: Schema, name: str) -> frozenset[str]:
    """Return the JSON types that a parameter may have; empty if unknown."""
    properties = schema.get("properties")
    todo: list[Any] = [properties.get(name) if isinstance(properties, dict) else None]
    found: set[str] = set()
    for _ in range(MAX_STEPS):
        if not todo:
            return frozenset(found)
        node = todo.pop()
        if not isinstance(node, dict):
            return frozenset()
        listed = node.get("type")
        values = node.get("enum") if isinstance(node.get("enum"), list) else [node["const"]] if "const" in node else []
        if isinstance(listed, str):
            found.add(listed)
        elif isinstance(listed, list):
            found |= {kind for kind in listed if isinstance(kind, str)}
        elif values:
            found |= {TYPES.get(type(value), "null") for value in values}
        elif isinstance(reference := node.get("$ref"), str):
            todo.append(referred(schema, reference))
        elif isinstance(inner := node.get("anyOf") or node.get("oneOf") or node.get("allOf"), list):
            todo += inner
        else:
            return frozenset()
    return frozenset()


def as_json(text: str, types: frozenset[str]) -> str:
    """Return a value as JSON: a string (or null) if the types allow one, else the JSON it parses as, else a string."""
    if "string" in types and not (text in NULLS and "null" in types):
        return quoted(text)
    bare = text.strip()
    bare = LITERALS.get(bare, bare)
    try:
        json.loads(bare, parse_constant=_no_json)
    except (ValueError, RecursionError):
        is_literal = bare.startswith(("[", "{")) and types & {"array", "object"}
        return (_of_literal(bare) if is_literal else None) or quoted(text)
    return bare


def _of_literal(text: str) -> str | None:
    """Return a list or dict of Python's as JSON, None if the text is none or JSON has no such value."""
    if len(text) > MAX_LITERAL:
        return None
    try:
        with warnings.catch_warnings(action="ignore"):  # about escapes that Python does not know
            value = ast.literal_eval(text)
        if not isinstance(value, list | dict):
            return None
        written = json.dumps(value, ensure_ascii=False, allow_nan=False)
        written.encode()  # raises ValueError for a lone surrogate
        return written
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None


def _no_json(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def quoted(text: str) -> str:
    """Return a JSON string."""
    return json.dumps(text, ensure_ascii=False)
