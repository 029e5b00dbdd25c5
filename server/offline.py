"""LLM: the models of the server in a Python program, without HTTP.

It calls the app that `pequod serve` runs, on an event loop in a thread of its own, so requests have the fields, the
checks and the responses of the HTTP API.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, overload

import httpx

from engine import Engine, EngineError, ProcessEngine

from . import settings
from .app import build_app
from .http.in_process import InProcess
from .http.sse import EventStream
from .settings_sources import load
from .settings_values import SettingsError, hint
from .state import AppState

T = TypeVar("T")
Message = Mapping[str, Any]
Conversation = str | Sequence[Message]  # a text is a conversation of one user message
Prompt = str | Sequence[int]  # text or token ids

GROUPS = ("model", "engine")  # of the settings that apply to an LLM
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
# Open requests of a batch, as a multiple of the sequences that the engine runs: the next ones are prepared meanwhile.
OPEN_PER_SEQUENCE = 2
# The app is full for a moment, because of other requests of the batch.
BUSY = ("queue_full", "prompt_tokens", "body_bytes", "grammars_busy", "rate_limit_exceeded")
BUSY_S = 0.05  # before a request is sent again


class APIError(Exception):
    """A refused or failed request, with the error of the HTTP API."""

    def __init__(self, status: int, error: Mapping[str, Any]) -> None:
        super().__init__(error.get("message") or f"status {status}")
        self.status = status
        self.code: str | None = error.get("code")
        self.param: str | None = error.get("param")


@dataclass(frozen=True, slots=True)
class Output:
    """The result of a request: its first choice, and the whole response."""

    text: str
    finish_reason: str  # stop, length or tool_calls
    reasoning: str | None
    tool_calls: list[dict[str, Any]]  # as in the API: id, type, function
    prompt_tokens: int
    completion_tokens: int
    response: dict[str, Any]  # the response of the API, with further choices, logprobs and usage

    def __str__(self) -> str:
        return self.text

    @classmethod
    def of(cls, response: dict[str, Any]) -> Output:
        """The output of a response of /v1/chat/completions or /v1/completions."""
        choice, usage = response["choices"][0], response["usage"]
        message = choice.get("message") or {"content": choice["text"]}
        return cls(
            text=message.get("content") or "",
            finish_reason=choice["finish_reason"],
            reasoning=message.get("reasoning_content"),
            tool_calls=message.get("tool_calls") or [],
            prompt_tokens=usage["prompt_tokens"],
            completion_tokens=usage["completion_tokens"],
            response=response,
        )


class LLM:
    """A model that is loaded in a child process of this one.

    `model` is a folder, a hub id or `builtin`. `options` are the model and engine settings of `pequod serve`, with
    underscores, such as max_model_len=4096 or quantization="int8"; their defaults are PEQUOD_* variables, as there.

    Requests have the fields of the HTTP API: temperature, max_tokens, stop, seed, tools, response_format and so on. A
    list of conversations or prompts is computed as one batch, and the outputs have the same order.

    Raises SettingsError, ConfigError or ModelError if the model cannot be loaded, and APIError for a request that is
    refused or fails. Thread-safe. A context manager; otherwise closed with `close` or the last reference to it, and the
    child processes end with the program.
    """

    def __init__(self, model: str = "builtin", **options: Any) -> None:
        self._session = _Session(_settings({"model": model, **options}))
        self._finalizer = weakref.finalize(self, self._session.close)
        self._finalizer.atexit = False  # too late for threads; the child processes end with this one
        try:
            self._session.call(self._session.open())
        except EngineError as error:
            self.close()
            raise type(error)(settings.with_flags(error)) from None
        except BaseException:
            self.close()
            raise

    @overload
    def chat(self, messages: Conversation, *, stream: Literal[False] = ..., **fields: Any) -> Output: ...
    @overload
    def chat(
        self, messages: Sequence[Conversation], *, stream: Literal[False] = ..., **fields: Any
    ) -> list[Output]: ...
    @overload
    def chat(self, messages: Conversation, *, stream: Literal[True], **fields: Any) -> Iterator[str]: ...
    def chat(self, messages: Any, *, stream: bool = False, **fields: Any) -> Any:
        """Return the assistant's next message; for a list of conversations, a list; with `stream`, pieces of its text.

        A conversation is a list of messages as in the API, or the text of one user message.
        """
        is_one = isinstance(messages, str) or (len(messages) > 0 and isinstance(messages[0], Mapping))
        bodies = [
            {**fields, "messages": [{"role": "user", "content": chat}] if isinstance(chat, str) else list(chat)}
            for chat in ([messages] if is_one else messages)
        ]
        return self._send(CHAT, bodies, is_one=is_one, stream=stream)

    @overload
    def generate(self, prompt: Prompt, *, stream: Literal[False] = ..., **fields: Any) -> Output: ...
    @overload
    def generate(self, prompt: Sequence[Prompt], *, stream: Literal[False] = ..., **fields: Any) -> list[Output]: ...
    @overload
    def generate(self, prompt: Prompt, *, stream: Literal[True], **fields: Any) -> Iterator[str]: ...
    def generate(self, prompt: Any, *, stream: bool = False, **fields: Any) -> Any:
        """Return what follows a text or token ids; for a list of prompts, a list; with `stream`, pieces of the text."""
        is_one = isinstance(prompt, str) or (len(prompt) > 0 and isinstance(prompt[0], int))
        prompts = [prompt] if is_one else prompt
        bodies = [{**fields, "prompt": text if isinstance(text, str) else list(text)} for text in prompts]
        return self._send(COMPLETIONS, bodies, is_one=is_one, stream=stream)

    def _send(self, path: str, bodies: list[dict[str, Any]], *, is_one: bool, stream: bool) -> Any:
        session = self._session
        if stream:
            if not is_one:
                raise ValueError("one request can be streamed at a time")
            return session.iterate(session.stream(path, bodies[0]))
        outputs = session.call(session.send_all(path, bodies))
        return outputs[0] if is_one else outputs

    def close(self) -> None:
        """End the engine and its process. Safe to call again."""
        self._finalizer()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _settings(options: Mapping[str, Any]) -> settings.Settings:
    """The settings with these options; raises SettingsError."""
    known = [name for name in settings.FIELDS if settings.group(name) in GROUPS]
    for name in options:
        if name not in known:
            raise SettingsError(f"LLM has no option {name}{hint(name, known)}")
    return load(options).settings


@asynccontextmanager
async def running(
    chosen: settings.Settings, loading: Callable[[Engine], AbstractAsyncContextManager[None]] | None = None
) -> AsyncIterator[tuple[AppState, httpx.AsyncClient]]:
    """Load a model; yields the state of its app and a client for it.

    Settings of HTTP, limits and logs are ignored. `loading` is a context that shows the progress of loading.
    """
    others = [name for name in settings.FIELDS if settings.group(name) not in GROUPS]
    defaults = {name: settings.FIELDS[name].get_default(call_default_factory=True) for name in others}
    engine = ProcessEngine(chosen.engine_config())
    app = build_app(chosen.model_copy(update=defaults), engine)
    state: AppState = app.state.pequod
    transport = InProcess(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=None, trust_env=False) as client,
    ):
        async with loading(engine) if loading is not None else nullcontext():
            await state.ready()
        yield state, client


class _Session:
    """The app, its event loop and its thread. Has no reference to the LLM, which would prevent its finalizer."""

    def __init__(self, chosen: settings.Settings) -> None:
        self.settings = chosen
        self._stack = AsyncExitStack()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="pequod", daemon=True)
        self._thread.start()

    # On the caller's thread

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the session's thread and return its result."""
        if self._loop.is_closed():
            work.close()
            raise RuntimeError("this LLM is closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:  # also Ctrl-C while this thread waits
            future.cancel()
            raise

    def iterate(self, pieces: AsyncIterator[T]) -> Iterator[T]:
        """Yield the pieces, awaited on the session's thread. Closing the iterator ends the request."""

        async def next_piece() -> T | None:
            return await anext(pieces, None)

        async def end() -> None:
            await pieces.aclose()  # type: ignore[attr-defined]

        try:
            while (piece := self.call(next_piece())) is not None:
                yield piece
        finally:
            # The session's thread no longer runs when the program ends, and cannot wait for itself when its garbage
            # collection closes an iterator. The event loop then closes the pieces.
            is_own_thread = threading.current_thread() is self._thread
            if not self._loop.is_closed() and not sys.is_finalizing() and not is_own_thread:
                self.call(end())

    def close(self) -> None:
        if self._loop.is_closed():
            return
        if threading.current_thread() is self._thread:  # called by the garbage collector; it cannot join itself
            threading.Thread(target=self.close).start()
            return
        self.call(self._stack.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # On the session's thread

    async def open(self) -> None:
        """Start the engine and wait until it is loaded."""
        self.state, self._client = await self._stack.enter_async_context(running(self.settings))
        model = await self.state.ready()
        self._turns = asyncio.Semaphore(OPEN_PER_SEQUENCE * model.info.max_seqs)

    async def send_all(self, path: str, bodies: Sequence[dict[str, Any]]) -> list[Output]:
        """Return the outputs of these requests; the first failure cancels the others."""
        tasks = [asyncio.create_task(self._send(path, body)) for body in bodies]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _send(self, path: str, body: dict[str, Any]) -> Output:
        async with self._turns:
            while True:
                response = await self._client.post(path, json=body)
                if response.is_success:
                    return Output.of(response.json())
                error = APIError(response.status_code, response.json()["error"])
                if error.code not in BUSY:
                    raise error
                await asyncio.sleep(BUSY_S)

    async def stream(self, path: str, body: dict[str, Any]) -> AsyncIterator[str]:
        # It takes no turn: its reader may wait for other requests of this LLM before it reads on.
        async with self._client.stream("POST", path, json={**body, "stream": True}) as response:
            if not response.is_success:
                raise APIError(response.status_code, json.loads(await response.aread())["error"])
            events = EventStream(response)
            async for _, event in events:
                if error := event.get("error"):
                    raise APIError(response.status_code, error)
                for choice in event["choices"]:
                    if piece := choice.get("text") or choice.get("delta", {}).get("content"):
                        yield piece
            if not events.is_complete:
                raise RuntimeError("the stream was cut off")
