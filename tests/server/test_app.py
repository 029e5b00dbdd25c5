"""The app around an engine: what it answers while loading, ready, draining, failed, and what its door lets in."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
import threading
import time

import httpx
import pytest
from fastapi import Depends
from fastapi.responses import StreamingResponse

from engine import ConfigError, EngineDied, EngineRequest, ModelError, SamplingParams
from server.app import build_app
from server.defaults import read_defaults
from server.limits import Caller, UserDep, user
from server.settings import Settings
from server.state import AppDep
from tests.fakes import INFO, FakeEngine, listening, model_folder, serving, until
from tests.live import WAIT_S


def add_generation(app) -> None:
    """A route that does what generating routes do: ask, admit, stream until the drain's deadline."""

    @app.post("/generate")
    async def generate(app: AppDep, caller: UserDep):
        app.require_ready()
        app.limits.admit(caller, 1)

        async def body():
            yield b"begun "
            await app.deadline_passed.wait()
            yield b"error"

        return StreamingResponse(body())


# Loading


def test_while_loading_everything_answers_but_generation(tmp_path):
    async def run():
        engine = FakeEngine(is_loaded=False)
        async with serving(model_folder(tmp_path / "m"), engine, wait=False) as (client, app):
            add_generation(app)
            engine.status.share = 0.25
            assert (await client.get("/live")).status_code == 200
            for path in ("/ready", "/health"):
                answer = await client.get(path)
                assert answer.status_code == 503
                assert answer.headers["retry-after"].isdigit()
                assert answer.json() == {
                    "state": "loading", "phase": "loading", "share": 0.25, "last_step_age_s": None,
                    "running": 0, "waiting": 0,
                }  # fmt: skip
            assert (await client.get("/v1/models")).json()["data"][0]["id"] == "fake"
            assert (await client.get("/version")).json()["model"] == "fake"
            assert (await client.get("/metrics")).status_code == 200
            refused = await client.post("/generate")
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["code"] == "loading"
            assert "25%" in refused.json()["error"]["message"]
            assert app.state.pequod.fingerprint == ""
            engine.finish_loading()
            info = await app.state.pequod.ready()
            assert info.max_len == app.state.pequod.prompts.max_len
            ready = await client.get("/ready")
            assert (ready.status_code, ready.json()["state"], ready.json()["share"]) == (200, "ready", 1.0)

    asyncio.run(run())


def test_the_port_answers_before_anything_slow_has_happened(tmp_path, monkeypatch):
    """The tokenizer takes until the test lets it go on, and the lifespan does not wait for it."""
    gate = threading.Event()
    monkeypatch.setattr("server.state.Tokenizer", lambda folder: gate.wait(30))

    async def run():
        async with serving(model_folder(tmp_path / "m"), wait=False) as (client, app):
            assert (await client.get("/live")).status_code == 200
            assert (await client.get("/ready")).json()["state"] == "loading"
            assert not app.state.pequod.is_loaded
            gate.set()

    asyncio.run(run())


def test_a_model_that_cannot_be_loaded_is_told_once_and_for_all(tmp_path):
    async def run():
        engine = FakeEngine(is_loaded=False)
        async with serving(model_folder(tmp_path / "m"), engine, wait=False) as (client, app):
            add_generation(app)
            engine.fail(ModelError("the folder has no weights"))
            with pytest.raises(ModelError, match="no weights"):
                await app.state.pequod.ready()
            await asyncio.wait_for(app.state.pequod.failure.wait(), WAIT_S)
            assert str(app.state.pequod.failed) == "the folder has no weights"
            assert (await client.get("/ready")).json()["state"] == "failed"
            assert (await client.get("/live")).status_code == 503
            assert (await client.post("/generate")).json()["error"]["code"] == "failed"

    asyncio.run(run())


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (lambda folder: (folder / "tokenizer.json").unlink(), ModelError),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), ModelError),
        (lambda folder: (folder / "generation_config.json").write_text("[]"), ModelError),
    ],
)
def test_broken_small_files_end_the_start_while_the_engine_still_loads(tmp_path, spoil, error):
    async def run():
        spoil(folder)
        async with serving(folder, FakeEngine(is_loaded=False), wait=False) as (_, app):
            with pytest.raises(error):
                await asyncio.wait_for(app.state.pequod.ready(), WAIT_S)
            assert app.state.pequod.failure.is_set()

    folder = model_folder(tmp_path / "m")
    asyncio.run(run())


