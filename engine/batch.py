"""Snapshots that the scheduler hands to the runner and gets back: what one step needs, nothing more."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .types import ErrorCode, SamplingParams, TokenLogprob

if TYPE_CHECKING:  # half of those who import this have no other use for it
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence's part of a step: `token_ids` stand at positions start, start + 1, …"""

    seq_id: int
    start: int
    token_ids: list[int]
    new_block_ids: list[int]  # all of the sequence's blocks in the step that it enters
    num_logits: int  # of the last positions: 0 while a prompt is not complete, 1 to draw a token, all to score a prompt
    scored: list[int] = field(default_factory=list)  # prompt tokens that the first of these positions predict
    num_hidden: int = 0  # of the last positions: hidden states to pool instead, 1 for the last or all for their mean
    embeds: bool = False  # the prompt is complete: its embedding is told

    @property
    def draws(self) -> bool:
        """Whether the last position draws a token."""
        return self.num_logits > len(self.scored)


@dataclass(frozen=True, slots=True)
class Entered:
    """A sequence that the runner has not seen, or has seen leave."""

    seq_id: int
    params: SamplingParams
    prompt_len: int
    token_ids: list[int]  # prompt and output so far, when params.uses_history; else empty


@dataclass(frozen=True, slots=True)
class Batch:
    """One step. `left` goes before `entered`: a preempted sequence can leave and enter again."""

    step: int
    rows: list[Row]
    entered: list[Entered] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    prompt_tokens: int = 0  # of all tokens, those that complete a prompt or are computed again

    @property
    def num_tokens(self) -> int:
        return sum(len(row.token_ids) for row in self.rows)


@dataclass(frozen=True, slots=True)
class Masks:
    """Which tokens the rows that have a grammar may draw."""

    rows: list[int]  # indices of batch.rows, ascending; all of them draw
    bits: NDArray[np.int32]  # [rows, ceil(vocab / 32)], token 0 is the lowest bit of the first word


@dataclass(frozen=True, slots=True)
class RowError:
    """Why a row failed, and its sequence alone."""

    message: str
    code: ErrorCode | None = None
    field: str | None = None  # of SamplingParams, to blame


@dataclass(frozen=True, slots=True)
class StepTokens:
    """What a step drew, aligned with batch.rows."""

    token_ids: list[list[int]]  # one where the row draws, and those that its grammar forces behind it
    logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)  # row index -> one per token
    prompt_logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)  # row index -> one per scored token
    errors: dict[int, RowError] = field(default_factory=dict)  # row index -> why this row alone failed
    seconds: dict[str, float] = field(default_factory=dict)  # prepare, forward, sample, kernels
    ended: frozenset[int] = frozenset()  # rows whose grammar has nothing more to say
    embeddings: dict[int, bytes] = field(default_factory=dict)  # row index -> TokenDelta.embedding, where it embeds
