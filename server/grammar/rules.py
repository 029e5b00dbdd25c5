"""Lark: builds a grammar of whole completions, rule by rule."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from ..parsers.formats import BLOCKS, FIRST_TOKENS, Formats, answer
from ..parsers.parts import Schema
from .schemas import MAX_WRITTEN

# As the engine writes JSON: without free white space, which a model could repeat forever.
OPTIONS = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "coerce_one_of": False,
    "lenient": False,
}
LITERALS = {"/": "\\/", "\n": "\\n", "\\\n": "\\n"}  # what cannot be part of an expression in Lark


class TooLong(Exception):
    """A grammar would have more than MAX_WRITTEN characters."""


class Lark:
    """Builds a grammar; each rule is added when it is first used."""

    def __init__(
        self,
        special: Mapping[str, int],
        formats: Formats,
        opened: bool,
        content: tuple[str, str] | None,
        budget: int | None,
    ) -> None:
        self.rules: dict[str, str] = {}
        self._size = 0  # characters of the numbered rules: all others are few and short
        self.formats = formats
        self.opened = opened
        self.has_content = content is not None
        self._content = content
        self._budget = budget
        self._special = special
        self._values: dict[str, str] = {}  # names of rules, by the schema that they follow

    @property
    def text(self) -> str:
        return "".join(f"{name}: {body}\n" for name, body in self.rules.items())

    def delimiter(self, text: str) -> str:
        """Return a delimiter: its token, or its text if it has none."""
        if text in self._special:
            return f"<[{self._special[text]}]>"
        first = FIRST_TOKENS.get(text, text)
        return f"<[{self._special[first]}]> {quoted(text[len(first) :])}" if first in self._special else quoted(text)

    def any_text(self) -> str:
        """Return a rule for any text, without the tokens that are delimiters."""
        self.rules["TEXT"] = "/(?s:.*)/"
        return "TEXT"

    def until(self, delimiter: str, text: str | None = None) -> str:
        """Return a rule for text up to and including the first such delimiter. `text`: a terminal; None: any text."""
        text = text or self.any_text()
        if delimiter in self._special:
            return f"{text}? {self.delimiter(delimiter)}"
        return self._add("until", f"{text} {quoted(delimiter)}", "[lazy]")

    def thought(self, closes: str) -> str:
        """Return a rule for reasoning within the budget, and the delimiter that ends it."""
        if self._budget is None:
            return self.until(closes)
        if self._budget == 0:
            return self.delimiter(closes)
        self.rules[f"thought[max_tokens={self._budget}]"] = self.any_text()
        return f"thought {self.delimiter(closes)}"

    def reasoning(self) -> str:
        """Return a rule for the reasoning that may precede the content or the calls, and the beginning of these."""
        if self.formats.reasoning is None:
            return ""
        self.rules["GAP"] = "/\\n{1,2}/"
        begin = "".join(f"({self.delimiter(text)} GAP?)?" for text in answer(self.formats).opens[:1])
        if self._budget == 0 and not self.opened:
            return begin
        opens, closes = BLOCKS[self.formats.reasoning]
        inner = f"{self.thought(closes)} GAP?"
        return f"{inner if self.opened else f'({self.lead()} {self.delimiter(opens)} {inner})?'} {begin}"

    def ending(self) -> str:
        """Return a rule for what may follow the content or the calls."""
        return "".join(f" (GAP? {self.delimiter(text)})?" for text in answer(self.formats).closes)

    def lead(self) -> str:
        """Return a rule for the line end before the reasoning or the calls, which GLM writes and others have in the
        prompt."""
        if self.formats.tools != "glm45" or self.opened:
            return ""
        self.rules["LEAD"] = "/\\n/"
        return "LEAD?"

    def content(self) -> str:
        """Return a rule for a completion without calls."""
        if self._content is None:
            return f"{self.any_text()}?"
        kind, text = self._content
        if kind == "json_schema":
            return self.schema(json.loads(text))
        self.rules["CONTENT"] = " | ".join(map(quoted, json.loads(text))) if kind == "choice" else expression(text)
        return "CONTENT"

    def schema(self, schema: Schema) -> str:
        """Return a rule for a value that follows a schema."""
        written = json.dumps({"x-guidance": OPTIONS, **schema}, ensure_ascii=False)
        # Functions often have the same arguments.
        if written not in self._values:
            self._values[written] = self._add("value", f"%json {written}")
        return self._values[written]

    def one_of(self, bodies: list[str]) -> str:
        return self._add("call", " | ".join(bodies))

    def _add(self, prefix: str, body: str, options: str = "") -> str:
        """Add a rule, and return its name. Raises TooLong."""
        name = f"{prefix}{len(self.rules)}"
        self._size += len(name) + len(body)
        if self._size > MAX_WRITTEN:
            raise TooLong
        self.rules[f"{name}{options}"] = body
        return name


def expression(pattern: str) -> str:
    """Return a rule for the texts that match a regular expression."""
    written = re.sub(r"(?s)\\.|/|\n", lambda found: LITERALS.get(found[0], found[0]), pattern)
    return f"/{written or '(?:)'}/"  # two slashes would begin a comment


def quoted(text: str) -> str:
    """Return a rule for exactly this text."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")  # the only other character that Lark refuses
