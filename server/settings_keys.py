"""A file of API keys: one per line, followed by the weight of its share where that is not 1."""

from __future__ import annotations

import math
from pathlib import Path

MAX_BYTES = 1 << 20
MAX_WEIGHT = 1000.0


def read_keys(path: Path) -> dict[str, float]:
    """The keys with their weights; raises ValueError, whose text goes on after the file's name.

    A line is `KEY` or `KEY weight=NUMBER`; empty lines and those that begin with # are left out. No line is repeated in
    an error.
    """
    try:
        data = path.read_bytes()
        text = data.decode("utf-8-sig")  # editors of Windows begin files with a mark
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot be read: {getattr(error, 'strerror', None) or 'it is not UTF-8'}") from None
    if len(data) > MAX_BYTES:
        raise ValueError(f"has more than {MAX_BYTES} bytes")
    keys: dict[str, float] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        key, *more = words
        if key in keys:
            raise ValueError(f"has a key for the second time in line {number}")
        keys[key] = _weight(more, number)
    if not keys:
        raise ValueError("holds no key")
    return keys


def _weight(words: list[str], number: int) -> float:
    if not words:
        return 1.0
    name, _, value = words[0].partition("=")
    try:
        weight = float(value)
    except ValueError:
        weight = math.nan
    if len(words) > 1 or name != "weight" or not 0 < weight <= MAX_WEIGHT:
        raise ValueError(f"has something other than a key and weight=NUMBER (at most {MAX_WEIGHT:g}) in line {number}")
    return weight
