"""The health of the server, for /ready and /live."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from engine import Engine

from .http.admission import Limits

HEARTBEAT_S = 5.0  # without a heartbeat of the engine process, which sends two per second


@dataclass(frozen=True, slots=True)
class Health:
    """The body of /ready, from what the engine has reported last."""

    state: str  # ready | starting | loading | restarting | draining | failed | silent | stalled | full
    phase: str  # of the engine
    share: float  # of the weights that are loaded
    last_step_age_s: float | None  # None: no step yet
    running: int
    waiting: int

    def body(self) -> dict[str, Any]:
        return asdict(self)


def state_of(engine: Engine, limits: Limits, *, is_loaded: bool, has_failed: bool, stall_s: float, now: float) -> str:
    """The state in one word. `stall_s`: seconds without a step, while there is work, that are a stall."""
    status = engine.status
    if limits.draining:
        return "draining"
    if has_failed or status.phase == "closed":
        return "failed"
    if status.phase == "restarting":
        return "restarting"
    if status.phase != "ready" or not is_loaded:
        return "starting" if status.phase == "starting" else "loading"
    if getattr(engine, "pid", None) is not None and now - status.heartbeat > HEARTBEAT_S:
        return "silent"
    if _stalled_for(engine, limits, now) > stall_s:
        return "stalled"
    return "full" if limits.is_full else "ready"


def _stalled_for(engine: Engine, limits: Limits, now: float) -> float:
    """Seconds without a step while there was work; 0.0 without work.

    Choices that are open here, because of a slow reader, may have ended in the engine, as their last step reported.
    Our own count matters only before the first step for new work.
    """
    status = engine.status
    is_new = limits.busy_since > status.last_step
    if limits.open_choices == 0 or not (status.running or status.waiting or is_new):
        return 0.0
    return now - max(status.last_step, limits.busy_since)
