"""Responses that nobody reads: of one connection, with a clock set by hand, and of clients on bare sockets."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest
from fastapi import Depends, Response

from server.generation import http_response
from server.http import unsent
from server.http.auth import public
from server.http.unsent import WRITE_TIMEOUT_S, Unsent
from tests.fakes import until
from tests.live import WAIT_S
from tests.server.http.hostile import MB, head

LARGE = head(first="GET /large HTTP/1.1")


class Clock:
    """An event loop of which only the timers are there; they run when the test lets time pass."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[asyncio.TimerHandle] = []

    def time(self) -> float:
        return self.now

    def get_debug(self) -> bool:
        return False

    def _timer_handle_cancelled(self, timer) -> None:
        pass

    def call_later(self, seconds, callback, *args) -> asyncio.TimerHandle:
        self.timers.append(asyncio.TimerHandle(self.now + seconds, callback, args, self))
        return self.timers[-1]

    def wait(self, seconds: float = WRITE_TIMEOUT_S) -> None:
        self.now += seconds
        due = [timer for timer in self.timers if timer.when() <= self.now and not timer.cancelled()]
        self.timers = [timer for timer in self.timers if timer.when() > self.now]
        for timer in due:
            timer._run()


class Transport:
    """Has as many unsent bytes as the test says, beside a socket whose other end reads when the test does."""

    def __init__(self, tls: bool = False) -> None:
        self.unsent = 0
        self.tls = tls
        self.socket, self.client = socket.socketpair()
        self.socket.setblocking(False)

    def get_extra_info(self, name: str):
        return {"socket": self.socket, "sslcontext": object() if self.tls else None}[name]

    def get_write_buffer_size(self) -> int:
        return 0 if self.tls else self.unsent

    def write(self, data: bytes) -> None:
        self.unsent += len(data)

    def close(self) -> None:
        self.socket.close()
        self.client.close()


@pytest.fixture
def make():
    """Make an Unsent: (clock, transport, cut), where cut has its name when it has been cut off."""
    made = []

    def one(clock: Clock, cut: list[str], name: str = "a", tls: bool = False) -> tuple[Unsent, Transport]:
        transport = Transport(tls)
        made.append((Unsent(transport, clock, lambda reason: cut.append(name)), transport))
        return made[-1]

    yield one
    for written, transport in made:
        written.stop()
        transport.close()


def test_a_client_that_reads_nothing_is_cut_off(make):
    clock, cut = Clock(), []
    written, _ = make(clock, cut)
    written.write(b"a" * 1000)
    clock.wait(WRITE_TIMEOUT_S - 1)
    written.write(b"a")
    assert cut == []
    clock.wait(1)
    assert cut == ["a"]
    assert all(timer.cancelled() for timer in clock.timers)


def test_a_client_that_reads_slowly_is_not_cut_off_until_it_stops(make):
    clock, cut = Clock(), []
    written, transport = make(clock, cut)
    written.write(b"a" * 1000)
    for _ in range(5):
        transport.unsent -= 10
        clock.wait()
    assert cut == []
    clock.wait()
    assert cut == ["a"]


def test_what_the_client_reads_of_the_systems_buffer_counts_as_read(make):
    clock, cut = Clock(), []
    written, transport = make(clock, cut)
    assert transport.socket.send(b"a" * 50_000) == 50_000
    written.write(b"a" * 1000)
    transport.client.recv(50_000)  # and the transport has not been asked for more
    clock.wait()
    assert cut == []
    clock.wait()
    assert cut == ["a"]


def test_a_connection_without_unsent_bytes_is_not_watched(make):
    clock, cut = Clock(), []
    written, transport = make(clock, cut)
    written.write(b"a" * 1000)
    transport.unsent = 0
    clock.wait()
    assert (cut, clock.timers) == ([], [])
    written.write(b"a")
    clock.wait()
    assert cut == ["a"]


def test_beyond_the_limit_those_that_have_waited_longest_are_cut_off(make, monkeypatch):
    monkeypatch.setattr(unsent, "MAX_UNSENT", 5 * MB)
    clock, cut = Clock(), []
    made = [make(clock, cut, name) for name in ("small", "first", "second", "third", "last")]
    for (written, _), num_bytes in zip(made, (1, 2 * MB, 2 * MB, MB, 3 * MB), strict=True):
        assert cut == []
        written.write(b"a" * num_bytes)
    assert cut == ["first", "second"]
    Unsent.bound()
    assert len(cut) == 2, "those that are cut off count no more"


def test_a_response_above_the_limit_alone_is_sent(make, monkeypatch):
    monkeypatch.setattr(unsent, "MAX_UNSENT", MB)
    cut = []
    written, _ = make(Clock(), cut)
    written.write(b"a" * 2 * MB)
    assert cut == []


