"""Parts: what a MessageParser says, and what they make when they are put together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

Schema = dict[str, Any]  # JSON Schema of the arguments that a function takes


@dataclass(frozen=True, slots=True)
class Content:
    """More text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More text of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """The model begins to call a function: the answer's call number `index`, counted from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


Part = Content | Reasoning | Call | Arguments


class MessageParser(Protocol):
    """Reads one choice's text, in time linear in it."""

    def feed(self, text: str) -> list[Part]:
        """The parts that this piece of text makes certain, in the order of the text."""

    def finish(self) -> list[Part]:
        """The parts that were held back; what was begun and never ended is told as far as it came."""

    @property
    def is_reasoning(self) -> bool:
        """Whether what comes next is, as far as is known, reasoning: its tokens are counted as such."""


class Plain:
    """The parser of models without markers: all text is the answer."""

    is_reasoning = False

    def feed(self, text: str) -> list[Part]:
        return [Content(text)] if text else []

    def finish(self) -> list[Part]:
        return []


class CalledTool(NamedTuple):
    """One whole call."""

    id: str
    name: str
    arguments: str  # JSON text


class Message(NamedTuple):
    """All parts of one choice, put together."""

    content: str
    reasoning: str
    calls: tuple[CalledTool, ...]


def join(parts: Iterable[Part]) -> Message:
    """The message that the parts make."""
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
