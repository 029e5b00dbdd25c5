"""/v1/rerank and /v1/score: forms of requests and responses over a fake engine, then scores against transformers."""

import asyncio
import math
import shutil
import struct

import httpx
import pytest
import tokenizers
import torch

from engine import Pooling
from server.api.rerank.response import relevance
from server.tokenization import reranker
from tests.fakes import (
    INFO,
    RERANKER_TEMPLATE,
    FakeEngine,
    embedded,
    listening,
    model_folder,
    reranker_folder,
    serving,
    until,
)
from tests.live import Server
from tests.models import BASE, HEAD
from tests.server.generation.test_choices import metric
from tests.server.wire import CHAT, COMPLETIONS, RERANK, RESPONSES, SCORE, ask

DOCUMENTS = ["the sea", "the whale sails", "a ship"]
MANY = [f"the sea {number}" for number in range(40)]
WINDOW = 2 * INFO.max_seqs  # documents of one request that the engine has at a time


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return reranker_folder(tmp_path_factory.mktemp("model") / "fake")


@pytest.fixture(scope="module")
def library(folder):
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


def prompt(query, document, instruction=None):
    return f"<{instruction}> " * (instruction is not None) + f"yes or no? {query}: {document}<|end|> then"


async def post(folder, path, body, engine=None, **settings):
    response = await ask(folder, path, body, engine, **settings)
    assert response.status_code == 200, response.text
    return response.json()


def scores(engine):
    """What the fake engine's logits are worth, by request."""
    return [relevance(embedded(request)) for request in engine.requests]


async def test_documents_are_ranked_by_the_probability_of_yes(folder, library):
    engine = FakeEngine()
    answer = await post(folder, RERANK, {"model": "fake", "query": "the whale", "documents": DOCUMENTS}, engine)
    texts = [prompt("the whale", document) for document in DOCUMENTS]
    assert [list(request.prompt_ids) for request in engine.requests] == [library.encode(text).ids for text in texts]
    pair = library.token_to_id("yes"), library.token_to_id("no")
    assert {request.params.pooling for request in engine.requests} == {Pooling(kind="logits", token_ids=pair)}
    own = scores(engine)
    order = sorted(range(3), key=own.__getitem__, reverse=True)
    tokens = sum(len(request.prompt_ids) for request in engine.requests)
    assert answer.pop("id").startswith("rerank-")
    assert answer == {
        "model": "fake",
        "usage": {
            "prompt_tokens": tokens, "total_tokens": tokens, "prompt_tokens_details": {"cached_tokens": 3},
        },
        "results": [
            {"index": index, "relevance_score": own[index], "document": {"text": DOCUMENTS[index]}} for index in order
        ],
    }  # fmt: skip


async def test_the_first_of_the_results_are_returned_with_or_without_documents(folder):
    body = {"query": "the whale", "documents": [{"text": DOCUMENTS[0]}, *DOCUMENTS[1:]]}
    whole = (await post(folder, RERANK, body))["results"]
    assert whole == (await post(folder, RERANK, body | {"top_n": 9, "return_documents": True}))["results"]
    assert whole[:2] == (await post(folder, RERANK, body | {"top_n": 2}))["results"]
    bare = (await post(folder, RERANK, body | {"top_n": 1, "return_documents": False}))["results"]
    assert bare == [{"index": whole[0]["index"], "relevance_score": whole[0]["relevance_score"]}]


async def test_equal_documents_keep_their_order(folder):
    answer = await post(folder, RERANK, {"query": "the whale", "documents": ["a ship"] * 5})
    assert [result["index"] for result in answer["results"]] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("left", "right", "pairs"),
    [
        ("a", "b", [("a", "b")]),
        ("a", ["b", "c"], [("a", "b"), ("a", "c")]),
        (["a"], ["b", "c"], [("a", "b"), ("a", "c")]),
        (["a", "d"], ["b", "c"], [("a", "b"), ("d", "c")]),
        (["a"], "b", [("a", "b")]),
    ],
)
async def test_pairs_are_scored_in_order(folder, library, left, right, pairs):
    engine = FakeEngine()
    answer = await post(folder, SCORE, {"text_1": left, "text_2": right, "model": "fake"}, engine)
    texts = [prompt(*pair) for pair in pairs]
    assert [list(request.prompt_ids) for request in engine.requests] == [library.encode(text).ids for text in texts]
    assert answer["id"].startswith("score-") and answer["created"] > 0
    assert (answer["object"], answer["model"]) == ("list", "fake")
    assert answer["data"] == [
        {"index": index, "object": "score", "score": value} for index, value in enumerate(scores(engine))
    ]
    assert answer["usage"]["total_tokens"] == sum(len(request.prompt_ids) for request in engine.requests)


