"""gpt-oss: messages, each with a channel (analysis, commentary, final) and possibly a recipient function."""

from __future__ import annotations

import re

from .formats import MARKS
from .parts import Reasoning
from .scanner import END, NOTHING, WHITE, Edged, Scanner, Script

START, CHANNEL, CONSTRAIN, MESSAGE, *ENDS = MARKS["gpt_oss"]
MAX_HEADER = 256  # characters; a name has at most 64
FUNCTION = re.compile(r"\bto=functions\.([^\s<]+)")
RECIPIENT = re.compile(r"\bto=")
ANALYSIS = re.compile(r"<\|channel\|>\s*analysis\b")


class Harmony(Scanner):
    """Text outside of all messages is content; a line end separates two messages of one kind."""

    has_reasoned = False

    def script(self) -> Script[None]:
        letter, mark = (yield), ""
        if self.is_reasoning:
            mark, letter = yield from self._reasoning(letter)
        elif letter == " ":  # the prompt ends with the role, which a recipient can follow
            self.record("", letter)
            is_there, letter = yield from self.literal(" to=", letter)
            if is_there:
                mark, letter = yield from self._message(" to=", letter)
            if self._record is not None:
                self.no_call(letter)
        while letter != END or mark in (START, CHANNEL):
            if mark in (START, CHANNEL):
                self.record(mark, letter)
                mark, letter = yield from self._message(mark, letter)
                if self._record is not None:
                    self.no_call(letter)
            else:
                mark, letter = yield from self._body(letter, self.content)

    def _message(self, header: str, letter: str) -> Script[tuple[str, str]]:
        """Read one message; return the delimiter after it and the next character. `header`: what has been read."""
        while not header.endswith(MESSAGE):
            if letter == END:
                self.forget()  # a header alone is not content
                return "", END
            if len(header) == MAX_HEADER or header.endswith((START, *ENDS), 1):
                return "", letter
            header += letter
            self.is_reasoning = header.endswith(MESSAGE) and _is_analysis(header)
            letter = yield
        function = FUNCTION.search(header)
        if function is not None and function[1] in self.tools:
            return (yield from self._arguments(function[1], letter))
        if RECIPIENT.search(header):
            return "", letter
        self.forget()
        if self.is_reasoning:
            return (yield from self._reasoning(letter))
        if not self.content.is_empty:
            self.content.add("\n")
        return (yield from self._body(letter, self.content))

    def _arguments(self, name: str, letter: str) -> Script[tuple[str, str]]:
        """Read the arguments. Others than objects are reported too, so that the client sees the error."""
        say = self.say_call(name)
        letter = yield from self.white(letter)
        if letter == "{":
            letter = yield from self.value(letter, say)  # delimiters within its strings are text
            return (yield from self._body(letter, self.content))
        said = Edged(say, NOTHING, WHITE)
        mark, letter = yield from self._body(letter, said)
        if said.is_empty and mark != END:
            say("{}")
        return mark, letter

    def _reasoning(self, letter: str) -> Script[tuple[str, str]]:
        if self.has_reasoned:
            self.say(Reasoning, "\n")
        self.has_reasoned = True
        said = Edged(lambda text: self.say(Reasoning, text), NOTHING, NOTHING)
        return (yield from self._body(letter, said))

    def _body(self, letter: str, into: Edged) -> Script[tuple[str, str]]:
        """Read text up to the next delimiter; return the delimiter and the next character."""
        mark = yield from self.until((START, CHANNEL, *ENDS), letter, into)
        self.is_reasoning = False
        return mark, END if mark == END else (yield)


def _is_analysis(header: str) -> bool:
    return ANALYSIS.search(header) is not None and RECIPIENT.search(header) is None
