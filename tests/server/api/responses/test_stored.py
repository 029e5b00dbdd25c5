"""Responses that are stored: gone on with, got, listed, deleted, and seen by their key alone."""

import asyncio
import threading

import msgspec
import openai
import pytest
from openai.types.responses.response_item_list import ResponseItemList
from pydantic import TypeAdapter

from server.api.responses import routes
from server.api.responses.store_file import Record
from tests.fakes import FakeEngine, listening, serving, until
from tests.server.api.responses.stores import Faulty, written
from tests.server.api.responses.wire import CALL, WEATHER, prompts
from tests.server.wire import LIBRARY, RESPONSES, run, saying


async def test_a_conversation_goes_on_whole_but_without_its_instructions(folder):
    told = await prompts(
        folder,
        {"input": "the sea", "instructions": "Sing."},
        {"input": "the ship"},
        {"input": "the end", "instructions": "Talk."},
    )
    assert told == (
        "system: Talk.\nuser: the sea\nassistant: the whale\nuser: the ship\n"
        "assistant: the whale\nuser: the end\nassistant: "
    )


@pytest.mark.parametrize("more", [{}, {"input": []}, {"input": None}], ids=str)
async def test_a_conversation_goes_on_without_new_input(folder, more):
    assert await prompts(folder, {"input": "the sea"}, more, {"input": "the end"}) == (
        "user: the sea\nassistant: the whale\nassistant: the whale\nuser: the end\nassistant: "
    )


async def test_items_of_a_continued_response_have_ids_of_their_own(folder):
    async with serving(folder, FakeEngine(saying("the whale"))) as (client, _):
        last, seen = (await client.post(RESPONSES, json={"input": "the sea"})).json(), []
        for more in ({}, {"input": []}, {"input": "the end"}):
            body = {"previous_response_id": last["id"], **more}
            last = (await client.post(RESPONSES, json=body)).json()
            page = (await client.get(f"{RESPONSES}/{last['id']}/input_items", params={"order": "asc"})).json()["data"]
            assert page[: len(seen)] == seen
            seen = page
    assert [item["role"] for item in seen] == ["user", "assistant", "assistant", "assistant", "user"]
    assert len({item["id"] for item in seen}) == 5


async def test_outputs_sent_again_are_in_the_conversation_once(folder):
    engine = FakeEngine(saying(f"<think>hm</think>{CALL}", "It is windy."))
    async with serving(folder, engine) as (_, app), listening(app) as url:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as sdk:
            first = await sdk.responses.create(model="fake", input="the weather?", tools=[WEATHER])
            call = next(item for item in first.output if item.type == "function_call")
            output = {"type": "function_call_output", "call_id": call.call_id, "output": "wind"}
            told = []
            for input in ([output], [*first.output, output]):
                last = await sdk.responses.create(
                    model="fake", input=input, previous_response_id=first.id, tools=[WEATHER]
                )
                told.append(LIBRARY.decode(engine.requests[-1].prompt_ids))
                kinds = []
                async for item in sdk.responses.input_items.list(last.id, limit=1):
                    kinds.append(item.type)
                    assert len(kinds) <= 4
                assert kinds == ["function_call_output", "function_call", "reasoning", "message"]
            assert told[0] == told[1]


async def test_items_of_one_id_are_all_kept_under_different_ids(folder):
    said = [{"role": role, "id": "msg_1", "content": text} for role, text in (("user", "a"), ("assistant", "the"))]
    engine = FakeEngine(saying("the whale"))
    async with serving(folder, engine) as (client, _):
        first = (await client.post(RESPONSES, json={"input": [*said, *said]})).json()
        body = {"input": [said[0], {**said[1], "content": "sea"}], "previous_response_id": first["id"]}
        last = (await client.post(RESPONSES, json=body)).json()
        path, after, texts = f"{RESPONSES}/{last['id']}/input_items", {}, []
        for _ in range(7):
            page = (await client.get(path, params={"limit": 1, "order": "asc", **after})).json()
            texts += [part["text"] for item in page["data"] for part in item["content"]]
            after = {"after": page["last_id"]}
        assert not page["has_more"]
    assert texts == ["a", "the", "a", "the", "the whale", "a", "sea"]
    assert LIBRARY.decode(engine.requests[-1].prompt_ids).count("user: a") == 3


def test_pages_end_where_a_stored_conversation_repeats_an_id():
    items = msgspec.json.encode([{"id": id, "type": "message", "content": []} for id in "abac"])
    after, pages = None, []
    while not pages or pages[-1]["has_more"]:
        assert len(pages) < 4
        pages.append(msgspec.json.decode(routes.page_of(items, 1, "asc", after)))
        after = pages[-1]["last_id"]
    assert [page["last_id"] for page in pages] == ["a", "c"]


