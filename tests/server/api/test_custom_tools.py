"""Custom tools in chat completions: their calls, whole and streamed, what the prompt says of them, and bad input."""

import itertools
import json

import openai
import pytest
from msgspec.structs import replace

from server.api.custom_tools import arguments_of
from tests.fakes import INFO, TEMPLATE, FakeEngine, listening, model_folder, serving
from tests.server.api.test_tools import CLOCK, SECOND, WEATHER
from tests.server.grammar.test_lark import PATCH
from tests.server.wire import CHAT, LIBRARY, QUESTION, Odds, ask, chunks, ids, saying

MENDED = '*** Begin Patch\n*** Delete File: "sail" \\ é \U0001f433\n*** End Patch\n'
LONG = replace(INFO, max_len=4096)  # for prompts with grammars


def custom(name="patch", **format):
    grammar = {"format": {"type": "grammar", "grammar": {"syntax": "regex", **format}}} if format else {}
    return {"type": "custom", "custom": {"name": name, "description": "Patches a file.", **grammar}}


def call_of(text, name="patch"):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments_of(text)}}}\n</tool_call>'


PATCHING = {"tools": [custom(), CLOCK], "max_tokens": 400}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    template = TEMPLATE + (
        "{% for t in tools or [] %}<tool_call>{{ t | tojson }}{% endfor %}"
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c | tojson }}{% endfor %}{% endfor %}"
    )
    config = {"eos_token": "<|end|>", "chat_template": template}
    return model_folder(tmp_path_factory.mktemp("model") / "fake", tokenizer_config=config)


async def answer(folder, says, engine=FakeEngine, per_delta=1, **body):
    body = {"messages": QUESTION, **PATCHING, **body}
    response = await ask(folder, CHAT, body, engine(saying(says), per_delta=per_delta, info=LONG))
    assert response.status_code == 200, response.text
    return response


async def refusal(folder, **body):
    response = await ask(folder, CHAT, {"messages": QUESTION, **body})
    assert response.status_code == 400, response.text
    return response.json()["error"]


async def prompt(folder, **body):
    engine = FakeEngine(saying("a"), info=LONG)
    response = await ask(folder, CHAT, {"messages": QUESTION, **PATCHING, **body}, engine)
    assert response.status_code == 200, response.text
    return LIBRARY.decode(engine.requests[0].prompt_ids)


def put_together(text):
    """The choices of a stream as a client puts them together: message, finish reason, log-probabilities."""
    choices = {}
    for chunk in chunks(text):
        for piece in chunk["choices"]:
            choice = choices.setdefault(piece["index"], {"content": "", "calls": {}, "logprobs": []})
            delta = piece["delta"]
            choice["content"] += delta.get("content") or ""
            for entry in delta.get("tool_calls", ()):
                call = choice["calls"].setdefault(entry["index"], {})
                for key in ("id", "type"):
                    assert key not in entry or key not in call
                    call |= {key: entry[key]} if key in entry else {}
                for kind in ("function", "custom"):
                    for key, value in entry.get(kind, {}).items():
                        own = call.setdefault(kind, {})
                        own[key] = own.get(key, "") + value
            choice["logprobs"] += (piece["logprobs"] or {}).get("content") or []
            choice["finish_reason"] = piece["finish_reason"]
    return choices


async def test_a_call_has_the_input_as_text(folder):
    [choice] = (await answer(folder, call_of(MENDED))).json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    [call] = choice["message"]["tool_calls"]
    assert call == {"id": call["id"], "type": "custom", "custom": {"name": "patch", "input": MENDED}}
    assert call["id"].startswith("call_") and choice["message"]["content"] is None


@pytest.mark.parametrize("per_delta", [1, 7, 1000])
@pytest.mark.parametrize(
    "says",
    [
        call_of(MENDED),
        f"Let me look.\n{call_of(MENDED)}\n{SECOND}\n{call_of('')}",
        f"{SECOND}\n{call_of('a')}\n{call_of('b')} Done.",
        f"{call_of(MENDED)} Done.",
        "No call.",
    ],
    ids=["alone", "between", "two", "before a text", "none"],
)
async def test_a_stream_put_together_is_the_whole_response(folder, says, per_delta):
    more = {"n": 2, "logprobs": True}
    whole = (await answer(folder, says, Odds, **more)).json()["choices"]
    streamed = put_together((await answer(folder, says, Odds, per_delta, stream=True, **more)).text)
    assert len(whole) == len(streamed) == 2
    for choice in whole:
        seen, calls = streamed[choice["index"]], choice["message"].get("tool_calls", [])
        assert [{**call, "id": ""} for call in seen["calls"].values()] == [{**call, "id": ""} for call in calls]
        assert seen["content"] == (choice["message"]["content"] or "")
        assert seen["finish_reason"] == choice["finish_reason"]
        assert seen["logprobs"] == choice["logprobs"]["content"]


