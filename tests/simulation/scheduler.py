"""The real Scheduler and BlockPool with a fake runner and a virtual clock.

    python -m tests.simulation.scheduler --steps 200000 --seed 1 --depth 1

The fake runner keeps a fake KV cache, in which each slot remembers which token at which position of which salted
prefix was written there; a row that would read anything but its own past, or write into a block that another
sequence can see, fails. What a request draws is a function of its tokens alone, so each output is compared with
what it must be. Every step also checks the scheduler's books and the rules of the batch. At depth 1 a step is launched
before the one before it is collected. With `--windows` layers are in groups, some of which attend to a window. With
`--states` some are of linear attention: each row must continue from the state that its own past has left.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from msgspec.structs import replace

from engine.batch import PENDING, Batch, Embedded, Outcome, Row, Sampled, StepResult
from engine.cache_groups import CacheGroups
from engine.config import POLICIES, EngineConfig
from engine.refusal import POOLINGS
from engine.scheduler import Scheduler
from engine.snapshots import SnapshotCache
from engine.types import EngineRequest, Pooling, SamplingParams, TokenDelta, TokenLogprob

if TYPE_CHECKING:
    from tests.simulation.states import FakeStates

VOCAB = 97
STOP = 0
MOST_FORCED = 6


class ManualClock:
    """Time that moves when told to."""

    def __init__(self) -> None:
        self.now = 1.0

    def __call__(self) -> float:
        return self.now


def draw(tokens: list[int]) -> int:
    """The token that follows: any function of all tokens will do."""
    return (tokens[-1] * 31 + tokens[len(tokens) // 2] * 17 + len(tokens) * 7 + 11) % VOCAB


def forced(tokens: list[int], room: int) -> list[int]:
    """What a request's grammar leaves no choice about, behind these tokens; at most `room` tokens."""
    run: list[int] = []
    while len(run) < room and draw(tokens + run) % 3 == 0:
        run.append((draw(tokens + run) + len(run)) % VOCAB)
    return run


def is_whole(tokens: list[int]) -> bool:
    """Whether a request's grammar has nothing more to say behind these tokens."""
    return tokens[-1] % 29 == 7


def embed(tokens: list[int], kind: str) -> bytes:
    """The vector of these tokens: a function of all of them, or of each of them and its place."""
    if kind == "mean":
        return b"%d" % sum(place * token for place, token in enumerate(tokens, 1))
    return b"%d" % draw(tokens)


def any_pooling(rng: random.Random) -> Pooling:
    kind = rng.choice(POOLINGS)
    return Pooling(kind=kind, token_ids=(rng.randrange(VOCAB),) if kind == "logits" else ())


def alone(request: EngineRequest, max_len: int) -> tuple[list[int], str]:
    """What a request must give in any company: its whole output and its finish reason."""
    if request.params.pooling:
        return [], "stop"
    tokens = [*request.prompt_ids, *request.output_ids]
    output = list(request.output_ids)
    params = request.params
    if params.grammar:
        run = forced(tokens, min(params.max_tokens - len(output), max_len - len(tokens)) - 1)
        output += run
        tokens += run
    while True:
        drawn = [draw(tokens)]
        if params.grammar:
            drawn += forced([*tokens, *drawn], MOST_FORCED)
        for place, token in enumerate(drawn, 1):
            output.append(token)
            tokens.append(token)
            ends = token in params.stop_ids and len(output) >= params.min_tokens
            if ends or (params.grammar and place == len(drawn) and is_whole(tokens)):
                return output, "stop"
            if len(output) >= params.max_tokens or len(tokens) >= max_len:
                return output, "length"


