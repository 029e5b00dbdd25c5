"""`pequod bench roofline`: each phase of a model against what this machine could do at best."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..commands import Parser, UsageError, settings_from, warn
from . import options
from .figures import median
from .limits import RATES, Probe, middle, probe
from .session import Session, opened
from .show import check, give, number, table
from .steps import Step, decoding, least, prefilling

if TYPE_CHECKING:
    from engine import Roofline

DECODED = 32  # tokens of each answer whose steps are timed
CACHED_BYTES = 64 << 20  # smaller weights may stay in a processor's cache


def add_arguments(parser: Parser) -> None:
    parser.usage = "pequod bench roofline [MODEL] [flags]"
    parser.description = (
        "Measure this machine's memory bandwidth and its rate of matrix products, and report for each phase of a model,"
        " the prefill of a prompt and decode steps of several requests, its bytes and operations, the time that they"
        " take at best, the time that they took, and the share of the best that was reached. The machine is measured"
        " before and after each phase, because it changes. A running server exports the same share of its own steps as"
        " pequod:roofline_fraction."
    )
    box = parser.add_argument_group("phases")
    box.add_argument(
        "--prefill", metavar="N,...", type=options.wholes, default=[512], help="prompt lengths (default: 512)"
    )
    box.add_argument(
        "--rows", metavar="N,...", type=options.wholes, default=[1, 16], help="requests in a step (default: 1,16)"
    )
    box.add_argument(
        "--context", metavar="N", type=options.whole(1), default=256, help="tokens before each row's (default: 256)"
    )
    options.add_repeats(parser, 3)
    options.add_own(parser)
    options.add_output(parser, plots=False)


def run(arguments: argparse.Namespace) -> int:
    """Print each phase's share of the limit."""
    check(arguments)
    result = asyncio.run(measure(arguments))
    give(arguments, result, shown(result))
    return 0


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """The result as JSON has it."""
    async with probe(settings_from(arguments).settings) as limits, opened(arguments) as session:
        longest = max(*arguments.prefill, arguments.context + DECODED)
        if session.target.max_len is not None and longest >= session.target.max_len:
            raise UsageError(f"{longest} tokens and their answer are more than the server's {session.target.max_len}")
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


async def prefill(session: Session, limits: Probe, length: int, arguments: argparse.Namespace) -> dict[str, Any] | None:
    """The steps that compute one prompt alone, added up."""
    found = []
    for number_ in range(arguments.warmup + arguments.rounds):
        before = await limits.measure()
        session.steps()
        await session.send([session.prompts.ask(length, 1)], label=f"prefill of {length}")
        steps = prefilling(session.steps())
        if number_ >= arguments.warmup:
            found.append(figures(steps, [before, await limits.measure()], total=True))
    return _middle(f"prefill {length:,} tokens", found)


async def decode(session: Session, limits: Probe, rows: int, arguments: argparse.Namespace) -> dict[str, Any] | None:
    """The steps in which so many rows each draw a token; the median one."""
    found = []
    for number_ in range(arguments.warmup + arguments.rounds):
        before = await limits.measure()
        session.steps()
        asks = [session.prompts.ask(arguments.context, DECODED) for _ in range(rows)]
        await session.send(asks, label=f"decode of {rows}")
        steps = decoding(session.steps(), rows)
        if number_ >= arguments.warmup:
            found.append(figures(steps, [before, await limits.measure()], total=False))
    name = f"decode {rows} row{'s' * (rows > 1)} at {arguments.context:,}"
    phase = _middle(name, found)
    if phase is None:
        warn(f"{rows} requests were never all in one step; --max-num-seqs may be lower")
    return phase


def figures(steps: Sequence[Step], limits: Sequence[Roofline], total: bool) -> dict[str, float] | None:
    """Bytes, operations, and seconds at best and measured: of all steps together, or of the median step."""
    if not steps:
        return None
    rate = middle(limits)
    columns = [
        (
            float(rate.bytes(step.context)),
            float(rate.flops(tokens := step.prompt_tokens + step.decode_tokens, step.pairs, step.logits)),
            rate.bytes(step.context) / rate.bytes_per_s,
            rate.multiply_seconds(tokens, step.pairs, step.logits),
            least(rate, step),
            step.total,
            step.seconds.get("forward", 0.0),
        )
        for step in steps
    ]
    values = [sum(column) if total else median(column) or 0.0 for column in zip(*columns, strict=True)]
    names = ("bytes", "flops", "read_s", "multiply_s", "limit_s", "seconds", "forward_s")
    found = dict(zip(names, values, strict=True))
    return {
        **found,
        "share": found["limit_s"] / found["seconds"],
        "forward_share": found["limit_s"] / found["forward_s"],
    }


def _middle(name: str, found: Sequence[dict[str, float] | None]) -> dict[str, Any] | None:
    """The medians over the rounds; None when no round had such steps."""
    rounds = [each for each in found if each is not None]
    if not rounds:
        return None
    return {"phase": name, **{key: median(each[key] for each in rounds) for key in rounds[0]}, "rounds": rounds}


def shown(result: dict[str, Any]) -> str:
    """The result as a table."""
    rates = result["machine_limits"]
    reads, products = rates["bytes_per_s"], rates["flops_per_s"]
    lines = [
        f"{result['server']['name']}, {result['server']['model']} in {result['dtype']}; measured"
        f" {len(reads)} times in between, this machine",
        f"  reads      {_range(reads, 'B/s')}",
        f"  multiplies {_range(products, 'FLOP/s')}; in attention {_range(rates['pair_flops_per_s'], 'FLOP/s')}",
        "",
    ]
    head = ["phase", "bytes", "operations", "bound by", "at best", "forward", "whole step", "share", "of forward"]
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
        lines.append("These weights are so few that they may stay in a cache, which is faster than the memory.")
    return "\n".join(lines)


def _range(values: Sequence[float], unit: str) -> str:
    return f"{_scaled(median(values), unit)} (from {_scaled(min(values), unit)} to {_scaled(max(values), unit)})"


def _scaled(value: float | None, unit: str) -> str:
    """With a decimal prefix, as bandwidths and rates are told."""
    value = value or 0.0
    for scale, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= scale:
            return f"{value / scale:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"
