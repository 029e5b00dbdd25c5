"""Work before a response exists ends when its client hangs up, and large texts hold nobody else up."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import pytest
from starlette.requests import ClientDisconnect

from server.http.disconnect import SOON_S, while_connected
from server.tokenization import encoder as prompts_module
from server.tokenization.encoder import MAX_TOKENS, ORDINARY, Prompts, TextTooLong
from server.tokenization.split import MAX_UNCOUNTED, SLICE
from server.tokenization.tokenizer import Tokenizer
from server.tokenization.worker_thread import NativePanic
from tests.fakes import FakeEngine, listening, model_folder, serving, until
from tests.live import WAIT_S
from tests.server.wire import COMPLETIONS


def request(hangs_up: asyncio.Event) -> SimpleNamespace:
    async def receive() -> dict:
        await hangs_up.wait()
        return {"type": "http.disconnect"}

    return SimpleNamespace(receive=receive)


async def test_work_that_ends_gives_its_result_and_its_error():
    gone = asyncio.Event()

    async def works(seconds: float) -> str:
        await asyncio.sleep(seconds)
        return "done"

    async def fails() -> None:
        await asyncio.sleep(2 * SOON_S)
        raise ValueError("as it is")

    before = asyncio.all_tasks()
    assert await while_connected(request(gone), works(0)) == "done"
    assert await while_connected(request(gone), works(2 * SOON_S)) == "done"
    with pytest.raises(ValueError, match="as it is"):
        await while_connected(request(gone), fails())
    assert asyncio.all_tasks() == before, "a watch goes on"


async def test_work_for_a_client_that_hangs_up_is_cancelled():
    gone, cancelled = asyncio.Event(), []

    async def works() -> None:
        try:
            await asyncio.sleep(WAIT_S)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    asyncio.get_running_loop().call_later(3 * SOON_S, gone.set)
    with pytest.raises(ClientDisconnect):
        await while_connected(request(gone), works())
    assert cancelled


async def test_a_cancelled_waiter_leaves_no_work():
    before = asyncio.all_tasks()
    waiting = asyncio.create_task(while_connected(request(asyncio.Event()), asyncio.sleep(WAIT_S)))
    await asyncio.sleep(2 * SOON_S)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert asyncio.all_tasks() == before


class Gate:
    """Encoding of large texts waits for each piece."""

    def __init__(self, monkeypatch) -> None:
        self.begun, self.go, self.pieces = threading.Event(), threading.Event(), 0
        encode_long = Tokenizer.encode_long

        def slowly(tokenizer, text, add_special, check):
            def check_later(num_tokens):
                self.begun.set()
                assert self.go.wait(WAIT_S)
                self.pieces += 1
                check(num_tokens)

            return encode_long(tokenizer, text, add_special, check_later)

        monkeypatch.setattr(Tokenizer, "encode_long", slowly)


LARGE = "the sea " * (ORDINARY // 4)


async def test_a_large_text_holds_up_no_ordinary_one(made, monkeypatch):
    gate = Gate(monkeypatch)
    prompts = Prompts(made("byte level"))
    large = asyncio.create_task(prompts.encode(LARGE))
    await asyncio.to_thread(gate.begun.wait, WAIT_S)
    assert await asyncio.wait_for(prompts.encode("the sea"), WAIT_S)
    assert not large.done()
    gate.go.set()
    assert await large == prompts.tokenizer.encode(LARGE)
    prompts.close()


async def test_a_large_text_is_encoded_no_further_than_the_context_goes(made, monkeypatch):
    monkeypatch.setattr(prompts_module, "ORDINARY", 1000)
    gate = Gate(monkeypatch)
    gate.go.set()
    prompts = Prompts(made("byte level"), max_len=2000)
    text = "the sea " * 60_000
    monkeypatch.setattr(Prompts, "max_characters", lambda *_: 10**9)
    with pytest.raises(TextTooLong, match=r"maximum context length is 2000 tokens .*, and the prompt has more"):
        await prompts.encode(text)
    assert gate.pieces < 5
    assert len(await prompts.encode(text, fits=False)) > 100_000
    with pytest.raises(TextTooLong):
        await prompts.encode_with_offsets(text)
    prompts.close()


@pytest.fixture
def encoded(monkeypatch) -> list[int]:
    """The sizes of all texts that are encoded in one call."""
    sizes: list[int] = []
    encode = Tokenizer.encode

    def noting(tokenizer, text, add_special=True):
        sizes.append(len(text))
        return encode(tokenizer, text, add_special)

    monkeypatch.setattr(Tokenizer, "encode", noting)
    return sizes


WITHOUT_BOUNDARIES = "日本" * MAX_UNCOUNTED


async def test_a_text_without_boundaries_is_counted_in_slices_before_it_is_encoded_in_one_call(made, encoded):
    prompts = Prompts(made("byte level"), max_len=4 * SLICE)
    with pytest.raises(TextTooLong, match="and the prompt has more"):
        await prompts.encode(WITHOUT_BOUNDARIES)
    assert max(encoded) == SLICE
    assert encoded.count(SLICE) < 4
    with pytest.raises(TextTooLong, match=f"and the prompt has more than {MAX_TOKENS}"):
        await prompts.encode(WITHOUT_BOUNDARIES, fits=False)
    assert max(encoded) == SLICE
    prompts.max_len = 10**9
    assert await prompts.encode(WITHOUT_BOUNDARIES) == prompts.tokenizer.encode(WITHOUT_BOUNDARIES)
    prompts.close()


async def test_a_text_without_boundaries_is_not_encoded_once_its_client_is_gone(made, monkeypatch, encoded):
    gate = Gate(monkeypatch)
    prompts = Prompts(made("byte level"), max_len=10**9)
    abandoned = asyncio.create_task(prompts.encode(WITHOUT_BOUNDARIES))
    await asyncio.to_thread(gate.begun.wait, WAIT_S)
    abandoned.cancel()
    with pytest.raises(asyncio.CancelledError):
        await abandoned
    gate.go.set()
    await prompts.encode(LARGE)  # on the same thread
    assert encoded.count(SLICE) == 1
    assert len(WITHOUT_BOUNDARIES) not in encoded
    prompts.close()


async def test_the_encoding_of_a_text_ends_with_its_client(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)
    engine = FakeEngine()
    async with serving(model_folder(tmp_path / "m"), engine) as (client, app), listening(app) as url:
        app.state.pequod.model.prompts.max_len = 10**9
        host, port = url.removeprefix("http://").split(":")
        body = b'{"prompt": "%s", "max_tokens": 1}' % (LARGE * 20).encode()
        _, writer = await asyncio.open_connection(host, int(port))
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        await until(gate.begun.is_set)
        limits = app.state.pequod.limits
        assert limits.open_choices == 1, "it is admitted before its prompt is encoded"
        writer.close()
        await until(lambda: limits.open_choices == 0)
        gate.go.set()
        answer = await client.post(COMPLETIONS, json={"prompt": LARGE, "max_tokens": 1})
        assert answer.status_code == 400  # longer than the fake engine's context, and answered
        assert gate.pieces < 20, "the rest of the abandoned text is not encoded"
        assert not engine.requests


async def test_callers_with_large_texts_take_turns(made, monkeypatch):
    monkeypatch.setattr(prompts_module, "ORDINARY", 100)
    gate = Gate(monkeypatch)
    prompts, order = Prompts(made("byte level")), []

    async def encode(caller: str, name: str) -> None:
        await prompts.encode("the sea " * 50, caller=caller)
        order.append(name)

    tasks = [asyncio.create_task(encode("many", f"many {i}")) for i in range(4)]
    await asyncio.to_thread(gate.begun.wait, WAIT_S)
    tasks.append(asyncio.create_task(encode("one", "one")))
    await asyncio.sleep(0)
    gate.go.set()
    await asyncio.gather(*tasks)
    assert order.index("one") <= 2
    prompts.close()


class PanicException(BaseException):
    """As pyo3 raises it: no Exception."""


async def test_a_panic_of_the_tokenizer_is_a_500_and_the_server_goes_on(tmp_path, monkeypatch):
    encode = Tokenizer.encode

    def panics(tokenizer, text, add_special=True):
        if "panic" in text:
            raise PanicException("index out of bounds")
        return encode(tokenizer, text, add_special)

    monkeypatch.setattr(Tokenizer, "encode", panics)
    async with serving(model_folder(tmp_path / "m")) as (client, app):
        for path, body in ((COMPLETIONS, {"prompt": "panic"}), ("/tokenize", {"prompt": "panic"})):
            answer = await client.post(path, json=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
            assert "bounds" not in answer.text
        assert (await client.post(COMPLETIONS, json={"prompt": "the sea"})).status_code == 200
        assert app.state.pequod.limits.open_choices == 0


async def test_a_panic_leaves_the_lane_to_the_next(made, monkeypatch):
    prompts = Prompts(made("byte level"))

    def panic(*_):
        raise PanicException

    monkeypatch.setattr(prompts.tokenizer, "decode", panic)
    with pytest.raises(NativePanic):
        await prompts.decode([1])
    assert await prompts.encode("the sea")
    prompts.close()
