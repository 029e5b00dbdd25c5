"""/tokenize, /detokenize and /apply-template over a fake engine."""

import pytest

from server.api.tokenize import routes
from server.tokenization import encoder
from tests.fakes import FakeEngine, model_folder
from tests.server.wire import LIBRARY, QUESTION, ask, ids

PROMPT = "<|user|>user: the sea\nassistant: "


async def test_a_text_becomes_ids_and_their_spelling_on_request(folder):
    answer = (await ask(folder, "/tokenize", {"prompt": "the sea"})).json()
    assert answer == {"count": 2, "max_model_len": 512, "tokens": ids("the sea"), "token_strs": None}
    spelt = (await ask(folder, "/tokenize", {"prompt": "the sea", "return_token_strs": True, "model": "fake"})).json()
    assert spelt["token_strs"] == ["the", "Ġsea"]


async def test_a_conversation_becomes_the_ids_that_chat_would_use(folder):
    answer = (await ask(folder, "/tokenize", {"messages": QUESTION})).json()
    assert answer["tokens"] == ids(PROMPT)
    assert answer["count"] == len(ids(PROMPT))
    bare = (await ask(folder, "/tokenize", {"messages": QUESTION, "add_generation_prompt": False})).json()
    assert bare["tokens"] == ids("<|user|>user: the sea\n")


async def test_special_tokens_around_a_text_can_be_left_out(tmp_path):
    config = {"eos_token": "<|end|>", "bos_token": "<|user|>", "add_bos_token": True}
    own = model_folder(tmp_path / "own", tokenizer_config=config)
    assert (await ask(own, "/tokenize", {"prompt": "the"})).json()["tokens"] == [1, *ids("the")]
    assert (await ask(own, "/tokenize", {"prompt": "the", "add_special_tokens": False})).json()["tokens"] == ids("the")


@pytest.mark.parametrize("text", ["the sea", "🐳 äöü\n", "<|user|>a<|end|>", ""])
async def test_ids_become_the_text_that_they_came_from(folder, text):
    assert (await ask(folder, "/detokenize", {"tokens": ids(text)})).json() == {"prompt": text}


async def test_ids_with_more_text_than_a_body_may_have_are_refused(folder, monkeypatch):
    monkeypatch.setattr(routes, "MAX_CHARACTERS", 20)
    assert (await ask(folder, "/detokenize", {"tokens": ids("x" * 20)})).status_code == 200
    answer = await ask(folder, "/detokenize", {"tokens": ids("x" * 21)})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, "tokens", "context_length_exceeded")


async def test_the_template_can_be_seen(folder):
    answer = (await ask(folder, "/apply-template", {"messages": QUESTION})).json()
    assert answer == {"prompt": PROMPT, "count": len(LIBRARY.encode(PROMPT, add_special_tokens=False).ids)}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, None),
        ("/tokenize", {"prompt": "a", "messages": QUESTION}, None),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, None),
        ("/tokenize", {"messages": QUESTION, "add_special_tokens": True}, None),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "a", "colour": 1}, "colour"),
        ("/tokenize", {"prompt": "a " * 10_000_000}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": QUESTION, "tools": [{}]}, "tools.0.type"),
        ("/tokenize", {"prompt": "a", "tools": []}, None),
        ("/tokenize", {"messages": QUESTION, "chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [340]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens.0"),
        ("/detokenize", {"tokens": [True]}, "tokens.0"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/apply-template", {}, "messages"),
        ("/apply-template", {"messages": [{"role": "captain", "content": "a"}]}, "messages.0.role"),
        ("/apply-template", {"messages": QUESTION, "continue_final_message": True, "add_generation_prompt": True},
         "continue_final_message"),
    ],
)  # fmt: skip
async def test_bad_input_is_refused_by_name(folder, path, body, param):
    response = await ask(folder, path, body, max_body_bytes=32 << 20)
    assert response.status_code == 400, response.text[:200]
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("path", "field", "more"),
    [
        ("/tokenize", "prompt", {}),
        ("/tokenize", "messages", {}),
        ("/apply-template", "messages", {}),
        ("/v1/responses/input_tokens", "input", {}),
        ("/v1/messages/count_tokens", "messages", {"model": "fake"}),
    ],
)
async def test_a_text_may_be_longer_than_the_context_and_not_without_bounds(folder, monkeypatch, path, field, more):
    monkeypatch.setattr(encoder, "ORDINARY", 100)
    monkeypatch.setattr(encoder, "MAX_TOKENS", 1000)

    async def answer(text):
        given = [{"role": "user", "content": text}] if field == "messages" else text
        return await ask(folder, path, {field: given, **more})

    assert (await answer("the sea " * 300)).status_code == 200  # 600 tokens; the context has 512
    refused = await answer("." * 4000)
    assert refused.status_code == 400
    assert "the prompt has more than 1000" in refused.json()["error"]["message"]


async def test_an_unknown_model_is_404_and_a_loading_one_503(folder):
    assert (await ask(folder, "/tokenize", {"prompt": "a", "model": "gpt-4"})).status_code == 404
    loading = await ask(folder, "/tokenize", {"prompt": "a"}, FakeEngine(is_loaded=False), wait=False)
    assert loading.status_code == 503
    assert int(loading.headers["retry-after"]) >= 1
