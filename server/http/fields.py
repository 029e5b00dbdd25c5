"""The base of all request models: strict JSON objects with three kinds of fields.

A field of a request model has an effect, or is annotated with `LABEL`: accepted, without influence on the tokens.
Fields in `unsupported` are accepted only as null or one of the listed defaults. `RefusedKinds` lists the
kinds of objects that the API has and this server does not support. `table` lists all fields, with their docstrings as
notes.
"""

from __future__ import annotations

import json
import types
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, LiteralString, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Discriminator, GetCoreSchemaHandler, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError

MAX_LABEL = 512  # characters
MAX_NAMES = 256  # of one object; no model has that many fields


@dataclass(frozen=True)
class Refused:
    """A field that is not supported; null and `defaults`, which request nothing, count as absent."""

    defaults: tuple[Any, ...] = ()
    hint: str = ""  # what to do instead, a clause

    @property
    def note(self) -> str:
        """How the field is handled, in one or two sentences."""
        accepted = ", ".join(json.dumps(value) for value in (None, *self.defaults))
        hint = f" {self.hint[:1].upper()}{self.hint[1:]}." if self.hint else ""
        return f"Not supported; allowed values: {accepted}.{hint}"

    @property
    def error(self) -> PydanticCustomError:
        """The error for other values, whose message is the hint."""
        return PydanticCustomError("unsupported", "{hint}", {"hint": self.hint})

    def accepts(self, value: Any) -> bool:
        """Whether a value requests nothing."""
        # By type too, since True equals 1 in Python.
        return value is None or any(type(value) is type(own) and value == own for own in self.defaults)


class Wire(BaseModel):
    """A strict JSON object: no unknown keys, no conversion of "5" to 5 or true to 1, no NaN."""

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=(), use_attribute_docstrings=True
    )

    unsupported: ClassVar[dict[str, Refused]] = {}
    """Unsupported fields, by their names in JSON; checked and dropped before the others are validated."""

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Inherit the unsupported fields of the bases, except for the class's own fields."""
        super().__pydantic_init_subclass__(**kwargs)
        inherited = [vars(base).get("unsupported", {}) for base in reversed(cls.__mro__)]
        taken = own_names(cls)
        cls.unsupported = {name: field for table in inherited for name, field in table.items() if name not in taken}

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, value: Any) -> Any:
        """Refuse unsupported fields.

        Of very many unknown names only the first is kept, since each would be an error.
        """
        if not isinstance(value, dict):
            return value
        if not cls.unsupported.keys().isdisjoint(value):
            value = cls._without_unsupported(value)
        if len(value) <= MAX_NAMES:
            return value
        known = own_names(cls)
        unknown = next((name for name in value if name not in known), None)
        return {name: value[name] for name in (*known, unknown) if name in value}

    @classmethod
    def _without_unsupported(cls, value: dict[str, Any]) -> dict[str, Any]:
        sent = [name for name in cls.unsupported if name in value]
        errors = [
            InitErrorDetails(type=cls.unsupported[name].error, loc=(name,), input=value[name])
            for name in sent
            if not cls.unsupported[name].accepts(value[name])
        ]
        if errors:
            raise ValidationError.from_exception_data(cls.__name__, errors)
        return {name: each for name, each in value.items() if name not in cls.unsupported}