@pytest.mark.parametrize("path", ["/rerank", "/v2/rerank", "/score"])
async def test_the_paths_of_other_servers_lead_here(folder, path):
    rerank, score = {"query": "a", "documents": ["b"]}, {"text_1": "a", "text_2": "b"}
    assert (await ask(folder, path, score if path == "/score" else rerank)).status_code == 200
    assert (await ask(folder, path, rerank if path == "/score" else score)).status_code == 400
    assert (await ask(folder, path, {}, api_key=["k"])).status_code == 401


async def test_an_instruction_is_part_of_the_prompt(folder, library):
    engine = FakeEngine()
    await post(folder, RERANK, {"query": "a", "documents": ["b"], "instruction": "find the whale"}, engine)
    [request] = engine.requests
    assert list(request.prompt_ids) == library.encode(prompt("a", "b", "find the whale")).ids


def test_the_probability_of_yes_is_exact_at_both_ends():
    for yes, no in ((0.0, 0.0), (3.5, 1.25), (1.25, 3.5), (40.0, -40.0), (-40.0, 40.0)):
        assert relevance(struct.pack("<2f", yes, no)) == pytest.approx(1 / (1 + math.exp(no - yes)), rel=1e-15)
    assert relevance(struct.pack("<2f", 1e30, -1e30)) == 1
    assert relevance(struct.pack("<2f", -1e30, 1e30)) == 0


# Long documents


async def test_documents_longer_than_the_context_are_refused_or_cut_before_the_answer(folder, library):
    body = {"query": "a", "documents": ["b", "the sea " * 600]}
    refused = await ask(folder, RERANK, body)
    error = refused.json()["error"]
    assert (refused.status_code, error["param"], error["code"]) == (400, "documents", "context_length_exceeded")
    for fields, lengths in (
        ({"truncate_prompt_tokens": -1}, [None, 512]),
        ({"truncate_prompt_tokens": 60}, [None, 60]),
        ({"truncate_prompt_tokens": 60, "max_tokens_per_doc": 10_000}, [None, 60]),
    ):
        engine = FakeEngine()
        await post(folder, RERANK, body | fields, engine)
        short, long = (list(request.prompt_ids) for request in engine.requests)
        assert short == library.encode(prompt("a", "b")).ids
        whole = library.encode(prompt("a", "the sea " * 600)).ids
        after = library.encode("<|end|> then").ids
        assert long == whole[: lengths[1] - len(after)] + after


async def test_a_prompt_that_fills_the_context_is_scored(folder, library):
    fixed = len(library.encode(prompt("a", "")).ids)
    document = " the" * (INFO.max_len - fixed)
    assert len(library.encode(prompt("a", document)).ids) == INFO.max_len
    assert (await post(folder, SCORE, {"text_1": "a", "text_2": document}))["usage"]["total_tokens"] == INFO.max_len
    refused = await ask(folder, SCORE, {"text_1": "a", "text_2": ["b", document + " the"]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "text_2")
    assert f"Document 1 makes a prompt of {INFO.max_len + 1} tokens" in refused.json()["error"]["message"]


async def test_each_document_is_cut_to_its_own_length(folder, library):
    engine = FakeEngine()
    documents = ["the sea", "the sea the sea the sea"]
    await post(folder, RERANK, {"query": "a", "documents": documents, "max_tokens_per_doc": 4}, engine)
    whole = library.encode(prompt("a", documents[1])).ids
    after = library.encode("<|end|> then").ids
    before = len(library.encode("yes or no? a:").ids)
    assert [list(request.prompt_ids) for request in engine.requests] == [
        library.encode(prompt("a", documents[0])).ids,
        whole[: before + 4] + after,
    ]


async def test_a_length_that_leaves_nothing_of_a_document_is_refused(folder):
    body = {"query": "the whale " * 20, "documents": ["the sea"], "truncate_prompt_tokens": 20}
    refused = await ask(folder, RERANK, body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "truncate_prompt_tokens")
    assert "alone have" in refused.json()["error"]["message"]


async def test_prompts_that_are_too_much_together_are_refused(folder, monkeypatch):
    body = {"query": "the whale " * 20, "documents": ["the sea"] * 3}
    tokens = (await post(folder, RERANK, body))["usage"]["total_tokens"]
    monkeypatch.setattr("server.api.rerank.response.MAX_OPEN_TOKENS", tokens)
    assert (await ask(folder, RERANK, body)).status_code == 200
    refused = await ask(folder, RERANK, body | {"documents": ["the sea"] * 4})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "documents")
    assert "fewer documents" in refused.json()["error"]["message"]


