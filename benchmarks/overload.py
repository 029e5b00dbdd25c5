"""Sends ten times the load that the server can handle, from several keys, and measures completions and refusals.

    python -m benchmarks.overload --json benchmarks/results/overload.json

Two phases alternate, each for --seconds:

capacity   1.5 times as many concurrent requests as the engine runs: it is always full, and no request is refused
overload   Poisson arrivals, --factor times the highest rate completed at capacity so far (including the probe's
           requests), from four keys; the first sends half of them

Measurements start after --ramp, when the queue is full. `goodput` is the tokens per second of completed requests; in
overload it must be at least 95 % of the mean of the capacities before and after. Refusals (503 or 429) must take at
most 100 ms at the 99th percentile, and /live at most 100 ms each time. A separate process measures both, including the
time to connect. The clients use only the machine's last core and the server only the others, so that the cost of
sending the load is not the server's. On a machine with other load `of_capacity_by_cpu` compares tokens per CPU time of
the server instead.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.synchronize import Event
from typing import Any, NamedTuple

import httpx

from server.cli.bench.client import Ask, Shot, Target, connect
from server.cli.bench.load import Prompts, poisson, run
from server.cli.bench.processes import cpu_seconds
from tests.live import Server

from .traffic import about, write

KEYS = {"busy": 3, "one": 1, "two": 1, "three": 1}  # relative arrivals by key
# Tokens. A refusal costs the same for all models, and a request of 64 tokens to the built-in model only ten times that.
# With a real model the ratio is far larger.
INPUT, OUTPUT = 128, 256
SEQS = 16
QUEUED = 32
RAMP_S = 10.0  # for the queue to fill
GOODPUT, LATE_S = 0.95, 0.1
PROBE_EVERY_S = 0.1


class Window(NamedTuple):
    """The part of a run that is measured."""

    ramp: float  # seconds from the start
    seconds: float

    @property
    def end(self) -> float:
        return self.ramp + self.seconds

    def has(self, at: float) -> bool:
        return self.ramp <= at <= self.end


async def capacity(targets: dict[str, Target], prompts: Prompts, window: Window) -> dict[str, Any]:
    """Keep the server full with clients that wait for their responses."""
    began = time.perf_counter()
    shots: list[Shot] = []

    async def client(target: Target) -> None:
        while time.perf_counter() - began < window.end:
            shots.append(await target.send(prompts.ask(INPUT, OUTPUT), began))

    names = list(targets)
    async with asyncio.TaskGroup() as clients:
        for number in range(SEQS * 3 // 2):
            clients.create_task(client(targets[names[number % len(names)]]))
    return {
        "goodput": goodput(shots, window),
        "tokens": tokens(shots),
        "errors": sorted({shot.error for shot in shots if shot.error}),
    }


async def overload(targets: dict[str, Target], prompts: Prompts, window: Window, rate: float) -> dict[str, Any]:
    """Send `rate` requests per second, whatever the server returns."""
    parts = sum(KEYS.values())
    asks: dict[str, list[Ask]] = {}
    for number, (name, part) in enumerate(KEYS.items()):
        share = rate * part / parts
        times = poisson(share, round(share * window.end), prompts.seed + number)
        asks[name] = [prompts.ask(INPUT, OUTPUT, at=at) for at in times]
    done = await asyncio.gather(*(run(targets[name], asks[name]) for name in KEYS))
    by_key = {name: each.shots for name, each in zip(KEYS, done, strict=True)}
    everything = [shot for each in by_key.values() for shot in each]
    shots = [shot for shot in everything if window.has(shot.sent)]
    refused = {str(status): [s for s in shots if s.error and f"status {status}" in s.error] for status in (429, 503)}
    waits = sorted(shot.done - shot.sent for each in refused.values() for shot in each)
    late = [shot.sent - shot.at for shot in shots]
    return {
        "offered_per_s": len(shots) / window.seconds,
        "goodput": goodput(everything, window),
        "tokens": tokens(everything),
        "goodput_by_key": {name: goodput(each, window) for name, each in by_key.items()},
        "ttft_s": quantiles([shot.ttft for shot in shots if shot.ok and shot.ttft is not None]),
        "refused": {status: len(each) for status, each in refused.items()},
        "refusal_of_clients_s": quantiles(waits),  # including delays of these clients
        "sent_late_s": quantiles(late),  # delays of this client
        "errors": sorted({s.error for s in shots if s.error and not any(s in each for each in refused.values())}),
    }


def goodput(shots: list[Shot], window: Window) -> float:
    """Return the tokens per second of completed responses, within the measured time."""
    count = 0
    for shot in shots:
        if shot.ok:
            sizes = shot.sizes or [1] * len(shot.times)
            count += sum(n for at, n in zip(shot.times, sizes, strict=True) if window.has(at))
    return count / window.seconds


def tokens(shots: list[Shot]) -> int:
    """Return the number of tokens of all completed responses."""
    return sum(shot.tokens for shot in shots if shot.ok)


def quantiles(values: list[float]) -> dict[str, float] | None:
    if len(values) < 2:
        return None
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {"p50": cuts[49], "p95": cuts[94], "p99": cuts[98], "max": max(values), "count": len(values)}


def probe(url: str, begun: Event, over: Event, path: str, refused: bool) -> None:
    """Request /live, and if `refused` also too many choices, until `over`. Runs in a separate process.

    A client that reads sixteen streams would notice refusals late. SEQS choices at once are refused whenever more than
    half of the queue is in use.
    """
    body = {"prompt": "a", "max_tokens": 1, "n": SEQS}
    headers = {"Authorization": f"Bearer {list(KEYS)[-1]}"}
    found = []
    limits = httpx.Limits(max_keepalive_connections=0)
    with httpx.Client(base_url=url, headers=headers, timeout=60, limits=limits, trust_env=False) as client:
        client.get("/live")
        begun.set()
        while not over.wait(PROBE_EVERY_S) or len(found) < 2:
            began = time.perf_counter()
            live = client.get("/live").status_code
            middle = time.perf_counter()
            status, retry = 0, False
            if refused:
                asked = client.post("/v1/completions", json=body)
                status, retry = asked.status_code, "retry-after" in asked.headers
            found.append((live, middle - began, status, retry, time.perf_counter() - middle))
    pathlib.Path(path).write_text(json.dumps(found))


async def watched(server: Server, work: Callable[[], Any], refused: bool = False) -> dict[str, Any]:
    """Return the result of `work`, with the probe's measurements and the server's CPU time meanwhile."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/probe.json"
        begun, over = context.Event(), context.Event()
        process = context.Process(target=probe, args=(server.url, begun, over, path, refused))
        process.start()
        try:
            await asyncio.to_thread(begun.wait, 120)  # if it fails, there is no file below
            before = cpu_seconds(server.process.pid)
            found = await work()
        finally:
            over.set()
            await asyncio.to_thread(process.join)
        seen = json.loads(pathlib.Path(path).read_text())
    return {
        **found,
        "cpu_s": cpu_seconds(server.process.pid) - before,
        "live_s": quantiles([live_s for _, live_s, *_ in seen]),
        "live_not_200": sum(status != 200 for status, *_ in seen),
        "refusal_s": quantiles([asked_s for *_, status, _, asked_s in seen if status in (429, 503)]),
        "refusals_without_retry_after": sum(not retry for *_, status, retry, _ in seen if status in (429, 503)),
    }