def own_names(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """The fields of a model, by their names in JSON."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


def subclasses(kind: type[Wire]) -> Iterator[type[Wire]]:
    """List the models that extend one, directly and indirectly."""
    for subclass in kind.__subclasses__():
        yield subclass
        yield from subclasses(subclass)


def chosen_by(form: Callable[[Any], str | None], accepted: str) -> Discriminator:
    """Annotate a union whose branch `form` returns by its tag, or None for a value that is not `accepted`."""
    return Discriminator(form, custom_error_type="form_type", custom_error_message=f"must be {accepted}")


LABEL = "label"  # annotates a field that is accepted, and echoed if OpenAI does so, but has no effect


@dataclass(frozen=True, eq=False)
class RefusedKinds:
    """Annotates objects with the kinds that the API has and this server does not support: a 400 that names `tag`."""

    tag: str
    names: tuple[str, ...]


def refused(*defaults: Any, hint: str = "") -> Refused:
    return Refused(defaults, hint)


Kind = Literal["effect", "label", "refused"]


class FieldRow(NamedTuple):
    """A field of a request, by its path, or an unsupported kind of object.

    `stream_options.include_usage` is a field of an object, `tools[].function` one of a list's elements. If several
    kinds of objects have a field of that name, the path has the kind: `messages[role=tool].content`, or
    `thinking{type=adaptive}.display` without a list. `input[type=computer_call]` is an unsupported kind.
    """

    field: str
    kind: Kind
    note: str


def table(model: type[BaseModel]) -> Iterator[FieldRow]:
    """List every field of a request; one that contains objects is followed by their fields."""
    for name, field in own_names(model).items():
        yield from _rows(name, field)
    if issubclass(model, Wire):
        for name, unsupported in model.unsupported.items():
            yield FieldRow(name, "refused", unsupported.note)


def _rows(path: str, field: FieldInfo) -> Iterator[FieldRow]:
    yield FieldRow(path, "label" if LABEL in field.metadata else "effect", _note(field))
    refused = next((item for item in field.metadata if isinstance(item, RefusedKinds)), None)
    for objects in _objects(field.annotation, path, field.discriminator, refused):
        yield from objects.rows()


def _note(field: FieldInfo) -> str:
    words = " ".join((field.description or "").split())
    return words or f"One of: {', '.join(values)}." if (values := _literals(field.annotation)) else words


def _literals(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) is Literal else ()


class _Objects(NamedTuple):
    """The objects that one field of a request may contain, distinguished by their field `tag`."""

    path: str
    tag: str
    members: tuple[type[Wire], ...]
    refused: tuple[str, ...]  # further kinds

    def rows(self) -> Iterator[FieldRow]:
        """The tag of all kinds, then the fields of each, then the unsupported kinds."""
        names = Counter(name for member in self.members for name in (*own_names(member), *member.unsupported))
        if len(self.members) > 1:
            names_of_kinds = ", ".join(kind for member in self.members for kind in self._kinds(member))
            yield FieldRow(f"{self.path}.{self.tag}", "effect", f"One of: {names_of_kinds}.")
            del names[self.tag]
        for member in self.members:
            for name, field in own_names(member).items():
                if names[name]:
                    yield from _rows(self._inside(member, name, names[name]), field)
            for name, unsupported in member.unsupported.items():
                yield FieldRow(self._inside(member, name, names[name]), "refused", unsupported.note)
        for kind in self.refused:
            yield FieldRow(self._of(kind), "refused", f"Not supported: a 400 that names {self.tag}.")

    def _inside(self, member: type[Wire], name: str, num_owners: int) -> str:
        """The path of a field, with the kind of its object if several kinds have a field of that name."""
        return f"{self.path if num_owners == 1 else self._of(*self._kinds(member))}.{name}"

    def _kinds(self, member: type[Wire]) -> tuple[str, ...]:
        return _literals(member.model_fields[self.tag].annotation)

    def _of(self, *kinds: str) -> str:
        kind = f"{self.tag}={'|'.join(kinds)}"
        return f"{self.path[:-2]}[{kind}]" if self.path.endswith("[]") else f"{self.path}{{{kind}}}"


def _objects(annotation: Any, path: str, tag: Any = None, refused: RefusedKinds | None = None) -> Iterator[_Objects]:
    """The objects that a value of this type may be, or may contain as elements of a list."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        tag = next((part.discriminator for part in parts if isinstance(part, FieldInfo)), tag)
        refused = next((part for part in parts if isinstance(part, RefusedKinds)), refused)
        yield from _objects(parts[0], path, tag, refused)
    elif origin is list:
        yield from _objects(parts[0], f"{path}[]")
    elif origin in (Union, types.UnionType):
        members = tuple(part for part in parts if _is_object(part))
        if members:
            yield _Objects(path, str(tag), members, refused.names if refused else ())
        for part in parts:
            if part not in members:
                yield from _objects(part, path)
    elif _is_object(annotation):
        yield _Objects(path, refused.tag if refused else "", (annotation,), refused.names if refused else ())


def _is_object(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Wire)


def kinds(model: type[BaseModel]) -> dict[str, Kind]:
    """The kind of each top-level field of a request."""
    own = {*own_names(model), *(model.unsupported if issubclass(model, Wire) else ())}
    return {row.field: row.kind for row in table(model) if row.field in own}


def clash(message: LiteralString) -> PydanticCustomError:
    """An error for a field that excludes another; raised by the validator of the later one."""
    return PydanticCustomError("clash", message)


class OneError:
    """Annotates a union of plain types: a value of none of them is one error, not one for each."""

    def __init__(self, message: LiteralString) -> None:
        self.message = message

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        assert schema["type"] == "union"
        return {**schema, "custom_error_type": "union_type", "custom_error_message": self.message}