async def test_the_input_streams_as_one_delta_after_the_name(folder):
    seen = chunks((await answer(folder, call_of(MENDED), stream=True)).text)
    entries = [call for chunk in seen for c in chunk["choices"] for call in c["delta"].get("tool_calls", ())]
    assert entries == [
        {"index": 0, "id": entries[0]["id"], "type": "custom", "custom": {"name": "patch", "input": ""}},
        {"index": 0, "custom": {"input": MENDED}},
    ]
    assert seen[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("per_delta", [1, 7])
async def test_the_input_comes_before_the_text_that_follows_it(folder, per_delta):
    """In the order of the model's output, since clients may show a call as complete when text comes after it."""
    seen = chunks((await answer(folder, f"Look. {call_of('a')} Done.", per_delta=per_delta, stream=True)).text)
    deltas = [choice["delta"] for chunk in seen for choice in chunk["choices"]]
    kinds = ["tool_calls" if "tool_calls" in delta else "text" for delta in deltas if delta.keys() - {"role"}]
    assert [kind for kind, _ in itertools.groupby(kinds)] == ["text", "tool_calls", "text"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_is_cut_off_has_the_input_so_far(folder, stream):
    begun = '<tool_call>\n{"name": "patch", "arguments": {"input": "mend the sail and the rope'
    cut = {"max_tokens": len(ids(begun)) - 1, "stream": stream}
    response = await answer(folder, begun, **cut)
    if stream:
        choice = put_together(response.text)[0]
        [call] = choice["calls"].values()
    else:
        [choice] = response.json()["choices"]
        [call] = choice["message"]["tool_calls"]
    assert (choice["finish_reason"], call["type"]) == ("length", "custom")
    assert "mend the sail and the rope".startswith(call["custom"]["input"]) and len(call["custom"]["input"]) > 12


async def test_the_prompt_has_calls_and_tools_as_functions(folder):
    call = {"id": "call_1", "type": "custom", "custom": {"name": "patch", "input": MENDED}}
    spoken = [*QUESTION, {"role": "assistant", "tool_calls": [call]}]
    spoken += [{"role": "tool", "tool_call_id": "call_1", "content": "done"}]
    function = {"name": "patch", "arguments": arguments_of(MENDED)}
    same = [*QUESTION, {"role": "assistant", "tool_calls": [{**call, "type": "function", "function": function}]}]
    del same[1]["tool_calls"][0]["custom"]
    text = await prompt(folder, messages=spoken)
    assert text == await prompt(folder, messages=[*same, spoken[-1]])
    assert "tool: done" in text and "*** Begin Patch" in text and '"input": {"type": "string"}' in text
    assert "*** Begin Patch" in await prompt(folder, messages=spoken, tools=None), "tools may be absent later"
    assert "Patches a file." not in await prompt(folder, tool_choice="none")


async def test_the_grammar_is_in_the_prompt_and_in_the_engines_grammar(folder):
    tool = custom(syntax="lark", definition=PATCH)
    assert "this lark grammar" in await prompt(folder, tools=[tool])
    engine = FakeEngine(saying("a"), info=LONG)
    await ask(folder, CHAT, {"messages": QUESTION, "tools": [tool]}, engine)
    kind, text = engine.requests[0].params.grammar
    assert kind == "lark" and "Begin Patch" in text and "this lark grammar" not in text


@pytest.mark.parametrize("path", ["/tokenize", "/apply-template"])
async def test_the_prompt_can_be_had_without_generating(folder, path):
    call = {"id": "call_1", "type": "custom", "custom": {"name": "patch", "input": "mended"}}
    messages = [*QUESTION, {"role": "assistant", "tool_calls": [call]}]
    tool = custom(definition="a+")
    response = await ask(folder, path, {"messages": messages, "tools": [tool]})
    assert response.status_code == 200, response.text
    shown = response.json()
    text = shown["prompt"] if "prompt" in shown else LIBRARY.decode(shown["tokens"])
    assert text.replace("<|user|>", "") == await prompt(folder, messages=messages, tools=[tool])
    assert "mended" in text and "this regex grammar" in text


async def engines_grammar(folder, choice, **more):
    engine = FakeEngine(saying("a"), info=LONG)
    body = {"messages": QUESTION, "tools": [custom(definition="seagull"), WEATHER], "tool_choice": choice, **more}
    response = await ask(folder, CHAT, body, engine)
    assert response.status_code == 200, response.text
    return engine.requests[0].params.grammar[1]


async def test_a_custom_tool_can_be_required_named_and_allowed(folder):
    named = {"type": "custom", "custom": {"name": "patch"}}
    weather = {"type": "function", "function": {"name": "weather"}}
    required = await engines_grammar(folder, "required")
    assert "seagull" in required and "weather" in required
    for choice in (
        named,
        {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named]}},
    ):
        grammar = await engines_grammar(folder, choice)
        assert "seagull" in grammar and "weather" not in grammar
    assert "seagull" not in await engines_grammar(folder, weather)
    both = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named, weather]}}
    assert await engines_grammar(folder, both) == required
    assert await engines_grammar(folder, "required", parallel_tool_calls=False) != required


