"""Grammars: which tokens each running sequence may sample next, and which are forced (with llguidance).

Grammars are compiled on two threads, one for quick grammars and one for slow ones, so that a quick one does not wait
for slow ones. Each thread owns the grammars that it has compiled, and creates a Matcher for each sequence. The loop
then owns the matcher: it computes a mask while the forward pass runs, and advances the matcher by the sampled token.
Sequences without a grammar cost nothing.

llguidance is native code. If it panics, which in Python is not even an Exception, only the matcher's request fails.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from llguidance import LLExecutor, LLMatcher
from msgspec.structs import replace
from numpy.typing import NDArray

from .. import hub
from ..batch import Batch, Masks, Outcome, RowError, Sampled, StepResult
from ..config import EngineConfig
from ..types import EngineError, EngineRequest, ErrorCode, SamplingParams
from . import GrammarError, GrammarsBusy
from .compiler import Compiler
from .table import Table

Bits = NDArray[np.int32]

WAIT_S = 30.0  # for a compiled grammar, including time in the queue
# A grammar that takes more CPU time than SLOW_S is compiled on the thread for slow ones; if the time is not known, one
# that is longer than LARGE.
SLOW_S = 0.025
LARGE = 4096  # characters
# A mask takes 0.1 ms. Waking other threads takes as long, and ten times as long on a busy machine.
MASK_THREADS, MANY_ROWS = 8, 16
REFUSED = RowError("a token was sampled that the grammar does not allow")
TOO_COMPLEX = RowError("the grammar takes more work for one token than is allowed", field="grammar")
PANICKED = RowError("the grammar library has failed on it", field="grammar")
# How the library's message reads when it is REFUSED. Its stop_reason() is "InternalError" for that and for the rest.
NOT_ALLOWED = "doesn't satisfy the grammar"

T = TypeVar("T")


class Matcher:
    """A sequence's state in its grammar. Owned by the loop.

    If the library panics or raises, the matcher has failed, and the library is not called again.
    """

    def __init__(self, library: LLMatcher, table: Table, params: SamplingParams) -> None:
        self.library = library
        self.has_panicked = False
        self._stop_ids = [token for token in params.stop_ids if 0 <= token < table.width]
        self._width = table.width
        # The tokenizer may have more tokens than the model: such a token has no bit in a mask, and is never sampled.
        self._hidden = {token for token in (table.end_id, *self._stop_ids) if token < table.width}
        # A forced token has no logits, so it can have no log-probability and no bias. Then every token is sampled.
        reports = params.logprobs is not None or params.prompt_logprobs is not None
        forbids = any(abs(bias) >= 100 for bias in params.logit_bias.values())
        forbids = forbids or bool(params.bad_words) or params.allowed_ids is not None
        self._jumps = not reports and not forbids

    def _ask(self, question: Callable[..., Any], otherwise: T, *args: object) -> T:
        """Call the library; return `otherwise` if it has failed."""
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
        """Write llguidance's mask to `bits`, [words]; `finish` completes it."""
        self._ask(self.library.unsafe_compute_mask_ptr, None, bits.ctypes.data, bits.nbytes)

    def finish(self, bits: Bits) -> None:
        """Turn llguidance's mask, [words], into the tokens that may be sampled.

        Stop tokens are never text. They are allowed only where the output may end, even if the grammar allows their
        characters elsewhere.
        """
        if self.has_failed:  # the sampled token will be discarded
            bits[:] = -1
            return
        for token in self._hidden:
            bits[token // 32] &= ~_bit(token)
        if self.is_accepting:
            for token in self._stop_ids:
                bits[token // 32] |= _bit(token)

    def take(self, token: int) -> bool:
        """Advance by a sampled token; returns False if the grammar does not allow it."""
        if token in self._hidden:
            return self.is_end(token) and self.is_accepting
        return self._ask(self.library.consume_token, False, token)

    def is_end(self, token: int) -> bool:
        """Return whether a token ends the output."""
        return token in self._stop_ids

    def _is_text(self, token: int) -> bool:
        return token < self._width and token not in self._hidden

    def jump(self, remaining: int) -> list[int]:
        """Advance by the tokens that the grammar forces, at most `remaining`; returns them."""
        taken: list[int] = []
        while self._jumps and len(taken) < remaining and not self._ask(self.library.is_stopped, True):
            forced: list[int] = self._ask(self.library.compute_ff_tokens, [])[: remaining - len(taken)]
            # The user may have set a stop token that the grammar forces, or the model may not have a token.
            count = next((i for i, token in enumerate(forced) if not self._is_text(token)), len(forced))
            if not count or not self._ask(self.library.consume_tokens, False, forced[:count]):
                break
            taken += forced[:count]
        return taken

    def follow(self, outcome: Outcome, remaining: int) -> Outcome:
        """Advance by a row's sampled token; returns the outcome with the tokens that are forced after it.

        `remaining`: the number of output tokens left, including the sampled one.
        """
        match outcome:
            case RowError(code=ErrorCode.NO_TOKEN_LEFT) if self.is_accepting:
                return Sampled([], is_last=True)  # there is nothing to add, and nothing is missing
            case Sampled(token_ids=[token]):
                if self.has_failed:
                    return self.failure
                if not self.take(token) or self.has_failed:
                    return self.failure if self.has_failed else REFUSED
                if self.is_end(token):
                    return outcome
                tokens = [token, *self.jump(remaining - 1)]
                is_last = self.is_finished
                return self.failure if self.has_failed and not is_last else Sampled(tokens, outcome.logprobs, is_last)
        return outcome

    def begin(self, remaining: int) -> list[int]:
        """Advance by the tokens that every output starts with, at most `remaining`; returns them. Raises GrammarError.

        If they are the whole output, the last one is left to be sampled, because an output that a grammar ends must end
        with a sampled token.
        """
        taken = self.jump(remaining)
        if taken and self.is_finished:
            self._ask(self.library.rollback, False, 1)
            taken.pop()
        if self.has_failed:
            raise GrammarError(self.failure.message)
        return taken


class Grammars:
    """The matchers of all sequences with a grammar, and the compilers that create them."""

    def __init__(self, config: EngineConfig, width: int) -> None:
        """Read the tokenizer's table for a config's model, with logits of this `width`.

        For a vocabulary of 150,000 tokens this holds the GIL for a second (and needs 130 MB), so it is done before the
        first request.
        """
        self.width = width
        self._table: Table | GrammarError
        try:
            offline = config.local_files_only
            folder = hub.fetch(config.model, config.revision, weights=False, local_files_only=offline)
            self._table = Table.of(folder.path, width)
        except (GrammarError, EngineError) as error:  # reported to requests with a grammar
            self._table = GrammarError(str(error))
        self._matchers: dict[int, Matcher] = {}  # by request id
        threads = min(MASK_THREADS, (os.cpu_count() or 1) // 4)
        self._executor = LLExecutor(threads) if threads > 1 else None
        self.quick, self.slow = Compiler("grammar"), Compiler("slow grammar")

    async def compile(self, request: EngineRequest) -> Matcher:
        """Return a matcher for the request, advanced by its output_ids. Raises GrammarError and GrammarsBusy."""
        loop = asyncio.get_running_loop()
        assert request.params.grammar is not None
        is_slow = request.compile_s > SLOW_S if request.compile_s else len(request.params.grammar[1]) > LARGE
        compiler = self.slow if is_slow else self.quick
        # After a restart the grammars of all open requests are compiled again. An output that has begun must not end.
        limit = None if request.output_ids else WAIT_S
        try:
            async with asyncio.timeout(limit), compiler.turns.turn(request.flow):
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
        """Mask the request's rows from now on."""
        self._matchers[request_id] = matcher

    def remove(self, request_id: int) -> None:
        self._matchers.pop(request_id, None)

    def __len__(self) -> int:
        return len(self._matchers)

    def rows(self, batch: Batch) -> list[int]:
        """Return the rows of a batch that sample with a grammar."""
        if not self._matchers:
            return []
        return [i for i, row in enumerate(batch.rows) if row.is_sampled and row.seq_id in self._matchers]

    def masks(self, batch: Batch, rows: list[int]) -> Masks:
        """Return the masks of the tokens that these rows may sample."""
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
        """Compute masks on several threads; returns False if there are too few, or if one has panicked."""
        if self._executor is None or len(matchers) < MANY_ROWS or any(matcher.has_failed for matcher in matchers):
            return False
        libraries = [(matcher.library, index) for index, matcher in enumerate(matchers)]
        try:
            self._executor.unsafe_compute_mask_ptr(libraries, bits.ctypes.data, bits[0].nbytes, len(matchers))
        except BaseException as error:
            if not isinstance(error, Exception) and not is_panic(error):
                raise
            return False  # the error does not say which one: compute each separately
        return True

    def advance(self, batch: Batch, rows: list[int], result: StepResult, remaining: Callable[[int], int]) -> StepResult:
        """Advance the matchers of these rows by their sampled tokens.

        Returns the result with the tokens that the grammars force after them. `remaining(request id)`: the number of
        output tokens left, including the one that was just sampled.
        """
        outcomes = list(result.outcomes)
        for row in rows:
            seq_id = batch.rows[row].seq_id
            outcomes[row] = self._matchers[seq_id].follow(outcomes[row], remaining(seq_id))
        return replace(result, outcomes=outcomes)

    def close(self) -> None:
        """Shut down without waiting for grammars that are being compiled."""
        for compiler in (self.quick, self.slow):
            compiler.close()


def is_panic(error: BaseException) -> bool:
    """Return whether native code has panicked. The class cannot be imported from any module."""
    return type(error).__name__ == "PanicException"


def _bit(token: int) -> np.int32:
    return np.uint32(1 << token % 32).view(np.int32)
