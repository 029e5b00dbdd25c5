"""propertyNames, which llguidance does not have: what replaces it accepts the same objects."""

from __future__ import annotations

import enum
import itertools
import json
from typing import Annotated, Literal

import jsonschema
import pydantic
import pytest
from llguidance import LLMatcher

from engine.grammar import limits, source
from engine.grammar.trial import GrammarTrial
from server.grammar.schemas import MAX_SOURCE, compact, constraining, find_problem

INTEGER = {"type": "integer"}
COLORS = {"$defs": {"Color": {"type": "string", "title": "Color", "enum": ["red", "blue"]}}}
NAMES = ("", "a", "b", "red", "blue", "green", "\n", "🐋🐋", "a\nb")
OBJECTS = [
    dict(pairs)
    for number in range(3)
    for names in itertools.combinations(NAMES, number)
    for pairs in itertools.product(*(((name, 1), (name, "x")) for name in names))
] + [7, "red", ["red"]]


SCHEMAS = [
    {"propertyNames": {"type": "string"}, "additionalProperties": INTEGER},
    {"propertyNames": {"title": "Name", "description": "any"}},
    {"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": INTEGER},
    {"propertyNames": {"type": "string", "enum": ["a", "b"]}, "additionalProperties": INTEGER, "required": ["a"]},
    {"propertyNames": {"enum": ["a", 7]}},
    {"propertyNames": {"const": "a"}, "minProperties": 1},
    {"propertyNames": {"enum": ["a", "b"]}, "properties": {"a": INTEGER, "green": INTEGER}},
    {"propertyNames": {"enum": ["a"]}, "properties": {"b": INTEGER}, "additionalProperties": False},
    {"propertyNames": {"$ref": "#/$defs/Color"}, "additionalProperties": INTEGER, **COLORS},
    {"propertyNames": {"$ref": "#/$defs/Other"}, "$defs": {**COLORS["$defs"], "Other": {"$ref": "#/$defs/Color"}}},
    {"propertyNames": {"pattern": "^[ab]$"}, "additionalProperties": INTEGER},
    {"propertyNames": {"pattern": "e"}},
    {"propertyNames": {"minLength": 2}},
    {"propertyNames": {"maxLength": 1}, "additionalProperties": INTEGER},
    {"propertyNames": {"minLength": 1, "maxLength": 3}, "maxProperties": 1},
    {"propertyNames": {"maxLength": 1}, "additionalProperties": False},
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=compact)
@pytest.mark.parametrize("place", ["whole", "inner"])
def test_the_same_objects_follow_the_schema_without_the_keyword(schema, place):
    definitions = {"$defs": schema["$defs"]} if "$defs" in schema else {}
    if place == "inner":
        inner = {keyword: value for keyword, value in schema.items() if keyword != "$defs"}
        schema = {"type": "array", "items": inner, **definitions}
    followed = constraining(schema)
    assert "propertyNames" not in json.dumps(followed)
    assert find_problem("json_schema", compact(followed)) is None
    before, after = (jsonschema.Draft202012Validator(each) for each in (schema, followed))
    values = [[value] for value in OBJECTS] if place == "inner" else OBJECTS
    verdicts = {compact(value): before.is_valid(value) for value in values}
    assert {compact(value): after.is_valid(value) for value in values} == verdicts
    assert any(verdicts.values())


@pytest.mark.parametrize("schema", SCHEMAS, ids=compact)
def test_the_grammar_lets_the_same_objects_through(schema):
    vocabulary = GrammarTrial(257)._tokenizer  # token ids are bytes
    grammar = source("json_schema", compact(constraining(schema)))
    validator = jsonschema.Draft202012Validator(schema)
    for value in OBJECTS:
        matcher = LLMatcher(vocabulary, grammar, limits=limits(), log_level=0)
        text = json.dumps(value, ensure_ascii=False).encode()
        is_allowed = matcher.consume_tokens([*text]) and matcher.is_accepting()
        assert is_allowed == validator.is_valid(value), text


@pytest.mark.parametrize(
    "schema",
    [
        {"propertyNames": {"not": {"const": "a"}}},
        {"propertyNames": False},
        {"propertyNames": {"type": "integer"}},
        {"propertyNames": {"pattern": "a", "maxLength": 2}},
        {"propertyNames": {"minLength": 3, "maxLength": 2}},
        {"propertyNames": {"minLength": -1}},
        {"propertyNames": {"minLength": 100_000}},
        {"propertyNames": {"maxLength": 2.0}},
        {"propertyNames": {"maxLength": 2}, "patternProperties": {"a": INTEGER}},
        {"propertyNames": {"maxLength": 2}, "properties": {"a": INTEGER}},
        {"propertyNames": {"$ref": "#/$defs/a"}, "$defs": {"a": {"$ref": "#/$defs/a"}}},
        {"propertyNames": {"$ref": "#"}},
        {"propertyNames": {"enum": [f"name {i}" for i in range(100)]}, "additionalProperties": {"const": "x" * 1000}},
    ],
    ids=lambda schema: compact(schema)[:60],
)
def test_what_cannot_be_replaced_is_named(schema):
    followed = constraining(schema)
    assert "'propertyNames' at '/propertyNames' is not supported" in (
        find_problem("json_schema", compact(followed)) or ""
    )


def test_nested_lists_of_names_do_not_multiply_without_a_bound():
    schema = INTEGER
    for _ in range(8):
        schema = {"propertyNames": {"enum": [f"name {i}" for i in range(40)]}, "additionalProperties": schema}
    assert len(compact(constraining(schema))) < 2 * MAX_SOURCE


class Color(enum.StrEnum):
    RED = "red"
    BLUE = "blue"


class Record(pydantic.BaseModel):
    literal: dict[Literal["a", "b"], int]
    color: dict[Color, list[int]]
    short: dict[Annotated[str, pydantic.StringConstraints(min_length=1, max_length=5)], int]
    plain: dict[str, int]


def test_dictionaries_of_pydantic_can_be_enforced():
    schema = Record.model_json_schema()
    assert "propertyNames" in json.dumps(schema)
    assert find_problem("json_schema", compact(constraining(schema))) is None
