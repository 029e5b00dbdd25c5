"""AppState: the state of one app, which routes get as a dependency."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import secrets
import time
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from engine import Engine, EngineDied, EngineError

from .grammar.checker import Gate
from .http.admission import Limits
from .http.auth import Keys
from .http.errors import FAILED_S, RETRY_S, not_found
from .http.excerpt import shown
from .loading import LoadedModel, load
from .observability.metrics import Metrics
from .settings import Settings

HEARTBEAT_S = 5.0  # without a heartbeat of the engine process, which sends two per second
CUT_S = 5.0  # for streams to write their error event after the drain's deadline


@dataclass(frozen=True, slots=True)
class Health:
    """The body of /ready, from what the engine has reported last."""

    state: str  # ready | starting | loading | restarting | draining | failed | silent | stalled | full
    phase: str  # of the engine
    share: float  # of the weights that are loaded
    last_step_age_s: float | None  # None: no step yet
    running: int
    waiting: int


class AppState:
    """The state of one app, in `app.state.pequod`."""

    def __init__(self, settings: Settings, engine: Engine, version: str) -> None:
        self.settings = settings
        self.engine = engine
        self.version = version
        self.keys = Keys(settings)
        self.limits = Limits(settings)
        self.grammars = Gate()
        self.metrics = Metrics(settings, engine, self.limits)
        self.description = b""  # of the API as JSON, rendered at the first request
        self.model: LoadedModel | None = None  # None while loading, and if that failed
        self.model_names = settings.names
        self.created = int(time.time())
        self.deadline_passed = asyncio.Event()  # of the drain: open streams end with an error event
        self.failure = asyncio.Event()  # set with `failed`
        self._load_error: EngineError | None = None
        self._settled = asyncio.Event()  # loading has ended
        self._ids = itertools.count(1)
        self._seeds = None if settings.seed is None else random.Random(settings.seed)

    # Loading

    async def load(self) -> None:
        """Load the model; `ready` and `failed` report an error."""
        try:
            model = await load(self.settings, self.engine, self.version)
        except EngineError as error:
            self._load_error = error
        else:
            self.limits.max_seqs = model.info.max_seqs
            self.grammars.checker.width = model.info.vocab_size
            self.metrics.bind(model.info)
            self.model = model
        self._settled.set()
        self.watch()

    async def ready(self) -> LoadedModel:
        """Wait until requests can be served. Raises the EngineError that prevents it."""
        while self.model is None:
            if self._load_error is not None:
                raise self._load_error
            await self._settled.wait()
        await self.engine.ready()
        return self.model

    def watch(self) -> None:
        """Set `failure` if the engine has failed for good; called a few times a second."""
        if self.failed is not None:
            self.failure.set()

    @property
    def failed(self) -> EngineError | None:
        """The error after which no request can be served; None if there is none."""
        if self._load_error is None and self.engine.status.phase == "failed":
            return self.engine.status.error or EngineDied("the engine failed")
        return self._load_error

    # For routes

    def new_id(self) -> int:
        return next(self._ids)

    def new_seed(self) -> int:
        """Return a 64-bit seed for a request without one; with --seed, the same sequence in every run."""
        return secrets.randbits(64) if self._seeds is None else self._seeds.getrandbits(64)

    def check_model(self, name: str | None) -> str:
        """Return the served name for a request's model; raises 404."""
        if name is None:
            return self.model_names[0]
        if self.settings.accepts(name):
            return name
        message = f"The model '{shown(name)}' does not exist; GET /v1/models lists the models of this server."
        raise not_found(message, "model", "model_not_found")

    def require_ready(self) -> LoadedModel:
        """Return the model; raises 503 with Retry-After if no new work is accepted.

        While the engine restarts, work is accepted: it starts when the open requests continue.
        """
        if self.limits.draining:
            raise self.limits.refuse("draining", "The server is shutting down.", RETRY_S)
        if self.failed is not None:
            raise self.limits.refuse("failed", "The engine has failed and will not be restarted.", FAILED_S)
        if self.model is None:
            share = self.engine.status.share
            raise self.limits.refuse("loading", f"The model is loading ({share:.0%} so far).", RETRY_S)
        return self.model

    # Health

    def health(self) -> Health:
        """The body of /ready."""
        status, now = self.engine.status, time.monotonic()
        running, waiting = self.metrics.running_waiting()
        return Health(
            state=self._state(now),
            phase=status.phase,
            share=round(status.share, 4),
            last_step_age_s=round(now - status.last_step, 3) if status.last_step else None,
            running=running,
            waiting=waiting,
        )

    def _state(self, now: float) -> str:
        """Return the state in one word."""
        status = self.engine.status
        if self.limits.draining:
            return "draining"
        if self.failed is not None or status.phase == "closed":
            return "failed"
        if status.phase == "restarting":
            return "restarting"
        if status.phase != "ready" or self.model is None:
            return "starting" if status.phase == "starting" else "loading"
        silence_s = HEARTBEAT_S if self.model.info.beats_during_steps else self.settings.stall_seconds
        if getattr(self.engine, "pid", None) is not None and now - status.heartbeat > silence_s:
            return "silent"
        if self._stalled_for(now) > self.settings.stall_seconds:
            return "stalled"
        return "full" if self.limits.is_full else "ready"

    def _stalled_for(self, now: float) -> float:
        """Return the seconds without a step while there was work; 0.0 without work.

        Choices that are open here, because of a slow reader, may have ended in the engine, as their last step reported.
        Our own count matters only before the first step for new work.
        """
        status = self.engine.status
        is_new = self.limits.busy_since > status.last_step
        if self.limits.open_choices == 0 or not (status.running or status.waiting or is_new):
            return 0.0
        return now - max(status.last_step, self.limits.busy_since)

    # Drain

    def begin_drain(self) -> None:
        """Report unready and refuse new work with a 503; running requests continue. Safe to call again."""
        self.limits.draining = True

    async def drained(self, timeout: float) -> bool:  # noqa: ASYNC109 (streams are ended at the timeout)
        """Wait until no choice is open.

        After `timeout` seconds all open streams are ended with an error event; returns False when they have ended, or
        after CUT_S.
        """
        idle = asyncio.Event()
        self.limits.when_idle(idle.set)
        with contextlib.suppress(TimeoutError):
            if not idle.is_set():
                await asyncio.wait_for(idle.wait(), timeout)
            return True
        self.deadline_passed.set()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(idle.wait(), CUT_S)
        return False

    async def close(self) -> None:
        """Stop the engine and all threads."""
        await self.grammars.checker.close()
        await self.engine.close()
        if self.model is not None:
            self.model.prompts.close()


async def app_state(request: Request) -> AppState:
    """The state of the app that serves a request. A coroutine, since FastAPI runs plain functions in a thread."""
    state: AppState = request.app.state.pequod
    return state


AppDep = Annotated[AppState, Depends(app_state)]
