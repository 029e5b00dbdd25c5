"""Responses over a fake engine: whole, as typed events, stored, gone on with, and worked on in the background."""

import asyncio
import json
import random

import openai
import pydantic
import pytest

from server.limits import Limits
from server.protocol.responses_items import as_turns
from server.protocol.responses_object import ResponseAnswer, ResponseEvent
from server.routes import responses as routes
from tests.fakes import TEMPLATE, FakeEngine, listening, model_folder, serving, until
from tests.server.test_equality import CASES, spelt, text_of
from tests.server.wire import CHAT, END, LIBRARY, RESPONSES, Odds, ask, ids, run, saying, typed

WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "The weather of a place.",
    "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
}
CLOCK = {"type": "function", "name": "clock"}
TOOLS = (
    "{% for t in tools or [] %}<tool_call>{{ t.function.name }}{% endfor %}"
    "{% for m in messages %}{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments.place }}]{% endfor %}{% endfor %}"
)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"place": "Nantucket"}}\n</tool_call>'
SECOND = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
MESSAGE_EVENTS = [
    "response.output_item.added", "response.content_part.added", "response.output_text.delta",
    "response.output_text.done", "response.content_part.done", "response.output_item.done",
]  # fmt: skip
REASONING_EVENTS = [name.replace("output_text", "reasoning_text") for name in MESSAGE_EVENTS]
CALL_EVENTS = [
    "response.output_item.added", "response.function_call_arguments.delta",
    "response.function_call_arguments.done", "response.output_item.done",
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    config = {"eos_token": "<|end|>", "chat_template": TEMPLATE + TOOLS}
    return model_folder(tmp_path_factory.mktemp("model") / "fake", tokenizer_config=config)


def respond(folder, says="the whale", **body):
    response = ask(folder, RESPONSES, {"input": "the sea", **body}, FakeEngine(saying(says)))
    assert response.status_code == 200, response.text
    ResponseAnswer.model_validate(response.json())
    return response.json()


def refusal(folder, **body):
    response = ask(folder, RESPONSES, {"input": "the sea", **body})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    return error["param"], error["code"]


def streamed(folder, says, **body):
    return typed(ask(folder, RESPONSES, {"input": "the sea", **body, "stream": True}, FakeEngine(saying(says))).text)


def prompts(folder, *bodies):
    """What the model is told by the last of these requests; each goes on from the one before."""
    engine = FakeEngine(saying("the whale"))

    async def use(client):
        last = None
        for body in bodies:
            more = {"previous_response_id": last} if last else {}
            last = (await client.post(RESPONSES, json={**more, **body})).json()["id"]

    run(folder, use, engine)
    return LIBRARY.decode(engine.requests[-1].prompt_ids)


def kinds(events):
    """Types of events, runs of deltas as one."""
    return [e["type"] for i, e in enumerate(events) if i == 0 or e["type"] != events[i - 1]["type"]]


# The response


def test_a_response_has_what_openai_has(folder):
    answer = respond(folder, metadata={"a": "b"}, instructions="Be brief.", temperature=0.5, user="Ann")
    assert answer["id"].startswith("resp_")
    assert (answer["object"], answer["status"], answer["model"]) == ("response", "completed", "fake")
    openai.types.responses.Response.model_validate(answer)
    [message] = answer["output"]
    assert message.pop("id").startswith("msg_")
    text = {"type": "output_text", "text": "the whale", "annotations": [], "logprobs": []}
    assert message == {"type": "message", "status": "completed", "role": "assistant", "content": [text]}
    count = len(ids("the whale")) + 1
    assert answer["usage"]["output_tokens"] == count
    assert answer["usage"]["total_tokens"] == answer["usage"]["input_tokens"] + count
    assert answer["usage"]["input_tokens_details"] == {"cached_tokens": 0, "cache_write_tokens": 0}
    assert answer["usage"]["output_tokens_details"] == {"reasoning_tokens": 0}
    told = {"instructions": "Be brief.", "temperature": 0.5, "top_p": 1.0, "metadata": {"a": "b"}, "user": "Ann",
            "store": True, "background": False, "tool_choice": "auto", "tools": [], "truncation": "disabled",
            "error": None, "incomplete_details": None, "parallel_tool_calls": True}  # fmt: skip
    assert {name: answer[name] for name in told} == told


def test_an_answer_that_reaches_its_limit_is_incomplete(folder):
    answer = respond(folder, "the whale and the sea", max_output_tokens=2)
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert answer["output"][0]["status"] == "incomplete"
    assert answer["completed_at"] is None
    assert streamed(folder, "the whale and the sea", max_output_tokens=2)[-1]["type"] == "response.incomplete"


def test_an_answer_without_a_word_is_an_empty_message(folder):
    [message] = respond(folder, "")["output"]
    assert message["content"][0]["text"] == ""
    assert kinds(streamed(folder, ""))[2:-1] == [name for name in MESSAGE_EVENTS if not name.endswith("delta")]


def test_reasoning_text_and_calls_are_items_in_their_order(folder):
    says = f"<think>hm, hm</think>Let me look.\n{CALL}\n{SECOND}"
    answer = respond(folder, says, tools=[WEATHER, CLOCK])
    thought, message, weather, clock = answer["output"]
    assert (thought["type"], thought["summary"]) == ("reasoning", [])
    assert thought["content"] == [{"type": "reasoning_text", "text": "hm, hm"}]
    assert message["content"][0]["text"] == "Let me look."
    assert (weather["name"], weather["arguments"]) == ("weather", '{"place": "Nantucket"}')
    assert clock["name"] == "clock"
    assert [item["id"].partition("_")[0] for item in answer["output"]] == ["rs", "msg", "fc", "fc"]
    assert weather["call_id"] != clock["call_id"]
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    assert answer["status"] == "completed"


def test_logprobs_are_those_of_the_texts_tokens(folder):
    engine = Odds(saying(f"<think>hm</think>the whale{CALL}"))
    body = {"input": "the sea", "tools": [WEATHER], **LOGPROBS}
    answer = ask(folder, RESPONSES, body, engine).json()
    entries = next(item for item in answer["output"] if item["type"] == "message")["content"][0]["logprobs"]
    assert [entry["token"] for entry in entries] == ["the", " whale"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
    assert [entry["token"] for entry in respond(folder, **LOGPROBS)["output"][0]["content"][0]["logprobs"]] == [
        "the", " whale"]  # fmt: skip


@pytest.mark.parametrize(
    ("says", "text"),
    [
        ("<think>\nabc\n</think>\n\nthink", "think"),
        ("<think>abc</think>\n\n🐳 and €", "🐳 and €"),
        (f"{CALL}\n\nthe whale", "the whale"),
        ("<b>the whale</b>", "<b>the whale</b>"),
        ("the whale <th> the whale", "the whale <th> the whale"),
    ],
)
@pytest.mark.parametrize("more", [{}, {"stop": "whale of"}], ids=["", "held back"])
def test_logprobs_are_none_of_marks(folder, says, text, more):
    body = {"input": "the sea", "tools": [WEATHER], **LOGPROBS, **more}
    answer = ask(folder, RESPONSES, body, Odds(saying(says))).json()
    [part] = [item["content"][0] for item in answer["output"] if item["type"] == "message"]
    assert part["text"].strip() == text
    assert b"".join(bytes(entry["bytes"]) for entry in part["logprobs"]).decode().strip() == text


def test_token_ids_are_told_when_asked_for(folder):
    answer = respond(folder, return_token_ids=True)
    assert answer["token_ids"] == [*ids("the whale"), END]
    assert len(answer["prompt_token_ids"]) == answer["usage"]["input_tokens"]


def test_a_format_is_a_grammar_and_told_as_it_came(tmp_path):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "name": "a", "schema": schema, "strict": True}
    engine = FakeEngine(saying("{}"))
    answer = ask(model_folder(tmp_path / "plain"), RESPONSES, {"input": "a", "text": {"format": form}}, engine).json()
    assert answer["text"]["format"] == form
    kind, text = engine.requests[0].params.grammar
    assert (kind, json.loads(text)) == ("json_schema", schema)


# Events


def test_the_page_says_how_a_stream_ends(folder):
    paths = run(folder, lambda client: client.get("/openapi.json")).json()["paths"]
    told = {
        path: json.dumps(paths[path]["post"]["responses"]["200"]["content"]["text/event-stream"]["schema"])
        for path in (RESPONSES, CHAT)
    }
    assert ["[DONE]" in schema for schema in told.values()] == [False, True]
    assert "ResponseEvent" in told[RESPONSES]
    assert "[DONE]" not in ask(folder, RESPONSES, {"input": "a", "stream": True}, FakeEngine(saying("a"))).text


def test_events_come_in_the_documented_order(folder):
    says = f"<think>hm, hm</think>Let me look.\n{CALL}\n{SECOND}"
    events = streamed(folder, says, tools=[WEATHER, CLOCK])
    assert kinds(events) == [
        "response.created", "response.in_progress", *REASONING_EVENTS, *MESSAGE_EVENTS, *CALL_EVENTS, *CALL_EVENTS,
        "response.completed",
    ]  # fmt: skip
    assert [e["output_index"] for e in events if e["type"] == "response.output_item.added"] == [0, 1, 2, 3]
    assert [e["response"]["status"] for e in events if "response" in e] == ["in_progress", "in_progress", "completed"]
    adapter = pydantic.TypeAdapter(openai.types.responses.ResponseStreamEvent)
    for event in events:
        adapter.validate_python(event)
        ResponseEvent.model_validate(event)


def rebuilt(events):
    """Items as a client puts them together from the deltas alone."""
    items = []
    for event in events:
        match event["type"].removeprefix("response."):
            case "output_item.added":
                assert event["output_index"] == len(items)
                items.append(json.loads(json.dumps(event["item"])))
            case "content_part.added":
                items[event["output_index"]]["content"].append(dict(event["part"], logprobs=[]))
            case "output_text.delta" | "reasoning_text.delta":
                part = items[event["output_index"]]["content"][event["content_index"]]
                part["text"] += event["delta"]
                part["logprobs"] += event.get("logprobs", [])
            case "function_call_arguments.delta":
                items[event["output_index"]]["arguments"] += event["delta"]
            case "output_item.done":
                items[event["output_index"]]["status"] = event["item"]["status"]
        if "item_id" in event:
            assert event["item_id"] == items[event["output_index"]]["id"]
    for item in items:
        for part in item.get("content", ()):
            if part["type"] == "reasoning_text":
                del part["logprobs"]
    return items


def bare(items):
    """Items without what is drawn anew for each response."""
    return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in items]