async def test_calls_go_on_with_their_outputs(folder):
    engine = FakeEngine(saying(f"<think>hm</think>{CALL}", "It is windy."))
    async with serving(folder, engine) as (_, app), listening(app) as url:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as sdk:
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


async def test_additional_tools_stay_with_the_conversation(folder):
    added = {"type": "additional_tools", "role": "developer", "tools": [WEATHER]}
    engine = FakeEngine(saying(CALL))
    async with serving(folder, engine) as (client, _):

        async def made(**body):
            return (await client.post(RESPONSES, json=body)).json()

        asked = {"type": "message", "role": "user", "content": "the weather?"}
        first = await made(input=[added, asked])
        listed = LIBRARY.decode(engine.requests[-1].prompt_ids)
        again = await made(input="and now?", previous_response_id=first["id"])
        for response in (first, again):
            assert [item["type"] for item in response["output"]] == ["function_call"]
        in_field = await made(input=[asked], tools=[WEATHER])
        assert LIBRARY.decode(engine.requests[-1].prompt_ids) == listed, "the prompt has them where it has others"
        kept = (await client.get(f"{RESPONSES}/{first['id']}/input_items", params={"order": "asc"})).json()["data"]
        assert [item["type"] for item in kept] == ["additional_tools", "message"]
        assert kept[0]["tools"][0]["name"] == WEATHER["name"]
        assert in_field["output"][0]["name"] == WEATHER["name"]
        twice = await made(input=[added, asked], tools=[WEATHER])
        assert twice["error"]["param"] == "tools"
        named = {"type": "function", "name": WEATHER["name"]}
        await made(input=[added, asked], tool_choice=named)
        assert engine.requests[-1].params.grammar is not None
        missing = await made(input=[asked], tool_choice=named)
        assert missing["error"]["param"] == "tool_choice"


