"""`pequod bench`: how fast and how exact a server is. Each part is a module of server/cli/bench."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from . import Command

PARTS = {
    "latency": "one request at a time: first token, time per token, the step by phase",
    "throughput": "many requests at once: tokens per second",
    "serve": "requests that arrive at a rate or as a trace says",
    "sweep": "tokens per second over load, time per token over context",
    "startup": "from the command to the first token",
    "roofline": "each phase against what this machine could do at best",
    "snapshot": "greedy answers, byte for byte as they were",
    "invariance": "the same answer alone and in company, bit for bit",
    "kernels": "our matrix products beside torch's, by instruction set",
}


def part(name: str) -> Command:
    """The module behind `pequod bench NAME`."""
    return cast("Command", import_module(f"..bench.{name}", __package__))
