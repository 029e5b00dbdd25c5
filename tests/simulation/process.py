"""The engine's process in virtual time: the real worker's mail, loop, scheduler and blocks over a fake runner.

What the process does wrong, it does because the world says so: `World` is what the episode and its processes share.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from engine import EngineInfo, EngineRequest, SamplingParams, TokenDelta, channel, worker
from engine.batch import Batch, Row, RowError, Sampled, StepResult
from engine.cache_groups import CacheGroups
from engine.fair_lock import FairLock
from engine.loop import EngineLoop, StepOutOfMemory
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from engine.service import OUTPUT_COST
from engine.step_thread import ModelThread
from tests.fakes import INFO

from .plan import STEP_FAULTS, Plan
from .scheduler import MOST_FORCED, STOP, VOCAB, FakeRunner, check_batch, complete, draw, is_whole
from .virtual import Socket, VirtualLoop

LOAD_S = 0.2
NOT_FINITE = "the logits are not finite numbers"


@dataclass(eq=False)
class World:
    """What an episode and its processes share: the plan, the one source of randomness, and the books of both sides."""

    plan: Plan
    rng: random.Random
    loop: VirtualLoop
    trace: hashlib._Hash
    info: EngineInfo
    poison: dict[int, tuple[str, int]] = field(default_factory=dict)  # request -> fault, tokens of output when it comes
    bad_rows: dict[int, int] = field(default_factory=dict)  # request -> tokens of output when its logits are no numbers
    closed: dict[int, float] = field(default_factory=dict)  # request -> when the client has done with it
    steps: int = 0
    preempted: int = 0
    void: int = 0  # rows that were computed in vain
    lives: int = 0
    unready: int = 0  # lives in a row that have not become ready
    was_ready: bool = False
    blame: Counter[int] = field(default_factory=Counter)  # poison -> deaths that it has caused
    faults: Counter[str] = field(default_factory=Counter)  # what has really happened
    loading: list[str] = field(default_factory=list)  # faults of the next starts
    is_doomed: bool = False
    is_over: bool = False  # no more faults: the rest must come to its end
    patience_s: float = 0.0  # for which an aborted request may still be in steps

    def chance(self, share: float) -> bool:
        return share > 0 and self.rng.random() < share

    def duration(self, mean_s: float) -> float:
        return self.rng.expovariate(1 / mean_s) if mean_s else 0.0

    def latency(self) -> float:
        return min(self.duration(self.plan.latency_s), 10 * self.plan.latency_s)

    def cut(self, data: bytes) -> int:
        """Where a write is divided; 0: not at all."""
        return self.rng.randrange(len(data)) if self.rng.random() < 0.02 else 0


def forced(tokens: list[int], most: int) -> list[int]:
    """The tokens that a grammar leaves no choice about, at most `most`: the very ones that would be sampled."""
    run: list[int] = []
    while len(run) < most:
        token = draw(tokens + run)
        if token % 3 or token == STOP or is_whole([*tokens, *run, token]):
            break
        run.append(token)
    return run


def undisturbed(request: EngineRequest, max_len: int) -> tuple[list[int], str]:
    """The output and the finish reason of a request in an engine of its own, where nothing ever goes wrong."""
    params = request.params
    tokens, output = list(request.prompt_ids), []
    while True:
        token = draw(tokens)
        output.append(token)
        tokens.append(token)
        if token in params.stop_ids and len(output) >= params.min_tokens:
            return output, "stop"
        if params.grammar and is_whole(tokens):
            return output, "stop"
        if len(output) >= params.max_tokens or len(tokens) >= max_len:
            return output, "length"


class Child:
    """In the place of the supervisor's Child: a process that runs a Worker."""

    def __init__(self, world: World, processes: list[Process]) -> None:
        fault = ""
        if world.was_ready and (world.loading or world.is_doomed):
            fault = world.loading.pop(0) if world.loading else "die"
        if fault == "scarce":
            world.faults[fault] += 1
            raise OSError(errno.EMFILE, "Too many open files")
        self.ours, theirs = Socket.pair(world.loop, world.latency, world.cut)
        self.process = Process(world, theirs, fault)
        processes.append(self.process)

    def changed_environment(self) -> dict[str, str | None]:
        return {}


