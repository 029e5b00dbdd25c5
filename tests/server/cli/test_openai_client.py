"""The client of `pequod chat`, `complete` and `bench` against servers that are not as expected."""

from __future__ import annotations

import json
import ssl
import sys
from typing import Any

import httpcore
import httpx
import pytest

from server.cli.bench.client import Ask, Target
from server.cli.commands import Failure, Parser, UsageError, chat, complete, settings_from
from server.cli.openai_client import Shot, base_url, describe, open_client, send
from server.cli.source import Source

MODELS = httpx.Response(200, json={"data": [{"id": "whale", "max_model_len": 64}]})
VERSION = httpx.Response(200, json={"device": "cuda"})


def answering(**responses: httpx.Response | Exception) -> httpx.AsyncClient:
    """Return a client of a server with these responses, or errors, by the last part of the path."""

    def respond(request: httpx.Request) -> httpx.Response:
        response = responses[request.url.path.rpartition("/")[2]]
        if isinstance(response, Exception):
            raise response
        return httpx.Response(response.status_code, headers=response.headers, content=response.content)

    return httpx.AsyncClient(base_url="http://sea", transport=httpx.MockTransport(respond))


async def test_the_first_model_is_found_with_the_version():
    found = await describe(answering(models=MODELS, version=VERSION), None)
    assert found == ("whale", {"id": "whale", "max_model_len": 64}, {"device": "cuda"})


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        (
            httpx.Response(503, json={"error": {"message": "loading the model"}}),
            ": the server responded with status 503: loading the model",
        ),
        (httpx.Response(502, html="<h1>Bad gateway</h1>"), ": the server responded with status 502"),
        (
            httpx.Response(404, json={"detail": "Not Found"}),
            ": the server responded with status 404: Not Found; name one with --model",
        ),
        (httpx.Response(200, html="<h1>It works</h1>"), ": its response is not JSON; name one with --model"),
        *(
            (httpx.Response(200, json=body), "; name one with --model")
            for body in (
                {"data": ["whale", "orca"]},
                {"data": {"id": "whale"}},
                {"data": "whale"},
                {"data": [{"id": 7}, {"name": "whale"}]},
                {"data": []},
                {"data": None},
                ["whale"],
            )
        ),
    ],
)
async def test_a_server_without_a_list_of_models_is_reported_with_the_reason(response, reason):
    with pytest.raises(Failure) as caught:
        await describe(answering(models=response, version=VERSION), None)
    assert str(caught.value) == f"http://sea does not list its models{reason}"
    # A named model does not need the list.
    assert await describe(answering(models=response, version=VERSION), "orca") == ("orca", {}, {"device": "cuda"})


@pytest.mark.parametrize("status", [401, 403])
async def test_a_server_that_requires_a_key_says_so(status):
    with pytest.raises(Failure, match="requires a key; pass it with --api-key"):
        await describe(answering(models=httpx.Response(status), version=VERSION), "orca")


@pytest.mark.parametrize(
    "response",
    [
        httpx.ConnectError("refused"),
        httpx.ReadTimeout("silence"),
        httpx.RemoteProtocolError("closed"),
        httpx.Response(401),
        httpx.Response(404, json={"detail": "Not Found"}),
        httpx.Response(200, text="1.2.3"),
        httpx.Response(200, json="1.2.3"),
    ],
)
async def test_the_version_may_be_missing(response):
    assert (await describe(answering(models=MODELS, version=response), None))[2] == {}


@pytest.mark.parametrize("error", [httpx.ConnectError("refused"), httpx.ReadTimeout("silence")])
async def test_no_response_for_the_models_is_no_server(error):
    with pytest.raises(Failure, match=rf"no server responds at http://sea \({type(error).__name__}\)"):
        await describe(answering(models=error, version=VERSION), "whale")


async def test_a_certificate_that_is_not_trusted_is_reported_with_the_way_to_trust_it():
    error = httpx.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED]")
    error.__cause__ = httpcore.ConnectError()
    error.__cause__.__cause__ = ssl.SSLCertVerificationError()
    with pytest.raises(Failure, match=r"the certificate of http://sea could not be verified.*SSL_CERT_FILE"):
        await describe(answering(models=error, version=VERSION), None)


@pytest.mark.parametrize("command", [chat, complete])
def test_the_key_of_a_server_may_come_from_a_file(command, tmp_path):
    (tmp_path / "keys").write_text("canary\n")
    parser = Parser()
    command.add_arguments(parser)
    loaded = settings_from(parser.parse(["--api-key-file", str(tmp_path / "keys")]))
    assert loaded.settings.first_key == "canary"


