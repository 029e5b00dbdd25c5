"""The minimum length of a regular expression's matches, computed without compiling it."""

from __future__ import annotations

import re
from dataclasses import dataclass

# Where a text is forced, each of its characters is compiled apart: so many take some 25 milliseconds, and a{1000000},
# which is a short expression, would take most of a second.
MAX_SHORTEST = 1 << 14
ENOUGH = 1 << 30  # longer lengths are not distinguished

# An escape, the beginning of a group, a count, one from nothing, or any other character. No part looks far ahead.
TOKEN = re.compile(
    r"\\[pPxuU]\{[^}]{0,64}\}|\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\U[0-9a-fA-F]{8}|\\[pP][a-zA-Z]|\\."
    r"|\(\?(?:P?<[^>]{1,64}>|[a-zA-Z-]{0,16}[:)])|\{(\d+)(?:,\d*)?\}|\{,\d+\}|.",
    re.DOTALL,
)
NOTHING = {"^", "$", r"\b", r"\B", r"\A", r"\z"}


@dataclass(slots=True)
class _Group:
    """The text between two parentheses, as far as it has been read."""

    fewest: int = ENOUGH  # of the alternatives before this one
    length: int = 0  # of this one
    last: int = 0  # of what a count would repeat

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
    place = 0
    while place < len(pattern):
        found = TOKEN.match(pattern, place)
        assert found is not None
        token, place = found[0], found.end()
        here = groups[-1]
        if token == "(" or (token.startswith("(?") and token[-1] != ")"):
            groups.append(_Group())
        elif token == ")" and len(groups) > 1:
            groups.pop()
            groups[-1].add(here.shortest)
        elif token == "|":
            here.fewest, here.length, here.last = here.shortest, 0, 0
        elif token in ("*", "?") or (token.startswith("{,") and len(token) > 2):
            here.repeat(0)
        elif token == "+":
            here.repeat(1)
        elif found[1] is not None:
            here.repeat(int(found[1][-10:]) if len(found[1].lstrip("0")) < 10 else ENOUGH)
        elif token == "[":
            place = _behind_class(pattern, place)
            here.add(1)
        elif token not in NOTHING and not token.startswith("(?"):
            here.add(1)
    return groups[0].shortest if len(groups) == 1 else 0


def _behind_class(pattern: str, place: int) -> int:
    """Where the class ends whose [ stands before `place`."""
    place += pattern.startswith("^", place)
    place += pattern.startswith("]", place)
    while place < len(pattern) and pattern[place] != "]":
        place += 2 if pattern[place] == "\\" else 1
    return place + 1
