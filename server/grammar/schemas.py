"""Checks of grammars that need no vocabulary: they find the problem and its position.

llguidance refuses what it cannot do but says nothing about where that stands. The walk here knows the keywords of
JSON Schema and names the place; what it does not know itself it finds by asking llguidance about parts of the schema.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from engine import grammar_problem

from ..http.excerpt import shown
from .regex_length import MAX_SHORTEST, is_too_long, shortest

MAX_DEPTH = 64  # schemas within schemas
MAX_SOURCE = 64 << 10  # bytes
SEARCH_S = 0.05  # to locate an error that only llguidance detects

# What llguidance cannot guarantee. Ignoring it would admit output that the schema forbids.
UNSUPPORTED = {
    "not", "if", "then", "else", "uniqueItems", "contains", "minContains", "maxContains", "propertyNames",
    "dependencies", "dependentRequired", "dependentSchemas", "unevaluatedItems", "unevaluatedProperties",
    "$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor", "x-guidance",
}  # fmt: skip
# Keywords that do not constrain the output if they have one of these values; they are removed.
EMPTY: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "dependencies": ({},),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "propertyNames": (True, {}),
    "$recursiveAnchor": (False,),
}
# What llguidance can hold a text to. Any other format is an annotation, as JSON Schema has it for those that nobody
# knows: pydantic writes `password`, `binary`, `path` and others.
FORMATS = {
    "date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri",
}  # fmt: skip
# Keywords whose values contain schemas.
MAPS = ("properties", "patternProperties", "$defs", "definitions")
LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
SINGLE = ("items", "additionalProperties", "additionalItems")


class Grammar(NamedTuple):
    """A constraint on the completion, and the field of the request that sets it."""

    kind: str  # as the engine knows it
    text: str
    field: str
    is_raw: bool = False  # it binds all of the text, with the marks of reasoning and calls; else only the answer itself
    compile_s: float = 0.0  # CPU time that compiling it takes, once it has been checked

    @property
    def pair(self) -> tuple[str, str]:
        """As SamplingParams has it."""
        return self.kind, self.text


def of_schema(schema: Any, field: str, *, is_raw: bool = False) -> Grammar:
    """Return the grammar of output that follows a JSON schema, which may be given as text."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError):  # it is refused
            return Grammar("json_schema", schema, field, is_raw)
    return Grammar("json_schema", written(telling(schema)), field, is_raw)


def telling(schema: Any) -> Any:
    """Return a schema without the keywords that do not constrain the output."""
    text = written(schema)
    is_telling = not any(f'"{keyword}"' in text for keyword in (*EMPTY, "format"))
    if is_telling or not isinstance(schema, dict) or len(text) > MAX_SOURCE:  # the last is refused
        return schema
    copy = json.loads(text)
    for place in walk(copy):
        if place.depth > MAX_DEPTH:
            return schema  # it is refused
        for keyword, values in EMPTY.items():
            # By type too: 0 equals False.
            if any(place.schema.get(keyword) is each or place.schema.get(keyword) == each == {} for each in values):
                del place.schema[keyword]
        if isinstance(name := place.schema.get("format"), str) and name not in FORMATS:
            del place.schema["format"]
    return copy


