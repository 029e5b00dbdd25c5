"""Solar Open: messages of reasoning, content or calls. A call is an id, a name and arguments in JSON."""

from __future__ import annotations

from .formats import SOLAR_CALL, SOLAR_ENDS, SOLAR_STARTS
from .parts import Reasoning
from .scanner import END, NOTHING, Scanner, Script, Trimmer

BEGIN, THINK, CONTENT, CALLS = SOLAR_STARTS
CALL, NAMED, ARGUMENTS, END_CALL = SOLAR_CALL
DELIMITERS = (*SOLAR_STARTS, CALL, END_CALL, *SOLAR_ENDS)
ROLE = "assistant"


class Solar(Scanner):
    """Text outside of all messages is content; a line end separates two messages of one kind."""

    has_reasoned = False

    def script(self) -> Script[None]:
        char = yield
        into = self._next_reasoning() if self.is_reasoning else self.content
        while char != END:
            delimiter = yield from self.until(DELIMITERS, char, into)
            if delimiter == END:
                return
            self.is_reasoning = delimiter == THINK
            char = yield
            if delimiter == CALL:
                self.record(delimiter, char)
                char = yield from self.call(delimiter, char)
                self.no_call(char)
            elif delimiter == BEGIN:
                _, char = yield from self.literal(ROLE, char)
            elif delimiter == CONTENT and not self.content.is_empty:
                self.content.add("\n")
            into = self._next_reasoning() if self.is_reasoning else self.content

    def call(self, delimiter: str, char: str) -> Script[str]:
        _, char = yield from self.name(char)  # the model's id; the server assigns others
        found, char = yield from self.literal(NAMED, char)
        if not found:
            return char
        name, char = yield from self.name(char)
        found, char = yield from self.literal(ARGUMENTS, char)
        if not found:
            return char
        char = yield from self.white(char)
        return (yield from self.arguments(name, char))

    def _next_reasoning(self) -> Trimmer:
        if self.has_reasoned:
            self.emit(Reasoning, "\n")
        self.has_reasoned = True
        return Trimmer(lambda text: self.emit(Reasoning, text), NOTHING, NOTHING)
