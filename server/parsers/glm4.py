"""Calls of GLM-4-0414: a name, and in the next line arguments in JSON, each call as a message of its own."""

from __future__ import annotations

from functools import cached_property

from .formats import CALL_DELIMITERS
from .scanner import END, Scanner, Script

OPENS = CALL_DELIMITERS["glm4"]


class Glm4(Scanner):
    """A call is recognized only at the start of a message: the first line is a function's name and nothing else."""

    opens = OPENS

    @cached_property
    def bare(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset(name[0] for name in self.tools if name)

    def call(self, delimiter: str, char: str) -> Script[str]:
        while True:
            num_calls = self.num_calls
            char = yield from self.white(char)
            name, char = yield from self._name(char)
            while char == " ":
                char = yield
            if char == "\n" and name in self.tools:
                char = yield from self.white(char)
                char = yield from self.arguments(name, char)
            if self.num_calls == num_calls:
                if delimiter and self._record is not None:  # it only separates two messages
                    del self._record[: len(delimiter)]
                return char
            # The next call may follow without a delimiter.
            self.record(delimiter := "", char)

    def _name(self, char: str) -> Script[tuple[str, str]]:
        """Return the longest beginning of a tool's name that follows: any other text is emitted at once."""
        name = ""
        while char != END and any(tool.startswith(name + char) for tool in self.tools):
            name += char
            char = yield
        return name, char

    def may_be_call(self, text: str) -> bool:
        """Return whether the text has a delimiter, or begins like a call."""
        if text.startswith(OPENS):
            return True
        name, line, rest = text.lstrip().partition("\n")
        if not line:
            return any(tool.startswith(name.rstrip(" ")) for tool in self.tools)
        return name.rstrip(" ") in self.tools and rest.lstrip()[:1] in ("", "{")
