"""From the engine's tokens to text: the choices of one request, each with its Detokenizer, read side by side."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from typing import NamedTuple

from starlette.types import Receive

from engine import Engine, EngineRequest, ErrorCode, RequestStats, TokenDelta, TokenLogprob

from ..grammar.checker import busy, refusal
from ..http import retry
from ..http.errors import ApiError, deadline, from_exception, invalid, unavailable
from ..observability.tracking import RequestTracker
from ..parsers import Call, Content, MessageParser, Part, Plain
from ..tokenization.detokenizer import Detokenizer
from .output import Output, Usage, usage

log = logging.getLogger("pequod.server")

HEARTBEAT_S = 15.0  # of silence; most proxies close a connection that says nothing for a minute


# Names of the engine's that are not those of the API.
FIELDS = {"allowed_ids": "allowed_token_ids"}


class Gone(Exception):
    """The client has hung up or does not read: there is nobody to tell."""


class Due(NamedTuple):
    """When an answer must be complete."""

    at: float  # time.monotonic()
    cause: str  # of the abort: deadline (the client's own) | timeout (the server's)

    @property
    def left_s(self) -> float:
        return max(0.0, self.at - time.monotonic())


class Scores:
    """A prompt's log-probabilities: its first choice asks the engine for them, the others wait until it tells."""

    def __init__(self) -> None:
        self._entries: tuple[TokenLogprob, ...] = ()
        self._told = asyncio.Event()

    def tell(self, entries: tuple[TokenLogprob, ...]) -> None:
        self._entries = entries
        self._told.set()

    async def get(self) -> tuple[TokenLogprob, ...]:
        await self._told.wait()
        return self._entries


class Reader(ABC):
    """What becomes of one engine request, and what that has cost."""

    def __init__(self, index: int, request: EngineRequest) -> None:
        self.index = index
        self.request = request
        self.num_tokens = 0  # delivered
        self.num_reasoning = 0  # of them, those that are reasoning
        self.stats: RequestStats | None = None

    @abstractmethod
    def read(self, delta: TokenDelta) -> Output:
        """What the delta makes certain; raises the ApiError that ends the whole request."""

    async def scored(self, output: Output) -> Output:
        """The first output, with the prompt's log-probabilities where they were asked for."""
        return output


