"""Limits how much of a client's text an error message repeats."""

from __future__ import annotations

SHOWN = 64  # characters


def shown(text: str) -> str:
    """Shorten a client's text to SHOWN characters."""
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."
