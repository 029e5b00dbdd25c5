"""The log lines of refused requests: what was refused and why, without anything that a client wrote."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Iterable

from starlette.routing import BaseRoute
from starlette.types import Scope

from .errors import ApiError
from .fields import Wire, own_names, subclasses

# Probes and pages, which are called all the time.
QUIET = frozenset(("/live", "/ready", "/health", "/version", "/metrics", "/docs", "/openapi.json"))
PARAMETERS = frozenset(("X-Deadline-Ms", "after", "before", "limit", "order", "starting_after"))  # not of bodies
UNKNOWN = "*"  # in place of a word that a client has chosen

log = logging.getLogger("pequod.request")


def log_refusal(error: ApiError, method: str, scope: Scope, request_id: str = "") -> None:
    """Log one line: at the level debug for a path of QUIET, at info for the others."""
    route = getattr(scope.get("route"), "path", None)
    path = route or known_path(scope["path"], getattr(scope.get("app"), "routes", ()))
    figures = {"id": request_id, "method": method, "path": path, "status": error.status, "code": error.code}
    if error.param is not None:
        figures["param"] = known_param(error.param)
    level = logging.DEBUG if path in QUIET else logging.INFO
    shown = {name: value for name, value in figures.items() if value not in (None, "")}
    log.log(level, "refused", extra={"fields": shown})


def known_path(path: str, routes: Iterable[BaseRoute]) -> str:
    """Return a path that has no route, with only those of its words that are in the paths of routes."""
    words = {word for route in routes for word in getattr(route, "path", "").split("/")}
    return "/".join(word if word in words else UNKNOWN for word in path.split("/")[:16])


def known_param(param: str) -> str:
    """Return the path of a field, with only the names of fields that the APIs have."""
    return re.sub(r"[^.\[\]]+", lambda word: word[0] if word[0].isdecimal() or word[0] in fields() else UNKNOWN, param)


@functools.cache
def fields() -> frozenset[str]:
    """Return the names of all fields of requests and of the objects in them, and of other parameters."""
    kinds = list(subclasses(Wire))
    return PARAMETERS | frozenset(name for kind in kinds for name in (*own_names(kind), *kind.unsupported))