async def test_a_conversation_has_a_bound_on_its_functions(folder):
    def added(start):
        tools = [{"type": "function", "name": f"f{number}", "parameters": {}} for number in range(start, start + 200)]
        return {"type": "additional_tools", "role": "developer", "tools": tools}

    async with serving(folder, FakeEngine(saying("the whale"))) as (client, _):
        ship = {"type": "message", "role": "user", "content": "the ship"}
        first = (await client.post(RESPONSES, json={"input": [added(0), ship]})).json()
        body = {"input": [added(200), ship], "previous_response_id": first["id"]}
        refused = await client.post(RESPONSES, json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input")
        assert (await client.post(RESPONSES, json={**body, "input": [added(56), ship]})).status_code == 200


async def test_a_conversation_has_a_bound_also_where_it_is_only_referred_to(folder):
    async with serving(folder, FakeEngine(saying("the whale"))) as (client, _):
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


async def test_each_reference_to_a_long_item_counts_towards_the_length_of_the_conversation(folder):
    async with serving(folder, FakeEngine(saying("the whale")), max_body_bytes="64KiB") as (client, app):
        limits, held = app.state.pequod.limits, []
        add = limits.add_stored
        limits.add_stored = lambda caller, num_bytes: held.append(num_bytes) or add(caller, num_bytes)
        notes = {"type": "output_text", "text": "a", "annotations": ["y" * 20_000]}
        long = {"type": "message", "role": "assistant", "content": [notes]}
        first = (await client.post(RESPONSES, json={"input": [long, {"role": "user", "content": "b"}]})).json()
        item = {"type": "item_reference", "id": routes.item_id("msg", first["id"], 0)}

        async def ask(path, *items, **body):
            answer = await client.post(path, json={"input": [*items, {"role": "user", "content": "b"}], **body})
            return answer.json().get("id"), answer.status_code, answer.json().get("error")

        for path in (RESPONSES, f"{RESPONSES}/input_tokens"):
            _, status, error = await ask(path, *[item] * 4)
            assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", "input")
        held.clear()
        second, status, _ = await ask(RESPONSES, *[item] * 2)
        assert status == 200
        record, *counted = (each for each in held if each)
        assert 20_000 < min(counted) < max(counted) + 1 < record < 22_000
        assert len(counted) == 3, "the item once, and for each reference again; the response is read once"
        held.clear()
        _, status, error = await ask(RESPONSES, *[item] * 2, previous_response_id=second)
        assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", "input")
        third, status, _ = await ask(RESPONSES, {**long, "id": "own"}, previous_response_id=second)
        assert status == 200
        assert 40_000 < max(held) < 44_000
        last, status, _ = await ask(RESPONSES, previous_response_id=third)
        assert status == 200
        limits.max_body_bytes = 50_000
        _, status, error = await ask(RESPONSES, previous_response_id=last)
        assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", "previous_response_id")
        assert limits.bytes.open == 0, "what a conversation holds is released with the request"


def test_of_another_response_the_items_that_are_referred_to_are_decoded(monkeypatch):
    stored, items = long_record()
    sizes = []

    def unpack(data):
        sizes.append(len(bytes(data)))
        return msgspec.json.decode(data)

    monkeypatch.setattr(routes, "decode", unpack)
    [found] = routes.all_items(stored, {items[3]["id"], "msg_of_another"})
    assert found.item == items[3]
    assert sizes == [found.num_bytes, len(stored.answer)]


async def test_the_grammars_of_all_tools_of_a_conversation_have_a_bound(folder):
    def added(name):
        format = {"type": "grammar", "syntax": "regex", "definition": "a" * 40_000}
        tool = {"type": "custom", "name": name, "format": format}
        return {"type": "additional_tools", "role": "developer", "tools": [tool]}

    async with serving(folder, FakeEngine(saying("the whale"))) as (client, _):
        ship, free = {"type": "message", "role": "user", "content": "the ship"}, {"tool_choice": "none"}
        first = (await client.post(RESPONSES, json={"input": [added("f"), ship], **free})).json()
        body = {"previous_response_id": first["id"], **free}
        refused = await client.post(RESPONSES, json={**body, "input": [added("g"), ship]})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input")
        assert "grammars" in refused.json()["error"]["message"]
        assert (await client.post(RESPONSES, json={**body, "input": [added("f"), ship]})).status_code == 200


async def test_a_call_that_was_cut_off_is_not_gone_on_with(folder):
    async with serving(folder, FakeEngine(saying(CALL))) as (client, _):
        first = (await client.post(RESPONSES, json={"input": "a", "tools": [WEATHER], "max_output_tokens": 40})).json()
        assert first["output"][-1]["type"] == "function_call"
        assert first["output"][-1]["status"] == "incomplete"
        body = {"input": "b", "previous_response_id": first["id"]}
        assert (await client.post(RESPONSES, json=body)).status_code == 200


async def test_a_stored_response_is_got_and_deleted(folder):
    async with serving(folder, FakeEngine(saying("the whale"))) as (client, _):
        made = await client.post(RESPONSES, json={"input": "the sea"})
        path = f"{RESPONSES}/{made.json()['id']}"
        assert (await client.get(path)).json() == made.json()
        for field, value in (("stream", "true"), ("starting_after", "1")):
            refused = (await client.get(path, params={field: value})).json()["error"]
            assert (refused["param"], refused["message"].partition(";")[0]) == (field, f"Unsupported field: '{field}'")
        assert (await client.get(path, params={"colour": "red"})).json()["error"]["param"] == "colour"
        gone = {"id": made.json()["id"], "object": "response", "deleted": True}
        assert (await client.delete(path)).json() == gone
        for answer in (await client.get(path), await client.delete(path), await client.post(f"{path}/cancel")):
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "response_not_found")
        body = {"input": "a", "previous_response_id": made.json()["id"]}
        error = (await client.post(RESPONSES, json=body)).json()["error"]
        assert (error["param"], error["code"]) == ("previous_response_id", "previous_response_not_found")


async def test_what_is_not_to_be_stored_is_not(folder):
    async with serving(folder, FakeEngine(saying("the whale"))) as (client, _):
        made = (await client.post(RESPONSES, json={"input": "the sea", "store": False})).json()
        assert made["store"] is False
        assert (await client.get(f"{RESPONSES}/{made['id']}")).status_code == 404
        body = {"input": "a", "previous_response_id": made["id"]}
        assert (await client.post(RESPONSES, json=body)).json()["error"]["param"] == "previous_response_id"


async def test_a_response_belongs_to_the_key_that_made_it(folder):
    async with serving(folder, FakeEngine(saying("the whale")), api_key=["a", "b"]) as (client, _):
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


async def test_input_items_come_in_pages(folder):
    async with serving(folder, FakeEngine(saying("the whale"))) as (client, _):
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
        assert (await page(limit="x"))["error"]["message"] == "Invalid 'limit': must be an integer."


