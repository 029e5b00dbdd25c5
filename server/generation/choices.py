"""Generation: runs the choices of one request concurrently and turns the engine's tokens into text."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import NamedTuple

from starlette.types import Receive

from engine import Engine, EngineRequest, ErrorCode, OpenRequest, RequestStats, TokenDelta, TokenLogprob

from ..grammar.checker import busy, refusal
from ..http.errors import ApiError, deadline, from_exception, invalid, unavailable
from ..observability.tracking import RequestTracker
from ..parsers.parts import Arguments, Call, Content, MessageParser, Part
from ..tokenization.detokenizer import Detokenizer
from .output import Output, Usage, usage
from .request import Calling

log = logging.getLogger("pequod.server")

HEARTBEAT_S = 15.0  # of silence; most proxies close a connection that is idle for a minute
FIELDS = {"allowed_ids": "allowed_token_ids"}  # the API's names of the engine's fields, where they differ

# A prompt's log-probabilities. Its first choice requests them from the engine; the other choices start when they are
# there.
Scores = asyncio.Future[tuple[TokenLogprob, ...]]


class Gone(Exception):
    """The client has disconnected or does not read."""


class Due(NamedTuple):
    """The time at which a response must be complete."""

    at: float  # time.monotonic()
    cause: str  # of the abort: deadline (the client's own) | timeout (the server's)

    @property
    def left_s(self) -> float:
        return max(0.0, self.at - time.monotonic())


@dataclass(eq=False)
class Reader(ABC):
    """Reads the deltas of one engine request and counts its tokens."""

    index: int
    request: EngineRequest
    num_tokens: int = field(default=0, init=False)  # delivered
    num_reasoning: int = field(default=0, init=False)  # of these
    stats: RequestStats | None = field(default=None, init=False)

    @property
    def starts_after(self) -> Scores | None:
        """What must be there before the engine gets the request; None: nothing."""
        return None

    @abstractmethod
    def read(self, delta: TokenDelta) -> Output:
        """Return what the delta makes certain; raises the ApiError that ends the whole request."""


@dataclass(eq=False)
class Choice(Reader):
    """One choice: turns the tokens of an engine request into text and the parts of a message.

    `grammar_field`: the field of the client's request that contains the grammar. `parser` splits the text into parts.
    `scores` is shared by the choices of a prompt whose log-probabilities are requested. `only_scores`: drop the one
    token that the engine has to sample. `is_json`: a completion that ends by itself must be JSON, otherwise it is a
    500. `calling`: the tools that it may call; if they are not parallel, it ends where the model begins a second call.
    `enforces_calls`: a grammar makes calls follow the schemas of their tools. `reported_ids`: the stop tokens that the
    response names when one of them ends it.
    """

    stream: Detokenizer
    grammar_field: str = ""
    _: KW_ONLY
    parser: MessageParser
    scores: Scores | None = None
    only_scores: bool = False
    is_json: bool = False
    calling: Calling | None = None
    enforces_calls: bool = False
    reported_ids: frozenset[int] = frozenset()
    _arguments: list[str] | None = field(default=None, init=False)  # of the last call so far, None: there is none
    _json: list[str] = field(default_factory=list, init=False)  # the content so far, with `is_json`
    _has_begun: bool = field(default=False, init=False)  # its first delta has been read

    def read(self, delta: TokenDelta) -> Output:
        """Return the delta's tokens as text. Text after a stop string is dropped; a stop token has no text."""
        reason = delta.finish_reason
        if reason == "error" and delta.field == "grammar":
            raise refusal(self.grammar_field, delta.error or "it cannot be used")
        if reason == "error" and delta.field is not None:
            name = FIELDS.get(delta.field, delta.field)
            raise invalid(f"Invalid '{name}': {delta.error}.", name)
        if reason not in (None, "stop", "length"):
            raise unfinished(delta)
        self.stats = delta.stats or self.stats
        prompt_logprobs = self._prompt_logprobs(delta)
        if self.only_scores:
            return Output(self.index, finish_reason="length", prompt_logprobs=prompt_logprobs)
        ids = delta.token_ids
        has_stop_token = reason == "stop" and bool(ids) and ids[-1] in self.request.params.stop_ids
        texts: list[str] = []
        parts: list[Part] = []
        part_ends: list[int] = []
        offsets: list[int] = []
        end: int | None = None  # index of a second call among the parts of one token
        for token_id in ids[:-1] if has_stop_token else ids:
            # One at a time: whether a token is reasoning must not depend on the tokens that arrive with it.
            text = self.stream.feed(token_id)
            offsets.append(self.stream.start)
            was_reasoning = self.parser.is_reasoning
            texts.append(text)
            new_parts = self.parser.feed(text)
            if self.stream.stopped:
                texts.append(self.stream.resume() if self._keeps_whole() else self.stream.included())
                new_parts += self.parser.feed(texts[-1])
            end = self._second_call(new_parts)
            parts += new_parts[:end]
            part_ends.append(len(parts))
            self.num_reasoning += was_reasoning or self.parser.is_reasoning
            if self.stream.stopped or end is not None:
                reason, has_stop_token = "stop", False
                break
        if reason and end is None:
            rest = self.stream.finish()
            if has_stop_token:
                offsets.append(self.stream.offset)
            texts.append(rest)
            new_parts = self.parser.feed(rest) + self.parser.finish(cut_before=self._cut_before(reason))
            parts += new_parts[: self._second_call(new_parts)]
        stop = ids[-1] if has_stop_token and ids[-1] in self.reported_ids else self.stream.stop
        for part in parts:
            if isinstance(part, Call):
                self._arguments = []
            elif isinstance(part, Arguments) and self._arguments is not None:
                self._arguments.append(part.text)
        if reason == "stop" and self._arguments is not None:
            # A call that a stop string or token of the request cuts off must not look complete.
            is_whole = stop is None or is_json_text("".join(self._arguments))
            reason = "tool_calls" if is_whole else "stop"
        if self.is_json:
            self._json += [part.text for part in parts if isinstance(part, Content)]
            if reason == "stop" and not self.stream.stopped:
                check_json("".join(self._json))
        return Output(
            choice=self.index,
            text="".join(texts),
            parts=tuple(parts),
            part_ends=tuple(part_ends),
            token_ids=ids[: len(offsets)],
            logprobs=(delta.logprobs or ())[: len(offsets)],
            offsets=tuple(offsets),
            finish_reason=reason,
            prompt_logprobs=prompt_logprobs,
            stop=stop,
        )

    def _cut_before(self, reason: str) -> str | None:
        """Return the stop string that follows the text, "" if the text ends with it or at max_tokens, else None."""
        if self.stream.stop is None:
            return "" if reason == "length" else None
        return "" if self.stream.include_stop else self.stream.stop

    def _keeps_whole(self) -> bool:
        """Return whether the next text belongs to an enforced call, which no stop string may cut off.

        Where a call is required, all text but the reasoning belongs to one.
        """
        is_required = self.calling is not None and self.calling.is_required
        return self.enforces_calls and (self.parser.is_calling or (is_required and not self.parser.is_reasoning))

    def _second_call(self, parts: list[Part]) -> int | None:
        """Return the index of a second call where only one is allowed; None if there is none."""
        if self.calling is None or self.calling.is_parallel:
            return None
        return next((i for i, part in enumerate(parts) if isinstance(part, Call) and part.index), None)

    @property
    def starts_after(self) -> Scores | None:
        return self.scores if self.request.params.prompt_logprobs is None else None

    def _prompt_logprobs(self, delta: TokenDelta) -> tuple[TokenLogprob, ...] | None:
        """Return the prompt's log-probabilities for the first output, None for the others."""
        if self.scores is None or self._has_begun:
            return None
        self._has_begun = True
        if self.request.params.prompt_logprobs is not None:
            self.scores.set_result(delta.prompt_logprobs or ())
        return self.scores.result()


