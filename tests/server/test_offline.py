"""LLM: the built-in model in this process, and the transport that its requests take."""

from __future__ import annotations

import asyncio
import copy
import gc
import logging
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import Future
from typing import Any

import httpx
import numpy as np
import pytest

import pequod
from pequod import LLM, APIError, ModelError, SettingsError
from server.generation import http_response
from server.http.in_process import InProcess
from tests.live import WAIT_S, alive, eventually

QUESTION = "What is continuous batching?"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_model_len=512, max_num_seqs=4) as llm:
        yield llm


def test_a_chat_is_answered_whole_and_as_a_stream_alike(llm: LLM) -> None:
    output = llm.chat(QUESTION, temperature=0)
    assert "batch" in output.text
    assert str(output) == output.text
    assert (output.finish_reason, output.tool_calls) == ("stop", [])
    assert output.completion_tokens == output.response["usage"]["completion_tokens"] > 5
    conversation = [{"role": "user", "content": QUESTION}]
    stream = llm.chat(conversation, temperature=0, stream=True)
    # In as many pieces as there was time for: tokens that are ready while a reader is busy are one piece.
    assert next(stream) + "".join(stream) == output.text


def test_a_batch_larger_than_the_queue_keeps_its_order(llm: LLM) -> None:
    prompts = [f"Number {number}:" for number in range(400)]  # of which 256 can wait in a server's queue
    outputs = llm.generate(prompts, max_tokens=2, temperature=0)
    assert [each.prompt_tokens for each in outputs] == [len(tokens(llm, prompt)) for prompt in prompts]
    assert outputs[17].text == llm.generate(prompts[17], max_tokens=2, temperature=0).text
    assert llm.generate([], max_tokens=2) == []


def tokens(llm: LLM, prompt: str) -> list[int]:
    body = llm.generate(prompt, max_tokens=1, return_token_ids=True).response
    return body["choices"][0]["prompt_token_ids"]


def test_prompts_may_be_token_ids(llm: LLM) -> None:
    ids = tokens(llm, "Once upon a time")
    one = llm.generate(ids, max_tokens=4, temperature=0)
    assert one.text == llm.generate("Once upon a time", max_tokens=4, temperature=0).text
    assert [each.text for each in llm.generate([ids, ids], max_tokens=4, temperature=0)] == [one.text] * 2


def test_token_ids_may_be_integers_and_arrays_of_numpy(llm: LLM) -> None:
    ids = tokens(llm, "Once upon a time")
    text = llm.generate(ids, max_tokens=4, temperature=0).text
    for prompt in (tuple(ids), np.array(ids), [np.int32(each) for each in ids]):
        assert llm.generate(prompt, max_tokens=4, temperature=0).text == text
    assert [each.text for each in llm.generate(np.array([ids, ids]), max_tokens=4, temperature=0)] == [text] * 2


def test_a_single_message_is_a_conversation(llm: LLM) -> None:
    output = llm.chat({"role": "user", "content": QUESTION}, temperature=0)
    assert output.text == llm.chat(QUESTION, temperature=0).text


@pytest.mark.parametrize("value", [None, 5, b"text"])
def test_what_is_neither_text_nor_list_is_refused_with_a_sentence(llm: LLM, value: Any) -> None:
    with pytest.raises(TypeError, match=r"a conversation is a text or a list of messages, .* not"):
        llm.chat(value)
    with pytest.raises(TypeError, match=r"a prompt is a text or a list of token ids, .* not"):
        llm.generate(value)
    with pytest.raises(TypeError, match="token ids are integers, not float"):
        llm.generate([1, 2.5])


def test_every_field_of_the_api_takes_effect(llm: LLM) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 9}}, "required": ["a"]}
    format = {"type": "json_schema", "json_schema": {"name": "a", "schema": {**schema, "additionalProperties": False}}}
    output = llm.chat("A number", response_format=format, max_tokens=40, n=2)
    assert output.text.replace(" ", "").replace("\n", "")[:5] == '{"a":'
    assert len(output.response["choices"]) == 2


def test_a_refused_request_says_what_is_wrong(llm: LLM) -> None:
    for stream in (False, True):
        with pytest.raises(APIError, match="temperature") as refused:
            list(llm.chat(QUESTION, temperature=9, stream=stream))
        assert (refused.value.status, refused.value.param) == (400, "temperature")
    with pytest.raises(APIError):
        llm.generate(["a", [10**9]], max_tokens=1)
    with pytest.raises(ValueError, match="one request"):
        llm.generate(["a", "b"], stream=True)
    with pytest.raises(ValueError, match="n must be 1"):
        llm.generate("a", n=2, stream=True)
    assert llm.generate("a", max_tokens=1).completion_tokens == 1


def test_an_error_is_the_same_in_the_parent_of_a_worker_process(llm: LLM) -> None:
    with pytest.raises(APIError) as refused:
        llm.chat(QUESTION, temperature=9)
    for error in (pickle.loads(pickle.dumps(refused.value)), copy.copy(refused.value)):
        assert (type(error), str(error)) == (APIError, str(refused.value))
        assert (error.status, error.code, error.param) == (400, "invalid_value", "temperature")


