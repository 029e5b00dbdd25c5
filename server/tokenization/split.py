"""Splits long texts at token boundaries, so that encoding them can be cancelled and needs little memory.

A tokenizer needs several seconds and a gigabyte for 8 MB in one call. The tokens of the pieces are those of the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

PIECE = 1 << 15  # characters, which are encoded in about ten milliseconds; the next boundary is searched after them
LOOKAHEAD = 2  # characters after a boundary that its pattern reads
# A longer piece, which has no boundaries, is first counted in slices.
MAX_UNCOUNTED, SLICE = 1 << 18, 1 << 16  # characters
# Tokens that a cut between two slices may add. Most change a word or two; for WordPiece one of more than 100 characters
# is a single unknown token, and its parts may be a token per character.
MAX_ADDED = 256
LEFT = (
    "the", "The", "x", "I", "don't", "(see", "A1b", "1st", "z\n\nthe", "  if", "é", "e\u0301a", "日本a", "HTTPServer",
    "end.", "x);", "a,", "7", "日", "'", "don't  go", "a\tb",
)  # fmt: skip
RIGHT = ("sea", "a", "I'm", "The", "x1", "zebra.", "s", "t", "re", "C3PO", "ll go", "e\u0301", "lowercase WORDS")


class Boundary(NamedTuple):
    """A kind of position between two characters at which texts may be split."""

    before: str  # character classes of regular expressions
    after: str
    space: str  # between the two, at the beginning of the second piece


# A word before a space and another word; a line end before a word; a letter before a digit, as in hexadecimal. Of
# several blanks tokenizers may split off the last one, so a line end must not follow another blank.
BOUNDARIES = (
    Boundary("[A-Za-z]", "[A-Za-z]", " "), Boundary(r"\S\n", "[A-Za-z]", ""), Boundary("[a-z]", "[0-9]", "")
)  # fmt: skip
# The characters at a boundary, as vocabularies write them within a token.
IN_TOKEN = {" ": "[ \u2581\u0120]", r"\S\n": "[\\n\u010a]"}
BYTE = re.compile(r"<0x[0-9A-F]{2}>")


class TextSplitter:
    """Splits texts at the boundaries that no token crosses and at which samples keep their tokens."""

    def __init__(self, encode: Callable[[str], list[int]], vocabulary: Iterable[str]) -> None:
        """`encode`: without special tokens. `vocabulary`: all tokens, including added ones."""
        tokens = [token for token in vocabulary if not BYTE.fullmatch(token)]
        self._drops_space = False  # some tokenizers prepend a space to every text, and so to every piece
        patterns = []
        for kind in BOUNDARIES:
            if _is_crossed(kind, tokens):
                continue
            if _holds(encode, kind, kind.space):
                patterns.append(f"(?<={kind.before})(?={kind.space}{kind.after})")
            elif kind.space and _holds(encode, kind, ""):
                self._drops_space = True
                patterns = [f"(?<={kind.before})(?={kind.space}{kind.after})"]
                break  # at any other boundary there would be a space too many
        self._cut = re.compile("|".join(patterns)) if patterns else None

    def pieces(self, text: str) -> Iterator[str]:
        """Yield pieces of about PIECE characters, or more where the text cannot be split."""
        start = 0
        while (boundary := self._boundary(text, start + PIECE)) is not None:
            yield text[start:boundary]
            start = boundary + self._drops_space
        yield text[start:]

    def _boundary(self, text: str, start: int) -> int | None:
        """Return the first boundary at or after `start`; None if there is none."""
        if self._cut is None:
            return None
        # In windows, because a search holds the GIL: one of 8 MB would stop the event loop for half a second.
        for window in range(start, len(text), PIECE):
            if match := self._cut.search(text, window, window + PIECE + LOOKAHEAD):
                return match.start()
        return None


def minima(encode: Callable[[str], list[int]], piece: str) -> Iterator[int]:
    """Yield lower bounds of a long piece's number of tokens, which is counted in slices; nothing for a short piece.

    To encode a long piece takes seconds in one call that cannot be interrupted, so it must be known to fit.
    """
    least = 0
    for start in range(0, len(piece) if len(piece) > MAX_UNCOUNTED else 0, SLICE):
        least += len(encode(piece[start : start + SLICE])) - MAX_ADDED
        yield least


def _is_crossed(kind: Boundary, tokens: list[str]) -> bool:
    """Whether any token contains this boundary."""
    before = IN_TOKEN.get(kind.before, kind.before)
    after = IN_TOKEN[kind.space] if kind.space else kind.after
    crossing = re.compile(before + after)
    return any(crossing.search(token) for token in tokens)


def _holds(encode: Callable[[str], list[int]], kind: Boundary, begins: str) -> bool:
    """Whether samples that are split here keep their tokens, if the second piece begins with `begins`."""
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
