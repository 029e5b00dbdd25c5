"""Errors in Anthropic's form: `{"type": "error", "error": {"type", "message"}, "request_id"}`."""

from __future__ import annotations

import json
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from ...http.errors import CONTEXT_CODE, ApiError, ErrorForm
from ...http.openapi import JsonObject


class MessagesProblem(JsonObject):
    """What went wrong; `param` and `code` are Pequod's additions to Anthropic's form."""

    type: str
    message: str
    param: str | None
    code: str | None
    details: dict[str, Any] | UnsetType = UNSET


class MessagesError(JsonObject):
    """An error in Anthropic's form."""

    type: Literal["error"]
    error: MessagesProblem
    request_id: str


TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def envelope(error: ApiError, request_id: str) -> bytes:
    """Return the error as JSON."""
    kind = TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    # Agents look for these words, and shorten the conversation.
    message = f"prompt is too long: {error.message}" if error.code == CONTEXT_CODE else error.message
    problem = MessagesProblem(kind, message, error.param, error.code)
    if error.param == "thread":
        # The tool runner of Anthropic's SDK tries to use a thread first; this makes it continue without one.
        problem.details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    body = msgspec.to_builtins(MessagesError("error", problem, request_id))
    return json.dumps(body, separators=(",", ":")).encode()


FORM = ErrorForm("/v1/messages", envelope, b"request-id")
