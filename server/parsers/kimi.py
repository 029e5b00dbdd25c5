"""Calls of Kimi K2: ids such as functions.NAME:0, each followed by arguments in JSON."""

from __future__ import annotations

from .formats import KIMI
from .scanner import Scanner, Script

CALLS, CALL, BETWEEN, END_CALL, END_CALLS = KIMI
PREFIX = "functions."


class Kimi(Scanner):
    """The model may begin its calls before it has closed its reasoning."""

    opens = (CALLS, CALL)
    closes = (END_CALL, END_CALLS)
    unclosed = (CALLS,)
    within_lines = True

    def call(self, delimiter: str, char: str) -> Script[str]:
        if delimiter == CALLS:
            char = yield from self.white(char)
            found, char = yield from self.literal(CALL, char)
            if not found:
                return char
        char = yield from self.white(char)
        call_id, char = yield from self.name(char)
        char = yield from self.white(char)
        found, char = yield from self.literal(BETWEEN, char)
        if not found:
            return char
        char = yield from self.white(char)
        return (yield from self.arguments(self.named(call_id), char))

    def named(self, call_id: str) -> str:
        """Return the name of the function in an id.

        Models may omit the prefix or the number, and the function's own name may have a part like either.
        """
        name, _, number = call_id.rpartition(":")
        ids = [name, call_id] if name and number.isdigit() else [call_id]
        names = [each for each in ids for each in (each.removeprefix(PREFIX), each)]
        return next((each for each in names if each in self.tools), call_id)
