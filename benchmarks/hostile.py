"""Measures the cost of hostile requests: the time to each refusal, and a concurrent stream's inter-token latency.

    python -m benchmarks.hostile --json /tmp/hostile.json

The rows are those of tests/server/http/hostile.py. For BODIES there are two limits. Every refusal must start within
100 ms of its row's last byte, as the median of the rounds. That byte is held back until the server has read all others;
the time runs from it to the response's first byte, on a separate connection without other load (0: the response came
before the last byte). And the stream's ITL p95 must be at most 1.5 times its value without hostile requests, measured
alternately in one run; there each row is sent at once.

LONG_TEXTS, which need PEQUOD_TEST_DATA, are tokenized before they are refused, which takes longer. Meanwhile a request
for /health must be answered within 100 ms.

A row with another response than its refusal, or none, has failed and is listed by name.

A shared machine may be several times slower for a while. Then the medians include its delays, and the minimum of each
row's times is closer to the cost of the refusal (`always_late`: rows whose minimum is too long). `same_work_s` are the
5th to 95th percentiles of a fixed piece of work in this process, timed before each row.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time
import timeit
from collections.abc import Awaitable, Callable
from typing import Any

import httpx

from tests.live import Server
from tests.server.http.hostile import BODIES, LONG_TEXTS, Body, long_context_model

LONG = {"prompt": "Once upon a time", "max_tokens": 300, "ignore_eos": True, "seed": 7, "stream": True}
PAUSE_S = 0.05  # between two hostile requests, as from one client
HOLD_S = 0.3  # before the last byte; reading 8 MB takes a third of it
ANSWER_S = 60.0
RATIO, REFUSAL_S, DELAY_S = 1.5, 0.1, 0.1  # the limits
POLL_S = 0.01  # between requests for /health
SAME_WORK = "sum(range(300_000))"


class Client:
    """Sends the rows one after another, each on a new socket."""

    def __init__(self, port: int, rows: list[Body]) -> None:
        self.port = port
        self.failed: dict[str, str] = {}  # by row name
        # Encoded before anything is timed, because this process also reads the concurrent stream.
        self._contents = {row.name: row.content for row in rows}

    async def send(self, row: Body, hold_s: float = 0.0) -> float | None:
        """Return the seconds from the row's last byte to the response's first; None if it failed."""
        try:
            async with asyncio.timeout(ANSWER_S):
                seconds, status, error = await self._send(row, hold_s)
        except Exception as problem:
            self.failed[row.name] = f"{type(problem).__name__}: {problem}"
            return None
        if (status, error.get("param")) != (row.status, row.param):
            self.failed[row.name] = f"{status}: {json.dumps(error)[:200]}"
            return None
        return seconds

    async def _send(self, row: Body, hold_s: float) -> tuple[float, int, dict[str, Any]]:
        content = self._contents[row.name]
        headers = {"Host": "localhost", "Content-Type": "application/json", "Content-Length": str(len(content))}
        lines = [f"POST {row.path} HTTP/1.1", *(f"{name}: {value}" for name, value in (headers | row.headers).items())]
        sent = "\r\n".join([*lines, "", ""]).encode() + content
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        reading = asyncio.create_task(read_answer(reader))
        with contextlib.suppress(ConnectionError):  # an early response is still read
            writer.write(sent[:-1])
            await writer.drain()
            await asyncio.sleep(hold_s)
            writer.write(sent[-1:])
        last = time.perf_counter()
        try:
            first, status, body = await reading
        finally:
            writer.close()
        return max(0.0, first - last), status, json.loads(body)["error"]


async def read_answer(reader: asyncio.StreamReader) -> tuple[float, int, bytes]:
    """Return the time of the response's first byte, its status and its body."""
    begun = await reader.readexactly(1)
    first = time.perf_counter()
    head = begun + await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
    return first, int(head.split()[1]), await reader.readexactly(length)


async def gaps(client: httpx.AsyncClient, until: asyncio.Event) -> list[float]:
    """Return the seconds between chunks of successive streams, until the event is set."""
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


async def beside(client: httpx.AsyncClient, work: Callable[[], Awaitable[Any]]) -> list[float]:
    """Return the gaps of a stream while `work` runs."""
    over = asyncio.Event()
    reading = asyncio.create_task(gaps(client, over))
    try:
        await work()
    finally:
        over.set()
    return await reading


def p95(values: list[float]) -> float:
    return statistics.quantiles(values, n=20)[-1]


