"""Calls written as JSON objects: {"name": ..., "arguments": {...}}, or with "parameters" instead of "arguments"."""

from __future__ import annotations

import json

from .formats import CALL_DELIMITERS, HUNYUAN
from .scanner import END, Scanner, Script

ARGUMENTS = ("arguments", "parameters")
BEFORE_NAME = ("type", "id", *ARGUMENTS)  # keys of a call that models write before its name


class Objects(Scanner):
    """Objects at the beginning of the completion, alone or in a list."""

    bare = frozenset("{[")
    separator = ""  # between objects that are not in a list

    def call(self, delimiter: str, char: str) -> Script[str]:
        char = yield from self.white(char)
        if char != "[":
            _, char = yield from self.objects(char, self.separator)
            return char
        char = yield from self.white((yield))
        are_calls, char = yield from self.objects(char, ",")
        if are_calls and char == "]":
            self.forget()
            char = yield
        return char

    def may_be_call(self, text: str) -> bool:
        """Return whether the text has a delimiter, or begins like an object with the name of a tool.

        Llama 3 often writes the type before the name.
        """
        if not self.bare or text.startswith(self.opens):
            return bool(text)
        head = "".join(text.split()).removeprefix("[")
        heads = [f'{{{start}"name":"{name}"' for name in self.tools for start in ("", '"type":"function",')]
        return any(each.startswith(head) or head.startswith(each) for each in heads)

    def objects(self, char: str, separator: str) -> Script[tuple[bool, str]]:
        """Read consecutive objects; return whether all were calls. Other text, and what follows it, stays recorded."""
        are_calls = False
        while char == "{":
            before = self.num_calls
            char = yield from self.object(char)
            are_calls = self.num_calls > before
            if not are_calls:
                break
            self.record("", char)
            char = yield from self.white(char)
            while char == "}" and self.closes:  # models close more objects than they have opened
                char = yield from self.white((yield))
            if any(delimiter.startswith(char) for delimiter in self.closes):
                self.forget()
            if char == separator != END:
                char = yield from self.white((yield))
        return are_calls, char

    def object(self, char: str) -> Script[str]:
        """Read one object; emit its call as soon as the name is known."""
        name: str | None = None
        waiting: str | None = None  # arguments that precede the name
        has_arguments = False
        while True:
            key, char = yield from self._key((yield))
            if key is None:
                return char
            # Without delimiters any JSON may be the content, which streams once it cannot be a call.
            if self.bare and name is None and key not in ("name", *BEFORE_NAME):
                return char
            if key == "name" and name is None:
                text, char = yield from self.string(char)
                if text is None or text not in self.tools:
                    return char
                name = text
            elif key in ARGUMENTS and char == "{" and name is not None and not has_arguments:
                has_arguments = True
                char = yield from self.value(char, self.begin_call(name))
            else:
                chars: list[str] = []
                char = yield from self.value(char, chars.append)
                if key in ARGUMENTS and not has_arguments:
                    waiting = object_text("".join(chars))
                    if waiting is None:
                        return char
            if name is not None and waiting is not None and not has_arguments:
                has_arguments = True
                self.begin_call(name)(waiting)
            char = yield from self.white(char)
            if char == "}":
                if name is not None and not has_arguments:
                    self.begin_call(name)("{}")
                return (yield)
            if char != ",":
                return char

    def _key(self, char: str) -> Script[tuple[str | None, str]]:
        """Read a key and its colon; return the key (None if there is none) and the first character of the value."""
        char = yield from self.white(char)
        if char != '"':
            return None, char
        key, char = yield from self.string(char)
        char = yield from self.white(char)
        if char != ":":
            return None, char
        char = yield from self.white((yield))
        return key, char


def object_text(text: str) -> str | None:
    """Return arguments that were read as a whole as the JSON text of an object; None if they cannot be one."""
    if text.startswith("{"):
        return text
    if text == "null":
        return "{}"
    try:
        inner = json.loads(text, strict=False) if text.startswith('"') else None
    except ValueError:
        return None
    return inner if isinstance(inner, str) and inner.startswith("{") else None


class Llama(Objects):
    """Llama 3: an object, bare or after a delimiter."""

    opens = CALL_DELIMITERS["llama3_json"]
    separator = ";"


class Hermes(Objects):
    """Each object between two delimiters, as Qwen writes them too."""

    bare = frozenset()
    opens = CALL_DELIMITERS["hermes"][:1]
    closes = CALL_DELIMITERS["hermes"][1:]


class Nemotron(Objects):
    """Nemotron Nano 2: a list between two delimiters."""

    bare = frozenset()
    opens = CALL_DELIMITERS["nemotron_json"][:1]
    closes = CALL_DELIMITERS["nemotron_json"][1:]


class Hunyuan(Objects):
    """A list between two delimiters, or calls that each are a name and arguments in a block of code."""

    bare = frozenset()
    opens = HUNYUAN[:2]
    closes = HUNYUAN[2:]

    def call(self, delimiter: str, char: str) -> Script[str]:
        calls, call = self.opens
        char = yield from self.white(char)
        if delimiter == calls and char == call[0]:
            found, char = yield from self.literal(call, char)
            if not found:
                return char
            char = yield from self.white(char)
        if char in ("[", "{"):
            return (yield from super().call(delimiter, char))
        name, char = yield from self.name(char)
        return (yield from self.fenced(name, char))


class Mistral(Objects):
    """A list after a delimiter; in newer models the name and the arguments each follow one."""

    bare = frozenset()
    opens = ("[TOOL_CALLS]",)

    def call(self, delimiter: str, char: str) -> Script[str]:
        char = yield from self.white(char)
        if char in ("[", "{"):
            return (yield from super().call(delimiter, char))
        name, char = yield from self.name(char)
        while char == "[":
            tag, char = yield from self.name((yield))
            if tag not in ("CALL_ID", "ARGS") or char != "]":
                return char
            char = yield
            if tag == "CALL_ID":  # the model's own; the server assigns others
                _, char = yield from self.name(char)
        char = yield from self.white(char)
        return (yield from self.arguments(name, char))