async def measure(server: Server, window: Window, rounds: int, seed: int, factor: float) -> dict[str, Any]:
    targets = {name: await connect(server.url, None, name, ask=name == "busy", is_own=True) for name in KEYS}
    for target in targets.values():
        target.wishes = targets["busy"].wishes
    prompts = Prompts(targets["busy"], seed)
    full, over = [await watched(server, lambda: capacity(targets, prompts, window))], []
    for _ in range(rounds):
        rate = factor * max(each["goodput"] for each in full) / OUTPUT - 1 / PROBE_EVERY_S
        rate = max(rate, sum(KEYS.values()))  # on the slowest machine, too, every key sends requests
        over.append(await watched(server, lambda rate=rate: overload(targets, prompts, window, rate), refused=True))
        full.append(await watched(server, lambda: capacity(targets, prompts, window)))
        mean = (full[-2]["goodput"] + full[-1]["goodput"]) / 2
        over[-1]["of_capacity"] = over[-1]["goodput"] / mean
        per_cpu = statistics.mean(each["tokens"] / each["cpu_s"] for each in full[-2:])
        over[-1]["of_capacity_by_cpu"] = over[-1]["tokens"] / over[-1]["cpu_s"] / per_cpu
        print(f"{full[-2]['goodput']:.0f}, overloaded {over[-1]['goodput']:.0f}, {full[-1]['goodput']:.0f} tokens/s")
    for target in targets.values():
        await target.http.aclose()
    return {"capacity": full, "overload": over}


def judge(found: dict[str, Any]) -> dict[str, Any]:
    """Return the three figures: medians of the rounds, but the maximum for /live. At capacity it has no bound."""
    rounds = found["overload"]
    waits = [each["refusal_s"]["p99"] for each in rounds if each["refusal_s"]]
    return {
        "of_capacity": statistics.median(each["of_capacity"] for each in rounds),
        "of_capacity_must_be_at_least": GOODPUT,
        "of_capacity_by_cpu": statistics.median(each["of_capacity_by_cpu"] for each in rounds),
        "refusal_p99_s": statistics.median(waits) if waits else None,
        "refusal_p99_must_be_at_most_s": LATE_S,
        "live_max_s": max(each["live_s"]["max"] for each in rounds),
        "live_must_be_at_most_s": LATE_S,
        "live_max_at_capacity_s": max(each["live_s"]["max"] for each in found["capacity"]),
        "failed": sorted({error for each in rounds + found["capacity"] for error in each["errors"]}),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--ramp", type=float, default=RAMP_S, help="seconds before them")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--factor", type=float, default=10.0, help="arrivals in overload, as a multiple of the capacity"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > 1:
        os.sched_setaffinity(0, cores[:-1])  # inherited by the server
    flags = ("--max-num-seqs", str(SEQS), "--max-num-queued-reqs", str(QUEUED), "--api-key", *KEYS)
    with Server(args.model, *flags) as server:
        os.sched_setaffinity(0, cores[-1:])
        found = asyncio.run(measure(server, Window(args.ramp, args.seconds), args.rounds, args.seed, args.factor))
    verdict = judge(found)
    for name, value in verdict.items():
        print(f"{name:30} {value}")
    write({**about(), "flags": flags, "load_average": os.getloadavg(), **verdict, **found}, args.json)
    held = (
        verdict["of_capacity"] >= GOODPUT
        and verdict["refusal_p99_s"] is not None
        and verdict["refusal_p99_s"] <= LATE_S
        and verdict["live_max_s"] <= LATE_S
        and not verdict["failed"]
    )
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
