"""The examples of the API page work: each is sent as it stands, to a server that has just been started."""

import json

import pytest

from server.app import build_app
from server.settings import Settings
from tests.fakes import FakeEngine, reranker_folder, serving
from tests.server.wire import RERANK, SCORE

PAGE = build_app(Settings(model="builtin"), FakeEngine()).openapi()
BODIES = {
    path: operations["post"]["requestBody"]["content"]["application/json"]["schema"]
    for path, operations in PAGE["paths"].items()
    if "requestBody" in operations.get("post", {})
}
EXAMPLES = [(path, example) for path, schema in BODIES.items() for example in schema.get("examples", ())]


def test_every_body_has_an_example():
    assert BODIES.keys() == {path for path, _ in EXAMPLES}


def check(answer, path, example):
    assert answer.status_code == 200, answer.text
    kind = answer.headers["content-type"].partition(";")[0]
    assert kind in PAGE["paths"][path]["post"]["responses"]["200"]["content"]
    assert kind == ("text/event-stream" if example.get("stream") else "application/json")


def of(paths):
    """Run a test for each example of these paths."""
    own = [(path, example) for path, example in EXAMPLES if path in paths]
    return pytest.mark.parametrize(("path", "example"), own, ids=lambda part: json.dumps(part)[:60])


@of(BODIES.keys() - {RERANK, SCORE})
def test_an_example_is_answered_as_documented(server, path, example):
    check(server.client.post(path, json=example), path, example)


@of({RERANK, SCORE})
async def test_an_example_for_a_reranker_is_answered_as_documented(tmp_path, path, example):
    folder = reranker_folder(tmp_path / "fake")
    async with serving(folder, FakeEngine(), served_model_name=["qwen3-reranker"]) as (client, _):
        check(await client.post(path, json=example), path, example)
