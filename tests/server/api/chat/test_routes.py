"""Chat completions over a fake engine: the answer, whole and streamed, and what the engine is asked for."""

import msgspec
import openai
import pytest

from server.api.chat.request import ChatRequest
from server.api.chat.schema import ChatCompletion, ChatCompletionChunk
from tests.fakes import FakeEngine, listening, model_folder, serving
from tests.server.wire import (
    CHAT,
    COMPLETIONS,
    END,
    LIBRARY,
    QUESTION,
    Odds,
    ask,
    chunks,
    events,
    float32,
    ids,
    joined,
    odds,
    run,
    saying,
    whole,
)

WHALE = "the whale; the ship\u2028€5 äöü 🐳🐋 日本語 sailing"
HALF = len(ids(WHALE[: WHALE.index("🐋")])) + 2  # tokens


async def test_an_answer_has_what_openai_has(folder):
    answer = (await ask(folder, CHAT, {"model": "fake", "messages": QUESTION}, FakeEngine(saying("the whale")))).json()
    msgspec.convert(answer, ChatCompletion)
    assert answer["id"].startswith("chatcmpl-")
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "fake"
    assert answer["system_fingerprint"].startswith("fp_")
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "the whale", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    prompt = len(ids("<|user|>user: the sea\nassistant: "))
    count = len(ids("the whale")) + 1  # the token that ended it counts, and has no text
    assert answer["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": count,
        "total_tokens": prompt + count,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


async def test_a_stream_has_the_role_first_one_end_and_usage_on_request(folder):
    body = {"messages": QUESTION, "stream": True, "stream_options": {"include_usage": True}}
    response = await ask(folder, CHAT, body, FakeEngine(saying("the whale")))
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    seen = chunks(response.text)
    for chunk in seen:
        msgspec.convert(chunk, ChatCompletionChunk)
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in seen}) == 1
    deltas = [chunk["choices"][0]["delta"] for chunk in seen[:-1]]
    assert deltas[0] == {"role": "assistant", "content": "", "refusal": None}
    assert [delta["content"] for delta in deltas[1:-1]] == ["the", " whale"]
    assert deltas[-1] == {}
    assert [chunk["choices"][0]["finish_reason"] for chunk in seen[:-1]] == [None, None, None, "stop"]
    assert [chunk["usage"] for chunk in seen[:-1]] == [None] * 4
    assert seen[-1]["choices"] == []
    assert seen[-1]["usage"]["completion_tokens"] == 3


async def test_without_the_option_a_stream_has_no_usage(folder):
    seen = chunks((await ask(folder, CHAT, {"messages": QUESTION, "stream": True}, FakeEngine(saying("the")))).text)
    assert all("usage" not in chunk for chunk in seen)


async def test_continuous_usage_counts_up_with_the_chunks(folder):
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"messages": QUESTION, "stream": True, "stream_options": options}
    seen = chunks((await ask(folder, CHAT, body, FakeEngine(saying("the whale")))).text)
    assert [chunk["usage"]["completion_tokens"] for chunk in seen] == [0, 1, 2, 3, 3]


async def test_without_include_usage_no_chunk_has_usage(folder):
    body = {"messages": QUESTION, "stream": True, "stream_options": {"continuous_usage_stats": True}}
    assert not any(
        "usage" in chunk for chunk in chunks((await ask(folder, CHAT, body, FakeEngine(saying("the whale")))).text)
    )


@pytest.mark.parametrize("per_delta", [1, 3, 100])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"logprobs": True, "top_logprobs": 3},
        {"n": 3, "logprobs": True, "return_token_ids": True},
        {"stop": ["ship\u2028€5", "never"], "logprobs": True, "return_token_ids": True},
        {"stop": "🐋", "include_stop_str_in_output": True},
        {"max_tokens": 11, "return_token_ids": True},
        {"prompt_logprobs": 1, "n": 2, "return_token_ids": True},
        {"max_completion_tokens": HALF, "logprobs": True},  # ends in the middle of a character
    ],
    ids=lambda more: ",".join(more) or "plain",
)
async def test_a_stream_joined_is_the_whole_answer_byte_for_byte(folder, more, per_delta):
    texts = (WHALE, "the sea", WHALE * 2)

    def engine(size):
        return Odds(saying(*texts), per_delta=size)

    body = {"messages": QUESTION, "seed": 1, **more}
    answer = (await ask(folder, CHAT, body, engine(1))).json()
    streamed = await ask(
        folder, CHAT, {**body, "stream": True, "stream_options": {"include_usage": True}}, engine(per_delta)
    )
    assert "\u2028" not in streamed.text
    seen = chunks(streamed.text)
    assert joined(seen) == whole(answer)
    if "max_completion_tokens" in more:
        assert joined(seen)[0]["text"].endswith("\ufffd")
    assert seen[-1]["usage"] == answer["usage"]
    assert [chunk.get("prompt_token_ids") for chunk in seen[:1]] == [answer.get("prompt_token_ids")]
    scores = [chunk["prompt_logprobs"] for chunk in seen if "prompt_logprobs" in chunk]
    assert scores == ([answer["prompt_logprobs"]] if "prompt_logprobs" in more else [])
    for chunk in seen:
        msgspec.convert(chunk, ChatCompletionChunk)
    msgspec.convert(answer, ChatCompletion)


