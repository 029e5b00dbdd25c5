"""What of a caller and of a request reaches the engine, on every API that generates or computes vectors."""

from __future__ import annotations

import pytest

from engine import EngineRequest
from server.http.auth import hash_key
from tests.fakes import FakeEngine, model_folder
from tests.server.wire import CHAT, COMPLETIONS, EMBEDDINGS, QUESTION, RESPONSES, ask

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
