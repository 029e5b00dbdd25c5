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

    def call(self, delimiter: str, char: str) -> Script[str]:
        if delimiter == CALLS:
            char = yield from self.white(char)
            found, char = yield from self.literal(CALL, char)
            if not found:
                return char
        char = yield from self.white(char)
        name, char = yield from self.name(char)
        found, char = yield from self.literal(BETWEEN, char)
        if not found:
            return char
        char = yield from self.white(char)
        if char == "{":
            return (yield from self.arguments(name, char))
        name, char = yield from self.name(char)
        char = yield from self.white(char)
        found, char = yield from self.literal(f"{FENCE}json", char)
        char = yield from self.white(char)
        before = self.num_calls
        char = yield from self.arguments(name, char)
        if found and self.num_calls > before:
            self.record("", char)
            char = yield from self.white(char)
            found, char = yield from self.literal(FENCE, char)
            if found:
                self.record("", char)
        return char