def test_a_stream_may_be_read_slowly_and_is_whole(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_response, "WRITE_TIMEOUT_S", 0.05)
    options: dict[str, Any] = {"max_tokens": 300, "ignore_eos": True, "temperature": 0}
    text = ""
    for piece in llm.generate("The sea", stream=True, **options):
        if not text:
            time.sleep(0.5)  # meanwhile the queue of the transport is full
        text += piece
    assert text == llm.generate("The sea", **options).text


def test_who_stops_reading_ends_the_request(llm: LLM) -> None:
    for _ in range(12):  # three times as many as run at once: each would take all of the context
        pieces = llm.generate("a", max_tokens=500, ignore_eos=True, stream=True)
        next(pieces)
        pieces.close()
    state = llm._session.state

    async def idle() -> None:
        async with asyncio.timeout(30):
            while state.limits.open_choices:
                await asyncio.sleep(0.01)

    llm._session.call(idle())
    assert state.limits.open_choices == 0


def test_streams_that_are_open_and_paused_hold_up_no_other_call_of_their_thread(llm: LLM) -> None:
    options: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True, "temperature": 0}
    streams = [llm.generate("a", stream=True, **options) for _ in range(12)]  # three times as many as run at once
    firsts = within(30, lambda: [next(stream) for stream in streams])
    text = within(30, lambda: llm.generate("a", **options).text)
    assert [first + "".join(rest) for first, rest in zip(firsts, streams, strict=True)] == [text] * 12


def test_an_open_stream_may_be_collected_as_garbage_on_the_thread_of_the_llm(llm: LLM) -> None:
    holder: dict[str, Any] = {"stream": llm.generate("a", stream=True, max_tokens=400, ignore_eos=True)}
    holder["self"] = holder
    next(holder["stream"])
    gc.disable()
    del holder

    async def collect() -> None:
        gc.collect()

    try:
        within(30, lambda: llm._session.call(collect()))
    finally:
        gc.enable()
    assert within(30, lambda: llm.generate("a", max_tokens=1)).completion_tokens == 1


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Let SIGINT raise KeyboardInterrupt, also where the tests run in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_ends_a_stream_with_keyboard_interrupt(llm: LLM) -> None:
    main = threading.main_thread().ident
    assert main is not None
    ended = []

    async def pieces() -> AsyncGenerator[str]:
        yield "one"
        try:
            signal.pthread_kill(main, signal.SIGINT)
            await asyncio.Event().wait()
        finally:
            for _ in range(9):  # like the end of a request, it takes longer than one round of the event loop
                await asyncio.sleep(0)
            ended.append(True)

    stream = llm._session.iterate(pieces())
    assert next(stream) == "one"
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    assert ended == [True], "only then is the caller free to send the next request"
    assert list(stream) == []


