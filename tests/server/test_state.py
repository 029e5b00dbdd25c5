"""What a server says and does while it is loading, ready, draining and failed; its ids, seeds and defaults."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace

import httpx
import pytest
from fastapi.responses import StreamingResponse
from msgspec import structs

import engine
from engine import ConfigError, EngineDied, ModelError, packaged
from engine.hub import Folder
from server.http.admission import Caller
from server.http.auth import UserDep
from server.state import AppDep
from server.tokenization.generation_defaults import read_defaults
from tests.fakes import FakeEngine, listening, model_folder, serving
from tests.live import WAIT_S, Server
from tests.server.wire import CHAT, QUESTION, saying


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


async def test_while_loading_everything_answers_but_generation(tmp_path):
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
        assert app.state.pequod.model is None
        engine.finish_loading()
        model = await app.state.pequod.ready()
        assert model.info.max_len == model.prompts.max_len
        ready = await client.get("/ready")
        assert (ready.status_code, ready.json()["state"], ready.json()["share"]) == (200, "ready", 1.0)


async def test_the_port_answers_before_anything_slow_has_happened(tmp_path, monkeypatch):
    """The tokenizer takes until the test lets it go on, and the lifespan does not wait for it."""
    gate = threading.Event()
    monkeypatch.setattr("server.loading.Tokenizer", lambda folder: gate.wait(30))
    async with serving(model_folder(tmp_path / "m"), wait=False) as (client, app):
        assert (await client.get("/live")).status_code == 200
        assert (await client.get("/ready")).json()["state"] == "loading"
        assert app.state.pequod.model is None
        gate.set()


async def test_a_model_that_cannot_be_loaded_is_reported_once(tmp_path):
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


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (lambda folder: (folder / "tokenizer.json").unlink(), ModelError),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), ModelError),
        (lambda folder: (folder / "generation_config.json").write_text("[]"), ModelError),
    ],
)
async def test_broken_small_files_end_the_start_while_the_engine_still_loads(tmp_path, spoil, error):
    folder = model_folder(tmp_path / "m")
    spoil(folder)
    async with serving(folder, FakeEngine(is_loaded=False), wait=False) as (_, app):
        with pytest.raises(error):
            await asyncio.wait_for(app.state.pequod.ready(), WAIT_S)
        assert app.state.pequod.failure.is_set()


async def test_a_chat_template_that_cannot_be_compiled_is_a_wrong_setting(tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text("{% for %}")
    async with serving(model_folder(tmp_path / "m"), wait=False, chat_template=template) as (_, app):
        with pytest.raises(ConfigError, match="--chat-template"):
            await app.state.pequod.ready()


async def test_a_bug_while_loading_ends_the_start_too(tmp_path, monkeypatch, caplog):
    def broken(folder):
        raise RuntimeError("call me ishmael")

    monkeypatch.setattr("server.loading.Tokenizer", broken)
    async with serving(model_folder(tmp_path / "m"), wait=False) as (_, app):
        with pytest.raises(ModelError, match="RuntimeError"):
            await app.state.pequod.ready()
    assert "RuntimeError at" in caplog.text


async def test_an_engine_that_dies_for_good_later_is_noticed(tmp_path):
    engine = FakeEngine()
    async with serving(model_folder(tmp_path / "m"), engine) as (client, app):
        assert not app.state.pequod.failure.is_set()
        engine.fail(EngineDied("it died 4 times in a row"))
        await asyncio.wait_for(app.state.pequod.failure.wait(), WAIT_S)
        assert (await client.get("/ready")).json()["state"] == "failed"


# Health


async def test_health_reports_silence_stalls_and_restarts(tmp_path):
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
        assert (await client.get("/live")).status_code == 200, "the engine alone is replaced"
        on_cpu = app.state.pequod.model
        app.state.pequod.model = replace(on_cpu, info=structs.replace(on_cpu.info, device="cuda:0"))
        for silent_s, expected in ((15, "ready"), (25, "silent")):  # a step may take that long
            engine.status.heartbeat = now - silent_s
            assert await state() == expected
        app.state.pequod.model = on_cpu
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


async def test_health_may_be_a_liveness_probe(tmp_path):
    async with serving(model_folder(tmp_path / "m"), max_num_queued_reqs=2) as (client, app):
        state = app.state.pequod

        async def probed() -> tuple[str, int, int]:
            health, ready = await client.get("/health"), await client.get("/ready")
            assert health.json()["state"] == ready.json()["state"]
            return health.json()["state"], health.status_code, ready.status_code

        assert await probed() == ("ready", 200, 200)
        tickets = [state.limits.admit(Caller(f"{n}", f"{n}"), 1) for n in range(state.limits.max_seqs + 2)]
        assert await probed() == ("full", 200, 503)
        for ticket in tickets:
            ticket.release()
        for phase, shown in (("restarting", "restarting"), ("starting", "starting"), ("loading", "loading")):
            state.engine.status.phase = phase
            assert await probed() == (shown, 200, 503), "of the next engine, for which open requests wait"
        state.engine.status.phase = "ready"
        state.begin_drain()
        assert await probed() == ("draining", 503, 503)
        state.limits.draining = False
        state.engine.fail(EngineDied("gone"))
        assert await probed() == ("failed", 503, 503)


# Drain


async def test_a_drain_lets_running_answers_end(tmp_path):
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


async def test_at_the_deadline_every_stream_ends_with_an_error(tmp_path):
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


async def test_a_stream_that_does_not_end_delays_the_drain_up_to_the_limit(tmp_path, monkeypatch):
    monkeypatch.setattr("server.state.CUT_S", 0.05)
    async with serving(model_folder(tmp_path / "m")) as (_, app):
        app.state.pequod.limits.admit(Caller(), 1)
        assert await asyncio.wait_for(app.state.pequod.drained(0.05), WAIT_S) is False


# Defaults and ids


async def test_sampling_defaults_come_from_the_model_and_stay_in_range(tmp_path):
    written = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 7, "repetition_penalty": "1"}
    folder = model_folder(tmp_path / "m", generation_config=written)
    assert read_defaults("auto", folder) == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    assert read_defaults("engine", folder) == {}
    assert read_defaults(str(folder), tmp_path) == read_defaults("auto", folder)
    assert read_defaults(str(folder / "generation_config.json"), tmp_path) == read_defaults("auto", folder)
    assert read_defaults("auto", tmp_path) == {}
    with pytest.raises(ConfigError):
        read_defaults(str(tmp_path), folder)
    async with serving(folder) as (_, app):
        assert app.state.pequod.model.default_sampling["temperature"] == 0.6


async def test_a_packaged_model_has_defaults_that_requests_and_settings_override(tmp_path, monkeypatch):
    folder = Folder(model_folder(tmp_path / "m"), sampling={"temperature": 0.2, "repetition_penalty": 1.1})
    monkeypatch.setattr(engine, "fetch", lambda *_, **__: folder)

    async def sampled(body, **settings):
        fake = FakeEngine(saying("a"))
        async with serving(folder.path, fake, **settings) as (client, _):
            response = await client.post(CHAT, json={"messages": QUESTION, **body})
            assert response.status_code == 200
        params = fake.requests[0].params
        return round(params.temperature, 3), round(params.repetition_penalty, 3)

    assert await sampled({}) == (0.2, 1.1)
    assert await sampled({"temperature": 0.9}) == (0.9, 1.1)
    assert await sampled({}, generation_config="engine") == (1.0, 1.0)


@pytest.mark.slow
def test_smollm2_answers_without_settings_and_ends():
    if packaged.find("smollm2") is None:
        pytest.skip("smollm2 is not on this machine; `pequod pull smollm2` downloads it")
    body = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
    with Server("smollm2", "--max-model-len", "1024") as server:
        answers = [server.client.post(CHAT, json={**body, "seed": seed}).json() for seed in range(16)]
    choices = [answer["choices"][0] for answer in answers]
    assert sum("Paris" in choice["message"]["content"] for choice in choices) >= 14
    assert sum(choice["finish_reason"] == "stop" for choice in choices) >= 14


async def test_ids_are_new_and_seeds_repeat_only_with_a_seed(tmp_path):
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
    assert await run(seed=7) == await run(seed=7)
    assert await run(seed=7) != await run(seed=8)
    assert await run() != await run()
