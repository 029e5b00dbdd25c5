"""Server in a process of its own: drain, second signal, a model that cannot be loaded, an engine that dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from server.cli import banner
from server.http.server import Server
from server.settings import Settings
from tests.fakes import FakeEngine, model_folder, serving
from tests.live import WAIT_S, held_port

ROOT = Path(__file__).parents[3]
# An app whose one answer takes until the test writes to its standard input.
SCRIPT = """
import asyncio, contextlib, sys, time
from types import SimpleNamespace
from fastapi import FastAPI
from engine import EngineDied, EngineInfo, EngineStatus, ModelError
from server.cli import banner
from server.cli.commands.serve import listen
from server.http.server import Server
from server.settings import Settings

case = sys.argv[1]
info = EngineInfo(model="m", architecture="A", max_len=64, vocab_size=9, block_size=16, num_blocks=8, max_seqs=2,
    max_batched_tokens=8, dtype="float32", device="cpu", attention="reference", implementation="native", exact=False,
    num_params=5, weights_bytes=20, kv_bytes_per_token=4, weights_hash="h", load_seconds=0.1, torch="2",
    kv_dtype="float32")

class State:
    draining = False
    failed = None
    limits = SimpleNamespace(open_choices=0)
    async def ready(self):
        if case == "model": raise ModelError("the model is broken")
        if case == "loading": await asyncio.sleep(3600)
        return SimpleNamespace(info=info, prompts=SimpleNamespace(has_template=False))
    def begin_drain(self): self.draining = True
    async def drained(self, timeout):
        deadline = time.monotonic() + timeout
        while self.open and time.monotonic() < deadline: await asyncio.sleep(0.02)
        return not self.open

state = State()
state.open = 0
release = asyncio.Event()

@contextlib.asynccontextmanager
async def lifespan(app):
    asyncio.get_running_loop().add_reader(0, release.set)
    yield
    print("lifespan ended", flush=True)

app = FastAPI(lifespan=lifespan)
app.state.pequod = state

@app.get("/state")
async def tell(): return {"draining": state.draining, "open": state.open}

@app.get("/slow")
async def slow():
    state.open += 1
    await release.wait()
    state.open -= 1
    return "whole"

engine = SimpleNamespace(status=EngineStatus(phase="ready"))
state.failure = asyncio.Event()
if case == "death":
    state.failed = EngineDied("the engine is gone")
    state.failure.set()
settings = Settings(port=int(sys.argv[2]), drain_seconds=100)
with listen(settings) as listener:
    failure = Server(app, engine, settings, time.monotonic(), banner).serve_on(listener)
if failure: print(failure[0], flush=True)
sys.exit(failure[1] if failure else 0)
"""


class Child:
    def __init__(self, case: str) -> None:
        self.held = held_port()
        self.port = self.held.getsockname()[1]
        env = {name: value for name, value in os.environ.items() if not name.startswith("PEQUOD_")}
        self.process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, case, str(self.port)],
            cwd=ROOT,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=WAIT_S)

    def draining(self) -> bool:
        return bool(self.client.get("/state").json()["draining"])

    def answering(self) -> bool:
        return self.client.get("/state").json()["open"] == 1

    def wait(self, said=lambda: True) -> None:
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            try:
                if said():
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.02)
        raise AssertionError("nothing came of it")

    def end(self) -> tuple[int, str]:
        out, _ = self.process.communicate(timeout=WAIT_S)
        return self.process.returncode, out


@pytest.fixture
def start():
    usual = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also if the tests run under `nohup`
    children = []

    def run(case: str) -> Child:
        children.append(Child(case))
        return children[-1]

    yield run
    signal.signal(signal.SIGHUP, usual)
    for child in children:
        child.process.kill()
        child.process.communicate()
        child.client.close()
        child.held.close()


def slow(child: Child) -> subprocess.Popen[str]:
    """An answer under way, read by another process."""
    code = f"import urllib.request as u; print(u.urlopen('http://127.0.0.1:{child.port}/slow').read().decode())"
    reader = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    child.wait(child.answering)
    return reader


async def test_an_idle_connection_is_kept_longer_than_by_a_load_balancer(tmp_path):
    async with serving(model_folder(tmp_path / "m"), FakeEngine()) as (_, app):
        for settings, seconds in ((Settings(), 75), (Settings(timeout_keep_alive=620), 620)):
            server = Server(app, FakeEngine(), settings, 0.0, banner)
            assert server.config.timeout_keep_alive == seconds


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_lets_a_running_answer_end(start, sig):
    child = start("ready")
    child.wait(lambda: not child.draining())
    reader = slow(child)
    child.process.send_signal(sig)
    child.wait(child.draining)  # the port still answers
    child.process.stdin.write("go\n")
    child.process.stdin.flush()
    assert reader.communicate(timeout=WAIT_S)[0].strip() == '"whole"'
    code, out = child.end()
    assert code == 0
    assert "lifespan ended" in out
    assert "Pequod is ready" in out


def test_the_second_signal_means_now(start):
    child = start("ready")
    child.wait(lambda: not child.draining())
    reader = slow(child)
    child.process.send_signal(signal.SIGTERM)
    child.wait(child.draining)
    child.process.send_signal(signal.SIGTERM)
    assert child.end()[0] == 128 + signal.SIGTERM
    assert reader.communicate(timeout=WAIT_S)[0] == ""


def test_a_terminal_that_hangs_up_twice_cuts_nothing_off(start):
    child = start("ready")
    child.wait(lambda: not child.draining())
    reader = slow(child)
    for _ in range(3):
        child.process.send_signal(signal.SIGHUP)
        child.wait(child.draining)
    child.process.stdin.write("go\n")
    child.process.stdin.flush()
    assert reader.communicate(timeout=WAIT_S)[0].strip() == '"whole"'
    assert child.end()[0] == 0


def test_under_nohup_a_hang_up_is_ignored(start):
    usual = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as `nohup` leaves it to its child
    try:
        child = start("ready")
    finally:
        signal.signal(signal.SIGHUP, usual)
    child.wait(lambda: not child.draining())
    child.process.send_signal(signal.SIGHUP)
    time.sleep(0.2)
    assert not child.draining()
    child.process.send_signal(signal.SIGTERM)
    assert child.end()[0] == 0


def test_a_signal_while_loading_ends_the_server(start):
    child = start("loading")
    child.wait(lambda: not child.draining())
    child.process.send_signal(signal.SIGTERM)
    code, out = child.end()
    assert code == 0
    assert "lifespan ended" in out


@pytest.mark.parametrize(
    ("case", "code", "said"), [("model", 2, "the model is broken"), ("death", 1, "engine is gone")]
)
def test_what_cannot_go_on_ends_with_its_sentence(start, case, code, said):
    got, out = start(case).end()
    assert got == code
    assert said in out
    assert "Traceback" not in out
