"""Tools: what the prompt tells of them, what the answer makes of calls, and what is refused."""

import json

import openai
import pytest

from tests.fakes import TEMPLATE, FakeEngine, listening, model_folder, serving
from tests.server.api.anthropic.wire import MESSAGES
from tests.server.wire import CHAT, LIBRARY, QUESTION, RESPONSES, ask, chunks, ids, joined, saying

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
CALLING = TEMPLATE + "{% for t in tools or [] %}<tool_call>{{ t.function.name }}{% endfor %}"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"place": "Nantucket"}}\n</tool_call>'
SECOND = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    config = {"eos_token": "<|end|>", "chat_template": CALLING}
    return model_folder(tmp_path_factory.mktemp("model") / "fake", tokenizer_config=config)


async def choice(folder, says, **body):
    body = {"messages": QUESTION, "tools": [WEATHER, CLOCK], **body}
    response = await ask(folder, CHAT, body, FakeEngine(saying(says)))
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


async def refusal(folder, **body):
    response = await ask(folder, CHAT, {"messages": QUESTION, **body})
    assert response.status_code == 400, response.text
    return response.json()["error"]


async def prompt(folder, **body):
    engine = FakeEngine(saying("a"))
    assert (await ask(folder, CHAT, {"messages": QUESTION, **body}, engine)).status_code == 200
    return LIBRARY.decode(engine.requests[0].prompt_ids)


async def test_a_call_is_no_text(folder):
    answered = await choice(folder, CALL)
    assert answered["finish_reason"] == "tool_calls"
    message = answered["message"]
    assert message["content"] is None
    [call] = message["tool_calls"]
    assert call["type"] == "function"
    assert call["id"].startswith("call_")
    assert call["function"] == {"name": "weather", "arguments": '{"place": "Nantucket"}'}


async def test_text_comes_before_calls_and_ids_differ(folder):
    message = (await choice(folder, f"Let me look.\n{CALL}\n{SECOND}"))["message"]
    assert message["content"] == "Let me look."
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["weather", "clock"]
    assert len({call["id"] for call in message["tool_calls"]}) == 2


async def test_streamed_arguments_come_piece_by_piece(folder):
    body = {"messages": QUESTION, "tools": [WEATHER], "stream": True}
    seen = chunks((await ask(folder, CHAT, body, FakeEngine(saying(CALL)))).text)
    pieces = [call for chunk in seen for c in chunk["choices"] for call in c["delta"].get("tool_calls", ())]
    assert [piece["index"] for piece in pieces] == [0] * len(pieces)
    assert pieces[0]["function"]["name"] == "weather"
    assert [key for piece in pieces[1:] for key in piece] == ["index", "function"] * (len(pieces) - 1)
    assert "".join(piece["function"]["arguments"] for piece in pieces) == '{"place": "Nantucket"}'
    assert len(pieces) > 4
    assert seen[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_a_chunk_has_one_entry_of_one_call_however_many_tokens_come_together(folder):
    body = {"messages": QUESTION, "tools": [WEATHER, CLOCK], "stream": True}
    engine = FakeEngine(saying(f"{CALL}\n{SECOND}"), per_delta=1000)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks((await ask(folder, CHAT, body, engine)).text)]
    first, second = (entries for delta in deltas if (entries := delta.get("tool_calls")))
    assert [(entry["index"], entry["function"]) for entry in first] == [
        (0, {"name": "weather", "arguments": '{"place": "Nantucket"}'})
    ]
    assert [(entry["index"], entry["function"]) for entry in second] == [(1, {"name": "clock", "arguments": "{}"})]
    assert all(entry["id"].startswith("call_") for entry in first + second)


async def test_a_call_that_was_cut_off_ends_by_length(folder):
    cut = await choice(folder, CALL, max_tokens=len(ids(CALL)) - 15)
    assert cut["finish_reason"] == "length"
    assert '{"place": "Nantucket"}'.startswith(cut["message"]["tool_calls"][0]["function"]["arguments"])


EACH_API = pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
WHOLE_OR_STREAM = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


async def cut_off(folder, path, stream, says=CALL, **more):
    """The response of an API to a request with the tool that the model calls."""
    flat = {**WEATHER["function"], "type": "function"}
    anthropic = {"name": "weather", "input_schema": WEATHER["function"]["parameters"]}
    tools = {CHAT: WEATHER, RESPONSES: flat, MESSAGES: anthropic}[path]
    body = {"input": "the sea"} if path == RESPONSES else {"messages": QUESTION, "max_tokens": 100}
    body |= {"tools": [tools], "stream": stream, **more}
    response = await ask(folder, path, body, FakeEngine(saying(says)))
    assert response.status_code == 200, response.text
    return response