@pytest.mark.parametrize("more", [{}, LOGPROBS, {"stop": "whale"}, {"max_output_tokens": 40}], ids=str)
def test_deltas_joined_are_the_items_and_equal_the_whole(folder, more):
    rng = random.Random(str(more))

    async def main():
        engine = Odds()
        async with serving(folder, engine) as (client, app):
            for formats in CASES * 4:
                app.state.pequod.formats = formats
                spoken = [*spelt(text_of(rng, formats)), END]
                engine.say = lambda request, spoken=spoken: spoken
                body = {"input": "the sea", "tools": [WEATHER, CLOCK] if formats.tools else [], **more}
                engine.per_delta = rng.choice([1, 2, 5, 100])
                whole = (await client.post(RESPONSES, json=body)).json()
                engine.per_delta = rng.choice([1, 2, 5, 100])
                events = typed((await client.post(RESPONSES, json={**body, "stream": True})).text)
                final = events[-1]["response"]
                assert rebuilt(events) == final["output"]
                assert bare(final["output"]) == bare(whole["output"])
                assert [final[name] for name in ("usage", "status")] == [whole[name] for name in ("usage", "status")]
                stored = (await client.get(f"{RESPONSES}/{final['id']}")).json()
                assert stored == final

    asyncio.run(main())


