"""What a request model is made of: strict JSON objects, and fields of three kinds.

A request model is the one table of its fields. Each field is of one of three kinds, told by its annotation: `LABEL`
(accepted, without influence on the tokens), `Refused` (known, and only its default passes), or neither: it has its
effect. `table` reads it, with the docstrings of the fields as notes.
"""

from __future__ import annotations

import json
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, LiteralString, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

MAX_LABEL = 512  # characters


class Wire(BaseModel):
    """A JSON object, taken literally: no unknown keys, "5" is not 5, true is not 1, NaN is nothing."""

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=(), use_attribute_docstrings=True
    )


class _Label:
    """Marks a field that is accepted, and echoed where OpenAI does so, but decides nothing."""


LABEL = _Label()


# Compared by identity: typing keeps one Annotated of equal marks, and (1,) equals (True,).
@dataclass(frozen=True, eq=False)
class Refused:
    """Marks a field that is known but not supported: null and `defaults`, which ask for nothing, count as absent."""

    defaults: tuple[Any, ...] = ()
    hint: str = ""  # what to do instead, as a sentence

    @property
    def note(self) -> str:
        """What becomes of the field, in a sentence or two."""
        accepted = ", ".join(json.dumps(value) for value in (None, *self.defaults))
        return f"Not supported: only what asks for nothing is accepted ({accepted}). {self.hint}".strip()

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"enum": [None, *self.defaults], "description": self.note}

    def _check(self, value: Any) -> None:
        # True equals 1 in Python, and nowhere else.
        if value is not None and not any(type(value) is type(own) and value == own for own in self.defaults):
            raise PydanticCustomError("unsupported", "this server does not support it yet")


def refused(*defaults: Any, hint: str = "") -> Refused:
    return Refused(defaults, hint)


Kind = Literal["effect", "label", "refused"]


class FieldRow(NamedTuple):
    """One field of a request: `stream` or, inside of an object, `stream_options.include_usage`."""

    field: str
    kind: Kind
    note: str


def table(model: type[BaseModel], prefix: str = "") -> Iterator[FieldRow]:
    """Every field of a request and what becomes of it; objects of our own are followed by their fields."""
    for name, field in model.model_fields.items():
        path = prefix + (field.alias or name)
        mark = next((mark for mark in field.metadata if isinstance(mark, _Label | Refused)), None)
        kind: Kind = "effect" if mark is None else "label" if isinstance(mark, _Label) else "refused"
        note = mark.note if isinstance(mark, Refused) else " ".join((field.description or "").split())
        yield FieldRow(path, kind, note)
        for part in _members(field.annotation):
            if isinstance(part, type) and issubclass(part, Wire):
                yield from table(part, f"{path}.")


def _members(annotation: Any) -> Iterable[Any]:
    """The types that a field may have: those of a union, or the one."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _members(get_args(annotation)[0])
    return get_args(annotation) if origin in (Union, types.UnionType) else (annotation,)


def kinds(model: type[BaseModel]) -> dict[str, Kind]:
    """The kind of each field of a request."""
    return {row.field: row.kind for row in table(model) if "." not in row.field}


def clash(message: LiteralString) -> PydanticCustomError:
    """A field that does not go together with another; raised by the validator of the later one."""
    return PydanticCustomError("clash", message)


class OneError:
    """Marks a union of plain types: what fits none of them is one error, not one for each."""

    def __init__(self, message: LiteralString) -> None:
        self.message = message

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        assert schema["type"] == "union"
        return {**schema, "custom_error_type": "union_type", "custom_error_message": self.message}
