"""An engine without a model, and the app around it: for tests of everything that is above the engine.

`async with serving(folder, api_key=["k"]) as (client, app)` is the whole server without a socket;
`async with listening(app) as url` puts a real one before it, for tests that stream or hang up.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import struct
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import httpx
import tokenizers
import uvicorn
from fastapi import FastAPI

from engine import (
    EngineDied,
    EngineError,
    EngineInfo,
    EngineRequest,
    EngineStatus,
    OpenRequest,
    RequestStats,
    StepStats,
    TokenDelta,
    TokenLogprob,
)
from server.app import build_app
from server.http.connection import Connection
from server.settings import Settings
from server.tokenization import renderer
from tests.live import WAIT_S
from tests.toys import byte_level

INFO = EngineInfo(
    model="fake", architecture="FakeForCausalLM", max_len=512, vocab_size=340, block_size=16, num_blocks=1000,
    max_seqs=4, max_batched_tokens=256, dtype="float32", device="cpu", attention="fake", implementation="native",
    exact=True, num_params=1000, weights_bytes=4000, kv_bytes_per_token=64, weights_hash="0123",
    load_seconds=0.1, torch="0", hidden_size=8, kv_dtype="float32",
)  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}<|user|>{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
RERANKER_TEMPLATE = (
    '{% for m in messages if m.role == "system" %}<{{ m.content }}> {% endfor %}yes or no? '
    '{% for m in messages if m.role == "query" %}{{ m.content }}: {% endfor %}'
    '{% for m in messages if m.role == "document" %}{{ m.content }}{% endfor %}<|end|> then'
)


def model_folder(folder: Path, **files: Any) -> Path:
    """A model folder without weights, enough for a server: `<|end|>` ends, a plain chat template."""
    folder.mkdir(exist_ok=True)
    library = byte_level()
    library.save(str(folder / "tokenizer.json"))
    end = library.token_to_id("<|end|>")
    written = {
        "config": {"model_type": "fake", "vocab_size": INFO.vocab_size, "eos_token_id": end},
        "generation_config": {"eos_token_id": end},
        "tokenizer_config": {"eos_token": "<|end|>", "chat_template": TEMPLATE},
        **files,
    }
    for name, content in written.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def reranker_folder(folder: Path, template: str = RERANKER_TEMPLATE, answers: Sequence[str] = ("yes", "no")) -> Path:
    """A model folder without weights whose chat template asks whether a document meets a query."""
    model_folder(folder, tokenizer_config={"eos_token": "<|end|>", "chat_template": template})
    path = folder / "tokenizer.json"
    made = json.loads(path.read_text())
    for _ in answers:  # the last tokens make room, as the fake model has no more
        made["model"]["vocab"].popitem()
        made["model"]["merges"].pop()
    library = tokenizers.Tokenizer.from_str(json.dumps(made))
    library.add_tokens([tokenizers.AddedToken(answer, single_word=True) for answer in answers])
    library.save(str(path))
    return folder


def echo(request: EngineRequest) -> Sequence[int]:
    """What the fake model says unless told otherwise: the prompt again and again, from a place that the seed picks."""
    prompt, most = request.prompt_ids, request.params.max_tokens
    return [prompt[(request.params.seed + k) % len(prompt)] for k in range(most)]


def embedded(request: EngineRequest) -> bytes:
    """The fake model's vector of a prompt: other prompts point elsewhere. The first of several logits differs."""
    assert request.params.pooling is not None
    if count := len(request.params.pooling.token_ids):
        return struct.pack(f"<{count}f", sum(request.prompt_ids) % 97 / 10, *[4.0] * (count - 1))
    numbers = [sum(request.prompt_ids) % 97 + 1 + place for place in range(INFO.hidden_size)]
    numbers = numbers[: request.params.pooling.dimensions]
    length = math.sqrt(sum(number * number for number in numbers))
    return struct.pack(f"<{len(numbers)}f", *(number / length for number in numbers))


