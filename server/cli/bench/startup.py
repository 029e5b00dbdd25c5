"""`pequod bench startup`: the time from the command that starts a Pequod to its first tokens."""

from __future__ import annotations

import argparse
import contextlib
import time

from ..banner import count
from ..commands import Parser, settings_from
from . import load, options
from .client import connect
from .figures import Figures, spread
from .processes import flags, peak_bytes, pequod, variables
from .session import START_S, bar, machine
from .show import Result, report, spread_table

LABELS = [
    ("port_s", "the port responds", "s"),
    ("ready_s", "/ready returns 200", "s"),
    ("first_token_s", "first token of the first request", "s"),
    ("first_token_again_s", "first token of the second request", "s"),
    ("peak_bytes", "peak memory of the server's processes", "bytes"),
]


def add_arguments(parser: Parser) -> None:
    parser.usage = "pequod bench startup [MODEL] [flags]"
    parser.description = (
        "Start a Pequod several times, and report the seconds until its port responds and until it is ready, and the"
        " time to first token of two requests after that. The warm-up reads the model's files into the page cache."
    )
    options.add_lengths(parser, 32, 8)
    options.add_measurement(parser, rounds=3, takes_url=False, plots=False)


def run(arguments: argparse.Namespace) -> int:
    report(arguments, measure, shown)
    return 0


def shown(result: Result) -> str:
    rounds = result["workload"]["rounds"]
    return f"Pequod, {result['model']}: {count(rounds, 'start')}\n{spread_table(result['figures'], LABELS, rounds)}"


async def measure(arguments: argparse.Namespace) -> Result:
    found: list[Figures] = []
    with bar() as progress:
        task = progress.add_task("starts", total=arguments.warmup + arguments.rounds)
        for _ in range(arguments.warmup + arguments.rounds):
            found.append(await once(arguments))
            progress.advance(task)
    measured = found[arguments.warmup :]
    return {
        "bench": "startup",
        "model": settings_from(arguments).settings.model,
        "machine": machine(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "workload": options.chosen(arguments, "rounds", "input_len", "output_len"),
        "figures": spread(measured),
        "starts": measured,
    }


async def once(arguments: argparse.Namespace) -> Figures:
    """Start a Pequod, measure two requests, and stop it."""
    loaded = settings_from(arguments)
    values = loaded.settings
    async with contextlib.AsyncExitStack() as stack:
        child = pequod(values.model, flags(loaded), variables(loaded))
        stack.callback(child.stop)
        port, ready = await child.ready(START_S)
        target = await connect(child.url, values.names[0], values.first_key, ask=False, is_own=True)
        stack.push_async_callback(target.http.aclose)
        prompts = load.Prompts(target, values.seed or 0)
        lengths = arguments.input_len, arguments.output_len
        shots = (await load.run(target, [prompts.ask(*lengths) for _ in range(2)], 1)).complete().shots
        return {
            "port_s": port,
            "ready_s": ready,
            "first_token_s": shots[0].ttft,
            "first_token_again_s": shots[1].ttft,
            "peak_bytes": peak_bytes(child.pid),
        }
