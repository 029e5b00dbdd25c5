"""What an operator relies on, seen from outside of a real server process."""

import concurrent.futures
import json
import signal
import socket
import time

import pytest

from tests.live import WAIT_S, PacedServer, Server, eventually

WORDS = "The captain looked at the grey sea and said that the whale would come before the evening. "


@pytest.fixture(scope="module")
def server():
    with PacedServer("--dtype", "float32") as running:
        yield running


def complete(server: Server, **body) -> dict:
    answer = server.client.post(
        "/v1/completions", json={"model": server.client.get("/v1/models").json()["data"][0]["id"], **body}
    )
    assert answer.status_code == 200, answer.text
    return answer.json()


def prompt_of(server: Server, count: int, start: str) -> list[int]:
    ids = server.client.post("/tokenize", json={"prompt": start + WORDS * 60}).json()["tokens"]
    assert len(ids) >= count
    return ids[:count]


def test_the_second_of_two_equal_prompts_comes_from_the_cache_and_the_metric_agrees(server):
    prompt = prompt_of(server, 512, "Once. ")
    hits = server.metric("vllm:prefix_cache_hits_total")
    first = complete(server, prompt=prompt, max_tokens=1)
    second = complete(server, prompt=prompt, max_tokens=1)
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= 496
    found = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert server.metric("vllm:prefix_cache_hits_total") - hits == found
    other = complete(server, prompt=prompt, max_tokens=1, cache_salt="mine")
    assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_eight_choices_of_one_prompt_cost_one_prefill(server, tmp_path):
    prompt = prompt_of(server, 512, "Twice. ")
    queries = server.metric("vllm:prefix_cache_queries_total")
    hits = server.metric("vllm:prefix_cache_hits_total")
    answer = complete(server, prompt=prompt, max_tokens=2, n=8, seed=1)
    assert len(answer["choices"]) == 8
    queried = server.metric("vllm:prefix_cache_queries_total") - queries
    found = server.metric("vllm:prefix_cache_hits_total") - hits
    assert queried == 8 * 512
    assert queried - found < 512 + 8 * 16


def test_counts_are_exact(server):
    prompts = server.metric("vllm:prompt_tokens_total")
    tokens = server.metric("vllm:generation_tokens_total")
    done = server.metric("vllm:request_success_total", finished_reason="length")
    prompt = prompt_of(server, 7, "Count. ")
    with concurrent.futures.ThreadPoolExecutor(10) as pool:
        list(pool.map(lambda _: complete(server, prompt=prompt, max_tokens=10, ignore_eos=True), range(10)))
    assert server.metric("vllm:generation_tokens_total") - tokens == 100
    assert server.metric("vllm:prompt_tokens_total") - prompts == 70
    assert server.metric("vllm:request_success_total", finished_reason="length") - done == 10
    assert server.metric("vllm:num_requests_running") == 0
    assert server.metric("vllm:num_requests_waiting") == 0
    assert server.metric("pequod:kv_blocks_unaccounted") == 0


@pytest.mark.parametrize("stream", [True, False], ids=["streaming", "whole"])
def test_a_client_that_goes_away_stops_the_work(server, stream):
    body = json.dumps(
        {"model": "builtin", "prompt": WORDS * 3, "max_tokens": 1900, "ignore_eos": True, "stream": stream}
    )
    aborts = server.metric("pequod:request_aborts_total")
    request = (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n{body}"
    )
    with server.paced():
        with socket.create_connection(("127.0.0.1", server.port)) as sock:
            sock.sendall(request.encode())
            eventually(lambda: server.metric("pequod:kv_blocks", state="held") > 2)
            assert server.metric("vllm:num_requests_running") == 1
        eventually(lambda: server.metric("pequod:kv_blocks", state="held") == 0)
    assert server.metric("vllm:num_requests_running") == 0
    assert server.metric("pequod:request_aborts_total") == aborts + 1


def test_a_full_pool_preempts_and_every_answer_is_as_alone(data):
    prompts = []
    with Server(str(data / "models/stories260k"), "--num-gpu-blocks-override", "40", "--max-num-seqs", "16") as small:
        ids = small.client.post("/tokenize", json={"prompt": "Once upon a time there was a big red dog. " * 40}).json()[
            "tokens"
        ]
        prompts = [ids[i * 3 : i * 3 + 64] for i in range(50)]
        body = {"max_tokens": 64, "temperature": 0, "ignore_eos": True}
        alone = [complete(small, prompt=prompt, **body)["choices"][0]["text"] for prompt in prompts]
        assert small.metric("vllm:num_preemptions_total") == 0
        with concurrent.futures.ThreadPoolExecutor(50) as pool:
            together = list(pool.map(lambda p: complete(small, prompt=p, **body)["choices"][0]["text"], prompts))
        assert together == alone
        assert small.metric("vllm:num_preemptions_total") > 0
        assert small.metric("pequod:kv_blocks_unaccounted") == 0
        assert small.metric("pequod:kv_blocks", state="held") == 0


