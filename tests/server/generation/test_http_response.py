"""A stream's deltas add up to the response without a stream: in any format, for any text, however it is split."""

import random
from dataclasses import replace

import pytest

from server.parsers.formats import IN_MESSAGES, REASONING_FORMATS, TOOL_FORMATS, Formats, delimiters
from tests.fakes import TEMPLATE, model_folder, serving
from tests.server.api.test_tools import CLOCK, WEATHER
from tests.server.parsers.test_parsers import write
from tests.server.wire import CHAT, END, QUESTION, Odds, chunks, ids

EXAMPLES = 24  # of each format
WORDS = [
    "the sea", " whale", "\n", "\n\n", " ", "日本語", "🐳", "é", "{", "}", '"', "\\", "<", ">", "[", "]", "</", "null",
    '{"name": "weather", "arguments": {"place": "Nantucket"}}', '{"name": "clock", "parameters": {}}',
    '[{"name": "clock", "arguments": {}}]', '{"place": "\\u00e9 \\" } <tool_call>"}', "weather", "clock",
    "<function=weather>\n<parameter=place>\nNantucket\n</parameter>\n</function>", "commentary to=functions.clock ",
    "analysis", "final", "json", "function", "```json\n", "\n```",
]  # fmt: skip
CASES = [Formats(tools, "think") for tools in TOOL_FORMATS if tools not in IN_MESSAGES]
CASES += [Formats("hermes", reasoning) for reasoning in REASONING_FORMATS if reasoning not in ("think", *IN_MESSAGES)]
CASES += [Formats(shared, shared) for shared in IN_MESSAGES]
CASES += [Formats(None, "think"), Formats("hermes", None), Formats()]


def text_of(rng, formats):
    """Return a well-formed message, or delimiters, parts of delimiters and other text in any order."""
    if formats.tools and formats.reasoning and rng.random() < 0.4:
        calls = [("weather", {"place": rng.choice(WORDS)}), ("clock", {})][: rng.randrange(3)]
        return write(formats, rng.choice(["", "hm"]), rng.choice(["", "the sea"]), calls) or "the sea"
    texts = [*sorted(delimiters(formats)), "<think>", "</think>"]
    pieces = []
    for _ in range(rng.randrange(1, 14)):
        piece = rng.choice(texts if rng.random() < 0.45 else WORDS)
        pieces.append(piece if rng.random() < 0.9 else piece[: rng.randrange(len(piece) + 1)])
    return "".join(pieces) or "the sea"


def spelling(text):
    """Return the tokens of a text without the fake model's own end token."""
    first, *others = text.split("<|end|>")
    return ids(first) + [token for other in others for token in [*ids("<|en"), *ids("d|>"), *ids(other)]]


def merged(stream_chunks):
    """Return what a client assembles from the chunks."""
    message, logprobs, tokens, finish, usage = {"content": ""}, [], [], None, None
    for chunk in stream_chunks:
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            delta = choice["delta"]
            for key in ("content", "reasoning_content", "reasoning"):
                if delta.get(key):
                    message[key] = message.get(key, "") + delta[key]
            for piece in delta.get("tool_calls", ()):
                calls = message.setdefault("tool_calls", [])
                if piece["index"] == len(calls):
                    assert {"id", "type"} <= piece.keys(), "a call begins with its name"
                    calls.append(
                        {"type": piece["type"], "function": {"name": piece["function"]["name"], "arguments": ""}}
                    )
                else:
                    assert "name" not in piece["function"] and "id" not in piece
                calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
            assert finish is None, "a chunk follows the end"
            finish = choice["finish_reason"]
            logprobs += choice["logprobs"]["content"] if choice["logprobs"] else []
            tokens += choice.get("token_ids", [])
    return message, logprobs, tokens, finish, usage


def whole(response):
    """Return the same of a response without a stream, without the random ids of the calls."""
    [choice] = response["choices"]
    message = {k: v for k, v in choice["message"].items() if k not in ("role", "refusal")}
    message["content"] = message["content"] or ""
    for call in message.get("tool_calls", ()):
        assert call.pop("id").startswith("call_")
    logprobs = choice["logprobs"]["content"]
    return message, logprobs, choice["token_ids"], choice["finish_reason"], response["usage"]


@pytest.mark.parametrize("formats", CASES, ids=lambda f: f"{f.tools}-{f.reasoning}")
async def test_stream_adds_up_to_the_whole_response(tmp_path, formats):
    rng = random.Random(f"{formats}")
    config = {"eos_token": "<|end|>", "chat_template": "{# tools #}" + TEMPLATE}
    folder = model_folder(tmp_path / "fake", tokenizer_config=config)
    kinds = set()
    engine = Odds()
    async with serving(folder, engine) as (client, app):
        app.state.pequod.model = replace(app.state.pequod.model, formats=formats)
        for _ in range(EXAMPLES):
            text = text_of(rng, formats)
            output = [*spelling(text), END]
            engine.say = lambda request, output=output: output
            body = {"messages": QUESTION, "logprobs": True, "return_token_ids": True, "seed": 1}
            if formats.tools and rng.random() < 0.8:
                body["tools"] = [WEATHER, CLOCK]
            if rng.random() < 0.3:
                at = rng.randrange(len(text))
                body["stop"] = [text[at : at + rng.randrange(1, 5)], "whale"]
                body["include_stop_str_in_output"] = rng.random() < 0.5
            if rng.random() < 0.2:
                body["max_tokens"] = rng.randrange(1, len(output) + 1)
            engine.per_delta = rng.choice([1, 1, 2, 5, 100])
            response = await client.post(CHAT, json=body)
            assert response.status_code == 200, response.text
            engine.per_delta = rng.choice([1, 1, 2, 5, 100])
            streamed = await client.post(CHAT, json={**body, "stream": True, "stream_options": {"include_usage": True}})
            expected = whole(response.json())
            assert merged(chunks(streamed.text)) == expected, (text, body)
            kinds.update(expected[0], [expected[3]])
    assert "content" in kinds and "stop" in kinds
    if formats.tools and formats.reasoning:
        assert {"reasoning_content", "tool_calls"} <= kinds
