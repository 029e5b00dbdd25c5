"""The chat page at /, a client of /v1/models and /v1/chat/completions like any other.

Its files need no key: they hold nothing of a user's or of the server's. The page asks for a key when an API does.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from fastapi import APIRouter, Depends, HTTPException, Request, Response
from fastapi.responses import RedirectResponse

from ...http.auth import public
from ...state import AppDep

router = APIRouter(tags=["operation"])
PUBLIC = [Depends(public)]
MEDIA_TYPES = {
    "page.css": "text/css",
    "page.js": "text/javascript",
    "events.js": "text/javascript",
    "markdown.js": "text/javascript",
    "icon.svg": "image/svg+xml",
}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"  # no text can become markup
    ),
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # the files of two releases would not fit together
}


@router.get("/", dependencies=PUBLIC, include_in_schema=False)
async def index(request: Request, app: AppDep) -> Response:
    """The chat page; with --no-webui a redirect to the API page."""
    if not app.settings.webui:
        return RedirectResponse(request.scope.get("root_path", "") + "/docs")
    return Response(contents("index.html"), media_type="text/html", headers=HEADERS)


@router.get("/webui/{name}", dependencies=PUBLIC, include_in_schema=False)
async def asset(name: str, app: AppDep) -> Response:
    """A script or the style of the chat page."""
    if not app.settings.webui or name not in MEDIA_TYPES:
        raise HTTPException(404)
    return Response(contents(name), media_type=MEDIA_TYPES[name], headers=HEADERS)


@cache
def contents(name: str) -> bytes:
    """Return a file of the page."""
    return Path(__file__).with_name(name).read_bytes()