def test_what_goes_wrong_in_a_stream_is_its_last_event(folder):
    async def main():
        engine = FakeEngine(saying("the whale and the sea"))
        engine.error_at = (3, "no more")
        async with serving(folder, engine) as (client, _):
            response = await client.post(RESPONSES, json={"input": "the sea", "stream": True})
            *_, error, failed = typed(response.text)
            assert (error["type"], error["code"]) == ("error", "engine_error")
            assert failed["type"] == "response.failed"
            assert failed["response"]["error"] == {"code": "server_error", "message": error["message"]}
            assert failed["response"]["output"][0]["status"] == "incomplete"
            assert "[DONE]" not in response.text
            assert (await client.get(f"{RESPONSES}/{failed['response']['id']}")).json() == failed["response"]

    asyncio.run(main())


def test_a_client_that_hangs_up_stops_the_work(folder):
    async def main():
        engine = FakeEngine(saying("the whale " * 50), delay=0.01)
        async with serving(folder, engine) as (_, app), listening(app) as url:
            client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
            stream = await client.responses.create(model="fake", input="the sea", stream=True)
            async for event in stream:
                if event.type == "response.output_text.delta":
                    break
            await stream.close()
            await until(lambda: engine.aborted)
            await until(lambda: app.state.pequod.limits.open_choices == 0)

    asyncio.run(main())


