"""Stop strings beside calls that a grammar enforces: they end the content and the reasoning, and cut off no call."""

from __future__ import annotations

import json

import pytest

from tests.fakes import TEMPLATE, FakeEngine, model_folder
from tests.server.api.anthropic.wire import MESSAGES
from tests.server.wire import CHAT, QUESTION, RESPONSES, ask, chunks, ids, joined, saying

PARAMETERS = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
STRICT = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
PATCH = {"type": "custom", "custom": {"name": "patch"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"place": "Nantucket"}}\n</tool_call>'
PATCHED = '<tool_call>\n{"name": "patch", "arguments": {"input": "Observation: fog"}}\n</tool_call>'
ARGUMENTS = '{"place": "Nantucket"}'
THOUGHT = "<think>\nWhales are large.\n</think>\n\n"
CALLING = TEMPLATE + "{% for t in tools or [] %}<tool_call>{{ t.function.name }}{% endfor %}{# <think> </think> #}"
# In the delimiters, in the name, in the arguments, between them, and the end.
STOPS = ["<", "tool", "\n", "name", "weather", '": "', "Nan", "Nantucket", "}}", "}\n", "</tool_call>", '"}}\n</']
EACH_STOP = pytest.mark.parametrize("stop", STOPS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    config = {"eos_token": "<|end|>", "chat_template": CALLING}
    return model_folder(tmp_path_factory.mktemp("model") / "fake", tokenizer_config=config)


async def choice(folder, says, tool=WEATHER, *, per_delta=1, **body):
    body = {"messages": QUESTION, "tools": [tool], **body}
    response = await ask(folder, CHAT, body, FakeEngine(saying(says), per_delta=per_delta))
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def is_whole(ended):
    [call] = ended["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": ARGUMENTS}
    assert (ended["finish_reason"], ended["stop_reason"]) == ("tool_calls", None)
    return True


@EACH_STOP
@pytest.mark.parametrize("includes", [False, True])
@pytest.mark.parametrize("per_delta", [1, 7, 1000])
async def test_no_stop_string_cuts_a_required_call_off(folder, stop, includes, per_delta):
    more = {"stop": [stop, "never said"], "include_stop_str_in_output": includes, "per_delta": per_delta}
    ended = await choice(folder, CALL, tool_choice="required", **more)
    assert is_whole(ended) and ended["message"]["content"] is None
    named = {"type": "function", "function": {"name": "weather"}}
    assert is_whole(await choice(folder, THOUGHT + CALL, tool_choice=named, **{**more, "stop": ["\n\n", "Nan"]}))


@EACH_STOP
@pytest.mark.parametrize("stream", [False, True])
async def test_no_stop_string_cuts_a_required_call_of_another_api_off(folder, stop, stream):
    flat = {"tools": [{"type": "function", **WEATHER["function"]}], "tool_choice": "required", "input": "the sea"}
    body = {**flat, "stop": [stop], "stream": stream}
    response = await ask(folder, RESPONSES, body, FakeEngine(saying(CALL)))
    assert response.status_code == 200, response.text
    assert json.dumps(ARGUMENTS) in response.text and '"completed"' in response.text
    tools = {"tools": [{"name": "weather", "input_schema": PARAMETERS}], "tool_choice": {"type": "any"}}
    body = {**tools, "messages": QUESTION, "max_tokens": 200, "stop_sequences": [stop], "stream": stream}
    response = await ask(folder, MESSAGES, body, FakeEngine(saying(CALL)))
    assert response.status_code == 200, response.text
    assert '"stop_reason":"tool_use"' in response.text
    if not stream:
        assert [block["input"] for block in response.json()["content"]] == [{"place": "Nantucket"}]


@EACH_STOP
async def test_the_deltas_of_a_stream_are_the_whole_call(folder, stop):
    body = {"messages": QUESTION, "tools": [WEATHER], "tool_choice": "required", "stop": stop, "stream": True}
    seen = chunks((await ask(folder, CHAT, body, FakeEngine(saying(CALL)))).text)
    [ended] = joined(seen).values()
    assert (ended["text"], ended["finish_reason"]) == ("", "tool_calls")
    deltas = [choice["delta"] for chunk in seen for choice in chunk["choices"]]
    pieces = [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
    assert "".join(piece["arguments"] for piece in pieces) == ARGUMENTS


async def test_a_stop_string_ends_the_reasoning_before_a_required_call(folder):
    ended = await choice(folder, THOUGHT + CALL, tool_choice="required", stop=["are large"])
    assert (ended["finish_reason"], ended["stop_reason"]) == ("stop", "are large")
    assert ended["message"]["reasoning_content"] == "Whales "
    assert "tool_calls" not in ended["message"]


@pytest.mark.parametrize("includes", [False, True])
async def test_a_stop_string_ends_the_content_beside_strict_functions_but_no_call(folder, includes):
    more = {"include_stop_str_in_output": includes}
    ended = await choice(folder, f"Let me look.{CALL}", STRICT, stop=["me"], **more)
    assert (ended["message"]["content"], ended["stop_reason"]) == ("Let me" if includes else "Let ", "me")
    for stop in [*STOPS[2:], "\n{"]:
        ended = await choice(folder, f"Let us look.{CALL}", STRICT, stop=[stop], **more)
        assert is_whole(ended), stop
        assert ended["message"]["content"] == "Let us look."
    for stop in ["<", "tool", "<tool_call>", '>\n{"na']:  # the delimiter's own tokens are text until it is complete
        ended = await choice(folder, f"Let us look.{CALL}", STRICT, stop=[stop], **more)
        assert "tool_calls" not in ended["message"], stop
        assert (ended["finish_reason"], ended["stop_reason"]) == ("stop", stop)


@pytest.mark.parametrize("stop", ["</think>", ".\n</think>\n", "large"])
@pytest.mark.parametrize("includes", [False, True])
async def test_a_stop_string_that_begins_in_the_reasoning_ends_it(folder, stop, includes):
    more = {"stop": [stop], "include_stop_str_in_output": includes}
    ended = await choice(folder, THOUGHT + CALL, tool_choice="required", **more)
    assert (ended["finish_reason"], ended["stop_reason"]) == ("stop", stop)
    assert "tool_calls" not in ended["message"]


async def test_a_stop_string_ends_no_input_of_a_custom_tool(folder):
    for stop in ("Observation:", "\n"):
        ended = await choice(folder, PATCHED, PATCH, stop=[stop])
        assert ended["finish_reason"] == "tool_calls", stop
        assert ended["message"]["tool_calls"][0]["custom"] == {"name": "patch", "input": "Observation: fog"}


async def test_beside_a_grammar_of_the_whole_text_no_call_is_enforced(folder):
    grammar = {"structured_outputs": {"grammar": "start: /(?s:.*)/"}}
    ended = await choice(folder, CALL + "\nObservation: fog", STRICT, stop=["Observation:"], **grammar)
    assert (ended["message"]["content"], ended["stop_reason"]) == (None, "Observation:")


async def test_a_call_that_a_stop_token_cuts_off_does_not_look_complete(folder):
    ended = await choice(folder, CALL, tool_choice="required", stop_token_ids=[ids("Nan")[0]])
    assert ended["finish_reason"] == "stop" and ended["stop_reason"] == ids("Nan")[0]


async def test_a_call_that_no_grammar_enforces_is_cut_off(folder):
    ended = await choice(folder, CALL, stop=["Nan"])
    assert (ended["finish_reason"], ended["stop_reason"]) == ("stop", "Nan")
