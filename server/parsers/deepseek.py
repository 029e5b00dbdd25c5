"""Calls of DeepSeek V3 and R1 ("function", delimiter, name, fenced JSON) and V3.1 (name, delimiter, JSON)."""

from __future__ import annotations

from .formats import DEEPSEEK
from .scanner import Scanner, Script

CALLS, CALL, BETWEEN, END_CALL, END_CALLS = DEEPSEEK
FENCE = "```"


class DeepSeek(Scanner):
    """Reads both forms, whichever the model writes."""

    opens = (CALLS, CALL)
    closes = (END_CALL, END_CALLS)

    def call(self, mark: str, letter: str) -> Script[str]:
        if mark == CALLS:
            letter = yield from self.white(letter)
            is_there, letter = yield from self.literal(CALL, letter)
            if not is_there:
                return letter
        letter = yield from self.white(letter)
        name, letter = yield from self.name(letter)
        is_there, letter = yield from self.literal(BETWEEN, letter)
        if not is_there:
            return letter
        letter = yield from self.white(letter)
        if letter == "{":
            return (yield from self.arguments(name, letter))
        name, letter = yield from self.name(letter)
        letter = yield from self.white(letter)
        is_there, letter = yield from self.literal(f"{FENCE}json", letter)
        letter = yield from self.white(letter)
        before = self.num_calls
        letter = yield from self.arguments(name, letter)
        if is_there and self.num_calls > before:
            self.record("", letter)
            letter = yield from self.white(letter)
            is_there, letter = yield from self.literal(FENCE, letter)
            if is_there:
                self.record("", letter)
        return letter