# Input


def test_a_text_is_the_users_message(folder):
    assert prompts(folder, {"input": "the sea"}) == "user: the sea\nassistant: "
    assert prompts(folder, {"input": "the sea", "instructions": "Sing."}).startswith("system: Sing.\n")


def test_items_become_messages_in_their_order(folder):
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
    assert prompts(folder, {"input": items}) == (
        "system: Sing\n!\nuser: the sea\nassistant: the ship\ntool: wind\n"
        "tool: rain\nassistant: no\nassistant: <think>hm</think>[weather Nantucket][weather Hull]"
    )


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
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"}]}, "input"),
        ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]}, "input.0.encrypted_content"),
        ({"input": [{"id": "msg_none"}]}, "input.0.id"),
        ({"input": [{"role": "user", "content": "a"}] * 4097}, "input"),
        ({"input": "sea " * 2000}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 10_000}, "max_output_tokens"),
        ({"include": ["message.input_image.image_url"]}, "include.0"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [{"type": "file_search", "vector_store_ids": ["x"]}]}, "tools.0.type"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "clock"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "file_search"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"not": {}}}}}, "text.format.schema"),
        ({"text": {"verbosity": "high"}}, "text.verbosity"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
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
def test_what_is_wrong_is_named(folder, body, param):
    assert refusal(folder, **body)[0] == param


@pytest.mark.parametrize(
    "body",
    [
        {"truncation": "disabled"}, {"reasoning": {"summary": "auto", "effort": "medium"}}, {"include": []},
        {"include": ["reasoning.encrypted_content"]},
        {"text": {"format": {"type": "text"}, "verbosity": "medium"}}, {"tool_choice": "auto"}, {"background": False},
        {"metadata": None}, {"service_tier": "auto"}, {"store": None}, {"max_tool_calls": 1}, {"conversation": None},
        {"input": [{"type": "message", "role": "user", "content": [], "phase": None}]},
    ],
    ids=str,
)  # fmt: skip
def test_what_asks_for_nothing_passes(folder, body):
    respond(folder, **body)


# The store


def test_a_conversation_goes_on_whole_but_without_its_instructions(folder):
    told = prompts(
        folder,
        {"input": "the sea", "instructions": "Sing."},
        {"input": "the ship"},
        {"input": "the end", "instructions": "Talk."},
    )
    assert told == (
        "system: Talk.\nuser: the sea\nassistant: the whale\nuser: the ship\n"
        "assistant: the whale\nuser: the end\nassistant: "
    )


def test_calls_go_on_with_their_outputs(folder):
    async def main():
        engine = FakeEngine(saying(f"<think>hm</think>{CALL}", "It is windy."))
        async with serving(folder, engine) as (_, app), listening(app) as url:
            sdk = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
            first = await sdk.responses.create(model="fake", input="the weather?", tools=[WEATHER])
            call = next(item for item in first.output if item.type == "function_call")
            output = {"type": "function_call_output", "call_id": call.call_id, "output": "wind"}
            last = await sdk.responses.create(
                model="fake", input=[output], previous_response_id=first.id, tools=[WEATHER]
            )
            assert last.output_text == "It is windy."
            told = LIBRARY.decode(engine.requests[-1].prompt_ids)
            assert "<think>hm</think>[weather Nantucket]" in told
            assert "tool: wind" in told
            # The same by sending everything again, and by references.
            again = [{"role": "user", "content": "the weather?"}, *first.output, output]
            await sdk.responses.create(model="fake", input=again, tools=[WEATHER], store=False)
            assert LIBRARY.decode(engine.requests[-1].prompt_ids) == told
            named = [{"type": "item_reference", "id": item.id} for item in first.output]
            await sdk.responses.create(model="fake", input=[again[0], *named, output], tools=[WEATHER])
            assert LIBRARY.decode(engine.requests[-1].prompt_ids) == told

    asyncio.run(main())


def test_a_conversation_has_a_bound_also_where_it_is_only_referred_to(folder):
    async def use(client):
        made = (await client.post(RESPONSES, json={"input": "the sea " * 100})).json()
        item = {"type": "item_reference", "id": routes.item_id("msg", made["id"], 0)}
        for body in (
            {"input": [item] * 4096, "previous_response_id": made["id"]},  # too many items
            {"input": [item] * 4000},  # too much text
            {"input": [item, {"type": "item_reference", "id": item["id"][:-1] + "f"}]},
        ):
            answer = await client.post(RESPONSES, json=body)
            assert answer.status_code == 400
            assert answer.json()["error"]["param"].startswith("input")

    run(folder, use, FakeEngine(saying("the whale")))


def test_a_call_that_was_cut_off_is_not_gone_on_with(folder):
    async def use(client):
        first = (await client.post(RESPONSES, json={"input": "a", "tools": [WEATHER], "max_output_tokens": 40})).json()
        assert first["output"][-1]["type"] == "function_call"
        assert first["output"][-1]["status"] == "incomplete"
        body = {"input": "b", "previous_response_id": first["id"]}
        assert (await client.post(RESPONSES, json=body)).status_code == 200

    run(folder, use, FakeEngine(saying(CALL)))


def test_a_stored_response_is_got_and_deleted(folder):
    async def use(client):
        made = await client.post(RESPONSES, json={"input": "the sea"})
        path = f"{RESPONSES}/{made.json()['id']}"
        assert (await client.get(path)).json() == made.json()
        assert (await client.get(path, params={"stream": "true"})).json()["error"]["param"] == "stream"
        assert (await client.get(path, params={"colour": "red"})).json()["error"]["param"] == "colour"
        gone = {"id": made.json()["id"], "object": "response", "deleted": True}
        assert (await client.delete(path)).json() == gone
        for answer in (await client.get(path), await client.delete(path), await client.post(f"{path}/cancel")):
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "response_not_found")
        body = {"input": "a", "previous_response_id": made.json()["id"]}
        error = (await client.post(RESPONSES, json=body)).json()["error"]
        assert (error["param"], error["code"]) == ("previous_response_id", "previous_response_not_found")

    run(folder, use, FakeEngine(saying("the whale")))


