"""The log lines of requests that got an error: which one and why, without anything that a client wrote."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Iterable

from starlette.routing import BaseRoute
from starlette.types import Scope

from .body import names
from .errors import ApiError, own_path
from .fields import Wire

# Probes and pages, which are called all the time.
QUIET = frozenset(("/live", "/ready", "/health", "/version", "/metrics", "/docs", "/openapi.json"))
# Parameters that are not in bodies.
PARAMETERS = frozenset(("X-Deadline-Ms", "after", "before", "limit", "order", "response_id", "starting_after"))
UNKNOWN = "*"  # in place of a word that a client has chosen
INDEX = re.compile(r"[0-9]{1,5}")  # of an element; a longer number is a name, perhaps that of a phone or a card

log = logging.getLogger("pequod.request")


def log_refusal(error: ApiError, method: str = "", scope: Scope | None = None, request_id: str = "") -> None:
    """Log one line, `refused` or `failed`: at the level debug for a path of QUIET and an idle connection, else info.

    Without a scope, what came was not a request.
    """
    path = "" if scope is None else route_path(scope)
    figures = {"id": request_id, "method": method, "path": path, "status": error.status, "code": error.code}
    if error.param is not None:
        figures["param"] = known_param(error.param)
    # Browsers and load balancers open connections in advance.
    level = logging.DEBUG if path in QUIET or error.code == "head_timeout" else logging.INFO
    shown = {name: value for name, value in figures.items() if value not in (None, "")}
    # 503: the server could not accept the request. A 500 or 504 ended one that it had accepted.
    log.log(level, "failed" if error.status in (500, 504) else "refused", extra={"fields": shown})


def route_path(scope: Scope) -> str:
    """Return the path of a request's route or, if it has none, what of its own is known."""
    route = getattr(scope.get("route"), "path", None)
    return route or known_path(own_path(scope), getattr(scope.get("app"), "routes", ()))


def known_path(path: str, routes: Iterable[BaseRoute]) -> str:
    """Return a path that has no route, with only those of its words that are in the paths of routes."""
    words = {word for route in routes for word in getattr(route, "path", "").split("/")}
    return "/".join(word if word in words else UNKNOWN for word in path.split("/")[:16])


def known_param(param: str) -> str:
    """Return the path of a field, with only the names of fields that the APIs have."""

    def known(word: re.Match[str]) -> str:
        return word[0] if word[0] in fields() or INDEX.fullmatch(word[0]) else UNKNOWN

    return re.sub(r"[^.\[\]]+", known, param)


@functools.cache
def fields() -> frozenset[str]:
    """Return the names of all fields of requests and of the objects in them, and of other parameters."""
    return PARAMETERS | names(Wire)