def test_sigterm_lets_running_streams_finish_and_admits_no_new_request(server):
    with PacedServer("--drain-seconds", "120", step_s=0.02) as draining:
        body = {"model": "builtin", "prompt": "Go", "max_tokens": 1900, "ignore_eos": True, "stream": True}
        with draining.client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            draining.process.send_signal(signal.SIGTERM)
            eventually(lambda: draining.client.get("/ready").status_code == 503)
            late = draining.client.post("/v1/completions", json={**body, "stream": False})
            assert late.status_code == 503
            assert int(late.headers["retry-after"]) >= 1
            draining.pace(0)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        finish = [
            c["finish_reason"] for line in rest if line.startswith("data: {") for c in json.loads(line[6:])["choices"]
        ]
        assert finish[-1] == "length"
        assert draining.process.wait(WAIT_S) == 0


def test_a_stream_that_nobody_reads_does_not_delay_the_shutdown_for_long():
    body = {"model": "builtin", "prompt": "Go", "max_tokens": 1900, "ignore_eos": True, "stream": True}
    text = json.dumps(body | {"n": 16, "logprobs": 5})  # more than the buffers of the system take
    request = (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(text)}\r\n\r\n{text}"
    )
    with Server("--drain-seconds", "1") as server, socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", server.port))
        sock.sendall(request.encode())
        counts: list[float] = []

        def is_held_up() -> bool:
            counts.append(server.metric("vllm:generation_tokens_total"))
            return counts[-1] > 0 and counts[-1:] * 20 == counts[-20:]

        eventually(is_held_up, every=0.1)  # or all that there is would be in the system's buffers when it ends
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(WAIT_S) == 0
        assert time.monotonic() - began < 1 + 18  # as docs/operations.md says
        assert "Traceback" not in server.log and "ERROR" not in server.log.upper()
        assert server.log.count("cut off connections") == 1


def test_a_full_queue_is_refused_with_a_time_to_come_back():
    with PacedServer("--max-num-seqs", "1", "--max-num-queued-reqs", "2", step_s=0.02) as busy:
        body = {"model": "builtin", "prompt": "Go", "max_tokens": 600, "ignore_eos": True}

        def ask(_):
            return busy.client.post("/v1/completions", json=body)

        with concurrent.futures.ThreadPoolExecutor(10) as pool:
            asking = pool.map(ask, range(10))
            eventually(lambda: busy.metric("vllm:admission_rejections_total") == 7)
            busy.pace(0)
            answers = list(asking)
        refused = [answer for answer in answers if answer.status_code == 503]
        assert [answer.status_code for answer in answers].count(200) == 3
        assert len(refused) == 7
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
        assert busy.metric("vllm:admission_rejections_total") == 7


def test_the_step_log_shows_every_running_row_and_no_step_over_budget(tmp_path):
    log = tmp_path / "steps.jsonl"
    with PacedServer("--step-log", str(log), "--max-num-batched-tokens", "64", "--max-num-seqs", "4") as logged:
        prompts = [prompt_of(logged, 100 + 50 * i, f"{i}. ") for i in range(4)]
        with concurrent.futures.ThreadPoolExecutor(4) as pool, logged.paced(0.3):
            asking = pool.map(lambda prompt: complete(logged, prompt=prompt, max_tokens=40), prompts)
            eventually(lambda: logged.metric("vllm:num_requests_running") > 1)
            logged.pace(0)
            list(asking)
        assert logged.stop() == 0
    steps = [json.loads(line) for line in log.read_text().splitlines()]
    assert sum(tokens for step in steps for _, tokens in step["rows"]) >= 4 * 40
    assert all(sum(tokens for _, tokens in step["rows"]) <= step["budget"] == 64 for step in steps)
    assert max(len(step["rows"]) for step in steps) > 1
    ids = [[row[0] for row in step["rows"]] for step in steps]
    for request_id in {i for row in ids for i in row}:
        places = [n for n, row in enumerate(ids) if request_id in row]
        assert places == list(range(places[0], places[-1] + 1)), "a running row was left out of a step"