def test_what_is_not_to_be_stored_is_not(folder):
    async def use(client):
        made = (await client.post(RESPONSES, json={"input": "the sea", "store": False})).json()
        assert made["store"] is False
        assert (await client.get(f"{RESPONSES}/{made['id']}")).status_code == 404
        body = {"input": "a", "previous_response_id": made["id"]}
        assert (await client.post(RESPONSES, json=body)).json()["error"]["param"] == "previous_response_id"

    run(folder, use, FakeEngine(saying("the whale")))


def test_a_response_belongs_to_the_key_that_made_it(folder):
    async def use(client):
        mine, other = ({"Authorization": f"Bearer {key}"} for key in ("a", "b"))
        made = (await client.post(RESPONSES, json={"input": "the sea", "background": True}, headers=mine)).json()
        path = f"{RESPONSES}/{made['id']}"
        for method, where in [
            ("GET", path),
            ("DELETE", path),
            ("POST", f"{path}/cancel"),
            ("GET", f"{path}/input_items"),
        ]:
            assert (await client.request(method, where, headers=other)).status_code == 404
            assert (await client.request(method, where)).status_code == 401
        item = {"type": "item_reference", "id": routes.item_id("msg", made["id"], 0)}
        for body in ({"input": "a", "previous_response_id": made["id"]}, {"input": [item]}):
            assert (await client.post(RESPONSES, json=body, headers=other)).status_code == 400
        assert (await client.get(path, headers=mine)).status_code == 200
        assert (await client.post(RESPONSES, json={"input": [item]}, headers=mine)).status_code == 200

    run(folder, use, FakeEngine(saying("the whale")), api_key=["a", "b"])


