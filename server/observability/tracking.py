"""Request tracking: the metrics of one request, and its log line."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from engine import RequestStats

from .logs import request_line
from .metrics import ABORT_CAUSES, FINISH_REASONS, Metrics

MAX_GAPS = 4096  # per choice, for the median in the log


class RequestTracker:
    """Records one request, from its admission to the end of its last choice, in the metrics and the log.

    Choices have their index in the API: prompt index * n + i.
    """

    def __init__(self, metrics: Metrics, label: str, n: int, prompts: Sequence[int], max_tokens: int | None) -> None:
        self.metrics = metrics
        self.label = label
        self.n = n
        self.prompts = prompts  # tokens of each
        self.began = metrics.clock()
        self.choices = [_Choice() for _ in range(n * len(prompts))]
        self.prefilled: set[int] = set()  # prompts that have a first token
        self.cached: dict[int, int] = {}  # by prompt: cached tokens of its first choice
        self.cause: str | None = None  # of the abort
        self.generates = max_tokens is not None
        metrics.params_n.observe(n)
        if max_tokens is not None:
            metrics.max_tokens.observe(max_tokens)

    def delivered(self, num_tokens: int, choice: int = 0, stats: RequestStats | None = None) -> None:
        """Record tokens that are being delivered to the client, and the stats that came with them or before."""
        mine, metrics = self.choices[choice], self.metrics
        if num_tokens < 1 or mine.reason is not None:
            return
        mine.stats = stats
        now = metrics.clock()
        metrics.delivered.num_tokens += num_tokens
        gaps = num_tokens
        if mine.tokens == 0:
            self._begun(mine)
            self._prefill_done(choice // self.n)
            mine.first = mine.last = now
            metrics.ttft.observe(now - self.began)
            gaps -= 1
        mine.tokens += num_tokens
        if gaps:
            # Tokens delivered together share the time since the previous one: the sum stays the time that has passed.
            gap = (now - mine.last) / gaps
            metrics.delivered.observe(gap, gaps)
            mine.gaps.extend([gap] * min(gaps, MAX_GAPS - len(mine.gaps)))
        mine.last = now

    def finished(self, reason: str, stats: RequestStats | None = None, choice: int = 0) -> None:
        """Record the end of one choice; only the first call counts."""
        mine, metrics = self.choices[choice], self.metrics
        if mine.reason is not None:
            return
        mine.reason = reason if reason in FINISH_REASONS else "error"
        self._begun(mine)
        metrics.success[mine.reason].inc()
        prompt = choice // self.n
        metrics.prompt_lengths.observe(self.prompts[prompt])
        if self.generates:
            metrics.output_lengths.observe(mine.tokens)
        metrics.latency.observe(metrics.clock() - self.began)
        if mine.reason in ("stop", "length"):  # also without tokens, if a stop token was sampled first
            self._prefill_done(prompt)
        if mine.tokens > 1:
            metrics.per_token.observe((mine.last - mine.first) / (mine.tokens - 1))
        if stats is not None:
            metrics.preemptions_each.observe(stats.preemptions)
            self._timings(mine, stats)
            if choice % self.n == 0:
                self.cached[prompt] = stats.cached_tokens
                metrics.prompt_tokens_cached.inc(stats.cached_tokens)
        if all(each.reason for each in self.choices):
            self._log()

    def _timings(self, mine: _Choice, stats: RequestStats) -> None:
        metrics = self.metrics
        if stats.scheduled:
            mine.queued = max(0.0, stats.scheduled - stats.arrived)
            metrics.queue_seconds.observe(mine.queued)
        # The server may end a choice itself, as at a stop string. Its stats are then older than its last token.
        last_token = mine.last if mine.tokens > stats.output_tokens else stats.last_token
        if stats.scheduled and last_token:
            # An embedding has no first token: all of its time is prefill.
            metrics.prefill_seconds.observe(max(0.0, (stats.first_token or last_token) - stats.scheduled))
            if stats.first_token:
                metrics.decode_seconds.observe(max(0.0, last_token - stats.first_token))
            metrics.inference_seconds.observe(max(0.0, last_token - stats.scheduled))

    def aborted(self, cause: str) -> None:
        """End all open choices, for one of ABORT_CAUSES."""
        still_open = [i for i, choice in enumerate(self.choices) if choice.reason is None]
        if not still_open:
            return
        self.cause = cause if cause in ABORT_CAUSES else "error"
        self.metrics.aborts[self.cause].inc()
        for choice in still_open:
            self.finished("error" if self.cause == "error" else "abort", self.choices[choice].stats, choice)

    def close(self) -> None:
        """End open choices as disconnected, for a `finally`: otherwise all have ended before."""
        self.aborted("disconnect")
        for choice in self.choices:
            self.metrics.begun -= choice.has_begun
            choice.has_begun = False

    def _begun(self, choice: _Choice) -> None:
        if self.generates and not choice.has_begun:  # an embedding request counts as one choice, whatever its inputs
            choice.has_begun = True
            self.metrics.begun += 1

    def _prefill_done(self, prompt: int) -> None:
        if prompt not in self.prefilled:
            self.prefilled.add(prompt)
            self.metrics.prompt_tokens.inc(self.prompts[prompt])

    def _log(self) -> None:
        first = min((choice.first for choice in self.choices if choice.tokens), default=None)
        gaps = [gap for choice in self.choices for gap in choice.gaps]
        queued = [choice.queued for choice in self.choices if choice.queued is not None]
        reasons = [choice.reason for choice in self.choices if choice.reason]
        request_line(
            id=self.label,
            model=self.metrics.model,
            prompt_tokens=sum(self.prompts),
            cached_tokens=sum(self.cached.values()),
            output_tokens=sum(choice.tokens for choice in self.choices),
            queue_s=max(queued) if queued else None,
            ttft_s=None if first is None else first - self.began,
            itl_p50_s=median(gaps) if gaps else None,
            seconds=self.metrics.clock() - self.began,
            finish=",".join(dict.fromkeys(reasons)),
            cause=self.cause,
        )


@dataclass(slots=True, eq=False)
class _Choice:
    """The state of one choice."""

    tokens: int = 0
    first: float = 0.0
    last: float = 0.0
    gaps: array[float] = field(default_factory=lambda: array("f"))
    queued: float | None = None
    stats: RequestStats | None = None  # the latest, for a choice that is aborted
    has_begun: bool = False
    reason: str | None = None
