"""The examples of the API page work: each is sent as it stands, to a server that has just been started."""

import json

import pytest

from server.app import build_app
from server.settings import Settings
from tests.fakes import FakeEngine

PAGE = build_app(Settings(model="builtin"), FakeEngine()).openapi()
BODIES = {
    path: operations["post"]["requestBody"]["content"]["application/json"]["schema"]
    for path, operations in PAGE["paths"].items()
    if "requestBody" in operations.get("post", {})
}
EXAMPLES = [(path, example) for path, schema in BODIES.items() for example in schema.get("examples", ())]


def test_every_body_has_an_example():
    assert BODIES.keys() == {path for path, _ in EXAMPLES}


@pytest.mark.parametrize(("path", "example"), EXAMPLES, ids=lambda part: json.dumps(part)[:60])
def test_an_example_is_answered_as_documented(server, path, example):
    answer = server.client.post(path, json=example)
    assert answer.status_code == 200, answer.text
    kind = answer.headers["content-type"].partition(";")[0]
    assert kind in PAGE["paths"][path]["post"]["responses"]["200"]["content"]
    assert kind == ("text/event-stream" if example.get("stream") else "application/json")
