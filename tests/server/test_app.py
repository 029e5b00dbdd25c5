"""The app around an engine: models, version, the page that describes it, its step log, and its end."""

from __future__ import annotations

import asyncio
import base64
import gc
import hashlib
import inspect
import json
import re
from datetime import datetime, timedelta

import anthropic
import httpx
import pytest
from fastapi import Depends
from fastapi.responses import StreamingResponse

from engine import ConfigError, EngineRequest, SamplingParams
from server.app import build_app
from server.http.auth import user
from server.settings import Settings
from tests.fakes import INFO, FakeEngine, listening, model_folder, serving, until

# Models, version, docs


async def test_models_by_their_served_names(tmp_path):
    names = ["org/model-1", "short"]
    async with serving(model_folder(tmp_path / "m"), served_model_name=names) as (client, app):
        listed = (await client.get("/v1/models")).json()
        assert (await client.get("/v1/models/")).json() == listed
        assert listed["object"] == "list"
        assert [card["id"] for card in listed["data"]] == names
        for name in names:
            card = (await client.get(f"/v1/models/{name}")).json()
            created = app.state.pequod.created
            created_at = datetime.fromisoformat(card.pop("created_at"))
            assert (created_at.timestamp(), created_at.utcoffset()) == (created, timedelta())
            assert card == {"id": name, "object": "model", "type": "model", "display_name": name, "created": created,
                            "owned_by": "pequod", "max_model_len": INFO.max_len}  # fmt: skip
        missing = await client.get("/v1/models/org/other")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
        assert missing.json()["error"]["param"] == "model"
        long = await client.get("/v1/models/" + "x" * 500)
        assert "x" * 65 not in long.text
        assert app.state.pequod.check_model(None) == "org/model-1"


async def test_anthropics_sdk_lists_the_models(tmp_path):
    async with serving(model_folder(tmp_path / "m"), served_model_name=["fake"]) as (_, app), listening(app) as url:
        async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client:
            [model] = [model async for model in client.models.list()]
            assert (model.type, model.id, model.display_name) == ("model", "fake", "fake")
            assert model.created_at.timestamp() == app.state.pequod.created
            assert await client.models.retrieve("fake") == model


async def test_the_version_names_model_and_server(tmp_path):
    async with serving(model_folder(tmp_path / "m")) as (client, app):
        told = (await client.get("/version")).json()
        assert told["model"] == "fake"
        assert told["dtype"] == told["kv_cache_dtype"] == "float32"
        assert told["device"] == "cpu"
        assert (told["exact"], told["quantization"]) == (True, "none")
        assert told["weights_hash"] == INFO.weights_hash
        assert told["torch"] == INFO.torch
        assert told["system_fingerprint"] == app.state.pequod.model.fingerprint
        assert re.fullmatch(r"fp_[0-9a-f]{12}", app.state.pequod.model.fingerprint)


async def test_the_version_of_a_server_that_loads_has_no_facts_of_the_model(tmp_path):
    async with serving(model_folder(tmp_path / "m"), FakeEngine(is_loaded=False), wait=False) as (client, app):
        told = (await client.get("/version")).json()
        assert told == {"version": app.state.pequod.version, "model": "fake"}


async def test_the_docs_load_nothing_from_elsewhere(tmp_path):
    async with serving(model_folder(tmp_path / "m")) as (client, _):
        page = await client.get("/docs")
        assert page.headers["content-type"].startswith("text/html")
        assert not re.search(r"(src|href)\s*=|https?://|@import|url\(", page.text)
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        for tag in ("script", "style"):
            inside = re.search(f"<{tag}>(.*)</{tag}>", page.text, re.DOTALL)[1]
            assert base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode() in policy


async def test_the_description_of_the_api_is_whole(tmp_path):
    async with serving(model_folder(tmp_path / "m")) as (client, app):
        schema = (await client.get("/openapi.json")).json()
        assert "/v1/models" in schema["paths"]
        assert "/v1/responses/compact" not in schema["paths"]  # always a 404
        text = json.dumps(schema)
        assert "$defs" not in text
        for name in set(re.findall(r'"#/components/schemas/([^"]+)"', text)):
            assert name in schema["components"]["schemas"], name
        documented = {route.path for route in app.routes if route.include_in_schema}
        assert {path.replace("{model_id}", "{model_id:path}") for path in schema["paths"]} == documented


async def test_the_description_has_keys_refusals_and_examples(tmp_path):
    async with serving(model_folder(tmp_path / "m"), api_key=["k"]) as (client, _):
        paths = (await client.get("/openapi.json")).json()["paths"]
        asking = {path for path, operations in paths.items() for op in operations.values() if "security" in op}
        assert asking == {path for path in paths if path.startswith("/v1/")} | {
            "/tokenize", "/detokenize", "/apply-template", "/metrics"}  # fmt: skip
        for path, operations in paths.items():
            for operation in operations.values():
                assert "422" not in operation["responses"], path
                if "requestBody" in operation:
                    assert operation["requestBody"]["content"]["application/json"]["schema"]["examples"], path
        assert set(paths["/ready"]["get"]["responses"]) == {"200", "503"}
    async with serving(tmp_path / "m", metrics_key="m") as (client, _):
        paths = (await client.get("/openapi.json")).json()["paths"]
        assert [path for path in paths for op in paths[path].values() if "security" in op] == ["/metrics"]


