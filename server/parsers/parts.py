"""Parts: the events that a MessageParser returns, and the message that they add up to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

from msgspec import Struct

Schema = dict[str, Any]  # JSON Schema of the arguments that a function takes


class Content(Struct, frozen=True):
    """More text of the content."""

    text: str


class Reasoning(Struct, frozen=True):
    """More text of the reasoning."""

    text: str


class Call(Struct, frozen=True):
    """The beginning of a function call, number `index` of the completion, counted from 0."""

    index: int
    id: str
    name: str


class Arguments(Struct, frozen=True):
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


Part = Content | Reasoning | Call | Arguments


class MessageParser(Protocol):
    """Parses the text of one choice in linear time."""

    def feed(self, text: str) -> list[Part]:
        """Return the parts that this piece of text makes certain, in the order of the text."""

    def finish(self, *, cut_before: str | None = None) -> list[Part]:
        """Return the parts that were withheld; an incomplete part is returned as far as it was written.

        `cut_before`: the text was cut off before this stop string, "" if what would follow is unknown. The beginning of
        a delimiter or of a call is then dropped. None: the model ended the text.
        """

    @property
    def is_reasoning(self) -> bool:
        """Whether the next text is, as far as is known, reasoning: its tokens are counted as such."""

    @property
    def is_calling(self) -> bool:
        """Whether the next text is, as far as is known, part of a call or comes after one."""


class Plain:
    """The parser of models without delimiters: all text is content."""

    is_reasoning = is_calling = False

    def feed(self, text: str) -> list[Part]:
        return [Content(text)] if text else []

    def finish(self, *, cut_before: str | None = None) -> list[Part]:
        return []


class CalledTool(NamedTuple):
    """One complete call."""

    id: str
    name: str
    arguments: str  # JSON text


class Message(NamedTuple):
    """All parts of one choice, merged."""

    content: str
    reasoning: str
    calls: tuple[CalledTool, ...]


def join(parts: Iterable[Part]) -> Message:
    """Return the message that the parts add up to."""
    content: list[str] = []
    reasoning: list[str] = []
    calls: dict[int, Call] = {}
    arguments: dict[int, list[str]] = {}
    for part in parts:
        if isinstance(part, Content):
            content.append(part.text)
        elif isinstance(part, Reasoning):
            reasoning.append(part.text)
        elif isinstance(part, Call):
            calls[part.index] = part
            arguments[part.index] = []
        else:
            arguments[part.index].append(part.text)
    called = tuple(CalledTool(call.id, call.name, "".join(arguments[index])) for index, call in calls.items())
    return Message("".join(content), "".join(reasoning), called)
