"""Calls of Gemma 4: a name and arguments like a JavaScript object, whose strings are between two special tokens."""

from __future__ import annotations

import json
from collections.abc import Callable

from .formats import CALL_DELIMITERS
from .scanner import END, NOTHING, WHITE, Scanner, Script, Trimmer
from .tagged import as_json

OPENS, CLOSES, QUOTE = CALL_DELIMITERS["gemma4"]
PREFIX = "call:"
BRACKETS = {"{": "}", "[": "]"}
ENDS = frozenset(",}]")  # of a value without quotes
HEX = frozenset("0123456789abcdefABCDEF")
BACKSLASH = "\\"
MAX_KEY = 256  # characters


class Gemma(Scanner):
    """Converts arguments to JSON as they are read. Closing brackets match the opening ones, whatever was written."""

    opens = (OPENS,)
    closes = (CLOSES,)

    def call(self, delimiter: str, char: str) -> Script[str]:
        found, char = yield from self.literal(PREFIX, char)
        name, char = yield from self.name(char)
        if not found or char != "{" or name not in self.tools:
            return char
        emit = self.begin_call(name)
        emit("{")
        return (yield from self._items((yield), emit))

    def _items(self, char: str, emit: Callable[[str], None]) -> Script[str]:
        """Read an object up to its end, without recursion. What the end of the text cuts off stays open."""
        open_, names, is_first, has_key = ["}"], [set[str]()], True, False
        muted = 0  # how many brackets are open around a repeated key, whose value is dropped; 0: none
        while open_ and char != END:
            write = _drop if muted else emit
            if char in WHITE or (char == "," and not has_key):
                char = yield
            elif not has_key and open_[-1] == "}" and char not in "}]":
                key, char = yield from self._key(char)
                if char == END:
                    break
                if key in names[-1]:
                    muted = muted or len(open_)
                elif not muted:
                    emit(f"{'' if is_first else ', '}{json.dumps(key, ensure_ascii=False)}: ")
                names[-1].add(key)
                has_key = True
            elif char in BRACKETS:
                write(char if is_first or has_key else f", {char}")
                open_.append(BRACKETS[char])
                names.append(set())
                is_first, has_key = True, False
                char = yield
            else:
                if has_key and char in ENDS:
                    write("null")
                elif char in ENDS:
                    write(open_.pop())
                    names.pop()
                    char = yield
                else:
                    write("" if is_first or has_key else ", ")
                    char = yield from self._value(char, write)
                is_first = has_key = False
                if len(open_) == muted:
                    muted = 0
        return char

    def _key(self, char: str) -> Script[tuple[str, str]]:
        """Read a key and the colon after it."""
        chars: list[str] = []
        if char in (QUOTE[0], '"'):
            char = yield from self._value(char, chars.append)
        else:
            while char not in (END, ":") and char not in ENDS and len(chars) < MAX_KEY:
                chars.append(char)
                char = yield
        char = yield from self.white(char)
        text = "".join(chars).strip()
        if text.startswith('"'):
            try:
                text = json.loads(text, strict=False)
            except ValueError:
                text = text.strip('"')
        return text, (yield) if char == ":" else char

    def _value(self, char: str, emit: Callable[[str], None]) -> Script[str]:
        """Read a value without brackets, and emit it as JSON."""
        if char == '"':
            return (yield from self._quoted(emit))
        chars: list[str] = []
        for wanted in QUOTE:
            if char != wanted:
                break
            chars.append(char)
            char = yield
        if len(chars) == len(QUOTE):
            emit('"')
            text = Trimmer(lambda text: emit(json.dumps(text, ensure_ascii=False)[1:-1]), NOTHING, NOTHING)
            delimiter = yield from self.until((QUOTE,), char, text)
            if delimiter == END:
                return END
            emit('"')
            return (yield)
        while char != END and char not in ENDS:
            chars.append(char)
            char = yield
        if char != END:
            emit(as_json("".join(chars).strip(), frozenset()))
        return char

    def _quoted(self, emit: Callable[[str], None]) -> Script[str]:
        """Read a string in ordinary quotes after the first one, and emit it as JSON, whatever its characters."""
        emit('"')
        char = yield
        while char not in (END, '"'):
            if char == BACKSLASH:
                text, char = yield from self._escape()
                emit(text)
            else:
                emit(json.dumps(char, ensure_ascii=False)[1:-1])
                char = yield
        if char == END:
            return END
        emit('"')
        return (yield)

    def _escape(self) -> Script[tuple[str, str]]:
        """Read what follows a backslash: one of JSON's escapes, or nothing, which makes the backslash text."""
        char = yield
        if char != END and char in '"\\/bfnrt':
            return BACKSLASH + char, (yield)
        if char != "u":
            return "" if char == END else 2 * BACKSLASH, char
        digits = ""
        char = yield
        while char in HEX and len(digits) < 4:
            digits += char
            char = yield
        return f"{BACKSLASH if len(digits) == 4 else 2 * BACKSLASH}u{digits}", char


def _drop(text: str) -> None:
    """Emit nothing."""
    del text
