"""`pequod bench latency`: one request at a time, prefill and decode apart, and the engine's step by phase."""

from __future__ import annotations

import argparse
import asyncio
from typing import TYPE_CHECKING, Any

from ...observability.phases import PHASES
from ..commands import Parser, settings_from
from . import limits, options, plots
from .figures import Figures, median, notes, spread, summarize
from .session import Session, opened, rounds, tell
from .show import check, give, number, spread_table, table
from .steps import Step, decoding, least, phases, prefilling

if TYPE_CHECKING:
    from engine import Roofline

LABELS = [
    ("ttft_p50_s", "first token", "s"),
    ("prefill_tok_s", "prefill, tokens/s", ""),
    ("itl_p50_s", "time per token, median", "s"),
    ("itl_p99_s", "time per token, p99", "s"),
    ("decode_tok_s", "decode, tokens/s", ""),
    ("e2e_p50_s", "whole answer", "s"),
]


def add_arguments(parser: Parser) -> None:
    parser.usage = f"pequod bench latency {options.URL_USAGE}"
    parser.description = (
        "Measure one request at a time: seconds to the first token (prefill), seconds per token after it (decode), and"
        " peak memory of the server's processes. Of a Pequod started here also the engine's steps by phase: alone, and"
        " with the numbers of requests that --rows names."
    )
    options.add_lengths(parser, 32, 128)
    parser.add_argument(
        "--rows",
        metavar="N,...",
        type=options.wholes,
        default=[1, 16],
        help="numbers of requests per step to report phases for (default: 1,16)",
    )
    options.add_repeats(parser, 5)
    options.add_server(parser)
    options.add_output(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the figures of single requests."""
    check(arguments)
    result = asyncio.run(measure(arguments))
    if arguments.plot is not None and result.get("steps"):
        title = f"{result['server']['name']}, {result['server']['model']}: a decode step by phase"
        best = {rows: each["limit_s"] for rows, each in result["steps"].items() if "limit_s" in each}
        plots.phases(arguments.plot / "step.png", title, result["steps"], best)
    give(arguments, result, shown(result))
    return 0


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """The result as JSON has it."""
    # Before the server is there, so that the two do not disturb each other.
    limit = None if arguments.url is not None else await limits.known(settings_from(arguments).settings)
    async with opened(arguments) as session:
        given = arguments.input_len, arguments.output_len
        session.check_length(sum(given))
        runs = await rounds(session, arguments, lambda: [session.prompts.ask(*given)], 1)
        steps = session.steps()
        figures = [summarize(each) for each in runs]
        for each in figures:
            tokens, seconds = each["prompt_tokens"], each["ttft_p50_s"]
            each["prefill_tok_s"] = tokens / seconds if tokens and seconds else None
        shots = [shot for each in runs for shot in each.shots]
        result = {
            "bench": "latency",
            **session.about(),
            "workload": {"input_len": given[0], "output_len": given[1], "rounds": arguments.rounds},
            "figures": spread(figures),
            "peak_bytes": session.peak_bytes(),
            "notes": notes(session.target, shots),
            "requests": [shot.record() for shot in shots],
        }
        if session.is_own:
            result["prefill"] = phases(prefilling(steps))
            result["steps"] = await by_rows(session, arguments, steps, limit)
    tell(result["notes"])
    return result


async def by_rows(
    session: Session, arguments: argparse.Namespace, alone: list[Step], limit: Roofline | None
) -> dict[str, Figures]:
    """Medians of the decode steps with so many rows, by their number, and the least time that they could take."""
    found = {}
    for rows in arguments.rows:
        steps = alone
        if rows > 1:
            asks = [session.prompts.ask(arguments.input_len, arguments.output_len) for _ in range(rows)]
            await session.send(asks, label=f"{rows} rows")
            steps = session.steps()
        seen = decoding(steps, rows)
        if seen:
            found[str(rows)] = {"steps": len(seen), **phases(seen)}
            if limit is not None:
                found[str(rows)]["limit_s"] = median(least(limit, step) for step in seen)
    return found


def shown(result: dict[str, Any]) -> str:
    """The result as tables."""
    work = result["workload"]
    lines = [
        f"{result['server']['name']}, {result['server']['model']}: {work['input_len']} tokens in,"
        f" {work['output_len']} out, one request at a time, {work['rounds']} rounds",
        spread_table(result["figures"], LABELS, work["rounds"]),
    ]
    if result["peak_bytes"]:
        lines.append(f"peak memory of its processes: {number(result['peak_bytes'], 'bytes')}")
    if steps := result.get("steps"):
        head = ["decode step by phase", *(f"{rows} row{'s' * (rows != '1')}" for rows in steps)]
        names = ["step", *PHASES, "kernels", "rest"]
        body = [[name, *(number(each[f"{name}_s"], "s") for each in steps.values())] for name in names]
        body[-2][0] = "of it in CPU kernels"
        if all("limit_s" in each for each in steps.values()):
            body.append(["this machine's limit", *(number(each["limit_s"], "s") for each in steps.values())])
        lines += ["", table(head, body)]
    return "\n".join(lines)
