"""Pequod: everything that one app holds, and what routes ask it before they start work."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import logging
import random
import secrets
import time
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from fastapi import Depends, Request

from engine import Engine, EngineDied, EngineError, EngineInfo, ModelError

from .api.responses.background import Background
from .api.responses.response import interrupted
from .api.responses.store import Store
from .grammar.checker import Gate
from .http import retry
from .http.admission import Limits
from .http.auth import Keys
from .http.errors import not_found, place
from .http.excerpt import shown
from .observability.metrics import Metrics
from .parsers import Formats, detect
from .settings import Settings
from .tokenization.encoder import Prompts
from .tokenization.generation_defaults import read_defaults
from .tokenization.generic_tools import FORMAT as GENERIC
from .tokenization.generic_tools import renders_tools
from .tokenization.tokenizer import Tokenizer

HEARTBEAT_S = 5.0  # the engine's process beats twice a second; ten missed beats are no hiccup
CUT_S = 5.0  # for streams to write their error event after the drain's deadline

log = logging.getLogger("pequod.server")


@dataclass(frozen=True, slots=True)
class Health:
    """How the server is, told without asking the engine."""

    state: str  # ready | starting | loading | restarting | draining | failed | silent | stalled | full
    phase: str  # of the engine
    share: float  # of the weights loaded
    last_step_age_s: float | None  # None: no step yet
    running: int
    waiting: int

    @property
    def is_ready(self) -> bool:
        return self.state == "ready"

    def body(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class TextFiles:
    """What was made of a model's small files, and the commit that they are of."""

    revision: str | None
    tokenizer: Tokenizer
    prompts: Prompts
    defaults: dict[str, float | int]


