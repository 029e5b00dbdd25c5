"""Calls of GLM-4.5, 4.6 and 4.7: a name and, between tags, the keys and values of its arguments.

The versions differ in the line ends between the tags, which never belong to a value.
"""

from __future__ import annotations

from collections.abc import Callable

from .formats import CALL_DELIMITERS
from .parts import Schema
from .scanner import END, WHITE, Script, Trimmer
from .tagged import MAX_TAG, Tagged

OPENS, CLOSES, KEY, END_KEY, VALUE, END_VALUE = CALL_DELIMITERS["glm45"]


class Glm(Tagged):
    """A call begins with the tag after its name: the model may just write about calls."""

    opens = (OPENS,)
    closes = (CLOSES,)

    def value_ends(self, types: frozenset[str]) -> tuple[str, ...]:
        return (END_VALUE, CLOSES, f"\n{KEY}" if _may_be_text(types) else KEY)

    def end_of_value(self, types: frozenset[str], char: str, into: Trimmer) -> Script[tuple[str, str]]:
        """Read a value up to its end. Strings may be about calls: the end of a call is theirs if more text follows."""
        while True:
            end, char = yield from super().end_of_value(types, char, into)
            if end != CLOSES or not _may_be_text(types):
                return end, char
            chars = [*end]
            while char in WHITE:
                chars.append(char)
                char = yield
            if char == END:
                return (END if self._cut_before is not None else CLOSES), END
            into.add(chars)

    def call(self, delimiter: str, char: str) -> Script[str]:
        char = yield from self.white(char)
        name, char = yield from self.name(char)
        if name not in self.tools:
            return char
        char = yield from self.white(char)
        tag, char = yield from self._tag((KEY, CLOSES), char)
        if not tag:
            return char
        emit = self.begin_call(name)
        emit("{")
        return (yield from self._arguments(self.tools[name], tag, char, emit))

    def _arguments(self, schema: Schema, tag: str, char: str, emit: Callable[[str], None]) -> Script[str]:
        """Read all arguments. What the end of the text cuts off stays open: half a call must not look whole.

        `tag`: the first tag, which has been read.
        """
        names: set[str] = set()
        while tag == KEY:
            self.record(tag, char)
            key, char = yield from self._key(char)
            if key is None:
                break
            self.forget()
            end, char = yield from self.parameter(schema, key, names, char, emit)
            self.record("" if end == END_VALUE else end, char)
            tag = end.removeprefix("\n")
            if end == END_VALUE:
                char = yield from self.white(char)
                tag, char = yield from self._tag((KEY, CLOSES), char)
        if tag == CLOSES or char != END:
            emit("}")
        if tag == CLOSES:
            self.forget()
            self._close(CLOSES)
        return char

    def _key(self, char: str) -> Script[tuple[str | None, str]]:
        """Read a key up to its value; return None if no value follows. The closing tag of the key may be missing."""
        chars: list[str] = []
        while char not in (END, "<") and len(chars) < MAX_TAG:
            chars.append(char)
            char = yield
        tag, char = yield from self._tag((END_KEY, VALUE), char)
        if tag == END_KEY:
            char = yield from self.white(char)
            tag, char = yield from self._tag((VALUE,), char)
        return ("".join(chars).strip() if tag == VALUE else None), char

    def _tag(self, tags: tuple[str, ...], char: str) -> Script[tuple[str, str]]:
        """Read one of these tags, or nothing."""
        begun = ""
        while char != END and any(tag.startswith(begun + char) for tag in tags):
            begun += char
            char = yield
            if begun in tags:
                return begun, char
        return "", char


def _may_be_text(types: frozenset[str]) -> bool:
    """Return whether a value may be a string, which has no quotes."""
    return not types or "string" in types
