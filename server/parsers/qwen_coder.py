"""Calls of Qwen3-Coder and Qwen3.5: tags for the function and for each parameter, whose values they enclose verbatim.

Values have no quotes, so their types are known only from the function's schema.
"""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Callable
from typing import Any

from .formats import CALL_DELIMITERS
from .parts import Schema
from .references import referred
from .scanner import END, NOTHING, Scanner, Script, Trimmer

FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
# The ends of a value. Models forget the closing tag: at the beginning of a line the next tag ends a value, too.
VALUE_ENDS = (END_PARAMETER, f"\n{PARAMETER}", f"\n{END_FUNCTION}")
MAX_TAG = 256  # characters: names of functions have at most 64, of parameters seldom 32
MAX_STEPS = 64  # schemas that are visited to find a parameter's types
LITERALS = {"True": "true", "False": "false", "None": "null"}  # Python's, which models write too
NULLS = {"null", "None"}
MAX_LITERAL = 1 << 14  # characters of a list or dict of Python's, each of which takes its parser 500 bytes and 1 μs
TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


class Coder(Scanner):
    """The outer delimiter may be missing: the model sometimes omits it.

    Inside reasoning a call begins only with the tag after its name: the model may just write about calls.
    """

    opens = (CALL_DELIMITERS["qwen3_coder"][0], FUNCTION)
    closes = (END_FUNCTION, CALL_DELIMITERS["qwen3_coder"][1])
    unclosed = opens[:1]  # Qwen3.5 sometimes calls before it has closed its reasoning

    def call(self, delimiter: str, char: str) -> Script[str]:
        if delimiter != FUNCTION:
            char = yield from self.white(char)
            found, char = yield from self.literal(FUNCTION, char)
            if not found:
                return char
        name, char = yield from self.name(char)
        if char != ">" or name not in self.tools:
            return char
        tag = ""
        if self.is_reasoning:
            tag, char = yield from self._tag("", (yield from self.white((yield))))
            if not tag:
                return char
        emit = self.begin_call(name)
        emit("{")
        return (yield from self._parameters(self.tools[name], tag, char if tag else (yield), emit))

    def _parameters(self, schema: Schema, begun: str, char: str, emit: Callable[[str], None]) -> Script[str]:
        """Read all parameters. Arguments cut off by the end of the text stay open: half a call must not look whole.

        If a parameter occurs twice, its first value counts, which has been emitted before the second one begins.
        `begun`: what has been read of the first tag.
        """
        names: set[str] = set()
        while True:
            self.record(begun, char)
            if not begun:
                char = yield from self.white(char)
            tag, char = yield from self._tag(begun, char)
            if tag.startswith(PARAMETER):
                self.forget()
                name = tag[len(PARAMETER) : -1]
                is_new = name not in names
                if is_new:
                    emit(f"{', ' if names else ''}{_quoted(name)}: ")
                    names.add(name)
                begun, char = yield from self._value(types(schema, name), char, emit if is_new else lambda _: None)
                continue
            if char != END or tag:
                emit("}")
            if tag == END_FUNCTION:
                self.forget()
                self._close(END_FUNCTION)
            return char

    def _tag(self, begun: str, char: str) -> Script[tuple[str, str]]:
        """Read one of the two tags that may follow, or nothing. `begun`: the part that has been read."""
        if begun.endswith(">"):
            return begun, char
        chars = [*begun]
        while char not in (END, "\n") and len(chars) < MAX_TAG:
            chars.append(char)
            tag = "".join(chars)
            char = yield
            if tag == END_FUNCTION or (tag.startswith(PARAMETER) and tag.endswith(">")):
                return tag, char
            if not (PARAMETER.startswith(tag) or END_FUNCTION.startswith(tag) or tag.startswith(PARAMETER)):
                break
            if char == "<":  # another tag begins: this one is none
                break
        return "", char

    def _value(self, types: frozenset[str], char: str, emit: Callable[[str], None]) -> Script[tuple[str, str]]:
        """Read one value, without the line ends around it, and emit it as JSON.

        Return the part of the next tag that has been read with its end, and the next character.
        """
        is_text = types == {"string"}
        if is_text:
            emit('"')
        if char == "\n":
            char = yield
        value = Raw()
        trimmed = Trimmer((lambda text: emit(_quoted(text)[1:-1])) if is_text else value.add, NOTHING, frozenset("\n"))
        delimiter = yield from self.until(VALUE_ENDS, char, trimmed)
        while delimiter != END and value.is_quoted and "string" not in types:
            trimmed.add(delimiter)
            delimiter = yield from self.until(VALUE_ENDS, (yield), trimmed)
        if delimiter == END:
            trimmed.flush(but=int(self._cut_before is not None))  # the line end may belong to the tag
            if not is_text:
                emit(value.text)
            return "", END
        is_closed = delimiter == END_PARAMETER
        trimmed.flush(but=int(is_closed))
        emit('"' if is_text else as_json(value.text, types))
        return "" if is_closed else delimiter[1:], (yield)


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
        return _quoted(text)
    bare = text.strip()
    bare = LITERALS.get(bare, bare)
    try:
        json.loads(bare, parse_constant=_no_json)
    except (ValueError, RecursionError):
        is_literal = bare.startswith(("[", "{")) and types & {"array", "object"}
        return (_of_literal(bare) if is_literal else None) or _quoted(text)
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


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
