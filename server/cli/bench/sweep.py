"""`pequod bench sweep`: tokens per second over load, and time per token over context length."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..commands import Failure, Parser, settings_from, warn
from . import limits, options, plots
from .client import Ask, Shot
from .figures import notes, outcome, spread, summarize
from .load import poisson
from .session import Session, opened, rounds
from .show import Result, points_table, report, server_and_model

if TYPE_CHECKING:
    from engine import Roofline

Point = dict[str, Any]
CONCURRENCY = [1, 2, 4, 8, 16]
OUTPUT_AT_CONTEXT = 32  # tokens that are timed at each context length
SETTLE_S = 0.5  # threads may spin for about 0.2 s after their last work, which would disturb the machine's measurement
# Values of a point that are printed, and drawn.
POINT = (
    *("output_tok_s", "ttft_p50_s", "ttft_p99_s", "tpot_p50_s", "tpot_p99_s"),
    *("itl_p50_s", "itl_p99_s", "itl_max_s", "e2e_p50_s"),
)
LAST_LABELS = [
    ("limit_tpot_s", "limit", "s"),
    ("share", "share", "%"),
    ("itl_p99_s", "p99 gap", "s"),
    ("failed", "failed", ""),
]
CONTEXT_LABELS = [("ttft_p50_s", "first token", "s"), ("tpot_p50_s", "time per token", "s"), *LAST_LABELS]
LOAD_LABELS = [
    ("output_tok_s", "tokens/s", ""),
    ("limit_tok_s", "limit", ""),
    ("ttft_p50_s", "first token", "s"),
    ("ttft_p99_s", "p99", "s"),
    ("tpot_p50_s", "time per token", "s"),
    ("tpot_p99_s", "p99", "s"),
    *LAST_LABELS,
]


def add_arguments(parser: Parser) -> None:
    parser.usage = f"pequod bench sweep {options.URL_USAGE}"
    parser.description = (
        "Measure at increasing load (--concurrency: requests at once; --rate: requests per second) and at increasing"
        " context length (--context). If a Pequod is started here, report beside each figure the limit of this machine:"
        " the time to read the weights and the cache or to compute, whichever is longer."
    )
    options.add_lengths(parser, 128, 64)
    box = parser.add_argument_group("sweep")
    box.add_argument(
        "--concurrency",
        metavar="N,...",
        type=options.wholes,
        help="requests at once (default: 1,2,4,8,16, unless --rate or --context is given)",
    )
    box.add_argument("--rate", metavar="R,...", type=options.positives, help="requests per second (Poisson)")
    box.add_argument("--context", metavar="N,...", type=options.wholes, help="prompt lengths of single requests")
    options.add_number(box, "--requests", 32, "requests per round of --rate")
    options.add_measurement(parser, rounds=3)


def run(arguments: argparse.Namespace) -> int:
    if not (arguments.concurrency or arguments.rate or arguments.context):
        arguments.concurrency = CONCURRENCY
    result = report(arguments, measure, shown)
    if arguments.plot is not None:
        draw(arguments, result)
    return 0


async def measure(arguments: argparse.Namespace) -> Result:
    async with contextlib.AsyncExitStack() as stack:
        probe = None
        if arguments.url is None:
            probe = await stack.enter_async_context(limits.probe_where_known(settings_from(arguments).settings))
        session = await stack.enter_async_context(opened(arguments))
        sweep = Sweep(session, arguments, probe)
        by_load = await points(sweep.together, arguments.concurrency or ())
        by_rate = await points(sweep.at_rate, arguments.rate or ())
        fitting = [length for length in arguments.context or () if sweep.fits(length)]
        by_context = await points(sweep.at_context, fitting)
        limit = limits.middle(sweep.limits) if sweep.limits else None
        if limit is not None:
            add_limits(limit, by_load, by_context, arguments)
        return {
            "bench": "sweep",
            **session.about(),
            "workload": options.chosen(arguments, "input_len", "output_len", "rounds"),
            **outcome(sweep.shots),
            "failure": session.failure,
            "limit": None if limit is None else {name: getattr(limit, name) for name in limit.__struct_fields__},
            "machine_limits": {rate: [getattr(each, rate) for each in sweep.limits] for rate in limits.RATES},
            "concurrency": by_load,
            "rate": by_rate,
            "context": by_context,
            "peak_bytes": session.peak_bytes(),
            "notes": notes(session.target, sweep.shots),
        }


async def points(measure: Callable[[Any], Awaitable[Point | None]], loads: Sequence[float]) -> list[Point]:
    """Return the points of these loads, which end where the server is gone."""
    found = [await measure(load) for load in loads]
    return [point for point in found if point is not None]


class Sweep:
    """Measures the points of a sweep on one server, one after another, and with `probe` the machine after each."""

    def __init__(self, session: Session, arguments: argparse.Namespace, probe: limits.Probe | None) -> None:
        self.session = session
        self.arguments = arguments
        self.probe = probe
        self.limits = list(probe.seen) if probe is not None else []
        self.lengths = session.lengths(arguments)
        self.shots: list[Shot] = []

    def fits(self, context: int) -> bool:
        """Return whether the server accepts prompts of this length; otherwise print a warning."""
        max_len = self.session.target.max_len
        if max_len is None or context + OUTPUT_AT_CONTEXT <= max_len:
            return True
        warn(f"--context {context} is left out: the server accepts {max_len} tokens of prompt and output")
        return False

    async def together(self, count: int) -> Point | None:
        """Measure this number of requests at once."""
        return await self._point(
            str(count), lambda: [self.session.prompts.ask(*self.lengths) for _ in range(count)], count=count
        )

    async def at_rate(self, rate: float) -> Point | None:
        """Measure requests that arrive at random times."""

        def asks() -> list[Ask]:
            times = poisson(rate, self.arguments.requests, self.session.seed)
            return [self.session.prompts.ask(*self.lengths, at=at) for at in times]

        return await self._point(f"{rate:g}/s", asks)

    async def at_context(self, length: int) -> Point | None:
        """Measure one request with a prompt of this length."""
        ask = self.session.prompts.ask
        return await self._point(str(length), lambda: [ask(length, OUTPUT_AT_CONTEXT)], context=length)

    async def _point(self, load: str, asks: Callable[[], Sequence[Ask]], **facts: int) -> Point | None:
        """Return a point with further facts, or None if the server is gone."""
        if self.session.failure is not None:
            return None
        runs = await rounds(self.session, self.arguments, asks, None)
        if not runs:
            return None
        await self._measure_machine()
        shots = [shot for each in runs for shot in each.shots]
        self.shots += shots
        figures = spread([summarize(each) for each in runs])
        point = {name: figures[name]["median"] if name in figures else None for name in POINT}
        return {"load": load, **facts, **outcome(shots), **point, "figures": figures}

    async def _measure_machine(self) -> None:
        if self.probe is None:
            return
        await asyncio.sleep(SETTLE_S)
        try:
            self.limits.append(await self.probe.measure())
        except Failure as error:
            warn(str(error))
            self.probe = None


def add_limits(
    limit: Roofline,
    by_load: Sequence[Point],
    by_context: Sequence[Point],
    arguments: argparse.Namespace,
) -> None:
    """Add to the points the limits of this machine."""
    prompt, output = arguments.input_len, arguments.output_len
    for point in by_load:
        count, seen = point["count"], prompt + output // 2  # tokens that a row attends to halfway through its output
        step = limit.seconds(count, count * seen, count * seen, count)
        first = limit.seconds(count * prompt, count * prompt, count * prompt * prompt // 2, count)
        point["limit_tpot_s"] = step
        point["limit_tok_s"] = count * output / (first + (output - 1) * step)
    for point in by_context:
        length, seen = point["context"], point["context"] + OUTPUT_AT_CONTEXT // 2
        point["limit_tpot_s"] = limit.seconds(1, seen, seen, 1)
        point["limit_ttft_s"] = limit.seconds(length, length, length * length // 2, 1)


def shown(result: Result) -> str:
    lines = [f"{server_and_model(result)}: medians of {result['workload']['rounds']} rounds"]
    curves = (
        ("concurrency", f"at once ({_lengths(result)})", LOAD_LABELS),
        ("rate", f"arriving ({_lengths(result)})", LOAD_LABELS),
        ("context", "context", CONTEXT_LABELS),
    )
    for name, title, labels in curves:
        if result[name]:
            points = [{**point, "share": _share(point)} for point in result[name]]
            lines += ["", points_table(title, points, labels)]
    return "\n".join(lines)


def _lengths(result: Result) -> str:
    return f"{result['workload']['input_len']} tokens in, {result['workload']['output_len']} out"


def _share(point: Point) -> float | None:
    limit, measured = point.get("limit_tpot_s"), point["tpot_p50_s"]
    return limit / measured if limit and measured else None


def draw(arguments: argparse.Namespace, result: Result) -> None:
    """Draw the curves into the folder of --plot."""
    name = server_and_model(result)
    if result["concurrency"]:
        title = f"{name}: {_lengths(result)}; numbers are requests at once"
        plots.throughput(arguments.plot / "throughput.png", title, result["concurrency"])
    if result["rate"]:
        title = f"{name}: {_lengths(result)}; random arrivals, requests per second"
        plots.throughput(arguments.plot / "rate.png", title, result["rate"])
    if result["context"]:
        plots.context(arguments.plot / "context.png", f"{name}: one request", result["context"])
