"""Each published way to hurt a server of this kind gets its refusal, and nobody else notices.

A stream with a seed runs beside every row of the table in tests/server/http/hostile.py: it goes on while the row is
answered, and at its end it has said what it says on an idle server.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading

import httpx
import pytest

from tests.fakes import model_folder, serving
from tests.live import WAIT_S, PacedServer, Server, eventually
from tests.paced import CHECK_S
from tests.server.http.hostile import BODIES, LONG_TEXTS, MB, ODD, RAW, Body, long_context_model
from tests.server.wire import COMPLETIONS

LONG = {"prompt": "Once upon a time", "max_tokens": 300, "ignore_eos": True, "temperature": 1, "seed": 7}
SHORT = {"prompt": "The sea is", "max_tokens": 8, "temperature": 0}
# Between two steps beside a bystander, who shall read all the time without taking all of a core.
PACE_S = 0.01


class Bystander:
    """A client that reads one long stream after the other."""

    def __init__(self, url: str) -> None:
        self.pieces = 0
        self.texts: list[str] = []
        self.errors: list[str] = []
        self._url = url
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._read)

    def _read(self) -> None:
        with httpx.Client(base_url=self._url, timeout=120) as client:
            while not self._stop.is_set():
                text = ""
                with client.stream("POST", COMPLETIONS, json={**LONG, "stream": True}) as answer:
                    for line in answer.iter_lines():
                        if line.startswith("data: {"):
                            event = json.loads(line[6:])
                            self.pieces += 1
                            self.errors += [line] if "error" in event else []
                            text += "".join(choice["text"] for choice in event.get("choices", ()))
                self.texts.append(text)

    def __enter__(self) -> Bystander:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


@pytest.fixture(scope="module")
def server():
    """One that takes three times as long for a grammar: on a slow machine it refused others for their time, too."""
    with PacedServer(env={CHECK_S: "3"}) as running:
        yield running


@pytest.fixture(scope="module")
def alone(server):
    """What the server says when nothing else happens."""
    return [server.client.post(COMPLETIONS, json=body).json()["choices"][0]["text"] for body in (LONG, SHORT)]


@pytest.fixture(scope="module")
def bystander(server, alone):
    with server.paced(PACE_S), Bystander(server.url) as reading:
        eventually(lambda: reading.pieces)
        yield reading
    assert reading.errors == []
    assert {*reading.texts} == {alone[0]}


@pytest.fixture
def undisturbed(server, alone, bystander):
    """Around a row: the stream goes on, the server is ready and answers others as before."""
    before = bystander.pieces
    yield
    eventually(lambda: bystander.pieces > before)
    assert server.client.get("/ready").status_code == 200
    assert server.client.post(COMPLETIONS, json=SHORT).json()["choices"][0]["text"] == alone[1]


def check_refused(server: Server, row: Body) -> None:
    headers = {"Content-Type": "application/json", **row.headers}
    answer = server.client.post(row.path, content=row.content, headers=headers)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (row.status, row.param), error
    assert len(answer.content) < 700


@pytest.mark.parametrize("row", BODIES, ids=lambda row: row.name)
def test_a_bad_body_is_refused_by_name(server, undisturbed, row):
    check_refused(server, row)


@pytest.fixture(scope="module")
def long_context(data, tmp_path_factory):
    folder = long_context_model(data, tmp_path_factory.mktemp("hostile") / "model")
    with PacedServer(str(folder), "--load-format", "dummy", step_s=PACE_S) as running:
        yield running


@pytest.mark.parametrize("row", LONG_TEXTS, ids=lambda row: row.name)
def test_a_long_text_is_refused_by_name_where_the_context_is_long(long_context, row):
    with Bystander(long_context.url) as reading:
        eventually(lambda: reading.pieces)
        check_refused(long_context, row)
        before = reading.pieces
        eventually(lambda: reading.pieces > before)
    assert reading.errors == []


@pytest.mark.parametrize("more", ODD.values(), ids=ODD.keys())
def test_unusual_but_valid_requests_are_served(server, undisturbed, more):
    body = more if isinstance(more, bytes) else json.dumps({"prompt": "a", "max_tokens": 8, **more}).encode()
    answer = server.client.post(COMPLETIONS, content=body)
    assert answer.status_code == 200, answer.text
    assert all(choice["finish_reason"] in ("stop", "length") for choice in answer.json()["choices"])


def first_answer(port: int, data: bytes) -> tuple[int, bytes]:
    """Status and body of what comes back first; 0 when the server just hangs up."""
    with socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as sock:
        with contextlib.suppress(ConnectionError):  # it may hang up while this still sends
            sock.sendall(data)
        answer = b""
        with contextlib.suppress(ConnectionError):
            while b"\r\n\r\n" not in answer and (more := sock.recv(1 << 16)):
                answer += more
        head, _, body = answer.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head.lower())
        with contextlib.suppress(ConnectionError):
            while length and len(body) < int(length[1]) and (more := sock.recv(1 << 16)):
                body += more
    return int(head.split()[1]) if head else 0, body


@pytest.mark.parametrize("row", RAW, ids=lambda row: row.name)
def test_what_is_no_request_is_refused_or_hung_up_on(server, undisturbed, row):
    status, body = first_answer(server.port, row.data())
    assert status in row.statuses, body
    if status >= 400:
        assert json.loads(body)["error"].keys() == {"message", "type", "param", "code"}


async def test_a_body_that_is_too_large_is_answered_while_the_client_still_sends(server, undisturbed):
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
        for num_bytes in (8 * MB + 1, 20 * MB):
            answer = await client.post(COMPLETIONS, content=b" " * num_bytes)
            assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")


def test_the_server_has_kept_nothing(server, bystander):
    bystander.__exit__()
    eventually(lambda: server.client.get("/ready").json()["running"] == 0)
    assert server.metric("pequod:kv_blocks_unaccounted") == 0
    assert server.metric("http_requests_total", status="500") == 0
    assert "ERROR" not in server.log and "Traceback" not in server.log


async def test_a_page_can_read_what_the_door_refuses(tmp_path):
    origin = "https://a.example"
    async with serving(model_folder(tmp_path / "m"), allowed_origins=[origin]) as (client, _):
        for headers in ({"Content-Type": "text/plain"}, {"Content-Length": "99999999999"}, {"Host": "b.example"}):
            answer = await client.post(COMPLETIONS, content=b"{}", headers={"Origin": origin, **headers})
            assert answer.status_code in (400, 413, 415)
            assert answer.headers["access-control-allow-origin"] == origin
