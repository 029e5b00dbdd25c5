"""Calls of DeepSeek V3 and R1 ("function", delimiter, name, fenced JSON) and V3.1 (name, delimiter, JSON)."""

from __future__ import annotations

from .formats import DEEPSEEK
from .scanner import Scanner, Script

CALLS, CALL, BETWEEN, END_CALL, END_CALLS = DEEPSEEK


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
        return (yield from self.fenced(name, char))