async def test_input_items_have_what_the_sdk_requires(folder):
    given = [
        {"type": "message", "role": "user", "content": "the weather?"},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "wind"},
        {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "a"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "b"},
        {"type": "additional_tools", "role": "developer", "tools": [WEATHER]},
        {"type": "function_call", "call_id": "c3", "name": "weather", "arguments": "{", "status": "incomplete"},
    ]
    async with serving(folder, FakeEngine(saying("the whale"))) as (client, _):
        made = (await client.post(RESPONSES, json={"input": given})).json()
        page = await client.get(f"{RESPONSES}/{made['id']}/input_items", params={"order": "asc"})
    items = TypeAdapter(ResponseItemList).validate_json(page.content)
    statuses = [item.get("status") for item in items.to_dict()["data"]]
    assert statuses == ["completed"] * 5 + [None, "incomplete"]


async def test_what_a_response_includes_is_accepted_where_it_is_read(folder):
    asked = ["message.output_text.logprobs"]
    async with serving(folder, FakeEngine(saying("the whale"))) as (client, app), listening(app) as url:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as sdk:
            made = await sdk.responses.create(model="fake", input="the sea")
            assert await sdk.responses.retrieve(made.id, include=asked) == made
            assert len([item async for item in sdk.responses.input_items.list(made.id, include=asked)]) == 1
        for path in (f"{RESPONSES}/{made.id}", f"{RESPONSES}/{made.id}/input_items"):
            for name in ("include", "include[]"):
                assert (await client.get(path, params={name: asked})).status_code == 200
                wrong = await client.get(path, params={name: "everything"})
                assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, f"{name}.0")


LONG = {"max_stored_bytes": "1GiB", "max_body_bytes": "64MiB"}


