"""Grammars whose references are nested so deeply that compiling them overflows the stack of an ordinary thread."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

LIMIT = 65_000  # bytes, a little less than the largest grammar may have

Json = dict[str, Any]


def schema_chain(wrap: Callable[[Json], Json], length: int | None = None) -> str:
    """Return definitions that each refer to the next one, by default as many as fit."""

    def make(count: int) -> str:
        definitions = {f"d{i}": wrap({"$ref": f"#/$defs/d{i + 1}"}) for i in range(count)}
        definitions[f"d{count}"] = {"type": "string"}
        return json.dumps({"$defs": definitions, "$ref": "#/$defs/d0"}, separators=(",", ":"))

    return make(length) if length is not None else largest(make)


def rule_chain(body: str, name: str = "r", length: int | None = None) -> str:
    """Return rules that each refer to the next one, whose name replaces {} in `body`."""

    def make(count: int) -> str:
        rules = "".join(f"{name}{i}: {body.format(f'{name}{i + 1}')}\n" for i in range(count))
        return f'start: {name}0\n{rules}{name}{count}: "a"\n'

    return make(length) if length is not None else largest(make)


def largest(make: Callable[[int], str]) -> str:
    """Return the longest text of less than LIMIT bytes."""
    low, high = 1, 1 << 16
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if len(make(middle)) < LIMIT else (low, middle)
    return make(low)


DEEP: dict[str, tuple[str, Callable[[], str]]] = {
    "items": ("json_schema", lambda: schema_chain(lambda ref: {"type": "array", "items": ref})),
    "anyOf": ("json_schema", lambda: schema_chain(lambda ref: {"anyOf": [ref, {"type": "null"}]})),
    "anyOf of one": ("json_schema", lambda: schema_chain(lambda ref: {"anyOf": [ref]})),
    "oneOf": ("json_schema", lambda: schema_chain(lambda ref: {"oneOf": [ref, {"type": "null"}]})),
    "allOf": ("json_schema", lambda: schema_chain(lambda ref: {"allOf": [ref]})),
    "rules": ("lark", lambda: rule_chain("{}")),
    "rules after a text": ("lark", lambda: rule_chain('"a" {}')),
    "alternatives": ("lark", lambda: rule_chain('{} | "b"')),
    "optional rules": ("lark", lambda: rule_chain("{}?")),
    "repeated rules": ("lark", lambda: rule_chain("({})+")),
    "terminals": ("lark", lambda: rule_chain("{}", "T")),
    "terminals after a text": ("lark", lambda: rule_chain('"a" {}', "T")),
    "repeated terminals": ("lark", lambda: rule_chain("{}+", "T")),
}
# 771 bytes that take more than half a second to compile.
SLOW = ("lark", rule_chain("{}+", "T", 1500))
