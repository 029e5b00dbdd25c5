"""The door: hosts, headers, origins, methods and routes that it lets in, and what it says to the others."""

from __future__ import annotations

import re

import pytest
from fastapi import Depends

from server.http.auth import user
from tests.fakes import model_folder, serving


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
        # No stranger's page has an address for a name: health checks and Prometheus send that of the pod.
        ({}, "10.0.0.7:8000", 200),
        ({}, "[2001:db8::1]:8000", 200),
        ({"host": "0.0.0.0", "allowed_hosts": ["api.example"]}, "10.0.0.7:8000", 200),
        ({"host": "0.0.0.0", "allowed_hosts": ["api.example"]}, "[fd00::7]", 200),
        ({"host": "0.0.0.0", "allowed_hosts": ["api.example"]}, "10.0.0.7.evil.example", 400),
        ({}, "::1", 400),  # without brackets the last group would be the port
        ({}, "", 400),
        # What is reached from elsewhere without a key answers under names that no stranger's page can have.
        ({"host": "0.0.0.0"}, "anything.example", 400),
        ({"host": "0.0.0.0"}, "localhost:8000", 200),
        ({"host": "0.0.0.0"}, "pequod:8000", 200),
        ({"host": "0.0.0.0"}, "192.168.7.5:8000", 200),
        ({"host": "0.0.0.0"}, "[2001:db8::1]:8000", 200),
        ({"host": "0.0.0.0"}, "192.168.7.5.evil.example", 400),
        ({"host": "::"}, "evil.example.", 400),
        ({"host": "0.0.0.0", "api_key": ["k"]}, "anything.example", 200),
        ({"host": "0.0.0.0", "allowed_hosts": ["*"]}, "anything.example", 200),
        ({"host": "0.0.0.0", "allowed_hosts": ["api.example"]}, "api.example:443", 200),
        ({"host": "0.0.0.0", "allowed_hosts": ["api.example"]}, "localhost", 400),
        ({"allowed_hosts": ["*"]}, "evil.example", 200),
    ],
)
async def test_the_host_header_must_be_one_of_ours(tmp_path, settings, host, status):
    async with serving(model_folder(tmp_path / "m"), **settings) as (client, _):
        answer = await client.get("/live", headers={"Host": host})
        assert answer.status_code == status
        if status == 400:
            assert answer.json()["error"]["code"] == "invalid_host"


async def test_a_request_without_a_host_is_accepted(tmp_path):
    async with serving(model_folder(tmp_path / "m"), allowed_hosts=["api.example"]) as (client, _):
        request = client.build_request("GET", "/live")  # of HAProxy's health check, for example; no browser's
        del request.headers["host"]
        assert (await client.send(request)).status_code == 200


@pytest.mark.parametrize(
    ("settings", "host", "message"),
    [
        ({}, "llm.example",
         "the host 'llm.example'; start it with --allowed-hosts llm.example and all other names that clients use"),
        ({"host": "0.0.0.0"}, "llm.example:8000",
         "the host 'llm.example'; start it with --allowed-hosts llm.example and all other names that clients use, "
         "or with an API key"),
        ({"allowed_hosts": ["a.example"], "api_key": ["k"]}, "llm.example",
         "the host 'llm.example'; add it to --allowed-hosts"),
        ({}, "<script>",
         "that Host header; start it with --allowed-hosts NAME and all other names that clients use"),
        ({"allowed_hosts": ["a.example"]}, "x" * 65, "that Host header; add it to --allowed-hosts"),
    ],
)  # fmt: skip
async def test_the_error_names_the_host_and_what_accepts_it(tmp_path, settings, host, message):
    async with serving(model_folder(tmp_path / "m"), **settings) as (client, _):
        assert (await client.get("/live", headers={"Host": host})).json()["error"]["message"] == (
            f"This server does not accept {message}."
        )


async def test_two_hosts_and_endless_headers_are_refused(tmp_path):
    async with serving(model_folder(tmp_path / "m"), allowed_hosts=["*"]) as (client, _):
        twice = await client.get("/live", headers=[("Host", "localhost"), ("Host", "evil.example")])
        assert (twice.status_code, twice.json()["error"]["code"]) == (400, "invalid_host")
        assert (await client.get("/live", headers={"X": "x" * 60_000})).status_code == 200
        assert (await client.get("/live", headers={"X": "x" * 70_000})).status_code == 431