def check_json(text: str) -> None:
    """Raise 500 unless a text is JSON. Its grammar ensures that: this detects where it does not."""
    if not is_json_text(text):
        log.error("a completion of %d characters that followed a schema is not JSON", len(text))
        message = "The completion is not the JSON that the request requires."
        raise ApiError(500, message, type="server_error", code="invalid_answer")


def is_json_text(text: str) -> bool:
    """Return whether a text is JSON."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def unfinished(delta: TokenDelta) -> ApiError:
    """Return the error of a request that the engine did not finish: 503 if it was too busy to compile the grammar."""
    if delta.code is ErrorCode.GRAMMARS_BUSY:
        return busy()
    return ApiError(
        500,
        f"The engine could not finish this request: {delta.error or delta.finish_reason}.",
        type="server_error",
        code="engine_error",
    )


@dataclass(eq=False)
class Generation:
    """Runs all choices of one request, `n` per prompt, at most `window` at a time and in their order.

    A choice holds one of `slots` while the engine has it. Other requests may share these, each with at most `window`
    choices that hold or wait for one. While it is `running`, read `outputs` to the end: deltas are read there, by the
    task that sends them, since a task between it and the engine would have to run for each token as well. When
    `shutdown` is set, every choice ends at once.
    """

    engine: Engine
    choices: Sequence[Reader]
    n: int
    track: RequestTracker
    due: Due | None
    _: KW_ONLY
    shutdown: asyncio.Event
    window: int | None = None  # None: all of them
    slots: AbstractAsyncContextManager[None] = field(default_factory=nullcontext)
    _open: dict[int, OpenRequest] = field(default_factory=dict, init=False)  # what the engine has, by choice
    _unread: list[int] = field(default_factory=list, init=False)  # choices whose OpenRequest has given notice
    _ended: dict[int, asyncio.Event] = field(default_factory=dict, init=False)  # by choice: its last output was read
    _kept: list[Output] = field(default_factory=list, init=False)  # read when the generation was stopped
    _waiter: asyncio.Future[None] | None = field(default=None, init=False)  # of `_take`
    _sent_at: float = field(default=0.0, init=False)  # the event loop's time of the last `sent`
    is_silent: bool = field(default=False, init=False)  # HEARTBEAT_S have passed since then
    _heartbeat: asyncio.TimerHandle | None = field(default=None, init=False)
    _failure: Exception | None = field(default=None, init=False)
    _workers: list[asyncio.Task[None]] = field(default_factory=list, init=False)
    _watchers: list[asyncio.Task[None]] = field(default_factory=list, init=False)
    _timer: asyncio.TimerHandle | None = field(default=None, init=False)

    @asynccontextmanager
    async def running(self, receive: Receive) -> AsyncIterator[None]:
        """Start, and on leaving stop whatever still runs; the engine's requests are aborted by then.

        Gone is not propagated: no client is left to respond to, and the abort has been counted.
        """
        self.start(receive)
        try:
            yield
        except Gone:
            return
        except Exception as error:
            self.stop(error, "error")
            raise
        finally:
            await self.close()

    def start(self, receive: Receive) -> None:
        """Start the choices; `receive` reports when the client disconnects."""
        loop = asyncio.get_running_loop()
        turns = iter(self.choices)
        window = min(self.window or len(self.choices), len(self.choices))
        self._workers = [loop.create_task(self._work_in_turn(turns)) for _ in range(window)]
        self._watchers = [loop.create_task(self._watch_client(receive)), loop.create_task(self._watch_drain())]
        if self.due is not None:
            self._timer = loop.call_later(self.due.left_s, self.stop, deadline(), self.due.cause)
        self._sent_at = loop.time()
        self._heartbeat = loop.call_later(HEARTBEAT_S, self._beat)

    async def outputs(self) -> AsyncIterator[list[Output]]:
        """Yield new outputs until all choices have ended; raises the failure after the last.

        Yields [] if there is none and nothing has been `sent` for HEARTBEAT_S.
        """
        left = len(self.choices)
        while left:
            taken = await self._take()
            for output in taken:
                choice = self.choices[output.choice]
                choice.num_tokens += len(output.token_ids)
                self.track.delivered(len(output.token_ids), output.choice, choice.stats)
                if output.finish_reason:
                    left -= 1
                    reason = "length" if output.finish_reason == "length" else "stop"
                    self.track.finished(reason, choice.stats, output.choice)
            yield taken
            if not taken:
                self.sent()  # for a reader that sends nothing

    def sent(self) -> None:
        """Note that the client has been sent something: the time of silence begins again."""
        self._sent_at, self.is_silent = asyncio.get_running_loop().time(), False

    async def _take(self) -> list[Output]:
        """Wait for outputs; [] if there is none, and silence. Raises the failure when all have been returned."""
        loop = asyncio.get_running_loop()
        while not (outputs := self._read()) and self._failure is None and not self.is_silent:
            self._waiter = loop.create_future()
            await self._waiter
        if not outputs and self._failure is not None:
            raise self._failure
        return outputs

    def _read(self) -> list[Output]:
        """Read what has come, one output per choice: what a slow reader leaves unread is merged."""
        outputs, self._kept = self._kept, []
        unread, self._unread = self._unread, []
        for index in unread:
            open_request = self._open.get(index)
            try:
                if open_request is None or (delta := open_request.take()) is None:
                    continue
                output = self.choices[index].read(delta)
            except Exception as error:
                self.stop(from_exception(error), "error")
                continue
            outputs.append(output)
            if output.finish_reason:
                del self._open[index]
                self._ended[index].set()
        return outputs

    def _notify(self, index: int) -> None:
        self._unread.append(index)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _beat(self) -> None:
        """Report silence. One timer for all tokens: to set one for each would cost more."""
        loop = asyncio.get_running_loop()
        left = self._sent_at + HEARTBEAT_S - loop.time()
        if left <= 0:
            self.is_silent, left = True, HEARTBEAT_S
            self._wake()
        self._heartbeat = loop.call_later(left, self._beat)

    async def _work_in_turn(self, turns: Iterator[Reader]) -> None:
        for choice in turns:
            if self._failure is not None:
                return
            async with self.slots:
                await self._work(choice)

    async def _work(self, choice: Reader) -> None:
        """Have the engine compute a choice until its last output has been read."""
        index = choice.index
        ended = self._ended[index] = asyncio.Event()
        try:
            if choice.starts_after is not None:
                await asyncio.shield(choice.starts_after)  # which is not to be cancelled with the first that waits
            self._open[index] = self.engine.submit(choice.request, partial(self._notify, index))
            await ended.wait()
        except Exception as error:
            self.stop(from_exception(error), "error")
        finally:
            self._open.pop(index, None)
            self.engine.abort(choice.request.id)  # no-op when finished

    async def _watch_client(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.stop(Gone(), "disconnect")

    async def _watch_drain(self) -> None:
        await self.shutdown.wait()
        message = "The server shut down before the response was complete."
        self.stop(unavailable(message, "draining"), "drain")

    def stop(self, failure: Exception, cause: str) -> None:
        """End all running choices; `outputs` raises `failure`. Only the first call has an effect."""
        if self._failure is None:
            self._failure = failure
            self.track.aborted(cause)
            self._kept = self._read()  # while there are open requests to read: the client still gets what has come
            for worker in self._workers:
                worker.cancel()
            self._wake()

    async def close(self) -> None:
        """Stop whatever runs, and wait until the engine's requests are aborted."""
        for timer in (self._timer, self._heartbeat):
            if timer is not None:
                timer.cancel()
        tasks = [*self._workers, *self._watchers]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.track.close()

    def usage(self) -> Usage:
        """Return the usage so far. The tokens of the prompt, cached or not, are those of each prompt's first choice."""
        first = self.choices[:: self.n]
        return usage(
            sum(len(choice.request.prompt_ids) for choice in first),
            sum(choice.num_tokens for choice in self.choices),
            sum(choice.stats.cached_tokens for choice in first if choice.stats is not None),
            sum(choice.num_reasoning for choice in self.choices),
        )