def written(value: Any) -> str:
    """Return a schema as JSON text."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def wrong(kind: str, text: str) -> str | None:
    """Return the problem with a grammar as half a sentence; None if there is none."""
    if len(text.encode("utf-8", "surrogatepass")) > MAX_SOURCE:
        return f"it has more than {MAX_SOURCE} bytes"
    if kind == "regex" and is_too_long(text):
        return f"no text of less than {MAX_SHORTEST} characters matches it"
    if kind != "json_schema":
        return grammar_problem(kind, text)
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError):
        return "it is not a JSON schema"
    if not isinstance(schema, dict):
        return "it is not a JSON object"
    shortest_of_all = 0
    for place in walk(schema):
        if place.depth > MAX_DEPTH:
            return f"schemas are nested more than {MAX_DEPTH} deep"
        for keyword in place.schema:
            if keyword in UNSUPPORTED:
                return f"'{keyword}' at '{pointer(*place.path, keyword)}' is not supported"
        for path, pattern in patterns(place):
            if is_too_long(pattern):
                where = pointer(*path)
                return f"no text of less than {MAX_SHORTEST} characters matches '{path[len(place.path)]}' at '{where}'"
            shortest_of_all += shortest(pattern) if "{" in pattern else 0  # others are as long as they are written
        if shortest_of_all > MAX_SHORTEST:
            return f"the texts of its patterns have more than {MAX_SHORTEST} characters at least"
        if (reference := _broken_reference(schema, place)) is not None:
            return reference
    problem = grammar_problem(kind, text)
    return None if problem is None else f"{_place_of_error(schema)}{problem}"


def patterns(place: Place) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Yield the expressions of a schema itself, each with its path."""
    if isinstance(pattern := place.schema.get("pattern"), str):
        yield (*place.path, "pattern"), pattern
    if isinstance(named := place.schema.get("patternProperties"), dict):
        yield from (((*place.path, "patternProperties", name), name) for name in named)


class Place(NamedTuple):
    """A schema within a schema."""

    path: tuple[str | int, ...]
    schema: dict[str, Any]
    depth: int


def walk(root: dict[str, Any]) -> Iterator[Place]:
    """All schemas of a document that are objects, outer ones first; one that is too deep ends it."""
    todo = [Place((), root, 0)]
    while todo:
        place = todo.pop()
        yield place
        path, schema, depth = place
        inner: list[tuple[tuple[str | int, ...], Any]] = []
        for keyword in MAPS:
            if isinstance(value := schema.get(keyword), dict):
                inner += [((keyword, name), each) for name, each in value.items()]
        for keyword in LISTS:
            if isinstance(value := schema.get(keyword), list):
                inner += [((keyword, i), each) for i, each in enumerate(value)]
        inner += [((keyword,), schema.get(keyword)) for keyword in SINGLE]
        todo += [Place(path + more, each, depth + 1) for more, each in reversed(inner) if isinstance(each, dict)]


def pointer(*path: str | int) -> str:
    """A JSON pointer (RFC 6901), shortened where its names are long."""
    parts = [shown(str(part)).replace("~", "~0").replace("/", "~1") for part in path]
    if len(parts) > 12:
        parts = [*parts[:6], "...", *parts[-5:]]
    return "".join(f"/{part}" for part in parts)


def _broken_reference(root: dict[str, Any], place: Place) -> str | None:
    reference = place.schema.get("$ref")
    if not isinstance(reference, str):
        return None
    where = f"'$ref' at '{pointer(*place.path, '$ref')}'"
    if not reference.startswith("#"):
        return None if "$id" in root or "id" in root else f"{where} leads out of the schema, which is not supported"
    here: Any = root
    if not reference.startswith("#/"):
        return None
    for part in reference[2:].split("/"):
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(here, dict) and name in here:
            here = here[name]
        elif isinstance(here, list) and name.isdecimal() and int(name) < len(here):
            here = here[int(name)]
        else:
            # An escaped name, or a base that "$id" moves: llguidance knows.
            return None if "%" in name or "$id" in root else f"{where} leads to nothing"
    return None


def _place_of_error(root: dict[str, Any]) -> str:
    """Locate llguidance's error: the innermost schema that fails by itself, and its keyword."""
    until = time.monotonic() + SEARCH_S
    shared = {keyword: root[keyword] for keyword in ("$defs", "definitions", "$schema") if keyword in root}

    def fails(schema: dict[str, Any]) -> bool:
        in_time = time.monotonic() < until
        return in_time and grammar_problem("json_schema", json.dumps({**shared, **schema})) is not None

    # Definitions first: a schema that refers to a failing one fails too.
    places = sorted(walk(root), key=lambda place: (place.path[:1] not in (("$defs",), ("definitions",)), -place.depth))
    for path, schema, _ in places:
        if fails(schema):
            causes = [k for k in schema if not fails({name: value for name, value in schema.items() if name != k})]
            if time.monotonic() < until:
                return f"at '{pointer(*path, *causes[:1])}': "
    return ""
