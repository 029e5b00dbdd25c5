"""Every route is closed unless it says that it is public; keys are compared whole, and never shown."""

from __future__ import annotations

import asyncio
import re

import pytest
from fastapi import APIRouter

from server import app as app_module
from server.auth import roles
from tests.fakes import FakeEngine, model_folder, serving

PUBLIC = {"/live", "/ready", "/health", "/version", "/docs", "/openapi.json", "/"}


def test_every_route_states_its_role(tmp_path):
    async def run():
        async with serving(model_folder(tmp_path / "m")) as (_, app):
            stated = {route.path: roles(route) for route in app.routes}
            assert all(len(found) == 1 for found in stated.values()), stated
            assert {path for path, found in stated.items() if found == {"public"}} == PUBLIC
            assert {path for path, found in stated.items() if found == {"metrics_reader"}} == {"/metrics"}
            assert "/v1/models" in {path for path, found in stated.items() if found == {"user"}}

    asyncio.run(run())


def test_an_app_with_a_route_that_states_no_role_is_not_built(tmp_path, monkeypatch):
    router = APIRouter()

    @router.get("/open-by-mistake")
    async def forgotten():
        return {}

    monkeypatch.setattr(app_module, "ROUTERS", (*app_module.ROUTERS, router))
    with pytest.raises(RuntimeError, match="/open-by-mistake"):
        app_module.build_app(app_module.Settings(model=str(tmp_path)), FakeEngine())


def test_without_the_key_every_closed_route_says_401(tmp_path):
    async def run():
        async with serving(model_folder(tmp_path / "m"), api_key=["first-key", "second-key"]) as (client, app):
            for route in app.routes:
                path = re.sub(r"\{.*?\}", "fake", route.path)
                for method in route.methods:
                    answer = await client.request(method, path, json={} if method == "POST" else None)
                    if roles(route) & {"user", "metrics_reader"}:
                        assert answer.status_code == 401, path
                        assert answer.json()["error"]["code"] == "invalid_api_key"
                        assert answer.headers["www-authenticate"] == "Bearer"
                    else:
                        assert answer.status_code in (200, 307), path

    asyncio.run(run())


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
def test_a_key_fits_whole_or_not_at_all(tmp_path, headers, status):
    async def run():
        async with serving(model_folder(tmp_path / "m"), api_key=["first-key", "second-key"]) as (client, _):
            sent = {name: value.encode() for name, value in headers.items()}
            answer = await client.get("/v1/models", headers=sent)
            assert answer.status_code == status
            assert "first-key" not in answer.text

    asyncio.run(run())


def test_a_path_that_looks_public_opens_nothing(tmp_path):
    async def run():
        async with serving(model_folder(tmp_path / "m"), api_key=["k"]) as (client, _):
            for path in (
                "/v1/models/../../live",
                "/live/../v1/models",
                "//v1/models",
                "/v1/models/",
                "/v1/models?x=/live",
            ):
                answer = await client.get(path)
                assert answer.status_code in (401, 404) or answer.json().get("state") == "ready", path

    asyncio.run(run())


def test_without_keys_nobody_is_asked(tmp_path):
    async def run():
        async with serving(model_folder(tmp_path / "m")) as (client, _):
            assert (await client.get("/v1/models")).status_code == 200
            assert (await client.get("/v1/models", headers={"Authorization": "Bearer any"})).status_code == 200

    asyncio.run(run())


def test_the_metrics_have_a_key_of_their_own(tmp_path):
    async def run():
        async with serving(model_folder(tmp_path / "m"), api_key=["k"], metrics_key="m") as (client, _):
            assert (await client.get("/metrics")).status_code == 401
            assert (await client.get("/metrics", headers={"Authorization": "Bearer k"})).status_code == 401
            assert (await client.get("/metrics", headers={"Authorization": "Bearer m"})).status_code == 200
            assert (await client.get("/v1/models", headers={"Authorization": "Bearer m"})).status_code == 401
        async with serving(tmp_path / "m", api_key=["k"]) as (client, _):
            assert (await client.get("/metrics")).status_code == 401, "without a key of their own an API key opens them"
            assert (await client.get("/metrics", headers={"Authorization": "Bearer k"})).status_code == 200
        async with serving(tmp_path / "m", api_key=["k"], public_metrics=True) as (client, _):
            assert (await client.get("/metrics")).status_code == 200
        async with serving(tmp_path / "m") as (client, _):
            assert (await client.get("/metrics")).status_code == 200

    asyncio.run(run())


def test_keys_are_in_no_log_no_metric_and_no_answer(tmp_path, caplog):
    caplog.set_level("DEBUG")

    async def run():
        async with serving(model_folder(tmp_path / "m"), api_key=["canary-1"], metrics_key="canary-2") as (client, _):
            texts = []
            for key in ("canary-1", "canary-2", "canary-3"):
                for path in ("/v1/models", "/metrics", "/version", "/openapi.json", "/docs", "/nowhere"):
                    texts.append((await client.get(path, headers={"Authorization": f"Bearer {key}"})).text)
            assert "canary" not in "".join(texts)

    asyncio.run(run())
    assert "canary" not in "\n".join(record.getMessage() for record in caplog.records if record.name != "httpx")