class Choice(Reader):
    """One choice on its way: the engine's request, its text so far, and what it has cost.

    `grammar_field` of the client's request is where its grammar stands; `parser` tells what the text means; `scores`
    where the prompt's log-probabilities were asked for; `is_silent`: there is nothing else to tell, and the one token
    that the engine draws at least is dropped; `is_json`: an answer that ends by itself must be JSON, or it is a 500;
    `one_call`: the answer ends where the model begins another call.
    """

    def __init__(
        self,
        index: int,
        request: EngineRequest,
        stream: Detokenizer,
        grammar_field: str = "",
        *,
        parser: MessageParser | None = None,
        scores: Scores | None = None,
        is_silent: bool = False,
        is_json: bool = False,
        one_call: bool = False,
    ) -> None:
        super().__init__(index, request)
        self.grammar_field = grammar_field
        self.stream = stream
        self.parser = parser or Plain()
        self.scores = scores
        self.is_silent = is_silent
        self.one_call = one_call
        self._has_called = False
        self._json: list[str] | None = [] if is_json else None

    def read(self, delta: TokenDelta) -> Output:
        """The delta's tokens as text. What comes after a stop string is dropped; a stop token has no text."""
        reason = delta.finish_reason
        if reason == "error" and delta.field == "grammar":
            raise refusal(self.grammar_field, delta.error or "it cannot be used")
        if reason == "error" and delta.field is not None:
            field = FIELDS.get(delta.field, delta.field)
            raise invalid(f"Invalid '{field}': {delta.error}.", field)
        if reason not in (None, "stop", "length"):
            raise unfinished(delta)
        self.stats = delta.stats or self.stats
        if self.is_silent:
            return Output(self.index, finish_reason="length", prompt_logprobs=delta.prompt_logprobs)
        ids = delta.token_ids
        ended = reason == "stop" and bool(ids) and ids[-1] in self.request.params.stop_ids
        texts: list[str] = []
        parts: list[Part] = []
        places: list[int] = []
        offsets: list[int] = []
        extra: int | None = None
        for token_id in ids[:-1] if ended else ids:
            # One at a time: whether a token is reasoning must not depend on what else came with it.
            piece = self.stream.feed((token_id,))
            thought = self.parser.is_reasoning
            texts.append(piece.text)
            meant = self.parser.feed(piece.text)
            extra = self._extra(meant)
            parts += meant[:extra]
            places.append(len(parts))
            offsets += piece.offsets
            self.num_reasoning += thought or self.parser.is_reasoning
            if piece.stopped or extra is not None:
                reason, ended = "stop", False
                break
        if reason and extra is None:
            if ended:
                offsets.append(self.stream.offset)
            rest = self.stream.finish().text
            texts.append(rest)
            meant = self.parser.feed(rest) + self.parser.finish()
            parts += meant[: self._extra(meant)]
        self._has_called |= any(isinstance(part, Call) for part in parts)
        if reason == "stop" and self._has_called:
            reason = "tool_calls"
        if self._json is not None:
            self._json += [part.text for part in parts if isinstance(part, Content)]
            if reason == "stop":
                check_json("".join(self._json))
        return Output(
            choice=self.index,
            text="".join(texts),
            parts=tuple(parts),
            places=tuple(places),
            token_ids=ids[: len(offsets)],
            logprobs=(delta.logprobs or ())[: len(offsets)],
            offsets=tuple(offsets),
            finish_reason=reason,
            prompt_logprobs=delta.prompt_logprobs,
            stop=self.stream.stop,
        )

    def _extra(self, parts: list[Part]) -> int | None:
        """Where among these parts a call begins that the request does not want; None: nowhere."""
        return next(
            (i for i, part in enumerate(parts) if self.one_call and isinstance(part, Call) and part.index), None
        )

    async def scored(self, output: Output) -> Output:
        if self.scores is None:
            return output
        if self.request.params.prompt_logprobs is not None:
            self.scores.tell(output.prompt_logprobs or ())
        return output._replace(prompt_logprobs=await self.scores.get())


