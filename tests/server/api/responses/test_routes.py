"""Responses over a fake engine: whole, as typed events, and through the SDK."""

import json
import random
from dataclasses import replace

import msgspec
import openai
import pydantic
import pytest

from server.api.responses.schema import ResponseEvent
from tests.fakes import FakeEngine, listening, model_folder, serving, until
from tests.server.api.responses.wire import CALL, CLOCK, LOGPROBS, SECOND, WEATHER, respond
from tests.server.generation.test_http_response import CASES, spelling, text_of
from tests.server.wire import CHAT, END, RESPONSES, Odds, ask, ids, run, saying, typed

MESSAGE_EVENTS = [
    "response.output_item.added", "response.content_part.added", "response.output_text.delta",
    "response.output_text.done", "response.content_part.done", "response.output_item.done",
]  # fmt: skip
REASONING_EVENTS = [name.replace("output_text", "reasoning_text") for name in MESSAGE_EVENTS]
CALL_EVENTS = [
    "response.output_item.added", "response.function_call_arguments.delta",
    "response.function_call_arguments.done", "response.output_item.done",
]  # fmt: skip


async def streamed(folder, says, **body):
    return typed(
        (await ask(folder, RESPONSES, {"input": "the sea", **body, "stream": True}, FakeEngine(saying(says)))).text
    )


def kinds(events):
    """Types of events, runs of deltas as one."""
    return [e["type"] for i, e in enumerate(events) if i == 0 or e["type"] != events[i - 1]["type"]]


# The response


async def test_a_response_has_what_openai_has(folder):
    answer = await respond(folder, metadata={"a": "b"}, instructions="Be brief.", temperature=0.5, user="Ann")
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


async def test_an_answer_that_reaches_its_limit_is_incomplete(folder):
    answer = await respond(folder, "the whale and the sea", max_output_tokens=2)
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert answer["output"][0]["status"] == "incomplete"
    assert answer["completed_at"] is None
    assert (await streamed(folder, "the whale and the sea", max_output_tokens=2))[-1]["type"] == "response.incomplete"


async def test_an_answer_without_a_word_is_an_empty_message(folder):
    [message] = (await respond(folder, ""))["output"]
    assert message["content"][0]["text"] == ""
    assert kinds(await streamed(folder, ""))[2:-1] == [name for name in MESSAGE_EVENTS if not name.endswith("delta")]


async def test_reasoning_text_and_calls_are_items_in_their_order(folder):
    says = f"<think>hm, hm</think>Let me look.\n{CALL}\n{SECOND}"
    answer = await respond(folder, says, tools=[WEATHER, CLOCK])
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


async def test_logprobs_are_those_of_the_texts_tokens(folder):
    engine = Odds(saying(f"<think>hm</think>the whale{CALL}"))
    body = {"input": "the sea", "tools": [WEATHER], **LOGPROBS}
    answer = (await ask(folder, RESPONSES, body, engine)).json()
    entries = next(item for item in answer["output"] if item["type"] == "message")["content"][0]["logprobs"]
    assert [entry["token"] for entry in entries] == ["the", " whale"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
    assert [entry["token"] for entry in (await respond(folder, **LOGPROBS))["output"][0]["content"][0]["logprobs"]] == [
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
async def test_logprobs_are_none_of_marks(folder, says, text, more):
    body = {"input": "the sea", "tools": [WEATHER], **LOGPROBS, **more}
    answer = (await ask(folder, RESPONSES, body, Odds(saying(says)))).json()
    [part] = [item["content"][0] for item in answer["output"] if item["type"] == "message"]
    assert part["text"].strip() == text
    assert b"".join(bytes(entry["bytes"]) for entry in part["logprobs"]).decode().strip() == text


async def test_token_ids_are_returned_on_request(folder):
    answer = await respond(folder, return_token_ids=True)
    assert answer["token_ids"] == [*ids("the whale"), END]
    assert len(answer["prompt_token_ids"]) == answer["usage"]["input_tokens"]


async def test_a_format_is_a_grammar_and_is_returned_unchanged(tmp_path):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "name": "a", "schema": schema, "strict": True}
    engine = FakeEngine(saying("{}"))
    answer = (
        await ask(model_folder(tmp_path / "plain"), RESPONSES, {"input": "a", "text": {"format": form}}, engine)
    ).json()
    assert answer["text"]["format"] == form
    kind, text = engine.requests[0].params.grammar
    assert (kind, json.loads(text)) == ("json_schema", schema)


# Events


async def test_the_page_says_how_a_stream_ends(folder):
    paths = (await run(folder, lambda client: client.get("/openapi.json"))).json()["paths"]
    told = {
        path: json.dumps(paths[path]["post"]["responses"]["200"]["content"]["text/event-stream"]["schema"])
        for path in (RESPONSES, CHAT)
    }
    assert ["[DONE]" in schema for schema in told.values()] == [False, True]
    assert "ResponseEvent" in told[RESPONSES]
    assert "[DONE]" not in (await ask(folder, RESPONSES, {"input": "a", "stream": True}, FakeEngine(saying("a")))).text


async def test_events_come_in_the_documented_order(folder):
    says = f"<think>hm, hm</think>Let me look.\n{CALL}\n{SECOND}"
    events = await streamed(folder, says, tools=[WEATHER, CLOCK])
    assert kinds(events) == [
        "response.created", "response.in_progress", *REASONING_EVENTS, *MESSAGE_EVENTS, *CALL_EVENTS, *CALL_EVENTS,
        "response.completed",
    ]  # fmt: skip
    assert [e["output_index"] for e in events if e["type"] == "response.output_item.added"] == [0, 1, 2, 3]
    assert [e["response"]["status"] for e in events if "response" in e] == ["in_progress", "in_progress", "completed"]
    adapter = pydantic.TypeAdapter(openai.types.responses.ResponseStreamEvent)
    for event in events:
        adapter.validate_python(event)
        msgspec.convert(event, ResponseEvent)


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
async def test_deltas_joined_are_the_items_and_equal_the_whole(folder, more):
    rng = random.Random(str(more))
    engine = Odds()
    async with serving(folder, engine) as (client, app):
        for formats in CASES * 4:
            app.state.pequod.model = replace(app.state.pequod.model, formats=formats)
            spoken = [*spelling(text_of(rng, formats)), END]
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


async def test_what_goes_wrong_in_a_stream_is_its_last_event(folder):
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


async def test_a_client_that_hangs_up_stops_the_work(folder):
    engine = FakeEngine(saying("the whale " * 50), delay=0.01)
    async with serving(folder, engine) as (_, app), listening(app) as url:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
            stream = await client.responses.create(model="fake", input="the sea", stream=True)
            async for event in stream:
                if event.type == "response.output_text.delta":
                    break
            await stream.close()
            await until(lambda: engine.aborted)
            await until(lambda: app.state.pequod.limits.open_choices == 0)


# The SDK


class Captain(pydantic.BaseModel):
    name: str
    legs: int


async def test_the_helpers_of_the_sdk_work(folder):
    engine = FakeEngine(saying("the whale"))
    async with serving(folder, engine) as (_, app), listening(app) as url:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
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
                await client.responses.create(model="fake", input="the sea", conversation="conv_1")
            assert bad.value.param == "conversation"
