"""What the scheduler passes to the runner, and what it gets back: what one step needs, and nothing more."""

from __future__ import annotations

from collections.abc import Sequence as Ids
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from .types import ErrorCode, SamplingParams, TokenLogprob

if TYPE_CHECKING:  # the scheduler and the simulator need this module and no numpy
    import numpy as np
    from numpy.typing import NDArray


# In the place of a token id that the step before samples, and whose result has not been collected: the runner reads it
# on the device.
PENDING = -1


class Row(msgspec.Struct, frozen=True, gc=False):
    """One sequence's part of a step: `token_ids` are at positions start, start + 1, …; only the last can be PENDING."""

    seq_id: int
    start: int
    token_ids: list[int]
    new_block_ids: Ids[int]  # all of the sequence's blocks in the step in which it enters
    num_logits: int  # of the last positions: 0 while a prompt is incomplete, 1 to sample or pool, all to score a prompt
    scored: Ids[int] = ()  # prompt tokens that the first of these positions predict
    num_hidden: int = 0  # of the last positions: hidden states to pool instead, 1 for the last or all for their mean
    embeds: bool = False  # the prompt is complete: the step returns its vector
    snapshots: tuple[int, Ids[tuple[int, int]]] | None = None  # that it reads and writes, see SnapshotCache.prepare

    @property
    def end(self) -> int:
        """The number of the sequence's tokens up to the end of this row: the position of a token that it samples."""
        return self.start + len(self.token_ids)

    @property
    def is_sampled(self) -> bool:
        """Whether a token is sampled at the last position."""
        return self.num_logits > len(self.scored) and not self.embeds


@dataclass(frozen=True, slots=True)
class Entered:
    """A sequence that the runner does not know, or has been told to forget."""

    seq_id: int
    params: SamplingParams
    prompt_len: int
    token_ids: list[int]  # prompt and output so far, when params.uses_history; else empty


class Batch(msgspec.Struct, frozen=True):
    """One step. The runner processes `left` before `entered`: a preempted sequence can leave and enter again."""

    step: int
    rows: list[Row]
    entered: list[Entered] = []
    left: list[int] = []
    prompt_tokens: int = 0  # of all tokens, those that complete a prompt or are computed again

    @property
    def num_tokens(self) -> int:
        return sum(len(row.token_ids) for row in self.rows)


@dataclass(frozen=True, slots=True)
class Masks:
    """Which tokens may be sampled by the rows that have a grammar."""

    rows: list[int]  # indices of batch.rows, ascending; all of them sample
    bits: NDArray[np.int32]  # [rows, ceil(vocab / 32)], token 0 is the lowest bit of the first word


class Sampled(msgspec.Struct, frozen=True, gc=False):
    """The outcome of a row that samples."""

    token_ids: list[int]  # the sampled token, then those that its grammar forces; may be empty only when `is_last`
    logprobs: list[TokenLogprob] | None = None  # one per token, when requested
    is_last: bool = False  # the grammar is complete: the output ends after these tokens


class Embedded(msgspec.Struct, frozen=True):
    """The outcome of a row that completes a prompt to pool."""

    embedding: bytes  # as TokenDelta.embedding


class RowError(msgspec.Struct, frozen=True):
    """The outcome of a row that failed: its sequence ends with this error, and the others are not affected."""

    message: str
    code: ErrorCode | None = None
    field: str | None = None  # of SamplingParams, to blame


# None: the row's prompt is incomplete, so there is nothing to return yet.
Outcome = Sampled | Embedded | RowError | None


class StepResult(msgspec.Struct, frozen=True):
    """What a step computed."""

    outcomes: list[Outcome]  # one per row of the batch
    prompt_logprobs: dict[int, list[TokenLogprob]] = {}  # row index -> one per scored token
    seconds: dict[str, float] = {}  # prepare, forward, sample, kernels
