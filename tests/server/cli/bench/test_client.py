"""The measuring client against servers of all kinds: a whole Pequod on a fake engine, and others that take less."""

from __future__ import annotations

import asyncio
import errno
import gc
import json
import threading
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

from server.cli.bench.client import Ask, Shot, Target, connect
from server.cli.bench.figures import notes, summarize
from server.cli.bench.load import Prompts, run
from server.cli.commands import Failure, UsageError
from tests.fakes import INFO, FakeEngine, listening, model_folder, serving
from tests.toys import byte_level


@dataclass
class Other:
    """Another server: what it refuses, what it leaves out, and when it dies."""

    refuses: tuple[str, ...] = ()
    takes_ids: bool = True
    usage: bool = True
    streams: bool = True
    per_chunk: int = 1
    stops_at: int | None = None  # tokens, whatever the request says
    dies_after: int | None = None  # completions
    busy_after: int | None = None  # completions; those after it are refused for the moment
    max_len: int | None = None
    breaks_off: bool = False  # after the first token
    status: int = 200
    bodies: list[dict[str, Any]] = field(default_factory=list)

    @contextmanager
    def listening(self) -> Iterator[str]:
        other = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if other.is_dead:
                    self.connection.close()
                elif self.path == "/v1/models":
                    self.respond(200, {"data": [{"id": "other", "max_model_len": other.max_len}]})
                else:
                    self.respond(404, {})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                other.bodies.append(body)
                if other.is_dead:
                    self.connection.close()
                    return
                if other.busy_after is not None and len(other.bodies) > other.busy_after:
                    self.respond(429, {"error": {"message": "too busy"}})
                    return
                wrong = next((name for name in other.refuses if name in body), None)
                if wrong is None and not other.takes_ids and isinstance(body.get("prompt"), list):
                    wrong = "prompt"
                if wrong is not None or other.status != 200:
                    status = 400 if wrong is not None else other.status
                    self.respond(status, {"error": {"message": f"no {wrong}"}})
                    return
                count = min(body["max_tokens"], other.stops_at or 10**9)
                prompt = body.get("prompt") or body["messages"][0]["content"]
                length = len(prompt) if isinstance(prompt, list) else 5 + 2 * len(prompt.split())
                usage = {"prompt_tokens": length, "completion_tokens": count} if other.usage else None
                if not other.streams:
                    self.respond(200, {"choices": [{"text": " a" * count, "finish_reason": "length"}], "usage": usage})
                    return
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.end_headers()
                for start in range(0, count, other.per_chunk):
                    text = " a" * min(other.per_chunk, count - start)
                    choice = {"delta": {"content": text}} if "messages" in body else {"text": text}
                    self.event({"choices": [choice]})
                    if other.breaks_off:
                        return
                self.event({"choices": [{"text": "", "finish_reason": "length"}], "usage": usage})
                self.wfile.write(b"data: [DONE]\n\n")

            def event(self, body: object) -> None:
                self.wfile.write(b"data: " + json.dumps(body).encode() + b"\n\n")

            def respond(self, status: int, body: object) -> None:
                content = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            server.server_close()

    @property
    def is_dead(self) -> bool:
        return self.dies_after is not None and len(self.bodies) > self.dies_after


async def measured(other: Other, count: int = 3, **more: Any):
    """Connect to another server and send requests of 8 tokens in and 6 out: (target, run)."""
    with other.listening() as url:
        target = await connect(url, None, None, **more)
        async with aclosing(target.http):
            asks = [Prompts(target, 1).ask(8, 6) for _ in range(count)]
            return target, await run(target, asks)


async def test_a_pequod_is_measured_token_by_token(tmp_path):
    end = byte_level().token_to_id("<|end|>")
    # The model wants to end at once, and is not let.
    engine = FakeEngine(lambda request: [end] * request.params.max_tokens, info=INFO)
    async with serving(model_folder(tmp_path / "m"), engine) as (_, app), listening(app) as url:
        target = await connect(url + "/v1/", None, None)
        async with aclosing(target.http):
            done = await run(target, [Prompts(target, 1).ask(20, 6) for _ in range(4)], 2)
    assert target.is_pequod
    assert target.max_len == INFO.max_len
    assert [shot.token_ids for shot in done.shots] == [[end] * 6] * 4
    assert [shot.sizes for shot in done.shots] == [[1] * 6] * 4
    result = summarize(done)
    assert (result["requests"], result["failed"], result["output_tokens"]) == (4, 0, 24)
    assert all(len(shot.gaps) == 5 and shot.ttft > 0 for shot in done.shots)


async def test_a_server_that_takes_everything_gets_every_wish():
    other = Other()
    target, done = await measured(other)
    assert target.takes_ids
    last = other.bodies[-1]
    assert (last["ignore_eos"], last["min_tokens"], last["temperature"], last["max_tokens"]) == (True, 6, 0, 6)
    assert "return_token_ids" not in last  # the server accepted the field and returned none
    assert target.notes == [note for note in target.notes if "token ids" in note]
    assert summarize(done)["output_tokens"] == 18
    assert not target.is_pequod


async def test_fields_that_a_server_refuses_are_left_out_and_reported():
    other = Other(refuses=("ignore_eos", "min_tokens"), stops_at=4)
    target, done = await measured(other)
    assert not {"ignore_eos", "min_tokens"} & set(other.bodies[-1])
    assert "stream_options" in other.bodies[-1]
    result = notes(target, done.shots)
    assert any("refuses ignore_eos" in note for note in result)
    assert any("3 of 3 outputs ended before" in note for note in result)


