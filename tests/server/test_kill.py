"""A killed engine costs its users a pause, not an answer; a killed server leaves no process behind."""

import concurrent.futures
import json
import os
import signal
import threading

import pytest

from tests.live import RESTART_S, WAIT_S, PacedServer, Server, alive, eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LONG = {"model": "builtin", "prompt": "Tell me a story about the sea.", "max_tokens": 700, "ignore_eos": True}
REQUESTS = {
    "greedy": {**LONG, "temperature": 0},
    "seeded": {**LONG, "temperature": 0.8, "seed": 11},
    "two choices": {**LONG, "temperature": 0.8, "seed": 21, "n": 2, "max_tokens": 400},
    "logprobs": {**LONG, "temperature": 0.7, "seed": 13, "logprobs": 2, "max_tokens": 400},
    "penalties": {**LONG, "temperature": 0.7, "seed": 14, "frequency_penalty": 0.3, "repetition_penalty": 1.05},
}


@pytest.fixture(scope="module")
def server():
    with PacedServer("--dtype", "float32") as running:
        yield running


def collect(server: Server, body: dict, first: threading.Event | None = None) -> dict:
    """The answer's choices, put together from a stream or not."""
    if not body.get("stream"):
        answer = server.client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return {c["index"]: (c["text"], c["logprobs"], c["finish_reason"]) for c in answer.json()["choices"]}
    texts: dict[int, str] = {}
    logprobs: dict[int, dict] = {}
    reasons: dict[int, str] = {}
    with server.client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            assert "error" not in event, event
            for choice in event["choices"]:
                index = choice["index"]
                texts[index] = texts.get(index, "") + choice["text"]
                for key, value in (choice["logprobs"] or {}).items():
                    logprobs.setdefault(index, {}).setdefault(key, []).extend(value)
                if choice["finish_reason"]:
                    reasons[index] = choice["finish_reason"]
                if first is not None and len(texts[index]) > 20:
                    first.set()
    return {index: (texts[index], logprobs.get(index), reasons[index]) for index in sorted(texts)}


# What is resubmitted does not depend on how the answers are read.
@pytest.mark.parametrize(
    ("names", "stream"),
    [(REQUESTS.keys(), True), (("two choices", "logprobs"), False)],
    ids=["streaming", "whole"],
)
def test_a_killed_engine_changes_no_byte_of_any_answer(server, names, stream):
    bodies = [{**REQUESTS[name], "stream": stream} for name in names]
    undisturbed = [collect(server, body) for body in bodies]
    restarts, resumed = server.metric("pequod:engine_restarts_total"), server.metric("pequod:streams_resumed_total")
    begun, engine = [threading.Event() for _ in bodies], server.engine_pid
    choices = sum(body.get("n", 1) for body in bodies)
    with concurrent.futures.ThreadPoolExecutor(len(bodies)) as pool, server.paced():
        before = server.metric("pequod:kv_blocks", state="held")
        assert before == 0
        answers = [pool.submit(collect, server, *each) for each in zip(bodies, begun, strict=True)]
        if stream:
            assert all(each.wait(WAIT_S) for each in begun)
        else:
            eventually(lambda: server.metric("pequod:kv_blocks", state="held") > 2 * choices, every=0.01)
        os.kill(engine, signal.SIGKILL)
        assert not any(answer.done() for answer in answers), "the engine was killed too late to prove anything"
        server.pace(0)
        disturbed = [answer.result(RESTART_S) for answer in answers]
    for name, once, again in zip(names, undisturbed, disturbed, strict=True):
        assert {i: (text, reason) for i, (text, _, reason) in again.items()} == {
            i: (text, reason) for i, (text, _, reason) in once.items()
        }, name
        for index, (_, logprobs, _) in once.items():
            if logprobs:  # the tokens and their alternatives; the numbers up to the rounding of another batch
                found = again[index][1]
                assert found["tokens"] == logprobs["tokens"] and found["text_offset"] == logprobs["text_offset"]
                assert found["token_logprobs"] == pytest.approx(logprobs["token_logprobs"], abs=1e-4)
    assert server.metric("pequod:engine_restarts_total") == restarts + 1
    assert server.metric("pequod:streams_resumed_total") == resumed + choices
    assert server.metric("pequod:kv_blocks_unaccounted") == 0


def test_a_request_that_waits_while_the_engine_restarts_is_answered(server):
    restarts = server.metric("pequod:engine_restarts_total")
    os.kill(server.engine_pid, signal.SIGKILL)
    eventually(lambda: server.metric("pequod:engine_restarts_total") > restarts)
    server.wait_ready()
    assert collect(server, {**LONG, "max_tokens": 5})[0][2] == "length"


@pytest.mark.parametrize("moment", ["loading", "idle", "generating"])
def test_a_killed_server_leaves_no_engine(moment):
    with Server(wait=moment != "loading") as server:
        engine = eventually(lambda: _engine(server))
        if moment == "generating":
            body = {**LONG, "max_tokens": 1500, "stream": True}
            with server.client.stream("POST", "/v1/completions", json=body) as answer:
                next(answer.iter_lines())
                server.process.kill()
        else:
            server.process.kill()
        eventually(lambda: not alive(engine))
        assert not alive(engine)


def _engine(server: Server) -> int | None:
    try:
        return server.engine_pid
    except LookupError:
        return None