async def test_logprobs_have_each_tokens_bytes_and_all_bits(folder):
    body = {"messages": QUESTION, "logprobs": True, "top_logprobs": 2}
    answer = (await ask(folder, CHAT, body, Odds(saying("🐳")))).json()
    entries = answer["choices"][0]["logprobs"]["content"]
    said = [*ids("🐳"), END]
    assert len(said) > 2
    assert len(entries) == answer["usage"]["completion_tokens"] == len(said)
    assert bytes(byte for entry in entries[:-1] for byte in entry["bytes"]) == "🐳".encode()
    assert entries[0]["token"].startswith("bytes:\\xf0")
    assert entries[-1]["token"] == "<|end|>"
    for place, (token, entry) in enumerate(zip(said, entries, strict=True)):
        assert float32(entry["logprob"]) == odds(place, token)
        assert sum(letter.isdigit() for letter in repr(entry["logprob"])) <= 9
        top = [float32(other["logprob"]) for other in entry["top_logprobs"]]
        assert top == [odds(place, token), odds(place, token + 1)]


async def test_a_stop_string_across_tokens_ends_the_text_and_drops_the_rest(folder):
    engine = FakeEngine(saying("the sea; the whale; sailing"), per_delta=100)
    body = {"messages": QUESTION, "stop": ["a; th"], "return_token_ids": True}
    answer = (await ask(folder, CHAT, body, engine)).json()
    choice = answer["choices"][0]
    assert choice["message"]["content"] == "the se"
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "a; th")
    spoken = ids("the sea; the whale; sailing")
    count = len(choice["token_ids"])
    assert choice["token_ids"] == spoken[:count]
    assert "a; th" in LIBRARY.decode(spoken[:count]) and "a; th" not in LIBRARY.decode(spoken[: count - 1])
    assert answer["usage"]["completion_tokens"] == count
    assert engine.open == []


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_token_counts_and_has_no_text(folder, stream):
    the, whale = ids("the whale")
    body = {"messages": QUESTION, "stop_token_ids": [whale], "return_token_ids": True, "stream": stream}
    body |= {"stream_options": {"include_usage": True}} if stream else {}
    response = await ask(folder, CHAT, body, FakeEngine(saying("the whale, sailing")))
    choice = (joined(chunks(response.text)) if stream else whole(response.json()))[0]
    assert (choice["text"], choice["finish_reason"], choice["token_ids"]) == ("the", "stop", [the, whale])
    assert choice["stop_reason"] == whale
    usage = (chunks(response.text)[-1] if stream else response.json())["usage"]
    assert usage["completion_tokens"] == 2


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("more", "ending"),
    [
        ({}, ("stop", None)),
        ({"max_tokens": 1}, ("length", None)),
        ({"stop": ["no", "whale", "whales"]}, ("stop", "whale")),
        ({"stop": ["whale"], "include_stop_str_in_output": True}, ("stop", "whale")),
        ({"stop_token_ids": [END]}, ("stop", None)),  # the model's own end
        ({"stop_token_ids": [END], "ignore_eos": True}, ("stop", END)),
        ({"stop_token_ids": ids("the whale")[1:], "stop": ["sailing"]}, ("stop", ids("the whale")[1])),
    ],
)
async def test_the_stop_reason_is_the_stop_string_or_token_that_ended_the_text(folder, path, stream, more, ending):
    body = {**({"messages": QUESTION} if path == CHAT else {"prompt": "the sea"}), **more, "stream": stream}
    response = await ask(folder, path, body, FakeEngine(saying("the whale, sailing")))
    if stream:
        pieces = [piece for chunk in chunks(response.text) for piece in chunk["choices"]]
        assert not any("stop_reason" in piece for piece in pieces[:-1])
    [choice] = (joined(chunks(response.text)) if stream else whole(response.json())).values()
    assert (choice["finish_reason"], choice["stop_reason"]) == ending


async def test_a_stop_string_that_never_completes_is_part_of_the_text(folder):
    body = {"messages": QUESTION, "stop": ["whale!"]}
    answer = (await ask(folder, CHAT, body, FakeEngine(saying("the whale")))).json()
    assert answer["choices"][0]["message"]["content"] == "the whale"