@EACH_API
@WHOLE_OR_STREAM
async def test_a_call_cut_off_before_its_name_is_complete_is_no_text(folder, path, stream):
    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
    for count in range(1, len(ids('<tool_call>\n{"name": "weath')) + 1):
        response = await cut_off(folder, path, stream, **{limit: count})
        assert not any(piece in response.text for piece in ('"<', "tool_call>", '\\"name')), count


def stop_at(path, text):
    return {"stop_sequences" if path == MESSAGES else "stop": [text]}


def event(text, kind):
    """The event of this type in a stream of typed events."""
    [data] = [line[6:] for line in text.splitlines() if line.startswith(f'data: {{"type":"{kind}"')]
    return json.loads(data)


@EACH_API
@WHOLE_OR_STREAM
@pytest.mark.parametrize("stop", ["tool", "_call>", "\n", '": "w', "name", "weather"])
async def test_a_call_that_a_stop_string_cuts_off_before_its_arguments_is_no_text(folder, path, stop, stream):
    response = await cut_off(folder, path, stream, f"Let me look.{CALL}", **stop_at(path, stop))
    assert "Let me look." in response.text or stream
    assert not any(piece in response.text for piece in ('"<', "<tool", ".<", '{\\"'))


@EACH_API
@WHOLE_OR_STREAM
async def test_a_call_that_a_stop_string_cuts_off_does_not_look_complete(folder, path, stream):
    response = await cut_off(folder, path, stream, **stop_at(path, "Nan"))
    if path == CHAT:
        [end] = joined(chunks(response.text)).values() if stream else response.json()["choices"]
        assert (end["finish_reason"], end["stop_reason"]) == ("stop", "Nan")
        if not stream:
            assert end["message"]["content"] is None
            [call] = end["message"]["tool_calls"]
            assert call["function"] == {"name": "weather", "arguments": '{"place": "'}
    elif path == MESSAGES:
        end = event(response.text, "message_delta")["delta"] if stream else response.json()
        assert (end["stop_reason"], end["stop_sequence"]) == ("stop_sequence", "Nan")
        if not stream:
            assert [(block["type"], block["input"]) for block in end["content"]] == [("tool_use", {})]
    else:
        ended = event(response.text, "response.completed")["response"] if stream else response.json()
        [item] = ended["output"]
        assert (item["type"], item["status"], item["arguments"]) == ("function_call", "incomplete", '{"place": "')


async def test_a_stop_string_that_is_included_brings_no_markup_with_it(folder):
    for stop, included in (("look.", "Let me look."), ("tool", "Let me look.\n"), ("name", "Let me look.\n")):
        ended = await choice(folder, f"Let me look.\n{CALL}", stop=[stop], include_stop_str_in_output=True)
        assert (ended["message"]["content"], ended["finish_reason"]) == (included, "stop")
        assert "tool_calls" not in ended["message"]


async def test_calls_that_are_complete_before_the_stop_string_are_calls(folder):
    for says, stop in ((CALL, "</tool"), (f"{CALL}\n{SECOND}", "clock"), (f"{CALL} So", "So")):
        ended = await choice(folder, says, stop=[stop])
        assert (ended["finish_reason"], ended["stop_reason"]) == ("tool_calls", stop)
        [call] = ended["message"]["tool_calls"]
        assert call["function"]["arguments"] == '{"place": "Nantucket"}'
        assert ended["message"]["content"] is None
    half = await choice(folder, CALL, stop=["}}"])
    assert half["finish_reason"] == "stop"


async def test_what_is_not_a_tool_is_text(folder):
    unknown = CALL.replace("weather", "sink_the_ship")
    answered = await choice(folder, unknown)
    assert answered["message"]["content"] == unknown
    assert answered["finish_reason"] == "stop"
    assert (await choice(folder, CALL, tools=None))["message"]["content"] == CALL


async def test_the_prompt_describes_the_tools(folder):
    assert (await prompt(folder, tools=[WEATHER, CLOCK])).endswith("<tool_call>weather<tool_call>clock")
    assert "<tool_call>" not in await prompt(folder)
    assert "<tool_call>" not in await prompt(folder, tools=[])


async def test_with_choice_none_there_are_no_tools(folder):
    assert "<tool_call>" not in await prompt(folder, tools=[WEATHER], tool_choice="none")
    assert (await choice(folder, CALL, tool_choice="none"))["message"]["content"] == CALL