LONG = "the prompt is too long. " * 100
REFUSED = httpx.Response(500, json={"error": {"message": LONG}})
BROKEN: dict[str, Any] = {"error": {"message": LONG}}


@pytest.mark.parametrize("response", [REFUSED, httpx.Response(200, json=BROKEN)], ids=["response", "event"])
async def test_a_long_error_is_shown_whole_and_cut_in_the_reports_of_bench(response):
    http = answering(completions=response)
    with pytest.raises(Failure) as caught:
        await Source(http, "whale", "cpu", "float32").stream({"prompt": "Hi"}, print)
    whole = str(caught.value)
    assert whole.endswith(LONG)
    shot = await Target(http, "http://sea", "whale", "completions", {}, None).send(Ask("Hi", 1, 1), 0.0)
    assert shot.error == whole[:340]


async def received(*events: object) -> tuple[Shot, str]:
    """Return the result of a request whose stream has these events, and the text that was shown."""
    stream = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    http = answering(completions=httpx.Response(200, headers={"content-type": "text/event-stream"}, text=stream))
    shown: list[str] = []
    await send(http, {"prompt": "Hi"}, shot := Shot(0.0, 1, 1, sent=0.0), 0.0, shown.append)
    return shot, "".join(shown)


def delta(content: object, **more: object) -> dict[str, object]:
    return {"choices": [{"delta": {"content": content}, **more}]}


async def test_a_text_may_be_a_list_of_parts():
    parts = [{"type": "text", "text": "the "}, {"type": "reference"}, {"type": "text", "text": "sea"}]
    shot, shown = await received(delta(parts), delta(None, finish_reason="stop"))
    assert (shot.error, shot.text, shown, shot.tokens) == (None, "the sea", "the sea", 1)


@pytest.mark.parametrize(
    "event",
    [
        "whale",
        ["whale"],
        {"choices": [None]},
        {"choices": 7},
        delta(7),
        delta(["whale"]),
        {"choices": [{"delta": "whale"}]},
        delta("a", token_ids=7),
        delta("a", logprobs={"content": [{"token": "a"}]}),
        delta("a", logprobs={"token_logprobs": [None]}),
    ],
)
async def test_an_event_of_another_form_fails_the_request(event):
    shot, _ = await received(event)
    assert shot.error == "the server sent a response of an unexpected form"


@pytest.mark.parametrize("usage", ["none", 7, {"prompt_tokens": "12", "completion_tokens": -1}, {}])
async def test_counts_of_another_form_are_unknown(usage):
    shot, shown = await received(delta("a"), delta("b"), {"choices": [], "usage": usage})
    assert (shot.error, shown, shot.prompt_tokens, shot.tokens) == (None, "ab", None, 2)


@pytest.mark.parametrize("url", ["HTTP://sea", "http://sea/v1/", "https://[::1]:65535"])
def test_a_url_may_have_v1_and_any_case(url):
    assert base_url(url) == url.rstrip("/").removesuffix("/v1")


@pytest.mark.parametrize(
    "url", ["sea", "ftp://sea", "http://", "http://127.0.0.1:x", "http://[::1", "http://sea:99999"]
)
def test_what_is_not_a_url_is_a_usage_error(url):
    with pytest.raises(UsageError, match="is not a URL such as"):
        base_url(url)


async def test_a_key_may_have_any_characters():
    async with open_client("http://sea", "clé-🔑", 1.0) as http:
        assert http.build_request("GET", "/").headers.raw[-1][1] == "Bearer clé-🔑".encode()


@pytest.mark.parametrize(
    ("proxy", "reason"),
    [("socks5://sea:1", "SOCKS needs the package socksio"), ("foo://sea", "scheme"), ("http://sea:x", "Invalid port")],
)
def test_a_proxy_that_cannot_be_used_is_a_usage_error(monkeypatch, proxy, reason):
    monkeypatch.setitem(sys.modules, "socksio", None)
    monkeypatch.setenv("ALL_PROXY", proxy)
    with pytest.raises(UsageError, match=rf"the proxy in .*ALL_PROXY cannot be used: .*{reason}"):
        open_client("http://sea", None, 1.0)


def test_certificates_that_cannot_be_read_are_a_usage_error(monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", "/nowhere.pem")
    with pytest.raises(UsageError, match="SSL_CERT_FILE"):
        open_client("https://sea", None, 1.0)


@pytest.mark.parametrize("body", [{"prompt": "caf\udce9"}, {"messages": [{"role": "user", "content": "\udcff"}]}])
async def test_a_text_that_is_not_utf_8_is_reported_before_it_is_sent(body):
    with pytest.raises(UsageError, match="the text is not valid UTF-8"):
        await Source(answering(), "whale", "cpu", "float32").stream(body, print)