def test_a_chat_template_that_cannot_be_compiled_is_a_wrong_setting(tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text("{% for %}")

    async def run():
        async with serving(model_folder(tmp_path / "m"), wait=False, chat_template=template) as (_, app):
            with pytest.raises(ConfigError, match="--chat-template"):
                await app.state.pequod.ready()

    asyncio.run(run())


def test_a_bug_while_loading_ends_the_start_too(tmp_path, monkeypatch, caplog):
    def broken(folder):
        raise RuntimeError("call me ishmael")

    monkeypatch.setattr("server.state.Tokenizer", broken)

    async def run():
        async with serving(model_folder(tmp_path / "m"), wait=False) as (_, app):
            with pytest.raises(ModelError, match="RuntimeError"):
                await app.state.pequod.ready()

    asyncio.run(run())
    assert "RuntimeError at" in caplog.text


def test_an_engine_that_dies_for_good_later_is_noticed(tmp_path):
    async def run():
        engine = FakeEngine()
        async with serving(model_folder(tmp_path / "m"), engine) as (client, app):
            assert not app.state.pequod.failure.is_set()
            engine.fail(EngineDied("it died 4 times in a row"))
            await asyncio.wait_for(app.state.pequod.failure.wait(), WAIT_S)
            assert (await client.get("/ready")).json()["state"] == "failed"

    asyncio.run(run())


# Health


def test_health_tells_silence_stalls_and_restarts(tmp_path):
    async def run():
        engine = FakeEngine()
        async with serving(model_folder(tmp_path / "m"), engine, stall_seconds=20) as (client, app):
            limits = app.state.pequod.limits

            async def state():
                answer = await client.get("/ready")
                assert (answer.status_code == 200) == (answer.json()["state"] == "ready")
                return answer.json()["state"]

            now = time.monotonic()
            # An engine in this process needs no heartbeat: it lives as long as we answer.
            engine.status.heartbeat = now - 1000
            assert await state() == "ready"
            engine.pid = 1
            assert await state() == "silent"
            assert (await client.get("/live")).status_code == 503
            engine.status.heartbeat = now - 10
            assert (await client.get("/live")).status_code == 200
            engine.status.heartbeat = now + 1000

            # Idle for an hour is well; work and no step for a minute is not.
            engine.status.last_step = now - 3600
            assert await state() == "ready"
            assert (await client.get("/ready")).json()["last_step_age_s"] >= 3600
            ticket = limits.admit(Caller(), 1)
            assert await state() == "ready"
            limits.busy_since = now - 30
            assert await state() == "stalled"
            engine.status.last_step = now - 25  # it has stepped since, and said that it has nothing left to do
            assert await state() == "ready"
            engine.status.running = 1
            assert await state() == "stalled"
            engine.status.last_step = now
            assert await state() == "ready"
            ticket.release()

            engine.status.phase = "restarting"
            assert await state() == "restarting"
            assert (await client.get("/live")).status_code == 200
            app.state.pequod.require_ready()  # new work waits with the old for the new engine

    asyncio.run(run())


def test_head_is_get_without_the_body(tmp_path):
    async def run():
        async with serving(model_folder(tmp_path / "m")) as (client, _):
            for path in ("/live", "/ready", "/v1/models", "/metrics", "/docs"):
                answer = await client.head(path)
                assert (answer.status_code, answer.content) == (200, b"")

    asyncio.run(run())


# Drain


def test_a_drain_lets_running_answers_end(tmp_path):
    async def run():
        async with serving(model_folder(tmp_path / "m")) as (client, app):
            add_generation(app)
            state = app.state.pequod
            ticket = state.limits.admit(Caller(), 1)
            state.begin_drain()
            state.begin_drain()
            assert (await client.get("/ready")).json()["state"] == "draining"
            assert (await client.get("/live")).status_code == 200
            refused = await client.post("/generate")
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
            assert int(refused.headers["retry-after"]) >= 1
            drained = asyncio.create_task(state.drained(30))
            await asyncio.sleep(0.05)
            assert not drained.done()
            ticket.release()
            assert await asyncio.wait_for(drained, WAIT_S) is True
            assert not state.deadline_passed.is_set()
            assert await state.drained(0) is True

    asyncio.run(run())


def test_at_the_deadline_every_stream_is_told_to_end(tmp_path):
    async def run():
        async with serving(model_folder(tmp_path / "m")) as (_, app):
            add_generation(app)
            state = app.state.pequod
            async with listening(app) as url, httpx.AsyncClient() as client:
                async with client.stream("POST", f"{url}/generate") as stream:
                    parts = stream.aiter_raw()
                    assert await anext(parts) == b"begun "
                    state.begin_drain()
                    drained = asyncio.create_task(state.drained(0.05))
                    assert [part async for part in parts] == [b"error"]
                    assert await drained is False
                assert state.limits.open_choices == 0

    asyncio.run(run())


def test_a_stream_that_does_not_end_holds_the_drain_only_so_long(tmp_path, monkeypatch):
    monkeypatch.setattr("server.state.CUT_S", 0.05)

    async def run():
        async with serving(model_folder(tmp_path / "m")) as (_, app):
            app.state.pequod.limits.admit(Caller(), 1)
            assert await asyncio.wait_for(app.state.pequod.drained(0.05), WAIT_S) is False

    asyncio.run(run())


# The door


@pytest.mark.parametrize(
    ("settings", "host", "status"),
    [
        ({}, "localhost", 200),
        ({}, "LOCALHOST:8000", 200),
        ({}, "127.0.0.1:8000", 200),
        ({}, "[::1]:8000", 200),
        ({}, "evil.example", 400),
        ({}, "localhost.evil.example", 400),
        ({}, "localhost:80@evil.example", 400),
        ({}, "[::1].evil.example", 400),
        ({}, "::1", 400),  # without brackets the last group would be the port
        ({}, "", 400),
        ({"host": "0.0.0.0"}, "anything.example", 200),
        ({"host": "0.0.0.0", "allowed_hosts": ["api.example"]}, "api.example:443", 200),
        ({"host": "0.0.0.0", "allowed_hosts": ["api.example"]}, "localhost", 400),
        ({"allowed_hosts": ["*"]}, "evil.example", 200),
    ],
)
def test_the_host_header_must_be_one_of_ours(tmp_path, settings, host, status):
    async def run():
        async with serving(model_folder(tmp_path / "m"), **settings) as (client, _):
            answer = await client.get("/live", headers={"Host": host})
            assert answer.status_code == status
            if status == 400:
                assert answer.json()["error"]["code"] == "invalid_host"
                assert "evil" not in answer.text

    asyncio.run(run())


def test_two_hosts_and_endless_headers_are_refused(tmp_path):
    async def run():
        async with serving(model_folder(tmp_path / "m"), allowed_hosts=["*"]) as (client, _):
            twice = await client.get("/live", headers=[("Host", "localhost"), ("Host", "evil.example")])
            assert (twice.status_code, twice.json()["error"]["code"]) == (400, "invalid_host")
            assert (await client.get("/live", headers={"X": "x" * 60_000})).status_code == 200
            assert (await client.get("/live", headers={"X": "x" * 70_000})).status_code == 431

    asyncio.run(run())


def test_a_request_keeps_its_id_or_gets_one(tmp_path):
    async def run():
        async with serving(model_folder(tmp_path / "m")) as (client, _):
            assert (await client.get("/live", headers={"X-Request-Id": "abc-1.2:3"})).headers[
                "x-request-id"
            ] == "abc-1.2:3"
            for bad in ("", "two words", "x" * 129, "<script>", "\u00fc"):
                made = (await client.get("/nowhere", headers={"X-Request-Id": bad.encode()})).headers["x-request-id"]
                assert re.fullmatch(r"req-[0-9a-f]{16}", made)

    asyncio.run(run())


def test_a_wrong_method_is_told_all_that_the_path_takes(tmp_path):
    async def run():
        async with serving(model_folder(tmp_path / "m")) as (client, _):
            answer = await client.put("/v1/responses/resp_1")
            assert (answer.status_code, answer.headers["allow"]) == (405, "DELETE, GET")
            assert (await client.put("/v1/embeddings")).headers["allow"] == "POST"

    asyncio.run(run())


def test_cors_is_off_unless_it_is_set(tmp_path):
    preflight = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST",
                 "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os"}  # fmt: skip

    async def run():
        async with serving(model_folder(tmp_path / "m")) as (client, _):
            answer = await client.options("/v1/models", headers=preflight)
            assert answer.status_code == 405
            assert "access-control-allow-origin" not in answer.headers
            plain = await client.get("/v1/models", headers={"Origin": "https://a.example"})
            assert "access-control-allow-origin" not in plain.headers
        async with serving(tmp_path / "m", allowed_origins=["https://a.example"], api_key=["k"]) as (client, _):
            answer = await client.options("/v1/models", headers=preflight)
            assert answer.headers["access-control-allow-origin"] == "https://a.example"
            assert answer.status_code == 200  # OpenAI's JavaScript client sends x-stainless-*
            assert "authorization" in answer.headers["access-control-allow-headers"].lower()
            refused = await client.get("/v1/models", headers={"Origin": "https://a.example"})
            assert refused.status_code == 401
            assert refused.headers["access-control-allow-origin"] == "https://a.example"  # so that the page can read it
            other = await client.get("/v1/models", headers={"Origin": "https://b.example"})
            assert "access-control-allow-origin" not in other.headers

    asyncio.run(run())


