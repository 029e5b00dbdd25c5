"""Calls of Gemma 4: a name and arguments like a JavaScript object, whose strings are between two special tokens."""

from __future__ import annotations

import json
from collections.abc import Callable

from .formats import CALL_DELIMITERS
from .qwen_coder import as_json
from .scanner import END, NOTHING, WHITE, Scanner, Script, Trimmer

OPENS, CLOSES, QUOTE = CALL_DELIMITERS["gemma4"]
PREFIX = "call:"
BRACKETS = {"{": "}", "[": "]"}
ENDS = frozenset(",}]")  # of a value without quotes
MAX_KEY = 256  # characters


class Gemma(Scanner):
    """Arguments become JSON as they are read. Brackets are closed as they were opened, whichever the model writes."""

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
        open_, is_first, has_key = ["}"], True, False
        while open_ and char != END:
            if char in WHITE or char == ",":
                char = yield
            elif char in "}]":
                emit("null" * has_key + open_.pop())
                is_first = has_key = False
                char = yield
            elif not has_key and open_[-1] == "}":
                key, char = yield from self._key(char)
                if char != END:
                    emit(f"{'' if is_first else ', '}{json.dumps(key, ensure_ascii=False)}: ")
                    has_key = True
            else:
                emit("" if is_first or has_key else ", ")
                is_first = char in BRACKETS
                has_key = False
                if char in BRACKETS:
                    emit(char)
                    open_.append(BRACKETS[char])
                    char = yield
                else:
                    char = yield from self._value(char, emit)
        return char

    def _key(self, char: str) -> Script[tuple[str, str]]:
        """Read a key and the colon after it."""
        chars: list[str] = []
        if char == QUOTE[0]:
            char = yield from self._value(char, chars.append)
        elif char == '"':
            char = yield from self.value(char, chars.append)
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
            return (yield from self.value(char, emit))
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
