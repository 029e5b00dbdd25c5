"""`pequod bench throughput`: many requests at once, all there from the beginning."""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

from ..commands import Parser
from . import options
from .figures import notes, spread, summarize
from .session import opened, rounds, tell
from .show import check, give, number, spread_table

LABELS = [
    ("output_tok_s", "tokens/s of answers", ""),
    ("requests_per_s", "requests/s", ""),
    ("wall_s", "all of them", "s"),
    ("ttft_p50_s", "first token, median", "s"),
    ("ttft_p99_s", "first token, p99", "s"),
    ("itl_p50_s", "time per token, median", "s"),
    ("itl_p99_s", "time per token, p99", "s"),
    ("itl_max_s", "longest pause", "s"),
]


def add_arguments(parser: Parser) -> None:
    parser.usage = f"pequod bench throughput {options.URL_USAGE}"
    parser.description = (
        "Send many requests that all arrive at the start, at most --concurrency of them at once, and report tokens per"
        " second, the latencies of each request, and the peak memory of the server's processes."
    )
    options.add_lengths(parser, 256, 64)
    parser.add_argument(
        "--requests", metavar="N", type=options.whole(1), default=16, help="requests of a round (default: 16)"
    )
    parser.add_argument(
        "--concurrency", metavar="N", type=options.whole(1), help="most requests under way (default: all of them)"
    )
    options.add_repeats(parser, 3)
    options.add_server(parser)
    options.add_output(parser, plots=False)


def run(arguments: argparse.Namespace) -> int:
    """Print the figures of requests together."""
    check(arguments)
    result, text = asyncio.run(measure(arguments))
    give(arguments, result, text)
    return 0


async def measure(arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """The result as JSON has it, and as a table."""
    async with opened(arguments) as session:
        given = arguments.input_len, arguments.output_len
        session.check_length(sum(given))
        runs = await rounds(
            session,
            arguments,
            lambda: [session.prompts.ask(*given) for _ in range(arguments.requests)],
            arguments.concurrency,
        )
        shots = [shot for each in runs for shot in each.shots]
        result = {
            "bench": "throughput",
            **session.about(),
            "workload": {
                "input_len": given[0],
                "output_len": given[1],
                "requests": arguments.requests,
                "concurrency": min(arguments.concurrency or arguments.requests, arguments.requests),
                "rounds": arguments.rounds,
            },
            "figures": spread([summarize(each) for each in runs]),
            "peak_bytes": session.peak_bytes(),
            "notes": notes(session.target, shots),
            "requests": [[shot.record() for shot in each.shots] for each in runs],
        }
    tell(result["notes"])
    return result, shown(result)


def shown(result: dict[str, Any]) -> str:
    """The result as a table."""
    work = result["workload"]
    lines = [
        f"{result['server']['name']}, {result['server']['model']}: {work['requests']} requests,"
        f" {work['concurrency']} at once, {work['input_len']} tokens in, {work['output_len']} out,"
        f" {work['rounds']} rounds",
        spread_table(result["figures"], LABELS, work["rounds"]),
    ]
    if result["peak_bytes"]:
        lines.append(f"peak memory of its processes: {number(result['peak_bytes'], 'bytes')}")
    return "\n".join(lines)
