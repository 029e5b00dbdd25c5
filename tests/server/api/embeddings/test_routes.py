"""/v1/embeddings: forms of input and of vectors over a fake engine, then the built-in model through OpenAI's client."""

import asyncio
import base64
import struct

import httpx
import numpy as np
import openai
import pytest
import torch
from msgspec.structs import replace

from engine import EngineDied, Pooling, fetch
from server.api.embeddings.request import EmbeddingRequest
from server.tokenization.tokenizer import Tokenizer
from tests.fakes import INFO, FakeEngine, embedded, listening, model_folder, serving, until
from tests.live import Server
from tests.server.generation.test_choices import metric
from tests.server.wire import COMPLETIONS, EMBEDDINGS, ask, ids, run

MANY = [f"the sea {number}" for number in range(40)]
WINDOW = 2 * INFO.max_seqs  # inputs of one request that the engine has at a time


async def embed(folder, engine=None, **body):
    response = await ask(folder, EMBEDDINGS, body, engine)
    assert response.status_code == 200, response.text
    return response.json()


def vectors(engine):
    """What the engine was asked for, as it answers."""
    return [list(struct.unpack(f"<{len(data) // 4}f", data)) for data in map(embedded, engine.requests)]


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("the sea", [ids("the sea")]),
        (["the sea", "the whale"], [ids("the sea"), ids("the whale")]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
    ],
)
async def test_every_form_of_input_gets_a_vector_each(folder, given, prompts):
    engine = FakeEngine()
    answer = await embed(folder, engine, input=given, model="fake")
    assert [list(request.prompt_ids) for request in engine.requests] == prompts
    assert {request.params.pooling for request in engine.requests} == {Pooling(kind="last")}
    tokens = sum(map(len, prompts))
    assert answer == {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": vector}
            for index, vector in enumerate([[float(f"{x:.9g}") for x in vector] for vector in vectors(engine)])
        ],
        "model": "fake",
        "usage": {
            "prompt_tokens": tokens,
            "total_tokens": tokens,
            "prompt_tokens_details": {"cached_tokens": len(prompts)},
        },
    }


async def test_numbers_and_base64_are_the_same_bits(folder):
    engine = FakeEngine()
    numbers = (await embed(folder, engine, input="the sea", encoding_format="float"))["data"][0]["embedding"]
    packed = (await embed(folder, input="the sea", encoding_format="base64"))["data"][0]["embedding"]
    assert base64.b64decode(packed) == embedded(engine.requests[0]) == struct.pack("<8f", *numbers)


async def test_pooling_and_dimensions_are_the_engines(folder):
    engine = FakeEngine()
    answer = await embed(folder, engine, input="the sea", pooling="mean", dimensions=8)
    assert engine.requests[0].params.pooling == Pooling(kind="mean", dimensions=8)
    assert len(answer["data"][0]["embedding"]) == 8
    assert len((await embed(folder, input="the sea", dimensions=3))["data"][0]["embedding"]) == 3


async def test_tokens_around_a_text_can_be_left_out(tmp_path):
    config = {"eos_token": "<|end|>", "bos_token": "<|user|>", "add_bos_token": True}
    own = model_folder(tmp_path / "own", tokenizer_config=config)
    for body, tokens in (({}, [1, *ids("the")]), ({"add_special_tokens": False}, ids("the"))):
        engine = FakeEngine()
        await embed(own, engine, input="the", **body)
        assert list(engine.requests[0].prompt_ids) == tokens


@pytest.mark.parametrize(
    ("body", "cut"),
    [
        ({}, list(range(9))),
        ({"truncate_prompt_tokens": 4}, [5, 6, 7, 8]),
        ({"truncate_prompt_tokens": 4, "truncation_side": "left"}, [5, 6, 7, 8]),
        ({"truncate_prompt_tokens": 4, "truncation_side": "right"}, [0, 1, 2, 3]),
        ({"truncate_prompt_tokens": 100}, list(range(9))),
        ({"truncate_prompt_tokens": -1}, list(range(9))),
    ],
)
async def test_long_inputs_are_cut_on_request(folder, body, cut):
    engine = FakeEngine()
    await embed(folder, engine, input=list(range(9)), **body)
    assert list(engine.requests[0].prompt_ids) == cut


