"""`pequod bench serve`: requests that arrive when they like, at a rate or as a trace says."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import Any

from ..commands import Parser, UsageError
from . import options
from .client import Ask
from .figures import notes, spread, summarize
from .load import fixed, poisson, read_trace, scaled
from .session import Session, opened, rounds, tell
from .show import check, give, number, spread_table

REQUESTS = 64
RATE = 2.0
LABELS = [
    ("requests_per_s", "requests/s answered", ""),
    ("output_tok_s", "tokens/s of answers", ""),
    ("ttft_p50_s", "first token, median", "s"),
    ("ttft_p90_s", "first token, p90", "s"),
    ("ttft_p99_s", "first token, p99", "s"),
    ("itl_p50_s", "time per token, median", "s"),
    ("itl_p90_s", "time per token, p90", "s"),
    ("itl_p99_s", "time per token, p99", "s"),
    ("itl_max_s", "longest pause", "s"),
    ("e2e_p50_s", "whole answer, median", "s"),
    ("e2e_p99_s", "whole answer, p99", "s"),
    ("late_max_s", "sent late by at most", "s"),
]


def add_arguments(parser: Parser) -> None:
    parser.usage = f"pequod bench serve {options.URL_USAGE}"
    parser.description = (
        "Send requests as users do, each at its time whether the server keeps up or not: at a rate (--rate, Poisson or"
        " fixed), or as a trace file says (Azure's CSV, Mooncake's JSON lines). Times and prompts follow --seed."
    )
    options.add_lengths(parser, 128, 64)
    box = parser.add_argument_group("arrivals")
    box.add_argument(
        "--requests",
        metavar="N",
        type=options.whole(1),
        help=f"requests of a round (default: {REQUESTS}; of a trace: all)",
    )
    box.add_argument("--rate", metavar="R", type=options.positive, help=f"requests a second (default: {RATE:g})")
    box.add_argument(
        "--arrivals", choices=["poisson", "fixed"], default="poisson", help="by chance or evenly (default: poisson)"
    )
    box.add_argument("--trace", metavar="FILE", type=Path, help="times and lengths from a file, instead of a rate")
    box.add_argument(
        "--time-scale", metavar="X", type=options.positive, default=1.0, help="stretches a trace's times (default: 1)"
    )
    box.add_argument(
        "--length-scale",
        metavar="X",
        type=options.positive,
        default=1.0,
        help="stretches a trace's lengths, as for a small model (default: 1)",
    )
    box.add_argument(
        "--concurrency", metavar="N", type=options.whole(1), help="most requests under way (default: no limit)"
    )
    options.add_repeats(parser, 1)
    options.add_server(parser)
    options.add_output(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print what requests saw that arrived by themselves."""
    if arguments.trace is not None and arguments.rate is not None:
        raise UsageError("--trace has times of its own; give no --rate (--time-scale makes it faster)")
    check(arguments)
    if arguments.trace is not None:
        read_trace(arguments.trace, 1)  # what is wrong with the file is told before a model is loaded
    result, text = asyncio.run(measure(arguments))
    give(arguments, result, text)
    return 0


def asks(session: Session, arguments: argparse.Namespace, number: int) -> list[Ask]:
    """The requests of one round, with their times."""
    if arguments.trace is not None:
        arrivals = read_trace(arguments.trace, arguments.requests)
        arrivals = scaled(arrivals, arguments.time_scale, arguments.length_scale, session.target.max_len)
        return [session.prompts.traced(arrival) for arrival in arrivals]
    given = arguments.input_len, arguments.output_len
    session.check_length(sum(given))
    count, rate = arguments.requests or REQUESTS, arguments.rate or RATE
    seed = session.seed + number
    times = fixed(rate, count) if arguments.arrivals == "fixed" else poisson(rate, count, seed)
    return [session.prompts.ask(*given, at=at) for at in times]


async def measure(arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """The result as JSON has it, and as a table."""
    async with opened(arguments) as session:
        made: list[list[Ask]] = []

        def next_asks() -> list[Ask]:
            # The warm-up needs no arrival times of its own: its first requests are enough.
            if len(made) < arguments.warmup:
                made.append([])
                return [session.prompts.ask(arguments.input_len, arguments.output_len)]
            made.append(asks(session, arguments, len(made) - arguments.warmup))
            return made[-1]

        asks(session, arguments, 0)  # a length that does not fit is told before the warm-up
        runs = await rounds(session, arguments, next_asks, arguments.concurrency)
        shots = [shot for each in runs for shot in each.shots]
        sent = made[-1]
        told = notes(session.target, shots)
        if cut := sum(1 for ask in sent if ask.input_len + ask.output_len == session.target.max_len):
            told.append(f"{cut} of {len(sent)} requests were cut to the {session.target.max_len} tokens that fit")
        result = {
            "bench": "serve",
            **session.about(),
            "workload": {
                "requests": len(sent),
                "arrivals": str(arguments.trace) if arguments.trace else arguments.arrivals,
                "rate": len(sent) / sent[-1].at if sent[-1].at else None,
                "input_len": sum(ask.input_len for ask in sent) / len(sent),
                "output_len": sum(ask.output_len for ask in sent) / len(sent),
                "concurrency": arguments.concurrency,
                "rounds": arguments.rounds,
            },
            "figures": spread([summarize(each) for each in runs]),
            "peak_bytes": session.peak_bytes(),
            "notes": told,
            "requests": [[shot.record() for shot in each.shots] for each in runs],
        }
    tell(result["notes"])
    return result, shown(result)


def shown(result: dict[str, Any]) -> str:
    """The result as a table."""
    work = result["workload"]
    pace = "all at once" if work["rate"] is None else f"{work['rate']:.3g} a second"
    lines = [
        f"{result['server']['name']}, {result['server']['model']}: {work['requests']} requests,"
        f" {pace} ({work['arrivals']}), {work['input_len']:.0f} tokens in,"
        f" {work['output_len']:.0f} out, {work['rounds']} round{'s' * (work['rounds'] > 1)}",
        spread_table(result["figures"], LABELS, work["rounds"]),
    ]
    if result["peak_bytes"]:
        lines.append(f"peak memory of its processes: {number(result['peak_bytes'], 'bytes')}")
    return "\n".join(lines)