class FakeEngine:
    """The Engine interface over a function from a request to its tokens.

    `say(request)` gives the tokens; they come one by one, `delay` seconds apart, to at most `max_seqs` requests at a
    time. `hold()` stops them between two tokens, `let_go()` lets them on. A request ends with "stop" when a stop id
    comes, and with "length" at max_tokens; when the tokens of `say` run out before, with "stop".
    """

    def __init__(
        self,
        say: Callable[[EngineRequest], Sequence[int]] = echo,
        *,
        delay: float = 0.0,
        info: EngineInfo = INFO,
        is_loaded: bool = True,
        per_delta: int = 1,
    ) -> None:
        self.say = say
        self.delay = delay
        self.per_delta = per_delta  # tokens in one delta, as when a slow reader's have coalesced
        self.info: EngineInfo | None = None
        self.status = EngineStatus()
        self.on_step: list[Callable[[StepStats], None]] = []
        self.pid: int | None = None
        self.requests: list[EngineRequest] = []  # in order of arrival
        self.aborted: list[int] = []  # ids, of requests that were under way
        self.error_at: tuple[int, str] | None = None  # this many tokens, then finish_reason error with this text
        self._info = info
        self._open: dict[int, asyncio.Task[Any] | None] = {}
        self._pumps: dict[int, asyncio.Task[None]] = {}
        self._lengths: dict[int, int] = {}  # tokens of what runs
        self._slots = asyncio.Semaphore(info.max_seqs)
        self._settled = asyncio.Event()
        self._moving = asyncio.Event()
        self._moving.set()
        self._steps = 0
        if is_loaded:
            self.finish_loading()

    # Levers

    def finish_loading(self) -> None:
        self.info = self._info
        self.status.phase, self.status.share, self.status.heartbeat = "ready", 1.0, time.monotonic()
        self._settled.set()

    def fail(self, error: EngineError) -> None:
        """As when the folder is broken or the process has died too often."""
        self.status.phase, self.status.error = "failed", error
        self._settled.set()
        self._moving.set()

    def hold(self) -> None:
        self._moving.clear()

    def let_go(self) -> None:
        self._moving.set()

    def die_and_come_back(self) -> None:
        """As when the engine's process was killed and every open request went on in the next."""
        self.status.restarts += 1
        self.status.streams_resumed += len(self._lengths)

    # The Engine interface

    async def start(self) -> None:
        if self.status.phase == "starting":
            self.status.phase = "loading"

    async def ready(self) -> EngineInfo:
        await self._settled.wait()
        if self.status.error is not None:
            raise self.status.error
        assert self.info is not None
        return self.info

    def submit(self, request: EngineRequest, notify: Callable[[], None]) -> OpenRequest:
        open_request = OpenRequest(request, notify)
        self._pumps[request.id] = asyncio.create_task(self._pump(open_request), name="fake engine")
        return open_request

    async def _pump(self, open_request: OpenRequest) -> None:
        """Generate for a reader that takes what there is."""
        try:
            async for delta in self.generate(open_request.request):
                open_request.receive(delta)
        except Exception as error:  # also what no engine raises, for tests of bugs
            open_request.fail(error)  # type: ignore[arg-type]
        finally:
            del self._pumps[open_request.request.id]

    async def generate(self, request: EngineRequest) -> AsyncIterator[TokenDelta]:
        if self.status.error is not None:
            raise self.status.error
        assert request.id not in self._open, "an id was used twice at a time"
        self.requests.append(request)
        self._open[request.id] = asyncio.current_task()
        arrived = time.monotonic()
        try:
            self._count()
            async with self._slots:
                run = self._run if request.params.pooling is None else self._embed
                async for delta in run(request, arrived):
                    yield delta
                    if delta.finish_reason:
                        return
        finally:
            self._lengths.pop(request.id, None)
            self.abort(request.id)
            self._count()

    async def _run(self, request: EngineRequest, arrived: float) -> AsyncIterator[TokenDelta]:
        params = request.params
        scheduled = time.monotonic()
        self._lengths[request.id] = len(request.prompt_ids)
        first, count, waiting = 0.0, 0, []
        for token in self.say(request):
            await asyncio.sleep(self.delay)
            await self._moving.wait()
            if self.status.error is not None:
                raise self.status.error
            if request.id not in self._open:  # aborted
                return
            count += 1
            waiting.append(token)
            self._lengths[request.id] += 1
            first = first or time.monotonic()
            reason = error = None
            if self.error_at is not None and count >= self.error_at[0]:
                reason, error = "error", self.error_at[1]
            elif token in params.stop_ids and count >= params.min_tokens:
                reason = "stop"
            elif count >= params.max_tokens:
                reason = "length"
            if reason:
                del self._open[request.id]
                del self._lengths[request.id]
            self._step(request, 1 if count > 1 else len(request.prompt_ids))
            if reason or len(waiting) >= self.per_delta:
                yield self._delta(request, waiting, reason, error, (arrived, scheduled, first, count))
                waiting = []
            if reason:
                return
        del self._open[request.id]
        yield self._delta(request, waiting, "stop", None, (arrived, scheduled, first, count))

    async def _embed(self, request: EngineRequest, arrived: float) -> AsyncIterator[TokenDelta]:
        scheduled, tokens = time.monotonic(), len(request.prompt_ids)
        self._lengths[request.id] = tokens
        await asyncio.sleep(self.delay)
        await self._moving.wait()
        if self.status.error is not None:
            raise self.status.error
        if request.id not in self._open:  # aborted
            return
        del self._open[request.id]
        del self._lengths[request.id]
        self._step(request, tokens)
        if self.error_at is not None:
            yield TokenDelta(id=request.id, finish_reason="error", error=self.error_at[1])
            return
        stats = RequestStats(
            prompt_tokens=tokens, cached_tokens=1, output_tokens=0, arrived=arrived, scheduled=scheduled,
            last_token=time.monotonic(),
        )  # fmt: skip
        yield TokenDelta(id=request.id, embedding=embedded(request), finish_reason="stop", stats=stats)

    def _delta(
        self,
        request: EngineRequest,
        tokens: list[int],
        reason: str | None,
        error: str | None,
        times: tuple[float, float, float, int],
    ) -> TokenDelta:
        arrived, scheduled, first, count = times
        stats = None
        if reason or count == len(tokens):  # with the first token, too
            stats = RequestStats(
                prompt_tokens=len(request.prompt_ids), cached_tokens=0, output_tokens=count, arrived=arrived,
                scheduled=scheduled, first_token=first, last_token=time.monotonic(),
            )  # fmt: skip
        k = request.params.logprobs
        logprobs = None
        if k is not None:
            logprobs = tuple(TokenLogprob(-0.5, tuple(range(k)), tuple(-0.5 - i for i in range(k))) for _ in tokens)
        scores = None
        if (k := request.params.prompt_logprobs) is not None and count == len(tokens):  # with the first token
            entry = TokenLogprob(-0.25, tuple(range(k)), tuple(-0.25 - i for i in range(k)))
            scores = (entry,) * (len(request.prompt_ids) - 1)
        return TokenDelta(
            id=request.id, token_ids=tuple(tokens), logprobs=logprobs, prompt_logprobs=scores, finish_reason=reason,
            error=error, stats=stats,
        )  # fmt: skip

    def abort(self, request_id: int) -> None:
        if request_id in self._open:
            del self._open[request_id]
            self._lengths.pop(request_id, None)
            self.aborted.append(request_id)
            self._count()
            pump = self._pumps.get(request_id)
            if pump is not None and pump is not asyncio.current_task():
                pump.cancel()

    async def close(self) -> None:
        if self.status.error is None:
            self.status.error = EngineDied("the engine was closed")
        self.status.phase = "closed"
        self._moving.set()

    @property
    def open(self) -> list[int]:
        """Ids of the requests under way."""
        return list(self._open)

    def _count(self) -> None:
        self.status.running = len(self._lengths)
        self.status.waiting = len(self._open) - self.status.running

    def _step(self, request: EngineRequest, tokens: int) -> None:
        self._steps += 1
        self._count()
        self.status.heartbeat = self.status.last_step = time.monotonic()
        held = sum(-(-length // self._info.block_size) for length in self._lengths.values())
        stats = StepStats(
            step=self._steps, time=time.time(), rows=((request.id, tokens),), budget=self._info.max_batched_tokens,
            prompt_tokens=tokens if tokens > 1 else 0, decode_tokens=tokens if tokens == 1 else 0, output_tokens=1,
            running=self.status.running, waiting=self.status.waiting, blocks_free=self._info.num_blocks - held,
            blocks_cached=0, blocks_held=held, blocks_total=self._info.num_blocks, preempted=0,
            prefix_queries=tokens if tokens > 1 else 0, prefix_hits=0, seconds={"forward": 0.001, "sample": 0.0001},
        )  # fmt: skip
        for listener in self.on_step:
            listener(stats)


class KeptChild(renderer._Child):
    """A process that renders templates and stays for the next app with the same ones: its start takes longer than most
    tests. One that has died, or that is in the middle of a request, is ended as ever."""

    idle: ClassVar[list[KeptChild]] = []  # those that were used last at the end
    MOST = 4
    starter = ThreadPoolExecutor(1)

    def __init__(self, templates: Any) -> None:
        self.templates, self.is_busy = templates, False
        for kept in self.idle:
            if kept.templates == templates and kept.process.poll() is None:
                self.idle.remove(kept)
                self._connection, self.process = kept._connection, kept.process
                return
        # It ends with the thread that has started it, so not in one of the app's.
        self.starter.submit(super().__init__, templates).result()

    def ask(self, request: Any) -> tuple[bytes, str]:
        self.is_busy = True
        reply = super().ask(request)
        self.is_busy = reply[0] == renderer.EXHAUSTED
        return reply

    def end(self) -> None:
        if self.is_busy or self.process.poll() is not None:
            super().end()
            return
        self.idle.append(self)
        if len(self.idle) > self.MOST:
            super(KeptChild, self.idle.pop(0)).end()


@contextlib.asynccontextmanager
async def serving(
    folder: Path, engine: FakeEngine | None = None, *, wait: bool = True, **settings: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, FastAPI]]:
    """The app over a fake engine, and a client that calls it without a socket (so that answers come whole)."""
    engine = engine or FakeEngine()
    app = build_app(Settings(**{"model": str(folder), "served_model_name": ["fake"], **settings}), engine)
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(mock.patch.object(renderer, "_Child", KeptChild))
        await stack.enter_async_context(app.router.lifespan_context(app))
        if wait:
            await app.state.pequod.ready()
        transport = httpx.ASGITransport(app, raise_app_exceptions=True)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=30) as client:
            yield client, app


@contextlib.asynccontextmanager
async def listening(app: FastAPI, **options: Any) -> AsyncIterator[str]:
    """A socket before an app whose lifespan already runs; gives its URL. `options` are uvicorn's."""
    server = uvicorn.Server(
        uvicorn.Config(app, port=0, http=Connection, lifespan="off", log_config=None, access_log=False, **options)
    )
    task = asyncio.create_task(server.serve())
    try:
        await until(lambda: server.started)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await task


async def until(check: Callable[[], Any], seconds: float = WAIT_S) -> None:
    """Let the event loop run until `check()` is true."""
    end = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < end, f"not true within {seconds} s"
        await asyncio.sleep(0.005)
