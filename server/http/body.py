"""Request bodies: strict parsing of bytes into a pydantic model, or a 400 that names the field."""

from __future__ import annotations

import itertools
import math
from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.routing import BaseRoute

from .auth import UserDep
from .errors import ApiError, from_validation, invalid
from .fields import Wire, own_names, subclasses

M = TypeVar("M", bound=BaseModel)

# Names, arrays and objects of one body. A long conversation has tens of thousands. A million unknown names would be a
# million errors, which would block the event loop for seconds.
MAX_NODES = 1 << 16
NODES = (b":", b"[", b"{")  # each begins one, outside of strings
# Elements of all arrays, which includes prompts of token ids: OpenAI accepts 300,000 in one embedding request, and half
# a million would block the event loop for a tenth of a second. A longer prompt can be sent as text.
MAX_ELEMENTS = 320_000
MAX_STRINGS = 4 * MAX_NODES  # names, their values, and the strings in arrays
FEW_QUOTES = 1 << 14  # a loop over them takes some milliseconds
FEW = 64  # errors that are examined, and elements per array that are searched for the first of more errors

IS_BACKSLASH = bytes(byte == ord("\\") for byte in range(256))
# Every digit as 0, every E as e: the shapes of numbers, which are then found in time linear in the body.
SHAPES = bytes(0x30 if chr(byte).isdecimal() else 0x65 if byte in b"eE" else byte for byte in range(256))


def parse(model: type[M], raw: bytes, ignore_fields: Collection[str] = ()) -> M:
    """Parse a body as `model`; raises 400 with the field as param.

    Refuses anything but strict JSON in UTF-8 (a byte order mark, NaN, Infinity, numbers beyond a float, lone
    surrogates, trailing text), more than about 200 levels of nesting (the parser's limit), more than MAX_NODES names,
    arrays and objects, more than MAX_ELEMENTS elements, and fields that `model` forbids. The last value of a repeated
    key counts, as in other JSON parsers. `ignore_fields` names top-level fields to drop.
    """
    bare = without_strings(raw)
    check_size(bare)
    document = read(raw)
    if is_suspect(bare) and not _is_finite(document):
        raise _not_json(raw, "it has a number that is too large")
    if isinstance(document, dict):
        for name in ignore_fields:
            document.pop(name, None)
    # Parsed first and then validated: for many tokens this is as fast as pydantic's own parser, and the document is
    # needed to locate an error.
    try:
        return model.model_validate(document)
    except ValidationError as error:
        raise _refusal(error, model, document) from None


def read(raw: bytes) -> Any:
    """Parse JSON; raises 400."""
    try:
        return from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise _not_json(raw, str(error)) from None


def without_strings(raw: bytes) -> bytes:
    """Remove the strings from JSON. Raises 400 for too many strings, and for one without an end."""
    num_quotes = raw.count(b'"')
    are_few = num_quotes <= FEW_QUOTES
    if not are_few and b'\\"' in raw:
        # Only with many quotes: of a body with few, nearly all bytes may be backslashes, which are slow to replace.
        raw = raw.replace(b"\\\\", b"").replace(b'\\"', b"")  # the remaining quotes delimit strings
        num_quotes = raw.count(b'"')
    if num_quotes > 2 * MAX_STRINGS:
        raise too_complex(MAX_STRINGS, "strings")
    pieces = raw.split(b'"')
    has_escapes = are_few and any(piece.endswith(b"\\") for piece in pieces)
    outside, is_whole = _outside(pieces) if has_escapes else (pieces[::2], len(pieces) % 2 == 1)
    if not is_whole:
        raise _not_json(raw, "it has an unterminated string")
    return b"".join(outside)


