"""Every route is closed unless it says that it is public; keys are compared whole, and never shown."""

from __future__ import annotations

import asyncio
import re

import pytest
from fastapi import APIRouter
from fastapi.routing import APIRoute

from server import app as app_module
from server.http.auth import MAX_SENT_KEYS, roles
from tests.fakes import FakeEngine, listening, model_folder, serving
from tests.live import WAIT_S
from tests.server.http.hostile import head

PUBLIC = {"/live", "/ready", "/health", "/version", "/docs", "/openapi.json", "/", "/webui/{name}"}


async def test_every_route_states_its_role(tmp_path):
    async with serving(model_folder(tmp_path / "m")) as (_, app):
        stated = {route.path: roles(route) for route in app.routes}
        assert all(len(found) == 1 for found in stated.values()), stated
        assert {path for path, found in stated.items() if found == {"public"}} == PUBLIC
        assert {path for path, found in stated.items() if found == {"metrics_reader"}} == {"/metrics"}
        assert "/v1/models" in {path for path, found in stated.items() if found == {"user"}}


def test_an_app_with_a_route_that_states_no_role_is_not_built(tmp_path, monkeypatch):
    router = APIRouter()

    @router.get("/open-by-mistake")
    async def forgotten():
        return {}

    monkeypatch.setattr(app_module, "ROUTERS", (*app_module.ROUTERS, router))
    with pytest.raises(RuntimeError, match="/open-by-mistake"):
        app_module.build_app(app_module.Settings(model=str(tmp_path)), FakeEngine())


OTHERS = ("POST", "PUT", "PATCH", "DELETE", "TRACE", "OPTIONS", "BREW")
API_KEY, METRICS_KEY = "first-key", "metrics-key"
SENT = {"none": {}} | {
    f"{name} as {header}": {header: form.format(key)}
    for name, key in (("wrong", "first-ke"), ("API", API_KEY), ("metrics", METRICS_KEY))
    for header, form in (("Authorization", "Bearer {}"), ("X-Api-Key", "{}"))
}
# Who gets past the door, by role: the beginning of the names above.
OPENS = {"public": ("none", "wrong", "API", "metrics"), "metrics_reader": ("metrics",), "user": ("API",)}
APP = app_module.build_app(app_module.Settings(model="builtin"), FakeEngine())


@pytest.mark.parametrize("route", APP.routes, ids=lambda route: f"{'-'.join(sorted(route.methods))}-{route.path}")
async def test_a_route_accepts_only_the_keys_of_its_role(tmp_path, route):
    (role,) = roles(route)
    path = re.sub(r"\{.*?\}", "fake", route.path)
    # /v1/responses/compact could be the path of a response too: what is taken there has its own row.
    taken = {method for other in APP.routes if other.path_regex.match(path) for method in other.methods}
    taken |= {"HEAD"} if "GET" in taken else set()
    own = route.methods | ({"HEAD"} if "GET" in route.methods else set())
    async with serving(model_folder(tmp_path / "m"), api_key=[API_KEY], metrics_key=METRICS_KEY) as (client, _):
        for name, headers in SENT.items():
            for method in sorted(own):
                # No JSON, and ids of nothing: who has no key is not told.
                body = {"content": b"{"} if method in ("POST", "DELETE") else {}
                answer = await client.request(method, path, headers=headers, **body)
                if name.startswith(OPENS[role]):
                    assert answer.status_code not in (401, 403, 405), (method, name)
                    continue
                assert answer.status_code == 401, (method, name)
                assert answer.headers["www-authenticate"] == "Bearer"
                if method != "HEAD":
                    assert answer.json()["error"]["code"] in ("invalid_api_key", "authentication_error")
            for method in set(OTHERS) - taken:
                answer = await client.request(method, path, headers=headers)
                assert answer.status_code == 405, (method, name)
                assert set(answer.headers["allow"].split(", ")) <= taken


def test_no_route_is_reached_but_by_http():
    assert all(type(route) is APIRoute for route in APP.routes), "a mount or a websocket has no role that is checked"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Authorization": "Bearer first-key"}, 200),
        ({"authorization": "bearer  second-key "}, 200),
        ({"X-Api-Key": "second-key"}, 200),
        ({"X-Api-Key": "wrong", "Authorization": "Bearer first-key"}, 200),
        ({}, 401),
        ({"Authorization": "first-key"}, 401),
        ({"Authorization": "Basic first-key"}, 401),
        ({"Authorization": "Bearer first-ke"}, 401),
        ({"Authorization": "Bearer first-keyy"}, 401),
        ({"Authorization": "Bearer FIRST-KEY"}, 401),
        ({"Authorization": "Bearer "}, 401),
        ({"Authorization": "Bearer first-key,second-key"}, 401),
        ({"X-Api-Key": ""}, 401),
        ({"X-Api-Key": "schl\u00fcssel"}, 401),
    ],
)
async def test_a_key_fits_whole_or_not_at_all(tmp_path, headers, status):
    async with serving(model_folder(tmp_path / "m"), api_key=["first-key", "second-key"]) as (client, _):
        sent = {name: value.encode() for name, value in headers.items()}
        answer = await client.get("/v1/models", headers=sent)
        assert answer.status_code == status
        assert "first-key" not in answer.text