async def measure(server: Server, rounds: int) -> dict[str, Any]:
    hostile = Client(server.port, BODIES)

    async def send_all() -> None:
        for row in BODIES:
            await hostile.send(row)
            await asyncio.sleep(PAUSE_S)

    ratios, calm_s, busy_s = [], [], []
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
        await send_all()  # a warm-up
        for _ in range(rounds):
            began = time.perf_counter()
            busy = p95(await beside(client, send_all))
            seconds = time.perf_counter() - began
            calm = p95(await beside(client, lambda seconds=seconds: asyncio.sleep(seconds)))
            calm_s.append(calm)
            busy_s.append(busy)
            ratios.append(busy / calm)
    alone: dict[str, list[float]] = {}
    same_work_s = []
    for _ in range(rounds):
        for row in BODIES:
            same_work_s.append(timeit.timeit(SAME_WORK, number=1))
            if (seconds := await hostile.send(row, HOLD_S)) is not None:
                alone.setdefault(row.name, []).append(seconds)
    slowest = sorted(((statistics.median(each), name) for name, each in alone.items()), reverse=True)
    return {
        "rounds": rounds,
        "itl_p95_s": {"calm": calm_s, "beside": busy_s},
        "ratio": statistics.median(ratios),
        "ratio_must_be_at_most": RATIO,
        "refusal_s": {name: seconds for seconds, name in slowest},
        "refusal_least_s": {name: min(alone[name]) for _, name in slowest},
        "refusal_must_be_at_most_s": REFUSAL_S,
        "late": sum(seconds > REFUSAL_S for seconds, _ in slowest),
        "always_late": sum(min(each) > REFUSAL_S for each in alone.values()),
        "same_work_s": statistics.quantiles(same_work_s, n=20),
        "failed": hostile.failed,
    }


async def delays(server: Server, rounds: int) -> dict[str, Any]:
    """Return, for each of LONG_TEXTS, the median of its rounds' longest times to a response for /health."""
    hostile = Client(server.port, LONG_TEXTS)
    longest: dict[str, list[float]] = {}
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
        for row in LONG_TEXTS * rounds:
            sending = asyncio.create_task(hostile.send(row))
            times = []
            while not sending.done():
                began = time.perf_counter()
                await client.get("/health")
                times.append(time.perf_counter() - began)
                await asyncio.sleep(POLL_S)
            longest.setdefault(row.name, []).append(max(times))
    delay_s = {name: statistics.median(each) for name, each in longest.items()}
    return {"delay_s": delay_s, "delay_must_be_at_most_s": DELAY_S, "failed": hostile.failed}


def measure_long_texts(rounds: int) -> dict[str, Any] | None:
    """Return the delays that LONG_TEXTS cause; None without PEQUOD_TEST_DATA."""
    data = os.environ.get("PEQUOD_TEST_DATA")
    if not data:
        return None
    with tempfile.TemporaryDirectory() as parent:
        model = long_context_model(pathlib.Path(data), pathlib.Path(parent, "model"))
        with Server(str(model), "--load-format", "dummy") as server:
            return asyncio.run(delays(server, rounds))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    with Server() as server:
        found = asyncio.run(measure(server, args.rounds))
    long_texts = measure_long_texts(args.rounds)
    for name, seconds in list(found["refusal_s"].items())[:15]:
        print(f"{seconds * 1000:8.1f} ms  {name}")
    for name, problem in found["failed"].items():
        print(f"  FAILED     {name}: {problem}")
    summary = f"{found['late']} later than 100 ms, {found['always_late']} each time; {len(found['failed'])} failed"
    print(f"{len(BODIES)} rows, {summary}")
    least, most = found["same_work_s"][0] * 1000, found["same_work_s"][-1] * 1000
    print(f"the same work took {least:.1f} to {most:.1f} ms")
    calm, busy = (statistics.median(each) * 1000 for each in found["itl_p95_s"].values())
    print(f"ITL p95 {calm:.1f} ms alone, {busy:.1f} ms beside the table: {found['ratio']:.2f}x")
    is_bad = bool(found["failed"] or found["late"] or found["ratio"] > RATIO)
    if long_texts is None:
        print("long texts: not measured, because PEQUOD_TEST_DATA is not set")
    else:
        for name, seconds in long_texts["delay_s"].items():
            print(f"{seconds * 1000:8.1f} ms  delay of others beside a long text: {name}")
        for name, problem in long_texts["failed"].items():
            print(f"  FAILED     {name}: {problem}")
        is_bad |= bool(long_texts["failed"]) or max(long_texts["delay_s"].values()) > DELAY_S
        found["long_texts"] = long_texts
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return int(is_bad)


if __name__ == "__main__":
    sys.exit(main())