async def test_an_input_may_be_as_long_as_the_model_takes_and_no_longer(folder):
    assert (await embed(folder, input=[5] * 512))["usage"]["prompt_tokens"] == 512
    refused = await ask(folder, EMBEDDINGS, {"input": [[5], [5] * 513]})
    error = refused.json()["error"]
    assert (refused.status_code, error["param"], error["code"]) == (400, "input", "context_length_exceeded")
    assert "Input 1 has 513 tokens" in error["message"] and "512" in error["message"]
    assert (await embed(folder, input=[5] * 513, truncate_prompt_tokens=-1))["usage"]["prompt_tokens"] == 512
    assert "characters" in (await ask(folder, EMBEDDINGS, {"input": "a " * 1_000_000})).json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": None}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["the", ""]}, "input.1"),
        ({"input": [[5], []]}, "input.1"),
        ({"input": ["the", 5]}, "input.1"),
        ({"input": [5, "the"]}, "input.1"),
        ({"input": [340]}, "input"),
        ({"input": [-1]}, "input.0"),
        ({"input": [True]}, "input.0"),
        ({"input": {"words": "the"}}, "input"),
        ({"input": ["the"] * 2049}, "input"),
        ({"input": "the", "dimensions": 0}, "dimensions"),
        ({"input": "the", "dimensions": 9}, "dimensions"),
        ({"input": "the", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "the", "pooling": "max"}, "pooling"),
        ({"input": "the", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": "the", "truncation_side": "left"}, "truncation_side"),
        ({"input": "the", "priority": 1}, "priority"),
        ({"input": "the", "cache_salt": ""}, "cache_salt"),
        ({"input": "the", "messages": [{"role": "user", "content": "the"}]}, "messages"),
        ({"input": "the", "normalize": False}, "normalize"),
        ({"input": "the", "stream": True}, "stream"),
    ],
)
async def test_bad_input_is_refused_by_name(folder, body, param):
    engine = FakeEngine()
    response = await ask(folder, EMBEDDINGS, body, engine)
    assert response.status_code == 400, response.text[:200]
    assert response.json()["error"]["param"] == param
    assert engine.requests == []


async def test_a_text_without_tokens_is_refused(folder, monkeypatch):
    monkeypatch.setattr(Tokenizer, "encode", lambda *_: [])
    assert (await ask(folder, EMBEDDINGS, {"input": "the"})).json()["error"]["param"] == "input"


async def test_who_cannot_be_served(folder):
    assert (await ask(folder, EMBEDDINGS, {"input": "a", "model": "gpt-4"})).status_code == 404
    assert (await ask(folder, EMBEDDINGS, {"input": "a"}, api_key=["k"])).status_code == 401
    loading = await ask(folder, EMBEDDINGS, {"input": "a"}, FakeEngine(is_loaded=False), wait=False)
    assert (loading.status_code, int(loading.headers["retry-after"]) >= 1) == (503, True)
    mute = await ask(folder, EMBEDDINGS, {"input": "a"}, FakeEngine(info=replace(INFO, hidden_size=0)))
    assert (mute.status_code, mute.json()["error"]["param"]) == (400, "model")


async def test_salt_and_priority_go_to_the_engine(folder):
    engine = FakeEngine()
    body = {"input": ["a", "b"], "cache_salt": "s", "priority": -3}
    assert (await ask(folder, EMBEDDINGS, body, engine, scheduling_policy="priority")).status_code == 200
    assert [(request.cache_salt, request.priority) for request in engine.requests] == [("s", -3)] * 2
    keys = {"api_key": ["a", "b"], "headers": {"Authorization": "Bearer a"}}
    other = FakeEngine()
    await ask(folder, EMBEDDINGS, {"input": "a", "cache_salt": "s"}, other, **keys)
    assert other.requests[0].cache_salt not in ("", "s"), "whoever has another key finds nothing of this one's"


# Many inputs


async def test_many_inputs_are_submitted_in_order_and_leave_capacity_for_others(folder):
    engine = FakeEngine(delay=0.001)
    async with serving(folder, engine, max_num_queued_reqs=5) as (client, app):
        limits = app.state.pequod.limits
        engine.hold()
        asking = asyncio.create_task(client.post(EMBEDDINGS, json={"input": MANY}))
        await until(lambda: len(engine.open) == WINDOW)
        assert limits.open_choices == 1, "a request is one place of the queue"
        other = asyncio.create_task(client.post(COMPLETIONS, json={"prompt": "the whale", "max_tokens": 2}))
        await until(lambda: len(engine.open) == WINDOW + 1)
        assert [list(request.prompt_ids) for request in engine.requests[:WINDOW]] == [
            ids(text) for text in MANY[:WINDOW]
        ]
        engine.let_go()
        assert (await other).status_code == 200
        answer = (await asking).json()
        fed = [request for request in engine.requests if request.params.pooling]
        assert [list(request.prompt_ids) for request in fed] == [ids(text) for text in MANY]
        assert [entry["index"] for entry in answer["data"]] == list(range(len(MANY)))
        told = [struct.pack("<8f", *entry["embedding"]) for entry in answer["data"]]
        assert told == [embedded(request) for request in fed]
        assert limits.open_choices == 0


