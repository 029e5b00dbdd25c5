"""Responses: the input and what it becomes, and what is wrong with a body."""

import json

import pytest
from openai.types.responses import Response

from server.api.custom_tools import arguments_of, input_of
from server.api.responses import items
from server.api.responses.items import as_turns
from server.api.responses.request import ResponsesRequest
from tests.fakes import FakeEngine, serving
from tests.server.api.responses.wire import CALL, WEATHER, prompts, respond
from tests.server.wire import LIBRARY, RESPONSES, ask, ids, saying

PATCH = {"type": "custom", "name": "patch", "description": "Patches a file."}


MENDED = '*** Begin\n+say("sea") \\ é\n'


def custom(**format):
    return PATCH | {"format": {"type": "grammar", "syntax": "regex", "definition": "a", **format}}


def tool_of(tool):
    [found] = ResponsesRequest(input="a", tools=[tool]).calling.tools
    return found.as_json


async def refusal(folder, **body):
    response = await ask(folder, RESPONSES, {"input": "the sea", **body})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    return error["param"], error["code"]


async def test_items_that_the_python_sdk_has_dumped_can_be_sent_back(folder):
    first = await respond(folder, f"<think>Hm</think>Let me look.{CALL}", tools=[WEATHER])
    said = [item.model_dump() for item in Response.model_validate(first).output]
    assert [item["type"] for item in said] == ["reasoning", "message", "function_call"]
    result = {"type": "function_call_output", "call_id": said[-1]["call_id"], "output": "fog"}
    again = await respond(folder, input=[{"role": "user", "content": "the sea"}, *said, result], tools=[WEATHER])
    assert again["status"] == "completed"


@pytest.mark.parametrize(
    ("field", "own"),
    [("max_tokens", "max_output_tokens"), ("response_format", "text.format"), ("messages", "input")],
)
async def test_a_field_of_chat_completions_is_refused_with_the_name_that_it_has_here(folder, field, own):
    response = await ask(folder, RESPONSES, {"input": "the sea", field: 5})
    message = f"'{field}' is not supported; send {own} instead."
    assert (response.status_code, response.json()["error"]["message"]) == (400, message)


async def test_a_text_is_the_users_message(folder):
    assert await prompts(folder, {"input": "the sea"}) == "user: the sea\nassistant: "
    assert (await prompts(folder, {"input": "the sea", "instructions": "Sing."})).startswith("system: Sing.\n")


