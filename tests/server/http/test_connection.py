"""What becomes of a connection whose client sends late, sends on, or hangs up; on bare sockets, on both event loops."""

from __future__ import annotations

import asyncio
import contextlib
import json

import httpx
import pytest
import uvicorn
from fastapi import Request

from server.http.auth import address_of
from server.http.connection import MAX_PIPELINED, Connection
from tests.fakes import model_folder, serving, until
from tests.live import WAIT_S
from tests.server.http.hostile import MB, head
from tests.server.wire import COMPLETIONS

JSON = "Content-Type: application/json"
READY = head(first="GET /ready HTTP/1.1")
NOWHERE = "POST /nowhere HTTP/1.1"
SHORT = json.dumps({"prompt": "a", "max_tokens": 3}).encode()


@pytest.fixture
def hasty(monkeypatch):
    """A server that waits a short time for what nobody reads."""
    monkeypatch.setattr("server.http.connection.REST_S", 1.0)


@pytest.fixture
def patient(monkeypatch):
    """A server that waits for longer than any test."""
    monkeypatch.setattr("server.http.connection.REST_S", 1000.0)


async def read_answer(reader):
    """Status and body of the next answer."""
    told = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), WAIT_S)
    length = int(told.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
    return int(told.split()[1]), await asyncio.wait_for(reader.readexactly(length), WAIT_S)


async def send_until_cut(writer, piece):
    """Send on and on; ends when the server has closed the connection."""
    async with asyncio.timeout(WAIT_S):
        with contextlib.suppress(ConnectionError):
            while not writer.is_closing():
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.01)


# Heads


def test_a_head_that_trickles_is_cut_off(sockets, monkeypatch):
    monkeypatch.setattr("server.http.connection.HEAD_S", 0.1)

    async def use(connect, app, engine):
        for sent in (b"", b"GET /ready HT", READY[:-2]):
            reader, writer = await connect()
            writer.write(sent)
            answer = await asyncio.wait_for(reader.read(), WAIT_S)
            assert b" 408 " in answer.split(b"\r\n")[0]
            assert b"head_timeout" in answer
            writer.close()

    sockets(use)


def test_a_next_head_has_a_time_of_its_own(sockets, monkeypatch):
    monkeypatch.setattr("server.http.connection.HEAD_S", 1.0)

    async def use(connect, app, engine):
        reader, writer = await connect()
        for _ in range(3):
            writer.write(READY)
            assert (await read_answer(reader))[0] == 200
            await asyncio.sleep(0.4)
        writer.close()

    sockets(use)


def test_blank_lines_are_no_next_request(sockets):
    async def use(connect, app, engine):
        reader, writer = await connect()
        writer.write(READY)
        assert (await read_answer(reader))[0] == 200
        await send_until_cut(writer, b"\r\n")

    sockets(use, {"timeout_keep_alive": 1})


@pytest.mark.parametrize(("trusted", "address"), [(None, "192.0.2.7"), ("10.0.0.1", "127.0.0.1")])
async def test_a_proxy_at_a_unix_socket_says_who_its_clients_are(tmp_path, monkeypatch, trusted, address):
    if trusted is None:
        monkeypatch.delenv("FORWARDED_ALLOW_IPS", raising=False)
    else:
        monkeypatch.setenv("FORWARDED_ALLOW_IPS", trusted)
    path = str(tmp_path / "s")
    async with serving(model_folder(tmp_path / "m"), uds=path) as (_, app):

        @app.get("/address")
        async def tell(request: Request) -> str:
            return address_of(request.scope)

        config = uvicorn.Config(app, uds=path, http=Connection, lifespan="off", log_config=None)
        server = uvicorn.Server(config)
        task = asyncio.create_task(server.serve())
        await until(lambda: server.started)
        transport = httpx.AsyncHTTPTransport(uds=path)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            # The proxy appends the address; the client has sent the first one to have a share of another.
            response = await client.get("/address", headers={"X-Forwarded-For": "203.0.113.9, 192.0.2.7"})
        server.should_exit = True
        await task
    assert response.json() == address


