"""build_app: the whole HTTP server as one ASGI app around one engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from engine import ConfigError, Engine

from .api.anthropic.errors import FORM as ANTHROPIC_ERRORS
from .api.responses.state import ResponsesState
from .api.routers import ROUTERS
from .http import errors
from .http.auth import roles
from .http.middleware import Door
from .observability.logs import StepLog
from .settings import Settings
from .state import Pequod
from .version import version

TICK_S = 0.25


class Published:
    """Answers under --root-path also where the proxy leaves it on the request's path, or where there is no proxy.

    uvicorn puts it before each path, so that it then stands there twice.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        root: str = scope.get("root_path", "")
        if scope["type"] == "http" and scope["path"].startswith(f"{root}{root}/"):
            scope["path"] = scope["path"][len(root) :]
            scope["raw_path"] = scope["raw_path"].replace(root.encode(), b"", 1)
        await self.app(scope, receive, send)


def build_app(settings: Settings, engine: Engine) -> FastAPI:
    """The app, with its state in `app.state.pequod`; its lifespan starts and closes the engine.

    Raises ConfigError when a setting turns out to be impossible.
    """
    state = Pequod(settings, engine, version())
    responses = ResponsesState(settings)
    engine.on_step.append(state.metrics.step)
    step_log = None
    if settings.step_log is not None:
        try:
            step_log = StepLog(settings.step_log)
        except OSError as error:
            raise ConfigError(f"--step-log {settings.step_log} cannot be written: {error.strerror}") from None
        engine.on_step.append(step_log.write)
        state.metrics.step_log = step_log

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        asyncio.get_running_loop().set_exception_handler(errors.log_stray)
        # Nothing here may take time: the port answers only after it.
        await engine.start()
        tasks = [asyncio.create_task(state.load(), name="load"), asyncio.create_task(tick(state), name="tick")]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await responses.background.close()
            await state.close()
            await responses.close()
            if step_log is not None:
                step_log.close()

    layers = [Middleware(Door, settings, state.limits, state.metrics.http, [ANTHROPIC_ERRORS])]
    if settings.root_path:
        layers.insert(0, Middleware(Published))
    if settings.allowed_origins:
        # Before the door, so that a page can read what it refuses.
        layers.insert(
            0,
            Middleware(
                CORSMiddleware,
                allow_origins=settings.allowed_origins,
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["*"],  # OpenAI's JavaScript client adds a dozen of its own
                expose_headers=["X-Request-Id", "Retry-After"],
            ),
        )
    app = FastAPI(
        title="Pequod",
        version=state.version,
        description="Language models over the OpenAI HTTP API.",
        docs_url=None,  # FastAPI's pages load their scripts from elsewhere; api/ops/routes.py has one that does not
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
        middleware=layers,
        # Not by include_router: it hides a router's routes in an object of its own, and their roles are read below.
        routes=[route for router in ROUTERS for route in router.routes],
    )
    app.state.pequod = state
    app.state.responses = responses
    errors.install(app)
    app.openapi = lambda: openapi(app)  # type: ignore[method-assign]
    undecided = [getattr(route, "path", str(route)) for route in app.routes if not roles(route)]
    if undecided:
        raise RuntimeError(f"routes without a role: {', '.join(undecided)}")
    return app


async def tick(state: Pequod) -> None:
    """Measure how late the event loop wakes up, and notice when the engine has failed for good."""
    while True:
        due = time.monotonic() + TICK_S
        await asyncio.sleep(TICK_S)
        state.metrics.loop_lag.observe(max(0.0, time.monotonic() - due))
        state.watch()


def openapi(app: FastAPI) -> dict[str, Any]:
    """The description of the API, with the bodies that routes read themselves."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        shared = schema.setdefault("components", {}).setdefault("schemas", {})
        for operations in schema["paths"].values():
            for operation in operations.values():
                operation["responses"].pop("422", None)  # FastAPI's own; here a wrong request is a 400
                for part in (operation.get("requestBody", {}), *operation["responses"].values()):
                    for content in part.get("content", {}).values():
                        shared.update(content.get("schema", {}).pop("$defs", {}))
        for name in ("HTTPValidationError", "ValidationError"):
            shared.pop(name, None)
        tell_keys(app, schema)
        tell_text_lengths(schema, app.state.pequod.settings.max_body_bytes)
        app.openapi_schema = schema
    return app.openapi_schema


def tell_text_lengths(schema: Any, most: int) -> None:
    """Say in the description that no text can be longer than the largest body of this very server."""
    if isinstance(schema, dict):
        if isinstance(length := schema.get("maxLength"), int):
            schema["maxLength"] = min(length, most)
        for inner in schema.values():
            tell_text_lengths(inner, most)
    elif isinstance(schema, list):
        for inner in schema:
            tell_text_lengths(inner, most)


def tell_keys(app: FastAPI, schema: dict[str, Any]) -> None:
    """Say in the description which operations ask for a key on this very server."""
    state: Pequod = app.state.pequod
    asked = {"user"} if state.settings.keys else set()
    if not state.keys.are_metrics_open:
        asked.add("metrics_reader")
    schema["components"]["securitySchemes"] = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    for route in app.routes:
        if roles(route) & asked:
            for operation in schema["paths"].get(getattr(route, "path_format", None), {}).values():
                operation["security"] = [{"bearer": []}, {"header": []}]
