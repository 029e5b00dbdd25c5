"""References within a JSON schema."""

from __future__ import annotations

from typing import Any

from .parts import Schema


def referred(root: Schema, reference: str) -> Any:
    """Return what a reference such as `#/$defs/name` leads to; None if that is nothing, or not in this schema."""
    if reference != "#" and not reference.startswith("#/"):
        return None
    node: Any = root
    for part in reference.split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, list):
            node = node[int(name)] if name.isdecimal() and len(name) < 10 and int(name) < len(node) else None
        else:
            node = node.get(name) if isinstance(node, dict) else None
    return node