async def test_items_become_messages_in_their_order(folder):
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "Sing"}, {"type": "input_text", "text": "!"}]},
        {"type": "message", "role": "user", "content": "the sea"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
         "content": [{"type": "output_text", "text": "the ship", "annotations": []}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"place": "Nantucket"}'},
        {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": '{"place": "Hull"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "wind"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "rain"}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
    ]  # fmt: skip
    assert await prompts(folder, {"input": items}) == (
        "system: Sing\n!\nuser: the sea\nassistant: the ship\ntool: wind\n"
        "tool: rain\nassistant: no\nassistant: <think>hm</think>[weather Nantucket][weather Hull]"
    )


def test_a_long_item_is_read_once_however_many_items_have_its_id(monkeypatch):
    read = []
    monkeypatch.setattr(items, "reasoning_text", lambda item: read.append(item) or item["content"][0]["text"])

    def thought(text):
        return {"type": "reasoning", "id": "rs_1", "content": [{"type": "reasoning_text", "text": text}]}

    earlier, own = thought("the sea"), [thought("a"), thought("the sea"), thought("b")]
    assert items.without_repeats([*own, earlier], {"rs_1": earlier}) == [own[0], own[2]]
    assert sum(item is earlier for item in read) == 1


def test_the_tools_of_a_conversation_are_read_once():
    added = {"type": "additional_tools", "role": "developer", "tools": [{"type": "function", "name": "look"}]}
    request = ResponsesRequest.model_validate({"input": [added]})
    request.expand([], request.given)
    assert request.called("look") is request.called("look")


@pytest.mark.parametrize(
    "between",
    [
        {"type": "message", "role": "user", "content": "and?"},
        {"type": "message", "role": "developer", "content": "Sing."},
        {"type": "function_call_output", "call_id": "c1", "output": "wind"},
    ],
    ids=["user", "developer", "output"],
)
def test_a_thought_that_was_cut_off_does_not_move_to_a_later_answer(between):
    thoughts = [{"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}]} for text in ("hm", "so")]
    said = {"type": "message", "role": "assistant", "content": "the ship"}
    turns = as_turns([*thoughts, between, said])
    assert turns[0] == {"role": "assistant", "content": "", "reasoning_content": "hm\nso"}
    assert turns[2] == {"role": "assistant", "content": "the ship"}
    [_, _, later] = as_turns([thoughts[0], between, thoughts[1], said])
    assert later == {"role": "assistant", "content": "the ship", "reasoning_content": "so"}


async def test_reasoning_that_another_server_encrypted_leaves_no_trace(folder):
    secret = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAAB"}
    asked, said = ({"role": role, "content": "the sea"} for role in ("user", "assistant"))
    prompts = []
    for given in ([asked, secret, said, secret, asked], [asked, said, asked]):
        engine = FakeEngine(saying("a whale"))
        assert (await ask(folder, RESPONSES, {"input": given}, engine)).status_code == 200
        prompts.append(engine.requests[0].prompt_ids)
    assert prompts[0] == prompts[1]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": None}, "input"),
        ({"input": [{"role": "captain", "content": "a"}]}, "input.0.role"),
        ({"input": [{"role": "user"}]}, "input.0.content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
         "input.0.content.0.type"),
        ({"input": [{"type": "web_search_call", "id": "ws_1"}]}, "input.0.type"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input.0.arguments"),
        ({"input": [{"id": "msg_none"}]}, "input.0.id"),
        ({"input": [{"role": "user", "content": "a"}] * 4097}, "input"),
        ({"input": "sea " * 2000}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": -2}, "max_output_tokens"),
        ({"include": ["everything"]}, "include.0"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"tools": [{"type": "telepathy"}]}, "tools.0.type"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search_preview"}}, "tool_choice"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tools": [{"type": "namespace", "name": "sea", "tools": [WEATHER]}, {**WEATHER, "name": "sea__weather"}]},
         "tools"),
        ({"tools": [{"type": "namespace", "name": "sea", "tools": [{"type": "captain", "name": "a"}]}]},
         "tools.0.tools.0.type"),
        ({"tools": [PATCH, {**WEATHER, "name": "patch"}]}, "tools"),
        ({"tools": [custom(syntax="peg")]}, "tools.0.format.syntax"),
        ({"tools": [custom(syntax="lark", definition='start: "a" start')]}, "tools"),
        ({"tools": [custom(definition="(")]}, "tools[0].format.definition"),
        ({"tools": [{"type": "namespace", "name": "sea", "tools": [custom(definition="(?=a)")]}]},
         "tools[0].tools[0].format.definition"),
        ({"tools": [{**custom(definition="a" * 40000), "name": name} for name in "ab"]}, "tools"),
        ({"tools": [PATCH], "tool_choice": {"type": "custom", "name": "clock"}}, "tool_choice"),
        ({"input": [{"type": "custom_tool_call", "call_id": "c", "name": "f"}]}, "input.0.input"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "clock"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "file_search"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"not": {}}}}}, "text.format.schema"),
        ({"text": {"verbosity": "loud"}}, "text.verbosity"),
        ({"reasoning": {"summary": "long"}}, "reasoning.summary"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"truncation": "middle"}, "truncation"),
        ({"background": True, "store": False}, "background"),
        ({"background": True, "stream": True}, "background"),
        ({"stream_options": {}}, "stream_options"),
        ({"previous_response_id": "resp_none"}, "previous_response_id"),
        ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs"),
        ({"structured_outputs": {"regex": "a"}, "text": {"format": {"type": "json_object"}}}, "structured_outputs"),
        ({"max_tokens": 5}, "max_tokens"),
    ],
    ids=lambda case: str(case)[:50],
)  # fmt: skip
async def test_what_is_wrong_is_named(folder, body, param):
    assert (await refusal(folder, **body))[0] == param


