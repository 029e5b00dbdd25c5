"""What of a caller and of a request reaches the engine, on every API that generates or computes vectors."""

from __future__ import annotations

import pytest

from engine import EngineRequest
from server.generation import prepare, prompt_limits
from server.http.admission import Ticket
from server.http.auth import hash_key
from tests.fakes import FakeEngine, model_folder
from tests.server.wire import CHAT, COMPLETIONS, EMBEDDINGS, QUESTION, RESPONSES, ask, ids

BODIES = {
    CHAT: {"messages": QUESTION},
    COMPLETIONS: {"prompt": "the sea"},
    EMBEDDINGS: {"input": "the sea"},
    RESPONSES: {"input": "the sea"},
    "/v1/messages": {"messages": QUESTION, "max_tokens": 4},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return model_folder(tmp_path_factory.mktemp("model") / "fake")


async def reached(folder, path, key: str | None = None, **more) -> EngineRequest:
    """The engine's request for one with a caller's key, and settings among `more`."""
    settings = {name: more.pop(name) for name in ("api_key_file", "scheduling_policy") if name in more}
    engine = FakeEngine()
    headers = {"Authorization": f"Bearer {key}"} if key else None
    response = await ask(folder, path, {**BODIES[path], **more}, engine, headers=headers, **settings)
    assert response.status_code == 200, response.text
    [request] = engine.requests
    return request


@pytest.mark.parametrize("path", BODIES)
async def test_the_engine_knows_whose_request_it_is_and_with_what_weight(folder, path, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("first weight=3\nsecond\n")
    first, second = [await reached(folder, path, key, api_key_file=keys) for key in ("first", "second")]
    assert (first.weight, second.weight) == (3.0, 1.0)
    assert (first.flow, second.flow) == (hash_key("first"), hash_key("second"))
    nobody = await reached(folder, path)
    assert (nobody.weight, nobody.flow) == (1.0, "127.0.0.1"), "without keys the address is the caller"


@pytest.mark.parametrize("path", BODIES)
async def test_the_engine_gets_the_priority_and_the_salt_of_a_request(folder, path):
    policy = {"scheduling_policy": "priority"}
    asked = await reached(folder, path, priority=-7, cache_salt="mine", **policy)
    assert (asked.priority, asked.cache_salt) == (-7, "mine")
    asked = await reached(folder, path, **policy)
    assert (asked.priority, asked.cache_salt) == (0, "")


async def test_what_choices_share_is_made_once(folder, monkeypatch):
    made = []

    def counting(name):
        real = getattr(prepare, name)
        monkeypatch.setattr(prepare, name, lambda *args: made.append(name) or real(*args))

    counting("StopString")
    counting("last_with_text")
    body = {"prompt": ["the sea", "the ship"], "n": 3, "stop": ["x", "yy", "z"]}
    response = await ask(folder, COMPLETIONS, body)
    assert len(response.json()["choices"]) == 6
    assert sorted(made) == ["StopString"] * 3 + ["last_with_text"] * 2


async def test_the_tokens_of_a_prompt_count_for_each_choice(folder, monkeypatch):
    monkeypatch.setattr(prompt_limits, "MAX_OPEN_TOKENS", 20)
    counted = []
    monkeypatch.setattr(Ticket, "add_prompt", lambda ticket, tokens: counted.append(tokens))
    for prompts, n, status in (([[5] * 6], 3, 200), ([[5] * 6], 4, 400), ([[5] * 6] * 2, 2, 400), ([[5] * 21], 1, 200)):
        response = await ask(folder, COMPLETIONS, {"prompt": prompts, "n": n})
        assert response.status_code == status
        assert status == 200 or response.json()["error"]["param"] == "n"
    assert counted == [18, 21]


async def test_the_text_of_prompts_in_a_response_is_bounded(folder, monkeypatch):
    monkeypatch.setattr(prompt_limits, "MAX_CHARACTERS", 40)
    [sea] = ids(" the sea")[:1]
    for n, more, status in ((2, {"echo": True}, 200), (8, {"echo": True}, 400), (8, {}, 200)):
        response = await ask(folder, COMPLETIONS, {"prompt": [[sea] * 5], "n": n, **more})
        assert response.status_code == status
        assert status == 200 or response.json()["error"]["param"] == "echo"


async def test_the_tokens_of_bad_words_count_for_each_choice(folder, monkeypatch):
    tokens = len(ids("whale")) + len(ids(" whale"))
    monkeypatch.setattr(prompt_limits, "MAX_BAD_TOKENS", 4 * tokens)
    for prompts, n, status in (("a", 4, 200), (["a", "b"], 2, 200), ("a", 5, 400), (["a", "b", "c"], 2, 400)):
        response = await ask(folder, COMPLETIONS, {"prompt": prompts, "n": n, "bad_words": ["whale"]})
        assert response.status_code == status
        assert status == 200 or response.json()["error"]["param"] == "bad_words"