def long_record(count=20):
    """A stored response whose conversation is 30 MB of JSON and few tokens."""
    entry = {"token": "the whale" * 30, "logprob": -0.123456, "bytes": [], "top_logprobs": []}
    part = {"type": "output_text", "text": "a", "annotations": [], "logprobs": [entry] * (100_000 // count)}
    message = {"type": "message", "status": "completed", "role": "assistant", "content": [part]}
    items = [{"id": f"msg_{'0' * 32}{i:04x}", **message} for i in range(count)]
    answer = {"status": "completed", "background": True, "output": []}
    data = msgspec.json.encode(items)
    assert len(data) > 30 << 20
    return Record(f"resp_{'0' * 32}", "", False, msgspec.json.encode(answer), data), items


async def test_the_event_loop_turns_while_a_long_conversation_is_decoded(folder, monkeypatch):
    stored, items = long_record()
    seen = {}
    sizes = []
    turns, loop_thread = 0, threading.get_ident()

    async def count():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    def watch(name):
        work = getattr(routes, name)

        def watched(*args):
            before = turns
            result = work(*args)
            seen.setdefault(name, []).append((threading.get_ident() == loop_thread, turns - before))
            return result

        monkeypatch.setattr(routes, name, watched)

    def unpack(data):
        sizes.append(len(bytes(data)))
        return msgspec.json.decode(data)

    monkeypatch.setattr(routes, "decode", unpack)
    for name in ("page_of", "all_items", "is_background"):
        watch(name)
    async with serving(folder, FakeEngine(saying("the whale")), **LONG) as (client, app):
        app.state.responses.store.put(stored)
        counter = asyncio.create_task(count())
        path = f"{RESPONSES}/{stored.id}"
        page = await client.get(f"{path}/input_items", params={"order": "asc"})
        body = {"input": "b", "previous_response_id": stored.id}
        assert (await client.post(RESPONSES, json=body)).status_code == 200
        reference = {"type": "item_reference", "id": items[-1]["id"]}
        assert (await client.post(RESPONSES, json={"input": [reference]})).status_code == 200
        assert (await client.post(f"{path}/cancel")).status_code == 200
        counter.cancel()
    assert msgspec.json.decode(page.content)["data"] == items
    assert {name: len(calls) for name, calls in seen.items()} == {"page_of": 1, "all_items": 2, "is_background": 1}
    for calls in seen.values():
        assert not any(on_loop for on_loop, _ in calls)
    assert all(turns > 0 for name in ("page_of", "all_items") for _, turns in seen[name])
    assert max(sizes) < len(stored.items) / 15, "msgspec holds the interpreter's lock as long as a call takes"


def test_a_page_decodes_its_own_items_alone(monkeypatch):
    stored, items = long_record(count=100)
    decoded = []

    def unpack(data):
        decoded.append(msgspec.json.decode(data))
        return decoded[-1]

    monkeypatch.setattr(routes, "decode", unpack)
    page = msgspec.json.decode(routes.page_of(stored.items, 2, "desc", items[50]["id"]))
    assert [item["id"] for item in page["data"]] == [items[49]["id"], items[48]["id"]]
    assert (page["first_id"], page["last_id"], page["has_more"]) == (items[49]["id"], items[48]["id"], True)
    assert len(decoded) == 2
    last = msgspec.json.decode(routes.page_of(stored.items, 5, "asc", items[-1]["id"]))
    assert last == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", ""), ("GET", "/ID"), ("POST", "/ID/cancel"), ("DELETE", "/ID"), ("GET", "/ID/input_items")],
)
async def test_unknown_parameters_of_the_query_are_refused(folder, method, path):
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

    async with serving(folder, FakeEngine(saying("the whale")), api_key=["key-1"]) as (client, _):
        client.headers["authorization"] = "Bearer key-1"
        await use(client)


async def test_the_store_is_bounded(folder):
    async with serving(folder, FakeEngine(saying("the whale")), max_stored_responses=2) as (client, _):
        made = [(await client.post(RESPONSES, json={"input": "the sea"})).json()["id"] for _ in range(4)]
        found = [(await client.get(f"{RESPONSES}/{id}")).status_code for id in made]
        assert found == [404, 404, 200, 200]


async def test_one_key_cannot_drive_out_the_responses_of_another(folder):
    async with serving(folder, FakeEngine(saying("the whale")), api_key=["a", "b"], max_stored_responses=3) as (
        client,
        _,
    ):
        mine, other = ({"Authorization": f"Bearer {key}"} for key in ("a", "b"))

        async def make(headers):
            return (await client.post(RESPONSES, json={"input": "the sea"}, headers=headers)).json()["id"]

        kept = await make(mine)
        made = [await make(other) for _ in range(6)]
        statuses = [(await client.get(f"{RESPONSES}/{id}", headers=other)).status_code for id in made]
        assert statuses == [404] * 4 + [200] * 2
        assert (await client.get(f"{RESPONSES}/{kept}", headers=mine)).status_code == 200


async def test_a_deletion_that_a_full_disk_refuses_is_a_503_until_it_is_done(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("server.api.responses.store.FIRST_DELAY_S", 0.01)
    path = tmp_path / "responses.db"
    async with serving(folder, FakeEngine(saying("the whale")), response_store=path) as (client, _):
        store = client._transport.app.state.responses.store
        disk = Faulty(store)
        made = (await client.post(RESPONSES, json={"input": "the sea"})).json()["id"]
        await written(store)
        disk.is_full = True
        for _ in range(2):
            answer = await client.delete(f"{RESPONSES}/{made}")
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "store_failed")
            assert "retry-after" in answer.headers
            assert (await client.get(f"{RESPONSES}/{made}")).status_code == 404
        disk.is_full = False
        await until(lambda: store._num_pending() == (0, 0))
        assert (await client.delete(f"{RESPONSES}/{made}")).status_code == 404
    assert (await run(folder, lambda client: client.get(f"{RESPONSES}/{made}"), response_store=path)).status_code == 404


async def test_a_background_response_leaves_no_earlier_version(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("server.api.responses.store.FIRST_DELAY_S", 1000)
    path = tmp_path / "responses.db"
    engine = FakeEngine(saying("the whale"))
    async with serving(folder, engine, response_store=path, max_stored_responses=2) as (client, _):
        store = client._transport.app.state.responses.store
        engine.hold()
        made = (await client.post(RESPONSES, json={"input": "the sea", "background": True})).json()["id"]
        await written(store)
        Faulty(store).is_full = True
        engine.let_go()
        await until(lambda: made in store._changes and not store._changes[made].record.is_open)
        for _ in range(2):  # they drive it out of memory
            assert (await client.post(RESPONSES, json={"input": "a"})).status_code == 200
        assert (await client.get(f"{RESPONSES}/{made}")).status_code == 404
        assert store._num_pending() == (2, 1)


async def test_a_file_keeps_responses_over_a_restart(folder, tmp_path):
    path = tmp_path / "responses.db"
    engine = FakeEngine(saying("the whale"))
    async with serving(folder, response_store=path) as (client, _):
        made = (await client.post(RESPONSES, json={"input": "the sea"})).json()
    async with serving(folder, engine, response_store=path) as (client, _):
        assert (await client.get(f"{RESPONSES}/{made['id']}")).json() == made
        body = {"input": "more", "previous_response_id": made["id"]}
        assert (await client.post(RESPONSES, json=body)).status_code == 200
    assert "the sea" in LIBRARY.decode(engine.requests[-1].prompt_ids)
