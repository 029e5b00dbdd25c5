"""Scheduler: which sequences compute which tokens in the next step.

Iteration-level ("continuous") batching after Yu et al. 2022, "Orca": sequences join and leave at every step. A step has
one budget of tokens. There is no prefill phase and no decode phase: a row is the next tokens that a sequence has not
computed, one for a sequence that samples, a chunk for a prompt (Agrawal et al. 2023, "SARATHI"). The scheduler is plain
Python on integers, without tensors, and its only notion of time is its clock.
"""

from __future__ import annotations

import math
import time
from bisect import insort
from collections.abc import Callable, Set
from functools import partial

from .batch import Batch, Embedded, Row, RowError, Sampled, StepResult
from .blocks import BlockPool
from .cache_groups import CacheGroups
from .config import EngineConfig
from .counters import Counters, StepReporter
from .policy import crowd, order
from .refusal import refusal
from .sequence import SCORED_TOKENS, Sequence, Status
from .service import OUTPUT_COST, Service
from .snapshots import cache_for
from .step_limits import StepLimits
from .types import EngineRequest, StepStats, TokenDelta
from .waiting import WaitingQueue

# Part of the blocks that stays free when a request is admitted, so that running sequences can grow without preemption.
WATERMARK = 0.03
# Tokens of scored prompts in a step, for each sequence that can run. All of them have logits, which then take less
# memory than sampling for as many sequences as can run, which is planned (memory.SAMPLER_BYTES).
MAX_SCORED = 4

WAITING, RUNNING, ENDED = Status  # read for each row: an Enum's members take longer to read than a module's names