async def test_choices_draw_with_seeds_of_their_own_and_the_same_ones_again(folder):
    async def seeds(n, seed):
        engine = FakeEngine(saying("a"))
        await ask(folder, CHAT, {"messages": QUESTION, "n": n, "seed": seed}, engine)
        return [request.params.seed for request in engine.requests]

    assert await seeds(1, 7) == [7]
    assert await seeds(1, -1) == [2**64 - 1]
    three = await seeds(3, 7)
    assert len(set(three)) == 3
    assert (await seeds(4, 7))[:3] == three
    assert all(0 <= seed < 2**64 for seed in three)
    assert await seeds(1, None) != await seeds(1, None)


async def test_a_request_reaches_the_engine_unchanged(folder):
    engine = FakeEngine(saying("a"))
    body = {
        "messages": QUESTION, "temperature": 0.5, "top_p": 0.9, "top_k": -1, "min_p": 0.1, "presence_penalty": 1,
        "frequency_penalty": -1, "repetition_penalty": 1.5, "seed": 3, "logit_bias": {"5": -100, "6": 1.5},
        "max_tokens": 9, "min_tokens": 2, "stop_token_ids": [8, 9], "logprobs": True, "top_logprobs": 4, "priority": -3,
        "cache_salt": "mine",
    }  # fmt: skip
    assert (await ask(folder, CHAT, body, engine, scheduling_policy="priority")).status_code == 200
    request = engine.requests[0]
    params = request.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 0, 0.1)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (1, -1, 1.5)
    assert (params.seed, params.max_tokens, params.min_tokens, params.logprobs) == (3, 9, 2, 4)
    assert params.logit_bias == {5: -100, 6: 1.5}
    assert params.stop_ids == (END, 8, 9)
    assert (request.priority, request.cache_salt) == (-3, "mine")


async def test_defaults_are_the_models_then_openais_and_the_rest_of_the_context(folder, tmp_path):
    engine = FakeEngine(saying("a"))
    await ask(folder, CHAT, {"messages": QUESTION}, engine)
    request = engine.requests[0]
    assert (request.params.temperature, request.params.top_p, request.params.top_k) == (1, 1, 0)
    assert request.params.max_tokens == 512 - len(request.prompt_ids)
    assert request.params.logprobs is None

    own = model_folder(tmp_path / "own", generation_config={"temperature": 0.6, "top_k": 20, "eos_token_id": [5, 6]})
    engine = FakeEngine(saying("a"))
    await ask(own, CHAT, {"messages": QUESTION, "top_k": 3, "ignore_eos": True, "stop_token_ids": [9]}, engine)
    await ask(own, CHAT, {"messages": QUESTION}, other := FakeEngine(saying("a")))
    assert (engine.requests[0].params.temperature, engine.requests[0].params.top_k) == (0.6, 3)
    assert engine.requests[0].params.stop_ids == (9,)
    assert other.requests[0].params.stop_ids == (5, 6, END)


async def test_ignored_ends_and_special_tokens_can_be_seen(folder):
    engine = FakeEngine(lambda _: [*ids("the"), END, *ids("sea")])
    body = {"messages": QUESTION, "ignore_eos": True, "max_tokens": 1 + len(ids("the")) + len(ids("sea"))}
    assert (await ask(folder, CHAT, body, engine)).json()["choices"][0]["message"]["content"] == "thesea"
    shown = (await ask(folder, CHAT, {**body, "skip_special_tokens": False}, FakeEngine(engine.say))).json()
    assert shown["choices"][0]["message"]["content"] == "the<|end|>sea"
    assert shown["choices"][0]["finish_reason"] == "length"


async def test_the_template_gets_the_messages_and_their_options(folder, tmp_path):
    template = "{# tools #}{{ mood }}|{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}" + (
        "{% if add_generation_prompt %}go{% endif %}"
    )
    own = model_folder(tmp_path / "own", tokenizer_config={"eos_token": "<|end|>", "chat_template": template})

    async def prompt(**body):
        engine = FakeEngine(saying("a"))
        response = await ask(own, CHAT, {"messages": QUESTION, **body}, engine)
        assert response.status_code == 200, response.text
        return LIBRARY.decode(list(engine.requests[0].prompt_ids), skip_special_tokens=False)

    assert await prompt() == "|user:the sea;go"
    assert await prompt(chat_template_kwargs={"mood": "calm"}) == "calm|user:the sea;go"
    assert await prompt(add_generation_prompt=False) == "|user:the sea;"
    continued = [*QUESTION, {"role": "assistant", "content": "a wh"}]
    assert await prompt(messages=continued, continue_final_message=True) == "|user:the sea;assistant:a wh"
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert await prompt(messages=parts) == "|user:a\nb;go"
    conversation = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": "2+2?", "name": "Ann"},
        {
            "role": "assistant", "content": None, "refusal": None, "annotations": [], "audio": None,
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "4"},
    ]  # fmt: skip
    assert await prompt(messages=conversation) == "|system:be brief;user:2+2?;assistant:;tool:4;go"


