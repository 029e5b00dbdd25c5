"""Request bodies: from raw bytes to a pydantic model, strictly, or a 400 that names the field."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json, to_json
from starlette.routing import BaseRoute

from .errors import ENVELOPE, ApiError, from_validation, invalid
from .limits import UserDep

M = TypeVar("M", bound=BaseModel)

# Names, arrays and objects of one body. A long conversation has tens of thousands; each of a million unknown names
# would be an error of its own, for seconds in which no other request gets on.
MAX_NODES = 1 << 16
NODES = (b":", b"[", b"{")  # each begins one, outside of strings
# Elements of all arrays: as many as a prompt may have tokens. 8 MB of short numbers would hold the event loop for half
# a second.
MAX_ELEMENTS = 1 << 20
MAX_TEXTS = 4 * MAX_NODES  # names, their values, and the texts of arrays, none of which takes very many

REF = "#/components/schemas/{model}"

# Every digit as 0, every E as e: with it numbers are recognized by what they look like, in time linear in the body.
SHAPES = bytes(0x30 if chr(byte).isdecimal() else 0x65 if byte in b"eE" else byte for byte in range(256))


def parse(model: type[M], raw: bytes, ignore_fields: Collection[str] = ()) -> M:
    """The body as `model`; raises 400 with the field as param.

    Refused: what is not strict JSON in UTF-8 (a byte order mark, NaN, Infinity, numbers beyond a float, lone
    surrogates, trailing text), more than about 200 levels of nesting (the parser's own bound), more than MAX_NODES
    names, arrays and objects, more than MAX_ELEMENTS elements, and fields that `model` forbids. Of a key that is
    written twice the last one counts, as in every JSON parser of note. `ignore_fields` names top-level fields to drop.
    """
    check_size(raw)
    if ignore_fields or is_suspect(raw):
        document = read(raw)
        if isinstance(document, dict) and any(name in document for name in ignore_fields):
            raw = to_json({key: value for key, value in document.items() if key not in ignore_fields})
    try:
        return model.model_validate_json(raw)
    except ValidationError as error:
        # Whatever is not strict JSON raises here.
        raise from_validation(error, read(raw)) from None


def read(raw: bytes) -> Any:
    """The body as plain Python; raises 400 when it is not JSON."""
    try:
        document = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        reason = "it begins with a byte order mark" if raw.startswith(b"\xef\xbb\xbf") else str(error)
        raise _not_json(reason) from None
    if is_suspect(raw) and not _is_finite(document):
        raise _not_json("it holds a number that is too large")
    return document


def check_size(raw: bytes) -> None:
    """Raise 400 for a body that is so complex that nobody else would be served while it is parsed."""
    limits = ((NODES, MAX_NODES, "names, arrays and objects"), ((b",",), MAX_ELEMENTS, "elements"))
    if raw.count(b'"') <= 2 * MAX_TEXTS and all(count(raw, marks) <= most for marks, most, _ in limits):
        return
    if without_escapes(raw).count(b'"') > 2 * MAX_TEXTS:
        raise too_complex(MAX_TEXTS, "texts")
    bare = without_texts(raw)
    for marks, most, told in limits:
        if count(bare, marks) > most:
            raise too_complex(most, told)


def too_complex(most: int, told: str) -> ApiError:
    return invalid(f"Invalid request: the body has more than {most} {told}.", None, "body_too_complex")


def count(raw: bytes, marks: Iterable[bytes]) -> int:
    return sum(raw.count(mark) for mark in marks)


def without_escapes(raw: bytes) -> bytes:
    """The body with every quotation mark that is left an end of a text."""
    return raw.replace(b"\\\\", b"").replace(b'\\"', b"")


def without_texts(raw: bytes) -> bytes:
    """What stands outside of texts."""
    return b"".join(without_escapes(raw).split(b'"')[::2])


def is_suspect(raw: bytes) -> bool:
    """Whether a number may hide in it that JSON does not have or that no float holds."""
    shape = raw.translate(SHAPES)
    return any(word in raw for word in (b"NaN", b"Infinity")) or any(
        number in shape for number in (b"e000", b"e+000", b"0" * 300)
    )


def _not_json(reason: str) -> ApiError:
    return invalid(f"The request body is not valid JSON: {reason}.", None, "invalid_json")


def _is_finite(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, dict):
        return all(_is_finite(item) for item in value.values())
    return all(_is_finite(item) for item in value) if isinstance(value, list) else True


def body(model: type[M]) -> Callable[[Request, UserDep], Awaitable[M]]:
    """A dependency that gives the parsed body: `asked: Annotated[ChatRequest, Depends(body(ChatRequest))]`.

    It depends on the role in turn: whoever has no key is told so before a byte of the body is read.
    """

    async def read_body(request: Request, _: UserDep) -> M:
        return parse(model, await request.body(), request.app.state.pequod.settings.ignore_fields)

    read_body.model = model  # type: ignore[attr-defined]
    return read_body


def models(routes: Iterable[BaseRoute]) -> dict[str, type[BaseModel]]:
    """What each path takes as its body, where `body` reads it."""
    found = {}
    for route in routes:
        for needed in getattr(getattr(route, "dependant", None), "dependencies", ()):
            if (model := getattr(needed.call, "model", None)) is not None:
                found[getattr(route, "path", "")] = model
    return found


def described(model: type[BaseModel]) -> dict[str, Any]:
    """For a route's `openapi_extra`: what the API page says about a body that FastAPI does not parse itself."""
    schema = model.model_json_schema(ref_template=REF)
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def streamed(event: type[BaseModel], example: str, *, is_typed: bool = False) -> dict[str, Any]:
    """For a route's `responses=`: the events of a stream, each with an `event` or an error; the last is [DONE].

    Where they are typed an error is an `event` like others, and the last one is known by its type.
    """
    schema = event.model_json_schema(ref_template=REF)
    shared = {**schema.pop("$defs", {}), event.__name__: schema}
    one_of = [{"$ref": REF.format(model=event.__name__)}, *([] if is_typed else [ENVELOPE])]
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": {"anyOf": one_of}}
    kinds = [data] if is_typed else [{"const": "[DONE]"}, data]
    events = [{"properties": {"data": told}, "required": ["data"]} for told in kinds]
    return {"text/event-stream": {"schema": {"type": "object", "anyOf": events, "$defs": shared}, "example": example}}