@pytest.mark.parametrize(
    "body",
    [
        {"truncation": "disabled"}, {"reasoning": {"summary": "auto", "effort": "medium"}}, {"include": []},
        {"truncation": "auto"}, {"reasoning": {"summary": "detailed", "effort": "high"}},
        {"text": {"verbosity": "high"}},
        {"include": ["message.input_image.image_url"]}, {"max_output_tokens": 10_000}, {"max_output_tokens": -1},
        {"tools": [{"type": "file_search", "vector_store_ids": ["x"]}, {"type": "custom", "name": "patch"}]},
        {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"}]},
        {"include": ["reasoning.encrypted_content"]},
        {"text": {"format": {"type": "text"}, "verbosity": "medium"}}, {"tool_choice": "auto"}, {"background": False},
        {"metadata": None}, {"service_tier": "auto"}, {"store": None}, {"max_tool_calls": 1}, {"conversation": None},
        {"input": [{"type": "message", "role": "user", "content": [], "phase": None}]},
    ],
    ids=str,
)  # fmt: skip
async def test_what_asks_for_nothing_passes(folder, body):
    assert (await respond(folder, **body))["status"] == "completed"


async def test_the_length_of_a_prompt_is_returned_without_generating(folder):
    body = {"model": "fake", "input": "the sea", "instructions": "Sing."}
    engine = FakeEngine(saying("a"))
    async with serving(folder, engine) as (client, _):
        first = (await client.post(RESPONSES, json=body)).json()
        asked = {**body, "input": "and?", "previous_response_id": first["id"]}
        made = (await client.post(RESPONSES, json=asked)).json()
        counted = await client.post(f"{RESPONSES}/input_tokens", json=asked)
        wrong = await client.post(f"{RESPONSES}/input_tokens", json={"model": "fake", "input": []})
        alone = await client.post(f"{RESPONSES}/input_tokens", json={"model": "fake", "instructions": "Sing."})
    assert counted.json() == {"object": "response.input_tokens", "input_tokens": made["usage"]["input_tokens"]}
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "input")
    assert 0 < alone.json()["input_tokens"] < first["usage"]["input_tokens"]
    assert len(engine.requests) == 2


@pytest.mark.parametrize("more", [{}, {"input": []}, {"input": None}, {"instructions": "Sing."}], ids=str)
async def test_nothing_to_respond_to_is_refused_as_openai_does(folder, more):
    async with serving(folder) as (client, _):
        response = await client.post(RESPONSES, json={"model": "fake", **more})
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, "input", "missing_required_parameter")
    assert error["message"] == 'One of "input" or "previous_response_id" must be provided.'


async def test_conversations_are_not_compacted(folder):
    async with serving(folder) as (client, _):
        response = await client.post(f"{RESPONSES}/compact", json={"model": "fake", "input": "the sea"})
    assert response.status_code == 404
    assert "compact" in response.json()["error"]["message"]


async def test_functions_of_a_group_have_its_name_before_theirs(folder):
    group = {"type": "namespace", "name": "sea", "tools": [WEATHER, {"type": "custom", "name": "patch"}]}
    body = {"input": "How is it?", "tools": [group, {"type": "web_search"}]}
    call = '<tool_call>\n{"name": "sea__weather", "arguments": {"place": "Hull"}}\n</tool_call>'
    engine = FakeEngine(saying(call))
    answer = (await ask(folder, RESPONSES, body, engine)).json()
    [item] = answer["output"]
    assert (item["namespace"], item["name"], json.loads(item["arguments"])) == ("sea", "weather", {"place": "Hull"})
    assert [tool["type"] for tool in answer["tools"]] == ["namespace", "web_search"], "as they came"
    again = [item, {"type": "function_call_output", "call_id": item["call_id"], "output": "fog"}]
    assert "[sea__weather Hull]" in await prompts(folder, {**body, "input": again})


