"""Log-probabilities over HTTP from a real server, against transformers' own log-softmax."""

import pytest
import torch

from engine import fetch
from tests.live import Server
from tests.models import oracle
from tests.server.wire import CHAT, COMPLETIONS, chunks, joined, whole

TEXT = "The whale came up; 🐳 the captain said: 7 + 5 is 12."
EXACT = 1e-4


@pytest.fixture(scope="module")
def server():
    with Server("--dtype", "float32") as running:
        yield running


@pytest.fixture(scope="module")
def expected():
    """Of these tokens: row i is the distribution of token i + 1."""
    model = oracle(fetch("builtin", weights=True).path, torch.float32)

    def rows(ids):
        with torch.inference_mode():
            return model(torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)

    return rows


def post(server, path, **body):
    response = server.client.post(path, json={"temperature": 0, "return_token_ids": True, **body})
    assert response.status_code == 200, response.text
    return response


def check(row, token, told):
    """A token's told log-probability and the likely ones beside it, {id: logprob}."""
    assert told[token] == pytest.approx(row[token].item(), abs=EXACT)
    for other, logprob in told.items():
        assert logprob == pytest.approx(row[other].item(), abs=EXACT)
    likely = sorted((logprob for other, logprob in told.items()), reverse=True)[: len(told) - 1]
    assert likely == pytest.approx(row.topk(len(likely)).values.tolist(), abs=EXACT)


def near(value):
    """The same with room for what rounding makes of a number in other company."""
    if isinstance(value, dict):
        return {key: near(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [near(inner) for inner in value]
    return pytest.approx(value, abs=EXACT) if isinstance(value, float) else value


def test_prompt_and_output_have_the_log_probabilities_of_transformers(server, expected):
    body = {"prompt": TEXT, "max_tokens": 8, "ignore_eos": True, "logprobs": 3, "prompt_logprobs": 3, "echo": True}
    [choice] = post(server, COMPLETIONS, **body).json()["choices"]
    prompt, ids = choice["prompt_token_ids"], choice["prompt_token_ids"] + choice["token_ids"]
    rows = expected(ids)
    columns = choice["logprobs"]
    assert columns["token_logprobs"][0] is columns["top_logprobs"][0] is choice["prompt_logprobs"][0] is None
    for place, token in enumerate(ids[1:]):
        assert columns["token_logprobs"][place + 1] == pytest.approx(rows[place, token].item(), abs=EXACT)
        top = sorted(columns["top_logprobs"][place + 1].values(), reverse=True)[:3]
        assert top == pytest.approx(rows[place].topk(3).values.tolist(), abs=EXACT)
    for place, (token, entry) in enumerate(zip(prompt[1:], choice["prompt_logprobs"][1:], strict=True)):
        check(rows[place], token, {int(i): told["logprob"] for i, told in entry.items()})


def test_so_has_a_conversation(server, expected):
    messages = [{"role": "user", "content": "What is 7 + 5?"}]
    answer = post(server, CHAT, messages=messages, logprobs=True, top_logprobs=4, prompt_logprobs=0).json()
    prompt, [choice] = answer["prompt_token_ids"], answer["choices"]
    rows = expected(prompt + choice["token_ids"])
    for place, (token, entry) in enumerate(zip(prompt[1:], answer["prompt_logprobs"][1:], strict=True)):
        assert entry.keys() == {str(token)}
        assert entry[str(token)]["logprob"] == pytest.approx(rows[place, token].item(), abs=EXACT)
    for place, (token, entry) in enumerate(zip(choice["token_ids"], choice["logprobs"]["content"], strict=True)):
        row = rows[len(prompt) - 1 + place]
        assert entry["logprob"] == pytest.approx(row[token].item(), abs=EXACT)
        told = [other["logprob"] for other in entry["top_logprobs"]]
        assert told == pytest.approx(row.topk(4).values.tolist(), abs=EXACT)


def test_offsets_point_at_each_tokens_text_and_a_stream_says_the_same(server):
    body = {"prompt": TEXT, "max_tokens": 12, "logprobs": 2, "echo": True, "n": 2, "seed": 1, "prompt_logprobs": 1}
    answer = post(server, COMPLETIONS, **body).json()
    for choice in answer["choices"]:
        columns, text = choice["logprobs"], choice["text"]
        assert text.startswith(TEXT)
        offsets = columns["text_offset"]
        assert offsets == sorted(offsets)
        count = len(choice["prompt_token_ids"])
        assert len(offsets) == count + len(choice["token_ids"])
        for token, offset in zip(columns["tokens"], offsets, strict=True):
            assert token.startswith(("bytes:", "<|")) or text[offset:].startswith(token)
    streamed = joined(chunks(post(server, COMPLETIONS, **body, stream=True).text))
    assert streamed == near(whole(answer))


def test_a_prompt_that_is_scored_alone_scores_as_with_an_answer(server):
    body = {"prompt": [TEXT, "The sea"], "logprobs": 1, "echo": True}
    scored = post(server, COMPLETIONS, **body, max_tokens=0).json()
    longer = post(server, COMPLETIONS, **body, max_tokens=4).json()
    for alone, other in zip(scored["choices"], longer["choices"], strict=True):
        count = len(alone["prompt_token_ids"])
        assert alone["token_ids"] == []
        assert {len(column) for column in alone["logprobs"].values()} == {count}
        assert alone["logprobs"]["token_logprobs"] == near(other["logprobs"]["token_logprobs"][:count])
    assert scored["usage"]["completion_tokens"] == 0
