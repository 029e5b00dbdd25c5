"""Request bodies: from raw bytes to a pydantic model, strictly, or a 400 that names the field."""

from __future__ import annotations

import itertools
import math
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.routing import BaseRoute

from .auth import UserDep
from .errors import ApiError, from_validation, invalid
from .fields import Wire, own_names

M = TypeVar("M", bound=BaseModel)

# Names, arrays and objects of one body. A long conversation has tens of thousands; each of a million unknown names
# would be an error of its own, for seconds in which no other request gets on.
MAX_NODES = 1 << 16
NODES = (b":", b"[", b"{")  # each begins one, outside of strings
# Elements of all arrays, so also tokens of prompts that come as ids: OpenAI takes 300,000 in one request of embeddings,
# and half a million would hold the event loop for a tenth of a second. A longer prompt can come as text.
MAX_ELEMENTS = 320_000
MAX_TEXTS = 4 * MAX_NODES  # names, their values, and the texts of arrays, none of which takes very many
FEW_MARKS = 1 << 14  # a loop over them takes some milliseconds
FEW = 64  # errors that are told apart, and elements of an array in which the first of more errors is looked for

IS_BACKSLASH = bytes(byte == ord("\\") for byte in range(256))
# Every digit as 0, every E as e: with it numbers are recognized by what they look like, in time linear in the body.
SHAPES = bytes(0x30 if chr(byte).isdecimal() else 0x65 if byte in b"eE" else byte for byte in range(256))


def parse(model: type[M], raw: bytes, ignore_fields: Collection[str] = ()) -> M:
    """The body as `model`; raises 400 with the field as param.

    Refused: what is not strict JSON in UTF-8 (a byte order mark, NaN, Infinity, numbers beyond a float, lone
    surrogates, trailing text), more than about 200 levels of nesting (the parser's own bound), more than MAX_NODES
    names, arrays and objects, more than MAX_ELEMENTS elements, and fields that `model` forbids. Of a key that is
    written twice the last one counts, as in every JSON parser of note. `ignore_fields` names top-level fields to drop.
    """
    bare = without_texts(raw)
    check_size(bare)
    document = read(raw)
    if is_suspect(bare) and not _is_finite(document):
        raise _not_json(raw, "it holds a number that is too large")
    if isinstance(document, dict):
        for name in ignore_fields:
            document.pop(name, None)
    # Read first and then validated: of very many tokens this takes no longer than pydantic's own reading, and where
    # they are refused the document is there to name the place by.
    try:
        return model.model_validate(document)
    except ValidationError as error:
        raise _refusal(error, model, document) from None


def read(raw: bytes) -> Any:
    """The body as plain Python; raises 400 when it is not JSON."""
    try:
        return from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise _not_json(raw, str(error)) from None


def without_texts(raw: bytes) -> bytes:
    """What stands outside of texts. Raises 400 for very many texts, and for one that has no end."""
    num_marks = raw.count(b'"')
    are_few = num_marks <= FEW_MARKS
    if not are_few and b'\\"' in raw:
        # Few are looked at one by one: nearly as many bytes as these may be backslashes, which are slow to replace.
        raw = raw.replace(b"\\\\", b"").replace(b'\\"', b"")  # every mark that is left is an end of a text
        num_marks = raw.count(b'"')
    if num_marks > 2 * MAX_TEXTS:
        raise too_complex(MAX_TEXTS, "texts")
    pieces = raw.split(b'"')
    has_escapes = are_few and any(piece.endswith(b"\\") for piece in pieces)
    outside, is_whole = _outside(pieces) if has_escapes else (pieces[::2], len(pieces) % 2 == 1)
    if not is_whole:
        raise _not_json(raw, "a text in it has no end")
    return b"".join(outside)


def _outside(pieces: list[bytes]) -> tuple[list[bytes], bool]:
    """Of what quotation marks divide, that which is outside of texts; and whether the last text has an end."""
    outside: list[bytes] = []
    is_inside = False
    for piece in pieces:
        if is_inside and piece.endswith(b"\\") and backslashes(piece) % 2:
            continue  # the mark behind it is escaped
        if not is_inside:
            outside.append(piece)
        is_inside = not is_inside
    return outside, is_inside  # as if a mark stood behind the last piece


def backslashes(piece: bytes) -> int:
    """How many stand at the end. `rstrip` takes three times as long for a text of nothing else."""
    return len(piece) - 1 - piece.translate(IS_BACKSLASH).rfind(b"\0")


def check_size(bare: bytes) -> None:
    """Raise 400 for a body that is so complex that nobody else would be served while it is parsed. `bare`: what it has
    outside of texts."""
    for marks, most, told in (((b",",), MAX_ELEMENTS, "elements"), (NODES, MAX_NODES, "names, arrays and objects")):
        if count(bare, marks) > most:
            raise too_complex(most, told)


def too_complex(most: int, told: str) -> ApiError:
    return invalid(f"Invalid request: the body has more than {most} {told}.", None, "body_too_complex")


def count(bare: bytes, marks: Iterable[bytes]) -> int:
    return sum(bare.count(mark) for mark in marks)


def is_suspect(bare: bytes) -> bool:
    """Whether a number may hide in it that JSON does not have or that no float holds."""
    shape = bare.translate(SHAPES)
    return any(word in bare for word in (b"NaN", b"Infinity")) or any(
        number in shape for number in (b"e000", b"e+000", b"0" * 200)
    )


def _not_json(raw: bytes, reason: str) -> ApiError:
    reason = "it begins with a byte order mark" if raw.startswith(b"\xef\xbb\xbf") else reason
    return invalid(f"The request body is not valid JSON: {reason}.", None, "invalid_json")


def _refusal(error: ValidationError, model: type[BaseModel], document: Any) -> ApiError:
    """What is told of a body's errors. To tell one out of 60,000 would take longer than to find them all."""
    num_errors = error.error_count()
    if num_errors > FEW:
        document = shortened(document, names(model))
        try:
            model.model_validate(document)
        except ValidationError as fewer:
            error = fewer
        if error.error_count() == num_errors:
            return invalid(f"Invalid request: the body has {num_errors} errors.", None)
    details = error.errors(include_url=False, include_input=False)
    # At the top an error's place is its field. A deeper one may name branches of our own types: the document tells.
    is_deep = any(len(item["loc"]) > 1 for item in details)
    return from_validation(error, document if is_deep else None)


def shortened(value: Any, known: Collection[str]) -> Any:
    """The document with FEW elements of each array and, beside the `known` ones, one name of each object."""
    if isinstance(value, list):
        return [shortened(item, known) for item in value[:FEW]]
    if isinstance(value, dict):
        other = {*itertools.islice((name for name in value if name not in known), 1)}
        return {name: shortened(item, known) for name, item in value.items() if name in known or name in other}
    return value


def names(model: type[BaseModel]) -> set[str]:
    """What the fields of a request and of all objects in requests are called."""
    wires = [model, *_kinds(Wire)]
    own = {name for kind in wires for name in own_names(kind)}
    return own.union(*(kind.unsupported for kind in wires if issubclass(kind, Wire)))


def _kinds(kind: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for below in kind.__subclasses__():
        yield below
        yield from _kinds(below)


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
    """What each path takes as its body, where `body` reads it; of several with the same body the first."""
    found: dict[str, type[BaseModel]] = {}
    for route in routes:
        for needed in getattr(getattr(route, "dependant", None), "dependencies", ()):
            model = getattr(needed.call, "model", None)
            if model is not None and model not in found.values():
                found[getattr(route, "path", "")] = model
    return found