async def test_a_template_that_changes_documents_cannot_cut_them(tmp_path):
    upper = RERANKER_TEMPLATE.replace('"document" %}{{ m.content }}', '"document" %}{{ m.content | length }}')
    folder = reranker_folder(tmp_path / "upper", upper)
    body = {"query": "a", "documents": ["the sea " * 30]}
    assert (await ask(folder, RERANK, body)).status_code == 200
    refused = await ask(folder, RERANK, body | {"max_tokens_per_doc": 1})
    assert refused.status_code == 400 and "cannot be cut" in refused.json()["error"]["message"]


# Bad requests, and models that cannot


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (RERANK, {}, "query"),
        (RERANK, {"query": "a"}, "documents"),
        (RERANK, {"query": "", "documents": ["b"]}, "query"),
        (RERANK, {"query": ["a"], "documents": ["b"]}, "query"),
        (RERANK, {"query": "a", "documents": []}, "documents"),
        (RERANK, {"query": "a", "documents": "b"}, "documents"),
        (RERANK, {"query": "a", "documents": ["b", 5]}, "documents.1"),
        (RERANK, {"query": "a", "documents": ["b", {"title": "b"}]}, "documents.1.text"),
        (RERANK, {"query": "a", "documents": [{"text": "b", "image": "c"}]}, "documents.0.image"),
        (RERANK, {"query": "a", "documents": ["b"] * 2049}, "documents"),
        (RERANK, {"query": "a", "documents": ["b"], "top_n": 0}, "top_n"),
        (RERANK, {"query": "a", "documents": ["b"], "top_n": True}, "top_n"),
        (RERANK, {"query": "a", "documents": ["b"], "return_documents": "yes"}, "return_documents"),
        (RERANK, {"query": "a", "documents": ["b"], "max_tokens_per_doc": 0}, "max_tokens_per_doc"),
        (RERANK, {"query": "a", "documents": ["b"], "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        (RERANK, {"query": "a", "documents": ["b"], "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        (RERANK, {"query": "a", "documents": ["b"], "instruction": ""}, "instruction"),
        (RERANK, {"query": "a", "documents": ["b"], "instruct": "find"}, "instruct"),
        (RERANK, {"query": "a", "documents": ["b"], "rank_fields": ["text"]}, "rank_fields"),
        (RERANK, {"query": "a", "documents": ["b"], "priority": 1}, "priority"),
        (RERANK, {"query": "a", "documents": ["b"], "cache_salt": ""}, "cache_salt"),
        (RERANK, {"query": "a", "documents": ["b"], "stream": True}, "stream"),
        (SCORE, {"text_1": "a"}, "text_2"),
        (SCORE, {"text_1": ["a", "b"], "text_2": ["c"]}, "text_2"),
        (SCORE, {"text_1": ["a", "b"], "text_2": "c"}, "text_2"),
        (SCORE, {"text_1": [], "text_2": "c"}, "text_1"),
        (SCORE, {"text_1": "a", "text_2": [5]}, "text_2.0"),
        (SCORE, {"queries": "a", "documents": "b"}, "queries"),
    ],
)
async def test_bad_input_is_refused_by_name(folder, path, body, param):
    engine = FakeEngine()
    response = await ask(folder, path, body, engine)
    assert response.status_code == 400, response.text[:200]
    assert response.json()["error"]["param"] == param
    assert engine.requests == []


