"""Responses that are worked on in the background: without a connection, cancelled, failed."""

import asyncio

import msgspec

from server.api.responses.schema import ResponseObject
from server.http.admission import Limits
from tests.fakes import FakeEngine, serving, until
from tests.server.wire import RESPONSES, run, saying


async def poll(client, id, *statuses):
    """The response, once it has one of these statuses."""
    while True:
        answer = (await client.get(f"{RESPONSES}/{id}")).json()
        if answer["status"] in statuses:
            return answer
        await asyncio.sleep(0.005)


async def test_background_work_goes_on_without_the_connection(folder):
    engine = FakeEngine(saying("the whale"))
    async with serving(folder, engine) as (client, app):
        limits: Limits = app.state.pequod.limits
        engine.hold()
        made = (await client.post(RESPONSES, json={"input": "the sea", "background": True})).json()
        msgspec.convert(made, ResponseObject)
        assert (made["status"], made["background"], made["output"], made["usage"]) == ("queued", True, [], None)
        assert limits.open_choices == 1, "it counts as long as it runs"
        assert (await client.get(f"{RESPONSES}/{made['id']}")).json() == made
        body = {"input": "a", "previous_response_id": made["id"]}
        assert (await client.post(RESPONSES, json=body)).json()["error"]["param"] == "previous_response_id"
        engine.let_go()
        done = await poll(client, made["id"], "completed")
        assert done["output"][0]["content"][0]["text"] == "the whale"
        assert done["usage"]["output_tokens"] == 3
        await until(lambda: (limits.open_choices, limits.tokens.open) == (0, 0))
        assert engine.aborted == []


async def test_cancel_stops_the_work(folder):
    engine = FakeEngine(saying("the whale " * 100), delay=0.005)
    async with serving(folder, engine) as (client, app):
        made = (await client.post(RESPONSES, json={"input": "the sea", "background": True})).json()
        await poll(client, made["id"], "in_progress")
        path = f"{RESPONSES}/{made['id']}"
        cancelled = (await client.post(f"{path}/cancel")).json()
        assert engine.aborted == [engine.requests[0].id]
        assert engine.open == []
        msgspec.convert(cancelled, ResponseObject)
        assert cancelled["status"] == "cancelled"
        assert cancelled["output"][0]["status"] == "incomplete"
        assert (await client.post(f"{path}/cancel")).json() == cancelled, "once more changes nothing"
        assert (await client.get(path)).json() == cancelled
        await until(lambda: app.state.pequod.limits.open_choices == 0)
        assert 'pequod:request_aborts_total{cause="cancelled"} 1.0' in (await client.get("/metrics")).text


async def test_what_is_complete_or_not_in_the_background_is_not_cancelled(folder):
    async with serving(folder, FakeEngine(saying("the whale"))) as (client, _):
        made = (await client.post(RESPONSES, json={"input": "the sea", "background": True})).json()
        done = await poll(client, made["id"], "completed")
        assert (await client.post(f"{RESPONSES}/{made['id']}/cancel")).json() == done
        made = (await client.post(RESPONSES, json={"input": "the sea"})).json()
        refused = await client.post(f"{RESPONSES}/{made['id']}/cancel")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "response_id")


async def test_delete_stops_the_work_too(folder):
    engine = FakeEngine(saying("the whale " * 100), delay=0.005)
    async with serving(folder, engine) as (client, _):
        made = (await client.post(RESPONSES, json={"input": "the sea", "background": True})).json()
        await until(lambda: engine.requests)
        assert (await client.delete(f"{RESPONSES}/{made['id']}")).status_code == 200
        assert engine.aborted == [engine.requests[0].id]
        assert (await client.get(f"{RESPONSES}/{made['id']}")).status_code == 404


async def test_other_responses_do_not_drive_out_one_in_progress(folder):
    engine = FakeEngine(saying("the whale " * 100, "a", "a", "a"), delay=0.005)
    async with serving(folder, engine, max_stored_responses=2) as (client, _):
        made = (await client.post(RESPONSES, json={"input": "the sea", "background": True})).json()
        await poll(client, made["id"], "in_progress")
        others = [(await client.post(RESPONSES, json={"input": "a"})).json()["id"] for _ in range(3)]
        path = f"{RESPONSES}/{made['id']}"
        assert (await client.get(path)).json()["status"] == "in_progress"
        assert (await client.get(f"{RESPONSES}/{others[0]}")).status_code == 404
        assert (await client.post(f"{path}/cancel")).json()["status"] == "cancelled"
        assert engine.open == []


async def test_background_work_that_fails_has_a_reason(folder):
    engine = FakeEngine(saying("the whale and the sea"))
    engine.error_at = (2, "no more")
    async with serving(folder, engine) as (client, _):
        made = (await client.post(RESPONSES, json={"input": "the sea", "background": True})).json()
        failed = await poll(client, made["id"], "failed")
        msgspec.convert(failed, ResponseObject)
        assert failed["error"]["code"] == "server_error"


async def test_background_work_is_refused_as_other_work_is(folder):
    engine = FakeEngine(saying("the whale"))
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


async def test_a_server_that_ends_leaves_no_response_in_progress(folder, tmp_path):
    path = tmp_path / "responses.db"
    engine = FakeEngine(saying("the whale"))
    async with serving(folder, engine, response_store=path) as (client, _):
        engine.hold()
        made = (await client.post(RESPONSES, json={"input": "the sea", "background": True})).json()
        await until(lambda: engine.requests)
        id = made["id"]
    assert engine.aborted
    failed = (await run(folder, lambda client: client.get(f"{RESPONSES}/{id}"), response_store=path)).json()
    assert (failed["status"], failed["error"]["code"]) == ("failed", "server_error")
