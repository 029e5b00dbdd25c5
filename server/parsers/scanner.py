"""Scanner: reads a text once, character by character, and classifies its parts.

A format is a script, a generator to which every character is sent; scripts are composed of scripts. Each starts with
the character to look at first and returns the first character that it has not used, so that nothing depends on how the
text was split and nothing is read twice. END follows the last character; every script passes it on.

White space next to a call's delimiters is not content, nor are line ends next to a block of reasoning. Text that turns
out not to be a call is content, unchanged, and is not searched for other calls. Text inside a block of reasoning never
is content, even after a call.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterable, Mapping
from itertools import zip_longest
from typing import TypeVar

from msgspec.structs import replace

from .formats import NO_ANSWER, Answer, Block
from .parts import Arguments, Call, Content, Part, Reasoning, Schema

T = TypeVar("T")
Script = Generator[None, str, T]

END = ""
WHITE = frozenset(" \t\r\n")
LINE_ENDS = frozenset("\r\n")
NOTHING: frozenset[str] = frozenset()
FENCE = "```"
NAME = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.:/")


class Trimmer:
    """Trims text: drops characters of `lead` at its beginning, and withholds those of `trail` at its end."""

    def __init__(self, emit: Callable[[str], None], lead: frozenset[str], trail: frozenset[str]) -> None:
        self.is_empty = True  # apart from withheld characters
        self._emit = emit
        self._lead = lead
        self._trail = trail
        self._withheld: list[str] = []

    @property
    def is_at_line_start(self) -> bool:
        """Whether the next character begins a line; line ends must be among those of `trail`."""
        return self.is_empty or self._withheld[-1:] in (["\n"], ["\r"])

    def add(self, chars: Iterable[str]) -> None:
        for char in chars:
            if self.is_empty and not self._withheld and char in self._lead:
                continue
            self._withheld.append(char)
            if char not in self._trail:
                self.is_empty = False
                self.flush()

    def flush(self, but: int = 0) -> None:
        """Emit the withheld characters as text, except for the last `but`, which are dropped."""
        withheld = "".join(self._withheld[: len(self._withheld) - but])
        self._withheld.clear()
        if withheld:
            self._emit(withheld)


class Scanner:
    """A MessageParser. A format defines `opens`, `closes`, `bare` and `call`."""

    opens: tuple[str, ...] = ()  # delimiters that begin a call
    closes: tuple[str, ...] = ()  # delimiters that are dropped after a call
    bare: frozenset[str] = NOTHING  # characters that may begin a call at the start of the content
    unclosed: tuple[str, ...] = ()  # delimiters that begin a call at the start of a line of the reasoning, too
    within_lines = False  # whether calls in the reasoning may begin anywhere

    def __init__(
        self,
        tools: Mapping[str, Schema],
        block: Block | None,
        *,
        opened: bool,
        new_id: Callable[[], str],
        closes_reasoning: bool = False,
        answer: Answer = NO_ANSWER,
    ) -> None:
        self.is_reasoning = opened and block is not None
        if closes_reasoning:
            self.unclosed = ()
        self.tools = tools
        self._block = block  # None: no reasoning, or it has ended
        self._answer = answer
        self._closing: tuple[str, ...] = answer.closes  # delimiters that may still close the content or the last call
        self.content = self.next_content(NOTHING)
        self._new_id = new_id
        self.num_calls = 0
        self._record: list[str] | None = None  # content unless it becomes a call
        self._cut_before: str | None = None  # as in `finish`
        self._parts: list[Part] = []
        self._script = self.script()
        next(self._script)

    @property
    def is_calling(self) -> bool:
        return self.num_calls > 0 or self._record is not None

    def feed(self, text: str) -> list[Part]:
        for char in text:
            if self._record is not None:
                self._record.append(char)
            self._script.send(char)
        return self._take()

    def finish(self, *, cut_before: str | None = None) -> list[Part]:
        self._cut_before = cut_before
        try:
            self._script.send(END)
        except StopIteration:
            if not (self.content.is_empty and self.num_calls):  # only white space after a call
                self.content.flush()
        return self._take()

    def script(self) -> Script[None]:
        """Read the whole text."""
        char = yield
        if self.is_reasoning:
            char = yield from self.reasoning(char)
        begun = ""  # a delimiter, as far as it has been read
        while char != END:
            while not begun and char in WHITE and self.content.is_empty:
                self.content.add(char)
                char = yield
            if not begun and self.content.is_empty and char in self.bare:
                char, begun = yield from self._call_or_text("", char)
            else:
                char, begun = yield from self._text(char, begun)

    def call(self, delimiter: str, char: str) -> Script[str]:
        """Read what follows a delimiter that begins a call, or starts with a bare character; emit the calls.

        A format without calls emits none, and what was read stays content.
        """
        return char
        yield

    def reasoning(self, char: str) -> Script[str]:
        """Read the inside of a block of reasoning and the delimiter that closes it."""
        assert self._block is not None
        closes = self._block.closes
        self.content = Trimmer(lambda text: self.emit(Reasoning, text), LINE_ENDS, LINE_ENDS)
        withheld = ""
        while True:
            opens = self.opens if self.num_calls else self.unclosed  # the next call is less likely only mentioned
            delimiters = (closes, *opens, *(self._closing if self.num_calls else ()))
            delimiter = yield from self.until(delimiters, char, self.content, withheld)
            withheld = ""
            if delimiter in (END, closes):
                break
            char = yield
            if delimiter in self._closing:
                self._close(delimiter)
                self.content = self._more_reasoning()
            elif self.content.is_at_line_start or self.within_lines:
                char, withheld = yield from self._call_or_reasoning(delimiter, char, delimiters)
            else:  # only mentioned
                self.content.add(delimiter)
        if delimiter == END:
            return END
        self._block = None
        self.is_reasoning = False
        self.content = self.next_content(LINE_ENDS)
        return (yield)

    def _call_or_reasoning(self, delimiter: str, char: str, delimiters: tuple[str, ...]) -> Script[tuple[str, str]]:
        """Read a call, or what looks like one.

        Return the next character and, if a delimiter may have begun before it, that beginning.
        """
        num_calls = self.num_calls
        self.record(delimiter, char)
        char = yield from self.call(delimiter, char)
        if self.num_calls > num_calls:
            self.is_reasoning = True
            self.content = self._more_reasoning()
        withheld = "" if char == END else self._begun(delimiters)
        self.no_call(char, but=len(withheld))
        return char, withheld

    def _more_reasoning(self) -> Trimmer:
        """Return the piece of reasoning after a call. The white space before it separates it from the piece before."""
        return Trimmer(lambda text: self.emit(Reasoning, text), NOTHING, WHITE)

    def _begun(self, delimiters: tuple[str, ...]) -> str:
        """Return the beginning of a delimiter with which the record ends, before the character to be read next."""
        record = "".join((self._record or [])[:-1])
        longest = max(map(len, delimiters), default=1) - 1
        ends = (record[i:] for i in range(max(0, len(record) - longest), len(record)))
        return next((end for end in ends if any(each.startswith(end) and each != end for each in delimiters)), "")

    def emit(self, kind: type[Content] | type[Reasoning], text: str) -> None:
        self._parts.append(kind(text))

    def begin_call(self, name: str) -> Callable[[str], None]:
        """Begin a call; return a function that emits more of its arguments."""
        index = self.num_calls
        self.num_calls += 1
        self.is_reasoning = False
        self._closing = (*self.closes, *self._answer.closes)
        self._record = None
        self.content = self.next_content(WHITE)
        self._parts.append(Call(index, self._new_id(), name))
        return lambda text: self._parts.append(Arguments(index, text))

    def next_content(self, lead: frozenset[str]) -> Trimmer:
        """Return the next piece of content; what the last one withheld is dropped."""
        trail = WHITE if self.opens or self.bare or self._block or self._closing else NOTHING
        return Trimmer(lambda text: self.emit(Content, text), lead, trail)

    def record(self, text: str, char: str) -> None:
        """Start to record what may turn out to be content, beginning with `text` and the character."""
        self._record = [*text, *char]

    def no_call(self, char: str, but: int = 0) -> None:
        """Emit what is still recorded as content, except for the last `but` characters and the one to be read next."""
        record, self._record = self._record or [], None
        is_cut = char == END and self._cut_before is not None
        if is_cut and (self.num_calls or self.may_be_call(f"{''.join(record)}{self._cut_before}")):
            return
        self.content.add(record[: len(record) - len(char) - but])

    def may_be_call(self, text: str) -> bool:
        """Return whether recorded text, with what follows the cut, is the beginning of a call. A delimiter is one."""
        return bool(text)

    def forget(self) -> None:
        """Discard what was recorded: it was the syntax of a call."""
        self._record = None

    def until(self, delimiters: tuple[str, ...], char: str, into: Trimmer, withheld: str = "") -> Script[str]:
        """Read text up to the first of these delimiters, and no further; return the delimiter, END if there is none.

        No delimiter may contain another one. `withheld`: text before the character that may begin a delimiter.
        """
        firsts = frozenset(delimiter[0] for delimiter in delimiters)
        while char != END:
            if not withheld and char not in firsts:
                into.add(char)
            else:
                withheld += char
                while withheld and not any(delimiter.startswith(withheld) for delimiter in delimiters):
                    into.add(withheld[0])
                    withheld = withheld[1:]
                if withheld in delimiters:
                    return withheld
            char = yield
        if self._cut_before is not None:
            while withheld and not self._is_cut_in(delimiters, withheld + self._cut_before):
                into.add(withheld[0])
                withheld = withheld[1:]
            return END
        # An output that ends in the middle of a call's closing delimiter has a whole call and nothing else.
        is_whole = self.num_calls > 0 and into.is_empty
        if not (is_whole and any(delimiter.startswith(withheld) for delimiter in self._closing)):
            into.add(withheld)
        return END

    @staticmethod
    def _is_cut_in(delimiters: tuple[str, ...], text: str) -> bool:
        """Return whether a text that begins before the cut and continues after it is or may become a delimiter."""
        return any(delimiter.startswith(text) or text.startswith(delimiter) for delimiter in delimiters)

    def white(self, char: str) -> Script[str]:
        """Skip white space, if any."""
        while char in WHITE:
            char = yield
        return char

    def literal(self, text: str, char: str) -> Script[tuple[bool, str]]:
        """Return whether exactly this text follows. Characters that match its beginning are consumed in any case."""
        for wanted in text:
            if char != wanted:
                return False, char
            char = yield
        return True, char

    def name(self, char: str) -> Script[tuple[str, str]]:
        """Return the characters that can belong to the name of a function."""
        chars: list[str] = []
        while char in NAME:
            chars.append(char)
            char = yield
        return "".join(chars), char

    def string(self, char: str) -> Script[tuple[str | None, str]]:
        """Return the value of a JSON string, None if it is invalid. The character is its opening quote."""
        chars: list[str] = []
        char = yield from self.value(char, chars.append)
        try:
            text = json.loads("".join(chars), strict=False)
        except ValueError:
            return None, char
        return text if isinstance(text, str) else None, char

    def value(self, char: str, emit: Callable[[str], None]) -> Script[str]:
        """Emit a JSON value verbatim, up to its closing quote or bracket or to a character that cannot belong to it."""
        depth, quoted, escaped = 0, False, False
        while char != END:
            if quoted:
                quoted = escaped or char != '"'
                escaped = char == "\\" and not escaped
            elif char == '"':
                quoted = True
            elif char in "{[":
                depth += 1
            elif char in "}]":
                depth -= 1
            elif not depth and (char == "," or char in WHITE):
                return char
            if depth < 0:
                return char
            emit(char)
            is_whole = not depth and not quoted and char in '"}]'
            char = yield
            if is_whole:
                break
        return char

    def arguments(self, name: str, char: str) -> Script[str]:
        """Read a call's arguments, if they are an object and the function may be called."""
        if char == "{" and name in self.tools:
            char = yield from self.value(char, self.begin_call(name))
        return char

    def fenced(self, name: str, char: str) -> Script[str]:
        """Read a call's arguments in a block of code."""
        char = yield from self.white(char)
        found, char = yield from self.literal(f"{FENCE}json", char)
        char = yield from self.white(char)
        before = self.num_calls
        char = yield from self.arguments(name, char)
        if found and self.num_calls > before:
            self.record("", char)
            char = yield from self.white(char)
            found, char = yield from self.literal(FENCE, char)
            if found:
                self.record("", char)
        return char

    def _text(self, char: str, begun: str) -> Script[tuple[str, str]]:
        """Read text up to the next delimiter, and the call, reasoning or answer that this delimiter begins.

        `begun`: text before the character that may begin a delimiter; returned as in `_call_or_text`.
        """
        is_start = self.content.is_empty and not self.num_calls
        first = (*((self._block.opens,) if self._block else ()), *self._answer.opens) if is_start else ()
        delimiter = yield from self.until((*self.opens, *self._closing, *first), char, self.content, begun)
        if delimiter == END:
            return END, ""
        if delimiter in self._answer.opens and self.content.is_empty:
            self._block = None
            self.content = self.next_content(LINE_ENDS)
        elif delimiter in first and self.content.is_empty:
            self.is_reasoning = True
            return (yield from self.reasoning((yield))), ""
        elif delimiter in first:  # after other content, it is text
            self.content.add(delimiter)
        elif delimiter in self.opens:
            self._record = []  # the next text is that of a call
            return (yield from self._call_or_text(delimiter, (yield)))
        elif delimiter in self._answer.closes and not self.num_calls:
            self._record = [*delimiter]
            char = yield from self.white((yield))
            if char == END:
                self.forget()
                self.content = self.next_content(WHITE)
            else:
                self.no_call(char)  # the model writes about the delimiter
            return char, ""
        else:
            self._close(delimiter)
            self.content = self.next_content(WHITE)
        return (yield), ""

    def _close(self, delimiter: str) -> None:
        self._closing = tuple(each for each in self._closing if each != delimiter)

    def _call_or_text(self, delimiter: str, char: str) -> Script[tuple[str, str]]:
        """Read a call, or what looks like one.

        Return the next character and, if a delimiter after the call may have begun before it, that beginning.
        """
        num_calls, begun = self.num_calls, ""
        self.record(delimiter, char)
        char = yield from self.call(delimiter, char)
        if self.num_calls > num_calls and char != END:
            begun = self._begun((*self.opens, *self._closing))
        self.no_call(char, but=len(begun))
        return char, begun

    def _take(self) -> list[Part]:
        """Return the parts emitted since the last time, with adjacent parts of one kind merged."""
        emitted, self._parts = self._parts, []
        parts: list[Part] = []
        run: list[str] = []
        for part, following in zip_longest(emitted, emitted[1:]):
            if isinstance(part, Call):
                parts.append(part)
                continue
            run.append(part.text)
            if type(part) is not type(following):  # a Call separates the arguments of two calls
                parts.append(replace(part, text="".join(run)))
                run.clear()
        return parts