class Process:
    """What the supervisor has of a process, and the tasks that run in it."""

    def __init__(self, world: World, socket: Socket, loading_fault: str) -> None:
        world.lives += 1
        world.unready += 1
        self.pid = world.lives
        self.returncode: int | None = None
        self.world = world
        self.socket = socket
        self.worker = Worker(world, self, loading_fault)
        self.ran: set[int] = set()  # requests that the engine has begun to work on
        self._main = world.loop.create_task(self.worker.main())

    @property
    def is_alive(self) -> bool:
        return self.returncode is None

    def kill(self) -> None:
        self.die(-9)

    def poll(self) -> int | None:
        return self.returncode

    def die(self, code: int) -> None:
        if self.is_alive:
            self.returncode = code
            self.stand_still()
            self.socket.close()

    def stand_still(self) -> None:
        """As a process that was stopped: nothing of it runs, and its socket is open."""
        self.worker.stop()
        self._main.cancel()

    def suffer(self, fault: str) -> None:
        """One of STEP_FAULTS, in the step that runs now."""
        self.world.faults[fault] += 1
        match fault:
            case "die":
                self.die(-11)
            case "stop":
                self.stand_still()
            case "hang":
                self.worker.thread.hangs = True


class Thread(ModelThread):
    """The model thread: a call takes its time, after those before it, and never returns where the thread hangs."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world
        self.hangs = False
        self._free_at = 0.0

    def call(self, work: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        loop = self.world.loop
        future = loop.create_future()
        self._free_at = max(loop.now, self._free_at) + self.world.duration(self.world.plan.step_s)
        loop.call_at(self._free_at, self._finish, future, work, args)
        return future

    def _finish(self, future: asyncio.Future[Any], func: Callable[..., Any], args: tuple[Any, ...]) -> None:
        if future.done() or self.hangs:  # the process has ended
            return
        try:
            result = func(*args)
        except Exception as error:
            self.world.loop.fail(error)
        else:
            if not self.hangs and not future.done():
                future.set_result(result)


class Worker(worker._Worker):
    """The real worker with another way to load: a fake runner under a scheduler that is watched."""

    def __init__(self, world: World, process: Process, loading_fault: str) -> None:
        self.world = world
        self.process = process
        self.loading_fault = loading_fault
        self.pipe = channel.Channel(channel.Downward)
        self.thread = Thread(world)
        self.loop: EngineLoop | None = None
        self.share = 0.0
        self.tasks: list[asyncio.Task[Any]] = []

    def stop(self) -> None:
        for task in self.tasks:
            task.cancel()

    async def main(self) -> None:
        await self.pipe.open(self.process.socket)
        load = await self.pipe.receive()
        if load is None:
            self.process.die(0)
            return
        loop = asyncio.get_running_loop()
        self.tasks = [loop.create_task(work) for work in (self._listen(), self._beat(), self._engine(load))]

    async def _listen(self) -> None:
        await self._receive_all()
        self.process.die(0)  # the server has died or has closed its end

    async def _engine(self, load: channel.Load) -> None:
        world = self.world
        await asyncio.sleep(world.duration(LOAD_S))
        self.share = 0.5
        if self.loading_fault:
            world.faults["loading"] += 1
        match self.loading_fault:
            case "die":
                self.process.die(1)
                return
            case "stop":
                self.process.stand_still()
                return
            case "refuse":
                self.pipe.send(channel.Failed("ModelError", "the weights are gone"))
                self.process.die(2)
                return
        try:
            runner = Runner(world, self.process, load.config.block_size)
            scheduler = WatchedScheduler(world, load.config)
            outbox = Outbox(self.pipe, runner, self.process)
            self.loop = Loop(scheduler, runner, outbox, self.thread, Grammars(world, self.process))
            self.pipe.send(channel.Ready(world.info, load.config))
            world.was_ready, world.unready = True, 0
            await self.loop.run()
        except Exception as error:  # the checks of the loop itself among them
            world.loop.fail(error)


class Loop(EngineLoop):
    """Keeps the runner's books of what was asked."""

    def add(self, request: EngineRequest) -> None:
        self.runner.requests[request.id] = request
        self.runner.tokens[request.id] = [*request.prompt_ids, *request.output_ids]
        super().add(request)