async def test_a_server_that_takes_text_alone_gets_as_many_words_as_make_the_tokens():
    other = Other(takes_ids=False, refuses=("return_token_ids",))
    target, done = await measured(other)
    assert target.words_per_token == 0.5  # it counts two tokens a word, and five around each prompt
    assert len(other.bodies[-1]["prompt"].split()) == 4
    assert done.shots[0].prompt_tokens == 13
    assert any("text of about" in note for note in notes(target, done.shots))


async def test_without_usage_chunks_are_counted_and_that_is_reported():
    target, done = await measured(Other(usage=False, per_chunk=2))
    assert summarize(done)["output_tokens"] == 9
    assert any("no usage" in note for note in target.notes)


async def test_several_tokens_in_a_chunk_are_reported():
    target, done = await measured(Other(per_chunk=3))
    assert summarize(done)["output_tokens"] == 18
    assert any("18 tokens came in 6 chunks" in note for note in notes(target, done.shots))


async def test_a_server_that_does_not_stream_has_whole_times_only():
    target, done = await measured(Other(streams=False))
    result = summarize(done)
    assert result["output_tokens"] == 18
    assert result["ttft_p50_s"] is None
    assert result["e2e_p50_s"] > 0
    assert any("does not stream" in note for note in target.notes)


async def test_the_chat_api_gets_messages():
    other = Other()
    _, done = await measured(other, api="chat")
    assert "messages" in other.bodies[-1]
    assert summarize(done)["output_tokens"] == 18


async def test_a_stream_that_breaks_off_is_a_failed_request():
    other = Other()
    with other.listening() as url:
        target = await connect(url, None, None)
        async with aclosing(target.http):
            good = await run(target, [Ask([300], 1, 4)])
            other.breaks_off = True
            bad = await run(target, [Ask([300], 1, 4)])
        assert good.complete().shots[0].ok
        with pytest.raises(Failure, match="1 of 1 requests failed: the stream ended without a last event"):
            bad.complete()


async def test_a_client_without_file_descriptors_does_not_report_that_the_server_died():
    def respond(request: httpx.Request) -> httpx.Response:
        error = httpx.ConnectError("All connection attempts failed")
        error.__cause__ = ExceptionGroup("", [OSError(errno.EMFILE, "Too many open files")])
        raise error

    async with httpx.AsyncClient(base_url="http://sea", transport=httpx.MockTransport(respond)) as http:
        target = Target(http, "http://sea", "other", "completions", {}, None)
        done = await run(target, [Ask([300], 1, 4)] * 2)
        assert await target.is_alive()
    assert [shot.error for shot in done.shots] == [
        "no file descriptor was left for the connection; `ulimit -n` raises the limit"
    ] * 2


async def test_a_server_that_dies_leaves_no_error_that_nobody_reads():
    unread = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unread.append(context))

    class Dying:
        async def send(self, ask, began):
            if ask.output_len == 2:
                raise OSError
            return Shot(0.0, 1, 1, sent=0.0, error="lost", broken=True)

        async def is_alive(self):
            return False

    with pytest.raises(Failure, match="the server died after 0 of 2 responses"):
        await run(Dying(), [Ask([300], 1, 1), Ask([300], 1, 2)])  # type: ignore[arg-type]
    gc.collect()
    await asyncio.sleep(0)
    assert unread == []


async def test_a_server_that_dies_ends_the_run():
    # One request probes the server; two of the five after it get a response.
    with pytest.raises(Failure, match=r"the server died after \d of 5 responses: it no longer responds"):
        await measured(Other(dies_after=3), count=5)


@pytest.mark.parametrize(("status", "message"), [(401, "cannot be measured.*401"), (500, "cannot be measured.*500")])
async def test_a_server_that_refuses_everything(status, message):
    with pytest.raises(Failure, match=message):
        await measured(Other(status=status))


async def test_a_server_without_that_api_names_the_other():
    with pytest.raises(Failure, match=r"plain request: the server responded with status 404.*--api chat"):
        await measured(Other(status=404))


@pytest.mark.parametrize(
    ("url", "error", "message"),
    [
        ("http://127.0.0.1:9", Failure, "no server responds"),
        ("localhost:8000", UsageError, "is not a URL"),
    ],
)
async def test_an_address_without_a_server(url, error, message):
    with pytest.raises(error, match=message):
        await connect(url, None, None)


async def test_requests_keep_their_places_and_their_times():
    seen = []

    class Waiting:
        async def send(self, ask, began):
            seen.append(ask.at)
            running.append(1)
            most.append(len(running))
            await asyncio.sleep(0.001)
            running.pop()
            return Shot(ask.at, 1, 1, sent=ask.at, done=ask.at + 1, times=[ask.at + 1])

    running: list[int] = []
    most: list[int] = []
    asks = [Ask([300], 1, 1, at=at) for at in (0.02, 0.0, 0.01)]
    done = await run(Waiting(), asks, concurrency=1)  # type: ignore[arg-type]
    assert seen == [0.0, 0.01, 0.02]
    assert [shot.at for shot in done.shots] == [0.02, 0.0, 0.01]
    assert max(most) == 1
    assert done.wall == pytest.approx(1.02)