def test_a_request_whose_head_came_in_two_pieces_is_answered_to_its_end(sockets, connections):
    async def use(connect, app, engine):
        whole = head(JSON, f"Content-Length: {len(SHORT)}") + SHORT
        reader, writer = await connect()
        writer.write(whole + whole[:30])  # the first answer ends within the second head
        assert (await read_answer(reader))[0] == 200
        idle = connections[-1].timeout_keep_alive_task
        engine.hold()
        writer.write(whole[30:])
        await until(lambda: len(engine.requests) == 2)
        if not idle.cancelled():  # now an idle connection would be closed
            connections[-1].timeout_keep_alive_handler()
        engine.let_go()
        assert (await read_answer(reader))[0] == 200
        writer.close()

    sockets(use, {"timeout_keep_alive": 60})


def test_a_half_closed_connection_gets_its_response_and_a_closed_one_is_dropped(sockets):
    async def use(connect, app, engine):
        whole = head(JSON, f"Content-Length: {len(SHORT)}") + SHORT
        for cut in range(0, len(whole), 17):
            reader, writer = await connect()
            writer.write(whole[:cut])
            writer.close()
        reader, writer = await connect()
        writer.write(whole * 5)  # pipelined: answered in their order
        for _ in range(5):
            assert (await read_answer(reader))[0] == 200
        writer.close()

    sockets(use)


# Pipelines


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("num_waiting", [1, 15])
def test_a_disconnect_ends_the_running_request_and_those_that_wait_for_it(
    sockets, connections, caplog, stream, num_waiting
):
    body = json.dumps({"prompt": "a" * 50, "max_tokens": 400, "ignore_eos": True, "stream": stream}).encode()

    async def use(connect, app, engine):
        aborts, whole = app.state.pequod.metrics.aborts, head(JSON, f"Content-Length: {len(body)}") + body
        engine.delay = 0.01
        reader, writer = await connect()
        writer.write(whole)
        await until(lambda: engine.requests)
        writer.write(whole * num_waiting)
        await until(lambda: len(connections[0].pipeline) == num_waiting)
        if stream:
            await asyncio.wait_for(reader.readuntil(b"data: "), WAIT_S)
        writer.close()
        await until(lambda: engine.aborted)
        await until(lambda: app.state.pequod.limits.open_choices == 0)
        assert len(engine.requests) == 1
        assert {cause for cause, counter in aborts.items() if counter._value.get()} == {"disconnect"}

    sockets(use)
    assert not [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]


def test_a_connection_with_a_full_pipeline_is_read_on_when_there_are_fewer(sockets, connections):
    whole = head(JSON, f"Content-Length: {len(SHORT)}") + SHORT

    async def use(connect, app, engine):
        engine.hold()
        reader, writer = await connect()
        for count in range(1, MAX_PIPELINED + 2):
            writer.write(whole)
            await until(lambda count=count: len(connections[0].pipeline) == count - 1)
        assert connections[0].flow.read_paused
        writer.write(whole * 20)
        engine.let_go()
        for _ in range(MAX_PIPELINED + 21):
            assert (await read_answer(reader))[0] == 200
        assert not connections[0].flow.read_paused
        writer.close()

    sockets(use)


def test_only_the_bytes_of_an_incomplete_head_count_as_its_size(sockets):
    body = SHORT + b" " * 70_000

    async def use(connect, app, engine):
        whole = head(JSON, f"Content-Length: {len(body)}") + body
        reader, writer = await connect()
        for sent in (whole[:5], whole[5:] + whole[:20], whole[20:]):
            writer.write(sent)
            await asyncio.sleep(0.02)  # for it to arrive as one piece
        for _ in range(2):
            assert (await read_answer(reader))[0] == 200
        writer.close()

    sockets(use)


def test_headers_of_earlier_requests_do_not_count(sockets):
    async def use(connect, app, engine):
        reader, writer = await connect()
        for _ in range(8):  # 240 kB in all
            writer.write(head(f"X-Long: {'a' * 30_000}", first="GET /ready HTTP/1.1"))
            assert (await read_answer(reader))[0] == 200
        writer.close()

    sockets(use)