def test_a_page_of_another_origin_cannot_post_without_a_preflight(tmp_path):
    async def run():
        async with serving(model_folder(tmp_path / "m")) as (client, app):
            app.post("/probe", dependencies=[Depends(user)])(lambda: {})
            for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", None):
                headers = {"Origin": "https://a.example"} | ({"Content-Type": kind} if kind else {})
                assert (await client.post("/probe", content=b"{}", headers=headers)).status_code == 415
            json_type = {"Origin": "https://a.example", "Content-Type": "application/json; charset=utf-8"}
            assert (await client.post("/probe", content=b"{}", headers=json_type)).status_code == 200
            assert (await client.post("/probe", content=b"{}")).status_code == 200  # curl -d names no JSON

    asyncio.run(run())


def test_unknown_routes_and_methods_are_told_in_the_envelope(tmp_path):
    async def run():
        async with serving(model_folder(tmp_path / "m")) as (client, _):
            for method, path, status in [
                ("GET", "/nowhere", 404),
                ("GET", "/v1/models/", 404),
                ("GET", "/live/", 404),
                ("POST", "/live", 405),
                ("DELETE", "/v1/models", 405),
                ("PUT", "/metrics", 405),
            ]:
                answer = await client.request(method, path)
                assert answer.status_code == status, path
                assert set(answer.json()["error"]) == {"message", "type", "param", "code"}

    asyncio.run(run())