async def test_a_request_keeps_its_id_or_gets_one(tmp_path):
    async with serving(model_folder(tmp_path / "m")) as (client, _):
        assert (await client.get("/live", headers={"X-Request-Id": "abc-1.2:3"})).headers["x-request-id"] == "abc-1.2:3"
        for bad in ("", "two words", "x" * 129, "<script>", "\u00fc"):
            made = (await client.get("/nowhere", headers={"X-Request-Id": bad.encode()})).headers["x-request-id"]
            assert re.fullmatch(r"req-[0-9a-f]{16}", made)


async def test_a_wrong_method_is_refused_with_those_that_the_path_allows(tmp_path):
    async with serving(model_folder(tmp_path / "m")) as (client, _):
        answer = await client.put("/v1/responses/resp_1")
        assert (answer.status_code, answer.headers["allow"]) == (405, "DELETE, GET")
        assert (await client.put("/v1/embeddings")).headers["allow"] == "POST"


async def test_cors_is_off_unless_it_is_set(tmp_path):
    preflight = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST",
                 "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os"}  # fmt: skip
    async with serving(model_folder(tmp_path / "m")) as (client, _):
        answer = await client.options("/v1/models", headers=preflight)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (403, "origin_not_allowed")
        assert "--allowed-origins" in error["message"]
        assert "access-control-allow-origin" not in answer.headers
        assert (await client.options("/v1/models")).status_code == 405  # no preflight
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
        answer = await client.options("/v1/models", headers=preflight | {"Origin": "https://b.example"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "origin_not_allowed")
        assert "access-control-allow-origin" not in answer.headers


async def test_a_page_of_another_origin_cannot_post_without_a_preflight(tmp_path):
    async with serving(model_folder(tmp_path / "m")) as (client, app):
        app.post("/probe", dependencies=[Depends(user)])(lambda: {})
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", None):
            headers = {"Origin": "https://a.example"} | ({"Content-Type": kind} if kind else {})
            assert (await client.post("/probe", content=b"{}", headers=headers)).status_code == 415
        json_type = {"Origin": "https://a.example", "Content-Type": "application/json; charset=utf-8"}
        assert (await client.post("/probe", content=b"{}", headers=json_type)).status_code == 200
        assert (await client.post("/probe", content=b"{}")).status_code == 200  # curl -d names no JSON


async def test_a_page_of_an_allowed_origin_may_post_nothing_without_a_type(tmp_path):
    """OpenAI's JavaScript library cancels a response so."""
    async with serving(model_folder(tmp_path / "m"), allowed_origins=["https://a.example"]) as (client, app):
        app.post("/probe", dependencies=[Depends(user)])(lambda: {})
        for origin, body, status in (("a", b"", 200), ("a", b"{}", 415), ("b", b"", 415)):
            headers = {"Origin": f"https://{origin}.example"}
            assert (await client.post("/probe", content=body, headers=headers)).status_code == status
        chunked = await client.post("/probe", content=empty(), headers={"Origin": "https://a.example"})
        assert chunked.status_code == 415, "whether it has a body is not known yet"
    async with serving(tmp_path / "m", allowed_origins=["*"]) as (client, _):
        answer = await client.post("/v1/responses/resp_1/cancel", headers={"Origin": "https://b.example"})
        assert answer.status_code == 404


async def empty():
    """A body whose length is not known before it ends."""
    yield b""


async def test_a_compressed_body_is_refused_by_name(tmp_path):
    async with serving(model_folder(tmp_path / "m")) as (client, _):
        for coding, status in (("gzip", 415), ("identity", 200)):
            headers = {"Content-Encoding": coding, "Content-Type": "application/json"}
            answer = await client.post("/tokenize", content=b'{"prompt": "a"}', headers=headers)
            assert answer.status_code == status
            assert status == 200 or answer.json()["error"]["code"] == "invalid_content_encoding"
        assert (await client.get("/live", headers={"Content-Encoding": "gzip"})).status_code == 200  # without a body


async def test_unknown_routes_and_methods_get_the_error_envelope(tmp_path):
    async with serving(model_folder(tmp_path / "m")) as (client, _):
        for method, path, status in [
            ("GET", "/nowhere", 404),
            ("GET", "/v1/models/a/", 404),
            ("GET", "/live/", 404),
            ("POST", "/live", 405),
            ("DELETE", "/v1/models", 405),
            ("PUT", "/metrics", 405),
        ]:
            answer = await client.request(method, path)
            assert answer.status_code == status, path
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
