"""What happens around the tokens: hanging up, silence, errors before and after the first byte, deadlines, the drain."""

import asyncio
import contextlib
import json
import time
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from engine import EngineDied, ErrorCode, TokenDelta
from server.generation import choices as generation
from server.generation import http_response as answer
from tests.fakes import INFO, FakeEngine, listening, model_folder, serving, until
from tests.live import WAIT_S
from tests.server.wire import CHAT, COMPLETIONS, QUESTION, ask, chunks, events, ids, joined, saying

LONG = "the whale; the ship, the sea; sailing " * 10
WHOLE_OR_STREAM = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return model_folder(tmp_path_factory.mktemp("model") / "fake")


def body(**more: Any) -> dict[str, Any]:
    return {"prompt": "the sea", "max_tokens": 200, **more}


async def metric(client: httpx.AsyncClient, name: str, **labels: str) -> float:
    """The sum of a metric's samples that have these labels."""
    total = 0.0
    for line in (await client.get("/metrics")).text.splitlines():
        head, _, value = line.rpartition(" ")
        if head.partition("{")[0] == name and all(f'{k}="{v}"' in head for k, v in labels.items()):
            total += float(value)
    return total


async def send_request(url: str, sent: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A POST over a bare socket, so that the test decides when to hang up."""
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    raw = json.dumps(sent).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
    return reader, writer


# The client goes away


@WHOLE_OR_STREAM
@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_hangs_up_stops_the_work(folder, stream, n):
    async def main():
        engine = FakeEngine(saying(LONG), delay=0.01)
        async with serving(folder, engine) as (client, app), listening(app) as url:
            reader, writer = await send_request(url, body(n=n, stream=stream))
            if stream:
                await reader.readuntil(b"data: ")
            await until(lambda: len(engine.open) == n)
            writer.close()
            await until(lambda: not engine.open, seconds=1)
            assert sorted(engine.aborted) == [request.id for request in engine.requests]
            await until(lambda: app.state.pequod.limits.open_choices == 0)
            assert await metric(client, "pequod:request_aborts_total", cause="disconnect") == 1
            assert await metric(client, "vllm:request_success_total", finished_reason="abort") == n

    asyncio.run(main())


def test_a_client_that_hangs_up_in_the_queue_stops_the_work(folder):
    async def main():
        engine = FakeEngine(saying(LONG))
        engine.hold()
        async with serving(folder, engine) as (_, app), listening(app) as url:
            _, writer = await send_request(url, body(n=8, stream=True))
            await until(lambda: len(engine.open) == 8)
            writer.close()
            await until(lambda: not engine.open, seconds=1)

    asyncio.run(main())


def test_a_complete_answer_aborts_nothing(folder):
    async def main():
        engine = FakeEngine(saying("the whale"))
        async with serving(folder, engine) as (client, app), listening(app) as url:
            async with httpx.AsyncClient(base_url=url) as real:
                for stream in (False, True):
                    assert (await real.post(COMPLETIONS, json=body(stream=stream))).status_code == 200
            assert engine.aborted == []
            assert app.state.pequod.limits.open_choices == 0
            assert await metric(client, "pequod:request_aborts_total") == 0
            assert await metric(client, "vllm:request_success_total", finished_reason="stop") == 2
            assert await metric(client, "vllm:generation_tokens_total") == 2 * (len(ids("the whale")) + 1)

    asyncio.run(main())


@WHOLE_OR_STREAM
def test_a_stop_string_stops_the_work(folder, stream):
    async def main():
        engine = FakeEngine(saying(LONG))
        async with serving(folder, engine) as (client, _):
            response = await client.post(COMPLETIONS, json=body(stop="whale", stream=stream))
            assert response.status_code == 200
            assert engine.aborted == [engine.requests[0].id]
            assert await metric(client, "vllm:request_success_total", finished_reason="stop") == 1
            assert await metric(client, "pequod:request_aborts_total") == 0
            assert await metric(client, "vllm:generation_tokens_total") == 2

    asyncio.run(main())


class Careless(FakeEngine):
    """An engine that goes on until it is told to stop: nothing ends with the reader of its tokens."""

    async def generate(self, request):
        self.requests.append(request)
        for token in self.say(request):
            await asyncio.sleep(0.001)
            yield TokenDelta(id=request.id, token_ids=(token,))

    def abort(self, request_id):
        self.aborted.append(request_id)


@WHOLE_OR_STREAM
@pytest.mark.parametrize("way", ["stop string", "hang up", "deadline"])
def test_the_engine_is_told_whatever_the_way_out(folder, way, stream):
    async def main():
        engine = Careless(saying(LONG * 20))
        limit = {"request_timeout": 0.1} if way == "deadline" else {}
        async with serving(folder, engine, **limit) as (client, app), listening(app) as url:
            if way == "hang up":
                _, writer = await send_request(url, body(stream=stream))
                await until(lambda: engine.requests)
                writer.close()
            else:
                await client.post(COMPLETIONS, json=body(stream=stream, stop="whale" if way == "stop string" else None))
            await until(lambda: engine.aborted, seconds=1)
            assert engine.aborted == [engine.requests[0].id]

    asyncio.run(main())


class Driver:
    """One request straight into the app, with a `send` that the test controls."""

    def __init__(self, app: Any, sent: dict[str, Any]) -> None:
        self.app = app
        self.sent: list[dict[str, Any]] = []
        self.may_send = asyncio.Event()
        self.error: Exception | None = None
        self._body = [{"type": "http.request", "body": json.dumps(sent).encode(), "more_body": False}]

    async def run(self) -> None:
        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
            "path": COMPLETIONS, "raw_path": COMPLETIONS.encode(), "query_string": b"", "root_path": "",
            "headers": headers, "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2), "state": {},
        }  # fmt: skip
        await self.app(scope, self._receive, self._send)

    async def _receive(self) -> dict[str, Any]:
        if self._body:
            return self._body.pop()
        await asyncio.Event().wait()
        raise AssertionError

    async def _send(self, message: dict[str, Any]) -> None:
        await self.may_send.wait()
        if self.error is not None:
            raise self.error
        self.sent.append(message)

    @property
    def text(self) -> str:
        return b"".join(message.get("body", b"") for message in self.sent).decode()


@WHOLE_OR_STREAM
def test_a_client_that_does_not_read_is_given_up(folder, stream, monkeypatch):
    monkeypatch.setattr(answer, "WRITE_TIMEOUT_S", 0.05)

    async def main():
        engine = FakeEngine(saying(LONG))
        async with serving(folder, engine) as (client, app):
            await asyncio.wait_for(Driver(app, body(stream=stream)).run(), WAIT_S)
            assert engine.open == []
            assert app.state.pequod.limits.open_choices == 0
            if stream:
                assert engine.aborted
                assert await metric(client, "pequod:request_aborts_total", cause="slow_reader") == 1

    asyncio.run(main())


def test_a_deadline_stops_the_work_also_while_the_client_does_not_read(folder):
    async def main():
        engine = FakeEngine(saying(LONG))
        async with serving(folder, engine, request_timeout=1.0) as (_, app):
            driver = Driver(app, body(stream=True))
            task = asyncio.create_task(driver.run())
            await until(lambda: engine.open)
            await until(lambda: not engine.open)
            assert not task.done()
            driver.may_send.set()
            await task
            assert events(driver.text)[-2]["error"]["code"] == "deadline_exceeded"

    asyncio.run(main())


def test_a_connection_that_breaks_while_it_is_written_stops_the_work(folder):
    async def main():
        engine = FakeEngine(saying(LONG))
        async with serving(folder, engine) as (client, app):
            driver = Driver(app, body(stream=True))
            driver.error = OSError("broken pipe")
            driver.may_send.set()
            await driver.run()
            assert engine.open == []
            assert await metric(client, "pequod:request_aborts_total", cause="disconnect") == 1

    asyncio.run(main())


def test_a_slow_reader_leaves_tokens_in_the_engines_mailbox(folder):
    drawn = []

    def say(request):
        for token in ids(LONG):
            drawn.append(token)
            yield token

    async def main():
        engine = FakeEngine(say)
        async with serving(folder, engine) as (_, app):
            driver = Driver(app, body(stream=True))
            task = asyncio.create_task(driver.run())
            await until(lambda: drawn)
            for _ in range(200):
                await asyncio.sleep(0)
            assert len(drawn) <= 3, "the stream read ahead of its client"
            driver.may_send.set()
            await task
            assert joined(chunks(driver.text))[0]["text"] == LONG[: len(joined(chunks(driver.text))[0]["text"])]
            assert len(drawn) > 50

    asyncio.run(main())


# Silence


def test_silence_is_filled_with_comments_also_in_the_queue(folder, monkeypatch):
    monkeypatch.setattr(generation, "HEARTBEAT_S", 0.02)

    async def main():
        engine = FakeEngine(saying("the whale"))
        engine.hold()
        async with serving(folder, engine) as (_, app), listening(app) as url, httpx.AsyncClient(base_url=url) as real:
            request = {"messages": QUESTION, "stream": True}
            async with real.stream("POST", CHAT, json=request) as response:
                assert response.status_code == 200, "the head does not wait for the queue"
                lines = response.aiter_lines()
                first = [await anext(lines) for _ in range(6)]
                assert json.loads(first[0][6:])["choices"][0]["delta"]["role"] == "assistant"
                assert first[1:] == ["", ": keep-alive", "", ": keep-alive", ""]
                engine.let_go()
                rest = [line async for line in lines if line.startswith("data: ")]
            parts = [json.loads(line[6:]) for line in rest[:-1]]
            assert rest[-1] == "data: [DONE]"
            assert "".join(part["choices"][0]["delta"].get("content", "") for part in parts) == "the whale"

    asyncio.run(main())


def test_nothing_but_events_is_written_while_tokens_come(folder, monkeypatch):
    monkeypatch.setattr(generation, "HEARTBEAT_S", 5.0)
    seen = events(ask(folder, COMPLETIONS, body(stream=True), FakeEngine(saying(LONG))).text)
    assert not [event for event in seen if isinstance(event, str) and event.startswith(":")]


# Errors


@WHOLE_OR_STREAM
def test_an_error_before_the_first_byte_has_its_own_status(folder, stream):
    async def main():
        engine = FakeEngine(saying(LONG))
        engine.error_at = (1, "the step ran out of memory")
        async with serving(folder, engine) as (client, _):
            response = await client.post(COMPLETIONS, json=body(stream=stream, n=2))
            assert response.status_code == 500
            assert response.headers["content-type"] == "application/json"
            assert response.json()["error"]["code"] == "engine_error"
            assert "the step ran out of memory" in response.json()["error"]["message"]
            assert engine.open == []
            assert await metric(client, "vllm:request_success_total", finished_reason="error") == 2

    asyncio.run(main())


@pytest.mark.parametrize(
    ("code", "expected"), [(ErrorCode.GRAMMARS_BUSY, (503, "grammars_busy")), (None, (500, "engine_error"))]
)
def test_the_status_follows_the_code_of_the_error_and_not_its_sentence(code, expected):
    error = generation.unfinished(TokenDelta(id=1, finish_reason="error", error="any sentence", code=code))
    assert (error.status, error.code) == expected


def test_an_error_after_the_first_byte_is_an_event_and_then_done(folder):
    def engine():
        made = FakeEngine(saying(LONG))
        made.error_at = (4, "the step ran out of memory")
        return made

    response = ask(folder, COMPLETIONS, body(stream=True), engine())
    assert response.status_code == 200
    *parts, error, done = events(response.text)
    assert done == "[DONE]"
    assert error["error"]["code"] == "engine_error"
    assert joined(parts)[0]["text"] == "the whale;"
    assert joined(parts)[0]["finish_reason"] is None
    assert ask(folder, COMPLETIONS, body(), engine()).status_code == 500


@WHOLE_OR_STREAM
def test_an_engine_that_dies_for_good_is_503(folder, stream):
    async def main():
        engine = FakeEngine(saying(LONG))
        engine.hold()
        async with serving(folder, engine) as (client, _):
            task = asyncio.create_task(client.post(COMPLETIONS, json=body(stream=stream)))
            await until(lambda: engine.open)
            engine.fail(EngineDied("the engine died 4 times"))
            response = await task
            assert response.status_code == 503
            assert int(response.headers["retry-after"]) >= 1
            assert response.json()["error"]["code"] == "engine_died"

    asyncio.run(main())


@WHOLE_OR_STREAM
def test_a_bug_is_a_500_that_tells_nothing(folder, stream):
    def say(request):
        yield from ids("the")
        raise ValueError("the secret")

    response = ask(folder, COMPLETIONS, body(stream=stream), FakeEngine(say, per_delta=9))
    assert response.status_code == 500
    assert "secret" not in response.text
    if stream:
        *_, error, done = events(ask(folder, COMPLETIONS, body(stream=True), FakeEngine(say)).text)
        assert error["error"]["code"] == "internal_error"
        assert "secret" not in json.dumps(error)
        assert done == "[DONE]"


@WHOLE_OR_STREAM
def test_a_bug_while_the_answer_is_written_is_an_error_too(folder, stream):
    async def main():
        engine = FakeEngine(saying(LONG))
        async with serving(folder, engine) as (client, app):

            def broken(token_id):
                raise ValueError("the secret")

            app.state.pequod.model.tokenizer.token_text = broken
            response = await client.post(COMPLETIONS, json=body(stream=stream, logprobs=1))
            assert "secret" not in response.text
            error = events(response.text)[-2] if stream else response.json()
            assert error["error"]["code"] == "internal_error"
            assert engine.open == []
            reason = "error" if stream else "stop"  # whole: all tokens had come before they were written
            assert await metric(client, "vllm:request_success_total", finished_reason=reason) == 1

    asyncio.run(main())


@WHOLE_OR_STREAM
def test_a_server_that_is_stopped_at_once_stops_the_work(folder, stream):
    async def main():
        engine = FakeEngine(saying(LONG), delay=0.01)
        async with serving(folder, engine) as (client, app):
            driver = Driver(app, body(stream=stream))
            driver.may_send.set()
            task = asyncio.create_task(driver.run())
            await until(lambda: engine.status.last_step)
            assert app.state.pequod.limits.tokens.open == len(ids("the sea"))
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            assert engine.open == []
            assert app.state.pequod.limits.open_choices == app.state.pequod.limits.tokens.open == 0
            assert await metric(client, "vllm:request_success_total", finished_reason="abort") == 1

    asyncio.run(main())


@WHOLE_OR_STREAM
def test_a_full_queue_is_refused_before_the_first_byte(folder, stream):
    async def main():
        engine = FakeEngine(saying(LONG))
        engine.hold()
        async with serving(folder, engine, max_num_queued_reqs=1) as (client, _):
            first = asyncio.create_task(client.post(COMPLETIONS, json=body(n=5)))
            await until(lambda: len(engine.open) == 5)
            response = await client.post(COMPLETIONS, json=body(stream=stream))
            assert response.status_code == 503
            assert int(response.headers["retry-after"]) >= 1
            engine.let_go()
            assert (await first).status_code == 200
            assert (await client.post(COMPLETIONS, json=body())).status_code == 200

    asyncio.run(main())


# Time


@WHOLE_OR_STREAM
@pytest.mark.parametrize("by", ["client", "server"])
def test_a_deadline_before_the_first_byte_is_504(folder, stream, by):
    async def main():
        engine = FakeEngine(saying(LONG))
        engine.hold()
        limit = {"request_timeout": 0.05} if by == "server" else {}
        headers = {"X-Deadline-Ms": "50" if by == "client" else "60000"}
        async with serving(folder, engine, **limit) as (client, _):
            response = await client.post(COMPLETIONS, json=body(stream=stream), headers=headers)
            assert response.status_code == 504
            assert response.json()["error"]["code"] == "deadline_exceeded"
            assert engine.open == []
            cause = "timeout" if by == "server" else "deadline"
            assert await metric(client, "pequod:request_aborts_total", cause=cause) == 1

    asyncio.run(main())


def test_a_deadline_after_the_first_byte_is_an_event(folder):
    engine = FakeEngine(saying(LONG), delay=0.02)
    response = ask(folder, COMPLETIONS, body(stream=True), engine, headers={"X-Deadline-Ms": "200"})
    assert response.status_code == 200
    *parts, error, done = events(response.text)
    assert (error["error"]["code"], done) == ("deadline_exceeded", "[DONE]")
    assert joined(parts)[0]["text"]


@pytest.mark.parametrize("value", ["0", "-5", "1.5", "soon", "", "9" * 400, "٣"])
def test_a_bad_deadline_is_refused(folder, value):
    response = ask(folder, COMPLETIONS, body(), headers={"X-Deadline-Ms": value.encode()})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "X-Deadline-Ms"


@WHOLE_OR_STREAM
def test_the_end_of_the_drain_ends_what_still_runs(folder, stream):
    async def main():
        engine = FakeEngine(saying(LONG), delay=0.01)
        async with serving(folder, engine) as (client, app):
            state = app.state.pequod
            task = asyncio.create_task(client.post(COMPLETIONS, json=body(stream=stream)))
            await until(lambda: engine.status.last_step)
            state.begin_drain()
            assert not await state.drained(0.05)
            response = await task
            assert engine.open == []
            if stream:
                *parts, error, done = events(response.text)
                assert (error["error"]["code"], done) == ("draining", "[DONE]")
                assert joined(parts)[0]["text"]
            else:
                assert response.status_code == 503
            assert await metric(client, "pequod:request_aborts_total", cause="drain") == 1

    asyncio.run(main())


def test_a_drain_lets_short_answers_end(folder):
    async def main():
        engine = FakeEngine(saying("the whale"), delay=0.01)
        async with serving(folder, engine) as (client, app):
            task = asyncio.create_task(client.post(COMPLETIONS, json=body(stream=True)))
            await until(lambda: engine.open)
            app.state.pequod.begin_drain()
            assert await app.state.pequod.drained(10)
            assert joined(chunks((await task).text))[0]["text"] == "the whale"
            assert (await client.post(COMPLETIONS, json=body())).status_code == 503

    asyncio.run(main())


# Several choices


def test_choices_come_side_by_side_and_one_that_fails_ends_all(folder):
    async def main():
        engine = FakeEngine(saying(LONG), info=replace(INFO, max_seqs=3))
        async with serving(folder, engine) as (client, _):
            text = (await client.post(COMPLETIONS, json=body(n=3, stream=True))).text
            order = [part["choices"][0]["index"] for part in chunks(text)]
            assert set(order[:6]) == {0, 1, 2}
            engine.error_at = (5, "gone")
            text = (await client.post(COMPLETIONS, json=body(n=3, stream=True))).text
            assert events(text)[-2]["error"]["code"] == "engine_error"
            assert engine.open == []

    asyncio.run(main())


def test_tasks_do_not_outlive_their_request(folder):
    async def main():
        engine = FakeEngine(saying("the whale"))
        async with serving(folder, engine) as (client, _):
            before = len(asyncio.all_tasks())
            for stream in (False, True):
                await client.post(COMPLETIONS, json=body(n=4, stream=stream, stop="wh"))
            with contextlib.suppress(TimeoutError):
                await until(lambda: len(asyncio.all_tasks()) == before, seconds=2)
            assert len(asyncio.all_tasks()) == before

    asyncio.run(main())


def test_the_time_to_the_first_token_counts_from_the_requests_arrival(folder):
    async def main():
        engine = FakeEngine(saying("the whale"))
        async with serving(folder, engine) as (client, app):
            prompts = app.state.pequod.model.prompts
            encode = prompts.encode

            async def slow(*args: Any, **kwargs: Any) -> list[int]:
                await asyncio.sleep(0.05)
                return await encode(*args, **kwargs)

            prompts.encode = slow
            began = time.monotonic()
            await client.post(COMPLETIONS, json=body())
            told = await metric(client, "vllm:time_to_first_token_seconds_sum")
            assert 0.05 <= told <= time.monotonic() - began

    asyncio.run(main())