async def test_tools_that_are_not_allowed_are_described_but_not_called(folder):
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "clock"}}]}
    some = {"tools": [WEATHER, CLOCK], "tool_choice": {"type": "allowed_tools", "allowed_tools": allowed}}
    assert (await prompt(folder, **some)).endswith("<tool_call>weather<tool_call>clock")
    assert (await choice(folder, CALL, **some))["message"]["content"] == CALL
    assert (await choice(folder, SECOND, **some))["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tools": [{"type": "retrieval"}]}, "tools.0.type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a" * 129}}]}, "tools.0.function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]}, "tools.0.function.parameters"),
        ({"tools": [WEATHER] * 257}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "clock"}}}, "tool_choice"),
        ({"tools": [WEATHER], "parallel_tool_calls": "yes"}, "parallel_tool_calls"),
    ],
)
async def test_bad_tools_are_refused_by_name(folder, body, param):
    assert (await refusal(folder, **body))["param"] == param


async def forced(folder, parameters, **body):
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    engine = FakeEngine(saying("a"))
    response = await ask(
        folder, CHAT, {"messages": QUESTION, "tools": [tool], "tool_choice": "required", **body}, engine
    )
    return response, engine


@pytest.mark.parametrize(
    ("parameters", "place"),
    [
        ({"type": "array", "items": {"type": "integer"}}, "'/type'"),
        ({"type": ["string", "null"]}, "'/type'"),
        ({"type": "object", "properties": {"a": {"not": {}}}}, "'/properties/a/not'"),
        ({"const": 5}, ""),
    ],
)
async def test_a_schema_that_calls_cannot_follow_is_refused_with_its_place(folder, parameters, place):
    response, _ = await forced(folder, parameters)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "tools[0].function.parameters")
    assert place in error["message"]


async def test_what_cannot_stand_beside_a_call_that_must_be_made(folder):
    for more, param in (
        ({"min_tokens": 5}, "min_tokens"),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, "structured_outputs.grammar"),
    ):
        response, _ = await forced(folder, {}, **more)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_a_required_call_is_a_grammar_of_the_whole_answer(folder):
    response, engine = await forced(folder, {"type": ["object", "null"], "required": ["a"], "properties": {"a": {}}})
    assert response.status_code == 200
    kind, text = engine.requests[0].params.grammar
    assert kind == "lark" and '"<tool_call>"' in text and '"type": "object"' in text and "null" not in text


async def grammar_beside(folder, tool):
    engine = FakeEngine(saying("a"))
    assert (await ask(folder, CHAT, {"messages": QUESTION, "tools": [tool]}, engine)).status_code == 200
    return engine.requests[0].params.grammar


async def test_where_the_model_is_free_to_call_only_strict_functions_are_a_grammar(folder):
    assert await grammar_beside(folder, WEATHER) is None
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
    kind, text = await grammar_beside(folder, strict)
    assert kind == "lark" and '"place"' in text


async def test_too_many_functions_for_one_grammar(tmp_path):
    config = {"eos_token": "<|end|>", "chat_template": "{# tools <tool_call> #}{{ messages[0].content }}"}
    plain = model_folder(tmp_path / "plain", tokenizer_config=config)  # its prompt does not tell of them
    tools = [
        {"type": "function", "function": {"name": f"f{i}", "parameters": {"type": "object", "properties": properties}}}
        for i, properties in ((i, {f"place{i}_{j}": {"type": "integer"} for j in range(40)}) for i in range(256))
    ]
    body = {"messages": QUESTION, "tools": tools, "tool_choice": "required"}
    response = await ask(plain, CHAT, body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")
    assert "together" in response.json()["error"]["message"]


async def test_the_openai_sdk_calls_tools_until_the_answer(folder):
    async with serving(folder, FakeEngine(saying(CALL, "Fog."))) as (_, app), listening(app) as url:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            messages = list(QUESTION)
            async with client.chat.completions.stream(model="fake", messages=messages, tools=[WEATHER]) as stream:
                first = (await stream.get_final_completion()).choices[0]
            assert first.finish_reason == "tool_calls"
            [call] = first.message.tool_calls
            assert json.loads(call.function.arguments) == {"place": "Nantucket"}
            messages += [
                first.message.model_dump(exclude_none=True),
                {"role": "tool", "tool_call_id": call.id, "content": "fog"},
            ]
            last = await client.chat.completions.create(model="fake", messages=messages, tools=[WEATHER])
            assert last.choices[0].message.content == "Fog."
