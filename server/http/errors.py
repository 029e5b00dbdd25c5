"""Error responses: `{"error": {"message", "type", "param", "code"}}`, or the form of an API that has its own.

Such an API has an ErrorForm, which the middleware sets in the request's scope for `ApiError.response`. Errors without a
request (connection.py) have OpenAI's form.

Messages are fixed sentences that name fields and limits, and never repeat a value of more than SHOWN characters.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import traceback
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NamedTuple, cast

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from pydantic_core import ErrorDetails
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route
from starlette.types import Scope

from engine import EngineDied, EngineError, RequestError

from .excerpt import shown

CONTEXT_CODE = "context_length_exceeded"

# Seconds in Retry-After: until another process has started or a queue has moved, and until a supervisor restarts ours.
RETRY_S, FAILED_S = 5, 30

# The beginnings of pydantic's messages.
PYDANTIC_SUBJECT = re.compile(r"^(Input|String|List|Dictionary) should")
# Instead of messages that use Python's names for types.
JSON_TYPES = {
    **dict.fromkeys(("model_type", "model_attributes_type", "dict_type"), "must be an object"),
    "list_type": "must be an array",
    "string_type": "must be a string",
    "bool_type": "must be true or false",
    **dict.fromkeys(("int_type", "int_parsing"), "must be an integer"),
    "float_type": "must be a number",
}
# Kinds of content that OpenAI and Anthropic have.
MEDIA = {
    **dict.fromkeys(("image", "image_url", "input_image"), "images are"),
    **dict.fromkeys(("audio", "input_audio"), "audio is"),
    **dict.fromkeys(("document", "file", "input_file"), "files are"),
}

log = logging.getLogger("pequod.server")


@dataclass(eq=False)
class ApiError(Exception):
    """An error response."""

    status: int
    message: str
    _: KW_ONLY
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    retry_after: int | None = None  # seconds
    headers: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.message

    def body(self) -> bytes:
        """The error as JSON, also for an error event in a stream."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return json.dumps({"error": error}, separators=(",", ":")).encode()

    def response(self, scope: Scope) -> Response:
        """The response to the request of this scope, in the form of its API."""
        headers = dict(self.headers)
        if self.retry_after is not None:
            headers["Retry-After"] = str(max(1, self.retry_after))
        state = scope.setdefault("state", {})
        state["refusal"] = self  # for the log
        form: ErrorForm | None = state.get("error_form")
        body = self.body() if form is None else form.body(self, state["request_id"])
        return Response(body, self.status, headers, media_type="application/json")


class ErrorForm(NamedTuple):
    """The errors of an API other than OpenAI's."""

    path: str  # a prefix of the API's paths
    body: Callable[[ApiError, str], bytes]  # from the error and the request id
    id_header: bytes  # an additional header with the request id

    def covers(self, scope: Scope) -> bool:
        """Whether a request belongs to the API."""
        path = own_path(scope)
        return path == self.path or path.startswith(f"{self.path}/")


def own_path(scope: Scope) -> str:
    """Return the path of a request without --root-path."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def invalid(message: str, param: str | None = None, code: str | None = "invalid_value") -> ApiError:
    """400: the request is invalid; `param` names the field."""
    return ApiError(400, message, param=param, code=code)


def unauthorized(message: str) -> ApiError:
    """401: no valid API key."""
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def not_found(message: str, param: str | None = None, code: str = "not_found") -> ApiError:
    return ApiError(404, message, param=param, code=code)


def unavailable(message: str, code: str, retry_after: int = RETRY_S) -> ApiError:
    """503: this server cannot accept the request now, from any caller."""
    return ApiError(503, message, type="server_error", code=code, retry_after=retry_after)


def deadline(message: str = "The request took longer than its time limit.") -> ApiError:
    """504: --request-timeout or the client's deadline has passed."""
    return ApiError(504, message, type="server_error", code="deadline_exceeded")


def from_validation(error: ValidationError | RequestValidationError, document: Any = None) -> ApiError:
    """400 that names the field by its path in the client's document, such as messages.0.role."""
    details: Sequence[ErrorDetails]
    if isinstance(error, ValidationError):
        details = error.errors(include_url=False, include_input=False)
    else:  # parameters that FastAPI validates: the location begins with query or path
        details = [cast("ErrorDetails", {**item, "loc": item["loc"][1:]}) for item in error.errors()]
    # A union reports an error for each of its branches. The client meant the one that matches the document furthest;
    # of several, an unsupported one, then one that accepts values of this type.
    branches = [(_path(item, document), item) for item in details if item["loc"][:1] == details[0]["loc"][:1]]
    path, item = max(branches, key=lambda branch: (len(branch[0]), _rank(branch[1]["type"])))
    param = ".".join(shown(str(part)) for part in path) if path else None
    kinds = dict.fromkeys(
        JSON_TYPES[each["type"]] for own, each in branches if own == path and each["type"] in JSON_TYPES
    )
    if param is not None and item["type"] in JSON_TYPES and len(kinds) > 1:  # a union of several types
        accepted = " or ".join(kind.removeprefix("must be ") for kind in kinds)
        return invalid(f"Invalid '{param}': must be {accepted}.", param, "invalid_type")
    return _message(item, param)


def _rank(kind: str) -> int:
    """How likely it is that an error is about what the client meant."""
    return 2 if kind == "unsupported" else 0 if kind.endswith("_type") else 1