@pytest.mark.parametrize("path", [RERANK, SCORE])
async def test_a_model_that_is_no_reranker_has_no_scores(tmp_path, path):
    body = {"query": "a", "documents": ["b"]} if path == RERANK else {"text_1": "a", "text_2": "b"}
    refused = await ask(model_folder(tmp_path / "chat"), path, body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")
    assert "not a reranker" in refused.json()["error"]["message"]
    assert "--chat-template" in refused.json()["error"]["message"]


async def test_who_cannot_be_served(folder):
    body = {"query": "a", "documents": ["b"]}
    assert (await ask(folder, RERANK, body | {"model": "gpt-4"})).status_code == 404
    assert (await ask(folder, RERANK, body, api_key=["k"])).status_code == 401
    assert (await ask(folder, RERANK, body, FakeEngine(is_loaded=False), wait=False)).status_code == 503


async def test_a_template_whose_answers_are_no_tokens_is_refused_at_the_start(tmp_path):
    async with serving(reranker_folder(tmp_path / "some", answers=("yes",)), wait=False) as (_, app):
        await until(lambda: app.state.pequod.failed is not None)
        assert "'yes' and 'no' are not one token each" in str(app.state.pequod.failed)


async def test_a_template_may_be_for_both(tmp_path):
    chat = '{% for m in messages if m.role == "user" %}{{ m.content }}{% endfor %}'
    both = reranker_folder(tmp_path / "both", RERANKER_TEMPLATE + chat)
    assert (await ask(both, CHAT, {"messages": [{"role": "user", "content": "a"}]})).status_code == 200
    assert (await ask(both, RERANK, {"query": "a", "documents": ["b"]})).status_code == 200


@pytest.mark.parametrize(
    ("template", "is_one"),
    [
        (reranker.QWEN3_TEMPLATE, True),
        (RERANKER_TEMPLATE, True),
        (RERANKER_TEMPLATE.replace("yes or no", "what"), False),
        (RERANKER_TEMPLATE.replace('"query"', '"user"'), False),
        (
            "{% for m in messages %}{{ m['role'] }}: {{ m.content }} (yes or no, 'query' or 'document'){% endfor %}",
            False,
        ),
        ("", False),
    ],
)
def test_a_reranker_is_known_by_its_chat_template(template, is_one):
    assert reranker.asks_for_relevance(template) == is_one


def test_only_a_qwen3_reranker_without_its_template_gets_it():
    for name in ("Qwen/Qwen3-Reranker-0.6B", "/models/qwen3-reranker-4b"):
        assert reranker.own_template(name, "chat") == reranker.QWEN3_TEMPLATE
        assert reranker.own_template(name, RERANKER_TEMPLATE) is None
    assert reranker.own_template("Qwen/Qwen3-0.6B", "chat") is None


# Many documents


async def test_documents_are_admitted_as_inputs_of_embeddings_are(folder):
    engine = FakeEngine(delay=0.001)
    async with serving(folder, engine, max_num_queued_reqs=5) as (client, app):
        limits = app.state.pequod.limits
        engine.hold()
        asking = asyncio.create_task(client.post(RERANK, json={"query": "a", "documents": MANY}))
        await until(lambda: len(engine.open) == WINDOW)
        assert (limits.open_choices, limits.inputs.open) == (1, 40)
        engine.let_go()
        answer = (await asking).json()
        assert sorted(result["index"] for result in answer["results"]) == list(range(40))
        assert (limits.open_choices, limits.inputs.open) == (0, 0)
        assert await metric(client, "vllm:prompt_tokens_total") == answer["usage"]["prompt_tokens"]
        assert await metric(client, "vllm:request_success_total", finished_reason="stop") == 40
        assert await metric(client, "vllm:generation_tokens_total") == 0


async def test_a_client_that_hangs_up_stops_the_work(folder):
    engine = FakeEngine()
    engine.hold()
    async with serving(folder, engine) as (client, app), listening(app) as url:
        async with httpx.AsyncClient(base_url=url) as real:
            asking = asyncio.create_task(real.post(RERANK, json={"query": "a", "documents": MANY}))
            await until(lambda: len(engine.open) == WINDOW)
            asking.cancel()
            await until(lambda: not engine.open)
        engine.let_go()
        await until(lambda: app.state.pequod.limits.open_choices == 0)
        assert len(engine.requests) == WINDOW
        assert await metric(client, "pequod:request_aborts_total", cause="disconnect") == 1


async def test_what_the_engine_cannot_finish_is_reported(folder):
    engine = FakeEngine()
    engine.error_at = (1, "the logits are no numbers")
    failed = await ask(folder, RERANK, {"query": "a", "documents": MANY}, engine)
    assert (failed.status_code, failed.json()["error"]["code"]) == (500, "engine_error")
    engine = FakeEngine()
    engine.hold()
    late = await ask(folder, RERANK, {"query": "a", "documents": MANY}, engine, headers={"X-Deadline-Ms": "80"})
    assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")


# A random Qwen3 with the tokenizer and the chat template of Qwen3, under the name of a reranker


INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
PASSAGES = ["Paris is the capital of France.", "A whale is a mammal. " * 40, "Ünïcode 🐳\n\nand lines", "yes", ""]
QUERY = "What is the capital of France?"


@pytest.fixture(scope="module")
def live(data, tmp_path_factory):
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("models") / "Qwen3-Reranker-tiny"
    sizes = {**BASE, **HEAD, "vocab_size": 151_669, "max_position_embeddings": 1024, "tie_word_embeddings": True}
    torch.manual_seed(4)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **sizes)).to(torch.float32)
    with torch.no_grad():
        for value in model.parameters():
            value.copy_(torch.randn_like(value) * 0.15 if value.dim() > 1 else value)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(data / "tokenizers" / "qwen3" / name, folder / name)
    with Server(str(folder), "--dtype", "float32", "--max-num-batched-tokens", "64") as server:
        yield server, model.eval(), tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


