"""Requests with tools as people wrote them, forced upon a model of random weights: every call parses and validates."""

from __future__ import annotations

import concurrent.futures
import json
import shutil
from collections import Counter

import jsonschema
import pytest

from tests import models
from tests.live import Server
from tests.server.wire import CHAT

EVERY = 30  # of the collections' lines one is asked
NUM_BIASES = 1000


@pytest.fixture(scope="module")
def server(tmp_path_factory, data):
    """A small Qwen3 of random weights with the real vocabulary and chat template."""
    folder = tmp_path_factory.mktemp("random") / "qwen3"
    shape = {**models.BASE, "head_dim": 16, "vocab_size": 151936, "max_position_embeddings": 4096}
    models.MODELS["qwen3-random"] = ("qwen3", {**shape, "num_hidden_layers": 1, "eos_token_id": 151645})
    models.make("qwen3-random", folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(data / "tokenizers/qwen3" / name, folder / name)
    with Server(str(folder), "--dtype", "float32") as running:
        yield running


@pytest.fixture(scope="module")
def closing(data):
    """What closes something is drawn more often: a string drawn at random would hardly ever end."""
    vocabulary = json.loads((data / "tokenizers/qwen3/tokenizer.json").read_text())["model"]["vocab"]
    closers = [i for token, i in vocabulary.items() if token[:1] in ('"', "}", "]") and len(token) < 5]
    return {str(i): 12 for i in sorted(closers)[:NUM_BIASES]}


def cases(data):
    for file in sorted((data / "function_calling").glob("*.jsonl")):
        for line in file.read_text().splitlines()[::EVERY]:
            yield json.loads(line)


def test_every_required_call_is_valid(server, closing, data):
    def ask(numbered):
        number, case = numbered
        body = {"messages": case["messages"], "tools": case["tools"], "tool_choice": "required", "max_tokens": 300}
        more = {"temperature": 1.0, "seed": number, "logit_bias": closing, "thinking_token_budget": 0}
        response = server.client.post(CHAT, json=body | more)
        assert response.status_code == 200, response.text
        return case, response.json()["choices"][0]

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, enumerate(cases(data))))
    seen = Counter()
    for case, choice in answers:
        schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in case["tools"]}
        calls = choice["message"].get("tool_calls", [])
        seen[choice["finish_reason"]] += 1
        for call in calls if choice["finish_reason"] == "tool_calls" else calls[:-1]:
            assert not choice["message"]["content"]
            jsonschema.validate(json.loads(call["function"]["arguments"]), schemas[call["function"]["name"]])
            seen["valid"] += 1
    assert seen["tool_calls"] > len(answers) / 2, "most answers come to an end"
    assert seen["stop"] == 0, "an answer without a call"
    assert seen["valid"] >= seen["tool_calls"]
