"""What hostile requests cost: time to each refusal, and the inter-token latency of a bystander's stream meanwhile.

    python -m benchmarks.hostile --json /tmp/hostile.json

The rows are those of tests/server/hostile.py. Two figures are held: every refusal of a row within 100 ms of the row's
last byte, and the bystander's ITL p95 at most 1.5 times what it is without them, taken in turns in one run.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import pathlib
import statistics
import time

import httpx

from tests.live import Server
from tests.server.hostile import BODIES

LONG = {"prompt": "Once upon a time", "max_tokens": 300, "ignore_eos": True, "seed": 7, "stream": True}
PAUSE_S = 0.05  # between two hostile requests: one client's, not a flood


async def gaps(client: httpx.AsyncClient, until: asyncio.Event) -> list[float]:
    """Seconds between the pieces of one stream after the other, until the event comes."""
    found: list[float] = []
    while not until.is_set():
        times: list[float] = []
        async with client.stream("POST", "/v1/completions", json=LONG) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    times.append(time.perf_counter())
                if until.is_set():
                    break
        found += [b - a for a, b in itertools.pairwise(times)]
    return found


async def send_all(client: httpx.AsyncClient, took: dict[str, list[float]]) -> None:
    for row in BODIES:
        content = row.content
        headers = {"Content-Type": "application/json", **row.headers}
        began = time.perf_counter()
        answer = await client.post(row.path, content=content, headers=headers)
        took.setdefault(row.name, []).append(time.perf_counter() - began)
        assert answer.status_code == row.status, (row.name, answer.text[:200])
        await asyncio.sleep(PAUSE_S)


async def beside(client: httpx.AsyncClient, work: asyncio.Future | asyncio.Task) -> list[float]:
    """The gaps of a stream while `work` is done."""
    over = asyncio.Event()
    reading = asyncio.create_task(gaps(client, over))
    await work
    over.set()
    return await reading


def p95(values: list[float]) -> float:
    return statistics.quantiles(values, n=20)[-1]


async def measure(server: Server, rounds: int) -> dict:
    took: dict[str, list[float]] = {}
    ratios, calm_s, busy_s = [], [], []
    # Bodies are made before anything is timed: this process shares the machine with the server.
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
        await send_all(client, {})
        for _ in range(rounds):
            began = time.perf_counter()
            busy = p95(await beside(client, asyncio.ensure_future(send_all(client, took))))
            calm = p95(await beside(client, asyncio.ensure_future(asyncio.sleep(time.perf_counter() - began))))
            calm_s.append(calm)
            busy_s.append(busy)
            ratios.append(busy / calm)
        alone: dict[str, list[float]] = {}
        for _ in range(rounds):
            await send_all(client, alone)
    slowest = sorted(((statistics.median(each), name) for name, each in alone.items()), reverse=True)
    return {
        "itl_p95_s": {"calm": calm_s, "beside": busy_s},
        "ratio": statistics.median(ratios),
        "ratio_must_be_at_most": 1.5,
        "refusal_s": {name: seconds for seconds, name in slowest},
        "refusal_must_be_at_most_s": 0.1,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    with Server() as server:
        found = asyncio.run(measure(server, args.rounds))
    for name, seconds in list(found["refusal_s"].items())[:15]:
        print(f"{seconds * 1000:8.1f} ms  {name}")
    late = sum(seconds > found["refusal_must_be_at_most_s"] for seconds in found["refusal_s"].values())
    print(f"{len(found['refusal_s'])} rows, {late} later than 100 ms")
    calm, busy = (statistics.median(each) * 1000 for each in found["itl_p95_s"].values())
    print(f"ITL p95 {calm:.1f} ms alone, {busy:.1f} ms beside the table: {found['ratio']:.2f}x")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
