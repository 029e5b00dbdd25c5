"""Counters: the scheduler's totals, and the figures of a step."""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from .batch import Batch
from .blocks import BlockPool
from .types import StepStats


class Counters(Struct):
    """Totals since the engine's start."""

    preempted: int = 0  # sequences
    prefix_queries: int = 0  # tokens
    prefix_hits: int = 0
    output_tokens: int = 0
    forced_tokens: int = 0  # that a grammar determined, and that were not sampled


class StepReporter:
    """Computes the figures of each step; those of the counters are what was added since the step before."""

    def __init__(self, counters: Counters, pool: BlockPool) -> None:
        self._counters = counters
        self._pool = pool
        self._reported = replace(counters)

    def stats(
        self, batch: Batch, *, budget: int, running: int, waiting: int, seconds: dict[str, float], wall_time: float
    ) -> StepStats:
        """Return the figures for the metrics and the step log. Called once per step, after `update`."""
        now, before = self._counters, self._reported
        self._reported = replace(now)
        lengths, starts = [len(row.token_ids) for row in batch.rows], [row.start for row in batch.rows]
        tokens = sum(lengths)
        context = pairs = sum(starts) + tokens
        if tokens > len(lengths):  # otherwise each row's one token attends to all of its context
            pairs = sum([n * start + n * (n + 1) // 2 for start, n in zip(starts, lengths, strict=True)])
        return StepStats(
            step=batch.step,
            time=wall_time,
            rows=tuple(zip([row.seq_id for row in batch.rows], lengths, strict=True)),
            budget=budget,
            prompt_tokens=batch.prompt_tokens,
            decode_tokens=tokens - batch.prompt_tokens,
            running=running,
            waiting=waiting,
            blocks_free=self._pool.num_free,
            blocks_cached=self._pool.num_cached,
            blocks_held=self._pool.num_held,
            blocks_total=self._pool.total,
            preempted=now.preempted - before.preempted,
            prefix_queries=now.prefix_queries - before.prefix_queries,
            prefix_hits=now.prefix_hits - before.prefix_hits,
            output_tokens=now.output_tokens - before.output_tokens,
            forced_tokens=now.forced_tokens - before.forced_tokens,
            context=context,
            pairs=pairs,
            logits=sum([row.num_logits for row in batch.rows]),
            seconds=seconds,
        )