class Pequod:
    """One app's state; lives in `app.state.pequod` from build_app on."""

    def __init__(self, settings: Settings, engine: Engine, version: str) -> None:
        self.settings = settings
        self.engine = engine
        self.version = version
        self.keys = Keys(settings)
        self.limits = Limits(settings)
        self.grammars = Gate()
        self.background = Background()
        self.store = Store(
            settings.response_store, settings.max_stored_responses, settings.max_stored_bytes, interrupted
        )
        self.metrics = Metrics(settings, engine, self.limits)
        self.description = b""  # of the API as JSON, once somebody has asked for it
        self.is_loaded = False  # generation has worked at some time: engine, tokenizer and prompts are there
        self.tokenizer: Tokenizer | None = None
        self.prompts: Prompts | None = None
        self.default_sampling: dict[str, float | int] = {}
        self.formats = Formats()  # how the model writes calls and reasoning
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
        """Wait for the engine, and meanwhile build what turns text into tokens; the first error ends both."""
        try:
            async with asyncio.TaskGroup() as both:
                text = both.create_task(self._load_text(self.settings.revision))
                engine = both.create_task(self.engine.ready())
            found = text.result()
            if engine.result().revision not in (None, found.revision):
                # A branch of the hub moved between our look and the engine's: take the text files of its commit.
                found.prompts.close()
                found = await self._load_text(engine.result().revision)
        except* EngineError as errors:
            self._load_error = _first(errors)
        except* Exception as errors:
            # Whatever it was, the server will never answer: say so and end, rather than stay "loading" for ever.
            error = _first(errors)
            log.error("%s at %s", type(error).__name__, place(error))
            self._load_error = self._load_error or ModelError(f"the model could not be loaded: {type(error).__name__}")
        else:
            info = engine.result()
            self.tokenizer, self.prompts, self.default_sampling = found.tokenizer, found.prompts, found.defaults
            self.prompts.max_len = info.max_len
            self.formats = self._formats(self.prompts.template_source)
            self.limits.max_seqs = info.max_seqs
            self.grammars.checker.width = info.vocab_size
            self.metrics.bind(info)
            self.is_loaded = True
        self._settled.set()
        self.watch()

    async def _load_text(self, revision: str | None) -> TextFiles:
        return await asyncio.to_thread(self._read_text_files, revision)

    def _read_text_files(self, revision: str | None) -> TextFiles:
        from engine import fetch  # with the hub's client only where a model is not a folder

        folder = fetch(self.settings.model, revision, weights=False)
        defaults = read_defaults(self.settings.generation_config, folder.path)
        tokenizer = Tokenizer(folder.path)
        prompts = Prompts.load(tokenizer, self.settings.chat_template)
        prompts.start()
        return TextFiles(folder.revision, tokenizer, prompts, defaults)

    def _formats(self, template: str) -> Formats:
        """The model's formats, as its chat template shows them or as the settings say."""
        seen, settings = detect(template), self.settings
        if not renders_tools(template):
            seen = seen._replace(tools=GENERIC)
        chosen = {"tools": settings.tool_call_parser, "reasoning": settings.reasoning_parser}
        own = {kind: None if name == "none" else name for kind, name in chosen.items() if name != "auto"}
        return seen._replace(**own)

    async def ready(self) -> EngineInfo:
        """Wait until generation works: engine and tokenizer; raises the EngineError that prevents it."""
        await self._settled.wait()
        if self._load_error is not None:
            raise self._load_error
        return await self.engine.ready()

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

    @property
    def fingerprint(self) -> str:
        """Hash of what decides the answers: weights, version, dtypes, backend; "" until the model is loaded."""
        info = self.engine.info
        if info is None:
            return ""
        kinds = (info.dtype, info.quantization, info.kv_dtype, info.implementation, info.attention)
        parts = (info.weights_hash, self.version, *kinds)
        return "fp_" + hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]

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

    def require_ready(self) -> None:
        """Raise 503 with Retry-After unless new work is taken.

        An engine that is being restarted takes work: it begins where the others go on.
        """
        if self.draining:
            raise self.limits.refuse("draining", "The server is shutting down.", retry.DRAINING_S)
        if self.failed is not None:
            raise self.limits.refuse("failed", "The engine has failed and will not come back.", retry.FAILED_S)
        if not self.is_loaded:
            share = self.engine.status.share
            raise self.limits.refuse("loading", f"The model is loading ({share:.0%} so far).", retry.LOADING_S)

    # Health

    def health(self) -> Health:
        """What /ready tells."""
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
        status = self.engine.status
        if self.draining:
            return "draining"
        if self.failed is not None or status.phase == "closed":
            return "failed"
        if status.phase == "restarting":
            return "restarting"
        if status.phase != "ready" or not self.is_loaded:
            return "starting" if status.phase == "starting" else "loading"
        if self._silence(now) > HEARTBEAT_S:
            return "silent"
        if self._stalled_for(now) > self.settings.stall_seconds:
            return "stalled"
        return "full" if self.limits.is_full else "ready"

    def is_alive(self) -> bool:
        """Whether this process may go on: what /live reports. An engine that hangs is replaced without its end."""
        return self.failed is None

    def _silence(self, now: float) -> float:
        """Seconds since the engine's process was heard. An engine in this very process lives as long as we answer."""
        return now - self.engine.status.heartbeat if getattr(self.engine, "pid", None) is not None else 0.0

    def _stalled_for(self, now: float) -> float:
        """Seconds that work has been there and no step was collected; 0.0 without work.

        Choices that are open here may already have ended in the engine, behind a slow reader: the step that ended
        them said so. Only before the first step since work came must our own count do.
        """
        status, limits = self.engine.status, self.limits
        is_news = limits.busy_since > status.last_step
        if limits.open_choices == 0 or not (status.running or status.waiting or is_news):
            return 0.0
        return now - max(status.last_step, limits.busy_since)

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
        """Stop background work, the engine and all threads."""
        await self.background.close()
        await self.grammars.close()
        await self.engine.close()
        await asyncio.to_thread(self.store.close)
        if self.prompts is not None:
            self.prompts.close()


def _first(errors: BaseExceptionGroup[Any]) -> Any:
    """The first error of a group, however deep."""
    error = errors.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error


async def pequod(request: Request) -> Pequod:
    """The state of the app that serves a request. A coroutine: FastAPI would call a function in a thread."""
    state: Pequod = request.app.state.pequod
    return state


AppDep = Annotated[Pequod, Depends(pequod)]