async def test_many_requests_share_the_engine_and_leave_the_queue_to_others(folder):
    engine = FakeEngine(delay=0.001)
    async with serving(folder, engine, max_num_queued_reqs=8) as (client, app):
        engine.hold()
        given = [[f"{letter} {number}" for number in range(40)] for letter in "abcdefghi"]
        asking = [asyncio.create_task(client.post(EMBEDDINGS, json={"input": texts})) for texts in given]
        await until(lambda: len(engine.open) == WINDOW and app.state.pequod.limits.inputs.open == 9 * 40)
        other = asyncio.create_task(client.post(COMPLETIONS, json={"prompt": "the whale", "max_tokens": 2}))
        await until(lambda: len(engine.open) == WINDOW + 1)
        assert len(engine.requests) == WINDOW + 1, "of nine requests no more inputs than of one"
        engine.let_go()
        assert (await other).status_code == 200
        assert [len((await each).json()["data"]) for each in asking] == [40] * 9
        # Whoever waits gets its turn behind a window of each of the others, not behind all that they have.
        fed = [list(request.prompt_ids) for request in engine.requests]
        first = [fed.index(ids(texts[0])) for texts in given]
        assert max(first) <= 9 * WINDOW < fed.index(ids(given[0][-1]))
        assert app.state.pequod.limits.inputs.open == app.state.pequod.limits.open_choices == 0


async def test_more_inputs_than_the_server_holds_get_503(folder, monkeypatch):
    monkeypatch.setattr("server.http.admission.MAX_OPEN_INPUTS", 60)
    engine = FakeEngine()
    engine.hold()
    async with serving(folder, engine) as (client, _):
        asking = asyncio.create_task(client.post(EMBEDDINGS, json={"input": MANY}))
        await until(lambda: engine.open)
        full = await client.post(EMBEDDINGS, json={"input": MANY})
        assert (full.status_code, full.json()["error"]["code"]) == (503, "queue_full")
        engine.let_go()
        assert (await asking).status_code == 200
        alone = await client.post(EMBEDDINGS, json={"input": MANY * 2})
        assert alone.status_code == 200, "what is alone gets in"


async def test_a_request_may_bring_2048(folder):
    engine = FakeEngine()
    answer = await embed(folder, engine, input=[[number % 300] for number in range(2048)], encoding_format="base64")
    assert len(answer["data"]) == len(engine.requests) == answer["usage"]["prompt_tokens"] == 2048


async def test_the_counts_are_those_of_prompts_alone(folder):
    async with serving(folder) as (client, _):
        answer = (await client.post(EMBEDDINGS, json={"input": MANY})).json()
        tokens = answer["usage"]["prompt_tokens"]
        assert await metric(client, "vllm:prompt_tokens_total") == tokens
        assert await metric(client, "vllm:prompt_tokens_cached_total") == len(MANY)
        for name in ("request_prompt_tokens", "e2e_request_latency_seconds", "request_prefill_time_seconds"):
            assert await metric(client, f"vllm:{name}_count") == len(MANY)
        assert await metric(client, "vllm:request_success_total", finished_reason="stop") == len(MANY)
        assert await metric(client, "vllm:request_params_n_count") == 1
        none = ("time_to_first_token_seconds", "inter_token_latency_seconds", "request_decode_time_seconds",
                "request_generation_tokens", "request_params_max_tokens")  # fmt: skip
        for name in none:
            assert await metric(client, f"vllm:{name}_count") == 0, name
        assert await metric(client, "vllm:generation_tokens_total") == 0
        assert await metric(client, "vllm:num_requests_running") == 0


# The end before the end