def test_a_failure_in_mid_stream_is_logged_without_its_text(tmp_path, caplog):
    async def run():
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

    asyncio.run(run())
    assert "ValueError at" in caplog.text
    assert "ishmael" not in caplog.text


# Models, version, docs


def test_models_by_their_served_names(tmp_path):
    async def run():
        names = ["org/model-1", "short"]
        async with serving(model_folder(tmp_path / "m"), served_model_name=names) as (client, app):
            listed = (await client.get("/v1/models")).json()
            assert listed["object"] == "list"
            assert [card["id"] for card in listed["data"]] == names
            for name in names:
                card = (await client.get(f"/v1/models/{name}")).json()
                created = app.state.pequod.created
                assert card == {"id": name, "object": "model", "created": created, "owned_by": "pequod",
                                "max_model_len": INFO.max_len}  # fmt: skip
            missing = await client.get("/v1/models/org/other")
            assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
            assert missing.json()["error"]["param"] == "model"
            long = await client.get("/v1/models/" + "x" * 500)
            assert "x" * 65 not in long.text
            assert app.state.pequod.check_model(None) == "org/model-1"

    asyncio.run(run())


def test_the_version_tells_what_serves(tmp_path):
    async def run():
        async with serving(model_folder(tmp_path / "m")) as (client, app):
            told = (await client.get("/version")).json()
            assert told["model"] == "fake"
            assert told["dtype"] == "float32"
            assert told["device"] == "cpu"
            assert told["exact"] is True
            assert told["weights_hash"] == INFO.weights_hash
            assert told["torch"] == INFO.torch
            assert told["system_fingerprint"] == app.state.pequod.fingerprint
            assert re.fullmatch(r"fp_[0-9a-f]{12}", app.state.pequod.fingerprint)

    asyncio.run(run())