class Scheduler:
    """Owner of all sequences; their blocks belong to its PrefixCache. Every method runs on the loop's thread."""

    def __init__(
        self,
        config: EngineConfig,
        num_blocks: int,
        vocab_size: int = 1 << 31,
        clock: Callable[[], float] = time.monotonic,
        groups: CacheGroups | None = None,
        *,
        has_states: bool = False,
    ) -> None:
        """`config` is resolved, so max_len, max_seqs and others are set. groups, has_states: of the model's layers."""
        assert config.max_len and config.max_seqs and config.max_batched_tokens
        self.config = config
        groups = groups or CacheGroups()
        longest = groups.longest(num_blocks, config.block_size, config.max_batched_tokens)
        self.max_len = config.max_len if longest is None else min(config.max_len, longest)
        self.vocab_size, self.clock = vocab_size, clock
        self.limits = StepLimits(config.max_seqs, config.max_batched_tokens)
        self.pool = BlockPool(num_blocks)
        self.cache = cache_for(self.pool, config, groups, has_states=has_states)
        self.service = Service()
        self.waiting = WaitingQueue(self.service, by_priority=config.policy == "priority")
        self.running: list[Sequence] = []  # in order of arrival
        self.by_id: dict[int, Sequence] = {}
        self.counters = Counters()
        self._reporter = StepReporter(self.counters, self.pool)
        self._order = order(config.policy, self._served)
        self._left: list[int] = []  # ids that the runner must forget
        self._in_flight: dict[int, list[Sequence]] = {}  # step -> the sequences of its rows
        self._arrivals = self._steps = 0
        self._scored_left = 0  # tokens of scored prompts that the step may still have, see MAX_SCORED
        self._cohort: set[int] = set()  # under the policy `static`: the sequences of the batch that runs

    # -- requests arrive and end ----------------------------------------------------------------------------

    def add(self, request: EngineRequest, forced: list[int] | None = None) -> TokenDelta | None:
        """Put a request into the queue. If it can never run, its terminal delta is returned.

        forced: the first tokens of its output, fewer than `output_limit`; they are part of its first delta.
        """
        reason = refusal(request, self.max_len, self.vocab_size)
        if request.id in self.by_id:
            reason = f"request id {request.id} is in use"
        if reason:
            return TokenDelta(id=request.id, finish_reason="error", error=reason)
        max_length = min(len(request.prompt_ids) + request.params.max_tokens, self.max_len)
        seq = Sequence(request, self._arrivals, self.clock(), self.config.block_size, max_length)
        if forced:
            seq.tokens += forced
            self.counters.forced_tokens += len(forced)
        self._arrivals += 1
        self.by_id[seq.id] = seq
        self.service.enter(seq.flow, self.waiting.flows)
        self.waiting.add(seq)
        return None

    def abort(self, request_id: int) -> TokenDelta | None:
        """End a request, and discard what steps in flight compute for it. Unknown ids are ignored."""
        seq = self.by_id.get(request_id)
        return None if seq is None else self._end(seq, "abort")

    def output_limit(self, request: EngineRequest) -> int:
        """Return the most tokens that a new request's output can get; 0 or less: it can never run."""
        length = len(request.prompt_ids) + len(request.output_ids)
        return min(request.params.max_tokens - len(request.output_ids), self.max_len - length)

    def output_left(self, request_id: int) -> int:
        """Return the most tokens that a running request's output can still get; more are cut off."""
        seq = self.by_id[request_id]
        return seq.max_length - len(seq.tokens)

    def is_awaited(self, row: Row) -> bool:
        """Return whether the token that a row in flight samples is needed: its request goes on, and no grammar has
        forced the token since."""
        seq = self.by_id.get(row.seq_id)
        return seq is not None and row.end == len(seq.tokens)

    # -- one step -------------------------------------------------------------------------------------------

    def schedule(self) -> Batch | None:
        """Return the rows of the next step, or None if there is nothing to compute now.

        Steps in flight are taken to succeed: rows start where theirs end. A sequence in flight is not preempted,
        because a step writes to its blocks. If one would have to be, the result is None until that step is collected.
        """
        chosen: dict[Sequence, int] = {}  # number of tokens
        self._scored_left = max(SCORED_TOKENS, MAX_SCORED * self.limits.max_seqs)
        if (self.limits.is_alone and self._in_flight) or not self._make_way():
            return None
        preempted = self.counters.preempted
        # Also those that compute the last token of a prompt. Most steps have none, so only few properties are read.
        prompts = [seq for seq in self.running if seq.start < seq.prompt_len or len(seq.tokens) - seq.start > 1]
        num_prompts = sum([seq.is_prompt for seq in prompts])
        share = self.limits.share(len(self.waiting) + num_prompts, self.config.long_prefill_tokens)
        # Without prompts and with one flow, only priorities change the order of arrival.
        is_in_order = not num_prompts and self.service.num_flows == 1 and self.config.policy != "priority"
        queue = self.running if is_in_order else sorted(self.running, key=self._order)
        left = self._serve_running(chosen, share, queue)
        if left is None:
            return None
        # A sequence that was just preempted is first in the queue, or among those of its priority: none may pass it.
        budget = self._admit(chosen, left, share) if self.counters.preempted == preempted else left
        if num_prompts or budget != left:
            self._top_up(chosen, budget)
        has_prompts = bool(prompts) or budget != left
        return None if all(seq.is_guess for seq in chosen) else self._batch(chosen, has_prompts)

    def _make_way(self) -> bool:
        """Preempt sequences of flows that run several if another flow runs none and cannot start one.

        No flow then waits for the end of another's long outputs. A preempted sequence loses little: its full blocks
        stay in the prefix cache until they are needed. Returns False if the next one to preempt is in flight.
        """
        starved = self.waiting.starved(self.running)
        if starved is None or self._can_start(starved):
            return True
        victims = crowd(self.running, self._order, partial(self._yields_to, other=starved), starved)
        if not self._can_start(starved, without=set(victims)):
            return True  # in vain
        for victim in victims:
            if victim.num_inflight:
                return False
            self._preempt(victim, gave_way=True)
            if self._can_start(starved):
                break
        return True

    def _yields_to(self, seq: Sequence, other: Sequence) -> bool:
        is_urgent = self.waiting.priority(seq) < self.waiting.priority(other)
        return self.config.policy != "static" and not is_urgent

    def _can_start(self, seq: Sequence, without: Set[Sequence] = frozenset()) -> bool:
        """Return whether the limits and the blocks allow a waiting sequence to start now, or if those did not run."""
        hits = self.cache.match(seq)
        if hits is None:  # it waits for another one to compute its prefix
            return True
        if len(self.running) - len(without) >= self.limits.max_seqs:
            return False
        return self._fits(seq, hits, self._promised(without) - self.cache.freed(without, hits))

    def _promised(self, without: Set[Sequence] = frozenset()) -> int:
        """Return the number of blocks that running sequences still need for the tokens that they have."""
        return sum(self.cache.lacking(seq, seq.start + seq.remaining) for seq in self.running if seq not in without)

    def _fits(self, seq: Sequence, hits: list[int], promised: int) -> bool:
        """Return whether all tokens of a waiting sequence, whose cached prefix is `hits`, can have blocks."""
        watermark = math.ceil(WATERMARK * self.pool.total) if self.running else 0
        return self.cache.fits(seq, hits, promised + watermark)

    def _serve_running(self, chosen: dict[Sequence, int], share: int, queue: list[Sequence]) -> int | None:
        """Choose tokens of running sequences, in order; returns the budget that is left, None as `_grow`."""
        budget = self.limits.budget
        starved = self.waiting.starved(self.running)  # prompts leave it a part of the step
        reserve = 0 if starved is None or not self._can_start(starved) else min(starved.most, budget // 2)
        # Every running sequence gets a token in every step, except under the policy that puts prompts first.
        keeps = 0 if self.config.policy == "prefill-first" else 1
        others = keeps * len(queue)
        for seq in tuple(queue):
            others -= keeps
            # Nearly always one, the last token; if none, a token that a step in flight samples may remain.
            count, room = len(seq.tokens) - seq.start or seq.remaining, budget - others
            if count <= 0 or room <= 0 or seq.status is not RUNNING:
                continue
            if count > 1:
                count = self._score(seq, min(seq.most, share, room - reserve))
            if seq.start + count <= seq.capacity:
                chosen[seq] = count
                budget -= count
                continue
            preempted = self.counters.preempted
            grown = self._grow(seq, count, chosen)
            if grown is None:
                return None
            if grown:
                chosen[seq] = count
                budget -= count
            if self.counters.preempted != preempted:  # of sequences that had been chosen
                budget = self.limits.budget - sum(chosen.values())
        return budget

    def _score(self, seq: Sequence, count: int) -> int:
        """Return the tokens of `count`, at least one, that a prompt may have beside the scored prompts of the step."""
        if seq.is_scored:
            count = min(count, self._scored_left)
            self._scored_left -= max(0, count)
        return max(1, count)

    def _grow(self, seq: Sequence, count: int, chosen: dict[Sequence, int]) -> bool | None:
        """Take blocks for `count` more tokens, preempting the last sequences in order; False if `seq` is among them.

        None if the next one to preempt is in flight: a step must be collected first.
        """
        while not self.cache.grow(seq, seq.start + count):
            victim = max(self.running, key=self._order)
            if victim.num_inflight:
                return None
            self._preempt(victim)
            chosen.pop(victim, None)
            if victim is seq:
                return False
        return True

    def _preempt(self, seq: Sequence, *, gave_way: bool = False) -> None:
        """Take all blocks from a running sequence; it waits, and will compute its tokens again."""
        assert not seq.num_inflight, "a step writes to the blocks of this sequence"
        self._leave(seq)
        seq.status = WAITING
        seq.num_computed = seq.start = seq.num_sent_blocks = 0
        seq.new_to_runner, seq.gave_way = True, gave_way
        seq.preemptions += 1
        self.counters.preempted += 1
        self.waiting.add(seq)

    def _served(self, seq: Sequence) -> float:
        """Return how much a sequence's flow has been served, if there are several flows."""
        return self.service.of(seq.flow) if self.service.num_flows > 1 else 0.0

    def _admit(self, chosen: dict[Sequence, int], budget: int, share: int) -> int:
        """Start waiting sequences in turn, while limits and blocks allow it; returns the budget that is left."""
        if budget <= 0 or len(self.running) >= self.limits.max_seqs or not self.waiting:
            return budget
        if self.config.policy == "static" and not self._cohort:
            self._cohort = {seq.id for seq in list(self.waiting)[: self.limits.max_seqs]}
        promised = self._promised()
        running = {seq.flow for seq in self.running}
        held_up: Sequence | None = None
        for seq in self.waiting.in_turn(running):
            if budget <= 0 or len(self.running) >= self.limits.max_seqs:
                break
            if self._cohort and seq.id not in self._cohort:  # of another flow: members of the cohort may follow
                continue
            hits = self.cache.match(seq)
            if hits is None:  # a running sequence is filling the block that this one needs next
                continue
            if not self._fits(seq, hits, promised):
                if seq.flow in running or seq.lacked_blocks or self.config.policy == "static":
                    break
                held_up = held_up or seq  # others may pass it: they make way as soon as that lets it start
                continue
            count = self._score(seq, min(seq.most - self.cache.num_tokens(seq, hits), budget, share))
            self._start(seq, hits)
            seq.passed = None if held_up is None else held_up.id
            running.add(seq.flow)
            grown = self._grow(seq, count, chosen)
            assert grown, "an admitted sequence found no blocks"
            promised += self.cache.lacking(seq, len(seq.tokens))
            chosen[seq] = count
            budget -= count
        return budget

    def _start(self, seq: Sequence, hits: list[int]) -> None:
        """Move a waiting sequence, whose cached prefix is `hits`, to the running ones."""
        self.waiting.remove(seq)
        insort(self.running, seq, key=lambda other: other.arrival)
        self.cache.start(seq, hits)
        seq.num_computed = seq.start = seq.capacity
        seq.status = RUNNING
        seq.gave_way = False
        if not seq.has_started:
            seq.has_started = True
            seq.scheduled = self.clock()
            seq.cached_tokens = min(seq.num_computed, seq.prompt_len)
            self.service.start(seq.flow)
            self.service.charge(seq.flow, seq.remaining, seq.request.weight)
            if self.config.prefix_caching and not seq.needs_all:  # otherwise nothing was looked up
                self.counters.prefix_queries += len(seq.tokens)
                self.counters.prefix_hits += seq.num_computed

    def _top_up(self, chosen: dict[Sequence, int], budget: int) -> None:
        """Give what is left of the budget to the chosen prompts, so that a share never wastes a part of a step."""
        growing = [seq for seq, count in chosen.items() if budget > 0 and seq.is_prompt and count < seq.most]
        for seq in sorted(growing, key=self._order):
            more = min(seq.most - chosen[seq], budget, self._scored_left if seq.is_scored else budget)
            if more > 0 and self.cache.grow(seq, seq.start + chosen[seq] + more):
                chosen[seq] += more
                budget -= more
                self._scored_left -= more * seq.is_scored

    def _batch(self, chosen: dict[Sequence, int], has_prompts: bool) -> Batch:
        everyone = len(chosen) == len(self.running)
        seqs = list(self.running) if everyone else [seq for seq in self.running if seq in chosen]
        entered = [seq.enter() for seq in seqs if seq.new_to_runner]
        own = seqs if has_prompts else ()  # otherwise each row is the last token of an output
        prompts = [seq for seq in own if seq.start < seq.prompt_len or len(seq.tokens) - seq.start > 1]
        prompt_tokens = sum([chosen[seq] for seq in prompts])
        self.cache.prepare(chosen)
        rows = [seq.launch(chosen[seq]) for seq in seqs]
        left, self._left = self._left, []
        self._steps += 1
        self._in_flight[self._steps] = seqs
        return Batch(self._steps, rows, entered, left, prompt_tokens)

    # -- a step's result ------------------------------------------------------------------------------------

    def update(self, batch: Batch, result: StepResult) -> list[TokenDelta]:
        """Record what a step computed; returns new tokens and terminal deltas, in order of arrival.

        Steps are collected in the order in which they were scheduled.
        """
        deltas = []
        now = self.clock()
        self.limits.recover()
        rows = zip(self._landed(batch.step), batch.rows, result.outcomes, strict=True)
        for index, (seq, row, outcome) in enumerate(rows):
            if seq.status is ENDED:  # after this step was launched
                continue
            seq.num_computed += len(row.token_ids)
            if seq.num_computed >= seq.publish_at:
                self.cache.publish(seq)
            if row.scored:
                seq.add_scores(row, result.prompt_logprobs.get(index, []))
            if seq.num_computed < len(seq.tokens) and row.is_sampled:  # a grammar has forced this token meanwhile
                continue
            if isinstance(outcome, Sampled):  # `match` takes longer than all else here
                count = len(outcome.token_ids)
                if count > 1:
                    self.counters.forced_tokens += count - 1
                self.service.charge(seq.flow, OUTPUT_COST * count, seq.request.weight)
                reason, delta = seq.append(outcome), seq.take_delta(outcome, now)
                deltas.append(self._end(seq, reason, delta=delta) if reason else delta)
            elif isinstance(outcome, Embedded):
                seq.last_token = now
                delta = TokenDelta(id=seq.id, embedding=outcome.embedding)
                deltas.append(self._end(seq, "stop", delta=delta))
            elif outcome is not None:
                deltas.append(self._end(seq, "error", error=outcome))
        self.counters.output_tokens += sum([len(delta.token_ids) for delta in deltas])
        return deltas

    def _landed(self, step: int) -> list[Sequence]:
        """Record that a step is not in flight any more; returns the sequences of its rows, some of which have ended."""
        self.cache.collected(step)
        return self._in_flight.pop(step)

    def abandon(self, batch: Batch, *, may_fit: bool = False) -> list[TokenDelta]:
        """Discard a step that ran out of memory: its largest request fails, and steps are smaller for a while.

        No other step may be in flight. may_fit: another one was when memory ran out. Then no request fails, and for a
        while each step is launched alone.
        """
        seqs = self._landed(batch.step)
        assert not self._in_flight, "a step that follows the abandoned one is in flight"
        for seq in seqs:
            seq.start, seq.sampled_length = seq.num_computed, 0
            if self.cache.keeps_states and seq.status is RUNNING:  # the step may have changed its states
                self._preempt(seq, gave_way=True)
        if may_fit:
            self.limits.separate()
            return []
        self.limits.shrink(len(batch.rows))
        rows = zip(seqs, batch.rows, strict=True)
        largest, _ = max(rows, key=lambda pair: (len(pair[1].token_ids), pair[0].arrival))
        if largest.status is ENDED:
            return []
        return [self._end(largest, "error", error=RowError("the step that this request was in ran out of memory"))]

    def _end(
        self, seq: Sequence, reason: str, *, error: RowError | None = None, delta: TokenDelta | None = None
    ) -> TokenDelta:
        """End a sequence; returns its terminal delta: `delta` with the reason, or one without tokens."""
        if seq.status is RUNNING:
            self._leave(seq)
        else:
            self.waiting.remove(seq)
        seq.status = ENDED
        del self.by_id[seq.id]
        self.service.leave(seq.flow)
        self._cohort.discard(seq.id)
        return seq.terminal_delta(reason, error, delta)

    def _leave(self, seq: Sequence) -> None:
        """Take a sequence out of the running ones: it returns its blocks, and the runner forgets it.

        The runner launches the next step after those in flight, so it can give the slot to another sequence then.
        """
        self.running.remove(seq)
        self.cache.release(seq, self._steps if seq.num_inflight else None)
        if not seq.new_to_runner:
            self._left.append(seq.id)

    # -- what others may know -------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        return not self.by_id

    def stats(self, batch: Batch, seconds: dict[str, float], wall_time: float) -> StepStats:
        """Return the figures of a step for the metrics and the step log. Called once per step, after `update`."""
        return self._reporter.stats(
            batch,
            budget=self.limits.budget,
            running=len(self.running),
            waiting=len(self.waiting),
            seconds=seconds,
            wall_time=wall_time,
        )

    def check(self) -> None:
        """Raise AssertionError if the state is inconsistent; used by tests, the simulator and a loop in debug mode."""
        self.cache.check(self.running)
        waiting = list(self.waiting)
        assert len(self.by_id) == len(waiting) + len(self.running), "a sequence is in no list or in two"
        assert len(waiting) == len(self.waiting), "the number of waiting sequences is wrong"
        assert [s.arrival for s in self.running] == sorted(s.arrival for s in self.running), "running is out of order"
        assert not any(seq.block_ids or seq.num_computed for seq in waiting), "a waiting sequence holds blocks"
        assert self._in_flight or not any(seq.num_inflight for seq in self.running), "tokens are in no step"
        assert self.service.num_flows == len({seq.flow for seq in self.by_id.values()}), "a flow is not counted"
