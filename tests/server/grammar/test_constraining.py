"""Schemas in the form that llguidance supports: what it then enforces follows the schema that was given."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import pydantic
import pytest

from engine import GrammarTrial
from server.grammar.schemas import LEAST_INTEGER, constraining, find_problem


class Cat(pydantic.BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int


class Dog(pydantic.BaseModel):
    kind: Literal["dog", "hound"] = "dog"
    name: str


class Owner(pydantic.BaseModel):
    pet: Annotated[Cat | Dog, pydantic.Field(discriminator="kind")]
    others: list[Cat | Dog]


def union(*branches: Any, **more: Any) -> dict[str, Any]:
    return {"oneOf": [{"type": "object", "properties": each} for each in branches], **more}


def problem(schema: dict[str, Any]) -> str | None:
    text = json.dumps(constraining(schema))
    return find_problem("json_schema", text) or GrammarTrial(257).problem("json_schema", text)


def test_tags_of_a_union_are_required() -> None:
    schema = Owner.model_json_schema()
    before = json.dumps(schema)
    assert problem(schema) is None
    definitions = constraining(schema)["$defs"]
    assert [definitions[name]["required"] for name in ("Cat", "Dog")] == [["lives", "kind"], ["name", "kind"]]
    assert json.dumps(schema) == before, "the client's own"


def test_the_tag_may_be_any_property_with_different_values() -> None:
    shared = {"x": {"const": 1}, "y": {"type": "string"}}
    schema = union({**shared, "z": {"enum": [1, 2]}}, {**shared, "z": {"$ref": "#/$defs/three"}})
    schema["$defs"] = {"three": {"const": 3}}
    assert [each["required"] for each in constraining(schema)["oneOf"]] == [["z"], ["z"]]


@pytest.mark.parametrize(
    "schema",
    [
        union({"x": {"const": 1}}, {"x": {"enum": [1, 2]}}),
        union({"x": {"const": 1}}, {"y": {"const": 2}}),
        union({"x": {"const": 1}}, {"x": {"type": "string"}}),
        union({"x": {"const": 1}}, True),
        {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/oneOf/1"}, {"$ref": "other.json"}, 5]},
        {"oneOf": {}},
        {"oneOf": []},
    ],
)
def test_other_unions_stay_as_they_are(schema: dict[str, Any]) -> None:
    assert constraining(schema) == schema


@pytest.mark.parametrize("keyword", ["minimum", "exclusiveMinimum"])
@pytest.mark.parametrize("types", ["integer", ["null", "integer"]])
@pytest.mark.parametrize("bound", [-(2**63), LEAST_INTEGER - 1, -1e30])
def test_the_least_integers_become_a_bound_that_is_enforced(keyword: str, types: Any, bound: float) -> None:
    schema = {"type": types, keyword: bound, "maximum": 2**63 - 1}
    assert constraining(schema)[keyword] == LEAST_INTEGER
    assert problem(schema) is None


def test_other_bounds_stay_as_they_are() -> None:
    for schema in (
        {"type": "integer", "minimum": LEAST_INTEGER},
        {"type": "integer", "exclusiveMinimum": True},
        {"type": "number", "minimum": -(2**63)},
        {"minimum": -(2**63)},
    ):
        assert constraining(schema) == schema
