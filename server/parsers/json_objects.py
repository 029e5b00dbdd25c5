"""Calls written as JSON objects: {"name": ..., "arguments": {...}}, or with "parameters" instead of "arguments"."""

from __future__ import annotations

import json

from .formats import MARKS
from .scanner import END, Scanner, Script

ARGUMENTS = ("arguments", "parameters")


class Objects(Scanner):
    """Objects at the beginning of the completion, alone or in a list."""

    bare = frozenset("{[")
    separator = ""  # between objects that are not in a list

    def call(self, mark: str, letter: str) -> Script[str]:
        letter = yield from self.white(letter)
        if letter == "[":
            return (yield from self.listed((yield)))
        _, letter = yield from self.objects(letter, self.separator)
        return letter

    def listed(self, letter: str) -> Script[str]:
        """Read a list of calls, after its opening bracket."""
        letter = yield from self.white(letter)
        is_good, letter = yield from self.objects(letter, ",")
        if is_good and letter == "]":
            self.forget()
            letter = yield
        return letter

    def objects(self, letter: str, separator: str) -> Script[tuple[bool, str]]:
        """Read consecutive objects; return whether all were calls. Other text, and what follows it, stays recorded."""
        is_good = False
        while letter == "{":
            before = self.num_calls
            letter = yield from self.object(letter)
            is_good = self.num_calls > before
            if not is_good:
                break
            self.record("", letter)
            letter = yield from self.white(letter)
            if letter == separator != END:
                letter = yield
                letter = yield from self.white(letter)
        return is_good, letter

    def object(self, letter: str) -> Script[str]:
        """Read one object; emit its call as soon as the name is known."""
        name: str | None = None
        waiting: str | None = None  # arguments that precede the name
        is_said = False
        while True:
            key, letter = yield from self._key((yield))
            if key is None:
                return letter
            if key == "name" and name is None:
                text, letter = yield from self.string(letter)
                if text is None or text not in self.tools:
                    return letter
                name = text
                if waiting is not None:
                    is_said = True
                    self.say_call(name)(waiting)
            elif key in ARGUMENTS and letter == "{" and name is not None and not is_said:
                is_said = True
                letter = yield from self.value(letter, self.say_call(name))
            else:
                letters: list[str] = []
                letter = yield from self.value(letter, letters.append)
                if key in ARGUMENTS and not is_said:
                    waiting = object_text("".join(letters))
                    if waiting is None:
                        return letter
                    if name is not None:
                        is_said = True
                        self.say_call(name)(waiting)
            letter = yield from self.white(letter)
            if letter == "}":
                if name is not None and not is_said:
                    self.say_call(name)("{}")
                return (yield)
            if letter != ",":
                return letter

    def _key(self, letter: str) -> Script[tuple[str | None, str]]:
        """Read a key and its colon; return the key (None if there is none) and the first character of the value."""
        letter = yield from self.white(letter)
        if letter != '"':
            return None, letter
        key, letter = yield from self.string(letter)
        letter = yield from self.white(letter)
        if letter != ":":
            return None, letter
        letter = yield from self.white((yield))
        return key, letter


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

    opens = MARKS["llama3_json"]
    separator = ";"


class Hermes(Objects):
    """Each object between two delimiters, as Qwen writes them too."""

    bare = frozenset()
    opens = MARKS["hermes"][:1]
    closes = MARKS["hermes"][1:]


class Mistral(Objects):
    """A list after a delimiter; in newer models the name and the arguments each follow one."""

    bare = frozenset()
    opens = ("[TOOL_CALLS]",)

    def call(self, mark: str, letter: str) -> Script[str]:
        letter = yield from self.white(letter)
        if letter in ("[", "{"):
            return (yield from super().call(mark, letter))
        name, letter = yield from self.name(letter)
        while letter == "[":
            tag, letter = yield from self.name((yield))
            if tag not in ("CALL_ID", "ARGS") or letter != "]":
                return letter
            letter = yield
            if tag == "CALL_ID":  # the model's own; the server assigns others
                _, letter = yield from self.name(letter)
        letter = yield from self.white(letter)
        return (yield from self.arguments(name, letter))