def test_input_items_come_in_pages(folder):
    async def use(client):
        first = (await client.post(RESPONSES, json={"input": "the sea"})).json()
        body = {"input": [{"role": "user", "content": "b"}], "previous_response_id": first["id"]}
        path = f"{RESPONSES}/{(await client.post(RESPONSES, json=body)).json()['id']}/input_items"

        async def page(**params):
            return (await client.get(path, params=params)).json()

        def texts(page):
            return [item["content"][0]["text"] for item in page["data"]]

        assert texts(await page(order="asc")) == ["the sea", "the whale", "b"]
        newest = await page(limit=2)
        assert (texts(newest), newest["has_more"]) == (["b", "the whale"], True)
        assert (newest["first_id"], newest["last_id"]) == tuple(item["id"] for item in newest["data"])
        rest = await page(after=newest["last_id"])
        assert (texts(rest), rest["has_more"]) == (["the sea"], False)
        wrong = {"limit": 0, "order": "x", "after": "y"}
        assert [(await page(**{name: value}))["error"]["param"] for name, value in wrong.items()] == [*wrong]

    run(folder, use, FakeEngine(saying("the whale")))


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", ""), ("GET", "/ID"), ("POST", "/ID/cancel"), ("DELETE", "/ID"), ("GET", "/ID/input_items")],
)
def test_unknown_parameters_of_the_query_are_refused(folder, method, path):
    async def use(client):
        id = (await client.post(RESPONSES, json={"input": "the sea"})).json()["id"]
        url = RESPONSES + path.replace("ID", id)
        body = None if path else {"input": "the sea"}
        response = await client.request(method, url, params={"colour": "blue"}, json=body)
        assert response.status_code == 400
        error = response.json()["error"]
        assert (error["param"], error["code"]) == ("colour", "unknown_parameter")
        assert (await client.get(f"{RESPONSES}/{id}")).status_code == 200, "nothing has been done"
        keyless = await client.request(method, url, params={"colour": "blue"}, json=body, headers={"authorization": ""})
        assert keyless.status_code == 401

    async def with_key(client):
        client.headers["authorization"] = "Bearer key-1"
        await use(client)

    run(folder, with_key, FakeEngine(saying("the whale")), api_key=["key-1"])


def test_the_store_is_bounded(folder):
    async def use(client):
        made = [(await client.post(RESPONSES, json={"input": "the sea"})).json()["id"] for _ in range(4)]
        found = [(await client.get(f"{RESPONSES}/{id}")).status_code for id in made]
        assert found == [404, 404, 200, 200]

    run(folder, use, FakeEngine(saying("the whale")), max_stored_responses=2)


