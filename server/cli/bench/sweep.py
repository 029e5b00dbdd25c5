"""`pequod bench sweep`: the curves: tokens per second over load, time per token over context."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..commands import Failure, Parser, settings_from, warn
from . import limits, options, plots
from .client import Ask, Shot
from .figures import notes, spread, summarize
from .load import poisson
from .session import Session, opened, rounds, tell
from .show import check, give, number, table

if TYPE_CHECKING:
    from engine import Roofline

CONCURRENCY = [1, 2, 4, 8, 16]
OUTPUT_AT_CONTEXT = 32  # tokens that are timed at each context
SETTLE_S = 0.5  # threads may spin for some 0.2 s after their last work, which a measurement of the machine would feel


def add_arguments(parser: Parser) -> None:
    parser.usage = f"pequod bench sweep {options.URL_USAGE}"
    parser.description = (
        "Measure at rising load (--concurrency: so many requests at once; --rate: so many a second) and at rising"
        " length (--context). Of a Pequod started here, the machine's limit stands beside each figure: the time to"
        " read the weights and the cache, or to multiply, whichever is longer."
    )
    options.add_lengths(parser, 128, 64)
    box = parser.add_argument_group("sweep")
    box.add_argument(
        "--concurrency",
        metavar="N,...",
        type=options.wholes,
        help="requests at once (default: 1,2,4,8,16 unless another sweep is asked for)",
    )
    box.add_argument("--rate", metavar="R,...", type=options.positives, help="requests a second, by chance (Poisson)")
    box.add_argument("--context", metavar="N,...", type=options.wholes, help="tokens before the ones that are timed")
    box.add_argument(
        "--requests", metavar="N", type=options.whole(1), default=32, help="requests of a round at a rate (default: 32)"
    )
    options.add_repeats(parser, 3)
    options.add_server(parser)
    options.add_output(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the curves as tables, and draw them."""
    check(arguments)
    if not (arguments.concurrency or arguments.rate or arguments.context):
        arguments.concurrency = CONCURRENCY
    result = asyncio.run(measure(arguments))
    if arguments.plot is not None:
        draw(arguments, result)
    give(arguments, result, shown(result))
    return 0


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """The result as JSON has it."""
    async with contextlib.AsyncExitStack() as stack:
        probe = None
        if arguments.url is None:
            probe = await stack.enter_async_context(limits.probe_where_known(settings_from(arguments).settings))
        session = await stack.enter_async_context(opened(arguments))
        sweep = Sweep(session, arguments, probe)
        session.check_length(arguments.input_len + arguments.output_len)
        by_load = [await sweep.together(count) for count in arguments.concurrency or ()]
        by_rate = [await sweep.at_rate(rate) for rate in arguments.rate or ()]
        by_context = [await sweep.at_context(length) for length in arguments.context or () if sweep.fits(length)]
        limit = limits.middle(sweep.limits) if sweep.limits else None
        if limit is not None:
            add_limits(limit, by_load, by_context, arguments)
        result = {
            "bench": "sweep",
            **session.about(),
            "workload": {
                "input_len": arguments.input_len,
                "output_len": arguments.output_len,
                "rounds": arguments.rounds,
            },
            "limit": None if limit is None else {name: getattr(limit, name) for name in limit.__struct_fields__},
            "machine_limits": {rate: [getattr(each, rate) for each in sweep.limits] for rate in limits.RATES},
            "concurrency": by_load,
            "rate": by_rate,
            "context": by_context,
            "peak_bytes": session.peak_bytes(),
            "notes": notes(session.target, sweep.shots),
        }
    tell(result["notes"])
    return result


