"""Pieces: a long text is cut where no token crosses, so that encoding it can be stopped, and takes little memory.

A tokenizer encodes 8 MB in one go in several seconds and a gigabyte. Where the cuts are right the tokens of the pieces,
put together, are the tokens of the whole text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

PIECE = 1 << 15  # characters after which a cut is looked for; they are encoded in some ten milliseconds
LEFT = (
    "the", "The", "x", "I", "don't", "(see", "A1b", "1st", "z\n\nthe", "  if", "é", "e\u0301a", "日本a", "HTTPServer",
    "end.", "x);", "a,", "7", "日", "'", "don't  go", "a\tb",
)  # fmt: skip
RIGHT = ("sea", "a", "I'm", "The", "x1", "zebra.", "s", "t", "re", "C3PO", "ll go", "e\u0301", "lowercase WORDS")


class Kind(NamedTuple):
    """A place between two characters that texts may be cut at."""

    before: str  # character classes of regular expressions
    after: str
    space: str  # what stands between the two, and at the beginning of the second piece


# A word's end before a space and another word; a line's end before a word; a letter and a digit, as in hexadecimal.
# Of several blanks tokenizers may take the last one by itself, so that a line's end must not come after another one.
KINDS = (Kind("[A-Za-z]", "[A-Za-z]", " "), Kind(r"\S\n", "[A-Za-z]", ""), Kind("[a-z]", "[0-9]", ""))
# The last character before a cut and the first one after it, as vocabularies write them within a token.
SPELT = {" ": "[ \u2581\u0120]", r"\S\n": "[\\n\u010a]"}
BYTE = re.compile(r"<0x[0-9A-F]{2}>")


class Cuts:
    """Where texts may be cut for one tokenizer: found out by trying, and by looking for tokens that would cross."""

    def __init__(self, encode: Callable[[str], list[int]], vocabulary: Iterable[str]) -> None:
        """`encode`: without special tokens. `vocabulary`: all tokens as they are spelt, added ones too."""
        tokens = [token for token in vocabulary if not BYTE.fullmatch(token)]
        self._drops_space = False  # some tokenizers put a space before every text, and so before every piece
        patterns = []
        for kind in KINDS:
            if _is_crossed(kind, tokens):
                continue
            if _holds(encode, kind, kind.space):
                patterns.append(f"(?<={kind.before})(?={kind.space}{kind.after})")
            elif kind.space and _holds(encode, kind, ""):
                self._drops_space = True
                patterns = [f"(?<={kind.before})(?={kind.space}{kind.after})"]
                break  # after any other cut the space would be one too many
        self._cut = re.compile("|".join(patterns)) if patterns else None

    def pieces(self, text: str) -> Iterator[str]:
        """The text in pieces of about PIECE characters, longer ones where it cannot be cut."""
        start = 0
        while self._cut is not None and (found := self._cut.search(text, start + PIECE)):
            yield text[start : found.start()]
            start = found.start() + self._drops_space
        yield text[start:]


def _is_crossed(kind: Kind, tokens: list[str]) -> bool:
    """Whether there is a token that a cut of this kind would tear apart."""
    before = SPELT.get(kind.before, kind.before)
    after = SPELT[kind.space] if kind.space else kind.after
    crossing = re.compile(before + after)
    return any(crossing.search(token) for token in tokens)


def _holds(encode: Callable[[str], list[int]], kind: Kind, begins: str) -> bool:
    """Whether pieces that were cut so have the tokens of the whole; the second one begins with `begins`."""
    between = re.compile(kind.after)
    rights = [right if between.match(right) else f"7{right}" for right in RIGHT]
    end = "\n" if kind.before == r"\S\n" else ""
    lefts = [left for each in LEFT if re.search(kind.before + r"\Z", left := each + end)]
    return bool(lefts) and all(
        encode(left + kind.space + right) == encode(left) + encode(begins + right)
        for left in lefts
        for right in rights
        if between.match(right)
    )
