"""Schemas in the form that llguidance supports: what it then enforces follows the schema that was given."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Annotated, Any, Literal

import pydantic
import pytest

from engine import GrammarTrial
from server.grammar import lookups
from server.grammar.checker import Gate
from server.grammar.lookups import Lookups, OutOfWork
from server.grammar.schemas import (
    LEAST_INTEGER,
    MAX_SOURCE,
    WORK_PER_CHARACTER,
    compact,
    constraining,
    find_problem,
    of_schema,
)
from server.http.errors import ApiError


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


# Work: a small schema can refer to a large definition thousands of times, and all of this runs on the event loop.

MANY_VALUES = {"properties": {"k": {"enum": [*range(5500)]}}}
MANY_NAMES = {"properties": {f"p{i:x}": {} for i in range(3500)}}
HARD = {
    "one definition as every alternative": union(*[{}] * 2, **{"$defs": {"x": MANY_VALUES}})
    | {"oneOf": [{"$ref": "#/$defs/x"}] * 1500},
    "alternatives with many properties": {"$defs": {"x": MANY_NAMES}, "oneOf": [{"$ref": "#/$defs/x"}] * 1200},
    "many unions of the same alternatives": {
        "$defs": {
            "e": {"enum": [*range(2000)]},
            "a": {"properties": {f"p{i}": {"$ref": "#/$defs/e"} for i in range(400)}},
            "b": {"properties": {f"p{i}": {"$ref": "#/$defs/e"} for i in range(400)}},
        },
        "properties": {f"u{i}": {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]} for i in range(300)},
    },
    "a long chain of references": {
        "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#" + "/$defs" * 5000}},
        "oneOf": [{"$ref": "#/$defs/a"}] * 1200,
    },
    "the same names for many objects": {
        "$defs": {"n": {"enum": [f"n{i}" for i in range(4000)]}},
        "properties": {f"u{i}": {"propertyNames": {"$ref": "#/$defs/n"}} for i in range(600)},
    },
}


@pytest.mark.parametrize("schema", HARD.values(), ids=HARD)
def test_the_work_is_linear_in_the_length_of_the_schema(
    monkeypatch: pytest.MonkeyPatch, schema: dict[str, Any]
) -> None:
    text, work = compact(schema), 0
    assert len(text) <= MAX_SOURCE
    spend, to_json, values, follow = Lookups.spend, json.dumps, Lookups.values, lookups.referred
    seen: set[str] = set()

    def spending(self: Lookups, amount: int) -> None:
        nonlocal work
        spend(self, amount)  # raises for what is not done
        work += amount

    def comparing(self: Lookups, schema: dict[str, Any]) -> frozenset[str]:
        nonlocal work
        listed = values(self, schema)
        work += len(listed)
        return listed

    def counting(value: Any, **options: Any) -> str:
        nonlocal work
        work += 1
        return to_json(value, **options)

    def following(root: dict[str, Any], reference: str) -> Any:
        assert reference not in seen, "each is followed once"
        seen.add(reference)
        return follow(root, reference)

    monkeypatch.setattr(Lookups, "spend", spending)
    monkeypatch.setattr(Lookups, "values", comparing)
    monkeypatch.setattr(lookups.json, "dumps", counting)
    monkeypatch.setattr(lookups, "referred", following)
    with suppress(OutOfWork):
        constraining(schema)
    assert 0 < work < 3 * WORK_PER_CHARACTER * len(text)


async def test_a_schema_that_takes_too_much_work_to_rewrite_is_refused_with_the_remedy() -> None:
    grammar = of_schema(HARD["the same names for many objects"], "response_format")
    with pytest.raises(ApiError) as refused:
        await Gate().check(grammar, "")  # nothing is compiled
    message = refused.value.message
    assert message.startswith("Invalid 'response_format': rewriting 'propertyNames' at '/properties/u")
    assert "takes too much work" in message and message.endswith("list the names in 'properties', or shorten the list.")