class Sweep:
    """The points of a sweep, one after another on one server."""

    def __init__(self, session: Session, arguments: argparse.Namespace, probe: limits.Probe | None) -> None:
        """`probe` measures the machine after each point."""
        self.session = session
        self.arguments = arguments
        self.probe = probe
        self.limits = list(probe.seen) if probe is not None else []
        self.shots: list[Shot] = []

    def fits(self, context: int) -> bool:
        """Whether the server takes so long a prompt; says so when not."""
        most = self.session.target.max_len
        if most is None or context + OUTPUT_AT_CONTEXT <= most:
            return True
        warn(f"--context {context} is left out: the server takes {most} tokens of prompt and answer")
        return False

    async def together(self, count: int) -> dict[str, Any]:
        """So many requests at once."""
        given = self.arguments.input_len, self.arguments.output_len
        point = await self._point(str(count), lambda: [self.session.prompts.ask(*given) for _ in range(count)])
        point["count"] = count
        return point

    async def at_rate(self, rate: float) -> dict[str, Any]:
        """Requests that come by chance."""
        given = self.arguments.input_len, self.arguments.output_len

        def asks() -> list[Ask]:
            times = poisson(rate, self.arguments.requests, self.session.seed)
            return [self.session.prompts.ask(*given, at=at) for at in times]

        return await self._point(f"{rate:g}/s", asks)

    async def at_context(self, length: int) -> dict[str, Any]:
        """One request, after so many tokens."""
        point = await self._point(str(length), lambda: [self.session.prompts.ask(length, OUTPUT_AT_CONTEXT)])
        point["context"] = length
        return point

    async def _point(self, load: str, asks: Any) -> dict[str, Any]:
        runs = await rounds(self.session, self.arguments, asks, None)
        await self._measure_machine()
        self.shots += [shot for each in runs for shot in each.shots]
        figures = spread([summarize(each) for each in runs])
        names = ("output_tok_s", "ttft_p50_s", "ttft_p99_s", "itl_p50_s", "itl_p99_s", "itl_max_s", "e2e_p50_s")
        point: dict[str, Any] = {name: figures[name]["median"] if name in figures else None for name in names}
        return {"load": load, **point, "figures": figures}

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
    by_load: Sequence[dict[str, Any]],
    by_context: Sequence[dict[str, Any]],
    arguments: argparse.Namespace,
) -> None:
    """Add to the points what they could be at best."""
    given, wanted = arguments.input_len, arguments.output_len
    for point in by_load:
        count, seen = point["count"], given + wanted // 2  # tokens that a row sees in the middle of its answer
        step = limit.seconds(count, count * seen, count * seen, count)
        first = limit.seconds(count * given, count * given, count * given * given // 2, count)
        point["limit_itl_s"] = step
        point["limit_tok_s"] = count * wanted / (first + (wanted - 1) * step)
    for point in by_context:
        length, seen = point["context"], point["context"] + OUTPUT_AT_CONTEXT // 2
        point["limit_itl_s"] = limit.seconds(1, seen, seen, 1)
        point["limit_ttft_s"] = limit.seconds(length, length, length * length // 2, 1)


def shown(result: dict[str, Any]) -> str:
    """The curves as tables."""
    work = result["workload"]
    server = result["server"]
    lines = [f"{server['name']}, {server['model']}: medians of {work['rounds']} rounds"]
    shape = f"{work['input_len']} tokens in, {work['output_len']} out"
    for name, title in (("concurrency", f"at once ({shape})"), ("rate", f"arriving ({shape})")):
        if result[name]:
            lines += ["", _loads(title, result[name])]
    if result["context"]:
        head = ["context", "first token", "time per token", "p99", "at best", "share"]
        body = [
            [
                point["load"],
                number(point["ttft_p50_s"], "s"),
                number(point["itl_p50_s"], "s"),
                number(point["itl_p99_s"], "s"),
                number(point.get("limit_itl_s"), "s"),
                _share(point),
            ]
            for point in result["context"]
        ]
        lines += ["", table(head, body)]
    return "\n".join(lines)


def _loads(title: str, points: Sequence[dict[str, Any]]) -> str:
    head = [title, "tokens/s", "at best", "first token", "p99", "time per token", "p99", "at best", "share"]
    body = [
        [
            point["load"],
            number(point["output_tok_s"]),
            number(point.get("limit_tok_s")),
            number(point["ttft_p50_s"], "s"),
            number(point["ttft_p99_s"], "s"),
            number(point["itl_p50_s"], "s"),
            number(point["itl_p99_s"], "s"),
            number(point.get("limit_itl_s"), "s"),
            _share(point),
        ]
        for point in points
    ]
    return table(head, body)


def _share(point: dict[str, Any]) -> str:
    limit, measured = point.get("limit_itl_s"), point["itl_p50_s"]
    return number(limit / measured, "%") if limit and measured else "-"


def draw(arguments: argparse.Namespace, result: dict[str, Any]) -> None:
    """The plots of a result, into --plot."""
    name = f"{result['server']['name']}, {result['server']['model']}"
    work = result["workload"]
    shape = f"{work['input_len']} tokens in, {work['output_len']} out"
    if result["concurrency"]:
        title = f"{name}: {shape}; numbers are requests at once"
        plots.throughput(arguments.plot / "throughput.png", title, result["concurrency"])
    if result["rate"]:
        title = f"{name}: {shape}; arriving by chance at so many a second"
        plots.throughput(arguments.plot / "rate.png", title, result["rate"])
    if result["context"]:
        plots.context(arguments.plot / "context.png", f"{name}: one request", result["context"])
