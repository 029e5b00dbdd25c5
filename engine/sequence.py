"""Sequence: one request on its way through the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from .blocks import chain
from .types import EngineRequest, Pooling, RequestStats, TokenLogprob


class Status(Enum):
    WAITING = "waiting"  # holds no blocks
    RUNNING = "running"  # holds blocks, may be in a step
    ENDED = "ended"  # has had its terminal delta


@dataclass(slots=True, eq=False)
class Sequence:
    """A request's tokens and how far the model has come with them. The Scheduler's; nobody else writes.

    There is no prefill phase: `num_computed` catches up with `len(tokens)`, and everything else is derived.
    """

    request: EngineRequest
    arrival: int  # place in the order of arrival; kept over preemptions
    arrived: float  # seconds, the scheduler's clock
    block_size: int
    root: bytes  # where the chain of block hashes starts
    tokens: list[int] = field(default_factory=list)  # prompt, then output
    num_untold: int = 0  # of the last tokens: forced by a grammar before the first draw, and not yet delivered
    num_computed: int = 0  # tokens whose keys and values are in the cache (collected steps only)
    num_inflight: int = 0  # tokens in steps that have not been collected
    block_ids: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)  # of the full blocks, as far as asked for
    num_published: int = 0  # blocks of ours whose content the pool knows
    status: Status = Status.WAITING
    aborted: bool = False  # ends when the step in flight is collected
    new_to_runner: bool = True  # the next row carries all block ids
    num_sent_blocks: int = 0  # block ids that the runner has
    cached_tokens: int = 0  # of the prompt, found in the prefix cache at the first start
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)  # of the prompt's tokens from the second on
    looked_up: bool = False  # in the prefix cache; later lookups are not counted again
    scheduled: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    preemptions: int = 0
    gave_way: bool = False  # when it was last preempted: to another flow, and not for want of blocks

    def __post_init__(self) -> None:
        self.tokens = [*self.request.prompt_ids, *self.request.output_ids]

    @property
    def id(self) -> int:
        return self.request.id

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def is_scored(self) -> bool:
        """Whether log-probabilities of the prompt are still to be computed."""
        asked = self.request.params.prompt_logprobs is not None and self.pooling is None
        return asked and len(self.prompt_logprobs) < self.prompt_len - 1

    @property
    def pooling(self) -> Pooling | None:
        return self.request.params.pooling

    @property
    def is_averaged(self) -> bool:
        """Whether the hidden states of all its tokens are pooled."""
        return self.pooling is not None and self.pooling.kind == "mean"

    @property
    def needs_all(self) -> bool:
        """Whether each of its tokens must be computed: what is found in the cache has no logits and no hidden state."""
        return self.is_scored or self.is_averaged

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def start(self) -> int:
        """Position of the first token that is neither computed nor in flight: where its next row starts."""
        return self.num_computed + self.num_inflight

    @property
    def remaining(self) -> int:
        """Tokens that no step has computed or is computing."""
        return len(self.tokens) - self.start

    @property
    def is_prompt(self) -> bool:
        """Whether it has more than its last token to compute (also after a preemption), or has not begun."""
        return self.start == 0 or self.remaining > 1

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks to take so that the first `num_tokens` tokens have a place."""
        return -(-num_tokens // self.block_size) - len(self.block_ids)

    def block_hash(self, index: int) -> bytes:
        """Hash of the full block `index`; computed once."""
        while len(self.hashes) <= index:
            start = len(self.hashes) * self.block_size
            parent = self.hashes[-1] if self.hashes else self.root
            self.hashes.append(chain(parent, self.tokens[start : start + self.block_size]))
        return self.hashes[index]

    def stats(self) -> RequestStats:
        return RequestStats(
            prompt_tokens=self.prompt_len,
            cached_tokens=self.cached_tokens,
            output_tokens=self.num_output - self.num_untold,
            arrived=self.arrived,
            scheduled=self.scheduled,
            first_token=self.first_token,
            last_token=self.last_token,
            preemptions=self.preemptions,
        )
