"""`pequod bench serve`: requests that arrive at a rate, or as recorded in a trace, however busy the server is."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from ..commands import Parser, UsageError, whole
from . import options
from .client import Ask
from .load import Arrival, fixed, poisson, read_trace, scaled
from .session import Session, opened, rounds
from .show import Result, figures_table, report

REQUESTS = 64
RATE = 2.0
LABELS = [
    ("requests_per_s", "requests/s completed", ""),
    ("output_tok_s", "output tokens/s", ""),
    ("ttft_p50_s", "first token, median", "s"),
    ("ttft_p90_s", "first token, p90", "s"),
    ("ttft_p99_s", "first token, p99", "s"),
    ("tpot_p50_s", "time per token, median", "s"),
    ("tpot_p90_s", "time per token, p90", "s"),
    ("tpot_p99_s", "time per token, p99", "s"),
    ("itl_p50_s", "gap between chunks, median", "s"),
    ("itl_p90_s", "gap between chunks, p90", "s"),
    ("itl_p99_s", "gap between chunks, p99", "s"),
    ("itl_max_s", "longest gap between chunks", "s"),
    ("e2e_p50_s", "whole response, median", "s"),
    ("e2e_p99_s", "whole response, p99", "s"),
    ("late_max_s", "maximum delay in sending", "s"),
]


def add_arguments(parser: Parser) -> None:
    parser.usage = f"pequod bench serve {options.URL_USAGE}"
    parser.description = (
        "Send requests at arrival times that do not depend on the server: at a rate (--rate, Poisson or fixed), or as"
        " recorded in a trace file (Azure's CSV, Mooncake's JSON lines). --seed determines times and prompts."
    )
    options.add_lengths(parser, 128, 64)
    box = parser.add_argument_group("arrivals")
    box.add_argument(
        "--requests",
        metavar="N",
        type=whole(1),
        help=f"requests per round (default: {REQUESTS}, or all of a trace)",
    )
    box.add_argument("--rate", metavar="R", type=options.positive, help=f"requests per second (default: {RATE:g})")
    box.add_argument(
        "--arrivals", choices=["poisson", "fixed"], default="poisson", help="random or evenly spaced (default: poisson)"
    )
    box.add_argument("--trace", metavar="FILE", type=Path, help="file of times and lengths, instead of a rate")
    options.add_factor(box, "--time-scale", "factor for a trace's times")
    options.add_factor(box, "--length-scale", "factor for a trace's lengths, for models with a short context")
    box.add_argument("--concurrency", metavar="N", type=whole(1), help="maximum open requests (default: no limit)")
    options.add_measurement(parser, rounds=1)


def run(arguments: argparse.Namespace) -> int:
    if arguments.trace is not None and arguments.rate is not None:
        raise UsageError("--trace has arrival times: omit --rate (--time-scale makes a trace faster)")
    if arguments.trace is not None:
        read_trace(arguments.trace, 1)  # reports an invalid file before a model is loaded
    report(arguments, measure, shown)
    return 0


def arriving(session: Session, arguments: argparse.Namespace, number: int) -> list[Ask]:
    """Return the requests of one round, which arrive at the requested rate."""
    lengths = session.lengths(arguments)
    count, rate = arguments.requests or REQUESTS, arguments.rate or RATE
    seed = session.seed + number
    times = fixed(rate, count) if arguments.arrivals == "fixed" else poisson(rate, count, seed)
    return [session.prompts.ask(*lengths, at=at) for at in times]


def rate(trace: Sequence[Arrival]) -> float | None:
    """Return the requests per second; None if all arrive at once."""
    seconds = trace[-1].at - trace[0].at
    return (len(trace) - 1) / seconds if seconds else None  # N arrivals have N - 1 intervals


async def measure(arguments: argparse.Namespace) -> Result:
    async with opened(arguments) as session:
        trace: list[Arrival] = []
        if arguments.trace is not None:
            trace = read_trace(arguments.trace, arguments.requests)
            trace = scaled(trace, arguments.time_scale, arguments.length_scale, session.target.max_len)
        made = [
            [session.prompts.traced(arrival) for arrival in trace] or arriving(session, arguments, number)
            for number in range(arguments.rounds)
        ]
        sent = made[0]
        # The warm-up needs no arrival times: one request per repetition, with a prompt of its own, is enough.
        runs = await rounds(
            session,
            arguments,
            iter(made).__next__,
            arguments.concurrency,
            warmup=lambda: [session.prompts.ask(sent[0].input_len, sent[0].output_len)],
        )
        workload = {
            "requests": len(sent),
            "arrivals": str(arguments.trace) if arguments.trace else arguments.arrivals,
            "rate": rate(trace) if trace else arguments.rate or RATE,
            "input_len": sum(ask.input_len for ask in sent) / len(sent),
            "output_len": sum(ask.output_len for ask in sent) / len(sent),
            **options.chosen(arguments, "concurrency", "rounds"),
        }
        result = session.result("serve", workload, runs)
        if cut := sum(arrival.is_cut for arrival in trace):
            longest = session.target.max_len
            result["notes"].append(
                f"{cut} of {len(trace)} requests were cut to the {longest} tokens that fit, at most half of them output"
            )
        return result


def shown(result: Result) -> str:
    work = result["workload"]
    pace = "all at once" if work["rate"] is None else f"{work['rate']:.3g} per second"
    workload = (
        f"{work['requests']} requests, {pace} ({work['arrivals']}), {work['input_len']:.0f} tokens in,"
        f" {work['output_len']:.0f} out, {work['rounds']} round{'s' * (work['rounds'] > 1)}"
    )
    return figures_table(result, workload, LABELS)
