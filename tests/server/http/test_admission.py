"""How much is let in at once, what a refusal says, and that everything is given back."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from types import SimpleNamespace

import httpx
import pytest
from fastapi import Depends, Request
from fastapi.responses import Response, StreamingResponse

from server.http import admission as limits_module
from server.http.admission import MAX_RETRY_S, Caller, Limits
from server.http.auth import Keys, UserDep, user
from server.http.errors import RETRY_S, ApiError
from server.http.middleware import PROGRESS_BYTES, PROGRESS_S, RequestMiddleware
from server.settings import Settings
from server.state import AppDep
from tests.fakes import FakeEngine, listening, model_folder, serving, until
from tests.live import WAIT_S
from tests.simulation.virtual import VirtualLoop


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make(seqs: int = 2, queued: int = 2, **settings) -> tuple[Limits, Clock]:
    clock = Clock()
    return Limits(Settings(max_num_seqs=seqs, max_num_queued_reqs=queued, **settings), clock), clock


def refused(limits: Limits, choices: int = 1, tokens: int = 0) -> ApiError:
    with pytest.raises(ApiError) as caught:
        limits.admit(Caller(), choices, tokens)
    return caught.value


def test_what_runs_and_what_may_queue_is_admitted_and_no_more():
    limits, _ = make(seqs=2, queued=2)
    tickets = [limits.admit(Caller(), 1) for _ in range(4)]
    assert limits.is_full
    error = refused(limits)
    assert (error.status, error.code) == (503, "queue_full")
    assert error.retry_after >= 1
    tickets[0].release()
    assert not limits.is_full
    limits.admit(Caller(), 1)
    assert limits.rejections["queue"] == 1


def test_choices_count_one_by_one_and_more_than_ever_fit_is_the_clients_error():
    limits, _ = make(seqs=2, queued=2)
    limits.admit(Caller(), 3)
    assert refused(limits, 2).status == 503
    error = refused(limits, 5)
    assert (error.status, error.param) == (400, "n")


def test_a_ticket_is_released_once():
    limits, _ = make()
    caller = Caller()
    with limits.admit(caller, 2, 10) as ticket:
        ticket.add_prompt(5)
        assert (limits.open_choices, limits.tokens.open) == (2, 15)
    ticket.release()
    caller.release()
    assert (limits.open_choices, limits.tokens.open) == (0, 0)


def test_a_request_that_ends_gives_back_what_it_held():
    limits, _ = make()
    caller = Caller()
    limits.admit(caller, 1, 7)
    limits.admit(caller, 1, 8)
    caller.release()
    assert (limits.open_choices, limits.tokens.open) == (0, 0)


def test_what_is_handed_over_outlives_the_request():
    limits, _ = make()
    caller = Caller()
    limits.admit(caller, 1, 7)
    [ticket] = caller.hand_over()
    caller.release()
    assert (limits.open_choices, limits.tokens.open) == (1, 7)
    ticket.release()
    assert (limits.open_choices, limits.tokens.open) == (0, 0)


def test_prompt_tokens_are_bounded_but_one_prompt_alone_always_gets_in(monkeypatch):
    monkeypatch.setattr(limits_module, "MAX_OPEN_TOKENS", 100)
    limits, _ = make()
    alone = limits.admit(Caller(), 1, 500)
    assert refused(limits, tokens=1).code == "prompt_tokens"
    alone.release()
    limits.admit(Caller(flow="a"), 1, 60)
    with limits.admit(Caller(flow="b"), 1) as ticket:
        with pytest.raises(ApiError):
            ticket.add_prompt(60)
        ticket.add_prompt(40)
    assert limits.tokens.open == 60
    assert limits.rejections["prompt_tokens"] == 2


def test_retry_after_is_backlog_over_throughput():
    limits, clock = make(seqs=1, queued=10)
    assert limits.retry_after() == RETRY_S
    tickets = [limits.admit(Caller(flow=str(i)), 1) for i in range(11)]
    for i in range(2):  # one answer every two seconds
        clock.now += 2
        tickets.pop().release()
        tickets.append(limits.admit(Caller(flow=f"new {i}"), 1))
    assert limits.retry_after() == 20  # 10 wait, 0.5 end per second
    clock.now += 1000
    assert limits.retry_after() == MAX_RETRY_S


def test_an_idle_hour_does_not_count_as_slow():
    limits, clock = make(seqs=1, queued=4)
    limits.admit(Caller(), 1).release()
    clock.now += 3600
    tickets = [limits.admit(Caller(), 1) for _ in range(5)]
    assert limits.retry_after() == RETRY_S
    clock.now += 1
    tickets[0].release()
    assert limits.retry_after() == 3


def test_no_request_is_admitted_while_draining():
    limits, _ = make()
    limits.draining = True
    assert refused(limits).code == "draining"


def test_the_prefix_cache_is_salted_as_soon_as_there_are_two_keys():
    def sends(*headers: tuple[bytes, bytes]) -> dict:
        return {"headers": headers, "client": ("192.0.2.1", 5)}

    alone, one, two = (Keys(Settings(api_key=keys)) for keys in ([], ["a"], ["a", "b"]))
    assert alone.salt_for(alone.identify(sends())) == ""
    assert alone.salt_for(alone.identify(sends()), "mine") == "mine"
    assert one.salt_for(one.identify(sends((b"x-api-key", b"a"))), "mine") == "mine"
    first, second = (two.identify(sends((b"x-api-key", key))) for key in (b"a", b"b"))
    assert two.salt_for(first) != two.salt_for(second)
    assert two.salt_for(first, "s") != two.salt_for(second, "s")
    assert two.salt_for(first, "s") != two.salt_for(first, "t"), "a caller separates its own users"
    assert two.salt_for(first) == two.salt_for(two.identify(sends((b"authorization", b"Bearer a"))))
    # Nobody can write another's salt into cache_salt.
    assert not two.salt_for(second, two.salt_for(first)).startswith(two.salt_for(first))


# Over HTTP


def add_probes(app) -> None:
    @app.post("/probe", dependencies=[Depends(user)])
    async def probe(request: Request):
        return {"bytes": len(await request.body())}

    @app.post("/never")
    async def never(app: AppDep, caller: UserDep):
        app.limits.admit(caller, 1)

        async def body():
            yield b"."
            await asyncio.Event().wait()

        return StreamingResponse(body())

    @app.post("/broken")
    async def broken(app: AppDep, caller: UserDep):
        app.limits.admit(caller, 1)
        raise ValueError("call me ishmael")


async def test_a_body_over_the_limit_is_refused_by_its_length_and_by_counting(tmp_path):
    async with serving(model_folder(tmp_path / "m"), max_body_bytes=2000) as (client, app):
        add_probes(app)
        assert (await client.post("/probe", content=b"x" * 2000)).json() == {"bytes": 2000}
        told = await client.post("/probe", content=b"x" * 2001)

        async def chunks():
            for _ in range(30):
                yield b"x" * 100

        counted = await client.post("/probe", content=chunks())
        for answer in (told, counted):
            assert answer.status_code == 413
            assert answer.json()["error"]["code"] == "body_too_large"
            assert answer.headers["connection"] == "close"
        assert app.state.pequod.limits.bytes.open == 0


async def test_bodies_of_all_requests_are_bounded_together(tmp_path):
    async with serving(model_folder(tmp_path / "m"), max_body_bytes=2000) as (client, app):
        add_probes(app)
        limits = app.state.pequod.limits
        limits.bytes.acquire("others", limits.bytes.total - 1000)
        answer = await client.post("/probe", content=b"x" * 1500)
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) >= 1
        assert limits.bytes.open == limits.bytes.total - 1000


async def test_a_body_that_trickles_is_cut_off(tmp_path, monkeypatch):
    monkeypatch.setattr("server.http.middleware.PROGRESS_S", 0.05)
    async with serving(model_folder(tmp_path / "m")) as (_, app):
        add_probes(app)
        async with listening(app) as url:
            host, port = url.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"POST /probe HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\nx")
            answer = await asyncio.wait_for(reader.read(), WAIT_S)
            writer.close()
            assert b" 408 " in answer.split(b"\r\n")[0]
            assert b"body_timeout" in answer
        assert app.state.pequod.limits.bytes.open == 0


@pytest.mark.parametrize(
    ("sizes", "status"),
    [([PROGRESS_BYTES] * 10, 200), ([PROGRESS_BYTES // 4] * 10, 408), ([PROGRESS_BYTES, *[1] * 9], 408)],
    ids=["fast", "slow", "fast at first"],
)
def test_a_body_that_keeps_coming_may_take_its_time(monkeypatch, sizes, status):
    """In virtual time, in which no piece is late."""
    loop = VirtualLoop()
    monkeypatch.setattr("server.http.middleware.time", SimpleNamespace(monotonic=loop.time))
    pieces: asyncio.Queue[bytes] = asyncio.Queue()
    bodies, sent = [], []

    async def app(scope, receive, send):
        bodies.append(await Request(scope, receive).body())
        await Response()(scope, receive, send)

    async def receive():
        piece = await pieces.get()
        return {"type": "http.request", "body": piece, "more_body": piece != b""}

    async def send(message):
        sent.append(message)

    async def client():
        for size in sizes:  # five times the stretch in all
            pieces.put_nowait(b"x" * size)
            await asyncio.sleep(PROGRESS_S * 0.49)
        pieces.put_nowait(b"")

    async def main():
        headers = [(b"host", b"localhost")]
        scope = {"type": "http", "method": "POST", "path": "/", "headers": headers, "client": ("127.0.0.1", 1)}
        middleware = RequestMiddleware(app, Settings(), make()[0], lambda *_: None)
        await asyncio.gather(client(), middleware(scope, receive, send))

    loop.run(main())
    assert sent[0]["status"] == status
    assert bodies == ([b"x" * sum(sizes)] if status == 200 else [])


async def test_idle_uploads_of_one_client_keep_no_other_client_out(tmp_path, monkeypatch):
    """As many as would hold all bytes that bodies may have, each without its last byte."""
    monkeypatch.setattr("server.http.middleware.PROGRESS_S", 1000.0)
    async with serving(model_folder(tmp_path / "m"), max_body_bytes=100_000) as (_, app):
        add_probes(app)
        limits = app.state.pequod.limits
        async with listening(app) as url, httpx.AsyncClient(base_url=url, timeout=WAIT_S) as client:
            host, port = url.removeprefix("http://").split(":")
            idle = []
            for _ in range(32):
                _, writer = await asyncio.open_connection(host, int(port))
                head = b"POST /probe HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n"
                writer.write(head + b"x" * 99_999)
                idle.append(writer)
            await until(lambda: limits.rejections["share"] >= 6)
            assert 24 * 100_000 < limits.bytes.open < 26 * 100_000
            monkeypatch.setattr("server.http.auth.address_of", lambda scope: "elsewhere")
            assert (await client.post("/probe", content=b"x" * 50_000)).json() == {"bytes": 50_000}
            for writer in idle:
                writer.close()
            await until(lambda: limits.bytes.open == 0)


async def test_tickets_come_back_after_a_bug_and_after_a_hang_up(tmp_path):
    async with serving(model_folder(tmp_path / "m")) as (client, app):
        add_probes(app)
        limits = app.state.pequod.limits
        answer = await client.post("/broken")
        assert answer.status_code == 500
        assert "ishmael" not in answer.text
        assert limits.open_choices == 0
        async with listening(app) as url, httpx.AsyncClient() as outside:
            async with outside.stream("POST", f"{url}/never") as stream:
                await anext(stream.aiter_raw())
                assert limits.open_choices == 1
            await until(lambda: limits.open_choices == 0)


async def test_a_full_queue_answers_503_before_the_first_header(tmp_path):
    engine = FakeEngine()
    async with serving(model_folder(tmp_path / "m"), engine, max_num_queued_reqs=1) as (client, app):
        add_probes(app)
        state = app.state.pequod
        assert state.limits.max_seqs == engine.info.max_seqs
        tickets = [state.limits.admit(Caller(), 1) for _ in range(state.limits.max_choices)]
        answer = await client.post("/never")
        assert answer.status_code == 503
        assert answer.headers["retry-after"].isdigit()
        assert json.loads(answer.content)["error"]["code"] == "queue_full"
        assert (await client.get("/ready")).json()["state"] == "full"
        for ticket in tickets:
            ticket.release()
        assert (await client.get("/ready")).status_code == 200


def test_a_caller_with_a_body_may_read_a_stored_response_and_small_bodies_keep_their_room():
    limits, _ = make()
    others = [Caller(flow=f"other {i}") for i in range(63)]
    for other in others:
        limits.count_bytes(other, 1000, 0)
    caller = Caller(flow="a")
    limits.count_bytes(caller, 100, 0)
    assert limits.bytes.share(caller.flow, 1) < limits.max_body_bytes
    limits.hold_bytes(caller, limits.max_body_bytes)
    with pytest.raises(ApiError) as refused:
        limits.hold_bytes(caller, limits.max_body_bytes)
    assert refused.value.status == 429
    for other in others:
        with suppress(ApiError):
            limits.hold_bytes(other, limits.max_body_bytes)
    assert limits.rejections["body_bytes"] > 0, "there is no room for more"
    limits.count_bytes(Caller(flow="new"), 1000, 0)


def test_stored_conversations_count_like_bodies():
    limits, _ = make()
    caller = Caller(flow="a")
    limits.hold_bytes(caller, limits.bytes.total + 1).release()  # a single one may be longer than a body
    for _ in range(100):
        with suppress(ApiError):
            limits.hold_bytes(caller, limits.max_body_bytes)
    assert 0 < limits.bytes.open <= limits.bytes.total
    assert limits.rejections["share"] + limits.rejections["body_bytes"] >= 68
    caller.release()
    assert (limits.bytes.open, limits.open_choices) == (0, 0)
    assert limits.retry_after() == RETRY_S, "they say nothing about how fast requests finish"