def _path(item: ErrorDetails, document: Any) -> list[int | str]:
    """The parts of an error's location that are in the document; the others name branches of our types."""
    loc = list(item["loc"])
    if document is None or not loc:
        return loc
    last, is_missing = loc[-1], item["type"] == "missing"
    path: list[int | str] = []
    here, has_branch = document, False
    for part in loc[:-1]:
        # A branch may have the name of a field of its objects: {"type": "function", "function": {...}}. It comes first.
        if not has_branch and isinstance(here, dict) and part in (here.get("type"), here.get("role")):
            has_branch = True
        elif _has(here, part):
            path.append(part)
            here, has_branch = here[part], False
    return [*path, last] if is_missing or _has(here, last) else path


def _has(here: Any, part: int | str) -> bool:
    if isinstance(here, dict):
        return part in here
    return isinstance(here, list) and isinstance(part, int) and 0 <= part < len(here)


def _message(item: ErrorDetails, param: str | None) -> ApiError:
    kind = item["type"]
    if kind == "missing":
        return invalid(f"Missing required field: '{param}'.", param, "missing_required_parameter")
    if kind == "extra_forbidden":
        return invalid(f"Unknown field: '{param}'.", param, "unknown_parameter")
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        context = item.get("ctx", {})
        param = ".".join(filter(None, [param, str(context.get("discriminator", "")).strip("'")]))
        if kind == "union_tag_not_found":
            return invalid(f"Missing required field: '{param}'.", param, "missing_required_parameter")
        if (media := MEDIA.get(str(context.get("tag")))) is not None:
            return invalid(f"Invalid '{param}': {media} not supported, only text is.", param, "unsupported_parameter")
        return invalid(f"Invalid '{param}': must be one of {context.get('expected_tags')}.", param)
    if kind == "unsupported":
        hint = f"; {item['msg']}" if item["msg"] else ""
        return invalid(f"'{param}' is not supported{hint}.", param, "unsupported_parameter")
    text = item["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    text = PYDANTIC_SUBJECT.sub("must", text).replace(" after validation", "").rstrip(".")
    text = JSON_TYPES.get(kind, text)
    text = text.replace("must be False", "must be false").replace("must be True", "must be true")
    code = "invalid_type" if kind.endswith("_type") else "invalid_value"
    if param is None:
        return invalid(f"Invalid request: {text}.", None, code)
    return invalid(f"Invalid '{param}': {text}.", param, code)


def from_exception(error: Exception) -> ApiError:
    """Convert any exception to an error response. An unknown one is a bug.

    Its text may hold what a user wrote, so only its type and location are logged.
    """
    match error:
        case ApiError():
            return error
        case RequestError():
            return invalid(str(error), code="invalid_request")
        case EngineDied():
            message = "The engine stopped while it was processing this request."
            return unavailable(message, "engine_died")
        case EngineError():
            return unavailable("The model could not be loaded.", "model_not_loaded", FAILED_S)
        case ValidationError() | RequestValidationError():
            return from_validation(error)
        case HTTPException(status_code=404):
            return not_found("There is no such path; /docs lists those of this server.")
        case HTTPException(status_code=405):
            return ApiError(405, "This path does not support that method.", code="method_not_allowed")
        case HTTPException(status_code=status):
            return ApiError(status, "The request was refused.", headers=dict(error.headers or {}))
    log.error("%s at %s", type(error).__name__, traceback_line(error))
    return ApiError(500, "The server failed on this request.", type="server_error", code="internal_error")


def log_unhandled(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log an unhandled exception of a task or callback, as the event loop's exception handler.

    The default handler would log the exception's text and the arguments of the callback.
    """
    error = context.get("exception")
    if error is None:
        log.error("the event loop reports: %s", str(context.get("message")).partition("<")[0].strip())
    else:
        log.error("%s at %s, in a task or callback", type(error).__name__, traceback_line(error))


def traceback_line(error: BaseException) -> str:
    """The traceback of an exception in one line, innermost call first, as file:line function."""
    calls = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    return " < ".join(f"{code.co_filename}:{line} {code.co_name}" for code, line in reversed(calls[-8:]))


def install(app: FastAPI) -> None:
    """Convert every exception of a route to an error response."""

    async def handle(request: Request, error: Exception) -> Response:
        converted = from_exception(error)
        if converted.status == 405:
            converted.headers["Allow"] = ", ".join(allowed_methods(app, request.scope))
        return converted.response(request.scope)

    handler: Callable[[Request, Exception], Awaitable[Response]] = handle
    for kind in (ApiError, EngineError, ValidationError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, handler)


def allowed_methods(app: FastAPI, scope: Scope) -> list[str]:
    """The methods of all routes of a path. A route with exactly this path hides those with parameters."""
    routes = [route for route in app.routes if isinstance(route, Route) and route.matches(scope)[0] is Match.PARTIAL]
    own = [route for route in routes if not route.param_convertors]
    return sorted({method for route in own or routes for method in route.methods or ()})


# For the OpenAPI document: the form of an error, and the statuses that a route may return.
FIELDS = {"message": "string", "type": "string", "param": ["string", "null"], "code": ["string", "null"]}
ERROR = {"type": "object", "required": [*FIELDS], "properties": {name: {"type": kind} for name, kind in FIELDS.items()}}
ENVELOPE: dict[str, Any] = {"type": "object", "required": ["error"], "properties": {"error": ERROR}}
OPENAI_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": text, "content": {"application/json": {"schema": ENVELOPE}}}
    for status, text in {
        400: "The request is invalid; param names the field",
        401: "No valid API key",
        404: "No such model",
        408: "The body arrived too slowly",
        413: "The body is too large",
        429: "The caller has exceeded its share of the server; Retry-After says when to try again",
        503: "Loading, draining or full; Retry-After says when to try again",
        504: "The time limit has passed",
    }.items()
}
