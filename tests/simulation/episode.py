"""Episode: clients of one server in virtual time, from its start to its end, under one plan.

What is real: admission (Limits, Ticket), the engine's client with its supervisor and its suspects, the channel with its
frames, the worker's mail, the engine's loop, scheduler and blocks, and the server's generations, which read the
streams. What is not: HTTP, text, the process, and the model.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

from starlette.requests import ClientDisconnect

from engine import EngineError, EngineRequest, Pooling, SamplingParams, TokenDelta, channel
from engine import client as client_module
from engine import loop as loop_module
from engine import supervisor as supervisor_module
from engine.fair_lock import FairLock
from engine.supervisor import MAX_RESTARTS, ProcessEngine
from server import state as state_module
from server.generation import choices as generation_module
from server.generation.choices import Due, Generation, Reader, unfinished
from server.generation.http_response import WRITE_TIMEOUT_S, patiently
from server.generation.output import Output
from server.http.admission import INPUTS_DEPTH, Caller
from server.http.disconnect import while_connected
from server.http.errors import ApiError
from server.http.shares import SHARE
from server.loading import LoadedModel
from server.observability.tracking import RequestTracker
from server.parsers.formats import Formats
from server.settings import Settings
from server.state import CUT_S, AppState

from .plan import STEP_FAULTS, Plan
from .process import NOT_FINITE, Child, Process, World, info_of, undisturbed
from .scheduler import STOP, VOCAB, any_pooling, embed
from .virtual import VirtualLoop, virtual_time

STALL_S = 3.0
# Until everything has ended once nobody comes any more: minutes for readers that are cut off, and for several deaths.
PATIENCE_S = 3600.0
STOPS = (STOP, 5, 11, 23)  # none of which a grammar forces
OUT_OF_MEMORY = "ran out of memory"


@dataclass(eq=False)
class Visit:
    """One client and its request, from its arrival to its end."""

    number: int
    caller: Caller
    n: int
    prompts: list[list[int]]
    params: SamplingParams
    is_pooled: bool
    body_bytes: int
    gone_at: float | None  # hangs up
    cancelled_at: float | None  # the server gives its task up
    due_s: float | None
    pause_s: float  # mean, between two reads
    stops_reading: int | None  # after this many reads
    started_at: float = 0.0  # its generation; 0.0: it has not
    due_at: float = math.inf
    requests: list[EngineRequest] = field(default_factory=list)
    outcome: str = ""
    cause: str = ""

    @property
    def is_slow(self) -> bool:
        """Whether the server may have to wait for this client."""
        return self.pause_s > 0 or self.stops_reading is not None


class Engine(ProcessEngine):
    """The real client, with books of which requests it has done with and whom it has blamed."""

    def __init__(self, world: World, processes: list[Process]) -> None:
        super().__init__(world.plan.config, stall_s=STALL_S)
        self.world = world
        self.processes = processes
        self.deaths: Counter[int] = Counter()  # at which a request was running
        self.convicted: set[int] = set()

    def _ended(self, entry: Any) -> None:
        request_id = entry.request.id
        assert request_id not in self.world.closed, f"request {request_id} has ended twice"
        self.world.closed[request_id] = self.world.loop.now
        super()._ended(entry)

    def _end(self, entry: Any, error: EngineError) -> None:
        self.convicted.add(entry.request.id)
        super()._end(entry, error)

    def _record_death(self) -> None:
        running = {request_id for request_id in self._open if self.processes and request_id in self.processes[-1].ran}
        if self.processes:
            self.processes[-1].ran.clear()
        self.deaths.update(running)
        before = set(self.convicted)
        super()._record_death()
        for request_id in self.convicted - before:
            assert running == {request_id}, f"request {request_id} is blamed for a death at which it was not alone"
            assert self.deaths[request_id] >= 2, f"request {request_id} is blamed for a single death"
            is_guilty = self.world.blame[request_id] > 0
            assert is_guilty or not self.world.plan.is_calm, f"request {request_id} is blamed and innocent"


class Stream(Reader):
    """Checks what comes of one engine request against what it must be."""

    def __init__(self, episode: Episode, index: int, request: EngineRequest) -> None:
        super().__init__(index, request)
        self.episode = episode
        self.output: list[int] = []
        self.is_first = True
        self.first_at: float | None = None  # when the first token was read
        self.has_ended = False
        self.failed: str | None = None  # the engine's reason

    def read(self, delta: TokenDelta) -> Output:
        try:
            return self._read(delta)
        except ApiError:
            raise
        except Exception as error:
            self.episode.world.loop.fail(error)
            raise

    def _read(self, delta: TokenDelta) -> Output:
        request, params = self.request, self.request.params
        name = f"request {request.id}"
        assert delta.id == request.id, f"{name} has got tokens of request {delta.id}"
        assert not self.has_ended, f"{name} goes on after its end"
        self.has_ended = delta.finish_reason is not None
        self.stats = delta.stats or self.stats
        self.output += delta.token_ids
        if params.pooling is not None:
            wanted = embed(list(request.prompt_ids), params.pooling.kind) if delta.finish_reason == "stop" else None
            assert delta.embedding == wanted, f"{name} has got another vector than its own"
        else:
            expected, reason = self.episode.expected(request)
            assert self.output == expected[: len(self.output)], f"{name} has other tokens than undisturbed"
            if delta.finish_reason in ("stop", "length"):
                assert self.output == expected, f"{name} ends too early"
                assert delta.finish_reason == reason, f"{name} ends with {delta.finish_reason}, not with {reason}"
        if delta.finish_reason in ("stop", "length"):
            assert request.id not in self.episode.world.blame, f"{name} has killed the engine, and is complete"
            assert self.stats is not None and self.stats.output_tokens == len(self.output), f"{name} is not counted"
        if params.logprobs is not None and not params.grammar:
            scores = [-entry.logprob for entry in delta.logprobs or ()]
            assert scores == list(delta.token_ids), f"{name} has scores of other tokens"
        is_scored = params.prompt_logprobs is not None and self.is_first and delta.token_ids
        scores = [-entry.logprob for entry in delta.prompt_logprobs or ()]
        assert scores == (list(request.prompt_ids[1:]) if is_scored else []), f"{name} has scores of another prompt"
        if self.is_first and delta.token_ids:
            self.is_first, self.first_at = False, self.episode.loop.now
        if self.stats is not None and self.first_at is not None:
            assert self.stats.first_token <= self.first_at, f"{name} forgets its first token's time"
        if delta.finish_reason not in (None, "stop", "length"):
            self.failed = delta.error or delta.finish_reason
            self.episode.failed(self)
            raise unfinished(delta)
        return Output(self.index, token_ids=delta.token_ids, finish_reason=delta.finish_reason)


class Request:
    """What `while_connected` wants of a request: when its client hangs up."""

    def __init__(self, hung_up: asyncio.Event) -> None:
        self.hung_up = hung_up

    async def receive(self) -> dict[str, str]:
        await self.hung_up.wait()
        return {"type": "http.disconnect"}


class Episode:
    """One server from its start to its end."""

    def __init__(
        self, seed: str, settings: Settings, trace: hashlib._Hash, plan: Plan | None = None, depth: int = 0
    ) -> None:
        """`plan`: instead of the one that is drawn from the seed. `depth`: steps that are launched ahead."""
        rng = random.Random(seed)
        drawn = Plan.draw(rng, depth)
        self.plan = plan or drawn
        self.rng = rng
        self.loop = VirtualLoop()
        self.world = World(self.plan, rng, self.loop, trace, info_of(self.plan), loading=[*self.plan.loading_faults])
        self.world.patience_s = 25 * self.plan.latency_s + 1e-6
        self.settings = settings
        self.processes: list[Process] = []
        self.outcomes: Counter[str] = Counter()
        self.visits = 0
        self.tasks: dict[asyncio.Task[None], Visit] = {}
        self.admitted: dict[int, Visit] = {}
        self.is_draining = False
        self.cut_at = math.inf  # when the drain ends every stream
        self.memory_errors = 0
        self._expected: dict[int, tuple[list[int], str]] = {}

    def run(self, max_steps: int) -> None:
        """Clients come for about `max_steps` steps of the engine; then all of them end."""
        self.max_steps = max_steps
        modules = (client_module, loop_module, supervisor_module, generation_module, state_module)
        log = logging.getLogger("pequod")
        level = log.level
        with (
            virtual_time(self.loop, *modules),
            mock.patch.object(supervisor_module, "Child", partial(Child, self.world, self.processes)),
            mock.patch.object(channel, "HIGH_WATER", self.plan.high_water),
        ):
            log.setLevel(logging.CRITICAL + 1)
            try:
                self.loop.run(self._main())
            finally:
                log.setLevel(level)

    # The server

    async def _main(self) -> None:
        world, plan = self.world, self.plan
        self.engine = Engine(world, self.processes)
        self.app = AppState(self.settings, self.engine, "sim")
        self.app.metrics.clock = self.app.limits._clock = self.loop.time
        self.limits = self.app.limits
        self.limits.max_queued = plan.max_queued
        self.limits.choices.total = plan.max_queued
        self.limits.tokens.total = 40 * world.info.max_len
        self.limits.bytes.total = 16 * 12
        self.limits.max_body_bytes = 16
        self.turns = FairLock()
        self.prefixes = [[self.rng.randrange(VOCAB) for _ in range(200)] for _ in range(3)]
        await self.engine.start()
        assert self.engine._task is not None
        self.engine._task.add_done_callback(self._supervisor_ended)
        info = await self.engine.ready()
        self.limits.max_seqs = info.max_seqs
        self.app.metrics.bind(info)
        no_text: Any = SimpleNamespace(close=lambda: None)  # prompts are token ids here
        self.app.model = LoadedModel(info, no_text, no_text, Formats(), {}, "")
        faults = [self.loop.create_task(self._kill_from_outside()), self.loop.create_task(self._drain())]
        await self._clients_come()
        world.is_over = True
        await self._wait_for_the_rest()
        for task in faults:
            task.cancel()
        await asyncio.gather(*faults, return_exceptions=True)
        await asyncio.sleep(25 * plan.latency_s + 20 * plan.step_s)  # for aborts that are on their way
        self._check_end()
        await self.app.close()
        assert self.engine.status.phase == "closed"
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.sleep(20 * plan.latency_s + 0.001)
        others = {task for task in asyncio.all_tasks() - {asyncio.current_task()} if not task.done()}
        assert not others, f"tasks are left: {others}"

    async def _clients_come(self) -> None:
        world, plan = self.world, self.plan
        waited = 0
        while world.steps < self.max_steps and waited < 20 * self.max_steps:
            await asyncio.sleep(world.duration(plan.arrival_s))
            waited += 1
            if plan.is_doomed and world.steps > self.max_steps // 2:
                world.is_doomed = True
            # Refusals are cheap to make and all alike: of those who would be refused for a full queue most stay away.
            if self.limits.open_choices + 3 > self.limits.max_choices and self.rng.random() < 0.9:
                continue
            if len(self.tasks) < plan.most_open:
                visit = self._visit()
                task = self.loop.create_task(self._serve(visit))
                self.tasks[task] = visit
                task.add_done_callback(self._left)
                if visit.cancelled_at is not None:
                    self.loop.call_at(visit.cancelled_at, task.cancel)
            if (self.is_draining or self.engine.status.phase == "failed") and self.rng.random() < 0.05:
                break  # all that come now are refused

    def _left(self, task: asyncio.Task[None]) -> None:
        self.tasks.pop(task)
        if not task.cancelled() and task.exception() is not None:
            self.loop.fail(task.exception())

    def _supervisor_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self.loop.fail(task.exception())

    async def _wait_for_the_rest(self) -> None:
        end = self.loop.now + PATIENCE_S
        while self.tasks:
            await asyncio.sleep(0.5)
            assert self.loop.now < end, f"requests never end: {[visit.number for visit in self.tasks.values()]}"
            self._check_books()

    async def _kill_from_outside(self) -> None:
        """End the process, or stop it, at any moment, as far as a supervisor may be expected to cope."""
        world, plan = self.world, self.plan
        while plan.kill_s is not None:
            await asyncio.sleep(world.duration(plan.kill_s))
            process = self.processes[-1]
            if world.is_over:
                return
            if world.unready and world.unready + len(world.loading) >= MAX_RESTARTS and not world.is_doomed:
                continue
            if process.is_alive:
                world.faults["outside"] += 1
                process.die(-9) if self.rng.random() < 0.7 else process.stand_still()

    async def _drain(self) -> None:
        plan = self.plan
        if plan.drain_at is None:
            return
        while self.world.steps < plan.drain_at * self.max_steps:
            await asyncio.sleep(10 * plan.step_s)
        self.world.faults["drain"] += 1
        self.is_draining = True
        self.app.begin_drain()
        began = self.loop.now
        self.cut_at = began + plan.drain_s
        is_idle = await self.app.drained(plan.drain_s)
        took_s = self.loop.now - began
        assert took_s <= plan.drain_s + CUT_S + 1e-6, f"the drain took {took_s} s"
        assert not is_idle or not self.limits.open_choices, "the drain says that nothing is open, and something is"

    # Clients

    def _visit(self) -> Visit:
        rng, world, plan = self.rng, self.world, self.plan
        self.visits += 1
        flow, weight = rng.choice(plan.flows)
        max_len = world.info.max_len
        pooling = any_pooling(rng) if rng.random() < 0.1 else None
        params = SamplingParams(
            max_tokens=0 if pooling else rng.choice((1, rng.randint(1, 8), rng.randint(1, 100), 1000)),
            min_tokens=rng.choice((0, 0, rng.randint(0, 20))),
            stop_ids=rng.choice(((STOP,), STOPS, ())),
            logprobs=rng.choice((None, None, 0)) if pooling is None else None,
            prompt_logprobs=rng.choice((None, None, None, 0)) if pooling is None else None,
            presence_penalty=rng.choice((0.0, 0.0, 1.0)),
            pooling=pooling,
        )
        if pooling is None and params.prompt_logprobs is None and params.logprobs is None and rng.random() < 0.25:
            params = SamplingParams(max_tokens=params.max_tokens, stop_ids=params.stop_ids, grammar=("sim", ""))
        now, some_s = self.loop.now, plan.step_s * rng.choice((1, 10, 100))
        hangs_up = world.chance(plan.abort)
        return Visit(
            number=self.visits,
            caller=Caller(key=flow, flow=flow, weight=weight),
            n=rng.choice((1, 1, 1, 2, 3)) if pooling is None else 1,
            prompts=[self._prompt(max_len, pooling) for _ in range(rng.choice((1, 1, 2, 5)) if pooling else 1)],
            params=params,
            is_pooled=pooling is not None,
            body_bytes=rng.randint(0, 16),
            gone_at=now + world.duration(some_s) if hangs_up and rng.random() < 0.7 else None,
            cancelled_at=now + world.duration(some_s) if hangs_up and rng.random() < 0.5 else None,
            due_s=world.duration(some_s) if rng.random() < 0.05 else None,
            pause_s=rng.choice((10, 100, 1000)) * plan.step_s if world.chance(plan.slow) else 0.0,
            stops_reading=rng.randint(0, 5) if world.chance(plan.slow / 4) else None,
        )

    def _prompt(self, max_len: int, pooling: Pooling | None) -> list[int]:
        rng = self.rng
        most = max_len if pooling else max_len - 1
        length = rng.randint(1, most) if rng.random() < 0.3 else rng.randint(1, max(1, max_len // 3))
        shared = rng.choice(self.prefixes)[: rng.randint(0, length)]
        return [*shared, *(rng.randrange(VOCAB) for _ in range(length - len(shared)))]

    async def _serve(self, visit: Visit) -> None:
        """What the server does with a request, between its first byte and its last."""
        limits, caller = self.limits, visit.caller
        num_bytes = 0
        hung_up = asyncio.Event()
        timer = self.loop.call_at(visit.gone_at, hung_up.set) if visit.gone_at is not None else None
        try:
            limits.count_bytes(caller, visit.body_bytes, 0)
            num_bytes = visit.body_bytes
            await self._answer(visit, Request(hung_up))
        except ClientDisconnect:
            visit.outcome = "gone"
        except asyncio.CancelledError:
            visit.outcome = "cancelled"
            assert visit.cancelled_at is not None, "a request was cancelled by nobody"
        except ApiError as error:
            visit.outcome = visit.outcome or f"{error.status} {error.code}"
            self._check_error(visit, error)
        finally:
            if timer is not None:
                timer.cancel()
            limits.bytes.release(caller.flow, num_bytes)
            caller.release()
            self._close(visit)

    async def _answer(self, visit: Visit, request: Any) -> None:
        app, caller = self.app, visit.caller
        app.require_ready()
        due = Due(self.loop.now + visit.due_s, "deadline") if visit.due_s is not None else None
        self._check_room(visit)
        if visit.is_pooled:
            ticket = self.limits.admit_inputs(caller, len(visit.prompts))
        else:
            ticket = self.limits.admit(caller, visit.n)
        assert not self.is_draining, "a request was admitted after the drain had begun"
        self.admitted[visit.number] = visit
        await while_connected(request, self._tokenize(visit, ticket))
        visit.started_at = self.loop.now
        visit.due_at = max(self.loop.now, due.at) if due is not None else math.inf
        streams = self._streams(visit)
        track = RequestTracker(app.metrics, str(visit.number), visit.n, [len(prompt) for prompt in visit.prompts], 1)
        fields: dict[str, Any] = {}
        if visit.is_pooled:
            fields = {"window": INPUTS_DEPTH * self.limits.max_seqs, "slots": self.limits.input_slots}
        generation = Generation(app.engine, streams, visit.n, track, due, shutdown=app.deadline_passed, **fields)
        reads = 0
        async with generation.running(request.receive):
            async for outputs in generation.outputs():
                if visit.stops_reading is not None and reads >= visit.stops_reading:
                    await patiently(generation, lambda _: asyncio.Event().wait(), WRITE_TIMEOUT_S, outputs)
                if visit.pause_s:
                    await asyncio.sleep(self.world.duration(visit.pause_s))
                assert len(outputs) <= len(streams), "outputs pile up before a slow reader"
                reads += 1
            visit.outcome = "complete"
        visit.cause = track.cause or ""
        for choice in track.choices:
            assert choice.reason is not None, "a choice was left without an end"
        if visit.outcome == "complete":
            assert all(stream.has_ended for stream in streams), "a request is complete, and its choices are not"
        else:
            # Given up for not reading, whatever else has ended it meanwhile; or gone, perhaps after its last token.
            visit.outcome = "gone" if visit.stops_reading is None else "slow"
            if visit.stops_reading is None:
                assert visit.gone_at is not None and visit.cause in ("disconnect", ""), f"given up: {visit.cause}"

    async def _tokenize(self, visit: Visit, ticket: Any) -> None:
        async with self.turns.turn(visit.caller.flow):
            await asyncio.sleep(self.world.duration(self.plan.step_s / 4))
        ticket.add_prompt(sum(map(len, visit.prompts)))

    def _streams(self, visit: Visit) -> list[Stream]:
        rng, world = self.rng, self.world
        streams = []
        for index in range(visit.n * len(visit.prompts)):
            request = EngineRequest(
                id=self.app.new_id(),
                prompt_ids=tuple(visit.prompts[index // visit.n]),
                params=visit.params,
                priority=rng.randint(0, 2),
                cache_salt=visit.caller.flow,
                flow=visit.caller.flow,
                weight=visit.caller.weight,
            )
            if world.chance(self.plan.poison):
                kinds = (*STEP_FAULTS, "compile") if visit.params.grammar else STEP_FAULTS
                at = 0 if visit.is_pooled else rng.choice((0, 1, 4))
                world.poison[request.id] = rng.choice(kinds), at
                if at and rng.random() < 0.5:  # its end comes while it has tokens that nobody has read
                    visit.pause_s = 20.0
            elif world.chance(self.plan.row_errors):
                world.bad_rows[request.id] = rng.choice((0, 3))
            visit.requests.append(request)
            streams.append(Stream(self, index, request))
        return streams

    def expected(self, request: EngineRequest) -> tuple[list[int], str]:
        """What a request must give, whatever happens around it."""
        found = self._expected.get(request.id)
        if found is None:
            found = self._expected[request.id] = undisturbed(request, self.world.info.max_len)
        return found

    # Checks

    def failed(self, stream: Stream) -> None:
        """The engine has ended a request with an error: one that was in the plan."""
        reason = stream.failed or ""
        if OUT_OF_MEMORY in reason:
            self.memory_errors += 1
            assert self.memory_errors <= self.world.faults["memory"], "a step without memory failed several requests"
        else:
            assert reason == NOT_FINITE, f"request {stream.request.id} failed: {reason}"
            assert stream.request.id in self.world.bad_rows, f"request {stream.request.id} failed for another"

    def _check_room(self, visit: Visit) -> None:
        """What admission must decide, from own books."""
        opened = [each for each in self.admitted.values() if each.caller.flow == visit.caller.flow]
        self.own_choices = sum(each.n for each in opened)
        self.all_choices = sum(each.n for each in self.admitted.values())

    def _check_error(self, visit: Visit, error: ApiError) -> None:
        limits, code = self.limits, error.code
        ids = [request.id for request in visit.requests]
        if error.status in (429, 503):
            assert error.retry_after is not None and error.retry_after >= 1, "nobody says when to come back"
        if code == "draining":
            assert self.is_draining, "a request was refused as if the server were draining"
        elif code == "queue_full" and not visit.is_pooled:
            full = limits.max_seqs + self.plan.max_queued
            assert self.all_choices + visit.n > full, "a request was refused, and there was room"
        elif error.status == 429 and visit.number not in self.admitted and "completions" in error.message:
            assert self.own_choices + visit.n > limits.max_seqs, "a caller was refused below what can run at once"
        elif code == "engine_died":
            is_lost = self.engine.status.phase == "failed"
            blamed = [each for each in ids if each in self.engine.convicted]
            assert is_lost or blamed, f"request {visit.number} died, and neither it nor the engine has"
        elif code == "engine_error":
            assert any(each in self.world.bad_rows for each in ids) or self.memory_errors, "a request failed"
        elif code == "failed":
            assert self.engine.status.phase == "failed", "the engine has not failed"
        elif error.status == 504:
            assert visit.due_s is not None, "a request without a deadline met one"
        else:
            known = error.status == 429 or code in ("prompt_tokens", "queue_full", "body_bytes")
            known = known or (error.status == 400 and visit.n > 1)
            assert known, f"an answer that nobody planned: {error.status} {code} {error.message}"

    def _close(self, visit: Visit) -> None:
        """A client has gone: nothing of it may be left with the engine's client or in the books of admission."""
        self.admitted.pop(visit.number, None)
        self.outcomes[visit.outcome] += 1
        self.world.trace.update(f"{visit.number} {visit.outcome} {self.loop.now:.6f}".encode())
        left = [request.id for request in visit.requests if request.id in self.engine._open]
        assert not left, f"requests {left} are open, and their client has gone"
        assert visit.is_slow or self.loop.now <= visit.due_at + 1e-6, "a request goes on after its deadline"
        is_late = visit.started_at > 0 and self.loop.now > max(self.cut_at, visit.started_at) + 1e-6
        assert visit.is_slow or not (is_late and self.app.deadline_passed.is_set()), "a request outlives the drain"
        assert not any(ticket.is_open for ticket in visit.caller.tickets), "a ticket was leaked"
        self._check_books()

    def _check_books(self) -> None:
        """Admission's sums are those of the requests that are open."""
        limits = self.limits
        choices = inputs = tokens = 0
        held: Counter[str] = Counter()
        for visit in self.admitted.values():
            choices += visit.n
            held[visit.caller.flow] += visit.n
            inputs += len(visit.prompts) if visit.is_pooled else 0
            for ticket in visit.caller.tickets:
                tokens += ticket.prompt_tokens if ticket.is_open else 0
        assert limits.open_choices == choices, "the open choices are counted wrongly"
        assert limits.inputs.open == inputs, "the open inputs are counted wrongly"
        assert limits.tokens.open == tokens, "the open prompt tokens are counted wrongly"
        assert choices <= limits.max_choices, "more is open than may be"
        alone = math.ceil(limits.max_queued * SHARE / (1 + SHARE))
        assert max(held.values(), default=0) <= limits.max_seqs + alone, "a caller holds what is kept for others"
        for name, shared in (("choices", limits.choices), ("tokens", limits.tokens), ("bytes", limits.bytes)):
            assert 0 <= shared.open == sum(shared._held.values()), f"{name} are not whose they seem to be"
            assert set(shared._held) == set(shared._weights), f"{name} have a caller with no weight"

    def _check_end(self) -> None:
        """Everybody has gone: everything must have been given back."""
        limits, engine = self.limits, self.engine
        for name, shared in (
            ("choices", limits.choices), ("tokens", limits.tokens), ("inputs", limits.inputs), ("bytes", limits.bytes),
        ):  # fmt: skip
            assert not shared.open and not shared._held and not shared._weights, f"{name} were leaked"
        assert not engine._open, f"requests are open at the client: {[*engine._open]}"
        suspects = engine._suspects
        for name in ("_ran", "_deaths", "_came", "_doubtful", "_group", "_groups"):
            is_kept = engine.status.phase == "failed"  # for good: nobody asks any more
            assert is_kept or not getattr(suspects, name), f"suspects{name} remembers requests that have ended"
        assert not self.turns.num_waiting, "somebody waits for a turn, and nobody is there"
        if engine.status.phase == "failed":
            assert self.world.is_doomed, "the engine was given up, and would have come back"
        process = self.processes[-1]
        if process.is_alive and process.worker.loop is not None and engine.status.phase == "ready":
            worker_loop = process.worker.loop
            if not process.worker.thread.hangs and process.worker.tasks[-1].cancelling() == 0:
                scheduler = worker_loop.scheduler
                assert scheduler.is_idle, "the engine works on, and nobody is there"
                assert not scheduler.pool.num_held, "blocks are held, and nobody runs"
                assert not scheduler.service.num_flows, "a flow is counted that has no request"
                assert not worker_loop._compiling, "a grammar is being compiled for nobody"
                assert not worker_loop.grammars.matchers, "a grammar was leaked"
                scheduler.check()
        # Each death halves the group in which the guilty one is; what else kills meanwhile may begin that anew.
        most = 4 + math.ceil(math.log2(2 + 5 * self.plan.most_open))
        for request_id, deaths in self.world.blame.items() if self.plan.is_calm else ():
            assert deaths <= most * len(self.world.blame), f"request {request_id} has killed {deaths} engines"


@contextlib.contextmanager
def settings() -> Iterator[Settings]:
    """Settings that the environment has no part in."""
    with mock.patch.dict("os.environ", clear=True):
        yield Settings(model="sim")
