"""Calls of GLM-4.5, 4.6 and 4.7: a name and, between tags, the keys and values of its arguments.

The versions differ in the line ends between the tags, which never belong to a value.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

from .formats import CALL_DELIMITERS
from .parts import Schema
from .scanner import END, Script
from .tagged import MAX_TAG, Tagged

OPENS, CLOSES, KEY, END_KEY, VALUE, END_VALUE = CALL_DELIMITERS["glm45"]
HEAD = re.compile(rf"\s*{OPENS}\s*([^\s<]+)\s*({KEY}|{CLOSES})")  # of the next call


class Glm(Tagged):
    """A call begins with the tag after its name: the model may just write about calls."""

    opens = (OPENS,)
    closes = (CLOSES,)

    def value_ends(self, types: frozenset[str], left: Collection[str] | None) -> tuple[str, ...]:
        return (END_VALUE, CLOSES, f"\n{KEY}" if _may_be_text(types) else KEY)

    def is_end(self, end: str, types: frozenset[str], char: str) -> Script[tuple[bool, str]]:
        """Return whether the end of a call, if it is one, ends a value, which may be a string about calls.

        The end of the text or another call must follow, which is then read up to its first tag.
        """
        if end != CLOSES or not _may_be_text(types):
            return True, char
        char = yield from self.white(char)
        if char == END:
            return self._cut_before is None, END
        found, char = yield from self.literal(OPENS, char)
        if not found:
            return False, char
        name, tag, char = yield from self._head(char)
        return name in self.tools and tag != "", char

    def call(self, delimiter: str, char: str) -> Script[str]:
        name, tag, char = yield from self._head(char)
        while name in self.tools and tag:
            emit = self.begin_call(name)
            emit("{")
            begun, char = yield from self._arguments(self.tools[name], tag, char, emit)
            head = HEAD.fullmatch(begun)
            name, tag = head.groups() if head else ("", "")
        return char

    def _head(self, char: str) -> Script[tuple[str, str, str]]:
        """Read the name of a function and the first tag after it; return both and the next character."""
        char = yield from self.white(char)
        name, char = yield from self.name(char)
        if name not in self.tools:
            return name, "", char
        char = yield from self.white(char)
        tag, char = yield from self._tag((KEY, CLOSES), char)
        return name, tag, char

    def _arguments(self, schema: Schema, tag: str, char: str, emit: Callable[[str], None]) -> Script[tuple[str, str]]:
        """Read all arguments. What the end of the text cuts off stays open: half a call must not look whole.

        `tag`: the first tag, which has been read. Return what has been read of the next call, and the next character.
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
        is_closed = tag.startswith(CLOSES)
        if is_closed or char != END:
            emit("}")
        if is_closed:
            self.forget()
            self._close(CLOSES)
        return tag.removeprefix(CLOSES), char

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