def check_json(text: str) -> None:
    """Raise 500 unless a text is JSON. Its grammar sees to that: this is to find out where one does not."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        log.error("an answer of %d characters that followed a schema is not JSON", len(text))
        message = "The answer is not the JSON that was asked for."
        raise ApiError(500, message, type="server_error", code="invalid_answer") from None


def unfinished(delta: TokenDelta) -> ApiError:
    """503 where the engine had too much to do, 500 for what else it gave up."""
    if delta.code is ErrorCode.GRAMMARS_BUSY:
        return busy()
    return ApiError(
        500,
        f"The engine could not finish this request: {delta.error or delta.finish_reason}.",
        type="server_error",
        code="engine_error",
    )


class Generation:
    """All choices of one request, from the engine to their text; at most `window` of them at a time, in their order.

    Each takes one of `places` for as long as the engine has it; other requests may share these, and each waits for its
    next ones behind at most `window` of another's. While it is `running`, read `outputs` to the end. When `cut` is set
    the server shuts down, and every choice ends at once.
    """

    def __init__(
        self,
        engine: Engine,
        choices: Sequence[Reader],
        n: int,
        track: RequestTracker,
        due: Due | None,
        *,
        cut: asyncio.Event,
        window: int | None = None,
        places: asyncio.Semaphore | None = None,
    ) -> None:
        self.choices = choices
        self._window = min(window or len(choices), len(choices))
        self._places = places or nullcontext()
        self._engine = engine
        self._cut = cut
        self._n = n
        self._track = track
        self._due = due
        self._ready: list[Output] = []  # not yet taken, at most one per choice and one more
        self._news = asyncio.Event()
        self._taken = asyncio.Event()
        self._failure: Exception | None = None
        self._workers: list[asyncio.Task[None]] = []
        self._watchers: list[asyncio.Task[None]] = []
        self._timer: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def running(self, receive: Receive) -> AsyncIterator[None]:
        """From the beginning to the end, whichever that is: when it is left the engine has been told.

        Gone ends it in silence: there is nobody to answer, and what has happened is counted.
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
        """Begin; `receive` tells when the client hangs up."""
        loop = asyncio.get_running_loop()
        turns = iter(self.choices)
        self._workers = [loop.create_task(self._work_in_turn(turns)) for _ in range(self._window)]
        self._watchers = [loop.create_task(self._watch_client(receive)), loop.create_task(self._watch_drain())]
        if self._due is not None:
            self._timer = loop.call_later(self._due.left_s, self.stop, deadline(), self._due.cause)

    async def outputs(self) -> AsyncIterator[list[Output]]:
        """What has come since the last look, until all choices are complete; [] after HEARTBEAT_S of silence.

        Raises Gone, or the ApiError that ended the request.
        """
        left = len(self.choices)
        while left:
            taken = await self._take()
            for output in taken:
                choice = self.choices[output.choice]
                choice.num_tokens += len(output.token_ids)
                self._track.delivered(len(output.token_ids), output.choice)
                if output.finish_reason:
                    left -= 1
                    self._track.finished(
                        "length" if output.finish_reason == "length" else "stop", choice.stats, output.choice
                    )
            yield taken

    async def _take(self) -> list[Output]:
        if not self._ready and self._failure is None:
            self._news.clear()
            try:
                async with asyncio.timeout(HEARTBEAT_S):
                    await self._news.wait()
            except TimeoutError:
                return []
        taken, self._ready = self._ready, []
        self._taken.set()
        if not taken and self._failure is not None:
            raise self._failure
        return taken

    async def _work_in_turn(self, turns: Iterator[Reader]) -> None:
        for choice in turns:
            if self._failure is not None:
                return
            async with self._places:
                await self._work(choice)

    async def _work(self, choice: Reader) -> None:
        engine, request_id = self._engine, choice.request.id
        try:
            is_first = True
            async for delta in engine.generate(choice.request):
                output = choice.read(delta)
                if is_first:
                    output, is_first = await choice.scored(output), False
                self._ready.append(output)
                self._news.set()
                if output.finish_reason:
                    return
                # One output waits here at a time: while the client is slow, tokens gather in the engine's mailbox.
                self._taken.clear()
                await self._taken.wait()
        except Exception as error:
            self.stop(from_exception(error), "error")
        finally:
            engine.abort(request_id)  # no-op when finished

    async def _watch_client(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.stop(Gone(), "disconnect")

    async def _watch_drain(self) -> None:
        await self._cut.wait()
        message = "The server shut down before the answer was complete."
        self.stop(unavailable(message, "draining", retry.DRAINING_S), "drain")

    def stop(self, failure: Exception, cause: str) -> None:
        """End all choices that still run; the reader gets `failure`. Only the first one counts."""
        if self._failure is None:
            self._failure = failure
            self._track.aborted(cause)
            for worker in self._workers:
                worker.cancel()
            self._news.set()

    async def close(self) -> None:
        """Stop whatever runs; when this returns the engine has been told."""
        if self._timer is not None:
            self._timer.cancel()
        tasks = [*self._workers, *self._watchers]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._track.close()

    def usage(self) -> Usage:
        """Tokens so far. What the cache saved is what it saved each prompt's first choice."""
        first = self.choices[:: self._n]
        return usage(
            sum(len(choice.request.prompt_ids) for choice in first),
            sum(choice.num_tokens for choice in self.choices),
            sum(choice.stats.cached_tokens for choice in first if choice.stats is not None),
            sum(choice.num_reasoning for choice in self.choices),
        )
