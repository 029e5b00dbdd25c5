"""How much of a client's own text an error message may repeat."""

from __future__ import annotations

SHOWN = 64  # characters


def shown(text: str) -> str:
    """A client's own word, shortened to what a message may repeat."""
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."