@pytest.mark.parametrize("path", ["/v1/models", "/metrics"])
async def test_a_request_with_many_keys_is_refused_whatever_they_are(tmp_path, path):
    async with serving(model_folder(tmp_path / "m"), api_key=["k"], metrics_key="k") as (client, _):
        for number, status in ((MAX_SENT_KEYS, 200), (MAX_SENT_KEYS + 1, 401), (5000, 401)):
            headers = [("X-Api-Key", "w")] * (number - 1) + [("Authorization", "Bearer k")]
            answer = await client.get(path, headers=headers)
            assert answer.status_code == status
            if status == 401:
                assert "more than 4 API keys" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "target",
    [
        "/v1/models/../../live",
        "/live/../v1/models",
        "/live/..%2fv1/models",
        "/live%2f..%2fv1%2fmodels",
        "/live;/../v1/models",
        "//v1/models",
        "/v1/models/",
        "/v1%2fmodels",
        "/v1/models?x=/live",
        "/v1/models#/live",
        "http://localhost/v1/models",
        "http://localhost/live/../v1/models",
    ],
)
async def test_a_path_that_looks_public_opens_nothing(tmp_path, target):
    """On a socket, since a client resolves such a path before it sends it."""
    async with serving(model_folder(tmp_path / "m"), api_key=["k"]) as (_, app), listening(app) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(head("Connection: close", first=f"GET {target} HTTP/1.1"))
        answer = await asyncio.wait_for(reader.read(), WAIT_S)
        writer.close()
    assert answer.split()[1] in (b"401", b"404"), answer


async def test_without_keys_no_request_needs_one(tmp_path):
    async with serving(model_folder(tmp_path / "m")) as (client, _):
        assert (await client.get("/v1/models")).status_code == 200
        assert (await client.get("/v1/models", headers={"Authorization": "Bearer any"})).status_code == 200


async def test_the_metrics_have_a_key_of_their_own(tmp_path):
    async with serving(model_folder(tmp_path / "m"), api_key=["k"], metrics_key="m") as (client, _):
        assert (await client.get("/metrics")).status_code == 401
        assert (await client.get("/metrics", headers={"Authorization": "Bearer k"})).status_code == 401
        assert (await client.get("/metrics", headers={"Authorization": "Bearer m"})).status_code == 200
        assert (await client.get("/v1/models", headers={"Authorization": "Bearer m"})).status_code == 401
    async with serving(tmp_path / "m", api_key=["k"]) as (client, _):
        assert (await client.get("/metrics")).status_code == 401, "without a key of their own an API key opens them"
        assert (await client.get("/metrics", headers={"Authorization": "Bearer k"})).status_code == 200
    async with serving(tmp_path / "m", metrics_key="m") as (client, _):
        assert (await client.get("/metrics")).status_code == 401, "no API key is needed, but theirs is"
        assert (await client.get("/metrics", headers={"Authorization": "Bearer m"})).status_code == 200
    async with serving(tmp_path / "m", api_key=["k"], public_metrics=True) as (client, _):
        assert (await client.get("/metrics")).status_code == 200
    async with serving(tmp_path / "m") as (client, _):
        assert (await client.get("/metrics")).status_code == 200


async def test_keys_are_in_no_log_no_metric_and_no_answer(tmp_path, caplog):
    caplog.set_level("DEBUG")
    async with serving(model_folder(tmp_path / "m"), api_key=["canary-1"], metrics_key="canary-2") as (client, _):
        texts = []
        for key in ("canary-1", "canary-2", "canary-3"):
            for path in ("/v1/models", "/metrics", "/version", "/openapi.json", "/docs", "/nowhere"):
                texts.append((await client.get(path, headers={"Authorization": f"Bearer {key}"})).text)
        assert "canary" not in "".join(texts)
    assert "canary" not in "\n".join(record.getMessage() for record in caplog.records if record.name != "httpx")


@pytest.mark.parametrize("path", ["/v1/models", "/metrics"])
async def test_a_wrong_key_and_a_missing_one_have_messages_of_their_own(tmp_path, path):
    async with serving(model_folder(tmp_path / "m"), api_key=[API_KEY]) as (client, _):
        missing = (await client.get(path)).json()["error"]["message"]
        empty = (await client.get(path, headers={"Authorization": "Bearer "})).json()["error"]["message"]
        wrong = (await client.get(path, headers={"Authorization": "Bearer other"})).json()["error"]["message"]
    assert "require" in missing and empty == missing
    assert "require" not in wrong and "other" not in wrong
