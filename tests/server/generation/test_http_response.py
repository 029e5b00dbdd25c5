"""A stream's deltas, joined, are the answer in one piece, byte for byte: any format, any text, any cut."""

import random
from dataclasses import replace

import pytest

from server.parsers import REASONING_FORMATS, TOOL_FORMATS, Formats, delimiters
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
CASES = [Formats(tools, "think") for tools in TOOL_FORMATS if tools != "gpt_oss"] + [Formats("gpt_oss", "gpt_oss")]
CASES += [Formats("hermes", reasoning) for reasoning in REASONING_FORMATS if reasoning not in ("think", "gpt_oss")]
CASES += [Formats(None, "think"), Formats("hermes", None), Formats()]


def text_of(rng, formats):
    """A message as it should be, or marks, half marks and what may stand between them."""
    if formats.tools and formats.reasoning and rng.random() < 0.4:
        calls = [("weather", {"place": rng.choice(WORDS)}), ("clock", {})][: rng.randrange(3)]
        return write(formats, rng.choice(["", "hm"]), rng.choice(["", "the sea"]), calls) or "the sea"
    marks = [*sorted(delimiters(formats)), "<think>", "</think>"]
    pieces = []
    for _ in range(rng.randrange(1, 14)):
        piece = rng.choice(marks if rng.random() < 0.45 else WORDS)
        pieces.append(piece if rng.random() < 0.9 else piece[: rng.randrange(len(piece) + 1)])
    return "".join(pieces) or "the sea"


def spelt(text):
    """Tokens of a text in which the fake model's own end token does not stand."""
    first, *others = text.split("<|end|>")
    return ids(first) + [token for other in others for token in [*ids("<|en"), *ids("d|>"), *ids(other)]]


def merged(answer_chunks):
    """What a client has put together in the end."""
    message, logprobs, tokens, finish, usage = {"content": ""}, [], [], None, None
    for chunk in answer_chunks:
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
            assert finish is None, "something came after the end"
            finish = choice["finish_reason"]
            logprobs += choice["logprobs"]["content"] if choice["logprobs"] else []
            tokens += choice.get("token_ids", [])
    return message, logprobs, tokens, finish, usage


def whole(answer):
    """The same of the answer in one piece, without the calls' random ids."""
    [choice] = answer["choices"]
    message = {k: v for k, v in choice["message"].items() if k not in ("role", "refusal")}
    message["content"] = message["content"] or ""
    for call in message.get("tool_calls", ()):
        assert call.pop("id").startswith("call_")
    usage = answer["usage"]
    return message, choice["logprobs"]["content"], choice["token_ids"], choice["finish_reason"], usage


@pytest.mark.parametrize("formats", CASES, ids=lambda f: f"{f.tools}-{f.reasoning}")
async def test_a_stream_joined_is_the_whole_answer(tmp_path, formats):
    rng = random.Random(f"{formats}")
    config = {"eos_token": "<|end|>", "chat_template": "{# tools #}" + TEMPLATE}
    folder = model_folder(tmp_path / "fake", tokenizer_config=config)
    kinds = set()
    engine = Odds()
    async with serving(folder, engine) as (client, app):
        app.state.pequod.model = replace(app.state.pequod.model, formats=formats)
        for _ in range(EXAMPLES):
            text = text_of(rng, formats)
            spoken = [*spelt(text), END]
            engine.say = lambda request, spoken=spoken: spoken
            body = {"messages": QUESTION, "logprobs": True, "return_token_ids": True, "seed": 1}
            if formats.tools and rng.random() < 0.8:
                body["tools"] = [WEATHER, CLOCK]
            if rng.random() < 0.3:
                at = rng.randrange(len(text))
                body["stop"] = [text[at : at + rng.randrange(1, 5)], "whale"]
                body["include_stop_str_in_output"] = rng.random() < 0.5
            if rng.random() < 0.2:
                body["max_tokens"] = rng.randrange(1, len(spoken) + 1)
            engine.per_delta = rng.choice([1, 1, 2, 5, 100])
            at_once = await client.post(CHAT, json=body)
            assert at_once.status_code == 200, at_once.text
            engine.per_delta = rng.choice([1, 1, 2, 5, 100])
            streamed = await client.post(CHAT, json={**body, "stream": True, "stream_options": {"include_usage": True}})
            expected = whole(at_once.json())
            assert merged(chunks(streamed.text)) == expected, (text, body)
            kinds.update(expected[0], [expected[3]])
    assert "content" in kinds and "stop" in kinds
    if formats.tools and formats.reasoning:
        assert {"reasoning_content", "tool_calls"} <= kinds