H2C = ("Connection: Upgrade, HTTP2-Settings, keep-alive", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAAP__")


@pytest.mark.parametrize("cut", [0, 1, 20, "in the head", "in the body"])
def test_a_client_that_would_like_http2_is_answered_over_http1(sockets, cut):
    async def use(connect, app, engine):
        body = b'{"prompt": "a", "max_tokens": 1}'
        sent = head(*H2C, JSON, f"Content-Length: {len(body)}")
        at = {"in the head": len(sent) - 3, "in the body": len(sent) + 7}.get(cut, cut)
        reader, writer = await connect()
        for _ in range(2):  # the connection stays of use
            writer.write((sent + body)[:at])
            await asyncio.sleep(0.02)
            writer.write((sent + body)[at:])
            status, answer = await read_answer(reader)
            assert (status, json.loads(answer)["object"]) == (200, "text_completion")
        writer.close()

    sockets(use)


# Bodies that are answered before they have come


def test_who_still_sends_gets_the_answer(sockets):
    async def use(connect, app, engine):
        url = "http://{}:{}".format(*(await connect())[1].get_extra_info("peername"))
        async with httpx.AsyncClient(base_url=url, timeout=WAIT_S) as client:
            for num_bytes in (8 * MB + 1, 20 * MB):
                answer = await client.post(COMPLETIONS, content=b" " * num_bytes)
                assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")

            async def pieces():
                for _ in range(300):
                    yield b" " * 65_536

            assert (await client.post(COMPLETIONS, content=pieces())).status_code == 413  # chunked
            upgrade = {"Connection": "Upgrade", "Upgrade": "h2c"}
            answer = await client.post(COMPLETIONS, content=b" " * 20 * MB, headers=upgrade)
            assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")

    sockets(use)


ENDLESS = {
    "a length of 10 GB": (head(JSON, f"Content-Length: {10**10}"), b"a" * 1000, 413),
    "a length that waits to be asked": (
        head(JSON, f"Content-Length: {10**10}", "Expect: 100-continue"),
        b"a" * 1000,
        413,
    ),
    "chunks": (head(JSON, "Transfer-Encoding: chunked", first=NOWHERE), b"5\r\naaaaa\r\n", 404),
    "a length that is in bounds": (head(JSON, "Content-Length: 1000000", first=NOWHERE), b"a", 404),
    "no HTTP": (b"call me ishmael\r\n\r\n", b"a", 400),
    "a header": (head().removesuffix(b"\r\n") + b"X-A: " + b"a" * MB, b"a", 431),
    "an upgrade": (
        head("Connection: Upgrade", "Upgrade: h2c", JSON, "Content-Length: 1000000", first=NOWHERE),
        b"a",
        404,
    ),
}


def test_what_does_not_end_is_answered_and_then_cut(sockets, hasty):
    async def use(connect, app, engine):
        async def one(name, begin, piece, status):
            reader, writer = await connect()
            writer.write(begin)
            assert ((await read_answer(reader))[0], name) == (status, name)
            await send_until_cut(writer, piece)

        await asyncio.gather(*(one(name, *row) for name, row in ENDLESS.items()))

    sockets(use)


def test_the_rest_has_a_bound_in_bytes(sockets, patient, monkeypatch):
    monkeypatch.setattr("server.http.connection.REST_BYTES", MB)

    async def use(connect, app, engine):
        for length in (10**10, 7 * MB):
            reader, writer = await connect()
            writer.write(head(JSON, f"Content-Length: {length}", first=NOWHERE))
            assert (await read_answer(reader))[0] == (413 if length > 8 * MB else 404)
            await send_until_cut(writer, b"a" * 65_536)

    sockets(use)


def test_a_client_that_disconnects_after_the_response_is_dropped(sockets, patient):
    async def use(connect, app, engine):
        reader, writer = await connect()
        writer.write(head(JSON, f"Content-Length: {10**10}") + b"a" * 1000)
        assert (await read_answer(reader))[0] == 413
        assert await asyncio.wait_for(reader.read(), WAIT_S) == b"", "nothing more comes"
        writer.close()
        await writer.wait_closed()

    sockets(use)


def test_behind_an_unread_body_the_next_request_is_served(sockets, monkeypatch):
    monkeypatch.setattr("server.http.connection.REST_BYTES", 300_000)  # of each body anew

    async def use(connect, app, engine):
        reader, writer = await connect()
        for _ in range(3):
            writer.write(head(JSON, "Content-Length: 200000", first=NOWHERE))
            assert (await read_answer(reader))[0] == 404
            writer.write(b"a" * 200_000)
        writer.write(READY)
        assert (await read_answer(reader))[0] == 200
        writer.close()

    sockets(use)


def test_what_follows_a_refusal_is_no_request(sockets, hasty):
    async def use(connect, app, engine):
        reader, writer = await connect()
        writer.write(head(JSON, f"Content-Length: {10**10}"))
        assert (await read_answer(reader))[0] == 413
        writer.write((head(JSON, f"Content-Length: {len(SHORT)}") + SHORT) * 3)
        assert await reader.read() == b""
        await send_until_cut(writer, b"a")
        assert engine.requests == []

    sockets(use)


def test_garbage_after_a_request_is_not_in_its_response(sockets):
    body = json.dumps({"prompt": "a" * 50, "max_tokens": 40, "stream": True}).encode()

    async def use(connect, app, engine):
        engine.delay = 0.01
        reader, writer = await connect()
        writer.write(head(JSON, f"Content-Length: {len(body)}") + body)
        answer = await asyncio.wait_for(reader.readuntil(b"data: "), WAIT_S)
        writer.write(b"call me ishmael\r\n\r\n")
        answer += await asyncio.wait_for(reader.read(), WAIT_S)
        assert answer.count(b"HTTP/1.1") == 1
        await until(lambda: engine.aborted)

    sockets(use)


def test_a_bad_chunk_ends_the_request_that_it_belongs_to(sockets, patient):
    async def use(connect, app, engine):
        reader, writer = await connect()
        writer.write(head(JSON, "Transfer-Encoding: chunked") + b"5\r\naaaaa\r\n")
        await until(lambda: app.state.pequod.limits.bytes.open)
        writer.write(b"zz\r\n")
        assert (await read_answer(reader))[0] == 400
        await until(lambda: app.state.pequod.limits.bytes.open == 0)
        writer.close()

    sockets(use)


def test_a_bad_chunk_after_a_response_gets_no_second_response(sockets, patient):
    async def use(connect, app, engine):
        reader, writer = await connect()
        writer.write(head(JSON, "Transfer-Encoding: chunked", first=NOWHERE) + b"5\r\naaaaa\r\n")
        assert (await read_answer(reader))[0] == 404
        writer.write(b"zz\r\n")
        assert await asyncio.wait_for(reader.read(), WAIT_S) == b""
        writer.close()

    sockets(use)


# HTTP/1.0


def test_an_old_client_gets_a_body_without_chunks(sockets):
    async def use(connect, app, engine):
        async def ask(body):
            reader, writer = await connect()
            body = json.dumps(body).encode()
            lines = ["POST /v1/completions HTTP/1.0", JSON, f"Content-Length: {len(body)}", "", ""]
            writer.write("\r\n".join(lines).encode() + body)
            answer = await asyncio.wait_for(reader.read(), WAIT_S)
            writer.close()
            head, _, rest = answer.partition(b"\r\n\r\n")
            assert b" 200 " in head.split(b"\r\n")[0]
            assert b"transfer-encoding" not in head.lower()
            return head.lower(), rest

        head, rest = await ask({"prompt": "a", "max_tokens": 3, "stream": True})
        assert b"content-length" not in head
        assert rest.startswith(b"data: {")
        assert rest.endswith(b"data: [DONE]\n\n")
        head, rest = await ask({"prompt": "a", "max_tokens": 3})
        assert b"content-length: %d" % len(rest) in head
        assert json.loads(rest)["object"] == "text_completion"

    sockets(use)
