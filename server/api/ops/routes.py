"""Routes for operators and tools: health, version, models, metrics, and the API page."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import asdict
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, Literal

import msgspec
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse

from ...http.auth import metrics_reader, public, user
from ...http.body import models as models_of
from ...http.errors import OPENAI_ERRORS
from ...http.fields import FieldRow, Kind, Wire, table
from ...loading import fingerprint
from ...observability.metrics import CONTENT_TYPE
from ...state import AppDep, AppState, Health

router = APIRouter(tags=["operation"])
PUBLIC = [Depends(public)]
USER = [Depends(user)]
PROBE_S = 2  # in Retry-After of /ready and /health: asking again costs nothing


def healthy(good: str, bad: str) -> dict[int | str, dict[str, Any]]:
    """Return the description of a health route's responses."""
    return {200: {"description": good, "model": Health}, 503: {"description": bad, "model": Health}}


@router.get("/live", dependencies=PUBLIC, responses=healthy("The process works", "Only a new process can help"))
async def live(app: AppDep) -> Response:
    """200 unless the engine has failed for good, so that the process must be restarted."""
    # An engine that hangs is replaced without a new server.
    return JSONResponse(asdict(app.health()), 200 if app.failed is None else 503)


LOADED = healthy("The model is loaded", "The model is loading, the engine has failed, or the server is shutting down")


@router.get("/health", dependencies=PUBLIC, responses=LOADED)
async def loaded(app: AppDep) -> Response:
    """200 once the model is loaded, also while the server is full or restarts the engine, as vLLM's charts expect."""
    # They use it as the liveness probe, whose failure kills the process and all requests that would have continued.
    health = app.health()
    return _probed(health, app.model is not None and health.state not in ("draining", "failed"))


READY = healthy("New work is taken", "New work is refused; state says why")


@router.get("/ready", dependencies=PUBLIC, responses=READY)
async def ready(app: AppDep) -> Response:
    """200 if new requests are admitted and make progress, otherwise 503; `state` has the reason."""
    health = app.health()
    return _probed(health, health.state == "ready")


def _probed(health: Health, is_good: bool) -> Response:
    return JSONResponse(asdict(health)) if is_good else JSONResponse(asdict(health), 503, {"Retry-After": str(PROBE_S)})


class Version(Wire):
    """The server's version, the model, the device and whether results are exact."""

    version: str
    model: str
    # Of the loaded model; absent until it is loaded.
    architecture: str | None = None
    implementation: str | None = None
    attention: str | None = None
    device: str | None = None
    dtype: str | None = None
    quantization: str | None = None
    kv_cache_dtype: str | None = None
    exact: bool | None = None
    torch: str | None = None
    max_model_len: int | None = None
    weights_hash: str | None = None
    system_fingerprint: str | None = None


@router.get("/version", dependencies=PUBLIC, response_model_exclude_none=True)
async def version(app: AppDep) -> Version:
    """The server's version, and once it is loaded the model, the device and whether results are exact."""
    if (info := app.engine.info) is None:
        return Version(version=app.version, model=app.model_names[0])
    return Version(
        version=app.version,
        model=app.model_names[0],
        kv_cache_dtype=info.kv_dtype,
        max_model_len=info.max_len,
        system_fingerprint=fingerprint(info, app.version),
        **{name: getattr(info, name) for name in Version.model_fields.keys() & {*info.__struct_fields__} - {"model"}},
    )


class Card(Wire):
    """A model in the list of /v1/models, in the forms of OpenAI and Anthropic."""

    id: str
    object: Literal["model"] = "model"
    type: Literal["model"] = "model"
    display_name: str
    created: int
    created_at: str
    owned_by: Literal["pequod"] = "pequod"
    max_model_len: int | None  # null until the model is loaded, unless it was set


class Cards(Wire):
    """The names under which the model is served."""

    object: Literal["list"] = "list"
    data: list[Card]


def card(app: AppState, name: str) -> Card:
    info = app.engine.info
    length = info.max_len if info is not None else app.settings.max_model_len
    created_at = f"{datetime.fromtimestamp(app.created, UTC):%Y-%m-%dT%H:%M:%SZ}"
    return Card(id=name, display_name=name, created=app.created, created_at=created_at, max_model_len=length)


