"""Scanner: reads a text once, character by character, and classifies its parts.

A format is a script, a generator to which every character is sent; scripts are composed of scripts. Each starts with
the character to look at first and returns the first character that it has not used, so that nothing depends on how the
text was split and nothing is read twice. END follows the last character; every script passes it on.

White space next to a call's delimiters is not content, nor are line ends next to a block of reasoning. Text that turns
out not to be a call is content, unchanged, and is not searched for other calls.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import replace
from typing import TypeVar

from .formats import Block
from .parts import Arguments, Call, Content, Part, Reasoning, Schema

T = TypeVar("T")
Script = Generator[None, str, T]

END = ""
WHITE = frozenset(" \t\r\n")
LINE_ENDS = frozenset("\r\n")
NOTHING: frozenset[str] = frozenset()
NAME = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.:/")


class Edged:
    """Trims text: drops characters of `lead` at its beginning, and withholds those of `trail` at its end."""

    def __init__(self, say: Callable[[str], None], lead: frozenset[str], trail: frozenset[str]) -> None:
        self.is_empty = True  # apart from withheld characters
        self._say = say
        self._lead = lead
        self._trail = trail
        self._held: list[str] = []

    def add(self, letters: Iterable[str]) -> None:
        for letter in letters:
            if self.is_empty and not self._held and letter in self._lead:
                continue
            self._held.append(letter)
            if letter not in self._trail:
                self.is_empty = False
                self.flush()

    def flush(self, but: int = 0) -> None:
        """Emit the withheld characters as text, except for the last `but`, which are dropped."""
        held = "".join(self._held[: len(self._held) - but] if but else self._held)
        self._held.clear()
        if held:
            self._say(held)


class Scanner:
    """A MessageParser. A format defines `opens`, `closes`, `bare` and `call`."""

    opens: tuple[str, ...] = ()  # delimiters that begin a call
    closes: tuple[str, ...] = ()  # delimiters that are dropped after a call
    bare: frozenset[str] = NOTHING  # characters that may begin a call at the start of the content

    def __init__(
        self, tools: Mapping[str, Schema], block: Block | None, *, opened: bool, new_id: Callable[[], str]
    ) -> None:
        self.is_reasoning = opened and block is not None
        self.tools = tools
        self._block = block  # None: no reasoning, or it has ended
        self.content = self.after(NOTHING)
        self._new_id = new_id
        self.num_calls = 0
        self._closing: tuple[str, ...] = ()  # delimiters that may still close the last call
        self._record: list[str] | None = None  # content unless it becomes a call
        self._parts: list[Part] = []
        self._script = self.script()
        next(self._script)

    def feed(self, text: str) -> list[Part]:
        for letter in text:
            if self._record is not None:
                self._record.append(letter)
            self._script.send(letter)
        return self._take()

    def finish(self) -> list[Part]:
        try:
            self._script.send(END)
        except StopIteration:
            self.content.flush()
        return self._take()

    def script(self) -> Script[None]:
        """Read the whole text."""
        letter = yield
        if self.is_reasoning:
            letter = yield from self.reasoning(letter)
        while letter != END:
            while letter in WHITE and self.content.is_empty:
                self.content.add(letter)
                letter = yield
            if self.content.is_empty and letter in self.bare:
                letter = yield from self._called("", letter)
            else:
                letter = yield from self._marked(letter)

    def call(self, mark: str, letter: str) -> Script[str]:
        """Read what follows a delimiter that begins a call, or starts with a bare character; emit the calls.

        A format without calls emits none, and what was read stays content.
        """
        return letter
        yield

    def reasoning(self, letter: str) -> Script[str]:
        """Read the inside of a block of reasoning and the delimiter that closes it."""
        assert self._block is not None
        self.is_reasoning = True
        said = Edged(lambda text: self.say(Reasoning, text), LINE_ENDS, LINE_ENDS)
        mark = yield from self.until((self._block.closes,), letter, said)
        if mark == END:
            said.flush()
            return END
        self._block = None
        self.is_reasoning = False
        self.content = self.after(LINE_ENDS)
        return (yield)

    def say(self, kind: type[Content] | type[Reasoning], text: str) -> None:
        """Emit more text."""
        self._parts.append(kind(text))

    def say_call(self, name: str) -> Callable[[str], None]:
        """Begin a call; return a function that emits more of its arguments."""
        index = self.num_calls
        self.num_calls += 1
        self._closing = self.closes
        self._record = None
        self.content = self.after(WHITE)
        self._parts.append(Call(index, self._new_id(), name))
        return lambda text: self._parts.append(Arguments(index, text))

    def after(self, lead: frozenset[str]) -> Edged:
        """Return the next piece of content; what the last one withheld is dropped."""
        return Edged(lambda text: self.say(Content, text), lead, WHITE if self._has_marks else NOTHING)

    @property
    def _has_marks(self) -> bool:
        return bool(self.opens or self.bare or self._block)

    def record(self, text: str, letter: str) -> None:
        """Start to record what may turn out to be content, beginning with `text` and the character."""
        self._record = [*text, *letter]

    def no_call(self, letter: str) -> None:
        """Emit what was recorded as content, except for the character to be read next."""
        record, self._record = self._record or [], None
        self.content.add(record[:-1] if letter != END else record)

    def forget(self) -> None:
        """Discard what was recorded: it was the syntax of a call."""
        self._record = None

    def until(self, marks: tuple[str, ...], letter: str, into: Edged) -> Script[str]:
        """Read text up to the first of these delimiters, and no further; return the delimiter, END if there is none.

        No delimiter may contain another one.
        """
        firsts = frozenset(mark[0] for mark in marks)
        held = ""
        while letter != END:
            if not held and letter not in firsts:
                into.add(letter)
            else:
                held += letter
                while held and not any(mark.startswith(held) for mark in marks):
                    into.add(held[0])
                    held = held[1:]
                if held in marks:
                    return held
            letter = yield
        # An output that was cut off in the middle of a call's closing delimiter has a whole call and nothing else.
        if not (into.is_empty and any(mark.startswith(held) for mark in self._closing)):
            into.add(held)
        return END

    def white(self, letter: str) -> Script[str]:
        """Skip white space, if any."""
        while letter in WHITE:
            letter = yield
        return letter

    def literal(self, text: str, letter: str) -> Script[tuple[bool, str]]:
        """Return whether exactly this text follows. Characters that match its beginning are consumed in any case."""
        for wanted in text:
            if letter != wanted:
                return False, letter
            letter = yield
        return True, letter

    def name(self, letter: str) -> Script[tuple[str, str]]:
        """Return the characters that can belong to the name of a function."""
        letters: list[str] = []
        while letter in NAME:
            letters.append(letter)
            letter = yield
        return "".join(letters), letter

    def string(self, letter: str) -> Script[tuple[str | None, str]]:
        """Return the value of a JSON string, None if it is invalid. The character is its opening quote."""
        letters: list[str] = []
        letter = yield from self.value(letter, letters.append)
        try:
            text = json.loads("".join(letters), strict=False)
        except ValueError:
            return None, letter
        return text if isinstance(text, str) else None, letter

    def value(self, letter: str, say: Callable[[str], None]) -> Script[str]:
        """Emit a JSON value verbatim, up to its closing quote or bracket or to a character that cannot belong to it."""
        depth, quoted, escaped = 0, False, False
        while letter != END:
            if quoted:
                quoted = escaped or letter != '"'
                escaped = letter == "\\" and not escaped
            elif letter == '"':
                quoted = True
            elif letter in "{[":
                depth += 1
            elif letter in "}]":
                depth -= 1
            elif not depth and (letter == "," or letter in WHITE):
                return letter
            if depth < 0:
                return letter
            say(letter)
            is_whole = not depth and not quoted and letter in '"}]'
            letter = yield
            if is_whole:
                break
        return letter

    def arguments(self, name: str, letter: str) -> Script[str]:
        """Read a call's arguments, if they are an object and the function may be called."""
        if letter == "{" and name in self.tools:
            letter = yield from self.value(letter, self.say_call(name))
        return letter

    def _marked(self, letter: str) -> Script[str]:
        """Read text up to the next delimiter, and what that delimiter begins."""
        block = (self._block.opens,) if self._block and self.content.is_empty and not self.num_calls else ()
        mark = yield from self.until((*self.opens, *self._closing, *block), letter, self.content)
        if mark == END:
            return END
        if mark in block and self.content.is_empty:
            self.is_reasoning = True
            return (yield from self.reasoning((yield)))
        if mark in block:  # after other content, it is text
            self.content.add(mark)
        elif mark in self.opens:
            return (yield from self._called(mark, (yield)))
        else:
            self._closing = tuple(each for each in self._closing if each != mark)
            self.content = self.after(WHITE)
        return (yield)

    def _called(self, mark: str, letter: str) -> Script[str]:
        """Read a call, or what looks like one."""
        self.record(mark, letter)
        letter = yield from self.call(mark, letter)
        if self._record is not None:
            self.no_call(letter)
        return letter

    def _take(self) -> list[Part]:
        """Return the parts emitted since the last time, with adjacent parts of one kind merged."""
        said, self._parts = self._parts, []
        parts: list[Part] = []
        run: list[str] = []
        for i, part in enumerate(said):
            if isinstance(part, Call):
                parts.append(part)
                continue
            run.append(part.text)
            if i + 1 == len(said) or type(said[i + 1]) is not type(part):  # between two calls' arguments is a Call
                parts.append(replace(part, text="".join(run)))
                run.clear()
        return parts