def test_the_docs_load_nothing_from_elsewhere(tmp_path):
    async def run():
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
            index = await client.get("/")
            assert (index.status_code, index.headers["location"]) == (307, "/docs")

    asyncio.run(run())


def test_the_description_of_the_api_is_whole(tmp_path):
    async def run():
        async with serving(model_folder(tmp_path / "m")) as (client, app):
            schema = (await client.get("/openapi.json")).json()
            assert "/v1/models" in schema["paths"]
            text = json.dumps(schema)
            assert "$defs" not in text
            for name in set(re.findall(r'"#/components/schemas/([^"]+)"', text)):
                assert name in schema["components"]["schemas"], name
            documented = {route.path for route in app.routes if route.include_in_schema}
            assert {path.replace("{model_id}", "{model_id:path}") for path in schema["paths"]} == documented

    asyncio.run(run())


def test_the_description_tells_keys_refusals_and_examples(tmp_path):
    async def run():
        async with serving(model_folder(tmp_path / "m"), api_key=["k"]) as (client, _):
            paths = (await client.get("/openapi.json")).json()["paths"]
            asking = {path for path, operations in paths.items() for op in operations.values() if "security" in op}
            assert asking == {path for path in paths if path.startswith("/v1/")} | {
                "/tokenize", "/detokenize", "/apply-template"}  # fmt: skip
            for path, operations in paths.items():
                for operation in operations.values():
                    assert "422" not in operation["responses"], path
                    if "requestBody" in operation:
                        assert operation["requestBody"]["content"]["application/json"]["schema"]["examples"], path
            assert set(paths["/ready"]["get"]["responses"]) == {"200", "503"}
        async with serving(tmp_path / "m", metrics_key="m") as (client, _):
            paths = (await client.get("/openapi.json")).json()["paths"]
            assert [path for path in paths for op in paths[path].values() if "security" in op] == ["/metrics"]

    asyncio.run(run())


def test_a_post_that_asks_for_http2_is_told_so_and_not_that_its_body_is_empty(tmp_path):
    async def run():
        async with serving(model_folder(tmp_path / "m")) as (client, _):
            headers = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "x"}
            answer = await client.post("/tokenize", content=b"", headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "upgrade_unsupported")
            assert answer.headers["connection"] == "close"
            assert (await client.get("/v1/models", headers=headers)).status_code == 200

    asyncio.run(run())