def as_the_model_card_has_it(model, library, query, document, instruction=INSTRUCTION):
    """Encode the parts one by one, and compare the logits of the last position."""
    parts = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n',
        f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}",
        "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    )
    ids = [token for part in parts for token in library.encode(part, add_special_tokens=False).ids]
    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[0, -1]
    pair = logits[[library.token_to_id("no"), library.token_to_id("yes")]].double()
    return pair.softmax(0)[1].item(), len(ids)


def test_scores_equal_those_of_transformers(live):
    server, model, library = live
    answer = server.client.post(RERANK, json={"query": QUERY, "documents": PASSAGES}).json()
    want = [as_the_model_card_has_it(model, library, QUERY, passage) for passage in PASSAGES]
    found = {result["index"]: result["relevance_score"] for result in answer["results"]}
    assert [found[index] for index in range(5)] == pytest.approx([score for score, _ in want], abs=1e-5)
    assert len({round(score, 3) for score, _ in want}) > 3, "a model that does not care proves nothing"
    assert [*found] == sorted(found, key=found.__getitem__, reverse=True)
    assert answer["usage"]["prompt_tokens"] == sum(length for _, length in want)


def test_scores_have_the_same_bits_alone_and_in_any_batch(live):
    server, model, library = live
    told = server.client.post(SCORE, json={"text_1": QUERY, "text_2": PASSAGES * 3, "instruction": "Find fish"}).json()
    batched = [entry["score"] for entry in told["data"]]
    alone = []
    for index, passage in enumerate(PASSAGES):
        body = {"text_1": QUERY, "text_2": passage, "instruction": "Find fish", "cache_salt": f"salt {index}"}
        alone.append(server.client.post(SCORE, json=body).json()["data"][0]["score"])
    assert batched == alone * 3
    want = [as_the_model_card_has_it(model, library, QUERY, passage, "Find fish")[0] for passage in PASSAGES]
    assert alone == pytest.approx(want, abs=1e-5)


def test_documents_share_the_cached_prefix(live):
    server, *_ = live
    body = {"query": "Where do whales sleep?", "documents": [f"Passage {n} says so." for n in range(8)]}
    usage = server.client.post(RERANK, json=body).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 7 * 48


def test_a_conversation_is_refused(live):
    server, *_ = live
    turns = [{"role": "user", "content": "Hello"}]
    for path, body, param in ((CHAT, {"messages": turns}, "messages"), (RESPONSES, {"input": turns}, "input")):
        refused = server.client.post(path, json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
        assert "/v1/rerank" in refused.json()["error"]["message"]
    assert server.client.post(COMPLETIONS, json={"prompt": "Hello", "max_tokens": 2}).status_code == 200
