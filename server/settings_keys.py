"""A file of API keys: one per line, optionally followed by the weight of its share."""

from __future__ import annotations

import math
from pathlib import Path

MAX_BYTES = 1 << 20
MAX_WEIGHT = 1000.0


def read_keys(path: Path) -> dict[str, float]:
    """Return the keys with their weights.

    A line is `KEY` or `KEY weight=NUMBER`; empty lines and lines that begin with # are skipped. Raises ValueError with
    a predicate for the file's name. Errors quote no line, since it may hold a key.
    """
    try:
        data = path.read_bytes()
        text = data.decode("utf-8-sig")  # editors on Windows write a byte order mark
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
            raise ValueError(f"repeats a key in line {number}")
        keys[key] = _weight(more, number)
    if not keys:
        raise ValueError("has no key")
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
        raise ValueError(f"needs KEY or KEY weight=NUMBER (at most {MAX_WEIGHT:g}) in line {number}")
    return weight
