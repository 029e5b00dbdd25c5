"""Descriptors: connections leave some to the server itself, many are accepted at once, and keys are not shown."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from server.cli.commands.serve import SPARE_DESCRIPTORS
from tests.live import RESTART_S, Server, eventually
from tests.server.wire import CHAT, QUESTION

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

FEW = 192  # open files that the server may have


@pytest.fixture(scope="module")
def server():
    """A server that may open few files."""
    with Server(prefix=("prlimit", f"--nofile={FEW}:{FEW}")) as running:
        yield running


def connect(server: Server) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    return connection


def test_connections_beyond_the_bound_get_a_503_and_the_engine_can_be_restarted_all_the_same(server):
    most = FEW - SPARE_DESCRIPTORS
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(connect(server)) for _ in range(most)]
        eventually(lambda: _refused(server))
        os.kill(server.engine_pid, signal.SIGKILL)
        held.pop().close()  # frees a connection for the requests below
        eventually(lambda: _state(server) == "ready", RESTART_S)
        assert server.process.poll() is None
    eventually(lambda: not _refused(server))
    response = server.client.post(CHAT, json={"messages": QUESTION, "max_tokens": 2})
    assert response.status_code == 200
    assert server.metric("pequod:engine_restarts_total") == 1


def _refused(server: Server) -> bool:
    """Return whether a new connection is refused at once because there are too many."""
    with connect(server) as connection:
        connection.settimeout(1)
        try:
            head, _, body = connection.recv(4096).partition(b"\r\n\r\n")
        except TimeoutError:
            return False
        assert head.startswith(b"HTTP/1.1 503 ") and b"Retry-After: " in head
        assert json.loads(body)["error"]["code"] == "connections"
        return True


def _state(server: Server) -> str:
    try:
        return server.client.get("/ready").json()["state"]
    except Exception:
        return ""


def test_keys_that_are_flags_are_not_in_the_list_of_processes():
    with Server("--api-key", "canary-one", "--metrics-key", "canary-two") as running:
        shown = Path(f"/proc/{running.process.pid}/cmdline").read_bytes()
        assert b"--api-key\0xxxxxxxxxx\0--metrics-key\0xxxxxxxxxx" in shown
        pids = [path for path in Path("/proc").glob("[0-9]*") if _parent(path) == running.process.pid]
        assert pids
        for path in pids:
            with contextlib.suppress(OSError):  # it has ended meanwhile
                assert b"canary-" not in (path / "cmdline").read_bytes() + (path / "environ").read_bytes()
        response = running.client.get("/v1/models", headers={"Authorization": "Bearer canary-one"})
        assert response.status_code == 200


def test_keys_of_the_environment_do_not_reach_the_engine():
    with Server(env={"PEQUOD_API_KEY": "canary-one", "pequod_metrics_key": "canary-two"}) as running:
        engine = Path(f"/proc/{running.engine_pid}/environ").read_bytes()
        assert b"canary-" not in engine and b"PATH=" in engine
        assert running.client.get("/v1/models").status_code == 401


def _parent(path: Path) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int((path / "stat").read_text().rpartition(")")[2].split()[1])
    return 0


def test_a_burst_of_connections_is_accepted_in_few_iterations_of_the_loop():
    """As many as there are descriptors of the listening socket, in each turn."""
    code = """
import asyncio, contextlib, socket, threading, uvloop
from server.http.server import ACCEPTS_PER_ITERATION

async def main(doubles):
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(256)
    accepted = []
    loop = asyncio.get_running_loop()
    class Counts(asyncio.Protocol):
        def connection_made(self, transport): accepted.append(transport)
    clients = [socket.create_connection(listener.getsockname()) for _ in range(64)]
    sockets = [listener, *(listener.dup() for _ in range(doubles))]
    servers = [await loop.create_server(Counts, sock=each) for each in sockets]
    turns = 0
    while len(accepted) < 64:
        await asyncio.sleep(0)
        turns += 1
    return turns

one = uvloop.run(main(0))
many = uvloop.run(main(ACCEPTS_PER_ITERATION - 1))
print(one, many)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    one, many = map(int, done.stdout.split())
    assert one >= 64 and many <= one / 8