class Outbox(worker._Outbox):
    """The real outbox; what goes through it is what the runner's sequences hold from then on."""

    def __init__(self, pipe: channel.Channel, runner: Runner, process: Process) -> None:
        super().__init__(pipe)
        self.runner = runner
        self.process = process

    def started(self, ids: list[int]) -> None:
        self.process.ran.update(ids)
        super().started(ids)

    def send(self, deltas: list[TokenDelta], stats: Any) -> None:
        for delta in deltas:
            untold = self.runner.untold.pop(delta.id, 0) if delta.token_ids else 0
            self.runner.tokens[delta.id] += delta.token_ids[untold:]
        super().send(deltas, stats)


class Step:
    """A step of the fake runner in flight: what it computes is known when it is sampled, and returned later."""

    def __init__(self, runner: Runner, batch: Batch) -> None:
        self.runner = runner
        self.batch = batch

    def sample(self, masked: list[int] | None = None) -> None:
        self._result = self.runner.compute_step(self.batch, masked or [])

    def result(self) -> StepResult:
        self.runner.collect(self.batch)
        return self._result


class Runner(FakeRunner):
    """The fake runner as an engine loop calls it, with the faults of the plan."""

    def __init__(self, world: World, process: Process, block_size: int) -> None:
        super().__init__(block_size, world.rng, CacheGroups())
        self.world = world
        self.process = process
        self.requests: dict[int, EngineRequest] = {}
        self.untold: dict[int, int] = {}  # tokens that a grammar forced before the first one was sampled

    @property
    def scheduler(self) -> Scheduler:
        assert self.process.worker.loop is not None
        return self.process.worker.loop.scheduler

    def launch(self, batch: Batch) -> Step:
        return Step(self, batch)

    def compute_step(self, batch: Batch, masked: list[int]) -> StepResult:
        """`masked`: the rows that are sampled with a mask."""
        world = self.world
        world.steps += 1
        rows = [(row.seq_id, row.start, len(row.token_ids)) for row in batch.rows]
        world.trace.update(repr((round(world.loop.now, 6), rows)).encode())
        for index, row in enumerate(batch.rows):
            is_void = self.is_void(row, self.requests[row.seq_id]) or row.seq_id not in self.scheduler.by_id
            world.void += is_void
            has_grammar = row.is_sampled and self.requests[row.seq_id].params.grammar is not None
            assert is_void or (index in masked) == has_grammar, "a token is sampled without the mask of its grammar"
            fault, at = world.poison.get(row.seq_id, ("", -1))
            strikes = (row.is_sampled or row.embeds) and self.length(row) == at and not is_void
            if fault in STEP_FAULTS and strikes:
                world.blame[row.seq_id] += 1
                self.process.suffer(fault)
                return StepResult([])
        if not world.is_over and world.chance(world.plan.faults):
            self.process.suffer(world.rng.choice(STEP_FAULTS))
            return StepResult([])
        result = self.compute(batch, self.requests, self.tokens)
        # Two faults in one step are rare unless the one attracts the other.
        times = 20 if any(row.seq_id not in self.scheduler.by_id for row in batch.rows) else 1
        if not world.is_over and world.chance(times * world.plan.out_of_memory):
            world.faults["memory"] += 1
            self.collect(batch, is_computed=False)
            raise StepOutOfMemory
        for index, row in enumerate(batch.rows):
            if row.is_sampled and self.length(row) == world.bad_rows.get(row.seq_id):
                result.outcomes[index] = RowError(NOT_FINITE)
        return result

    def length(self, row: Row) -> int:
        """Tokens of output that a row's sequence has before it, those of its earlier lives too."""
        return row.end - len(self.requests[row.seq_id].prompt_ids)

    def draws(self, own: list[int], params: SamplingParams) -> tuple[list[int], bool]:
        drawn = [draw(own)]
        if not params.grammar:
            return drawn, False
        if not is_whole(own + drawn):
            drawn += forced(own + drawn, MOST_FORCED)
            if len(drawn) <= MOST_FORCED and draw(own + drawn) % 3 == 0 and is_whole([*own, *drawn, draw(own + drawn)]):
                drawn.append(draw(own + drawn))  # a run may end with the token that completes the output
        return drawn, is_whole(own + drawn)


