"""Plan: what an episode is made of, drawn from its seed. Printed when a check fails."""

from __future__ import annotations

import random
from dataclasses import dataclass

from engine import EngineConfig
from engine.config import POLICIES
from engine.supervisor import MAX_RESTARTS

STEP_FAULTS = ("die", "hang", "stop")  # the process ends; its model thread hangs; all of it stands still
LOADING_FAULTS = ("die", "stop", "refuse", "scarce")  # ..., it gives up with an error; the system gives no process


@dataclass(frozen=True)
class Plan:
    """Shares are probabilities per request or per step; times are in virtual seconds."""

    config: EngineConfig
    num_blocks: int
    max_queued: int
    flows: tuple[tuple[str, float], ...]  # with their weights
    step_s: float  # mean
    latency_s: float  # of a frame, mean
    high_water: int  # bytes of unsent frames at which the engine waits
    arrival_s: float  # between two requests, mean
    most_open: int  # requests beyond which nobody comes
    abort: float  # share of the clients that hang up
    slow: float  # share of the clients that read slowly or not at all
    poison: float  # share of the requests that kill the engine whenever they come to a certain token
    row_errors: float  # share of the requests whose logits are not finite at some token
    out_of_memory: float  # of a step
    faults: float  # of a step: one of STEP_FAULTS
    kill_s: float | None  # between two kills from outside, at any moment; None: never
    loading_faults: tuple[str, ...]  # of the first starts after a death, one each
    is_doomed: bool  # from some death on no engine becomes ready again
    drain_at: float | None  # share of the episode's steps after which the server drains
    drain_s: float

    @property
    def is_calm(self) -> bool:
        """Whether nothing but poison kills the engine, so that nobody else may be blamed."""
        return not self.faults and self.kill_s is None

    @classmethod
    def draw(cls, rng: random.Random, depth: int = 0) -> Plan:
        block_size = rng.choice((1, 2, 4, 16))
        num_blocks = rng.randint(4, 48)
        max_seqs = rng.randint(1, 8)
        max_len = rng.randint(4, max(4, num_blocks * block_size // rng.choice((1, 2, 4))))
        config = EngineConfig(
            model="sim",
            block_size=block_size,
            num_blocks=num_blocks,
            max_len=min(max_len, 200),
            max_seqs=max_seqs,
            max_batched_tokens=rng.randint(max_seqs, 4 * block_size + max_seqs),
            long_prefill_tokens=rng.choice((None, None, rng.randint(1, 64))),
            policy=rng.choice((*POLICIES, "fcfs", "fcfs", "fcfs")),
            prefix_caching=rng.random() < 0.8,
            async_scheduling=depth == 1,
            debug=True,
        )
        names = ("whale", "ship", "sea")[: rng.choice((1, 2, 3, 3))]
        step_s = rng.choice((0.002, 0.01, 0.05))
        kills = rng.choice(("poison", "faults", "outside", "all", "none", "none"))
        is_doomed = kills in ("faults", "outside") and rng.random() < 0.2
        loads = rng.randint(0, MAX_RESTARTS) if kills != "none" else 0
        return cls(
            config=config,
            num_blocks=num_blocks,
            max_queued=rng.choice((2, 8, 32, 64)),
            flows=tuple((name, rng.choice((1.0, 1.0, 2.0))) for name in names),
            step_s=step_s,
            latency_s=rng.choice((0.0, 0.0001, 0.002)),
            high_water=rng.choice((64, 4096, 8 << 20)),
            arrival_s=step_s * rng.choice((0.5, 2, 5, 15)),
            most_open=rng.choice((4, 16, 48)),
            abort=rng.choice((0.0, 0.05, 0.3)),
            slow=rng.choice((0.0, 0.05, 0.3)),
            poison=rng.choice((0.02, 0.1)) if kills in ("poison", "all") else 0.0,
            row_errors=rng.choice((0.0, 0.03)),
            out_of_memory=rng.choice((0.0, 0.0, 0.01, 0.1)),
            faults=0.01 if kills in ("faults", "all") else 0.0,
            kill_s=step_s * rng.choice((30, 200)) if kills in ("outside", "all") else None,
            loading_faults=tuple(rng.choice(LOADING_FAULTS) for _ in range(loads)),
            is_doomed=is_doomed,
            drain_at=rng.random() if rng.random() < 0.3 else None,
            drain_s=rng.choice((0.0, 0.1, 0.5, 30.0)),
        )
