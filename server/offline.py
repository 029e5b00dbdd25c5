"""LLM: the models of the server in a Python program, without HTTP.

It calls the app that `pequod serve` runs, on an event loop in a thread of its own, so requests have the fields, the
checks and the responses of the HTTP API.
"""

from __future__ import annotations

import asyncio
import json
import operator
import os
import sys
import threading
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Literal, SupportsIndex, TypeVar, overload

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
Prompt = str | Sequence[SupportsIndex]  # text or token ids

CLOSED = "this LLM is closed"
CONVERSATIONS = "a conversation is a text or a list of messages, and a batch a list of these"
PROMPTS = "a prompt is a text or a list of token ids, and a batch a list of these"

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

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions are otherwise unpickled from the message alone, as by the parent of a worker process.
        return type(self), (self.status, {"message": str(self), "code": self.code, "param": self.param})


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
    refused or fails. Thread-safe. A context manager; otherwise closed with `close` or the last reference to it, which
    may be that of a stream, and the child processes end with the program. Calls raise RuntimeError when it is closed,
    also those that other threads have under way, and in a process forked from the one that loaded it.
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

        A conversation is a list of messages as in the API, one message, or the text of one user message.
        """
        chats, is_one = _requests(messages, lambda part: isinstance(part, Mapping), CONVERSATIONS)
        bodies = [{**fields, "messages": _conversation(chat)} for chat in chats]
        return self._send(CHAT, bodies, is_one=is_one, stream=stream)

    @overload
    def generate(self, prompt: Prompt, *, stream: Literal[False] = ..., **fields: Any) -> Output: ...
    @overload
    def generate(self, prompt: Sequence[Prompt], *, stream: Literal[False] = ..., **fields: Any) -> list[Output]: ...
    @overload
    def generate(self, prompt: Prompt, *, stream: Literal[True], **fields: Any) -> Iterator[str]: ...
    def generate(self, prompt: Any, *, stream: bool = False, **fields: Any) -> Any:
        """Return what follows a text or token ids; for a list of prompts, a list; with `stream`, pieces of the text."""
        prompts, is_one = _requests(prompt, _is_integer, PROMPTS)
        bodies = [{**fields, "prompt": _prompt(each)} for each in prompts]
        return self._send(COMPLETIONS, bodies, is_one=is_one, stream=stream)

    def _send(self, path: str, bodies: list[dict[str, Any]], *, is_one: bool, stream: bool) -> Any:
        if stream:
            if not is_one:
                raise ValueError("one request can be streamed at a time")
            if bodies[0].get("n") not in (None, 1):
                raise ValueError("n must be 1 in a stream, which is the text of one choice")
            return self._stream(path, bodies[0])
        outputs = self._session.call(self._session.send_all(path, bodies))
        return outputs[0] if is_one else outputs

    def _stream(self, path: str, body: dict[str, Any]) -> Iterator[str]:
        # A generator of the LLM, so that the last reference to the LLM may be that of a stream.
        yield from self._session.iterate(self._session.stream(path, body))

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


def _requests(value: Any, is_part: Callable[[Any], bool], expected: str) -> tuple[list[Any], bool]:
    """Return the requests of a call, and whether it is a single one. A list of parts is one. Raises TypeError."""
    if isinstance(value, str | Mapping):
        return [value], True
    items = _items(value, expected)
    is_one = bool(items) and is_part(items[0])
    return [items] if is_one else items, is_one


def _items(value: Any, expected: str) -> list[Any]:
    """Return the items of a list, tuple or array; raises TypeError."""
    if not isinstance(value, Iterable) or isinstance(value, bytes | Mapping):
        raise TypeError(f"{expected}, not {type(value).__name__}")
    return list(value)


def _conversation(value: Any) -> list[Any]:
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    return [value] if isinstance(value, Mapping) else _items(value, CONVERSATIONS)


def _prompt(value: Any) -> str | list[int]:
    if isinstance(value, str):
        return value
    ids = _items(value, PROMPTS)
    if wrong := [each for each in ids if not _is_integer(each)]:
        raise TypeError(f"token ids are integers, not {type(wrong[0]).__name__}")
    return [operator.index(each) for each in ids]


def _is_integer(value: Any) -> bool:
    """Whether a value is an integer, such as those of numpy and tensors without dimensions."""
    if getattr(value, "ndim", 0):
        return False
    try:
        operator.index(value)
    except TypeError:
        return False
    return True


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
        self._pid = os.getpid()
        # Held while a call is scheduled, so that none is after the end of the event loop, where it would wait for ever.
        # Reentrant because garbage collection, which can happen at any time, closes streams and sessions.
        self._lock = threading.RLock()
        self._is_closing = False
        self._closing = asyncio.Event()
        self._error: BaseException | None = None  # of the end
        self._stack = AsyncExitStack()
        self._streams: weakref.WeakSet[AsyncGenerator[Any]] = weakref.WeakSet()  # of which a piece has been requested
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="pequod", daemon=True)
        self._thread.start()

    # On the caller's thread

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the session's thread and return its result. Raises RuntimeError if the LLM is closed."""
        if os.getpid() != self._pid:
            work.close()
            raise RuntimeError("this LLM belongs to the process that was forked; load another one in this process")
        with self._lock:
            if self._is_closing:
                work.close()
                raise RuntimeError(CLOSED)
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException as error:  # also Ctrl-C while this thread waits
            future.cancel()
            if self._is_closing and isinstance(error, Exception):
                raise RuntimeError(CLOSED) from None
            raise

    def iterate(self, pieces: AsyncGenerator[T]) -> Iterator[T]:
        """Yield the pieces, awaited on the session's thread. Closing the iterator ends the request."""
        reading: asyncio.Task[Any] | None = None

        async def next_piece() -> T | None:
            nonlocal reading
            reading = asyncio.current_task()
            self._streams.add(pieces)
            return await anext(pieces, None)

        async def end() -> None:
            # After Ctrl-C, `next_piece` may still run, and if `call` was interrupted early, nothing has cancelled it.
            if reading is not None and not reading.done():
                if not reading.cancelling():
                    reading.cancel()
                await asyncio.wait([reading])
            await pieces.aclose()

        try:
            while (piece := self.call(next_piece())) is not None:
                yield piece
        finally:
            # The session's thread no longer runs when the program ends, and cannot wait for itself when its garbage
            # collection closes an iterator. The event loop then closes the pieces.
            if not sys.is_finalizing() and threading.current_thread() is not self._thread:
                with suppress(Exception):  # it would replace the exception that ends the iteration
                    self.call(end())

    def close(self) -> None:
        if os.getpid() != self._pid:  # in a forked process, which has neither the thread nor the engine
            return
        if threading.current_thread() is self._thread:  # called by the garbage collector; it cannot join itself
            threading.Thread(target=self.close).start()
            return
        with self._lock:
            if self._is_closing:
                return
            self._loop.call_soon_threadsafe(self._closing.set)
            self._is_closing = True
        self._thread.join()  # it ends by itself, also if Ctrl-C ends the wait for it
        if self._error is not None:
            raise self._error

    # On the session's thread

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._until_closed())
        except BaseException as error:
            self._error = error  # for `close`
        finally:
            self._loop.close()

    async def _until_closed(self) -> None:
        await self._closing.wait()
        with self._lock:
            self._is_closing = True  # Ctrl-C may have come before `close` has done so
        await self._shut_down()

    async def open(self) -> None:
        """Start the engine and wait until it is loaded."""
        self.state, self._client = await self._stack.enter_async_context(running(self.settings))
        model = await self.state.ready()
        self._turns = asyncio.Semaphore(OPEN_PER_SEQUENCE * model.info.max_seqs)

    async def _shut_down(self) -> None:
        """End the engine, and whatever still runs or waits: also the calls of other threads, which get an error."""
        try:
            await self._stack.aclose()
        finally:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for pieces in list(self._streams):
                await pieces.aclose()
            await self._loop.shutdown_asyncgens()

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

    async def stream(self, path: str, body: dict[str, Any]) -> AsyncGenerator[str]:
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