class Grammars:
    """In the place of the engine's grammars: compiles in turns, forces tokens, and may kill the process."""

    def __init__(self, world: World, process: Process) -> None:
        self.world = world
        self.process = process
        self.turns = FairLock()
        self.matchers: dict[int, Matcher] = {}

    def rows(self, batch: Batch) -> list[int]:
        return [i for i, row in enumerate(batch.rows) if row.is_sampled and row.seq_id in self.matchers]

    def masks(self, batch: Batch, rows: list[int]) -> list[int]:
        for row in rows:
            matcher = self.matchers[batch.rows[row].seq_id]
            assert matcher.length == batch.rows[row].end, "a mask is made before its grammar has had the token before"
        return rows

    def advance(self, batch: Batch, rows: list[int], result: StepResult, _: Any) -> StepResult:
        """The fake runner has added what is forced."""
        for row in rows:
            outcome = result.outcomes[row]
            matcher = self.matchers[batch.rows[row].seq_id]
            assert matcher.length == batch.rows[row].end, "a grammar is advanced by a token of another position"
            matcher.length += len(outcome.token_ids) if isinstance(outcome, Sampled) else 0
        return result

    async def compile(self, request: EngineRequest) -> Matcher:
        async with self.turns.turn(request.flow):
            await asyncio.sleep(self.world.duration(self.world.plan.step_s))
            if self.world.poison.get(request.id, ("",))[0] == "compile":
                self.world.blame[request.id] += 1
                self.process.suffer("die")
                await asyncio.Event().wait()
        assert self.process.worker.loop is not None
        return Matcher(request, self.process.worker.loop.runner)

    def add(self, request_id: int, matcher: Matcher) -> None:
        self.matchers[request_id] = matcher

    def remove(self, request_id: int) -> None:
        self.matchers.pop(request_id, None)

    def close(self) -> None:
        """There is no thread to stop."""


class Matcher:
    """What a grammar forces behind a request's output."""

    def __init__(self, request: EngineRequest, runner: Runner) -> None:
        self.request = request
        self.runner = runner
        self.length = 0  # of the sequence, with the tokens that the grammar has had

    def begin(self, most: int) -> list[int]:
        tokens = self.runner.tokens[self.request.id]
        run = forced(tokens, most)
        tokens += run
        self.length = len(tokens)
        self.runner.untold[self.request.id] = len(run)
        return run


