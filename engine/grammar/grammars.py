"""Grammars: which tokens each running sequence may draw next, and which it must (with llguidance).

Three owners. Compiling happens on two threads, one for quick grammars and one for slow ones, so that nobody's quick one
waits for others' slow ones; each alone has the grammars that it compiled. A Matcher is born there, one for each
sequence, and then belongs to the loop, which asks it for a mask while the forward pass runs and tells it what was
drawn. Nothing here is asked about a sequence without a grammar.

llguidance is native code: where it panics, which is not even an Exception in Python, the request whose matcher it was
fails alone.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
from llguidance import LLExecutor, LLMatcher
from numpy.typing import NDArray

from .. import hub
from ..batch import Batch, Masks, RowError, StepTokens
from ..config import EngineConfig
from ..types import EngineError, EngineRequest, ErrorCode, SamplingParams
from . import GrammarError, GrammarsBusy
from .compiler import Compiler
from .table import Table

Bits = NDArray[np.int32]

WAIT_S = 30.0  # for a compiled grammar, with all that are before it in line
# What takes more CPU time than this, or is longer where nobody has measured it, is compiled on a thread of its own.
SLOW_S = 0.025
LARGE = 4096  # characters
# A mask takes 0.1 ms, to wake other threads as long and, on a machine that is busy, ten times as long.
MASK_THREADS, MANY_ROWS = 8, 16
REFUSED = RowError("a token was drawn that the grammar does not allow")
TOO_COMPLEX = RowError("the grammar takes more work for one token than is allowed", field="grammar")
PANICKED = RowError("the grammar library has failed on it", field="grammar")
# How the library's message reads when it is REFUSED. Its stop_reason() is "InternalError" for that and for the rest.
NOT_ALLOWED = "doesn't satisfy the grammar"

T = TypeVar("T")


class Matcher:
    """How far one sequence has come in its grammar. The loop's.

    Where the library panics or raises, the matcher has failed, and the library is not asked again.
    """

    def __init__(self, library: LLMatcher, table: Table, params: SamplingParams) -> None:
        self.library = library
        self.has_panicked = False
        self._stop_ids = [token for token in params.stop_ids if 0 <= token < table.width]
        self._hidden = {table.end_id, *self._stop_ids}
        # A forced token has no logits: it can be neither told nor forbidden, so then every token is drawn.
        told = params.logprobs is not None or params.prompt_logprobs is not None
        forbids = any(abs(bias) >= 100 for bias in params.logit_bias.values())
        forbids = forbids or bool(params.bad_words) or params.allowed_ids is not None
        self._jumps = not told and not forbids

    def _ask(self, question: Callable[..., Any], otherwise: T, *args: object) -> T:
        """Call the library; `otherwise` when it cannot be used any more."""
        if self.has_panicked:
            return otherwise
        try:
            return question(*args)
        except Exception:
            self.has_panicked = True
        except BaseException as error:
            if not is_panic(error):
                raise
            self.has_panicked = True
        return otherwise

    @property
    def has_failed(self) -> bool:
        return self._ask(self.library.is_error, True)

    @property
    def failure(self) -> RowError:
        """Why it has failed."""
        error = self._ask(self.library.get_error, "")
        if self.has_panicked:
            return PANICKED
        return REFUSED if NOT_ALLOWED in error else TOO_COMPLEX

    @property
    def is_accepting(self) -> bool:
        """Whether the output may end here."""
        return self._ask(self.library.is_accepting, False)

    @property
    def is_finished(self) -> bool:
        """Whether the output must end here."""
        return self._ask(self.library.is_stopped, False) and self.is_accepting

    def fill(self, bits: Bits) -> None:
        """Write llguidance's mask, [words], for `finish`."""
        self._ask(self.library.unsafe_compute_mask_ptr, None, bits.ctypes.data, bits.nbytes)

    def finish(self, bits: Bits) -> None:
        """Make of llguidance's mask, [words], what can be drawn.

        Stop tokens are no text: they can be drawn where the output may end and nowhere else, also those that are
        letters in other places.
        """
        if self.has_failed:  # it draws like any other row; nobody will see what
            bits[:] = -1
            return
        for token in self._hidden:
            bits[token // 32] &= ~_bit(token)
        if self.is_accepting:
            for token in self._stop_ids:
                bits[token // 32] |= _bit(token)

    def take(self, token: int) -> bool:
        """Go on after a drawn token; False when the grammar does not allow it."""
        if token in self._hidden:
            return self.is_end(token) and self.is_accepting
        return self._ask(self.library.consume_token, False, token)

    def is_end(self, token: int) -> bool:
        """Whether a token is one that ends the output."""
        return token in self._stop_ids

    def jump(self, room: int) -> list[int]:
        """Go on after the tokens that the grammar leaves no choice about, at most `room`; returns them."""
        taken: list[int] = []
        while self._jumps and len(taken) < room and not self._ask(self.library.is_stopped, True):
            forced: list[int] = self._ask(self.library.compute_ff_tokens, [])[: room - len(taken)]
            # A user may have made a stop token of a letter that the grammar wants.
            hidden = next((i for i, token in enumerate(forced) if token in self._hidden), len(forced))
            if not hidden or not self._ask(self.library.consume_tokens, False, forced[:hidden]):
                break
            taken += forced[:hidden]
        return taken

    def begin(self, room: int) -> list[int]:
        """The tokens that every output begins with, at most `room`; raises GrammarError.

        Of an output that is nothing else the last one is left to draw: what a grammar ends, ends with the token that
        completes it, as where it is drawn, and not with an end token after it.
        """
        taken = self.jump(room)
        if taken and self.is_finished:
            self._ask(self.library.rollback, False, 1)
            taken.pop()
        if self.has_failed:
            raise GrammarError(self.failure.message)
        return taken


class Grammars:
    """The matchers of all sequences that have a grammar, and what makes them."""

    def __init__(self, config: EngineConfig, width: int) -> None:
        """For the model of a config, with logits of a `width`. Reads the table now, on whatever thread this is.

        That holds the interpreter for a second where the vocabulary has 150,000 tokens (and 130 MB): before the
        first request it costs nobody anything.
        """
        self.width = width
        self._table: Table | GrammarError
        try:
            self._table = Table.of(hub.fetch(config.model, config.revision, weights=False).path, width)
        except (GrammarError, EngineError) as error:  # only those who bring a grammar need to know
            self._table = GrammarError(str(error))
        self._matchers: dict[int, Matcher] = {}  # by request id
        threads = min(MASK_THREADS, (os.cpu_count() or 1) // 4)
        self._executor = LLExecutor(threads) if threads > 1 else None
        self.quick, self.slow = Compiler("grammar"), Compiler("slow grammar")

    async def compile(self, request: EngineRequest) -> Matcher:
        """A matcher for the request, behind the output that it brings; raises GrammarError and GrammarsBusy."""
        loop = asyncio.get_running_loop()
        assert request.params.grammar is not None
        is_slow = request.compile_s > SLOW_S if request.compile_s else len(request.params.grammar[1]) > LARGE
        compiler = self.slow if is_slow else self.quick
        try:
            async with asyncio.timeout(WAIT_S), compiler.turns.turn(request.flow):
                return await loop.run_in_executor(compiler.thread, self._make, compiler, request)
        except TimeoutError:
            raise GrammarsBusy from None

    def _make(self, compiler: Compiler, request: EngineRequest) -> Matcher:
        assert request.params.grammar is not None
        if isinstance(self._table, GrammarError):
            raise self._table
        try:
            library = compiler.compile(self._table, request.params.grammar).deep_copy()
            matcher = Matcher(library, self._table, request.params)
            is_allowed = all(matcher.take(token) for token in request.output_ids)
        except GrammarError:
            raise
        except BaseException as error:
            raise GrammarError(f"the grammar cannot be compiled: {type(error).__name__}") from None
        if matcher.has_failed:
            raise GrammarError(matcher.failure.message)
        if not is_allowed:
            raise GrammarError("the output so far is not what the grammar allows")
        return matcher

    def add(self, request_id: int, matcher: Matcher) -> None:
        """From now on the request's rows are masked."""
        self._matchers[request_id] = matcher

    def remove(self, request_id: int) -> None:
        self._matchers.pop(request_id, None)

    def __len__(self) -> int:
        return len(self._matchers)

    def rows(self, batch: Batch) -> list[int]:
        """The rows of a batch that draw under a grammar."""
        if not self._matchers:
            return []
        return [i for i, row in enumerate(batch.rows) if row.draws and row.seq_id in self._matchers]

    def masks(self, batch: Batch, rows: list[int]) -> Masks:
        """Which tokens these rows may draw."""
        assert isinstance(self._table, Table)
        matchers = [self._matchers[batch.rows[row].seq_id] for row in rows]
        bits = np.zeros((len(rows), -(-self._table.library.vocab_size // 32)), np.int32)
        if not self._fill_at_once(bits, matchers):
            for row, matcher in zip(bits, matchers, strict=True):
                matcher.fill(row)
        words = -(-self.width // 32)
        if bits.shape[1] != words:
            bits = np.ascontiguousarray(np.pad(bits, ((0, 0), (0, max(0, words - bits.shape[1]))))[:, :words])
        for row, matcher in zip(bits, matchers, strict=True):
            matcher.finish(row)
        return Masks(rows, bits)

    def _fill_at_once(self, bits: Bits, matchers: list[Matcher]) -> bool:
        """Fill many masks on several threads; False where that is not worth it or one of them has panicked."""
        if self._executor is None or len(matchers) < MANY_ROWS or any(matcher.has_failed for matcher in matchers):
            return False
        libraries = [(matcher.library, index) for index, matcher in enumerate(matchers)]
        try:
            self._executor.unsafe_compute_mask_ptr(libraries, bits.ctypes.data, bits[0].nbytes, len(matchers))
        except BaseException as error:
            if not isinstance(error, Exception) and not is_panic(error):
                raise
            return False  # it does not say whose: each is asked by itself
        return True

    def advance(self, batch: Batch, rows: list[int], tokens: StepTokens, room: Callable[[int], int]) -> StepTokens:
        """Tell the matchers what was drawn; gives the step's tokens with those that the grammars force behind them.

        `room(request id)`: tokens that the output may still have, with the one that was just drawn.
        """
        token_ids, errors = list(tokens.token_ids), dict(tokens.errors)
        ended: set[int] = set()
        for row in rows:
            seq_id = batch.rows[row].seq_id
            matcher = self._matchers[seq_id]
            if row in errors and errors[row].code is ErrorCode.NO_TOKEN_LEFT and matcher.is_accepting:
                del errors[row]  # there is nothing to add, and nothing is missing
                ended.add(row)
            elif row in errors or matcher.has_failed:
                pass
            elif not matcher.take(token_ids[row][0]) and not matcher.has_failed:
                errors[row] = REFUSED
            elif not matcher.has_failed and not matcher.is_end(token_ids[row][0]):
                token_ids[row] = token_ids[row] + matcher.jump(room(seq_id) - 1)
                if matcher.is_finished:
                    ended.add(row)
            if matcher.has_failed and row not in ended and row not in errors:
                errors[row] = matcher.failure
        for row in errors:
            token_ids[row] = []
        return replace(tokens, token_ids=token_ids, errors=errors, ended=frozenset(ended))

    def close(self) -> None:
        """What still compiles is not waited for."""
        for compiler in (self.quick, self.slow):
            compiler.close()


def is_panic(error: BaseException) -> bool:
    """Whether native code has panicked. The class has no module that could be imported."""
    return type(error).__name__ == "PanicException"


def _bit(token: int) -> np.int32:
    return np.uint32(1 << token % 32).view(np.int32)
