"""Checks of grammars that need no vocabulary: they report the problem and its position.

llguidance reports what it does not support but not where. The checks here visit every subschema and name its path;
problems that only llguidance detects are located by having it compile parts of the schema.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from engine import grammar_problem

from ..http.excerpt import shown
from ..parsers.references import referred
from .lookups import Lookups, OutOfWork
from .property_names import replace_names
from .regex_length import MAX_SHORTEST, is_too_long, shortest
from .unions import require_tag

MAX_DEPTH = 64  # schemas within schemas
MAX_SOURCE = 64 << 10  # bytes of a request's grammar or schema
MAX_WRITTEN = 256 << 10  # bytes of the grammar that the server writes of a request's: 256 functions of 1 KiB each
# References, values and names that the rewriting of a schema may visit, per character of it. Each takes a few
# characters of an ordinary schema; only many references to one long definition take more.
WORK_PER_CHARACTER = 2
SEARCH_S = 0.05  # to locate a problem that only llguidance detects

# What llguidance cannot guarantee. Ignoring it would admit output that the schema forbids.
UNSUPPORTED = {
    "not", "if", "then", "else", "uniqueItems", "contains", "minContains", "maxContains", "propertyNames",
    "dependencies", "dependentRequired", "dependentSchemas", "unevaluatedItems", "unevaluatedProperties",
    "$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor", "x-guidance",
}  # fmt: skip
# Keywords that do not constrain the output if they have one of these values; they are removed.
LOW_BOUNDS = ("minimum", "exclusiveMinimum")
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
# The formats that llguidance enforces. Any other is an annotation, as JSON Schema says of unknown formats: pydantic
# writes `password`, `binary`, `path` and others.
FORMATS = {
    "date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri",
}  # fmt: skip
# Keywords whose values contain schemas.
MAPS = ("properties", "patternProperties", "$defs", "definitions")
LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
SINGLE = ("items", "additionalProperties", "additionalItems")
# The least bound of an integer that llguidance has an expression for: it reads bounds as floats, and this is the next
# one after the least number of 64 bits.
LEAST_INTEGER = -(2**63) + 1024
TOO_MUCH_WORK = (
    "rewriting 'propertyNames' at '{}' takes too much work, because many objects have the same long list of names; "
    "list the names in 'properties', or shorten the list"
)
DEFINITIONS = (("$defs",), ("definitions",))  # paths

Path = tuple[str | int, ...]


class Grammar(NamedTuple):
    """A constraint on the completion, and the field of the request that sets it."""

    kind: str  # the engine's name
    text: str
    field: str
    compile_s: float = 0.0  # CPU time of compiling it, known once it has been checked
    problem: str | None = None  # why it was not written as llguidance needs it, as half a sentence

    @property
    def is_raw(self) -> bool:
        """Whether it constrains all of the text, with the delimiters of reasoning and calls; else the content."""
        return self.kind == "lark"


def of_schema(schema: Any, field: str) -> Grammar:
    """Return the grammar of output that follows a JSON schema, which may be given as text."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError):  # find_problem refuses it
            return Grammar("json_schema", schema, field)
    try:
        return Grammar("json_schema", compact(constraining(schema)), field)
    except OutOfWork as error:
        return Grammar("json_schema", compact(schema), field, problem=str(error))


def constraining(schema: Any) -> Any:
    """Return a schema without the keywords that do not constrain the output, in the form that llguidance supports.

    `propertyNames` is replaced, the tags of a `oneOf` are required, and integers have bounds that it can enforce.
    Raises OutOfWork if there are so many `propertyNames`, or so many references in them, that this takes too long.
    """
    text = compact(schema)
    is_final = not any(f'"{keyword}"' in text for keyword in (*EMPTY, "format", "oneOf", *LOW_BOUNDS))
    if is_final or not isinstance(schema, dict) or len(text) > MAX_SOURCE:  # the gate refuses a longer one
        return schema
    copy = json.loads(text)
    nodes = [*walk(copy)]
    if any(depth > MAX_DEPTH for _, _, depth in nodes):
        return schema  # find_problem refuses it
    left = MAX_SOURCE - len(text)
    lookups = Lookups(copy, WORK_PER_CHARACTER * len(text))
    for path, node, _ in reversed(nodes):  # inner ones first: an outer one may repeat them
        for keyword, values in EMPTY.items():
            value = node.get(keyword)
            if any(value is each or value == each == {} for each in values):  # True and False by identity: 0 == False
                del node[keyword]
        if isinstance(name := node.get("format"), str) and name not in FORMATS:
            del node["format"]
        if "propertyNames" in node:
            try:
                left -= replace_names(node, lookups, left)
            except OutOfWork:
                raise OutOfWork(TOO_MUCH_WORK.format(pointer(*path, "propertyNames"))) from None
        if "oneOf" in node:
            with suppress(OutOfWork):  # llguidance may support it as it is
                require_tag(node, lookups)
        _raise_bounds(node)
    return copy