def test_with_tls_all_bytes_since_the_last_empty_buffer_of_the_system_count(make):
    clock, cut = Clock(), []
    written, transport = make(clock, cut, tls=True)
    transport.socket.send(b"encrypted")
    for _ in range(2):
        written.write(b"a" * 1000)
    assert written.num_bytes() == 2000
    transport.client.recv(100)
    assert written.num_bytes() == 0
    clock.wait()
    assert cut == [], "there is no telling whether the client reads"


def test_with_tls_clients_that_have_read_when_they_send_a_request_are_never_cut_off(make, monkeypatch):
    """However much they have been sent: the system's buffer is never empty while a response is written."""
    monkeypatch.setattr(unsent, "MAX_UNSENT", 5 * MB)
    cut = []
    made = [make(Clock(), cut, name, tls=True) for name in "abc"]
    for _ in range(10):
        for written, transport in made:
            written.look()
            transport.socket.send(b"a head")
            written.write(b"a" * MB)
            transport.client.recv(100)
    assert cut == []


@pytest.fixture
def hasty(monkeypatch):
    monkeypatch.setattr(unsent, "WRITE_TIMEOUT_S", 0.1)


def with_large_response(app) -> None:
    @app.get("/large", dependencies=[Depends(public)])
    async def large() -> Response:
        return Response(b"a" * 16 * MB)


REQUESTS = {"one": LARGE, "several": LARGE * 3, "the last": head("Connection: close", first="GET /large HTTP/1.1")}


@pytest.mark.parametrize("sent", REQUESTS.values(), ids=REQUESTS)
def test_a_connection_whose_response_nobody_reads_is_closed(sockets, connections, hasty, sent):
    async def use(connect, app, engine):
        with_large_response(app)
        _, writer = await connect()  # its reader stops reading after a few kilobytes
        writer.write(sent)
        await until(lambda: connections)
        await until(lambda: not connections[0].connections)
        await until(lambda: not connections[0].tasks)
        writer.close()

    sockets(use)


def test_a_large_response_that_is_read_comes_whole(sockets, connections, hasty):
    async def use(connect, app, engine):
        with_large_response(app)
        reader, writer = await connect()
        for _ in range(2):
            writer.write(LARGE)
            await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), WAIT_S)
            assert await asyncio.wait_for(reader.readexactly(16 * MB), WAIT_S) == b"a" * 16 * MB
        writer.close()

    sockets(use)


def test_unread_responses_beyond_the_limit_are_dropped(sockets, connections, monkeypatch):
    monkeypatch.setattr(unsent, "MAX_UNSENT", 20 * MB)

    async def use(connect, app, engine):
        with_large_response(app)
        writers = []
        for count in range(1, 5):
            writers.append((await connect())[1])
            writers[-1].write(LARGE)
            await until(lambda count=count: len(connections) == count and connections[-1].unsent.num_bytes())
        await until(lambda: connections[0].connections == {connections[-1]})
        for writer in writers:
            writer.close()

    sockets(use)


async def streaming(connect, engine):
    """Request a long stream; returns the connection's writer after the first event."""
    engine.delay = 0.01
    body = json.dumps({"prompt": "a" * 50, "max_tokens": 400, "ignore_eos": True, "stream": True}).encode()
    reader, writer = await connect()
    writer.write(head("Content-Type: application/json", f"Content-Length: {len(body)}") + body)
    await asyncio.wait_for(reader.readuntil(b"data: "), WAIT_S)
    return writer


def causes(app):
    """The causes of the aborts that the metrics have counted."""
    return {cause for cause, counter in app.state.pequod.metrics.aborts.items() if counter._value.get()}


def test_a_stream_that_is_cut_off_is_counted_as_one_of_a_slow_reader(sockets, connections):

    async def use(connect, app, engine):
        writer = await streaming(connect, engine)
        connections[0].unsent.cut_off("for a test")
        await until(lambda: engine.aborted)
        await until(lambda: app.state.pequod.limits.open_choices == 0)
        assert causes(app) == {"slow_reader"}
        writer.close()

    sockets(use)


def test_a_stream_that_waits_too_long_for_its_client_is_cut_off_with_a_line_in_the_log(
    sockets, connections, monkeypatch, caplog
):
    """As over TLS, where nobody sees whether the client reads."""
    monkeypatch.setattr(http_response, "WRITE_TIMEOUT_S", 0.1)
    caplog.set_level("INFO")

    async def use(connect, app, engine):
        writer = await streaming(connect, engine)
        connections[0].pause_writing()
        await until(lambda: not connections[0].connections)
        await until(lambda: not connections[0].tasks)
        assert causes(app) == {"slow_reader"}
        writer.close()

    sockets(use)
    logged = [record.getMessage() for record in caplog.records]
    assert logged.count("cut off a connection whose client does not read, or not fast enough") == 1
    assert not [line for line in logged if "ASGI callable" in line]