class WatchedScheduler(Scheduler):
    """The real scheduler; each of its steps is held against the rules, and each flow's service against own books."""

    def __init__(self, world: World, config: Any) -> None:
        super().__init__(config, config.num_blocks, VOCAB, world.loop.time)
        self.world = world
        self.batched: set[int] = set()
        self.charged: set[int] = set()  # sequences whose prompt was charged
        self.made_way = 0  # sequences that this step preempted for another flow
        self.favored: Sequence | None = None  # for which this step has preempted
        self.held_up: set[str] = set()  # flows whose next sequence finds too few blocks in this step
        self.flight: Batch | None = None  # the last step, until it is collected

    def add(self, request: EngineRequest, forced: list[int] | None = None) -> TokenDelta | None:
        waiting = {seq.request.flow for seq in self.waiting}
        rivals = waiting or {seq.request.flow for seq in self.by_id.values()}
        delta = super().add(request, forced)
        assert delta is None, f"a possible request was refused: {delta}"
        if rivals and request.flow not in waiting:
            least = min(map(self.service.of, rivals))
            assert self.service.of(request.flow) >= least, "a flow has saved up service while it wanted no more"
        return delta

    def schedule(self) -> Batch | None:
        before = {seq.id: seq.request.flow for seq in self.running}
        served = {flow: self.service.of(flow) for flow in {seq.request.flow for seq in self.by_id.values()}}
        preempted = self.counters.preempted
        if not before:
            self.batched = set(self.by_id)
        batch = super().schedule()
        if batch is None:
            assert self.is_idle or self.flight, "requests wait and nothing runs"
            return None
        done = complete(self.flight, {seq.id: seq.request for seq in self.by_id.values()}, self.max_len)
        self.flight = batch
        self.world.preempted += self.counters.preempted - preempted
        for_want_of_blocks = self.counters.preempted - preempted - self.made_way
        check_batch(self, batch, set(before), for_want_of_blocks, self.batched, done=done)
        if self.counters.preempted == preempted:
            self._check_turns(before)
        if self.favored is not None and not for_want_of_blocks:
            assert self.favored in self.running, "sequences were preempted in vain"
        for row in batch.rows:
            closed_at = self.world.closed.get(row.seq_id)
            late_s = 0.0 if closed_at is None else self.world.loop.now - closed_at
            assert late_s <= self.world.patience_s, f"request {row.seq_id} is computed long after its end"
            seq = self.by_id[row.seq_id]
            if seq.id not in self.charged:
                self.charged.add(seq.id)
                served[seq.request.flow] += (len(seq.tokens) - row.start) / seq.request.weight
        self._check_served(served)
        return batch

    def _make_way(self) -> bool:
        before = self.counters.preempted
        has_made_way = super()._make_way()
        self.made_way = self.counters.preempted - before
        self.favored = self.waiting.starved(self.running) if self.made_way and has_made_way else None
        self.held_up.clear()
        return has_made_way

    def _fits(self, seq: Sequence, hits: list[int], promised: int) -> bool:
        fits = super()._fits(seq, hits, promised)
        if not fits:
            self.held_up.add(seq.request.flow)
        return fits

    def _check_turns(self, before: dict[int, str]) -> None:
        """No flow that runs something starts a new sequence before one that runs nothing, waits, and finds blocks."""
        if self.config.policy not in ("fcfs", "prefill-first"):
            return
        running = {seq.request.flow for seq in self.running}
        fresh = [seq for seq in self.running if seq.id not in before and not seq.preemptions]
        passed = {seq.request.flow for seq in self.waiting} - running
        if passed and not passed & self.held_up:
            assert not any(seq.request.flow in before.values() for seq in fresh), "a flow was passed over"

    def _check_served(self, expected: dict[str, float]) -> None:
        for seq in self.by_id.values():
            flow = seq.request.flow
            assert abs(self.service.of(flow) - expected[flow]) < 1e-6, "a flow was charged for what it has not had"

    def update(self, batch: Batch, result: StepResult) -> list[TokenDelta]:
        served = {flow: self.service.of(flow) for flow in {seq.request.flow for seq in self.by_id.values()}}
        for row, outcome in zip(batch.rows, result.outcomes, strict=True):
            seq = self.by_id.get(row.seq_id)
            if seq is not None and isinstance(outcome, Sampled) and row.end == len(seq.tokens):
                served[seq.request.flow] += OUTPUT_COST * len(outcome.token_ids) / seq.request.weight
        deltas = super().update(batch, result)
        self._check_served(served)
        self._check_collected(batch)
        return deltas

    def abandon(self, batch: Batch, *, may_fit: bool = False) -> list[TokenDelta]:
        has_ended = any(row.seq_id not in self.by_id for row in batch.rows)
        deltas = super().abandon(batch, may_fit=may_fit)
        assert deltas or may_fit or has_ended, "a step without memory has failed nobody"
        assert not (deltas and may_fit), "a request has failed in a step that would fit alone"
        self._check_collected(batch)
        assert self.limits.budget >= self.limits.max_seqs >= 1, "a step could not serve what runs"
        return deltas

    def _check_collected(self, batch: Batch) -> None:
        if self.flight is batch:
            self.flight = None
            assert not any(seq.num_inflight for seq in self.by_id.values()), "tokens are in flight and no step is"


def info_of(plan: Plan) -> EngineInfo:
    config = plan.config
    assert config.max_len and config.max_seqs and config.max_batched_tokens
    return replace(
        INFO,
        max_len=min(config.max_len, plan.num_blocks * config.block_size),
        vocab_size=VOCAB,
        block_size=config.block_size,
        num_blocks=plan.num_blocks,
        max_seqs=config.max_seqs,
        max_batched_tokens=config.max_batched_tokens,
    )