def _raise_bounds(schema: dict[str, Any]) -> None:
    """Replace lower bounds of integers that llguidance cannot enforce by the least one that it can."""
    types = schema.get("type")
    types = types if isinstance(types, list) else [types]
    for keyword in LOW_BOUNDS:
        bound: Any = schema.get(keyword)
        if "integer" in types and "number" not in types and type(bound) in (int, float) and bound < LEAST_INTEGER:
            schema[keyword] = LEAST_INTEGER


def compact(value: Any) -> str:
    """Return a schema as JSON text."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def find_problem(kind: str, text: str) -> str | None:
    """Return the problem with a grammar as half a sentence; None if there is none."""
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
    total = 0
    for path, node, depth in walk(schema):
        if depth > MAX_DEPTH:
            return f"schemas are nested more than {MAX_DEPTH} deep"
        for keyword in node:
            if keyword in UNSUPPORTED:
                return f"'{keyword}' at '{pointer(*path, keyword)}' is not supported"
        for keyword, where, pattern in patterns(path, node):
            if is_too_long(pattern):
                return f"no text of less than {MAX_SHORTEST} characters matches '{keyword}' at '{pointer(*where)}'"
            total += shortest(pattern) if "{" in pattern else 0  # others are as long as their text
        if total > MAX_SHORTEST:
            return f"the shortest texts of its patterns have more than {MAX_SHORTEST} characters"
        if (reference := _broken_reference(schema, path, node.get("$ref"))) is not None:
            return reference
    problem = grammar_problem(kind, text)
    return None if problem is None else f"{_location(schema)}{problem}"


def patterns(path: Path, schema: dict[str, Any]) -> Iterator[tuple[str, Path, str]]:
    """Yield the regular expressions of a schema itself, each after its keyword and path."""
    if isinstance(pattern := schema.get("pattern"), str):
        yield "pattern", (*path, "pattern"), pattern
    if isinstance(named := schema.get("patternProperties"), dict):
        yield from (("patternProperties", (*path, "patternProperties", name), name) for name in named)


def walk(root: dict[str, Any]) -> Iterator[tuple[Path, dict[str, Any], int]]:
    """Yield the path, schema and depth of each schema in a document that is an object, outer ones first."""
    todo: list[tuple[Path, dict[str, Any], int]] = [((), root, 0)]
    while todo:
        path, schema, depth = todo.pop()
        yield path, schema, depth
        inner: list[tuple[Path, Any]] = []
        for keyword in MAPS:
            if isinstance(value := schema.get(keyword), dict):
                inner += [((keyword, name), each) for name, each in value.items()]
        for keyword in LISTS:
            if isinstance(value := schema.get(keyword), list):
                inner += [((keyword, i), each) for i, each in enumerate(value)]
        inner += [((keyword,), schema.get(keyword)) for keyword in SINGLE]
        todo += [(path + more, each, depth + 1) for more, each in reversed(inner) if isinstance(each, dict)]


def pointer(*path: str | int) -> str:
    """Return a JSON pointer (RFC 6901), shortened if it is long."""
    parts = [shown(str(part)).replace("~", "~0").replace("/", "~1") for part in path]
    if len(parts) > 12:
        parts = [*parts[:6], "...", *parts[-5:]]
    return "".join(f"/{part}" for part in parts)


def _broken_reference(root: dict[str, Any], path: Path, reference: object) -> str | None:
    if not isinstance(reference, str):
        return None
    where = f"'$ref' at '{pointer(*path, '$ref')}'"
    if not reference.startswith("#"):
        return None if "$id" in root or "id" in root else f"{where} leads out of the schema, which is not supported"
    # llguidance resolves the others: names, escaped characters, and what "$id" has moved.
    if not reference.startswith("#/") or "%" in reference or "$id" in root:
        return None
    return f"{where} leads to nothing" if referred(root, reference) is None else None


def _location(root: dict[str, Any]) -> str:
    """Return the position of llguidance's error: the innermost schema that fails by itself, and its keyword."""
    until = time.monotonic() + SEARCH_S
    shared = {keyword: root[keyword] for keyword in ("$defs", "definitions", "$schema") if keyword in root}

    def fails(schema: dict[str, Any]) -> bool:
        in_time = time.monotonic() < until
        return in_time and grammar_problem("json_schema", json.dumps({**shared, **schema})) is not None

    # Definitions first: a schema that refers to a failing one fails too.
    for path, schema, _ in sorted(walk(root), key=lambda found: (found[0][:1] not in DEFINITIONS, -found[2])):
        if fails(schema):
            causes = [k for k in schema if not fails({name: value for name, value in schema.items() if name != k})]
            if time.monotonic() < until:
                return f"at '{pointer(*path, *causes[:1])}': "
    return ""
