"""Messages in Anthropic's form: what is refused, in their envelope, and errors after the first byte."""

import json

import msgspec
import pytest

from server.api.anthropic.errors import MessagesError, envelope
from server.http.errors import ApiError
from tests.fakes import INFO, FakeEngine, serving
from tests.server.api.anthropic.wire import ASKED, COUNT, FOUND, LOOK, MESSAGES, QUESTION, events, refusal
from tests.server.wire import ask, saying


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"n": 2}, "n"),
        ({"stop": ["a"]}, "stop"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages.0.content.0.type"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages.0.content.0.type"),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image"}]}],
                    }
                ]
            },
            "messages.0.content.0.content.0.type",
        ),
        (
            {"messages": [*QUESTION, {"role": "assistant", "content": [{"type": "server_tool_use"}]}]},
            "messages.1.content.0.type",
        ),
        (
            {
                "messages": [
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "look", "input": {}}]}
                ]
            },
            "messages",
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type"),
        ({"tools": [{"name": "look"}]}, "tools.0.input_schema"),
        ({"tools": [{**LOOK, "defer_loading": True}]}, "tools"),
        ({"messages": FOUND, "tools": [{**LOOK, "name": "listen"}]}, "tools"),
        ({"messages": FOUND}, "tools"),
        ({"tools": [{**LOOK, "name": "a b"}]}, "tools.0.name"),
        ({"tools": [LOOK, LOOK]}, "tools"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [LOOK], "tool_choice": {"type": "tool", "name": "listen"}}, "tool_choice"),
        ({"tools": [LOOK], "tool_choice": {"type": "required"}}, "tool_choice.type"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        # The marks of this model's reasoning are not tokens: nothing can end it in time.
        ({"thinking": {"type": "enabled", "budget_tokens": 2}}, "thinking.budget_tokens"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "output_config.format.schema"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management.edits.0.type"),
        ({"container": "c"}, "container"),
        ({"mcp_servers": [{"name": "m"}]}, "mcp_servers"),
        ({"colour": "blue"}, "colour"),
        ({"system": [{"type": "image"}]}, "system.0.type"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_what_is_wrong_is_named(folder, change, param):
    status, error = await refusal(folder, **change)
    assert status == 400
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert param in error["message"]


async def test_a_thread_is_refused_in_the_words_by_which_the_sdks_tool_runner_goes_on_without(folder):
    status, error = await refusal(folder, thread={"type": "create"})
    assert (status, error["param"]) == (400, "thread")
    assert error["details"]["error_code"] == "thread_unsupported_request"


async def test_a_prompt_that_does_not_fit_is_refused_in_the_words_that_agents_search_for(folder):
    status, error = await refusal(folder, messages=[{"role": "user", "content": "sea " * 600}])
    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", "messages")
    assert error["message"].startswith("prompt is too long")
    assert str(INFO.max_len) in error["message"]


async def test_every_error_on_these_paths_has_anthropics_envelope(folder):
    seen = []
    engine = FakeEngine(is_loaded=False)
    async with serving(folder, engine, wait=False, api_key=["k"], max_body_bytes=2000) as (client, app):

        async def post(path=MESSAGES, key="k", **more):
            headers = {"x-api-key": key, **more.pop("headers", {})}
            response = await client.post(path, **{"json": ASKED, **more}, headers=headers)
            seen.append((response.status_code, response))

        await post()  # loading
        engine.finish_loading()
        await app.state.pequod.ready()
        await post(key="other")
        await post(COUNT, key="other")
        await post(json={**ASKED, "model": "gpt"})
        await post(COUNT, json={"messages": QUESTION, "model": "gpt"})
        await post("/v1/messages/batches")
        await post(content=b"{", headers={"content-type": "application/json"}, json=None)
        await post(content=b"a" * 3000, json=None)
        await post(headers={"host": "evil.example"})
        await post(headers={"x-deadline-ms": "never"})
        seen.append((405, await client.get(MESSAGES, headers={"x-api-key": "k"})))
        engine.hold()
        await post(headers={"x-deadline-ms": "50"})
        app.state.pequod.begin_drain()
        await post()
    kinds = []
    for status, response in seen:
        assert response.status_code == status
        msgspec.convert(response.json(), MessagesError)
        assert response.json()["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]
        kinds.append((status, response.json()["error"]["type"]))
    assert kinds == [
        (503, "overloaded_error"), (401, "authentication_error"), (401, "authentication_error"),
        (404, "not_found_error"), (404, "not_found_error"), (404, "not_found_error"), (400, "invalid_request_error"),
        (413, "request_too_large"), (400, "invalid_request_error"), (400, "invalid_request_error"),
        (405, "invalid_request_error"), (504, "timeout_error"), (503, "overloaded_error"),
    ]  # fmt: skip


async def test_other_paths_keep_openais_envelope(folder):
    for path in ("/v1/messagesX", "/v1/chat/completions"):
        body = (await ask(folder, path, {"messages": QUESTION, "model": "gpt"})).json()
        assert set(body) == {"error"}


@pytest.mark.parametrize(
    ("status", "kind"), [(403, "permission_error"), (429, "rate_limit_error"), (500, "api_error"), (502, "api_error")]
)
def test_statuses_have_their_types(status, kind):
    assert json.loads(envelope(ApiError(status, "No."), "req-1"))["error"]["type"] == kind


async def test_an_error_after_the_first_byte_is_an_event_of_its_own(folder):
    engine = FakeEngine(saying("the whale"))
    engine.error_at = (2, "out of memory")
    response = await ask(folder, MESSAGES, {**ASKED, "stream": True}, engine)
    assert response.status_code == 200
    *_, last = events(response.text)
    assert last["type"] == "error"
    msgspec.convert(last, MessagesError)
    assert last["error"]["type"] == "api_error"
    assert last["request_id"] == response.headers["request-id"]
    assert "[DONE]" not in response.text
