"""Health: what /ready and /live report, without asking the engine."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from engine import Engine

from .http.admission import Limits

HEARTBEAT_S = 5.0  # the engine's process beats twice a second; ten missed beats are no hiccup


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


def state_of(engine: Engine, limits: Limits, *, is_loaded: bool, has_failed: bool, stall_s: float, now: float) -> str:
    """The state in one word. `stall_s`: seconds without a step, while there is work, that count as a stall."""
    status = engine.status
    if limits.draining:
        return "draining"
    if has_failed or status.phase == "closed":
        return "failed"
    if status.phase == "restarting":
        return "restarting"
    if status.phase != "ready" or not is_loaded:
        return "starting" if status.phase == "starting" else "loading"
    if _silence(engine, now) > HEARTBEAT_S:
        return "silent"
    if _stalled_for(engine, limits, now) > stall_s:
        return "stalled"
    return "full" if limits.is_full else "ready"


def _silence(engine: Engine, now: float) -> float:
    """Seconds since the engine's process was heard. An engine in this very process lives as long as we answer."""
    return now - engine.status.heartbeat if getattr(engine, "pid", None) is not None else 0.0


def _stalled_for(engine: Engine, limits: Limits, now: float) -> float:
    """Seconds that work has been there and no step was collected; 0.0 without work.

    Choices that are open here may already have ended in the engine, behind a slow reader: the step that ended them
    said so. Only before the first step since work came must our own count do.
    """
    status = engine.status
    is_news = limits.busy_since > status.last_step
    if limits.open_choices == 0 or not (status.running or status.waiting or is_news):
        return 0.0
    return now - max(status.last_step, limits.busy_since)