class FakeRunner:
    """Keeps what a real runner keeps, block tables and tokens by slot, and checks every read and write."""

    def __init__(
        self, block_size: int, rng: random.Random, groups: CacheGroups, states: FakeStates | None = None
    ) -> None:
        self.block_size = block_size
        self.rng = rng
        self.states = states
        self.windows = groups.windows
        self.tables: dict[int, list[int]] = {}  # of each block of tokens, a block for each group
        self.unseen: dict[int, list[int]] = {}  # for each group, the number of blocks that no later row reads
        self.collected: dict[int, int] = {}  # position of a sequence's first token whose step is not collected
        self.tokens: dict[int, list[int]] = {}  # all tokens of a sequence that its slots must hold
        self.salts: dict[int, str] = {}
        self.holders: dict[int, set[int]] = {}  # block -> sequences whose table has it
        self.memory: dict[int, tuple[str, int, int, int]] = {}  # slot -> (salt, position, token, group)
        self.pooled: dict[int, dict[int, int]] = {}  # position -> token of whose hidden state it is
        self.sampled: dict[
            int, tuple[int, list[int], bool]
        ] = {}  # sequence -> position, tokens and end of its last row
        # Step in flight -> block that it writes, or reads in a window -> sequences
        self.uses: dict[int, dict[int, set[int]]] = {}

    def forget(self, seq_id: int) -> None:
        del self.unseen[seq_id], self.collected[seq_id]
        for block in self.tables.pop(seq_id):
            self.holders[block].discard(seq_id)
        self.pooled.pop(seq_id, None)

    def first_seen(self, group: int, position: int) -> int:
        """The first position that a token attends to in a group."""
        window = self.windows[group]
        return 0 if window is None else max(0, position - window + 1)

    def pass_by(self, seq_id: int, position: int) -> None:
        """From now on a sequence reads only what tokens from this position on attend to."""
        table, unseen = self.tables[seq_id], self.unseen[seq_id]
        for group in range(len(self.windows)):
            first = self.first_seen(group, position) // self.block_size
            for index in range(unseen[group], first):
                self.holders[table[index * len(self.windows) + group]].discard(seq_id)
            unseen[group] = max(unseen[group], first)
        self.collected[seq_id] = position

    def own(self, row: Row, known: list[int]) -> list[int]:
        """All tokens of a row's sequence: those that are known, and the one that the step before has sampled."""
        if row.token_ids[-1] != PENDING:
            return known
        position, run, _ = self.sampled[row.seq_id]
        assert len(row.token_ids) == 1 and row.start == position, "a row follows a token that nobody samples"
        assert known[position : position + 1] in ([], run[:1]), "the step before has sampled another token"
        return [*known[:position], run[0]]

    def is_void(self, row: Row, request: EngineRequest) -> bool:
        """Whether a row is computed in vain: the token before it was the last one, or a grammar forces the next."""
        if row.token_ids[-1] != PENDING:
            return False
        position, run, is_last = self.sampled[row.seq_id]
        num_output = position + 1 - len(request.prompt_ids)
        is_stop = run[0] in request.params.stop_ids and num_output >= request.params.min_tokens
        return is_stop or is_last or len(run) > 1

    def collect(self, batch: Batch, *, is_computed: bool = True) -> None:
        """The step is not in flight any more."""
        self.uses.pop(batch.step, None)
        for row in batch.rows if is_computed else ():
            if row.seq_id in self.tables:
                self.pass_by(row.seq_id, row.end)

    def compute(self, batch: Batch, requests: dict[int, EngineRequest], tokens: dict[int, list[int]]) -> StepResult:
        """`tokens`: what each sequence holds, by the driver's own books. The step is in flight until `collect`."""
        for seq_id in batch.left:
            self.forget(seq_id)
        for entered in batch.entered:
            assert entered.seq_id not in self.tables, "a sequence entered twice"
            self.tables[entered.seq_id] = []
            self.unseen[entered.seq_id] = [0] * len(self.windows)
            request = requests[entered.seq_id]
            history = tokens[entered.seq_id] if request.params.uses_history else []
            assert entered.params == request.params, "a sequence entered with parameters that are not its own"
            assert entered.prompt_len == len(request.prompt_ids), "the sampler counts positions from another place"
            assert entered.token_ids == history, "the sampler's history is not the sequence's tokens"
        if self.states is not None:
            self.states.compute(batch, lambda row: (requests[row.seq_id].cache_salt, self.own(row, tokens[row.seq_id])))
        outcomes: list[Outcome] = []
        for row in batch.rows:
            table, is_new = self.tables[row.seq_id], not self.tables[row.seq_id]
            for place, block in enumerate(row.new_block_ids):
                index, group = divmod(place, len(self.windows))
                table.append(block)
                if is_new and index < self.first_seen(group, row.start) // self.block_size:
                    continue  # any block's id: the cached prefix is longer than the window
                users = set().union(*(used.get(block, ()) for used in self.uses.values()))
                assert users <= {row.seq_id} or index * self.block_size < row.start, f"block {block} is in use"
                self.holders.setdefault(block, set()).add(row.seq_id)
            if is_new:
                self.collected[row.seq_id] = row.start
                self.unseen[row.seq_id] = [
                    self.first_seen(group, row.start) // self.block_size for group in range(len(self.windows))
                ]
            assert len(table) % len(self.windows) == 0, "a group has fewer blocks than others"
            for group, window in enumerate(self.windows):
                if window is not None:
                    held = len(table) // len(self.windows) - self.unseen[row.seq_id][group]
                    bound = -(-(window + row.end - self.collected[row.seq_id]) // self.block_size) + 2
                    assert held <= bound, f"a window holds {held} blocks"
        scores: dict[int, list[TokenLogprob]] = {}
        used = self.uses[batch.step] = {}
        for index, row in enumerate(batch.rows):
            table, salt, own = self.tables[row.seq_id], requests[row.seq_id].cache_salt, tokens[row.seq_id]
            own = self.own(row, own)
            end = row.end
            num_groups = len(self.windows)
            assert len(table) // num_groups * self.block_size >= end, "a token has no slot"
            is_pending = row.token_ids == [PENDING]
            assert is_pending or row.token_ids == own[row.start : end], "a row computes other tokens than its own"
            entering = len(row.new_block_ids) == len(table)
            for group, window in enumerate(self.windows):
                low = self.first_seen(group, row.start)
                everything = entering or not row.start or window is not None
                for position in range(low, row.start) if everything else (self.rng.randrange(row.start),):
                    block = table[position // self.block_size * num_groups + group]
                    slot = block * self.block_size + position % self.block_size
                    found = self.memory.get(slot)
                    assert found == (salt, position, own[position], group), f"position {position} is not ours"
                    used.setdefault(block, set()).add(row.seq_id)
                for position in range(row.start, end):
                    block = table[position // self.block_size * num_groups + group]
                    slot = block * self.block_size + position % self.block_size
                    assert self.holders[block] == {row.seq_id}, f"block {block} is shared and written"
                    used.setdefault(block, set()).add(row.seq_id)
                    self.memory[slot] = (salt, position, own[position], group)
            outcome: Outcome = None
            params = requests[row.seq_id].params
            pooling = params.pooling
            assert row.is_sampled == (end == len(own) and pooling is None), "a token is sampled too early or not at all"
            assert row.embeds == (end == len(own) and pooling is not None), "a vector is made too early or not at all"
            if pooling is not None:
                first = end - row.num_hidden
                states = {position: own[position] for position in range(first, end)}
                self.pooled.setdefault(row.seq_id, {}).update(states)
            if pooling is not None and row.embeds:
                states = self.pooled[row.seq_id]
                wanted = {"last": [len(own) - 1], "mean": list(range(len(own))), "logits": []}[pooling.kind]
                assert sorted(states) == wanted, "hidden states are missing, or were not asked for"
                assert row.num_logits == (pooling.kind == "logits"), "logits are missing, or were not asked for"
                outcome = Embedded(embed([states[i] for i in wanted] if pooling.kind == "mean" else own, pooling.kind))
            assert len(row.scored) in (0, row.num_logits - row.is_sampled), "a position is scored and not computed"
            if row.is_sampled:
                run, is_last = self.draws(own, params)
                self.sampled[row.seq_id] = end, run, is_last
                logprobs = None if params.logprobs is None else [TokenLogprob(-float(token)) for token in run]
                outcome = Sampled(run, logprobs, is_last)
            outcomes.append(outcome)
            if row.scored:
                scores[index] = [TokenLogprob(-float(token)) for token in row.scored]
        return StepResult(outcomes, scores)

    def draws(self, own: list[int], params: SamplingParams) -> tuple[list[int], bool]:
        """What a row samples, with the tokens that its grammar forces after it, and whether its output then ends."""
        drawn = [draw(own)]
        if not params.grammar:
            return drawn, False
        drawn += forced([*own, *drawn], MOST_FORCED)  # the scheduler cuts what is too much
        return drawn, is_whole(own + drawn)


def complete(batch: Batch | None, requests: dict[int, EngineRequest], max_len: int) -> set[int]:
    """Who needs no row after the step in flight: it samples the last token that they may have, or their vector."""
    done = set()
    for row in batch.rows if batch is not None else ():
        request = requests.get(row.seq_id)
        if request is not None:
            most = min(len(request.prompt_ids) + request.params.max_tokens, max_len)
            if row.embeds or (row.is_sampled and row.end + 1 >= most):
                done.add(row.seq_id)
    return done


def check_batch(
    scheduler: Scheduler, batch: Batch, runs: set[int], preempted: int, batched: set[int], *, done: set[int]
) -> None:
    """The rules of a step that has just been scheduled.

    `runs`: ids of the sequences that were running before it; `preempted`: sequences that it preempted; `batched`: ids
    that were there when the last static batch was formed; `done`: who needs no more rows.
    """
    assert 0 < batch.num_tokens <= scheduler.limits.budget, "a step is over its budget"
    assert scheduler.config.max_seqs and len(batch.rows) <= scheduler.config.max_seqs, "more rows than may run"
    ids = [row.seq_id for row in batch.rows]
    assert len(set(ids)) == len(ids), "a sequence is in a step twice"
    running = {seq.id for seq in scheduler.running}
    assert set(ids) <= running, "a row is not running"
    assert not done & set(ids), "a row follows a token that is known to be the last"
    # A limit that a lack of memory has lowered may be below what runs already.
    assert len(running) <= scheduler.limits.max_seqs or running <= runs, "somebody was admitted above the limit"
    if scheduler.config.policy != "prefill-first":
        assert running - done == set(ids), "a running sequence was left out of a step"
    # Who gives way to another flow lets it start; whose blocks were needed must not be passed.
    gone = [scheduler.by_id[seq_id] for seq_id in runs - running if seq_id in scheduler.by_id]
    if preempted and not all(seq.gave_way for seq in gone):
        assert running <= runs, "somebody was admitted in a step that preempted"
    ran = Counter(scheduler.by_id[seq_id].flow for seq_id in runs if seq_id in scheduler.by_id)
    for seq in gone:
        if preempted and seq.gave_way:
            assert ran[seq.flow] > 1 or seq.passed, "the only sequence of a flow gave way"
    if scheduler.config.policy == "static":
        assert running <= batched, "a static batch was joined"


@dataclass(eq=False)
class Episode:
    """One scheduler from its start until every request has ended."""

    seed: str
    config: EngineConfig
    num_blocks: int
    rng: random.Random
    depth: int = 0
    groups: CacheGroups = field(default_factory=CacheGroups)
    has_states: bool = False
    clock: ManualClock = field(default_factory=ManualClock)
    requests: dict[int, EngineRequest] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    untold: dict[int, int] = field(default_factory=dict)  # of the tokens, those forced before the first draw
    aborted: set[int] = field(default_factory=set)
    batched: set[int] = field(default_factory=set)  # who was there when the last static batch was formed
    ended: dict[int, str] = field(default_factory=dict)
    flight: tuple[Batch, StepResult] | None = None  # the step that was launched and not collected
    steps: int = 0
    preempted: int = 0
    void: int = 0  # rows that were computed in vain
    states: FakeStates | None = None
    told: list[list[int]] = field(default_factory=list)  # tokens of the last requests

    @classmethod
    def make(cls, seed: str, depth: int = 0, *, has_windows: bool = False, has_states: bool = False) -> Episode:
        rng = random.Random(seed)
        block_size = rng.choice((1, 2, 4, 16))
        num_blocks = rng.randint(2, 48)
        max_seqs = rng.randint(1, 8)
        config = EngineConfig(
            model="sim",
            block_size=block_size,
            max_len=rng.randint(2, max(2, num_blocks * block_size // rng.choice((1, 2, 4)))),
            max_seqs=max_seqs,
            max_batched_tokens=rng.randint(max_seqs, 4 * block_size + max_seqs),
            long_prefill_tokens=rng.choice((None, None, rng.randint(1, 64))),
            policy=rng.choice((*POLICIES, "fcfs", "fcfs", "priority")),
            prefix_caching=rng.random() < 0.8,
        )
        groups = CacheGroups()
        if has_windows:
            some = [None, *(rng.randint(1, 4 * block_size) for _ in range(2))]
            windows = tuple(rng.choice(some) for _ in range(rng.randint(1, 4)))
            if has_states:
                windows = (None, *windows[1:])  # as SnapshotCache needs it
            groups = CacheGroups(windows, tuple(range(len(windows))))
            num_blocks *= len(windows)
        if has_states:
            config = replace(config, num_snapshots=rng.choice((0, 1, 2, rng.randint(1, 24))))
        return cls(seed, config, num_blocks, rng, depth, groups, has_states)

    def run(self, max_steps: int, trace: hashlib._Hash) -> None:
        """Requests arrive for about `max_steps` steps; then the rest is drained."""
        self.scheduler = Scheduler(
            self.config, self.num_blocks, VOCAB, self.clock, self.groups, has_states=self.has_states
        )
        if isinstance(self.scheduler.cache, SnapshotCache):  # prompts of many blocks are few here
            spacing, count = self.rng.choice((4, 16, 64)), self.config.num_snapshots or 0
            settings = self.config.prefix_caching, self.groups, self.config.max_batched_tokens or 1
            self.scheduler.cache = SnapshotCache(self.scheduler.pool, *settings, count=count, spacing=spacing)
        if self.has_states:
            from tests.simulation.states import FakeStates  # needs torch

            assert self.config.max_seqs and self.config.num_snapshots is not None
            self.states = FakeStates(self.config.block_size, self.config.max_seqs, self.config.num_snapshots)
        self.runner = FakeRunner(self.config.block_size, self.rng, self.groups, self.states)
        self.prefixes = [[self.rng.randrange(VOCAB) for _ in range(self.scheduler.max_len)] for _ in range(3)]
        rate = self.rng.choice((0.02, 0.1, 0.3, 0.8))
        # With a generator of their own, so that the requests are those of one flow.
        self.of_flows = random.Random(f"{self.seed} flows")
        self.flows = self.of_flows.choice(("a", "ab", "abcd"))
        patience = 0
        while self.steps < max_steps or not self.scheduler.is_idle or self.flight:
            self.clock.now += 0.01
            if self.steps < max_steps:  # computed steps: time may pass with nothing to do
                for _ in range(3):
                    if self.rng.random() < rate and len(self.requests) < 64:
                        self.arrive()
                if self.rng.random() < 0.01 and self.requests:
                    self.abort(self.rng.choice(list(self.requests)))
            elif self.steps > max_steps:
                patience += 1
                assert patience < 200_000, "the last requests never end"
            self.step(trace)
        assert self.scheduler.pool.num_held == 0, "blocks are held when nobody runs"
        assert not self.requests, f"requests without a terminal delta: {list(self.requests)}"

    def arrive(self) -> None:
        rng, max_len = self.rng, self.scheduler.max_len
        pooling = rng.choice((None, None, None, any_pooling(rng)))
        most = max_len if pooling else max_len - 1
        length = rng.randint(1, most) if rng.random() < 0.3 else rng.randint(1, max(1, max_len // 3))
        shared = rng.choice(self.prefixes)[: rng.randint(0, length)]
        prompt = [*shared, *(rng.randrange(VOCAB) for _ in range(length - len(shared)))]
        if self.has_states and self.told and rng.random() < 0.4:  # the next turn of a chat, or another from its middle
            told = rng.choice(self.told)
            prompt = [*told[: max(1, len(told) - rng.choice((0, 0, rng.randint(0, 64))))], prompt[-1]][:most]
        request = EngineRequest(
            id=len(self.ended) + len(self.requests) + 1,
            prompt_ids=tuple(prompt),
            params=SamplingParams(
                max_tokens=rng.choice((1, rng.randint(1, 8), rng.randint(1, 200), 1000)),
                min_tokens=rng.choice((0, 0, rng.randint(0, 5))),
                stop_ids=rng.choice(((STOP,), ())),
                prompt_logprobs=rng.choice((None, None, None, 0)),
                logprobs=rng.choice((None, None, 0)),
                presence_penalty=rng.choice((0.0, 0.0, 1.0)),  # the runner is then given the history
                grammar=rng.choice((None, None, ("sim", ""))) if pooling is None else None,
                pooling=pooling,
            ),
            priority=rng.randint(0, 2),
            cache_salt=rng.choice(("", "", "other")),
            flow=self.of_flows.choice(self.flows),
            weight=self.of_flows.choice((1.0, 1.0, 2.0)),
        )
        if rng.random() < 0.1 and pooling is None:  # handed over part-way, as after an engine's death
            output, _ = alone(request, max_len)
            request = EngineRequest(
                id=request.id,
                prompt_ids=request.prompt_ids,
                params=replace(request.params, prompt_logprobs=None),
                output_ids=tuple(output[: rng.randint(0, len(output) - 1)]),
                priority=request.priority,
                cache_salt=request.cache_salt,
                flow=request.flow,
                weight=request.weight,
            )
        tokens = [*request.prompt_ids, *request.output_ids]
        if request.params.grammar and request.params.prompt_logprobs is not None:  # as a matcher has it: no jumps
            request = replace(request, params=replace(request.params, grammar=None))
        run = forced(tokens, self.scheduler.output_limit(request) - 1) if request.params.grammar else []
        self.requests[request.id] = request
        self.tokens[request.id] = tokens + run
        self.untold[request.id] = len(run)
        delta = self.scheduler.add(request, run)
        assert delta is None, f"a possible request was refused: {delta}"

    def abort(self, request_id: int) -> None:
        self.aborted.add(request_id)
        delta = self.scheduler.abort(request_id)
        if delta is not None:
            self.take([delta])

    def step(self, trace: hashlib._Hash) -> None:
        scheduler = self.scheduler
        before = scheduler.counters.preempted
        runs = {seq.id for seq in scheduler.running}
        if not runs:  # the last static batch has ended
            self.batched = set(self.requests)
        before_it, self.flight = self.flight, None
        batch = scheduler.schedule()
        self.preempted += scheduler.counters.preempted - before
        if batch is None:
            assert before_it or scheduler.is_idle, "requests wait and nothing runs"
            if before_it:
                self.collect(*before_it, trace)
            return
        self.steps += 1
        preempted = scheduler.counters.preempted - before
        done = complete(before_it and before_it[0], self.requests, scheduler.max_len)
        check_batch(scheduler, batch, runs, preempted, self.batched, done=done)
        self.void += sum(self.runner.is_void(row, self.requests[row.seq_id]) for row in batch.rows)
        result = self.runner.compute(batch, self.requests, self.tokens)
        if self.rng.random() < 0.02:
            self.abort(self.rng.choice(batch.rows).seq_id)  # while it is in flight
        out_of_memory = self.rng.random() < 0.002
        if before_it:
            self.collect(*before_it, trace)
        if out_of_memory:
            self.runner.collect(batch, is_computed=False)
            may_fit = before_it is not None and self.rng.random() < 0.5  # or it was the sampling that failed, later
            self.take(scheduler.abandon(batch, may_fit=may_fit), failed=not may_fit)
            self.check(batch, trace)
        elif self.depth:
            self.flight = batch, result
        else:
            self.collect(batch, result, trace)

    def collect(self, batch: Batch, result: StepResult, trace: hashlib._Hash) -> None:
        self.runner.collect(batch)
        self.take(self.scheduler.update(batch, result))
        self.check(batch, trace)

    def check(self, batch: Batch, trace: hashlib._Hash) -> None:
        scheduler = self.scheduler
        scheduler.check()
        stats = scheduler.stats(batch, {}, 0.0)
        assert stats.blocks_unaccounted == 0, "free + cached + held != total"
        rows = [(row.seq_id, row.start, len(row.token_ids)) for row in batch.rows]
        trace.update(repr((rows, stats.waiting, stats.blocks_free, stats.blocks_cached, stats.prefix_hits)).encode())

    def take(self, deltas: list[TokenDelta], failed: bool = False) -> None:
        for delta in deltas:
            assert delta.id in self.requests, f"request {delta.id} was told twice that it ended"
            request, untold = self.requests[delta.id], self.untold[delta.id]
            if delta.token_ids:
                is_scored = request.params.logprobs is not None and not request.params.grammar
                scores = [-entry.logprob for entry in delta.logprobs or ()]
                assert not is_scored or scores == list(delta.token_ids), "a token's score is another token's"
                known = self.tokens[delta.id][len(self.tokens[delta.id]) - untold :]
                assert list(delta.token_ids[:untold]) == known, "what was forced at first was not delivered"
                self.tokens[delta.id] += delta.token_ids[untold:]
                self.untold[delta.id] = untold = 0
            if delta.prompt_logprobs is not None:
                scores = [-entry.logprob for entry in delta.prompt_logprobs]
                assert scores == list(request.prompt_ids[1:]), "a prompt's scores are not its tokens'"
            pooling = request.params.pooling
            wanted = (
                embed(list(request.prompt_ids), pooling.kind) if pooling and delta.finish_reason == "stop" else None
            )
            assert delta.embedding == wanted, "a prompt's vector is not its own, or came when none was due"
            if not delta.finish_reason:
                continue
            del self.requests[delta.id]
            held = self.tokens.pop(delta.id)
            output = held[len(request.prompt_ids) : len(held) - self.untold.pop(delta.id)]
            self.told = [*self.told[-8:], [*request.prompt_ids, *output]]
            self.ended[delta.id] = delta.finish_reason
            expected, reason = alone(request, self.scheduler.max_len)
            if delta.finish_reason in ("stop", "length"):
                assert output == expected, f"request {delta.id} drew other tokens than alone"
                assert delta.finish_reason == reason
            else:
                assert output == expected[: len(output)], f"request {delta.id} drew other tokens than alone"
                assert delta.id in self.aborted if delta.finish_reason == "abort" else failed
            assert delta.stats is not None
            assert delta.stats.output_tokens == len(output)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.scheduler", description=__doc__)
    parser.add_argument("--steps", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--episode", type=int, help="run only this one, as a failure tells")
    parser.add_argument("--episode-steps", type=int, default=500)
    parser.add_argument("--depth", type=int, choices=(0, 1), default=0, help="steps that are launched ahead")
    parser.add_argument("--windows", action="store_true", help="with groups of layers, some of which have windows")
    parser.add_argument("--states", action="store_true", help="with layers of linear attention")
    args = parser.parse_args(argv)
    trace = hashlib.sha256()
    began = time.perf_counter()
    steps = requests = preempted = void = restored = 0
    reasons: dict[str, int] = {}
    index = args.episode or 0
    while steps < args.steps:
        kinds = {"has_windows": args.windows, "has_states": args.states}
        episode = Episode.make(f"{args.seed}/{index}", args.depth, **kinds)
        try:
            episode.run(args.episode_steps, trace)
        except Exception:
            print(f"failed after {episode.steps} steps of an episode; replay with:")
            seed = f"--seed {args.seed} --episode {index} --episode-steps {args.episode_steps} --depth {args.depth}"
            seed += " --windows" * args.windows + " --states" * args.states
            print(f"python -m tests.simulation.scheduler {seed}", flush=True)
            raise
        steps += episode.steps
        requests += len(episode.ended)
        preempted += episode.preempted
        void += episode.void
        restored += episode.states.restored if episode.states is not None else 0
        for reason in episode.ended.values():
            reasons[reason] = reasons.get(reason, 0) + 1
        index += 1
        if args.episode is not None:
            break
    seconds = time.perf_counter() - began
    ends = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))
    restorations = f", {restored} sequences from a snapshot" if args.states else ""
    print(
        f"{steps} steps, {requests} requests ({ends}), {preempted} preemptions, {void} void rows{restorations}: "
        "every check held"
    )
    print(f"{steps / seconds:.0f} steps/s")
    print(f"trace {trace.hexdigest()}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
