"""The OpenAI Python SDK against a real server with the built-in model."""

import asyncio

import openai
import pytest


@pytest.fixture
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


QUESTION = [{"role": "user", "content": "What is 7 + 5?"}]


def test_a_chat_is_answered_and_ends_by_itself(client):
    answer = client.chat.completions.create(model="builtin", messages=QUESTION, temperature=0)
    assert "12" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.system_fingerprint


def test_a_stream_gives_the_same_answer_in_pieces(client):
    whole = client.chat.completions.create(model="builtin", messages=QUESTION, seed=3, temperature=1.0)
    pieces = list(
        client.chat.completions.create(
            model="builtin",
            messages=QUESTION,
            seed=3,
            temperature=1.0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert pieces[0].choices[0].delta.role == "assistant"
    text = "".join(c.delta.content or "" for p in pieces for c in p.choices)
    assert text == whole.choices[0].message.content
    assert [c.finish_reason for p in pieces for c in p.choices if c.finish_reason] == ["stop"]
    assert pieces[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert pieces[-1].choices == []


def test_the_streaming_helper_of_the_sdk_works(client):
    with client.chat.completions.stream(model="builtin", messages=QUESTION, temperature=0) as stream:
        kinds = {event.type for event in stream}
        assert "12" in stream.get_final_completion().choices[0].message.content
    assert {"chunk", "content.delta", "content.done"} <= kinds


def test_completions_take_text_lists_and_ids(client):
    one = client.completions.create(model="builtin", prompt="Hello", max_tokens=4, temperature=0)
    ids = client.post("/../tokenize", body={"prompt": "Hello"}, cast_to=object)["tokens"]
    same = client.completions.create(model="builtin", prompt=ids, max_tokens=4, temperature=0)
    assert one.choices[0].text == same.choices[0].text
    several = client.completions.create(model="builtin", prompt=["Hello", "Hi"], max_tokens=4, temperature=0, n=2)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    assert several.choices[0].text == several.choices[1].text == one.choices[0].text


def test_logprobs_sum_up_to_what_they_must(client):
    answer = client.chat.completions.create(
        model="builtin", messages=QUESTION, temperature=0, logprobs=True, top_logprobs=3
    )
    entries = answer.choices[0].logprobs.content
    assert len(entries) == answer.usage.completion_tokens
    for entry in entries:
        assert entry.logprob <= 0
        assert entry.top_logprobs[0].logprob == entry.logprob, "greedy takes the most likely"
        assert [t.logprob for t in entry.top_logprobs] == sorted((t.logprob for t in entry.top_logprobs), reverse=True)


def test_models_are_listed(client):
    assert [model.id for model in client.models.list()] == ["builtin"]
    assert client.models.retrieve("builtin").object == "model"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


def test_errors_become_the_exceptions_of_the_sdk(client):
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-4", messages=QUESTION)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="builtin", messages=QUESTION, temperature=3)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as unknown:
        client.chat.completions.create(model="builtin", messages=QUESTION, extra_body={"temprature": 1})
    assert unknown.value.param == "temprature"
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(model="builtin", messages=[{"role": "user", "content": "sea " * 5000}])
    assert long.value.code == "context_length_exceeded"


async def test_many_async_streams_at_once(server):
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:

        async def one(i: int) -> str:
            question = [{"role": "user", "content": f"What is {i} + {i}?"}]
            stream = await client.chat.completions.create(
                model="builtin", messages=question, temperature=0, stream=True
            )
            return "".join([c.delta.content or "" async for part in stream for c in part.choices])

        answers = await asyncio.gather(*(one(i) for i in range(20)))
    assert sum(str(2 * i) in answer for i, answer in enumerate(answers)) >= 19
