"""What the SDKs know inside of objects and lists that a request must know too: their types and ours, side by side."""

from __future__ import annotations

import collections.abc
import inspect
import types
import typing
from typing import Any

from pydantic.fields import FieldInfo
from typing_extensions import is_typeddict

from server.http.fields import RefusedKinds, Wire

TAGS = ("type", "role")


def parts(annotation: Any) -> list[tuple[Any, bool]]:
    """The plain types of a value, and whether each is a list's element."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Annotated, typing.Required, typing.NotRequired):
        return parts(args[0])
    if origin in (typing.Union, types.UnionType):
        return [part for arg in args for part in parts(arg)]
    if origin in (list, collections.abc.Iterable, collections.abc.Sequence):
        return [(part, True) for part, _ in parts(args[0])]
    return [(annotation, False)]


def refused_kinds(annotation: Any, metadata: Any = ()) -> set[str]:
    """The kinds that any part of our annotation refuses by name."""
    own = {name for mark in metadata if isinstance(mark, RefusedKinds) for name in mark.names}
    args = typing.get_args(annotation)
    marks = getattr(annotation, "__metadata__", ())
    inner = [refused_kinds(arg) for arg in args if not isinstance(arg, str)]
    return own.union(*inner, {name for mark in marks if isinstance(mark, RefusedKinds) for name in mark.names})


def literals(annotation: Any) -> set[str]:
    return {value for part, _ in parts(annotation) for value in typing.get_args(part) if isinstance(value, str)}


def gaps(ours: type[Wire], theirs: Any, path: str = "") -> typing.Iterator[str]:
    """Fields and kinds of objects of `theirs`, a TypedDict, that `ours` neither takes nor refuses by name."""
    if ours.model_config.get("extra") == "allow":  # an object that is left out whole
        return
    fields = {field.alias or name: field for name, field in ours.model_fields.items()}
    for name, hint in typing.get_type_hints(theirs).items():
        if name in ours.unsupported:
            continue
        if name not in fields:
            yield f"{path}{name}"
        else:
            yield from inner_gaps(fields[name], hint, f"{path}{name}")


def inner_gaps(field: FieldInfo, hint: Any, path: str) -> typing.Iterator[str]:
    objects = [
        (part, many) for part, many in parts(field.annotation) if inspect.isclass(part) and issubclass(part, Wire)
    ]
    refused = refused_kinds(field.annotation, field.metadata)
    for theirs, many in parts(hint):
        if not is_typeddict(theirs) or (not objects and not refused):
            continue
        hints = typing.get_type_hints(theirs)
        tag = next((tag for tag in TAGS if tag in hints and literals(hints[tag])), None)
        kinds = literals(hints[tag]) if tag else set()
        for kind in sorted(kinds) or [None]:
            place = f"{path}{'[]' if many else ''}" + (f"({kind})" if kind else "")
            if kind in refused:
                continue
            own = [part for part, is_many in objects if is_many == many and takes(part, tag, kind)]
            if not own:
                yield place
            for part in own:
                yield from gaps(part, theirs, f"{place}.")


def takes(ours: type[Wire], tag: str | None, kind: str | None) -> bool:
    return tag not in ours.model_fields or kind in literals(ours.model_fields[tag].annotation)
