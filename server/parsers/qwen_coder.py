"""Calls of Qwen3-Coder and Qwen3.5: tags for the function and for each parameter, which enclose values verbatim."""

from __future__ import annotations

from collections.abc import Callable, Collection

from .formats import CALL_DELIMITERS
from .parts import Schema
from .scanner import END, Script
from .tagged import MAX_TAG, Tagged

OPENS, CLOSES = CALL_DELIMITERS["qwen3_coder"]
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"


class Coder(Tagged):
    """The outer delimiter may be missing: the model sometimes omits it.

    Inside reasoning a call begins only with the tag after its name: the model may just write about calls. Models also
    forget the closing tag of a value: at the beginning of a line the next tag ends it, if that tag fits there.
    """

    opens: tuple[str, ...] = (OPENS, FUNCTION)
    closes = (END_FUNCTION, CLOSES)
    unclosed: tuple[str, ...] = (OPENS,)  # Qwen3.5 sometimes calls before it has closed its reasoning
    on_lines = True
    # A subclass for a similar format replaces these.
    function, end_function = FUNCTION, END_FUNCTION
    parameter_tag, end_tag = PARAMETER, ">"

    def value_ends(self, types: frozenset[str], left: Collection[str] | None) -> tuple[str, ...]:
        next_tags = [""] if left is None else [f"{name}{self.end_tag[0]}" for name in left]
        return (END_PARAMETER, f"\n{self.end_function}", *(f"\n{self.parameter_tag}{each}" for each in next_tags))

    def is_end(self, end: str, types: frozenset[str], char: str) -> Script[tuple[bool, str]]:
        """Return whether the end of a function, if it is one, ends a call: the end of the text or a delimiter follows.

        The last character of the delimiter is left to be read.
        """
        if end != f"\n{self.end_function}":
            return True, char
        char = yield from self.white(char)
        begun, tags = "", (*self.opens, *self.closes[1:])
        while char != END and begun + char not in tags:
            if not any(tag.startswith(begun + char) for tag in tags):
                return False, char
            begun += char
            char = yield
        return char != END or self._cut_before is None, char

    def call(self, delimiter: str, char: str) -> Script[str]:
        if delimiter != self.function:
            char = yield from self.white(char)
            found, char = yield from self.literal(self.function, char)
            if not found:
                return char
        name, char = yield from self.name(char)
        if name not in self.tools:
            return char
        found, char = yield from self.literal(self.end_tag, char)
        if not found:
            return char
        tag = ""
        if self.is_reasoning:
            tag, char = yield from self._tag("", (yield from self.white(char)))
            if not tag:
                return char
        emit = self.begin_call(name)
        emit("{")
        return (yield from self._parameters(self.tools[name], tag, char, emit))

    def _parameters(self, schema: Schema, begun: str, char: str, emit: Callable[[str], None]) -> Script[str]:
        """Read all parameters. Arguments cut off by the end of the text stay open: half a call must not look whole.

        `begun`: what has been read of the first tag.
        """
        names: set[str] = set()
        while True:
            self.record(begun, char)
            if not begun:
                char = yield from self.white(char)
            tag, char = yield from self._tag(begun, char)
            if tag.startswith(self.parameter_tag):
                self.forget()
                name = self.named(tag)
                end, char = yield from self.parameter(schema, name, names, char, emit)
                begun = end[1:] if end.startswith("\n") else ""
                continue
            if char != END or tag:
                emit("}")
            if tag.startswith(self.end_function):
                self.record(tag.removeprefix(self.end_function) if char != END else "", char)
                self._close(self.end_function)
            return char

    def named(self, tag: str) -> str:
        """Return the parameter's name of a tag."""
        return tag[len(self.parameter_tag) :].removesuffix(self.end_tag)

    def _tag(self, begun: str, char: str) -> Script[tuple[str, str]]:
        """Read one of the two tags that may follow, or nothing. `begun`: what has been read, also after the tag."""
        if begun.endswith(">") or begun.startswith(self.end_function):
            return begun, char
        chars = [*begun]
        while char not in (END, "\n") and len(chars) < MAX_TAG:
            chars.append(char)
            tag = "".join(chars)
            char = yield
            is_parameter = tag.startswith(self.parameter_tag)
            if tag == self.end_function or (is_parameter and tag.endswith(self.end_tag)):
                return tag, char
            if not (is_parameter or self.parameter_tag.startswith(tag) or self.end_function.startswith(tag)):
                break
            if char == "<":  # another tag begins: this one is none
                break
        return "", char