def test_behind_a_proxy_paths_begin_with_its_prefix(tmp_path):
    async def run():
        async with serving(model_folder(tmp_path / "m"), root_path="/llm") as (_, app):
            transport = httpx.ASGITransport(app, root_path="/llm")
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                assert (await client.get("/llm/live")).status_code == 200
                assert (await client.get("/llm/")).headers["location"] == "/llm/docs"
                assert (await client.get("/llm/openapi.json")).json()["servers"] == [{"url": "/llm"}]

    asyncio.run(run())


# State


def test_sampling_defaults_come_from_the_model_and_stay_in_range(tmp_path):
    written = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 7, "repetition_penalty": "1"}
    folder = model_folder(tmp_path / "m", generation_config=written)
    assert read_defaults("auto", folder) == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    assert read_defaults("engine", folder) == {}
    assert read_defaults(str(folder), tmp_path) == read_defaults("auto", folder)
    assert read_defaults(str(folder / "generation_config.json"), tmp_path) == read_defaults("auto", folder)
    assert read_defaults("auto", tmp_path) == {}
    with pytest.raises(ConfigError):
        read_defaults(str(tmp_path), folder)

    async def run():
        async with serving(folder) as (_, app):
            assert app.state.pequod.default_sampling["temperature"] == 0.6

    asyncio.run(run())


def test_ids_are_new_and_seeds_repeat_only_with_a_seed(tmp_path):
    async def run(**settings):
        async with serving(tmp_path / "m", **settings) as (_, app):
            state = app.state.pequod
            ids = [state.new_id() for _ in range(100)]
            assert len(set(ids)) == 100
            seeds = [state.new_seed() for _ in range(50)]
            assert all(0 <= seed < 2**64 for seed in seeds)
            assert len(set(seeds)) == 50
            return seeds

    model_folder(tmp_path / "m")
    assert asyncio.run(run(seed=7)) == asyncio.run(run(seed=7))
    assert asyncio.run(run(seed=7)) != asyncio.run(run(seed=8))
    assert asyncio.run(run()) != asyncio.run(run())


def test_every_step_is_a_line_of_the_step_log(tmp_path):
    path = tmp_path / "steps.jsonl"

    async def run():
        engine = FakeEngine()
        async with serving(model_folder(tmp_path / "m"), engine, step_log=path):
            request = EngineRequest(id=5, prompt_ids=(1, 2, 3), params=SamplingParams(max_tokens=4))
            async for _ in engine.generate(request):
                pass

    asyncio.run(run())
    steps = [json.loads(line) for line in path.read_text().splitlines()]
    assert [step["rows"] for step in steps] == [[[5, 3]], [[5, 1]], [[5, 1]], [[5, 1]]]
    assert steps[0]["budget"] == INFO.max_batched_tokens


def test_a_step_log_that_cannot_be_written_is_a_wrong_setting(tmp_path):
    settings = Settings(model=str(tmp_path), step_log=tmp_path / "log")
    (tmp_path / "log").mkdir()
    with pytest.raises(ConfigError, match="--step-log"):
        build_app(settings, FakeEngine())


def test_the_engine_is_closed_with_the_app(tmp_path):
    async def run():
        engine = FakeEngine()
        async with serving(model_folder(tmp_path / "m"), engine):
            pass
        assert engine.status.phase == "closed"
        assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []

    asyncio.run(run())


def test_two_apps_live_side_by_side(tmp_path):
    async def run():
        folder = model_folder(tmp_path / "m")
        async with serving(folder, served_model_name=["a"]) as (first, _):
            async with serving(folder, served_model_name=["b"]) as (second, app):
                app.state.pequod.begin_drain()
                assert (await first.get("/v1/models")).json()["data"][0]["id"] == "a"
                assert (await second.get("/v1/models")).json()["data"][0]["id"] == "b"
                assert (await first.get("/ready")).status_code == 200
                assert (await second.get("/ready")).status_code == 503
                await until(lambda: True)

    asyncio.run(run())
