"""An error leaves one line in the log that says what was refused and why, in none of the client's words."""

from __future__ import annotations

import asyncio
import logging

import httpx
import pytest

from tests.fakes import FakeEngine, listening, model_folder, serving
from tests.live import WAIT_S

ASKED = {"messages": [{"role": "user", "content": "secret"}]}


async def lines(caplog, tmp_path, use, **settings):
    """The level and the fields of each line that the requests of `use(client)` leave."""
    async with serving(model_folder(tmp_path / "m"), **settings) as (client, _):
        with caplog.at_level("DEBUG", logger="pequod.request"):
            await use(client)
    return logged(caplog)


def logged(caplog, message="refused"):
    return [(record.levelno, record.fields) for record in caplog.records if record.getMessage() == message]


@pytest.mark.parametrize(
    ("request_", "line"),
    [
        (("POST", "/v1/chat/completions", ASKED | {"temperature": 3}),
         {"path": "/v1/chat/completions", "status": 400, "code": "invalid_value", "param": "temperature"}),
        (("POST", "/v1/chat/completions", ASKED | {"secret": 1}),
         {"path": "/v1/chat/completions", "status": 400, "code": "unknown_parameter", "param": "*"}),
        (("POST", "/v1/chat/completions", ASKED | {"metadata": {"secret": 1}}),
         {"path": "/v1/chat/completions", "status": 400, "code": "invalid_type", "param": "metadata.*"}),
        (("POST", "/v1/completions", {"prompt": "a", "model": "secret"}),
         {"path": "/v1/completions", "status": 404, "code": "model_not_found", "param": "model"}),
        (("POST", "/v1/v1/chat/secret", ASKED), {"path": "/v1/v1/chat/*", "status": 404, "code": "not_found"}),
        (("GET", "/v1/chat/completions", None),
         {"path": "/v1/chat/completions", "status": 405, "code": "method_not_allowed"}),
        (("GET", "/v1/responses/secret", None),
         {"path": "/v1/responses/{response_id}", "status": 404, "code": "response_not_found", "param": "response_id"}),
        (("POST", "/v1/chat/completions", ASKED | {"4111111111111111": 1}),
         {"path": "/v1/chat/completions", "status": 400, "code": "unknown_parameter", "param": "*"}),
        (("POST", "/v1/completions", {"prompt": ["a", 7]}),
         {"path": "/v1/completions", "status": 400, "code": "invalid_type", "param": "prompt.1"}),
    ],
)  # fmt: skip
async def test_a_refused_request_leaves_a_line_without_its_content(caplog, tmp_path, request_, line):
    method, path, body = request_

    async def use(client):
        await client.request(method, path, json=body, headers={"X-Request-Id": "mine"})

    [(level, seen)] = await lines(caplog, tmp_path, use)
    assert level == logging.INFO
    assert seen == {"id": "mine", "method": method} | line
    assert "secret" not in caplog.text


async def test_a_missing_key_and_a_wrong_host_leave_a_line_and_a_success_none(caplog, tmp_path):
    async def use(client):
        assert (await client.get("/v1/models")).status_code == 401
        assert (await client.get("/v1/models", headers={"Host": "secret.example"})).status_code == 400
        assert (await client.get("/v1/models", headers={"Authorization": "Bearer k"})).status_code == 200

    seen = await lines(caplog, tmp_path, use, api_key=["k"])
    assert [fields["code"] for _, fields in seen] == ["invalid_api_key", "invalid_host"]


async def test_probes_are_logged_at_the_level_debug(caplog, tmp_path):
    async def use(client):
        assert (await client.get("/metrics")).status_code == 401
        assert (await client.post("/live")).status_code == 405

    seen = await lines(caplog, tmp_path, use, api_key=["k"])
    assert [(level, fields["path"]) for level, fields in seen] == [
        (logging.DEBUG, "/metrics"), (logging.DEBUG, "/live")
    ]  # fmt: skip


async def test_paths_under_the_root_path_are_those_of_the_routes(caplog, tmp_path):
    async with serving(model_folder(tmp_path / "m"), root_path="/llm") as (_, app):
        transport = httpx.ASGITransport(app, root_path="/llm")
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            with caplog.at_level("DEBUG", logger="pequod.request"):
                for path in ("/llm/metrics", "/llm/v1/models"):
                    assert (await client.get(path, headers={"Host": "secret.example"})).status_code == 400
    seen = logged(caplog)
    assert [(level, fields["path"]) for level, fields in seen] == [
        (logging.DEBUG, "/metrics"), (logging.INFO, "/v1/models")
    ]  # fmt: skip


async def test_a_request_that_was_accepted_and_ends_with_an_error_has_failed(caplog, tmp_path):
    engine = FakeEngine()
    engine.hold()
    async with serving(model_folder(tmp_path / "m"), engine) as (client, _):
        with caplog.at_level("INFO", logger="pequod.request"):
            headers = {"X-Deadline-Ms": "50", "X-Request-Id": "mine"}
            assert (await client.post("/v1/completions", json={"prompt": "a"}, headers=headers)).status_code == 504
    assert not logged(caplog)
    line = {"id": "mine", "method": "POST", "path": "/v1/completions", "status": 504, "code": "deadline_exceeded"}
    assert logged(caplog, "failed") == [(logging.INFO, line)]


@pytest.mark.parametrize(
    ("sent", "line"),
    [
        (b"secret\r\n\r\n", (logging.INFO, {"status": 400, "code": "invalid_http"})),
        (b"", (logging.DEBUG, {"status": 408, "code": "head_timeout"})),
    ],
    ids=["not HTTP", "idle"],
)
async def test_a_connection_without_a_request_leaves_a_line(caplog, tmp_path, monkeypatch, sent, line):
    monkeypatch.setattr("server.http.connection.HEAD_S", 0.1)
    async with serving(model_folder(tmp_path / "m")) as (_, app), listening(app) as url:
        host, port = url.removeprefix("http://").split(":")
        with caplog.at_level("DEBUG", logger="pequod.request"):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(sent)
            await asyncio.wait_for(reader.read(), WAIT_S)
            writer.close()
    assert logged(caplog) == [line]
