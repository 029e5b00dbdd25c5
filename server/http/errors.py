"""Errors on the wire: whatever goes wrong leaves as `{"error": {"message", "type", "param", "code"}}`.

An API with a form of its own brings an ErrorForm; the middleware notes it in the request's scope, where
`ApiError.response` finds it. What never became a request (connection.py) has the first form.

Texts are fixed sentences: they name fields and limits and never repeat a value of more than SHOWN characters.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, cast

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from pydantic_core import ErrorDetails
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route
from starlette.types import Scope

from engine import EngineDied, EngineError, RequestError

from . import retry
from .excerpt import shown

CONTEXT_CODE = "context_length_exceeded"

# How pydantic begins a sentence about a value.
PYDANTIC_SUBJECT = re.compile(r"^(Input|String|List|Dictionary) should")
# What it calls by Python's names.
JSON_TYPES = {
    **dict.fromkeys(("model_type", "model_attributes_type", "dict_type"), "must be an object"),
    "list_type": "must be an array",
}

log = logging.getLogger("pequod.server")


class ApiError(Exception):
    """An answer other than the one that was asked for, with its status."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,  # seconds
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.retry_after = retry_after
        self.headers = headers or {}

    def body(self) -> bytes:
        """The envelope as JSON; also what an error event in a stream carries."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return json.dumps({"error": error}, separators=(",", ":")).encode()

    def response(self, scope: Scope) -> Response:
        """The answer to the request of this scope, in the form of the API that its path belongs to."""
        headers = dict(self.headers)
        if self.retry_after is not None:
            headers["Retry-After"] = str(max(1, self.retry_after))
        state = scope.get("state", {})
        form: ErrorForm | None = state.get("error_form")
        body = self.body() if form is None else form.body(self, state["request_id"])
        return Response(body, self.status, headers, media_type="application/json")


class ErrorForm(NamedTuple):
    """How an API that is not OpenAI's writes its errors."""

    path: str  # of the API: it and whatever is under it
    body: Callable[[ApiError, str], bytes]  # of the error and the request's id
    id_header: bytes  # a further header with the request's id

    def covers(self, scope: Scope) -> bool:
        """Whether a request belongs to the API."""
        path: str = scope["path"].removeprefix(scope.get("root_path", ""))
        return path == self.path or path.startswith(f"{self.path}/")


def invalid(message: str, param: str | None = None, code: str | None = "invalid_value") -> ApiError:
    """400: the request itself is wrong; `param` names the field."""
    return ApiError(400, message, param=param, code=code)


def unauthorized(message: str) -> ApiError:
    """401: no key, or none of ours."""
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def not_found(message: str, param: str | None = None, code: str = "not_found") -> ApiError:
    return ApiError(404, message, param=param, code=code)


def too_large(message: str) -> ApiError:
    """413: more bytes than --max-body-bytes."""
    return ApiError(413, message, code="body_too_large")


def over_share(message: str, retry_after: int) -> ApiError:
    """429: the caller has its share of the server, and the rest is kept for others."""
    return ApiError(429, message, type="rate_limit_error", code="rate_limit_exceeded", retry_after=retry_after)


def unavailable(message: str, code: str, retry_after: int) -> ApiError:
    """503: this server cannot take the request now, whoever asks."""
    return ApiError(503, message, type="server_error", code=code, retry_after=retry_after)


def deadline(message: str = "The request took longer than its time limit.") -> ApiError:
    """504: --request-timeout or the client's own deadline has passed."""
    return ApiError(504, message, type="server_error", code="deadline_exceeded")


def internal() -> ApiError:
    """500: a bug; the log has what happened, under the request's id."""
    return ApiError(500, "The server failed on this request.", type="server_error", code="internal_error")


def from_engine(error: EngineError) -> ApiError:
    """What a client is told about an error of the engine, before the first byte or in a stream's error event."""
    if isinstance(error, RequestError):
        return invalid(str(error), code="invalid_request")
    if isinstance(error, EngineDied):
        return unavailable("The engine stopped while it worked on this request.", "engine_died", retry.ENGINE_S)
    return unavailable("The model could not be loaded.", "model_not_loaded", retry.FAILED_S)


def from_validation(error: ValidationError | RequestValidationError, document: Any = None) -> ApiError:
    """400 that names the field as its path in the client's own document: messages.0.role."""
    details: Sequence[ErrorDetails]
    if isinstance(error, ValidationError):
        details = error.errors(include_url=False, include_input=False)
    else:  # what FastAPI reads itself: a place begins with query or path
        details = [cast("ErrorDetails", {**item, "loc": item["loc"][1:]}) for item in error.errors()]
    # A union reports each of its branches: the one that came furthest into the document is what the client meant,
    # and of several what is known and not supported, then the one that takes values of this type.
    rivals = [(_path(item, document), item) for item in details if item["loc"][:1] == details[0]["loc"][:1]]
    path, chosen = max(rivals, key=lambda rival: (len(rival[0]), _rank(rival[1]["type"])))
    param = ".".join(shown(str(part)) for part in path) if path else None
    return _sentence(chosen, param)