async def test_labels_are_echoed_where_openai_echoes_them_and_change_nothing(folder):
    labels = {
        "user": "u", "metadata": {"a": "b"}, "safety_identifier": "s", "service_tier": "auto", "prompt_cache_key": "k",
        "store": False,
    }  # fmt: skip
    plain, labelled = FakeEngine(saying("a")), FakeEngine(saying("a"))
    await ask(folder, CHAT, {"messages": QUESTION, "seed": 1}, plain)
    answer = (await ask(folder, CHAT, {"messages": QUESTION, "seed": 1, **labels}, labelled)).json()
    assert answer["metadata"] == {"a": "b"}
    assert answer["service_tier"] == "default"
    assert labelled.requests == plain.requests


async def test_names_of_the_model(folder):
    names = {"served_model_name": ["fake", "alias"]}
    named = await ask(folder, CHAT, {"messages": QUESTION, "model": "alias", "max_tokens": 1}, **names)
    assert named.json()["model"] == "alias"
    assert (await ask(folder, CHAT, {"messages": QUESTION, "max_tokens": 1}, **names)).json()["model"] == "fake"
    missing = await ask(folder, CHAT, {"messages": QUESTION, "model": "gpt-4"}, **names)
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"


async def test_what_cannot_fit_is_refused_with_the_number_and_the_flag(folder):
    long = await ask(folder, CHAT, {"messages": [{"role": "user", "content": "sea " * 600}]})
    error = long.json()["error"]
    assert long.status_code == 400
    assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")
    assert "--max-model-len" in error["message"] and "512" in error["message"]


async def test_a_model_without_a_template_says_what_to_do(tmp_path):
    bare = model_folder(tmp_path / "bare", tokenizer_config={"eos_token": "<|end|>"})
    error = (await ask(bare, CHAT, {"messages": QUESTION})).json()["error"]
    assert error["param"] == "messages"
    assert "--chat-template" in error["message"]


async def test_the_examples_of_the_api_page_work(folder):
    for example in ChatRequest.model_config["json_schema_extra"]["examples"]:
        response = await ask(folder, CHAT, {**example, "model": "fake"}, FakeEngine(saying("a")))
        assert response.status_code == 200, response.text


async def test_the_page_describes_request_answer_and_stream(folder):
    page = (await run(folder, lambda client: client.get("/openapi.json"))).json()
    operation = page["paths"][CHAT]["post"]
    assert set(operation["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
    fields = operation["requestBody"]["content"]["application/json"]["schema"]["properties"]
    assert {"messages", "temperature", "tools", "user"} <= fields.keys()
    assert {"400", "401", "404", "413", "503", "504"} <= operation["responses"].keys()


async def test_the_openai_sdk_reads_whole_answers_and_streams(folder):
    async with serving(folder, Odds(saying(WHALE))) as (_, app), listening(app) as url:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            answer = await client.chat.completions.create(model="fake", messages=QUESTION, logprobs=True)
            assert answer.choices[0].message.content == WHALE
            assert len(answer.choices[0].logprobs.content) == answer.usage.completion_tokens
            pieces = await client.chat.completions.create(
                model="fake", messages=QUESTION, stream=True, stream_options={"include_usage": True}
            )
            text, last = "", None
            async for piece in pieces:
                text += "".join(choice.delta.content or "" for choice in piece.choices)
                last = piece
            assert text == WHALE
            assert last.usage.completion_tokens == answer.usage.completion_tokens
            async with client.chat.completions.stream(model="fake", messages=QUESTION) as stream:
                final = await stream.get_final_completion()
            assert final.choices[0].message.content == WHALE
            with pytest.raises(openai.BadRequestError) as bad:
                await client.chat.completions.create(model="fake", messages=QUESTION, tools=[{"type": "function"}])
            assert bad.value.param == "tools.0.function"


async def test_events_are_frames_of_one_line(folder):
    raw = (await ask(folder, CHAT, {"messages": QUESTION, "stream": True}, FakeEngine(saying(WHALE)))).text
    assert all(isinstance(event, dict) or event == "[DONE]" for event in events(raw))
    assert len(raw.splitlines()) == 2 * len(events(raw))


def test_what_clients_add_to_their_messages_is_taken_back_and_not_rendered():
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    added = {**call, "function": {**call["function"], "parsed_arguments": {"a": [1]}}}
    turn = {"role": "assistant", "content": "4", "tool_calls": [call]}
    sent = {**turn, "tool_calls": [added], "parsed": {"sum": 4}, "provider_specific_fields": {"refusal": None}}
    assert ChatRequest.model_validate({"messages": [sent]}).prompt_source.turns == [turn]
