"""`pequod bench roofline`: compares each phase of a model with the limit of this machine."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..commands import Parser, UsageError, settings_from, warn
from . import options
from .figures import median
from .limits import RATES, Probe, middle, probe
from .session import Session, opened
from .show import Result, number, report, server_and_model, table
from .steps import Step, decoding, limit_seconds, prefilling

if TYPE_CHECKING:
    from engine import Roofline

DECODED = 32  # output tokens of each request whose steps are timed
CACHED_BYTES = 64 << 20  # smaller weights may stay in the processor's cache


def add_arguments(parser: Parser) -> None:
    parser.usage = "pequod bench roofline [MODEL] [flags]"
    parser.description = (
        "Measure this machine's memory bandwidth and its rate of matrix products. Report for each phase of a model (the"
        " prefill of a prompt, and decode steps of several requests) its bytes and operations, the minimum time for"
        " these, the measured time, and the minimum as a share of it. The machine is measured before and after each"
        " phase, because its speed changes. A running server exports this share for its steps as"
        " pequod:roofline_fraction."
    )
    box = parser.add_argument_group("phases")
    options.add_numbers(box, "--prefill", [512], "prompt lengths")
    options.add_numbers(box, "--rows", [1, 16], "requests per step")
    options.add_number(box, "--context", 256, "prompt tokens of each request in a decode step")
    options.add_measurement(parser, rounds=3, takes_url=False, plots=False)


def run(arguments: argparse.Namespace) -> int:
    report(arguments, measure, shown)
    return 0


async def measure(arguments: argparse.Namespace) -> Result:
    async with probe(settings_from(arguments).settings) as limits, opened(arguments) as session:
        longest = max(*arguments.prefill, arguments.context + DECODED)
        if session.target.max_len is not None and longest >= session.target.max_len:
            raise UsageError(f"{longest} tokens and their output are more than the server's {session.target.max_len}")
        phases = [await prefill(session, limits, length, arguments) for length in arguments.prefill]
        phases += [await decode(session, limits, rows, arguments) for rows in arguments.rows]
        return {
            "bench": "roofline",
            **session.about(),
            "dtype": limits.dtype,
            "workload": {"context": arguments.context, "rounds": arguments.rounds},
            "machine_limits": {rate: [getattr(each, rate) for each in limits.seen] for rate in RATES},
            "weights_bytes": limits.seen[0].weights_bytes,
            "phases": [phase for phase in phases if phase is not None],
        }


async def measured(
    session: Session, limits: Probe, arguments: argparse.Namespace, label: str, lengths: Sequence[tuple[int, int]]
) -> list[tuple[list[Step], list[Roofline]]]:
    """Return the steps of each round, which sends requests of these lengths, and the limits before and after it."""
    found = []
    for index in range(arguments.warmup + arguments.rounds):
        before = await limits.measure()
        await session.steps()
        (await session.send([session.prompts.ask(*each) for each in lengths], label=label)).complete()
        steps = await session.steps()
        if index >= arguments.warmup:
            found.append((steps, [before, await limits.measure()]))
    return found


async def prefill(session: Session, limits: Probe, length: int, arguments: argparse.Namespace) -> dict[str, Any] | None:
    """Return the sum of the steps that compute a single prompt."""
    found = await measured(session, limits, arguments, f"prefill of {length}", [(length, 1)])
    sums = [figures(prefilling(steps), seen, total=True) for steps, seen in found]
    return _middle(f"prefill {length:,} tokens", sums)


async def decode(session: Session, limits: Probe, rows: int, arguments: argparse.Namespace) -> dict[str, Any] | None:
    """Return the median of the steps in which this number of rows sample a token each."""
    found = await measured(session, limits, arguments, f"decode of {rows}", [(arguments.context, DECODED)] * rows)
    medians = [figures(decoding(steps, rows), seen, total=False) for steps, seen in found]
    phase = _middle(f"decode {rows} row{'s' * (rows > 1)} at {arguments.context:,}", medians)
    if phase is None:
        warn(f"no step had all {rows} requests; --max-num-seqs may be lower")
    return phase


def figures(steps: Sequence[Step], limits: Sequence[Roofline], total: bool) -> dict[str, float] | None:
    """Return bytes, operations, and minimum and measured seconds: the sum of all steps, or the median step."""
    if not steps:
        return None
    rate = middle(limits)
    each = [
        {
            "bytes": float(rate.bytes(step.context)),
            "flops": float(rate.flops(tokens := step.prompt_tokens + step.decode_tokens, step.pairs, step.logits)),
            "read_s": rate.bytes(step.context) / rate.bytes_per_s,
            "multiply_s": rate.multiply_seconds(tokens, step.pairs, step.logits),
            "limit_s": limit_seconds(rate, step),
            "seconds": step.total,
            "forward_s": step.seconds.get("forward", 0.0),
        }
        for step in steps
    ]
    found = {
        name: sum(step[name] for step in each) if total else median(step[name] for step in each) or 0.0
        for name in each[0]
    }
    shares = {"share": found["limit_s"] / found["seconds"], "forward_share": found["limit_s"] / found["forward_s"]}
    return found | shares


def _middle(name: str, found: Sequence[dict[str, float] | None]) -> dict[str, Any] | None:
    """Return the medians over the rounds, or None if no round had such steps."""
    rounds = [each for each in found if each is not None]
    if not rounds:
        return None
    return {"phase": name, **{key: median(each[key] for each in rounds) for key in rounds[0]}, "rounds": rounds}


def shown(result: Result) -> str:
    rates = result["machine_limits"]
    reads, products = rates["bytes_per_s"], rates["flops_per_s"]
    lines = [
        f"{server_and_model(result)} in {result['dtype']}; this machine, measured {len(reads)} times,",
        f"  reads      {_range(reads, 'B/s')}",
        f"  multiplies {_range(products, 'FLOP/s')}; in attention {_range(rates['pair_flops_per_s'], 'FLOP/s')}",
        "",
    ]
    head = ["phase", "bytes", "operations", "bound by", "limit", "forward", "whole step", "share", "of forward"]
    body = [
        [
            phase["phase"],
            _scaled(phase["bytes"], "B"),
            _scaled(phase["flops"], "FLOP"),
            "memory" if phase["read_s"] >= phase["multiply_s"] else "products",
            number(phase["limit_s"], "s"),
            number(phase["forward_s"], "s"),
            number(phase["seconds"], "s"),
            number(phase["share"], "%"),
            number(phase["forward_share"], "%"),
        ]
        for phase in result["phases"]
    ]
    lines.append(table(head, body))
    if result["weights_bytes"] < CACHED_BYTES:
        lines.append("These weights are small enough to stay in the processor's cache, which is faster than memory.")
    return "\n".join(lines)


def _range(values: Sequence[float], unit: str) -> str:
    return f"{_scaled(median(values), unit)} (from {_scaled(min(values), unit)} to {_scaled(max(values), unit)})"


def _scaled(value: float | None, unit: str) -> str:
    """Return a value with a decimal prefix, as usual for bandwidths and rates."""
    value = value or 0.0
    for scale, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= scale:
            return f"{value / scale:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"
