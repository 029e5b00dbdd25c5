"""build_app: the server as an ASGI app around an engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.middleware import Middleware

from engine import ConfigError, Engine

from .api.anthropic.errors import FORM as ANTHROPIC_ERRORS
from .api.responses.state import ResponsesState
from .api.routers import ROUTERS
from .http import errors
from .http.auth import roles
from .http.middleware import OriginMiddleware, RequestMiddleware, RootPathMiddleware
from .observability.logs import StepLog
from .settings import Settings
from .state import AppState
from .version import version

TICK_S = 0.25


def build_app(settings: Settings, engine: Engine) -> FastAPI:
    """Build the app, with an AppState in `app.state.pequod`. Its lifespan starts and closes the engine.

    Raises ConfigError if a setting cannot be used.
    """
    state = AppState(settings, engine, version())
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
        asyncio.get_running_loop().set_exception_handler(errors.log_unhandled)
        # No slow work here: the server accepts connections only after it.
        await engine.start()
        tasks = [asyncio.create_task(state.load(), name="load"), asyncio.create_task(tick(state), name="tick")]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await responses.stop()
            await state.close()
            await responses.close()
            if step_log is not None:
                step_log.close()

    layers = [Middleware(RequestMiddleware, settings, state.limits, state.metrics.http, [ANTHROPIC_ERRORS])]
    if settings.root_path:
        layers.insert(0, Middleware(RootPathMiddleware))
    if settings.allowed_origins:
        # Outermost, so that a page can read the errors of the other layers.
        layers.insert(
            0,
            Middleware(
                OriginMiddleware,
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
        docs_url=None,  # FastAPI's pages load scripts from other hosts; the one in api/ops/routes.py does not
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
        middleware=layers,
        # Not include_router, which adds a router as one object that hides its routes: their roles are checked below.
        routes=[route for router in ROUTERS for route in router.routes],
    )
    app.state.pequod = state
    app.state.responses = responses
    errors.install(app)
    app.openapi = lambda: openapi(app)  # type: ignore[method-assign]
    if open_routes := [getattr(route, "path", str(route)) for route in app.routes if not roles(route)]:
        raise RuntimeError(f"routes without a role: {', '.join(open_routes)}")
    return app


async def tick(state: AppState) -> None:
    """Measure the lag of the event loop, and check whether the engine has failed for good."""
    while True:
        due = time.monotonic() + TICK_S
        await asyncio.sleep(TICK_S)
        state.metrics.loop_lag.observe(max(0.0, time.monotonic() - due))
        state.watch()


def openapi(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI document, with the bodies that routes parse themselves."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        shared = schema.setdefault("components", {}).setdefault("schemas", {})
        for operations in schema["paths"].values():
            for operation in operations.values():
                operation["responses"].pop("422", None)  # FastAPI's default; here an invalid request is a 400
                for part in (operation.get("requestBody", {}), *operation["responses"].values()):
                    for content in part.get("content", {}).values():
                        shared.update(content.get("schema", {}).pop("$defs", {}))
        for name in ("HTTPValidationError", "ValidationError"):
            shared.pop(name, None)
        add_security(app, schema)
        limit_lengths(schema, app.state.pequod.settings.max_body_bytes)
        app.openapi_schema = schema
    return app.openapi_schema


def limit_lengths(schema: Any, limit: int) -> None:
    """Limit the length of strings in the document to that of this server's largest body."""
    if isinstance(schema, dict) and isinstance(length := schema.get("maxLength"), int):
        schema["maxLength"] = min(length, limit)
    if isinstance(schema, dict | list):
        for inner in schema.values() if isinstance(schema, dict) else schema:
            limit_lengths(inner, limit)


def add_security(app: FastAPI, schema: dict[str, Any]) -> None:
    """Add to the document which operations of this server require a key."""
    state: AppState = app.state.pequod
    with_key = {"user"} if state.settings.keys else set()
    if not state.keys.are_metrics_open:
        with_key.add("metrics_reader")
    schema["components"]["securitySchemes"] = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    for route in app.routes:
        if roles(route) & with_key:
            for operation in schema["paths"].get(getattr(route, "path_format", None), {}).values():
                operation["security"] = [{"bearer": []}, {"header": []}]