async def test_behind_a_proxy_paths_begin_with_its_prefix(tmp_path):
    async with serving(model_folder(tmp_path / "m"), root_path="/llm") as (_, app):
        transport = httpx.ASGITransport(app, root_path="/llm")
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            assert (await client.get("/llm/live")).status_code == 200
            assert (await client.get("/llm/openapi.json")).json()["servers"] == [{"url": "/llm"}]
            # uvicorn adds the prefix to every path, also to those that have it already.
            assert (await client.get("/llm/llm/live")).status_code == 200
            assert (await client.get("/llm/llm/llm/live")).status_code == 404
            bare = await client.get("/llm/llm")
            assert (bare.status_code, bare.headers["location"]) == (307, "/llm/")


async def test_head_is_get_without_the_body(tmp_path):
    async with serving(model_folder(tmp_path / "m")) as (client, _):
        for path in ("/live", "/ready", "/v1/models", "/metrics", "/docs"):
            answer = await client.head(path)
            assert (answer.status_code, answer.content) == (200, b"")


# The app itself


async def test_every_step_is_a_line_of_the_step_log(tmp_path):
    path = tmp_path / "steps.jsonl"
    engine = FakeEngine()
    async with serving(model_folder(tmp_path / "m"), engine, step_log=path):
        request = EngineRequest(id=5, prompt_ids=(1, 2, 3), params=SamplingParams(max_tokens=4))
        async for _ in engine.generate(request):
            pass
    steps = [json.loads(line) for line in path.read_text().splitlines()]
    assert [step["rows"] for step in steps] == [[[5, 3]], [[5, 1]], [[5, 1]], [[5, 1]]]
    assert steps[0]["budget"] == INFO.max_batched_tokens


def test_a_step_log_that_cannot_be_written_is_a_wrong_setting(tmp_path):
    settings = Settings(model=str(tmp_path), step_log=tmp_path / "log")
    (tmp_path / "log").mkdir()
    with pytest.raises(ConfigError, match="--step-log"):
        build_app(settings, FakeEngine())


async def test_the_engine_is_closed_with_the_app(tmp_path):
    before = asyncio.all_tasks()
    engine = FakeEngine()
    async with serving(model_folder(tmp_path / "m"), engine):
        pass
    assert engine.status.phase == "closed"
    assert asyncio.all_tasks() == before


async def test_two_apps_live_side_by_side(tmp_path):
    folder = model_folder(tmp_path / "m")
    async with serving(folder, served_model_name=["a"]) as (first, _):
        async with serving(folder, served_model_name=["b"]) as (second, app):
            app.state.pequod.begin_drain()
            assert (await first.get("/v1/models")).json()["data"][0]["id"] == "a"
            assert (await second.get("/v1/models")).json()["data"][0]["id"] == "b"
            assert (await first.get("/ready")).status_code == 200
            assert (await second.get("/ready")).status_code == 503
            await until(lambda: True)


async def test_a_failure_in_mid_stream_is_logged_without_its_text(tmp_path, caplog):
    async with serving(model_folder(tmp_path / "m")) as (_, app):

        @app.post("/breaks", dependencies=[Depends(user)])
        async def breaks():
            async def body():
                yield b"begun"
                raise ValueError("call me ishmael")

            return StreamingResponse(body())

        async with listening(app) as url, httpx.AsyncClient() as client:
            with pytest.raises(httpx.RemoteProtocolError):
                await client.post(f"{url}/breaks")
    assert "ValueError at" in caplog.text
    assert "ishmael" not in caplog.text


async def test_an_uncaught_exception_is_logged_without_its_text(tmp_path, caplog):
    async def fail():
        raise ValueError("canary-1")

    def break_off(text):
        raise ValueError(text)

    async with serving(model_folder(tmp_path / "m")):
        loop = asyncio.get_running_loop()
        task = loop.create_task(fail())
        loop.call_soon(break_off, "canary-2")
        await asyncio.wait([task])
        del task  # and with it the last who could ask what became of it
        gc.collect()
        loop.call_exception_handler({"message": "a socket <canary-3> is lost"})
    assert sum("ValueError at " in line and " fail" in line for line in caplog.messages) == 1
    assert sum("ValueError at " in line and " break_off" in line for line in caplog.messages) == 1
    assert "the event loop reports: a socket" in caplog.messages
    assert "canary-" not in caplog.text


def test_no_route_waits_for_a_thread(tmp_path):
    """FastAPI calls what is no coroutine in one of 40 threads: /live would wait until one is free."""

    def calls(dependant):
        yield dependant.call
        for below in dependant.dependencies:
            yield from calls(below)

    app = build_app(Settings(model=str(tmp_path)), FakeEngine())
    called = {call for route in app.routes for call in calls(route.dependant)}
    assert [call for call in called if not inspect.iscoroutinefunction(call)] == []
