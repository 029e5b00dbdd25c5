"""`pequod bench latency`: one request at a time, prefill and decode separately, and the engine's steps by phase."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from ...observability.phases import PHASES
from ..banner import count
from ..commands import Failure, Parser, settings_from, warn
from . import limits, options, plots
from .figures import Figures, median, spread, summarize
from .session import Session, opened, rounds
from .show import Result, figures_table, number, report, server_and_model, table
from .steps import Step, decoding, limit_seconds, phases, prefilling

if TYPE_CHECKING:
    from engine import Roofline

LABELS = [
    ("ttft_p50_s", "first token", "s"),
    ("prefill_tok_s", "prefill, tokens/s", ""),
    ("tpot_p50_s", "time per token", "s"),
    ("itl_p50_s", "gap between chunks, median", "s"),
    ("itl_p99_s", "gap between chunks, p99", "s"),
    ("decode_tok_s", "decode, tokens/s", ""),
    ("e2e_p50_s", "whole response", "s"),
]


def add_arguments(parser: Parser) -> None:
    parser.usage = f"pequod bench latency {options.URL_USAGE}"
    parser.description = (
        "Measure one request at a time: seconds to the first token (prefill), seconds per token after it (decode), and"
        " peak memory of the server's processes. If a Pequod is started here, also report the engine's steps by phase,"
        " with one request and with the numbers of requests in --rows."
    )
    options.add_lengths(parser, 32, 128)
    options.add_numbers(parser, "--rows", [1, 16], "numbers of requests in the steps that are reported by phase")
    options.add_measurement(parser, rounds=5)


def run(arguments: argparse.Namespace) -> int:
    result = report(arguments, measure, shown)
    if arguments.plot is not None and result.get("steps"):
        title = f"{server_and_model(result)}: a decode step by phase"
        best = {rows: each["limit_s"] for rows, each in result["steps"].items() if "limit_s" in each}
        plots.phases(arguments.plot / "step.png", title, result["steps"], best)
    return 0


async def measure(arguments: argparse.Namespace) -> Result:
    limit = None
    if arguments.url is None:  # before the server is started, so that the measurements do not disturb each other
        async with limits.probe_where_known(settings_from(arguments).settings) as probe:
            limit = probe.seen[0] if probe is not None else None
    async with opened(arguments) as session:
        lengths = session.lengths(arguments)
        runs = await rounds(session, arguments, lambda: [session.prompts.ask(*lengths)], 1)
        steps = await session.steps() if session.failure is None else []
        figures = [summarize(each) for each in runs]
        for each in figures:
            tokens, seconds = each["prompt_tokens"], each["ttft_p50_s"]
            each["prefill_tok_s"] = tokens / seconds if tokens and seconds else None
        result = session.result("latency", options.chosen(arguments, "input_len", "output_len", "rounds"), runs)
        result["figures"] = spread(figures)
        result["requests"] = [shot for each in result["requests"] for shot in each]
        if session.child is not None and session.failure is None:
            result["prefill"] = phases(prefilling(steps))
            result["steps"] = await by_rows(session, arguments, steps, limit)
            result["failure"] = session.failure
        return result


async def by_rows(
    session: Session, arguments: argparse.Namespace, alone: list[Step], limit: Roofline | None
) -> dict[str, Figures]:
    """Return medians of the decode steps by their number of rows, and their minimum time on this machine.

    `alone`: the steps of single requests.
    """
    found = {}
    for rows in arguments.rows:
        steps = alone
        if rows > 1:
            asks = [session.prompts.ask(arguments.input_len, arguments.output_len) for _ in range(rows)]
            try:
                sent = await session.send(asks, label=f"{rows} rows")
            except Failure as error:
                session.failure = str(error)
                break
            try:
                sent.complete()
            except Failure as error:
                warn(f"no steps of {rows} rows were measured: {error}")
                continue
            steps = await session.steps()
        seen = decoding(steps, rows)
        if seen:
            found[str(rows)] = {"steps": len(seen), **phases(seen)}
            if limit is not None:
                found[str(rows)]["limit_s"] = median(limit_seconds(limit, step) for step in seen)
    return found


def shown(result: Result) -> str:
    work = result["workload"]
    lengths = f"{work['input_len']} tokens in, {work['output_len']} out"
    lines = [figures_table(result, f"{lengths}, one request at a time, {count(work['rounds'], 'round')}", LABELS)]
    if steps := result.get("steps"):
        head = ["decode step by phase", *(f"{rows} row{'s' * (rows != '1')}" for rows in steps)]
        names = ["step", *PHASES, "kernels", "rest"]
        body = [[name, *(number(each[f"{name}_s"], "s") for each in steps.values())] for name in names]
        body[-2][0] = "in our CPU kernels"
        if all("limit_s" in each for each in steps.values()):
            body.append(["limit of this machine", *(number(each["limit_s"], "s") for each in steps.values())])
        lines += ["", table(head, body)]
    return "\n".join(lines)
