"""`pequod bench throughput`: many requests that all arrive at the start."""

from __future__ import annotations

import argparse

from ..commands import Parser, whole
from . import options
from .session import opened, rounds
from .show import Result, figures_table, report

LABELS = [
    ("output_tok_s", "output tokens/s", ""),
    ("requests_per_s", "requests/s", ""),
    ("wall_s", "total time", "s"),
    ("ttft_p50_s", "first token, median", "s"),
    ("ttft_p99_s", "first token, p99", "s"),
    ("tpot_p50_s", "time per token, median", "s"),
    ("tpot_p99_s", "time per token, p99", "s"),
    ("itl_p50_s", "gap between chunks, median", "s"),
    ("itl_p99_s", "gap between chunks, p99", "s"),
    ("itl_max_s", "longest gap between chunks", "s"),
]


def add_arguments(parser: Parser) -> None:
    parser.usage = f"pequod bench throughput {options.URL_USAGE}"
    parser.description = (
        "Send many requests that all arrive at the start, at most --concurrency of them at once, and report tokens per"
        " second, the latencies of the requests, and the peak memory of the server's processes."
    )
    options.add_lengths(parser, 256, 64)
    options.add_number(parser, "--requests", 16, "requests per round")
    parser.add_argument("--concurrency", metavar="N", type=whole(1), help="maximum open requests (default: all)")
    options.add_measurement(parser, rounds=3, plots=False)


def run(arguments: argparse.Namespace) -> int:
    report(arguments, measure, shown)
    return 0


async def measure(arguments: argparse.Namespace) -> Result:
    async with opened(arguments) as session:
        lengths = session.lengths(arguments)
        runs = await rounds(
            session,
            arguments,
            lambda: [session.prompts.ask(*lengths) for _ in range(arguments.requests)],
            arguments.concurrency,
        )
        workload = options.chosen(arguments, "input_len", "output_len", "requests", "concurrency", "rounds")
        workload["concurrency"] = min(arguments.concurrency or arguments.requests, arguments.requests)
        return session.result("throughput", workload, runs)


def shown(result: Result) -> str:
    work = result["workload"]
    workload = (
        f"{work['requests']} requests, {work['concurrency']} at once, {work['input_len']} tokens in,"
        f" {work['output_len']} out, {work['rounds']} rounds"
    )
    return figures_table(result, workload, LABELS)