async def test_a_custom_tool_is_a_function_whose_input_is_a_text(folder):
    body = {"input": "Mend it.", "tools": [PATCH]}
    call = f'<tool_call>\n{{"name": "patch", "arguments": {arguments_of(MENDED)}}}\n</tool_call>'
    answer = (await ask(folder, RESPONSES, body, FakeEngine(saying(call)))).json()
    [item] = answer["output"]
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "patch", MENDED)
    assert item["id"].startswith("ctc_") and item["status"] == "completed" and "arguments" not in item
    again = [item, {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "done"}]
    assert as_turns(again) == [
        {"role": "assistant", "content": "", "tool_calls": [
            {"id": item["call_id"], "type": "function",
             "function": {"name": "patch", "arguments": arguments_of(MENDED)}}]},
        {"role": "tool", "tool_call_id": item["call_id"], "content": "done"},
    ]  # fmt: skip
    assert "tool: done" in await prompts(folder, {**body, "input": again})


async def test_a_custom_call_that_is_cut_off_has_the_input_so_far_and_is_not_continued(folder):
    call = '<tool_call>\n{"name": "patch", "arguments": {"input": "mend the sail and the rope'
    body, engine = {"input": "Mend it.", "tools": [PATCH]}, FakeEngine(saying(call, "no"))
    async with serving(folder, engine) as (client, _):
        answer = (await client.post(RESPONSES, json={**body, "max_output_tokens": len(ids(call)) - 1})).json()
        await client.post(RESPONSES, json={"input": "And?", "previous_response_id": answer["id"]})
    [item] = answer["output"]
    assert (item["type"], item["status"]) == ("custom_tool_call", "incomplete")
    assert "mend the sail and the rope".startswith(item["input"]) and len(item["input"]) > 12
    assert LIBRARY.decode(engine.requests[1].prompt_ids) == "user: Mend it.\nuser: And?\nassistant: "


async def test_a_custom_tools_input_streams_as_one_delta(folder):
    group = {"type": "namespace", "name": "files", "tools": [PATCH]}
    call = f'<tool_call>\n{{"name": "files__patch", "arguments": {arguments_of(MENDED)}}}\n</tool_call>'
    body = {"input": "Mend it.", "tools": [group], "stream": True}
    response = await ask(folder, RESPONSES, body, FakeEngine(saying(call)))
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    names = [event["type"].removeprefix("response.") for event in events]
    assert names[2:-1] == [
        "output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done", "output_item.done",
    ]  # fmt: skip
    added, delta, done, last = events[2:-1]
    assert (added["item"]["input"], added["item"]["namespace"]) == ("", "files")
    assert delta["delta"] == done["input"] == last["item"]["input"] == MENDED
    assert delta["item_id"] == last["item"]["id"]


async def test_the_grammar_of_a_custom_tool_is_in_the_prompt_and_in_the_engines_grammar(folder):
    engine = FakeEngine(saying("no"))
    tool = custom(syntax="lark", definition='start: "Begin" LF\n%import common.LF')
    await ask(folder, RESPONSES, {"input": "Mend it.", "tools": [tool]}, engine)
    kind, text = engine.requests[0].params.grammar
    assert kind == "lark" and "(?:Begin)(?:\\\\n)" in text and "this lark grammar" not in text
    parameters = tool_of(tool)["function"]["parameters"]
    assert parameters["properties"]["input"]["description"].endswith(tool["format"]["definition"])
    assert "pattern" not in parameters["properties"]["input"]


@pytest.mark.parametrize("text", ["a", 'quote " and \\ and \n', "é \U0001f433", ""])
def test_the_input_of_a_call_that_was_cut_off_is_as_far_as_it_was_written(text):
    arguments = json.dumps({"input": text})
    assert input_of(arguments) == text
    read = [input_of(arguments[:end]) for end in range(len(arguments))]
    assert read[-1] == text and all(text.startswith(each.rstrip("\ud83d")) for each in read)


async def test_the_response_has_its_penalties(folder):
    answer = (await ask(folder, RESPONSES, {"input": "a", "presence_penalty": 0.5}, FakeEngine(saying("a")))).json()
    assert (answer["presence_penalty"], answer["frequency_penalty"]) == (0.5, 0.0)
