"""Scheduler: which sequences compute which tokens in the next step.

Iteration-level ("continuous") batching after Yu et al. 2022, "Orca": sequences join and leave at every step.
A step has one budget of tokens. There is no prefill phase and no decode phase: a row is the next tokens that a
sequence has not computed, one for a sequence that is drawing tokens, a chunk for a prompt (Agrawal et al. 2023,
"SARATHI"). The scheduler is plain Python on integers: it knows neither tensors nor time but through its clock.
"""

from __future__ import annotations

import math
import time
from bisect import insort
from collections import Counter, deque
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush

from msgspec.structs import replace

from .batch import Batch, Embedded, Entered, Row, RowError, Sampled, StepResult
from .blocks import BlockPool, root_hash
from .config import EngineConfig
from .sequence import Sequence, Status
from .service import OUTPUT_COST, Service
from .types import EngineRequest, ErrorCode, Pooling, StepStats, TokenDelta, TokenLogprob

# Logits of every position of a chunk are wide: 64 rows of a vocabulary of 152,000 are 39 MB in float32.
SCORED_TOKENS = 64
POOLINGS = ("last", "mean")
# Steps that must fit into memory, after one that did not, before larger ones are tried again: each failure costs
# somebody a request. After each further failure twice as many; after MOST_GOOD_STEPS the failures are forgotten.
GOOD_STEPS, MOST_GOOD_STEPS = 64, 1 << 14
# Blocks kept free when a request is admitted, so that those that run can grow before anyone must be preempted.
WATERMARK = 0.03


def order(policy: str, served: Callable[[Sequence], float]) -> Callable[[Sequence], tuple]:
    """Who is served first in a step and, reversed, who is preempted first; `served`: what its flow has had."""
    if policy == "priority":
        return lambda seq: (seq.request.priority, seq.is_prompt, served(seq), seq.arrival)
    if policy == "prefill-first":
        return lambda seq: (not seq.is_prompt, served(seq), seq.arrival)
    return lambda seq: (seq.is_prompt, served(seq), seq.arrival)


