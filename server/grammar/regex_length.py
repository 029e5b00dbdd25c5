"""The minimum length of a regular expression's matches, computed without compiling it."""

from __future__ import annotations

import re
from dataclasses import dataclass

# A forced text is compiled character by character. This many take about 25 ms; the short expression a{1000000} would
# take most of a second.
MAX_SHORTEST = 1 << 14
ENOUGH = 1 << 30  # longer lengths are not distinguished

# An escape, the beginning of a group, a count, a count from 0, or any other character. No part looks far ahead.
TOKEN = re.compile(
    r"\\[pPxuU]\{[^}]{0,64}\}|\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\U[0-9a-fA-F]{8}|\\[pP][a-zA-Z]|\\."
    r"|\(\?(?:P?<[^>]{1,64}>|[a-zA-Z-]{0,16}[:)])|\{(\d+)(?:,\d*)?\}|\{,\d+\}|.",
    re.DOTALL,
)
NOTHING = {"^", "$", r"\b", r"\B", r"\A", r"\z"}


@dataclass(slots=True)
class _Group:
    """A group, as far as it has been read. Lengths are the minimum numbers of characters."""

    fewest: int = ENOUGH  # of the alternatives before this one
    length: int = 0  # of this alternative
    last: int = 0  # of the part that a count would repeat

    @property
    def shortest(self) -> int:
        return min(self.fewest, self.length)

    def add(self, length: int) -> None:
        self.length += length
        self.last = length

    def repeat(self, times: int) -> None:
        self.length = min(ENOUGH, self.length + self.last * (times - 1))
        self.last = 0  # a ? after a count only makes it lazy


def is_too_long(pattern: str) -> bool:
    """Return whether counts make every match of a pattern longer than MAX_SHORTEST."""
    return "{" in pattern and shortest(pattern) > MAX_SHORTEST


def shortest(pattern: str) -> int:
    """Return the length of the shortest match, at most ENOUGH; 0 for an invalid expression."""
    groups = [_Group()]
    index = 0
    while index < len(pattern):
        found = TOKEN.match(pattern, index)
        assert found is not None
        token, index = found[0], found.end()
        group = groups[-1]
        if token == "(" or (token.startswith("(?") and token[-1] != ")"):
            groups.append(_Group())
        elif token == ")" and len(groups) > 1:
            groups.pop()
            groups[-1].add(group.shortest)
        elif token == "|":
            group.fewest, group.length, group.last = group.shortest, 0, 0
        elif token in ("*", "?") or (token.startswith("{,") and len(token) > 2):
            group.repeat(0)
        elif token == "+":
            group.repeat(1)
        elif found[1] is not None:
            group.repeat(int(found[1][-10:]) if len(found[1].lstrip("0")) < 10 else ENOUGH)
        elif token == "[":
            index = _after_class(pattern, index)
            group.add(1)
        elif token not in NOTHING and not token.startswith("(?"):
            group.add(1)
    return groups[0].shortest if len(groups) == 1 else 0


def _after_class(pattern: str, index: int) -> int:
    """Return the index after a class whose [ is before `index`."""
    index += pattern.startswith("^", index)
    index += pattern.startswith("]", index)
    while index < len(pattern) and pattern[index] != "]":
        index += 2 if pattern[index] == "\\" else 1
    return index + 1
