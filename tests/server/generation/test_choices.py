"""Choices: disconnects, silence, errors before and after the first byte, deadlines, the drain."""

import asyncio
import contextlib
import json
import time
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from engine import EngineDied, ErrorCode, TokenDelta
from server.generation import choices, http_response
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
    """Return the sum of a metric's samples that have these labels."""
    total = 0.0
    for line in (await client.get("/metrics")).text.splitlines():
        head, _, value = line.rpartition(" ")
        if head.partition("{")[0] == name and all(f'{k}="{v}"' in head for k, v in labels.items()):
            total += float(value)
    return total


async def send_request(url: str, sent: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a POST over a bare socket, so that the test decides when to disconnect."""
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    raw = json.dumps(sent).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
    return reader, writer


# Disconnects and other ends of the work


@WHOLE_OR_STREAM
@pytest.mark.parametrize("n", [1, 3])
async def test_disconnect_aborts_the_engine_requests(folder, stream, n):
    engine = FakeEngine(saying(LONG), delay=0.01)
    async with serving(folder, engine) as (client, app), listening(app) as url:
        reader, writer = await send_request(url, body(n=n, stream=stream))
        if stream:
            await reader.readuntil(b"data: ")
        await until(lambda: len(engine.open) == n)
        writer.close()
        await until(lambda: not engine.open)
        assert sorted(engine.aborted) == [request.id for request in engine.requests]
        await until(lambda: app.state.pequod.limits.open_choices == 0)
        assert await metric(client, "pequod:request_aborts_total", cause="disconnect") == 1
        assert await metric(client, "vllm:request_success_total", finished_reason="abort") == n
        if stream:  # a token has come, and with it the time in the queue
            assert await metric(client, "vllm:request_queue_time_seconds_count") >= 1


async def test_disconnect_aborts_queued_engine_requests(folder):
    engine = FakeEngine(saying(LONG))
    engine.hold()
    async with serving(folder, engine) as (_, app), listening(app) as url:
        _, writer = await send_request(url, body(n=8, stream=True))
        await until(lambda: len(engine.open) == 8)
        writer.close()
        await until(lambda: not engine.open)


async def test_complete_response_aborts_nothing(folder):
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


@WHOLE_OR_STREAM
async def test_stop_string_aborts_the_engine_request(folder, stream):
    engine = FakeEngine(saying(LONG))
    async with serving(folder, engine) as (client, _):
        response = await client.post(COMPLETIONS, json=body(stop="whale", stream=stream))
        assert response.status_code == 200
        assert engine.aborted == [engine.requests[0].id]
        assert await metric(client, "vllm:request_success_total", finished_reason="stop") == 1
        assert await metric(client, "pequod:request_aborts_total") == 0
        assert await metric(client, "vllm:generation_tokens_total") == 2


class Careless(FakeEngine):
    """An engine that generates until it is told to abort, even if its tokens are no longer read."""

    async def generate(self, request):
        self.requests.append(request)
        for token in self.say(request):
            await asyncio.sleep(0.001)
            yield TokenDelta(id=request.id, token_ids=(token,))

    def abort(self, request_id):
        self.aborted.append(request_id)


@WHOLE_OR_STREAM
@pytest.mark.parametrize("way", ["stop string", "disconnect", "deadline"])
async def test_engine_request_is_aborted_however_the_response_ends(folder, way, stream, expire):
    engine = Careless(saying(LONG * 20))
    async with serving(folder, engine, request_timeout=60) as (client, app), listening(app) as url:
        if way == "disconnect":
            _, writer = await send_request(url, body(stream=stream))
            await until(lambda: engine.requests)
            writer.close()
        elif way == "deadline":
            task = asyncio.create_task(client.post(COMPLETIONS, json=body(stream=stream)))
            await until(lambda: engine.requests)
            expire()
            await task
        else:
            await client.post(COMPLETIONS, json=body(stream=stream, stop="whale"))
        await until(lambda: engine.aborted)
        assert engine.aborted == [engine.requests[0].id]


class Driver:
    """Passes one request to the app, with a `send` that the test controls."""

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
async def test_client_that_does_not_read_is_aborted(folder, stream, monkeypatch):
    monkeypatch.setattr(http_response, "WRITE_TIMEOUT_S", 0.05)
    engine = FakeEngine(saying(LONG), delay=0.01)
    async with serving(folder, engine) as (client, app):
        await asyncio.wait_for(Driver(app, body(stream=stream)).run(), WAIT_S)
        assert engine.open == []
        assert app.state.pequod.limits.open_choices == 0
        if stream:
            assert engine.aborted
            assert await metric(client, "pequod:request_aborts_total", cause="slow_reader") == 1


async def test_deadline_aborts_while_the_client_does_not_read(folder, expire):
    engine = FakeEngine(saying(LONG), delay=0.01)
    steps = []
    engine.on_step.append(steps.append)
    async with serving(folder, engine, request_timeout=60) as (_, app):
        driver = Driver(app, body(stream=True))
        task = asyncio.create_task(driver.run())
        await until(lambda: len(steps) > 6)
        assert engine.open
        expire()
        await until(lambda: not engine.open)
        assert not task.done()
        driver.may_send.set()
        await task
        seen = events(driver.text)
        assert seen[-2]["error"]["code"] == "deadline_exceeded"
        text = "".join(event["choices"][0]["text"] for event in seen[:-2])
        assert len(ids(text)) > 5 and LONG.startswith(text), "what had come by then is not sent"


async def test_an_error_of_one_choice_loses_no_text_of_the_others(folder):
    begun, has_failed = [], asyncio.Event()

    class Failing(FakeEngine):
        async def generate(self, request):
            begun.append(request)
            is_first = request is begun[0]
            if not is_first:
                await has_failed.wait()
            async for delta in super().generate(request):
                yield delta
                if is_first:
                    await asyncio.sleep(0.05)  # the first token is being sent
                    yield TokenDelta(id=request.id, finish_reason="error", error="out of memory")
                    has_failed.set()
                    return

    engine = Failing(saying("the whale"))
    async with serving(folder, engine) as (_, app):
        driver = Driver(app, body(stream=True, n=2))
        task = asyncio.create_task(driver.run())
        await until(lambda: len(engine.requests) == 2 and not engine.open)
        driver.may_send.set()
        await task
        seen = events(driver.text)
        assert "out of memory" in seen[-2]["error"]["message"]
        assert "".join(c["text"] for event in seen[:-2] for c in event["choices"] if c["index"] == 1) == "the whale"


async def test_connection_that_breaks_during_a_write_aborts(folder):
    engine = FakeEngine(saying(LONG), delay=0.01)
    async with serving(folder, engine) as (client, app):
        driver = Driver(app, body(stream=True))
        driver.error = OSError("broken pipe")
        driver.may_send.set()
        await driver.run()
        assert engine.open == []
        assert await metric(client, "pequod:request_aborts_total", cause="disconnect") == 1


async def test_what_a_slow_reader_has_left_unread_comes_in_one_event(folder):
    engine = FakeEngine(saying(LONG))
    async with serving(folder, engine) as (_, app):
        driver = Driver(app, body(stream=True))
        task = asyncio.create_task(driver.run())
        await until(lambda: engine.requests and not engine.open)
        driver.may_send.set()
        await task
        sent = [chunk["choices"][0] for chunk in chunks(driver.text)]
        first, rest, end = sent
        assert (len(ids(first["text"])), end["text"], end["finish_reason"]) == (1, "", "stop")
        assert first["text"] + rest["text"] == LONG


# Silence


async def test_comments_are_sent_during_silence_and_while_queued(folder, monkeypatch):
    monkeypatch.setattr(choices, "HEARTBEAT_S", 0.02)
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


async def test_comments_are_sent_while_tokens_arrive_of_which_nothing_is_told(folder, monkeypatch):
    monkeypatch.setattr(choices, "HEARTBEAT_S", 0.02)
    engine = FakeEngine(saying("<think>" + LONG + "</think>the sea"), delay=0.005)
    request = {"messages": QUESTION, "stream": True, "include_reasoning": False, "max_tokens": 400}
    async with serving(folder, engine, reasoning_parser="think") as (client, _):
        text = (await client.post(CHAT, json=request)).text
    assert text.count(": keep-alive") > 5
    told = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in told) == "the sea"


async def test_no_comments_are_sent_while_tokens_arrive(folder, monkeypatch):
    monkeypatch.setattr(choices, "HEARTBEAT_S", 5.0)
    seen = events((await ask(folder, COMPLETIONS, body(stream=True), FakeEngine(saying(LONG)))).text)
    assert not [event for event in seen if isinstance(event, str) and event.startswith(":")]


# Errors


@WHOLE_OR_STREAM
async def test_error_before_the_first_byte_has_its_own_status(folder, stream):
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


@pytest.mark.parametrize(
    ("code", "expected"), [(ErrorCode.GRAMMARS_BUSY, (503, "grammars_busy")), (None, (500, "engine_error"))]
)
def test_status_depends_on_the_code_of_the_error_and_not_on_its_text(code, expected):
    error = choices.unfinished(TokenDelta(id=1, finish_reason="error", error="any sentence", code=code))
    assert (error.status, error.code) == expected


async def test_error_after_the_first_byte_is_an_event_before_done(folder):
    def engine():
        made = FakeEngine(saying(LONG))
        made.error_at = (4, "the step ran out of memory")
        return made

    response = await ask(folder, COMPLETIONS, body(stream=True), engine())
    assert response.status_code == 200
    *parts, error, done = events(response.text)
    assert done == "[DONE]"
    assert error["error"]["code"] == "engine_error"
    assert joined(parts)[0]["text"] == "the whale;"
    assert joined(parts)[0]["finish_reason"] is None
    assert (await ask(folder, COMPLETIONS, body(), engine())).status_code == 500


@WHOLE_OR_STREAM
async def test_engine_that_cannot_be_restarted_is_a_503(folder, stream):
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


@WHOLE_OR_STREAM
async def test_bug_is_a_500_without_details(folder, stream):
    def say(request):
        yield from ids("the")
        raise ValueError("the secret")

    response = await ask(folder, COMPLETIONS, body(stream=stream), FakeEngine(say, per_delta=9))
    assert response.status_code == 500
    assert "secret" not in response.text
    if stream:
        *_, error, done = events((await ask(folder, COMPLETIONS, body(stream=True), FakeEngine(say))).text)
        assert error["error"]["code"] == "internal_error"
        assert "secret" not in json.dumps(error)
        assert done == "[DONE]"


@WHOLE_OR_STREAM
async def test_bug_while_the_response_is_encoded_is_an_internal_error(folder, stream):
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
        reason = "error" if stream else "stop"  # whole: all tokens had arrived before they were encoded
        assert await metric(client, "vllm:request_success_total", finished_reason=reason) == 1


@WHOLE_OR_STREAM
async def test_cancelled_request_is_aborted_and_released(folder, stream):
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


@WHOLE_OR_STREAM
async def test_full_queue_is_a_503_before_the_first_byte(folder, stream):
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


# Time


@WHOLE_OR_STREAM
@pytest.mark.parametrize("by", ["client", "server"])
async def test_deadline_before_the_first_byte_is_a_504(folder, stream, by, expire):
    engine = FakeEngine(saying(LONG))
    engine.hold()
    own, other = 60, 3600
    limit = {"request_timeout": own if by == "server" else other}
    headers = {"X-Deadline-Ms": f"{own if by == 'client' else other}000"}
    async with serving(folder, engine, **limit) as (client, _):
        task = asyncio.create_task(client.post(COMPLETIONS, json=body(stream=stream), headers=headers))
        await until(lambda: engine.open)
        expire()
        response = await task
        assert response.status_code == 504
        assert response.json()["error"]["code"] == "deadline_exceeded"
        assert engine.open == []
        cause = "timeout" if by == "server" else "deadline"
        assert await metric(client, "pequod:request_aborts_total", cause=cause) == 1


@WHOLE_OR_STREAM
async def test_deadline_that_passes_while_the_prompt_is_encoded_is_a_504(folder, stream):
    engine = FakeEngine(saying(LONG))
    async with serving(folder, engine) as (client, app):

        async def endless(*args: Any, **kwargs: Any) -> None:
            await asyncio.Event().wait()

        app.state.pequod.model.prompts.encode = endless
        response = await client.post(COMPLETIONS, json=body(stream=stream), headers={"X-Deadline-Ms": "20"})
        assert response.status_code == 504
        assert response.json()["error"]["code"] == "deadline_exceeded"
        assert engine.requests == []


async def test_deadline_after_the_first_byte_is_an_event(folder, expire):
    engine = FakeEngine(saying(LONG), delay=0.01)
    async with serving(folder, engine) as (client, _):
        headers = {"X-Deadline-Ms": "60000"}
        task = asyncio.create_task(client.post(COMPLETIONS, json=body(stream=True), headers=headers))
        await until(lambda: engine.status.last_step)
        expire()
        response = await task
    assert response.status_code == 200
    *parts, error, done = events(response.text)
    assert (error["error"]["code"], done) == ("deadline_exceeded", "[DONE]")
    assert joined(parts)[0]["text"]


@pytest.mark.parametrize("value", ["0", "-5", "1.5", "soon", "", "9" * 400, "٣"])
async def test_invalid_deadline_is_refused(folder, value):
    response = await ask(folder, COMPLETIONS, body(), headers={"X-Deadline-Ms": value.encode()})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "X-Deadline-Ms"


@WHOLE_OR_STREAM
async def test_end_of_the_drain_ends_running_requests(folder, stream):
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


async def test_short_responses_end_during_the_drain(folder):
    engine = FakeEngine(saying("the whale"), delay=0.01)
    async with serving(folder, engine) as (client, app):
        task = asyncio.create_task(client.post(COMPLETIONS, json=body(stream=True)))
        await until(lambda: engine.open)
        app.state.pequod.begin_drain()
        assert await app.state.pequod.drained(10)
        assert joined(chunks((await task).text))[0]["text"] == "the whale"
        assert (await client.post(COMPLETIONS, json=body())).status_code == 503


# Several choices


async def test_choices_run_concurrently_and_an_error_ends_all(folder):
    engine = FakeEngine(saying(LONG), info=replace(INFO, max_seqs=3))
    async with serving(folder, engine) as (client, _):
        text = (await client.post(COMPLETIONS, json=body(n=3, stream=True))).text
        order = [part["choices"][0]["index"] for part in chunks(text)]
        assert set(order[:6]) == {0, 1, 2}
        engine.error_at = (5, "gone")
        text = (await client.post(COMPLETIONS, json=body(n=3, stream=True))).text
        assert events(text)[-2]["error"]["code"] == "engine_error"
        assert engine.open == []


async def test_tasks_do_not_outlive_their_request(folder):
    engine = FakeEngine(saying("the whale"))
    async with serving(folder, engine) as (client, _):
        before = len(asyncio.all_tasks())
        for stream in (False, True):
            await client.post(COMPLETIONS, json=body(n=4, stream=stream, stop="wh"))
        await until(lambda: len(asyncio.all_tasks()) == before)


async def test_time_to_first_token_begins_when_the_request_arrives(folder):
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
        ttft_s = await metric(client, "vllm:time_to_first_token_seconds_sum")
        assert 0.05 <= ttft_s <= time.monotonic() - began
