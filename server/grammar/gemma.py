"""Rules for arguments as Gemma 4 writes them: like JSON, but keys have no quotes, and strings are between two tokens.

A schema has a rule if its values can be written one by one; tool_calls.py writes others as JSON. An object whose
schema lists no properties may have any.
"""

from __future__ import annotations

import json
import re
from typing import Any

from ..parsers.gemma import QUOTE
from ..parsers.parts import Schema
from ..parsers.references import referred
from ..parsers.tagged import TYPES
from .rules import Lark, quoted
from .schemas import compact

KEY = re.compile(r"[A-Za-z_$][\w$-]{0,63}", re.ASCII)
SCALARS = ("integer", "number", "boolean", "null")  # written as in JSON, so they may have any keywords
MAX_DEPTH = 8  # of references, and of values inside one another
MAX_VALUES = 2000  # schemas within a schema and entries of its enumerations, with each reference resolved once
MAX_ITEMS = 100  # of an array whose number of items is limited
# Keys that no schema lists: what the parser reads up to a colon, without white space at the ends
ANY_KEY = r"""/[^\x00-\x20\x7f"<>{}\[\]:,]([^\x00-\x1f\x7f"<>{}\[\]:,]{0,62}[^\x00-\x20\x7f"<>{}\[\]:,])?/"""
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
        self._rules: dict[str, str | None] = {}  # by reference; None: being written

    def value(self, schema: Any, depth: int = 0) -> str:
        """Return a rule for a value that follows a schema. Raises Inexpressible."""
        self._add(1)
        if schema is True or schema == {}:
            return self._any()
        if not isinstance(schema, dict) or depth > MAX_DEPTH:
            raise Inexpressible
        if isinstance(reference := schema.get("$ref"), str) and schema.keys() == {"$ref"}:
            return self._referred(reference, depth)
        if "enum" in schema or "const" in schema:
            return self._choices(schema)
        for key in ("anyOf", "oneOf"):
            if isinstance(inner := schema.get(key), list) and inner and schema.keys() == {key}:
                return self._lark.one_of([self.value(each, depth + 1) for each in inner])
        kind = schema.get("type")
        if isinstance(kind, list) and kind:
            return self._lark.one_of([self.value({**schema, "type": each}, depth + 1) for each in kind])
        # The rule of a scalar is a schema of its own, without the definitions that references lead to.
        if kind in SCALARS and '"$ref"' not in compact(schema):
            return self._lark.schema(schema)
        if kind == "string" and schema.keys() == {"type"}:
            return f"{self._quote} {self._lark.until(QUOTE)}"
        if kind == "array" and schema.keys() <= ARRAY:
            return self._array(schema, depth)
        if kind == "object" and schema.keys() <= OBJECT:
            return self._object(schema, depth)
        raise Inexpressible

    def _add(self, count: int) -> None:
        """Count values that are about to be written. Raises Inexpressible if they are too many."""
        self._count += count
        if self._count > MAX_VALUES:
            raise Inexpressible

    def _any(self) -> str:
        """Return a rule for any value."""
        if "any" not in self._lark.rules:
            string, scalar = self._lark.until(QUOTE), self._lark.schema({"type": ["number", "boolean", "null"]})
            self._lark.rules["any"] = (
                f'{self._quote} {string} | {scalar} | "[" (any ("," any)*)? "]" | {self._members("any")}'
            )
        return "any"

    def _members(self, value: str) -> str:
        """Return a rule for an object with any keys. `value`: the rule of each value."""
        self._lark.rules["KEY"] = ANY_KEY
        pair = f'KEY ":" {value}'
        return f'"{{" ({pair} ("," {pair})*)? "}}"'

    def _referred(self, reference: str, depth: int) -> str:
        """Return the rule of what a reference leads to, which is written once."""
        if reference not in self._rules:
            self._rules[reference] = None
            self._rules[reference] = self._lark.one_of([self.value(referred(self._root, reference), depth + 1)])
        rule = self._rules[reference]
        if rule is None:  # the schema contains itself
            raise Inexpressible
        return rule

    def _choices(self, schema: Schema) -> str:
        values, kinds = schema.get("enum", [schema.get("const")]), schema.get("type", [*TYPES.values(), "null"])
        if schema.keys() - {"enum", "const", "type"} or not isinstance(values, list):
            raise Inexpressible
        self._add(len(values))
        kinds = kinds if isinstance(kinds, list) else [kinds]
        values = [each for each in values if _has_type(each, kinds) and _is_same(each, schema.get("const", each))]
        if not values or any(isinstance(each, list | dict) or QUOTE in str(each) for each in values):
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
        item = self._lark.one_of([self.value(schema.get("items", {}), depth + 1)])
        items = f'{item} ("," {item}){{{max(0, least - 1)},{"" if most is None else most - 1}}}'
        return f'"[" {items} "]"' if least else f'"[" ({items})? "]"'

    def _object(self, schema: Schema, depth: int) -> str:
        """Return a rule for an object with the properties of a schema, in their order, and no others.

        If the schema lists none, the object may have any that it does not exclude.
        """
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, dict) or not all(map(KEY.fullmatch, properties)) or {*required} - {*properties}:
            raise Inexpressible
        if not properties and (others := schema.get("additionalProperties", True)) is not False:
            return self._members(self._lark.one_of([self.value(others, depth + 1)]))
        first = after = quoted("")  # the properties that follow, if none or some have been written
        for key, inner in reversed(properties.items()):
            one = self._lark.one_of([f"{quoted(f'{key}:')} {self.value(inner, depth + 1)}"])
            if key in required:
                first, after = f"{one} {after}", f'"," {one} {after}'
            else:
                first, after = f"{one} {after} | {first}", f'("," {one})? {after}'
            first, after = self._lark.one_of([first]), self._lark.one_of([after])
        return f'"{{" {first} "}}"'


def _has_type(value: Any, kinds: list[Any]) -> bool:
    kind = TYPES.get(type(value), "null")
    is_whole = isinstance(value, float) and value.is_integer()
    return kind in kinds or (kind == "integer" and "number" in kinds) or (is_whole and "integer" in kinds)


def _is_same(value: Any, other: Any) -> bool:
    """Return whether two values are equal in JSON, where true is not 1."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)
