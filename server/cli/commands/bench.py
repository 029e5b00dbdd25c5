"""`pequod bench`: measures speed and exactness. Each part is a module in server/cli/bench."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from . import Command

PARTS = {
    "latency": "one request at a time: time to first token, time per token, steps by phase",
    "throughput": "many requests at once: tokens per second",
    "serve": "requests that arrive at a rate, or as recorded in a trace",
    "sweep": "tokens per second over load, and time per token over context length",
    "startup": "time from the command to the first token",
    "roofline": "each phase compared with the limit of this machine",
    "snapshot": "whether greedy completions are unchanged, byte for byte",
    "invariance": "whether a request has the same bits alone and in a batch",
    "kernels": "our CPU kernels compared with torch's, by instruction set",
}


def part(name: str) -> Command:
    """Return the module of `pequod bench NAME`."""
    return cast("Command", import_module(f"..bench.{name}", __package__))
