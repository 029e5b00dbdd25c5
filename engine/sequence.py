"""Sequence: one request on its way through the engine."""

from __future__ import annotations

from collections.abc import Sequence as Ids
from dataclasses import dataclass, field
from enum import Enum

from msgspec.structs import replace

from .batch import PENDING, Entered, Row, RowError, Sampled
from .types import EngineRequest, ErrorCode, Pooling, RequestStats, TokenDelta, TokenLogprob

# Logits of every position of a chunk are wide: 64 rows of a vocabulary of 152,000 are 39 MB in float32.
SCORED_TOKENS = 64


class Status(Enum):
    WAITING = "waiting"  # holds no blocks
    RUNNING = "running"  # holds blocks, may be in a step
    ENDED = "ended"  # its terminal delta has been returned


@dataclass(slots=True, eq=False)
class Sequence:
    """A request's tokens, and how many of them are computed. Written by the Scheduler and its PrefixCache alone.

    There is no prefill phase: `num_computed` catches up with `len(tokens)`, and everything else is derived.
    """

    request: EngineRequest
    arrival: int  # position in the order of arrival; a preemption does not change it
    arrived: float  # seconds, the scheduler's clock
    block_size: int
    max_length: int  # tokens of prompt and output with which it ends at the latest
    tokens: list[int] = field(default_factory=list)  # prompt, then output
    num_delivered: int = 0  # tokens of the prompt and of deltas; the others wait for the first one that is sampled
    num_computed: int = 0  # tokens whose keys and values are in the cache (collected steps only)
    start: int = 0  # position of the first token that is neither computed nor in flight: where its next row starts
    sampled_length: int = 0  # its length when the last of these steps that samples a token has been collected
    # Of each block of its tokens, an id for each of the CacheGroups; the ids of freed blocks stay.
    block_ids: list[int] = field(default_factory=list)
    capacity: int = 0  # tokens that have blocks
    num_freed: list[int] = field(default_factory=list)  # of each window, the number of blocks that are before it
    hashes: list[bytes] = field(default_factory=list)  # of the first full blocks, as far as they were needed
    num_published: int = 0  # blocks that other sequences can find
    publish_at: int = 0  # number of computed tokens at which the next block is to be published or freed
    status: Status = Status.WAITING
    new_to_runner: bool = True  # its next row carries all block ids
    num_sent_blocks: int = 0  # block ids that the runner has
    snapshots: tuple[int, Ids[tuple[int, int]]] | None = None  # of its next row
    cached_tokens: int = 0  # of the prompt, found in the prefix cache at the first start
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)  # of the prompt's tokens from the second on
    has_started: bool = False  # at least once
    scheduled: float = 0.0  # when it first started
    first_token: float = 0.0
    last_token: float = 0.0
    preemptions: int = 0
    num_reported: int = -1  # preemptions in the stats that were last sent; -1: none were sent
    gave_way: bool = False  # it was last preempted for another flow or with its step, and not because blocks ran out
    passed: int | None = None  # when it last started: the id of the first sequence in turn, for which blocks lacked
    # Of the request; read for every row of every step.
    id: int = field(init=False)
    flow: str = field(init=False)
    prompt_len: int = field(init=False)
    is_plain: bool = field(init=False)  # its rows only sample: it is neither embedded nor has its prompt scored

    def __post_init__(self) -> None:
        self.tokens = [*self.request.prompt_ids, *self.request.output_ids]
        self.num_delivered = len(self.tokens)
        self.id, self.flow, self.prompt_len = self.request.id, self.request.flow, len(self.request.prompt_ids)
        self.is_plain = self.pooling is None and self.request.params.prompt_logprobs is None

    @property
    def lacked_blocks(self) -> bool:
        """Whether it was last preempted because blocks ran out."""
        return self.preemptions > 0 and not self.gave_way

    @property
    def is_scored(self) -> bool:
        """Whether log-probabilities of the prompt are still to be computed."""
        return not self.is_plain and self.pooling is None and len(self.prompt_logprobs) < self.prompt_len - 1

    @property
    def pooling(self) -> Pooling | None:
        return self.request.params.pooling

    @property
    def is_averaged(self) -> bool:
        """Whether the hidden states of all its tokens are pooled."""
        return self.pooling is not None and self.pooling.kind == "mean"

    @property
    def needs_all(self) -> bool:
        """Whether each of its tokens must be computed: cached tokens have neither logits nor hidden states."""
        return self.is_scored or self.is_averaged

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def length(self) -> int:
        """Number of its tokens, including the one that a step in flight samples."""
        return max(len(self.tokens), self.sampled_length)

    @property
    def num_inflight(self) -> int:
        """Number of its tokens in steps that have not been collected."""
        return self.start - self.num_computed

    @property
    def remaining(self) -> int:
        """Tokens that no step has computed or is computing, and that are needed.

        The token that a step in flight samples is needed if it is not the last one. Whether it is a stop token is not
        known yet: if it is, the row is computed in vain.
        """
        length = len(self.tokens)
        if self.sampled_length > length:
            length = self.sampled_length
            if length >= self.max_length:
                return 0
        return length - self.start

    @property
    def is_guess(self) -> bool:
        """Whether its next row may well be in vain: its grammar can force the tokens after the one in flight.

        Beside other rows it costs little. A step of such rows alone would delay the next one.
        """
        return self.sampled_length > len(self.tokens) and self.request.params.grammar is not None

    @property
    def most(self) -> int:
        """The most tokens that it can compute in one step."""
        remaining = self.remaining
        return SCORED_TOKENS if remaining > SCORED_TOKENS and self.is_scored else remaining

    @property
    def is_prompt(self) -> bool:
        """Whether it has more than its last token to compute (also after a preemption), or has not begun."""
        return self.start == 0 or len(self.tokens) - self.start > 1

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks that it lacks for its first `num_tokens` tokens, in each group of layers."""
        return max(0, -((self.capacity - num_tokens) // self.block_size))

    def enter(self) -> Entered:
        """Return what the runner must know before the sequence's first row, and now does."""
        params = self.request.params
        self.new_to_runner = False
        return Entered(self.id, params, self.prompt_len, list(self.tokens) if params.uses_history else [])

    def launch(self, count: int) -> Row:
        """Return the row that computes its next `count` tokens, which are in flight from now on."""
        start, tokens, length = self.start, self.tokens, len(self.tokens)
        end = self.start = start + count
        is_last = end >= length and end >= self.sampled_length
        token_ids = [PENDING] if start >= length else [tokens[start]] if count == 1 else tokens[start:end]
        new_block_ids: Ids[int] = ()
        if self.num_sent_blocks < len(self.block_ids):
            new_block_ids = self.block_ids[self.num_sent_blocks :]
            self.num_sent_blocks = len(self.block_ids)
        if self.is_plain:
            if is_last:
                self.sampled_length = end + 1
            row = Row(self.id, start, token_ids, new_block_ids, 1 if is_last else 0)
            return row if self.snapshots is None else replace(row, snapshots=self.snapshots)
        scored = tokens[start + 1 : end + 1] if self.is_scored else ()
        pooling = self.pooling
        embeds = is_last and pooling is not None
        if is_last and not embeds:
            self.sampled_length = end + 1
        pools_logits = pooling is not None and pooling.kind == "logits"
        return Row(
            seq_id=self.id,
            start=start,
            token_ids=token_ids,
            new_block_ids=new_block_ids,
            num_logits=len(scored) + (is_last and (pooling is None or pools_logits)),
            scored=scored,
            num_hidden=0 if pooling is None or pools_logits else count if self.is_averaged else int(embeds),
            embeds=embeds,
            snapshots=self.snapshots,
        )

    def append(self, sampled: Sampled) -> str | None:
        """Append sampled and forced tokens up to its end; returns the finish reason, or None if it has not ended."""
        tokens, params, left = self.tokens, self.request.params, len(sampled.token_ids)
        for token in sampled.token_ids:
            tokens.append(token)
            left -= 1
            if token in params.stop_ids and self.num_output >= params.min_tokens:
                return "stop"
            if len(tokens) >= self.max_length:
                return "stop" if sampled.is_last and not left else "length"
        return "stop" if sampled.is_last else None

    def add_scores(self, row: Row, scores: list[TokenLogprob]) -> None:
        """Add the log-probabilities of a row's prompt tokens. After a preemption those that are known stay."""
        known = max(0, len(self.prompt_logprobs) - row.start)
        self.prompt_logprobs += scores[known:]

    def take_delta(self, sampled: Sampled, now: float) -> TokenDelta:
        """Return the delta of the tokens that none has had yet, which from now on one has."""
        tokens, first = self.tokens, self.num_delivered
        self.num_delivered = length = len(tokens)
        token_ids = (tokens[first],) if first + 1 == length else tuple(tokens[first:])
        self.last_token = now
        if self.num_reported == self.preemptions and sampled.logprobs is None:
            return TokenDelta(id=self.id, token_ids=token_ids)
        is_first, has_news = self.num_reported < 0, self.num_reported != self.preemptions
        self.num_reported, self.first_token = self.preemptions, self.first_token or now
        has_scores = is_first and self.request.params.prompt_logprobs is not None
        return TokenDelta(
            id=self.id,
            token_ids=token_ids,
            logprobs=None if sampled.logprobs is None else tuple(sampled.logprobs),
            prompt_logprobs=tuple(self.prompt_logprobs) if has_scores else None,
            # A reader that ends a request at a stop string never sees its last delta.
            stats=self.stats() if has_news else None,
        )

    def terminal_delta(self, reason: str, error: RowError | None, delta: TokenDelta | None) -> TokenDelta:
        """Return `delta`, or one without tokens, as the last one of the request."""
        delta = replace(delta or TokenDelta(id=self.id), finish_reason=reason, stats=self.stats())
        if error is None:
            return delta
        field = self.request.params.narrowest if error.code is ErrorCode.NO_TOKEN_LEFT else error.field
        return replace(delta, error=error.message, code=error.code, field=field)

    def stats(self) -> RequestStats:
        return RequestStats(
            prompt_tokens=self.prompt_len,
            cached_tokens=self.cached_tokens,
            output_tokens=self.num_delivered - self.prompt_len,
            arrived=self.arrived,
            scheduled=self.scheduled,
            first_token=self.first_token,
            last_token=self.last_token,
            preemptions=self.preemptions,
        )