def _rank(kind: str) -> int:
    """How well an error tells what the client meant."""
    return 2 if kind == "unsupported" else 0 if kind.endswith("_type") else 1


def _path(item: ErrorDetails, document: Any) -> list[int | str]:
    """The parts of an error's place that are in the document; the rest names branches of our own types."""
    loc = list(item["loc"])
    if document is None or not loc:
        return loc
    last, is_missing = loc[-1], item["type"] == "missing"
    path: list[int | str] = []
    here = document
    for part in loc[:-1]:
        # A kind may be named like a field that its objects have: {"type": "text", "text": ...}.
        if _has(here, part) and not (_is_leaf(here[part]) and (is_missing or _has(here, last))):
            path.append(part)
            here = here[part]
    return [*path, last] if is_missing or _has(here, last) else path


def _has(here: Any, part: int | str) -> bool:
    if isinstance(here, dict):
        return part in here
    # What is no number would be compared with each one of a range.
    return isinstance(here, list) and isinstance(part, int) and 0 <= part < len(here)


def _is_leaf(value: Any) -> bool:
    return not isinstance(value, dict | list)


def _sentence(item: ErrorDetails, param: str | None) -> ApiError:
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
        return invalid(f"Invalid '{param}': must be one of {context.get('expected_tags')}.", param)
    if kind == "unsupported":
        return invalid(f"Unsupported field: '{param}'; {item['msg']}.", param, "unsupported_parameter")
    text = item["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    text = PYDANTIC_SUBJECT.sub("must", text).replace(" after validation", "").rstrip(".")
    text = JSON_TYPES.get(kind, text)
    text = text.replace("must be False", "must be false").replace("must be True", "must be true")
    code = "invalid_type" if kind.endswith("_type") else "invalid_value"
    if param is None:
        return invalid(f"Invalid request: {text}.", None, code)
    return invalid(f"Invalid '{param}': {text}.", param, code)


def from_exception(error: Exception) -> ApiError:
    """The answer to any exception; what is not known by name is a bug and is logged, without its text.

    An exception's text may hold what a user wrote, so that only its type and place are told.
    """
    match error:
        case ApiError():
            return error
        case EngineError():
            return from_engine(error)
        case ValidationError() | RequestValidationError():
            return from_validation(error)
        case HTTPException(status_code=404):
            return not_found("There is nothing under this path; /docs lists what there is.")
        case HTTPException(status_code=405):
            return ApiError(405, "This path does not take that method.", code="method_not_allowed")
        case HTTPException(status_code=status):
            return ApiError(status, "The request was refused.", headers=dict(error.headers or {}))
    log.error("%s at %s", type(error).__name__, place(error))
    return internal()


def log_stray(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log an exception that no caller catches, as the event loop's exception handler.

    The loop's own handler writes the exception's text, and the arguments of the callback that raised it.
    """
    error = context.get("exception")
    if error is None:
        log.error("the event loop reports: %s", str(context.get("message")).partition("<")[0].strip())
    else:
        log.error("%s at %s, in a task or callback that nobody waits for", type(error).__name__, place(error))


def place(error: BaseException) -> str:
    """Where an exception was raised, innermost call first, as file:line function."""
    frames = []
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        frames.append(f"{code.co_filename}:{trace.tb_lineno} {code.co_name}")
        trace = trace.tb_next
    return " < ".join(reversed(frames[-8:]))


def install(app: FastAPI) -> None:
    """Make every exception of a route leave as the envelope."""

    async def handle(request: Request, error: Exception) -> Response:
        answer = from_exception(error)
        if answer.status == 405:
            answer.headers["Allow"] = ", ".join(allowed(app, request.scope))
        return answer.response(request.scope)

    handler: Callable[[Request, Exception], Awaitable[Response]] = handle
    for kind in (ApiError, EngineError, ValidationError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, handler)


def allowed(app: FastAPI, scope: Scope) -> list[str]:
    """The methods that a path takes: a route knows only its own. A route of just this path hides those with names."""
    routes = [route for route in app.routes if isinstance(route, Route) and route.matches(scope)[0] is Match.PARTIAL]
    own = [route for route in routes if not route.param_convertors]
    return sorted({method for route in own or routes for method in route.methods or ()})


# For the API page: the form of an error, and the statuses that a route may return.
ENVELOPE: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
OPENAI_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": text, "content": {"application/json": {"schema": ENVELOPE}}}
    for status, text in {
        400: "The request is wrong; param names the field",
        401: "No valid API key",
        404: "No such model",
        408: "The body arrived too slowly",
        413: "The body is too large",
        429: "The caller has exceeded its share of the server; Retry-After says when to try again",
        503: "Loading, draining or full; Retry-After says when to try again",
        504: "The time limit has passed",
    }.items()
}
