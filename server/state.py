"""Pequod: everything that one app holds, and what routes ask it before they start work."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import secrets
import time
from typing import Annotated

from fastapi import Depends, Request

from engine import Engine, EngineDied, EngineError

from .grammar.checker import Gate
from .health import Health, state_of
from .http import retry
from .http.admission import Limits
from .http.auth import Keys
from .http.errors import not_found
from .http.excerpt import shown
from .loading import LoadedModel, load
from .observability.metrics import Metrics
from .settings import Settings

CUT_S = 5.0  # for streams to write their error event after the drain's deadline


class Pequod:
    """One app's state; lives in `app.state.pequod` from build_app on."""

    def __init__(self, settings: Settings, engine: Engine, version: str) -> None:
        self.settings = settings
        self.engine = engine
        self.version = version
        self.keys = Keys(settings)
        self.limits = Limits(settings)
        self.grammars = Gate()
        self.metrics = Metrics(settings, engine, self.limits)
        self.description = b""  # of the API as JSON, once somebody has asked for it
        self.model: LoadedModel | None = None  # None: still loading, or it failed
        self.model_names = settings.names
        self.created = int(time.time())
        self.deadline_passed = asyncio.Event()  # the drain's: every open stream ends now, with an error event
        self.failure = asyncio.Event()  # set with `failed`
        self._load_error: EngineError | None = None
        self._settled = asyncio.Event()  # loaded, or _load_error is there
        self._ids = itertools.count(1)
        self._seeds = None if settings.seed is None else random.Random(settings.seed)

    # Loading

    async def load(self) -> None:
        """Load the model; an error is kept for `ready` and `failed`."""
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
        """Wait until generation works: engine and tokenizer; raises the EngineError that prevents it."""
        while self.model is None:
            if self._load_error is not None:
                raise self._load_error
            await self._settled.wait()
        await self.engine.ready()
        return self.model

    def watch(self) -> None:
        """Notice that the engine has failed for good; called a few times a second."""
        if self.failed is not None:
            self.failure.set()

    @property
    def failed(self) -> EngineError | None:
        """Why this server will never answer again; None while it may."""
        if self._load_error is None and self.engine.status.phase == "failed":
            return self.engine.status.error or EngineDied("the engine failed")
        return self._load_error

    # What routes ask

    @property
    def draining(self) -> bool:
        return self.limits.draining

    def new_id(self) -> int:
        """The id of a new engine request."""
        return next(self._ids)

    def new_seed(self) -> int:
        """64 bits for a request that brings no seed: with --seed the same ones in every run, in order of arrival."""
        return secrets.randbits(64) if self._seeds is None else self._seeds.getrandbits(64)

    def check_model(self, name: str | None) -> str:
        """The served name that a request means; raises 404."""
        if name is None:
            return self.model_names[0]
        if name in self.model_names:
            return name
        raise not_found(f"The model '{shown(name)}' does not exist here; GET /v1/models lists what does.", "model",
                        "model_not_found")  # fmt: skip

    def require_ready(self) -> LoadedModel:
        """The model, where new work is taken; otherwise raises 503 with Retry-After.

        An engine that is being restarted takes work: it begins where the others go on.
        """
        if self.draining:
            raise self.limits.refuse("draining", "The server is shutting down.", retry.DRAINING_S)
        if self.failed is not None:
            raise self.limits.refuse("failed", "The engine has failed and will not come back.", retry.FAILED_S)
        if self.model is None:
            share = self.engine.status.share
            raise self.limits.refuse("loading", f"The model is loading ({share:.0%} so far).", retry.LOADING_S)
        return self.model

    # Health

    def health(self) -> Health:
        """What /ready tells."""
        status, now = self.engine.status, time.monotonic()
        running, waiting = self.metrics.running_waiting()
        return Health(
            state=state_of(
                self.engine,
                self.limits,
                is_loaded=self.model is not None,
                has_failed=self.failed is not None,
                stall_s=self.settings.stall_seconds,
                now=now,
            ),
            phase=status.phase,
            share=round(status.share, 4),
            last_step_age_s=round(now - status.last_step, 3) if status.last_step else None,
            running=running,
            waiting=waiting,
        )

    def is_alive(self) -> bool:
        """Whether this process may go on: what /live reports. An engine that hangs is replaced without its end."""
        return self.failed is None

    # Drain

    def begin_drain(self) -> None:
        """From now on /ready says no and new work gets 503; what runs goes on. Safe to call again."""
        self.limits.draining = True

    async def drained(self, timeout: float) -> bool:  # noqa: ASYNC109 (the end of the time is an act of its own)
        """Wait until no choice is open.

        At the timeout (s) every open stream is told to end with an error event, and False comes back when they have,
        or after CUT_S.
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
        await self.grammars.close()
        await self.engine.close()
        if self.model is not None:
            self.model.prompts.close()


async def pequod(request: Request) -> Pequod:
    """The state of the app that serves a request. A coroutine: FastAPI would call a function in a thread."""
    state: Pequod = request.app.state.pequod
    return state


AppDep = Annotated[Pequod, Depends(pequod)]
