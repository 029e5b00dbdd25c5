"""Tools for a model whose chat template knows none: what its prompt says of them, and how its calls are read."""

import json

import pytest
from msgspec.structs import replace

from server.tokenization.generic_tools import described
from tests.fakes import INFO, FakeEngine, model_folder
from tests.server.wire import CHAT, LIBRARY, QUESTION, ask, ids, saying

PLAIN = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
# As Gemma's: no system message, and users and assistants by turns.
STERN = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + PLAIN
DEAF = "{% for m in messages if m.role != 'system' %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "How the sea is.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"place": "Nantucket"}}\n</tool_call>'
CALLED = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"place": "Nantucket"}'}}


def folder_with(tmp_path, template):
    config = {"eos_token": "<|end|>", "chat_template": template}
    return model_folder(tmp_path / "model", tokenizer_config=config)


async def asked(folder, says="Fog.", context=2048, **body):
    engine = FakeEngine(saying(says), info=replace(INFO, max_len=context))
    flags = {name: body.pop(name) for name in ("tool_call_parser",) if name in body}
    return await ask(folder, CHAT, {"messages": QUESTION, **body}, engine, **flags), engine


async def prompt(folder, **body):
    response, engine = await asked(folder, **body)
    assert response.status_code == 200, response.text
    return LIBRARY.decode(list(engine.requests[0].prompt_ids), skip_special_tokens=False)


async def test_the_model_reads_of_its_tools_in_the_system_message(tmp_path):
    told = await prompt(folder_with(tmp_path, PLAIN), tools=[WEATHER])
    assert told.startswith("[system] You can call functions.")
    assert json.dumps(WEATHER) in told
    assert told.index("How the sea is.") < told.index("[user] the sea")


async def test_the_instructions_of_the_request_come_first(tmp_path):
    messages = [{"role": "system", "content": "Be brief."}, *QUESTION]
    told = await prompt(folder_with(tmp_path, PLAIN), tools=[WEATHER], messages=messages)
    assert told.startswith("[system] Be brief.\n\nYou can call functions.")
    assert told.count("[system]") == 1


@pytest.mark.parametrize("template", [STERN, DEAF], ids=["refuses system messages", "leaves them out"])
async def test_where_there_is_no_system_message_the_first_user_message_begins_with_them(tmp_path, template):
    told = await prompt(folder_with(tmp_path, template), tools=[WEATHER])
    assert told.startswith("[user] You can call functions.")
    assert told.rstrip().endswith("the sea")


async def test_calls_and_results_are_text(tmp_path):
    messages = [
        *QUESTION,
        {"role": "assistant", "content": "I look.", "tool_calls": [CALLED, {**CALLED, "id": "d"}]},
        {"role": "tool", "tool_call_id": "c", "content": "wind"},
        {"role": "tool", "tool_call_id": "d", "content": [{"type": "text", "text": "fog"}]},
    ]
    told = await prompt(folder_with(tmp_path, PLAIN), tools=[WEATHER], messages=messages)
    results = "<tool_response>\nwind\n</tool_response>\n<tool_response>\nfog\n</tool_response>"
    assert told.endswith(f"[assistant] I look.\n{CALL}\n{CALL}\n[user] {results}\n")


async def test_a_call_is_read_from_the_text(tmp_path):
    response, _ = await asked(folder_with(tmp_path, PLAIN), CALL, tools=[WEATHER])
    [choice] = response.json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == {"place": "Nantucket"}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}], ids=str)
async def test_a_call_that_must_be_made_is_forced(tmp_path, choice):
    _, engine = await asked(folder_with(tmp_path, PLAIN), CALL, tools=[WEATHER], tool_choice=choice)
    kind, source = engine.requests[0].params.grammar
    assert kind == "lark" and "<tool_call>" in source


async def test_without_tools_the_prompt_is_the_template_s(tmp_path):
    folder = folder_with(tmp_path, PLAIN)
    assert await prompt(folder) == await prompt(folder, tools=[WEATHER], tool_choice="none") == "[user] the sea\n"


async def test_the_parser_none_refuses_tools(tmp_path):
    response, engine = await asked(folder_with(tmp_path, PLAIN), tools=[WEATHER], tool_call_parser="none")
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")
    assert "--tool-call-parser" in response.json()["error"]["message"]
    assert engine.requests == []


async def test_another_parser_could_not_read_the_calls(tmp_path):
    folder = folder_with(tmp_path, PLAIN)
    response, _ = await asked(folder, tools=[WEATHER], tool_call_parser="mistral")
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")
    assert (await asked(folder, tools=[WEATHER], tool_call_parser="hermes"))[0].status_code == 200


async def test_tools_that_fill_the_context_are_left_out_and_the_answer_says_so(tmp_path):
    folder = folder_with(tmp_path, PLAIN)
    many = [{**WEATHER, "function": {**WEATHER["function"], "name": f"weather{i}"}} for i in range(8)]
    response, engine = await asked(folder, tools=many, context=512)
    assert response.status_code == 200
    assert response.headers["X-Pequod-Left-Out"] == "tools"
    assert engine.requests[0].prompt_ids == tuple(ids("[user] the sea\n"))
    streamed, _ = await asked(folder, tools=many, context=512, stream=True)
    assert streamed.headers["X-Pequod-Left-Out"] == "tools"
    assert "X-Pequod-Left-Out" not in (await asked(folder, tools=many, context=8192))[0].headers


async def test_where_a_call_must_be_made_or_the_conversation_is_long_nothing_is_left_out(tmp_path):
    folder = folder_with(tmp_path, PLAIN)
    many = [{**WEATHER, "function": {**WEATHER["function"], "name": f"weather{i}"}} for i in range(8)]
    forced, _ = await asked(folder, tools=many, context=512, tool_choice="required")
    assert (forced.status_code, forced.json()["error"]["code"]) == (400, "context_length_exceeded")
    long = [{"role": "user", "content": "sea " * 1000}]
    response, _ = await asked(folder, tools=[WEATHER], context=1024, messages=long)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize("arguments", ['{"place": "Nan', "[1]", ""])
def test_a_call_that_was_cut_off_stays_as_it_was(arguments):
    call = {**CALLED, "function": {"name": "weather", "arguments": arguments}}
    [turn] = described([{"role": "assistant", "content": None, "tool_calls": [call]}], None, takes_system=True)
    assert json.loads(turn["content"].split("\n")[1])["name"] == "weather"