@router.get("/v1/models", dependencies=USER, responses={401: OPENAI_ERRORS[401]})
@router.get("/v1/models/", dependencies=USER, include_in_schema=False)  # as some clients join addresses
async def models(app: AppDep) -> Cards:
    """The names under which the model is served."""
    return Cards(data=[card(app, name) for name in app.model_names])


# Hub ids hold a slash.
@router.get("/v1/models/{model_id:path}", dependencies=USER, responses={s: OPENAI_ERRORS[s] for s in (401, 404)})
async def model(model_id: str, app: AppDep) -> Card:
    """One served name."""
    return card(app, app.check_model(model_id))


EFFORTS = ("reasoning_effort", "reasoning.effort", "output_config.effort", "messages[].output_config.effort")


class Capability(Wire):
    """A field of an endpoint's requests, by its path, or a kind of object in them that is refused."""

    endpoint: str
    field: str
    kind: Kind
    """effect; label: accepted, without influence on the tokens; refused: 400 with its path as param
    (messages.0.content.0.image_url)"""
    note: str


@router.get("/v1/capabilities", dependencies=USER, responses={401: OPENAI_ERRORS[401]})
async def capabilities(request: Request) -> list[Capability]:
    """The fields of each request, of its objects and of the elements of its lists, and how the server handles them.

    `messages[].tool_calls` is a field of a list's elements, `thinking.budget_tokens` one of an object. If several kinds
    of object have a field of one name, the path has the kind: `messages[role=tool].content`,
    `thinking{type=adaptive}.display`; `messages[role=function]` is a kind that is refused. Fields not listed are
    refused.
    """
    state: AppState = request.app.state.pequod
    return [
        Capability(endpoint=path, field=row.field, **for_model(state, row))
        for path, model in models_of(request.app.routes).items()
        for row in table(model)
    ]


def for_model(app: AppState, row: FieldRow) -> dict[str, Any]:
    """Return the kind of a field and its note for this model."""
    if row.field in EFFORTS and app.model is not None and not app.model.prompts.takes_effort:
        return {"kind": "label", "note": "Accepted: the model's chat template knows no levels of thinking."}
    return {"kind": row.kind, "note": row.note}


METRICS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Prometheus' text format",
        "content": {"text/plain": {"schema": {"type": "string"}, "example": "vllm:num_requests_running 0\n"}},
    },
    401: OPENAI_ERRORS[401],
}


@router.get("/metrics", dependencies=[Depends(metrics_reader)], response_class=Response, responses=METRICS)
async def metrics(app: AppDep) -> Response:
    """All metrics, for Prometheus; never waits for the engine."""
    return Response(app.metrics.render(), media_type=CONTENT_TYPE)


@router.get("/openapi.json", dependencies=PUBLIC, include_in_schema=False)
async def openapi(request: Request) -> Response:
    """The OpenAPI description of this API."""
    return Response(description(request.app), media_type="application/json")


def description(app: FastAPI) -> bytes:
    """Return the description as JSON, which is encoded once: it has hundreds of kilobytes."""
    state: AppState = app.state.pequod
    if not state.description:
        prefix = state.settings.root_path
        schema = {**app.openapi(), "servers": [{"url": prefix}]} if prefix else app.openapi()
        state.description = msgspec.json.encode(schema)
    return state.description


@router.get("/docs", dependencies=PUBLIC, include_in_schema=False)
async def docs() -> Response:
    """The API page, to read and to try; it loads nothing from other servers."""
    page, policy = docs_page()
    headers = {"Content-Security-Policy": policy, "Referrer-Policy": "no-referrer"}
    return Response(page, media_type="text/html", headers=headers)


@cache
def docs_page() -> tuple[str, str]:
    """Return the page, and the policy with which a browser runs only its own script and style."""
    page = Path(__file__).with_name("docs.html").read_text(encoding="utf-8")

    def hashed(tag: str) -> str:
        match = re.search(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        assert match is not None
        return "'sha256-" + base64.b64encode(hashlib.sha256(match[1].encode()).digest()).decode() + "'"

    return page, (
        f"default-src 'none'; script-src {hashed('script')}; style-src {hashed('style')}; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
