"""gpt-oss: messages, each with a channel (analysis, commentary, final) and possibly a recipient function."""

from __future__ import annotations

import re

from .formats import CALL_DELIMITERS
from .parts import Reasoning
from .scanner import END, NOTHING, WHITE, Scanner, Script, Trimmer

START, CHANNEL, CONSTRAIN, MESSAGE, *ENDS = CALL_DELIMITERS["gpt_oss"]
MAX_HEADER = 256  # characters; a name has at most 64
FUNCTION = re.compile(r"\bto=functions\.([^\s<]+)")
RECIPIENT = re.compile(r"\bto=")
ANALYSIS = re.compile(r"<\|channel\|>\s*analysis\b")


class Harmony(Scanner):
    """Text outside of all messages is content; a line end separates two messages of one kind."""

    has_reasoned = False

    def script(self) -> Script[None]:
        char, delimiter = (yield), ""
        if self.is_reasoning:
            delimiter, char = yield from self._reasoning(char)
        elif char == " ":  # the prompt ends with the role, which a recipient can follow
            self.record("", char)
            found, char = yield from self.literal(" to=", char)
            if found:
                delimiter, char = yield from self._message(" to=", char)
            self.no_call(char)
        while char != END or delimiter in (START, CHANNEL):
            if delimiter in (START, CHANNEL):
                self.record(delimiter, char)
                delimiter, char = yield from self._message(delimiter, char)
                self.no_call(char)
            else:
                delimiter, char = yield from self._body(char, self.content)

    def _message(self, header: str, char: str) -> Script[tuple[str, str]]:
        """Read one message; return the delimiter after it and the next character. `header`: what has been read."""
        while not header.endswith(MESSAGE):
            if char == END:
                self.forget()  # a header alone is not content
                return "", END
            if len(header) == MAX_HEADER or header.endswith((START, *ENDS), 1):
                return "", char
            header += char
            self.is_reasoning = header.endswith(MESSAGE) and _is_analysis(header)
            char = yield
        function = FUNCTION.search(header)
        if function is not None and function[1] in self.tools:
            return (yield from self._arguments(function[1], char))
        if RECIPIENT.search(header):
            return "", char
        self.forget()
        if self.is_reasoning:
            return (yield from self._reasoning(char))
        if not self.content.is_empty:
            self.content.add("\n")
        return (yield from self._body(char, self.content))

    def _arguments(self, name: str, char: str) -> Script[tuple[str, str]]:
        """Read the arguments. Others than objects are reported too, so that the client sees the error."""
        emit = self.begin_call(name)
        char = yield from self.white(char)
        if char == "{":
            char = yield from self.value(char, emit)  # delimiters within its strings are text
            return (yield from self._body(char, self.content))
        trimmed = Trimmer(emit, NOTHING, WHITE)
        delimiter, char = yield from self._body(char, trimmed)
        if trimmed.is_empty and delimiter != END:
            emit("{}")
        return delimiter, char

    def _reasoning(self, char: str) -> Script[tuple[str, str]]:
        if self.has_reasoned:
            self.emit(Reasoning, "\n")
        self.has_reasoned = True
        trimmed = Trimmer(lambda text: self.emit(Reasoning, text), NOTHING, NOTHING)
        return (yield from self._body(char, trimmed))

    def _body(self, char: str, into: Trimmer) -> Script[tuple[str, str]]:
        """Read text up to the next delimiter; return the delimiter and the next character."""
        delimiter = yield from self.until((START, CHANNEL, *ENDS), char, into)
        self.is_reasoning = False
        return delimiter, END if delimiter == END else (yield)


def _is_analysis(header: str) -> bool:
    return ANALYSIS.search(header) is not None and RECIPIENT.search(header) is None
