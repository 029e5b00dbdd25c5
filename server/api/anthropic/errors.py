"""Errors in Anthropic's form: `{"type": "error", "error": {"type", "message"}, "request_id"}`."""

from __future__ import annotations

import json
from typing import Any

from ...http.errors import CONTEXT_CODE, ApiError, ErrorForm

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
    """The error as JSON; `param` and `code` are what clients of ours find in it besides Anthropic's fields."""
    kind = TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    # Agents look for these words, and shorten the conversation.
    message = f"prompt is too long: {error.message}" if error.code == CONTEXT_CODE else error.message
    problem: dict[str, Any] = {"type": kind, "message": message, "param": error.param, "code": error.code}
    if error.param == "thread":
        # The tool runner of Anthropic's SDK asks for a thread first, and by these words goes on without.
        problem["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    body = {"type": "error", "error": problem, "request_id": request_id}
    return json.dumps(body, separators=(",", ":")).encode()


FORM = ErrorForm("/v1/messages", envelope, b"request-id")