FORMAT = "tools.0.custom.format"
RAW = custom()["custom"]


@pytest.mark.parametrize(
    ("body", "param", "word"),
    [
        ({"tools": [{"type": "custom"}]}, "tools.0.custom", ""),
        ({"tools": [{"type": "custom", "name": "patch"}]}, "tools.0.custom", ""),
        ({"tools": [{"type": "custom", "custom": {"name": "a b"}}]}, "tools.0.custom.name", ""),
        ({"tools": [{"type": "custom", "custom": {**RAW, "parameters": {}}}]}, "tools.0.custom.parameters", ""),
        ({"tools": [{"type": "custom", "custom": {**RAW, "format": {"type": "xml"}}}]}, f"{FORMAT}.type", ""),
        ({"tools": [{"type": "custom", "custom": {**RAW, "format": {"type": "grammar", "syntax": "regex"}}}]},
         f"{FORMAT}.grammar", ""),
        ({"tools": [custom(syntax="peg", definition="a")]}, f"{FORMAT}.grammar.syntax", ""),
        ({"tools": [CLOCK, custom(syntax="lark", definition='start: "a" start')]}, "tools",
         "tools[1].custom.format.grammar.definition"),
        ({"tools": [custom(definition="(")]}, "tools[0].custom.format.grammar.definition", ""),
        ({"tools": [custom(name, definition="a" * 40000) for name in "ab"]}, "tools", "65536"),
        ({"tools": [custom(), custom()]}, "tools", "same name"),
        ({"tools": [custom("clock"), CLOCK]}, "tools", "same name"),
        ({"tools": [custom()], "min_tokens": 3}, "min_tokens", ""),
        ({"tools": [custom()], "tool_choice": {"type": "custom", "custom": {"name": "clock"}}}, "tool_choice", ""),
        ({"tools": [custom()], "tool_choice": {"type": "custom", "name": "patch"}}, "tool_choice", ""),
        ({"tool_choice": {"type": "custom", "custom": {"name": "patch"}}}, "tool_choice", ""),
        ({"messages": [*QUESTION, {"role": "assistant", "tool_calls": [
            {"id": "c", "type": "custom", "custom": {"name": "patch"}}]}]},
         "messages.1.tool_calls.0.custom.input", ""),
        ({"messages": [*QUESTION, {"role": "assistant", "tool_calls": [
            {"id": "c", "type": "custom", "function": {"name": "patch", "arguments": "{}"}}]}]},
         "messages.1.tool_calls.0.custom", ""),
        ({"messages": [*QUESTION, {"role": "assistant", "tool_calls": [
            {"id": "c", "type": None, "function": {"name": "patch", "arguments": "{}"}}]}]},
         "messages.1.tool_calls.0.type", ""),
    ],
)  # fmt: skip
async def test_what_is_wrong_is_named(folder, body, param, word):
    error = await refusal(folder, **body)
    assert error["param"] == param and word in error["message"]


async def test_the_openai_sdk_calls_a_custom_tool_until_the_answer(folder):
    engine = FakeEngine(saying(call_of(MENDED), call_of(MENDED), "Mended."), info=LONG)
    async with serving(folder, engine) as (_, app):
        async with listening(app) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
            asked = {"model": "fake", "messages": [*QUESTION], **PATCHING}
            first = (await client.chat.completions.create(**asked)).choices[0]
            [call] = first.message.tool_calls
            assert (call.type, call.custom.name, call.custom.input) == ("custom", "patch", MENDED)
            async with client.chat.completions.stream(**asked) as stream:
                async for _ in stream:
                    pass
                [streamed] = stream.current_completion_snapshot.choices[0].message.tool_calls
            assert json.loads(streamed.model_dump_json())["custom"] == {"name": "patch", "input": MENDED}
            asked["messages"] += [
                first.message.model_dump(exclude_none=True),
                {"role": "tool", "tool_call_id": call.id, "content": "done"},
            ]
            assert (await client.chat.completions.create(**asked)).choices[0].message.content == "Mended."