def test_a_stream_keeps_its_llm_open() -> None:
    before = threading.enumerate()
    text = "".join(LLM().chat("What is 7 + 5?", temperature=0, stream=True))
    assert "12" in text
    assert not [each for each in threading.enumerate() if each.name == "pequod" and each not in before], "it is closed"


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_while_it_is_closed_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(threading.enumerate())
    llm = LLM()
    main = threading.main_thread().ident
    assert main is not None
    shut_down = llm._session._shut_down

    async def interrupted() -> None:
        signal.pthread_kill(main, signal.SIGINT)
        await asyncio.sleep(0.1)  # the caller has gone
        await shut_down()

    monkeypatch.setattr(llm._session, "_shut_down", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(WAIT_S)
        assert not thread.is_alive(), thread.name
    assert llm._session._loop.is_closed()


def test_close_ends_the_calls_of_other_threads_and_unread_streams(caplog: pytest.LogCaptureFixture) -> None:
    llm = LLM()
    is_waiting = threading.Event()

    async def wait() -> None:
        is_waiting.set()
        await asyncio.Event().wait()

    def generate() -> None:
        while True:
            llm.generate("a", max_tokens=2)

    streams = [llm.generate("a", max_tokens=400, ignore_eos=True, stream=True) for _ in range(5)]
    for stream in streams:
        next(stream)
    calls = [started(lambda: llm._session.call(wait())), *[started(generate) for _ in range(4)]]
    assert is_waiting.wait(60)
    within(60, llm.close)
    for call in calls:
        assert str(call.exception(60)) == "this LLM is closed"
    for stream in streams:
        with pytest.raises(RuntimeError, match="closed"):
            list(stream)
    del streams, stream
    gc.collect()
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


def within(seconds: float, work: Callable[[], Any]) -> Any:
    """Run work in a thread and return its result; a TimeoutError instead of waiting for ever."""
    return started(work).result(seconds)


def started(work: Callable[[], Any]) -> Future[Any]:
    """Run work in a thread."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"model": "/nowhere/model"}, ModelError, "no folder"),
        ({"model": "nobody/nothing", "local_files_only": True}, ModelError, "--local-files-only is set"),
        ({"max_num_seqs": -1}, SettingsError, "at least 1"),
        ({"max_modle_len": 10}, SettingsError, "did you mean max_model_len"),
        ({"port": 8000}, SettingsError, "no option port"),
    ],
)
def test_wrong_options_are_refused_in_one_sentence(options, error, text) -> None:
    with pytest.raises(error, match=text):
        LLM(**options)


def test_settings_of_a_server_on_the_same_machine_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEQUOD_ALLOWED_HOSTS", "example.org")
    monkeypatch.setenv("PEQUOD_API_KEY", "secret")
    with LLM() as llm:
        assert llm.generate("a", max_tokens=1).completion_tokens == 1
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        llm.chat(QUESTION)


def test_the_example_in_the_packages_docstring_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert pequod.__doc__ is not None
    exec(pequod.__doc__.split("\n", 1)[1], {})
    assert "12" in capsys.readouterr().out


PROGRAM = """
from pequod import LLM
llm = LLM()
print(llm.generate("a", max_tokens=1).completion_tokens, llm._session.state.engine.pid)
"""


def test_a_program_that_closes_nothing_ends_and_leaves_no_process() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=240, check=True)
    count, pid = done.stdout.split()
    assert (count, done.stderr) == ("1", "")
    eventually(lambda: not alive(int(pid)))


@pytest.mark.parametrize("end", ["", "raise ValueError('a bug')"])
def test_a_program_ends_while_a_stream_is_unfinished(end: str) -> None:
    lines = ["from pequod import LLM", "llm = LLM()", "stream = llm.generate('a', stream=True)", "next(stream)", end]
    command = [sys.executable, "-c", "\n".join(lines)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    last = done.stderr.splitlines()[-1:]
    assert (done.returncode, last) == ((1, ["ValueError: a bug"]) if end else (0, []))


FORKED = """
import os, sys
from pequod import LLM

with LLM() as llm:
    stream = llm.generate("a", max_tokens=30, ignore_eos=True, temperature=0, stream=True)
    first = next(stream)
    child = os.fork()
    if not child:
        for work in (lambda: llm.chat("a"), lambda: next(stream)):
            try:
                work()
            except RuntimeError as error:
                print(error, flush=True)
        sys.exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    print(first + "".join(stream) == llm.generate("a", max_tokens=30, ignore_eos=True, temperature=0).text)
"""


def test_a_forked_process_is_refused_and_does_not_disturb_its_parent() -> None:
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=240, check=False)
    refusal = "this LLM belongs to the process that was forked; load another one in this process"
    assert done.stdout.splitlines() == [refusal, refusal, "True"], done.stderr


# The transport


async def ask(app, work):
    async with httpx.AsyncClient(transport=InProcess(app), base_url="http://localhost") as client:
        return await work(client)


async def start(send):
    await send({"type": "http.response.start", "status": 200, "headers": [(b"a", b"b")]})


async def test_a_piece_is_read_before_the_next_one_is_sent():
    is_read = asyncio.Event()

    async def app(scope, receive, send):
        assert (scope["path"], scope["query_string"], scope["method"]) == ("/x", b"q=1", "POST")
        assert (await receive())["body"] == b"body"
        await start(send)
        await send({"type": "http.response.body", "body": b"one", "more_body": True})
        await is_read.wait()
        await send({"type": "http.response.body", "body": b"two"})

    async def work(client):
        async with client.stream("POST", "/x?q=1", content=b"body") as response:
            pieces = response.aiter_raw()
            assert (response.headers["a"], await anext(pieces)) == ("b", b"one")
            is_read.set()
            return [piece async for piece in pieces]

    assert await ask(app, work) == [b"two"]


async def test_an_app_learns_that_its_client_has_gone():
    seen = []

    async def app(scope, receive, send):
        await receive()
        await start(send)
        for _ in range(100):  # more than wait for a reader
            await send({"type": "http.response.body", "body": b"piece", "more_body": True})
        seen.append((await receive())["type"])

    async def work(client):
        async with client.stream("GET", "/") as response:
            await anext(response.aiter_raw())

    await ask(app, work)
    assert seen == ["http.disconnect"]


async def test_a_closed_client_disconnects_from_the_responses_that_nobody_reads():
    seen = []

    async def app(scope, receive, send):
        await receive()
        await start(send)
        await send({"type": "http.response.body", "body": b"piece", "more_body": True})
        seen.append((await receive())["type"])

    async def work(client):
        return await client.send(client.build_request("GET", "/"), stream=True)

    unread = await ask(app, work)
    assert (unread.status_code, seen) == (200, ["http.disconnect"])


@pytest.mark.parametrize("begins", [False, True])
async def test_an_exception_of_the_app_reaches_the_caller(begins):
    async def app(scope, receive, send):
        if begins:
            await start(send)
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        await ask(app, lambda client: client.get("/"))


async def test_an_app_without_a_response_is_an_error():
    async def app(scope, receive, send):
        pass

    with pytest.raises(httpx.RemoteProtocolError, match="no response"):
        await ask(app, lambda client: client.get("/"))