class Scheduler:
    """Owner of all sequences and of the block pool. Every method runs on the loop's thread."""

    def __init__(
        self,
        config: EngineConfig,
        num_blocks: int,
        vocab_size: int = 1 << 31,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`config` is resolved: max_len, max_seqs and max_batched_tokens are set."""
        assert config.max_len and config.max_seqs and config.max_batched_tokens
        self.max_len = min(config.max_len, num_blocks * config.block_size)
        self.max_seqs = config.max_seqs
        self.budget = config.max_batched_tokens
        self.config = config
        self.pool = BlockPool(num_blocks)
        self.vocab_size = vocab_size
        self.clock = clock
        self.service = Service()
        self.waiting: list[Sequence] = []  # sorted by `_line`; who of them starts next, `_in_turn` says
        self.running: list[Sequence] = []  # in order of arrival
        self.by_id: dict[int, Sequence] = {}
        self.num_preempted = 0  # in all
        self.num_forced = 0  # tokens that nobody drew
        self.num_output = 0  # tokens of outputs
        self.prefix_queries = 0  # tokens, in all
        self.prefix_hits = 0
        self._order = order(config.policy, self._served)
        self._filling: dict[bytes, int] = {}  # hash of a block that a running sequence is about to fill -> its id
        self._left: list[int] = []  # what the runner must forget
        self._arrivals = 0
        self._steps = 0
        self._cohort: set[int] = set()  # under the policy `static`: who belongs to the batch that runs
        self._good_steps = 0  # since the last one that ran out of memory, or since the limits were last raised
        self._patience = GOOD_STEPS // 2  # good steps after which they are raised, or the patience is forgotten
        self._told = (0, 0, 0, 0, 0)  # preempted, queries, hits, output, forced when stats were last given

    # -- requests come and go -------------------------------------------------------------------------------

    def add(self, request: EngineRequest, forced: list[int] | None = None) -> TokenDelta | None:
        """Put a request in line. What can never run gets its terminal delta at once.

        `forced`: the first tokens of its output, fewer than `room`; they are delivered with the first that is drawn.
        """
        reason = self._never(request)
        if reason:
            return TokenDelta(id=request.id, finish_reason="error", error=reason)
        seq = Sequence(
            request=request,
            arrival=self._arrivals,
            arrived=self.clock(),
            block_size=self.config.block_size,
            root=root_hash("salt:" + request.cache_salt),
        )
        if forced:
            seq.tokens += forced
            seq.num_untold = len(forced)
            self.num_forced += len(forced)
        self._arrivals += 1
        self.by_id[seq.id] = seq
        self.service.enter(request.flow)
        insort(self.waiting, seq, key=self._line)
        return None

    def abort(self, request_id: int) -> TokenDelta | None:
        """Stop a request: now when it is not in a step, else when that step is collected. Unknown ids are ignored."""
        seq = self.by_id.get(request_id)
        if seq is None:
            return None
        if seq.num_inflight:
            seq.aborted = True
            return None
        return self._end(seq, "abort")

    def room(self, request: EngineRequest) -> int:
        """Tokens that a new request's output may have; 0 or less: it can never run."""
        length = len(request.prompt_ids) + len(request.output_ids)
        return min(request.params.max_tokens - len(request.output_ids), self.max_len - length)

    def room_of(self, request_id: int) -> int:
        """Tokens that the output of a request that runs may still have; more are cut off."""
        seq = self.by_id[request_id]
        return min(seq.request.params.max_tokens - seq.num_output, self.max_len - len(seq.tokens))

    def _never(self, request: EngineRequest) -> str | None:
        """Why a request can never run; None when it can. The server refuses these at its door with better words."""
        length = len(request.prompt_ids) + len(request.output_ids)
        if request.id in self.by_id:
            return f"request id {request.id} is in use"
        if not request.prompt_ids:
            return "the prompt has no tokens"
        if request.params.pooling is not None:
            return self._never_pooled(request, request.params.pooling)
        if length >= self.max_len:
            return f"the prompt has {length} tokens, and the model takes {self.max_len} of prompt and output together"
        if request.params.max_tokens <= len(request.output_ids):
            return "there is no token left to draw"
        return self._strange((*request.prompt_ids, *request.output_ids))

    def _never_pooled(self, request: EngineRequest, pooling: Pooling) -> str | None:
        """The same for a prompt that becomes a vector: nothing is drawn, so that it may take all the room."""
        length = len(request.prompt_ids)
        if pooling.kind not in POOLINGS:
            return f"unknown pooling {pooling.kind!r}; known: {', '.join(POOLINGS)}"
        if pooling.dimensions is not None and pooling.dimensions < 1:
            return "a vector has at least one dimension"
        if request.output_ids:
            return "a prompt that becomes a vector has no output"
        if length > self.max_len:
            return f"the prompt has {length} tokens, and the model takes {self.max_len}"
        return self._strange(request.prompt_ids)

    def _strange(self, token_ids: tuple[int, ...]) -> str | None:
        if not all(0 <= token < self.vocab_size for token in token_ids):
            return f"a token id is outside of [0, {self.vocab_size})"
        return None

    # -- one step -------------------------------------------------------------------------------------------

    def schedule(self) -> Batch | None:
        """The rows of the next step, or None when there is nothing to compute."""
        chosen: dict[Sequence, int] = {}
        self._make_way()
        preempted = self.num_preempted
        share = self._share()
        budget = self._serve_running(chosen, share)
        if self.num_preempted == preempted:  # who was preempted is first in line; nobody passes it
            budget = self._admit(chosen, budget, share)
        self._top_up(chosen, budget)
        return self._batch(chosen) if chosen else None

    def _share(self) -> int:
        """Most tokens that one sequence may take of this step: a part of the budget while several prompts want it."""
        if len(self.waiting) + sum(seq.is_prompt for seq in self.running) <= 1:
            return self.budget
        return self.config.long_prefill_tokens or max(1, self.budget // 2)

    def _make_way(self) -> None:
        """Preempt sequences of flows that run several, where another flow runs none and finds no place or no blocks.

        So nobody waits for the end of somebody else's long outputs. What is preempted loses little: its full blocks
        stay in the prefix cache until others need them.
        """
        starved = self._starved()
        while starved is not None and not self._has_place(starved):
            counts = Counter(seq.request.flow for seq in self.running)
            crowd = [
                seq
                for seq in self.running
                if counts[seq.request.flow] > 1 and not seq.num_inflight and self._yields_to(seq, starved)
            ]
            if not crowd:
                return
            victim = max(crowd, key=self._order)
            self._preempt(victim)
            victim.gave_way = True

    def _starved(self) -> Sequence | None:
        """The sequence that waits and is next among flows that run nothing, where others run."""
        if self.service.num_flows < 2 or not self.waiting or not self.running:
            return None
        flows = {seq.request.flow for seq in self.running}
        return next((seq for seq in self._in_turn() if seq.request.flow not in flows), None)

    def _yields_to(self, seq: Sequence, other: Sequence) -> bool:
        return self.config.policy != "static" and self._line(seq)[0] >= self._line(other)[0]

    def _has_place(self, seq: Sequence) -> bool:
        """Whether a waiting sequence could start now, as far as places and blocks go."""
        if len(self.running) >= self.max_seqs:
            return False
        hits = self._match(seq)
        return hits is None or self._fits(seq, hits, self._promised())

    def _promised(self) -> int:
        """Blocks that running sequences will take for tokens that they have already."""
        return sum(max(0, seq.blocks_for(len(seq.tokens))) for seq in self.running)

    def _fits(self, seq: Sequence, hits: list[int], promised: int) -> bool:
        """Whether there are blocks for all tokens of a waiting sequence of which `hits` are cached."""
        need = seq.blocks_for(len(seq.tokens)) - len(hits)
        watermark = math.ceil(WATERMARK * self.pool.total) if self.running else 0
        idle_hits = sum(not self.pool.is_held(block) for block in hits)
        return self.pool.num_available - idle_hits - promised >= need + watermark

    def _reserve(self) -> int:
        """Tokens of a step that prompts leave to a flow that runs nothing yet and has waited for its turn."""
        starved = self._starved()
        return 0 if starved is None else min(self._most(starved), self.budget // 2)

    def _serve_running(self, chosen: dict[Sequence, int], share: int) -> int:
        """Give every running sequence its tokens, in order; returns the budget that is left."""
        budget = self.budget
        reserve = self._reserve()
        queue = sorted(self.running, key=self._order)
        # Every running sequence moves in every step, unless prompts are to come first at any price.
        keeps = 0 if self.config.policy == "prefill-first" else 1
        for index, seq in enumerate(queue):
            count = min(self._most(seq), share, budget - keeps * (len(queue) - index - 1))
            if count > 1:
                count = max(1, min(count, budget - reserve - keeps * (len(queue) - index - 1)))
            if seq.status is not Status.RUNNING or count <= 0:
                continue
            preempted = self.num_preempted
            if self._grow(seq, count, chosen):
                chosen[seq] = count
                budget -= count
            if self.num_preempted != preempted:
                budget = self.budget - sum(chosen.values())
        return budget

    def _most(self, seq: Sequence) -> int:
        """Tokens that a sequence could take of a step."""
        return min(seq.remaining, SCORED_TOKENS) if seq.is_scored else seq.remaining

    def _grow(self, seq: Sequence, count: int, chosen: dict[Sequence, int]) -> bool:
        """Take the blocks for `count` more tokens, preempting the last in order; False when that was `seq` itself.

        Sequences in flight are not preempted: the step that is running writes to their blocks. If all are, the sequence
        has to wait for a step to be collected, and the result is False as well.
        """
        while True:
            blocks = self.pool.take(max(0, seq.blocks_for(seq.start + count)))
            if blocks is not None:
                seq.block_ids += blocks
                return True
            victim = max((other for other in self.running if not other.num_inflight), key=self._order, default=None)
            if victim is None:
                return False
            self._preempt(victim)
            chosen.pop(victim, None)
            if victim is seq:
                return False

    def _preempt(self, seq: Sequence) -> None:
        """Take all blocks from a running sequence; it waits, and will compute its tokens again."""
        self._leave(seq)
        seq.status = Status.WAITING
        seq.num_computed = seq.num_published = seq.num_sent_blocks = 0
        seq.new_to_runner = True
        seq.preemptions += 1
        self.num_preempted += 1
        insort(self.waiting, seq, key=self._line)

    def _line(self, seq: Sequence) -> tuple[int, int]:
        """A sequence's place among all that wait."""
        return (seq.request.priority if self.config.policy == "priority" else 0), seq.arrival

    def _served(self, seq: Sequence) -> float:
        """What a sequence's flow has been served, where that makes a difference."""
        return self.service.of(seq.request.flow) if self.service.num_flows > 1 else 0.0

    def _in_turn(self) -> Iterator[Sequence]:
        """Waiting sequences in the order in which they may start.

        What was preempted for want of blocks comes first, then flows that run nothing, then the flow that has been
        served least. The sequences of a flow are in line.
        """
        if self.service.num_flows <= 1:
            yield from list(self.waiting)
            return

        def claim(flow: str) -> tuple[int, bool, bool, float, int, str]:
            seq = lines[flow][0]
            priority, arrival = self._line(seq)
            comes_first = seq.preemptions > 0 and not seq.gave_way
            return priority, not comes_first, flow in runs, self.service.of(flow), arrival, flow

        runs = {seq.request.flow for seq in self.running}
        lines: dict[str, deque[Sequence]] = {}
        for seq in self.waiting:
            lines.setdefault(seq.request.flow, deque()).append(seq)
        claims = [claim(flow) for flow in lines]
        heapify(claims)
        while claims:
            flow = heappop(claims)[-1]
            yield lines[flow].popleft()
            runs.add(flow)
            if lines[flow]:  # the flow has been charged for the one that has started
                heappush(claims, claim(flow))

    def _admit(self, chosen: dict[Sequence, int], budget: int, share: int) -> int:
        """Let waiting sequences start, in order, while there are tokens, places and blocks."""
        if budget <= 0 or len(self.running) >= self.max_seqs:
            return budget
        if self.config.policy == "static" and not self._cohort:
            self._cohort = {seq.id for seq in self.waiting[: self.max_seqs]}
        promised = self._promised()
        for seq in self._in_turn():
            if budget <= 0 or len(self.running) >= self.max_seqs:
                break
            if self._cohort and seq.id not in self._cohort:  # in turn, but another flow's; members may come after it
                continue
            hits = self._match(seq)
            if hits is None:  # a running sequence is filling the block that this one needs next
                continue
            if not self._fits(seq, hits, promised):
                break
            for block in hits:
                self.pool.share(block)
            seq.block_ids = hits
            seq.num_computed = len(hits) * seq.block_size
            seq.num_published = len(hits)
            count = min(self._most(seq), budget, share)
            self._start(seq)
            grown = self._grow(seq, count, chosen)
            assert grown, "an admitted sequence found no blocks"
            promised += max(0, seq.blocks_for(len(seq.tokens)))
            chosen[seq] = count
            budget -= count
        return budget

    def _match(self, seq: Sequence) -> list[int] | None:
        """Blocks of the sequence's longest cached prefix; None when its next block is being filled."""
        hits: list[int] = []
        if not self.config.prefix_caching or seq.needs_all:
            return hits
        # The last token is left to compute, and in a block of its own: shared blocks are never written.
        for index in range((len(seq.tokens) - 1) // seq.block_size):
            block = self.pool.find(seq.block_hash(index))
            if block is None:
                return None if seq.block_hash(index) in self._filling else hits
            hits.append(block)
        return hits

    def _start(self, seq: Sequence) -> None:
        self.waiting.remove(seq)
        insort(self.running, seq, key=lambda other: other.arrival)
        seq.status = Status.RUNNING
        seq.gave_way = False
        if self.config.prefix_caching:
            for index in range(len(seq.block_ids), len(seq.tokens) // seq.block_size):
                self._filling.setdefault(seq.block_hash(index), seq.id)
        if not seq.looked_up:
            seq.looked_up = True
            self.service.charge(seq.request.flow, seq.remaining, seq.request.weight)
            seq.scheduled = self.clock()
            seq.cached_tokens = min(seq.num_computed, seq.prompt_len)
            if self.config.prefix_caching:
                self.prefix_queries += len(seq.tokens)
                self.prefix_hits += seq.num_computed

    def _top_up(self, chosen: dict[Sequence, int], budget: int) -> None:
        """What nobody could use goes to the prompts in the step, so that a share never wastes a step."""
        for seq in sorted(chosen, key=self._order):
            more = min(self._most(seq) - chosen[seq], budget)
            if more > 0:
                blocks = self.pool.take(max(0, seq.blocks_for(seq.start + chosen[seq] + more)))
                if blocks is not None:
                    seq.block_ids += blocks
                    chosen[seq] += more
                    budget -= more

    def _batch(self, chosen: dict[Sequence, int]) -> Batch:
        rows, entered, prompt_tokens = [], [], 0
        for seq in self.running:
            if seq not in chosen:
                continue
            start, count = seq.start, chosen[seq]
            prompt_tokens += count if seq.is_prompt or not seq.num_output else 0
            if seq.new_to_runner:
                history = list(seq.tokens) if seq.request.params.uses_history else []
                entered.append(Entered(seq.id, seq.request.params, seq.prompt_len, history))
                seq.new_to_runner = False
            scored = seq.tokens[start + 1 : start + count + 1] if seq.is_scored else []
            is_last = start + count == len(seq.tokens)
            embeds = is_last and seq.pooling is not None
            rows.append(
                Row(
                    seq_id=seq.id,
                    start=start,
                    token_ids=seq.tokens[start : start + count],
                    new_block_ids=seq.block_ids[seq.num_sent_blocks :],
                    num_logits=len(scored) + (is_last and not embeds),
                    scored=scored,
                    num_hidden=count if seq.is_averaged else int(embeds),
                    embeds=embeds,
                )
            )
            seq.num_sent_blocks = len(seq.block_ids)
            seq.num_inflight += count
        left, self._left = self._left, []
        self._steps += 1
        return Batch(self._steps, rows, entered, left, prompt_tokens)

    def update(self, batch: Batch, result: StepResult) -> list[TokenDelta]:
        """Record what a step computed; returns new tokens and terminal deltas, in order of arrival."""
        deltas = []
        now = self.clock()
        self._recover()
        for index, (row, outcome) in enumerate(zip(batch.rows, result.outcomes, strict=True)):
            seq = self.by_id[row.seq_id]
            seq.num_inflight -= len(row.token_ids)
            seq.num_computed += len(row.token_ids)
            self._publish_blocks(seq)
            if row.scored:  # the prompt of a preempted sequence is scored again, and the known scores stay
                known = len(seq.prompt_logprobs) - row.start
                seq.prompt_logprobs += result.prompt_logprobs.get(index, ())[max(0, known) :]
            if seq.aborted:
                if not seq.num_inflight:
                    deltas.append(self._end(seq, "abort"))
                continue
            match outcome:
                case Sampled():
                    deltas.append(self._append(seq, outcome, now))
                case Embedded(embedding):
                    seq.last_token = now
                    deltas.append(self._end(seq, "stop", delta=TokenDelta(id=seq.id, embedding=embedding)))
                case RowError():
                    deltas.append(self._end(seq, "error", error=outcome))
        return deltas

    def _append(self, seq: Sequence, sampled: Sampled, now: float) -> TokenDelta:
        """Append the tokens of a row to its sequence; returns those that its reader has not got yet."""
        is_first = not seq.first_token
        seq.first_token = seq.first_token or now
        seq.last_token = now
        reason = self._extend(seq, sampled.token_ids, sampled.is_last)
        new, seq.num_untold = len(seq.tokens) - seq.num_untold, 0
        delta = TokenDelta(
            id=seq.id,
            token_ids=tuple(seq.tokens[new:]),
            logprobs=None if sampled.logprobs is None else tuple(sampled.logprobs),
            prompt_logprobs=self._scores(seq) if is_first else None,
            # A reader that ends a request at a stop string never sees its last delta.
            stats=seq.stats() if is_first else None,
        )
        self.num_output += len(delta.token_ids)
        return self._end(seq, reason, delta=delta) if reason else delta

    def abandon(self, batch: Batch) -> list[TokenDelta]:
        """A step ran out of memory: it does not count, its largest request fails, and steps are smaller for a while."""
        self._patience = min(MOST_GOOD_STEPS, self._patience * 2)
        self._good_steps = 0
        if self.budget <= self.max_seqs:  # fewer tokens did not help: fewer rows
            self.max_seqs = max(1, min(self.max_seqs, len(batch.rows)) - 1)
        largest = max(batch.rows, key=lambda row: (len(row.token_ids), self.by_id[row.seq_id].arrival))
        self.budget = max(self.max_seqs, self.budget // 2)
        deltas = []
        for row in batch.rows:
            seq = self.by_id[row.seq_id]
            seq.num_inflight -= len(row.token_ids)
            if seq.aborted:
                deltas.append(self._end(seq, "abort"))
            elif row is largest:
                error = RowError("the step that this request was in ran out of memory")
                deltas.append(self._end(seq, "error", error=error))
        return deltas

    @property
    def _is_reduced(self) -> bool:
        """Whether steps are smaller than the configuration says."""
        assert self.config.max_seqs and self.config.max_batched_tokens
        return self.budget < self.config.max_batched_tokens or self.max_seqs < self.config.max_seqs

    def _recover(self) -> None:
        """A step has fitted into memory: what an earlier one that did not has cost is given back little by little."""
        self._good_steps += 1
        if not self._is_reduced:
            if self._good_steps == MOST_GOOD_STEPS:
                self._patience = GOOD_STEPS // 2
        elif self._good_steps >= self._patience:
            assert self.config.max_seqs and self.config.max_batched_tokens
            self._good_steps = 0
            self.max_seqs = min(self.config.max_seqs, self.max_seqs + max(1, self.max_seqs // 2))
            self.budget = min(self.config.max_batched_tokens, max(2 * self.budget, self.max_seqs))

    def _extend(self, seq: Sequence, drawn: list[int], is_whole: bool) -> str | None:
        """Append what was drawn and what the grammar forces behind it, up to the sequence's end; gives its reason.

        `is_whole`: behind all of them the output must end.
        """
        self.num_forced += max(0, len(drawn) - 1)
        self.service.charge(seq.request.flow, OUTPUT_COST * len(drawn), seq.request.weight)
        for place, token in enumerate(drawn, 1):
            seq.tokens.append(token)
            seq.num_untold += 1
            reason = self._finish_reason(seq)
            if reason:
                return "stop" if is_whole and place == len(drawn) else reason
        return "stop" if is_whole else None

    def _finish_reason(self, seq: Sequence) -> str | None:
        params = seq.request.params
        if seq.tokens[-1] in params.stop_ids and seq.num_output >= params.min_tokens:
            return "stop"
        if seq.num_output >= params.max_tokens or len(seq.tokens) >= self.max_len:
            return "length"
        return None

    def _publish_blocks(self, seq: Sequence) -> None:
        """Full blocks can be found by others from now on, not earlier: their step has been collected."""
        if not self.config.prefix_caching:
            return
        for index in range(seq.num_published, seq.num_computed // seq.block_size):
            block_hash = seq.block_hash(index)
            self.pool.publish(seq.block_ids[index], block_hash)
            if self._filling.get(block_hash) == seq.id:
                del self._filling[block_hash]
            seq.num_published = index + 1

    def _scores(self, seq: Sequence) -> tuple[TokenLogprob, ...] | None:
        asked = seq.request.params.prompt_logprobs is not None
        return tuple(seq.prompt_logprobs) if asked else None

    def _end(
        self,
        seq: Sequence,
        reason: str,
        *,
        error: RowError | None = None,
        delta: TokenDelta | None = None,
    ) -> TokenDelta:
        """The terminal delta: `delta`, the sequence's last tokens, with its end in it, or one without tokens."""
        if seq.status is Status.RUNNING:
            self._leave(seq)
        else:
            self.waiting.remove(seq)
        seq.status = Status.ENDED
        del self.by_id[seq.id]
        self.service.leave(seq.request.flow)
        self._cohort.discard(seq.id)
        delta = replace(delta or TokenDelta(id=seq.id), finish_reason=reason, stats=seq.stats())
        if error is None:
            return delta
        field = seq.request.params.narrowest if error.code is ErrorCode.NO_TOKEN_LEFT else error.field
        return replace(delta, error=error.message, code=error.code, field=field)

    def _leave(self, seq: Sequence) -> None:
        """A running sequence gives back its blocks, its marks and its place at the runner."""
        self.running.remove(seq)
        self.pool.release(seq.block_ids)
        seq.block_ids = []
        for block_hash in seq.hashes[seq.num_published :]:
            if self._filling.get(block_hash) == seq.id:
                del self._filling[block_hash]
        if not seq.new_to_runner:
            self._left.append(seq.id)

    # -- what others may know -------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        return not self.by_id

    def stats(self, batch: Batch, seconds: dict[str, float], wall_time: float) -> StepStats:
        """The step as the metrics and the step log tell it. Called once per step, after `update`."""
        preempted, queries, hits, output, forced = self._told
        self._told = (self.num_preempted, self.prefix_queries, self.prefix_hits, self.num_output, self.num_forced)
        lengths = [len(row.token_ids) for row in batch.rows]
        return StepStats(
            step=batch.step,
            time=wall_time,
            rows=tuple((row.seq_id, length) for row, length in zip(batch.rows, lengths, strict=True)),
            budget=self.budget,
            prompt_tokens=batch.prompt_tokens,
            decode_tokens=sum(lengths) - batch.prompt_tokens,
            running=len(self.running),
            waiting=len(self.waiting),
            blocks_free=self.pool.num_free,
            blocks_cached=self.pool.num_cached,
            blocks_held=self.pool.num_held,
            blocks_total=self.pool.total,
            preempted=self.num_preempted - preempted,
            prefix_queries=self.prefix_queries - queries,
            prefix_hits=self.prefix_hits - hits,
            output_tokens=self.num_output - output,
            forced_tokens=self.num_forced - forced,
            context=sum(row.start for row in batch.rows) + sum(lengths),
            pairs=sum(n * row.start + n * (n + 1) // 2 for row, n in zip(batch.rows, lengths, strict=True)),
            logits=sum(row.num_logits for row in batch.rows),
            seconds=seconds,
        )

    def check(self) -> None:
        """Raise AssertionError when the books do not add up; used by tests, the simulator and the idle loop."""
        self.pool.check()
        held = {block for seq in self.running for block in seq.block_ids}
        assert len(held) == self.pool.num_held, "blocks are held by nobody"
        assert len(self.by_id) == len(self.waiting) + len(self.running), "a sequence is in no list or in two"
        assert [s.arrival for s in self.running] == sorted(s.arrival for s in self.running), "running is out of order"
        assert all(not seq.block_ids and not seq.num_computed for seq in self.waiting), (
            "a waiting sequence holds blocks"
        )
        owners = set(self._filling.values())
        assert owners <= {seq.id for seq in self.running}, "a block is being filled by nobody"
        assert self.service.num_flows == len({seq.request.flow for seq in self.by_id.values()}), "a flow is not counted"