async def test_a_client_that_hangs_up_stops_the_work(folder):
    engine = FakeEngine()
    engine.hold()
    async with serving(folder, engine) as (client, app), listening(app) as url:
        async with httpx.AsyncClient(base_url=url) as real:
            asking = asyncio.create_task(real.post(EMBEDDINGS, json={"input": MANY}))
            await until(lambda: len(engine.open) == WINDOW)
            asking.cancel()
            await until(lambda: not engine.open)
        engine.let_go()
        await until(lambda: app.state.pequod.limits.open_choices == 0)
        assert len(engine.requests) == WINDOW, "nothing was fed behind"
        assert await metric(client, "pequod:request_aborts_total", cause="disconnect") == 1
        assert await metric(client, "vllm:request_success_total", finished_reason="abort") == len(MANY)


async def test_a_deadline_ends_all_inputs(folder, expire):
    engine = FakeEngine()
    engine.hold()
    async with serving(folder, engine) as (client, _):
        headers = {"X-Deadline-Ms": "60000"}
        asking = asyncio.create_task(client.post(EMBEDDINGS, json={"input": MANY}, headers=headers))
        await until(lambda: len(engine.open) == WINDOW)
        expire()
        late = await asking
    assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert len(engine.aborted) == WINDOW


async def test_what_the_engine_cannot_finish_is_reported(folder):
    engine = FakeEngine()
    engine.error_at = (1, "the hidden states are no numbers")
    failed = await ask(folder, EMBEDDINGS, {"input": MANY}, engine)
    assert (failed.status_code, failed.json()["error"]["code"]) == (500, "engine_error")
    assert "no numbers" in failed.json()["error"]["message"]
    engine = FakeEngine()
    engine.hold()
    async with serving(folder, engine) as (client, _):
        asking = asyncio.create_task(client.post(EMBEDDINGS, json={"input": MANY}))
        await until(lambda: engine.open)
        engine.fail(EngineDied("gone"))
        dead = await asking
        assert (dead.status_code, dead.json()["error"]["code"]) == (503, "engine_died")


async def test_a_drain_ends_it_with_503(folder):
    engine = FakeEngine()
    engine.hold()
    async with serving(folder, engine) as (client, app):
        asking = asyncio.create_task(client.post(EMBEDDINGS, json={"input": MANY}))
        await until(lambda: engine.open)
        app.state.pequod.begin_drain()
        assert not await app.state.pequod.drained(0.05)
        drained = await asking
        assert (drained.status_code, drained.json()["error"]["code"]) == (503, "draining")


async def test_the_examples_of_the_api_page_work(folder):
    for example in EmbeddingRequest.model_config["json_schema_extra"]["examples"]:
        assert (await ask(folder, EMBEDDINGS, example | {"model": "fake"})).status_code == 200
    page = (await run(folder, lambda client: client.get("/openapi.json"))).json()
    shown = page["paths"][EMBEDDINGS]["post"]["responses"]["200"]["content"]["application/json"]["schema"]
    assert shown["$ref"].endswith("/EmbeddingList")


# The built-in model, as clients see it


TEXTS = ["The sea is", "What is continuous batching?", "a whale " * 300, "🐳 äöü", "x"]


@pytest.fixture(scope="module")
def server():
    with Server("--dtype", "float32", "--max-num-batched-tokens", "64") as running:
        yield running


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_openais_client_gets_what_transformers_computes(server, pooling):
    from transformers import AutoModel

    folder = fetch("builtin", weights=True).path
    reference, tokenizer = AutoModel.from_pretrained(folder, dtype=torch.float32).eval(), Tokenizer(folder)
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)
    answer = client.embeddings.create(model="builtin", input=TEXTS, extra_body={"pooling": pooling})
    prompts = [tokenizer.encode(text) for text in TEXTS]
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, prompts))
    for prompt, entry in zip(prompts, answer.data, strict=True):
        with torch.inference_mode():
            states = reference(torch.tensor([prompt])).last_hidden_state[0].double()
        want = (states[-1] if pooling == "last" else states.mean(0)).numpy()
        got = np.array(entry.embedding)
        assert np.linalg.norm(got) == pytest.approx(1, abs=1e-6)
        assert got @ want / np.linalg.norm(want) > 0.99999


def test_many_come_in_order(server):
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)
    some = [[number % 50 + 20, number // 50 + 20] for number in range(300)]
    answer = client.embeddings.create(model="builtin", input=some, dimensions=16)
    assert [entry.index for entry in answer.data] == list(range(300))
    for place in (0, 77, 299):
        [alone] = client.embeddings.create(model="builtin", input=some[place], dimensions=16).data
        assert np.dot(alone.embedding, answer.data[place].embedding) > 0.99999