def test_a_file_keeps_responses_over_a_restart(folder, tmp_path):
    path = tmp_path / "responses.db"
    engine = FakeEngine(saying("the whale"))

    async def make(client):
        return (await client.post(RESPONSES, json={"input": "the sea"})).json()

    async def go_on(client):
        assert (await client.get(f"{RESPONSES}/{made['id']}")).json() == made
        body = {"input": "more", "previous_response_id": made["id"]}
        assert (await client.post(RESPONSES, json=body)).status_code == 200

    made = run(folder, make, response_store=path)
    run(folder, go_on, engine, response_store=path)
    assert "the sea" in LIBRARY.decode(engine.requests[-1].prompt_ids)


# Background


async def poll(client, id, *statuses):
    """The response, once it has one of these statuses."""
    while True:
        answer = (await client.get(f"{RESPONSES}/{id}")).json()
        if answer["status"] in statuses:
            return answer
        await asyncio.sleep(0.005)


def test_background_work_goes_on_without_the_connection(folder):
    async def main():
        engine = FakeEngine(saying("the whale"))
        async with serving(folder, engine) as (client, app):
            limits: Limits = app.state.pequod.limits
            engine.hold()
            made = (await client.post(RESPONSES, json={"input": "the sea", "background": True})).json()
            ResponseAnswer.model_validate(made)
            assert (made["status"], made["background"], made["output"], made["usage"]) == ("queued", True, [], None)
            assert limits.open_choices == 1, "it counts as long as it runs"
            assert (await client.get(f"{RESPONSES}/{made['id']}")).json() == made
            body = {"input": "a", "previous_response_id": made["id"]}
            assert (await client.post(RESPONSES, json=body)).json()["error"]["param"] == "previous_response_id"
            engine.let_go()
            done = await poll(client, made["id"], "completed")
            assert done["output"][0]["content"][0]["text"] == "the whale"
            assert done["usage"]["output_tokens"] == 3
            await until(lambda: (limits.open_choices, limits.open_tokens) == (0, 0))
            assert engine.aborted == []

    asyncio.run(main())


def test_cancel_stops_the_work(folder):
    async def main():
        engine = FakeEngine(saying("the whale " * 100), delay=0.005)
        async with serving(folder, engine) as (client, app):
            made = (await client.post(RESPONSES, json={"input": "the sea", "background": True})).json()
            await poll(client, made["id"], "in_progress")
            path = f"{RESPONSES}/{made['id']}"
            cancelled = (await client.post(f"{path}/cancel")).json()
            assert engine.aborted == [engine.requests[0].id]
            assert engine.open == []
            ResponseAnswer.model_validate(cancelled)
            assert cancelled["status"] == "cancelled"
            assert cancelled["output"][0]["status"] == "incomplete"
            assert (await client.post(f"{path}/cancel")).json() == cancelled, "once more changes nothing"
            assert (await client.get(path)).json() == cancelled
            await until(lambda: app.state.pequod.limits.open_choices == 0)
            assert 'pequod:request_aborts_total{cause="cancelled"} 1.0' in (await client.get("/metrics")).text

    asyncio.run(main())


def test_what_is_complete_or_not_in_the_background_is_not_cancelled(folder):
    async def use(client):
        made = (await client.post(RESPONSES, json={"input": "the sea", "background": True})).json()
        done = await poll(client, made["id"], "completed")
        assert (await client.post(f"{RESPONSES}/{made['id']}/cancel")).json() == done
        made = (await client.post(RESPONSES, json={"input": "the sea"})).json()
        refused = await client.post(f"{RESPONSES}/{made['id']}/cancel")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "response_id")

    run(folder, use, FakeEngine(saying("the whale")))