def _outside(pieces: list[bytes]) -> tuple[list[bytes], bool]:
    """Return the pieces between quotes that are outside of strings, and whether the last string is terminated."""
    outside: list[bytes] = []
    is_inside = False
    for piece in pieces:
        if is_inside and piece.endswith(b"\\") and backslashes(piece) % 2:
            continue  # the next quote is escaped
        if not is_inside:
            outside.append(piece)
        is_inside = not is_inside
    return outside, is_inside  # the loop has counted a quote after the last piece


def backslashes(piece: bytes) -> int:
    """Count the trailing backslashes; for a string of only those, three times as fast as `rstrip`."""
    return len(piece) - 1 - piece.translate(IS_BACKSLASH).rfind(b"\0")


def check_size(bare: bytes) -> None:
    """Raise 400 for a body, given without its strings, that would take too long to parse."""
    for symbols, limit, unit in (((b",",), MAX_ELEMENTS, "elements"), (NODES, MAX_NODES, "names, arrays and objects")):
        if sum(bare.count(symbol) for symbol in symbols) > limit:
            raise too_complex(limit, unit)


def too_complex(limit: int, unit: str) -> ApiError:
    return invalid(f"Invalid request: the body has more than {limit} {unit}.", None, "body_too_complex")


def is_suspect(bare: bytes) -> bool:
    """Whether it may contain a number that is not JSON or too large for a float."""
    shape = bare.translate(SHAPES)
    return any(word in bare for word in (b"NaN", b"Infinity")) or any(
        number in shape for number in (b"e000", b"e+000", b"0" * 200)
    )


def _not_json(raw: bytes, reason: str) -> ApiError:
    reason = "it begins with a byte order mark" if raw.startswith(b"\xef\xbb\xbf") else reason
    return invalid(f"The request body is not valid JSON: {reason}.", None, "invalid_json")


def _refusal(error: ValidationError, model: type[BaseModel], document: Any) -> ApiError:
    """Return the error for a body. Choosing one of 60,000 would take longer than finding them, so few are examined."""
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
    # At the top level the location is the field. A deeper one may name branches of our types, unlike the document.
    is_deep = any(len(item["loc"]) > 1 for item in details)
    return from_validation(error, document if is_deep else None)


def shortened(value: Any, known: Collection[str]) -> Any:
    """The document with FEW elements of each array and, in addition to the `known` names, one name of each object."""
    if isinstance(value, list):
        return [shortened(item, known) for item in value[:FEW]]
    if isinstance(value, dict):
        other = {*itertools.islice((name for name in value if name not in known), 1)}
        return {name: shortened(item, known) for name, item in value.items() if name in known or name in other}
    return value


def names(model: type[BaseModel]) -> set[str]:
    """The names of all fields of a request and of the objects in requests."""
    wires = [model, *subclasses(Wire)]
    own = {name for kind in wires for name in own_names(kind)}
    return own.union(*(kind.unsupported for kind in wires if issubclass(kind, Wire)))


def _is_finite(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, dict):
        return all(_is_finite(item) for item in value.values())
    return all(_is_finite(item) for item in value) if isinstance(value, list) else True


def body(model: type[M]) -> Callable[[Request, UserDep], Awaitable[M]]:
    """A dependency that returns the parsed body: `Annotated[ChatRequest, Depends(body(ChatRequest))]`.

    It depends on the role, so a request without a key is refused before its body is read.
    """

    async def read_body(request: Request, _: UserDep) -> M:
        return parse(model, await request.body(), request.app.state.pequod.settings.ignore_fields)

    read_body.model = model  # type: ignore[attr-defined]
    return read_body


def models(routes: Iterable[BaseRoute]) -> dict[str, type[BaseModel]]:
    """The model of each path whose body `body` reads; of several paths with the same model, the first."""
    found: dict[str, type[BaseModel]] = {}
    for route in routes:
        for dependency in getattr(getattr(route, "dependant", None), "dependencies", ()):
            model = getattr(dependency.call, "model", None)
            if model is not None and model not in found.values():
                found[getattr(route, "path", "")] = model
    return found
