"""`pequod bench startup`: how long a Pequod takes from its command to its first token."""

from __future__ import annotations

import argparse
import asyncio
import time
from typing import Any

from ..commands import Parser, settings_from
from . import options
from .client import connect
from .figures import Figures, spread
from .load import Prompts
from .processes import peak_bytes
from .session import START_S, bar, machine, start
from .show import check, give, spread_table

LABELS = [
    ("port_s", "the port answers", "s"),
    ("ready_s", "/ready says yes", "s"),
    ("first_token_s", "first token of a request then", "s"),
    ("first_token_again_s", "first token of the next one", "s"),
    ("peak_bytes", "peak memory of its processes", "bytes"),
]


def add_arguments(parser: Parser) -> None:
    parser.usage = "pequod bench startup [MODEL] [flags]"
    parser.description = (
        "Start a Pequod again and again, and report the seconds until its port answers, until it is ready, and of its"
        " first two requests. The warm-up brings the model's files into the system's cache."
    )
    options.add_lengths(parser, 32, 8)
    options.add_repeats(parser, 3)
    options.add_own(parser)
    options.add_output(parser, plots=False)


def run(arguments: argparse.Namespace) -> int:
    """Print the figures of starts."""
    check(arguments)
    result = asyncio.run(measure(arguments))
    work = result["workload"]
    head = f"Pequod, {result['model']}: {work['rounds']} starts"
    give(arguments, result, f"{head}\n{spread_table(result['figures'], LABELS, work['rounds'])}")
    return 0


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """The result as JSON has it."""
    loaded = settings_from(arguments)
    found: list[Figures] = []
    with bar() as progress:
        task = progress.add_task("starts", total=arguments.warmup + arguments.rounds)
        for _ in range(arguments.warmup + arguments.rounds):
            found.append(await once(arguments))
            progress.advance(task)
    measured = found[arguments.warmup :]
    return {
        "bench": "startup",
        "model": loaded.settings.model,
        "machine": machine(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "workload": {"rounds": arguments.rounds, "input_len": arguments.input_len, "output_len": arguments.output_len},
        "figures": spread(measured),
        "starts": measured,
    }


async def once(arguments: argparse.Namespace) -> Figures:
    """One start."""
    loaded = settings_from(arguments)
    values = loaded.settings
    child = start(arguments, loaded)
    try:
        port, ready = await child.ready(START_S)
        target = await connect(child.url, values.names[0], values.first_key, ask=False)
        try:
            prompts = Prompts(target, values.seed or 0)
            given = arguments.input_len, arguments.output_len
            shots = [await target.send(prompts.ask(*given), time.perf_counter()) for _ in range(2)]
            return {
                "port_s": port,
                "ready_s": ready,
                "first_token_s": shots[0].ttft,
                "first_token_again_s": shots[1].ttft,
                "peak_bytes": peak_bytes(child.pid),
            }
        finally:
            await target.http.aclose()
    finally:
        child.stop()