def test_delete_stops_the_work_too(folder):
    async def main():
        engine = FakeEngine(saying("the whale " * 100), delay=0.005)
        async with serving(folder, engine) as (client, _):
            made = (await client.post(RESPONSES, json={"input": "the sea", "background": True})).json()
            await until(lambda: engine.requests)
            assert (await client.delete(f"{RESPONSES}/{made['id']}")).status_code == 200
            assert engine.aborted == [engine.requests[0].id]
            assert (await client.get(f"{RESPONSES}/{made['id']}")).status_code == 404

    asyncio.run(main())


def test_background_work_that_fails_tells_why(folder):
    async def main():
        engine = FakeEngine(saying("the whale and the sea"))
        engine.error_at = (2, "no more")
        async with serving(folder, engine) as (client, _):
            made = (await client.post(RESPONSES, json={"input": "the sea", "background": True})).json()
            failed = await poll(client, made["id"], "failed")
            ResponseAnswer.model_validate(failed)
            assert failed["error"]["code"] == "server_error"

    asyncio.run(main())


def test_background_work_is_refused_as_other_work_is(folder):
    engine = FakeEngine(saying("the whale"))

    async def main():
        async with serving(folder, engine, max_num_queued_reqs=1) as (client, app):
            engine.hold()
            body = {"input": "the sea", "background": True}
            answers = [await client.post(RESPONSES, json=body) for _ in range(6)]
            assert [answer.status_code for answer in answers] == [200] * 5 + [503]
            app.state.pequod.begin_drain()
            assert (await client.post(RESPONSES, json=body)).json()["error"]["code"] == "draining"
            engine.let_go()
            assert await app.state.pequod.drained(10)
            for answer in answers[:5]:
                assert (await client.get(f"{RESPONSES}/{answer.json()['id']}")).json()["status"] == "completed"

    asyncio.run(main())


def test_a_server_that_ends_leaves_no_response_in_progress(folder, tmp_path):
    path = tmp_path / "responses.db"
    engine = FakeEngine(saying("the whale"))

    async def begin(client):
        engine.hold()
        made = (await client.post(RESPONSES, json={"input": "the sea", "background": True})).json()
        await until(lambda: engine.requests)
        return made["id"]

    id = run(folder, begin, engine, response_store=path)
    assert engine.aborted
    failed = run(folder, lambda client: client.get(f"{RESPONSES}/{id}"), response_store=path).json()
    assert (failed["status"], failed["error"]["code"]) == ("failed", "server_error")


# The SDK


class Captain(pydantic.BaseModel):
    name: str
    legs: int


def test_the_helpers_of_the_sdk_work(folder):
    async def main():
        engine = FakeEngine(saying("the whale"))
        async with serving(folder, engine) as (_, app), listening(app) as url:
            client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
            async with client.responses.stream(model="fake", input="the sea") as stream:
                seen = [event async for event in stream]
                final = await stream.get_final_response()
            assert final.output_text == "the whale"
            assert "".join(e.delta for e in seen if e.type == "response.output_text.delta") == "the whale"
            assert (await client.responses.retrieve(final.id)).output_text == "the whale"
            items = [item async for item in client.responses.input_items.list(final.id)]
            assert items[0].content[0].text == "the sea"
            await client.responses.delete(final.id)
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(final.id)

            engine.say = saying('{"name": "Ahab", "legs": 1}')
            parsed = await client.responses.parse(model="fake", input="Who?", text_format=Captain)
            assert parsed.output_parsed == Captain(name="Ahab", legs=1)
            again = await client.responses.parse(
                model="fake", input=[*parsed.output, {"role": "user", "content": "Who?"}]
            )
            assert again.status == "completed"

            engine.say = saying("the whale " * 100)
            engine.delay = 0.005
            made = await client.responses.create(model="fake", input="the sea", background=True)
            assert (await client.responses.cancel(made.id)).status == "cancelled"
            with pytest.raises(openai.BadRequestError) as bad:
                await client.responses.create(model="fake", input="the sea", truncation="auto")
            assert bad.value.param == "truncation"

    asyncio.run(main())
