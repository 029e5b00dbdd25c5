"""Rules for arguments as Gemma 4 writes them: like JSON, but keys have no quotes, and strings are between two tokens.

A schema has a rule if its values can be written one by one; tool_calls.py writes others as JSON.
"""

from __future__ import annotations

import json
import re
from typing import Any

from ..parsers.gemma import QUOTE
from ..parsers.parts import Schema
from .rules import Lark, quoted

KEY = re.compile(r"[A-Za-z_$][\w$-]{0,63}", re.ASCII)
SCALARS = ("integer", "number", "boolean", "null")  # written as in JSON, so they may have any keywords
MAX_DEPTH = 8  # of references, and of values inside one another
MAX_VALUES = 1000  # of a schema, with its references resolved
MAX_ITEMS = 100  # of an array whose number of items is limited
# The keywords that the schemas of other types may have
ARRAY = {"type", "items", "minItems", "maxItems"}
OBJECT = {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema", "$id"}


class Inexpressible(Exception):
    """A schema has no rule."""


class Writer:
    """Adds the rules of one call's arguments to a grammar. `root`: the schema of the arguments."""

    def __init__(self, lark: Lark, root: Schema) -> None:
        self._lark, self._root, self._count = lark, root, 0
        self._quote = lark.delimiter(QUOTE)

    def value(self, schema: Any, depth: int = 0) -> str:
        """Return a rule for a value that follows a schema. Raises Inexpressible."""
        self._count += 1
        if not isinstance(schema, dict) or depth > MAX_DEPTH or self._count > MAX_VALUES:
            raise Inexpressible
        if isinstance(reference := schema.get("$ref"), str) and schema.keys() == {"$ref"}:
            return self.value(self._resolve(reference), depth + 1)
        if "enum" in schema or "const" in schema:
            return self._choices(schema)
        for key in ("anyOf", "oneOf"):
            if isinstance(inner := schema.get(key), list) and inner and schema.keys() == {key}:
                return self._lark.one_of([self.value(each, depth + 1) for each in inner])
        kind = schema.get("type")
        if isinstance(kind, list) and kind:
            return self._lark.one_of([self.value({**schema, "type": each}, depth + 1) for each in kind])
        if kind in SCALARS:
            return self._lark.schema(schema)
        if kind == "string" and schema.keys() == {"type"}:
            return f"{self._quote} {self._lark.until(QUOTE)}"
        if kind == "array" and schema.keys() <= ARRAY:
            return self._array(schema, depth)
        if kind == "object" and schema.keys() <= OBJECT:
            return self._object(schema, depth)
        raise Inexpressible

    def _choices(self, schema: Schema) -> str:
        values = schema.get("enum", [schema.get("const")])
        if schema.keys() - {"enum", "const", "type"} or not isinstance(values, list) or not values:
            raise Inexpressible
        if any(isinstance(each, list | dict) or QUOTE in str(each) for each in values):
            raise Inexpressible
        return self._lark.one_of(
            [
                f"{self._quote} {quoted(each)} {self._quote}" if isinstance(each, str) else quoted(json.dumps(each))
                for each in values
            ]
        )

    def _array(self, schema: Schema, depth: int) -> str:
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        bounds = [least] if most is None else [least, most]
        if not all(isinstance(bound, int) and 0 <= bound <= MAX_ITEMS for bound in bounds) or bounds[-1] < least:
            raise Inexpressible
        if most == 0:
            return quoted("[]")
        item = self._lark.one_of([self.value(schema.get("items"), depth + 1)])
        items = f'{item} ("," {item}){{{max(0, least - 1)},{"" if most is None else most - 1}}}'
        return f'"[" {items} "]"' if least else f'"[" ({items})? "]"'

    def _object(self, schema: Schema, depth: int) -> str:
        """Return a rule for an object with the properties of a schema, in their order, and no others."""
        properties, required = schema.get("properties"), schema.get("required", [])
        if not isinstance(properties, dict) or not all(map(KEY.fullmatch, properties)) or {*required} - {*properties}:
            raise Inexpressible
        first = after = quoted("")  # the properties that follow, if none or some have been written
        for key, inner in reversed(properties.items()):
            one = self._lark.one_of([f"{quoted(f'{key}:')} {self.value(inner, depth + 1)}"])
            if key in required:
                first, after = f"{one} {after}", f'"," {one} {after}'
            else:
                first, after = f"{one} {after} | {first}", f'("," {one})? {after}'
            first, after = self._lark.one_of([first]), self._lark.one_of([after])
        return f'"{{" {first} "}}"'

    def _resolve(self, reference: str) -> Any:
        node: Any = self._root
        for part in reference.removeprefix("#").split("/")[1:]:
            node = node.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(node, dict) else None
        return node


def can_write(lark: Lark, schema: Schema) -> bool:
    """Return whether arguments with a schema have a rule. `lark`: a grammar that is not used afterwards."""
    try:
        Writer(lark, schema).value(schema)
    except Inexpressible:
        return False
    return True
