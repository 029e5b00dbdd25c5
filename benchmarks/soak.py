"""Checks that a server's resources do not grow: sends mixed requests in rounds, and counts resources between them.

    python -m benchmarks.soak --json benchmarks/results/soak.json

A round is ROUND_S of requests to every API from eight concurrent clients: streams and complete responses, schemas and
tools that are new each time, embeddings, stored and background responses, refusals of every status, and abandoned
streams. Then all connections are closed, and when the server is idle its memory, descriptors, threads, asyncio tasks
and time series are counted. The first half of the rounds is a warm-up, in which caches and pools reach their bounds.

`growth` is the Theil-Sen slope after the warm-up, times its duration, relative to the median; it must be at most 1 %
for the resident memory of each process. The minimum of each count must not rise. `slope_kib_per_minute` has a 95 %
confidence interval.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
import os
import pathlib
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import httpx

from tests.live import Server

from .traffic import Failed, Request, about, children, events, generating, samples, write
from .watched import TASKS_FILE

ROUND_S = 10.0
CLIENTS = 8
KEYS = ("soak-one", "soak-two")
GROWTH = 0.01
# Caches and stores reach these bounds during the warm-up, so that nothing may grow afterwards.
FLAGS = ("--dtype", "float32", "--num-gpu-blocks-override", "400", "--max-stored-responses", "100")
COUNTS = ("descriptors", "threads", "tasks", "series", "processes")


def requests(rng: random.Random) -> list[Request]:
    """Return one request of each kind; anything that a server might cache, such as a schema or a name, is new."""
    seed = rng.randrange(10**9)
    ask = {"messages": [{"role": "user", "content": f"What is {seed} plus 5?"}], "max_tokens": 16}
    schema = {"type": "object", "properties": {f"name{seed}": {"type": "integer"}}, "required": [f"name{seed}"]}
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    function = {"type": "function", "function": {"name": f"f{seed}", "parameters": schema}}
    chat, completions = "/v1/chat/completions", "/v1/completions"
    return [
        *generating(64, seed),
        Request("whole chat", chat, ask),
        Request("whole schema", chat, {**ask, "response_format": form}),
        Request("whole call", chat, {**ask, "tools": [function], "tool_choice": "required"}),
        Request("whole completion", completions, {"prompt": f"{seed}", "max_tokens": 16, "logprobs": 2, "n": 2}),
        Request("whole message", "/v1/messages", ask),
        Request("stored response", "/v1/responses", {"input": f"{seed}", "max_output_tokens": 16}),
        Request(
            "background response", "/v1/responses", {"input": f"{seed}", "max_output_tokens": 16, "background": True}
        ),
        Request("embeddings", "/v1/embeddings", {"input": [f"{seed} {n}" for n in range(4)]}),
        Request("tokenize", "/tokenize", {"prompt": f"{seed} whales"}),
        Request("tokens counted", "/v1/messages/count_tokens", {"messages": ask["messages"]}),
        Request("unknown field", chat, {**ask, f"field{seed}": 1}, (400,)),
        Request("bad value", completions, {"prompt": "a", "temperature": -seed}, (400,)),
        Request("bad schema", chat, {**ask, "response_format": {"type": "json_schema", "json_schema": {
            "name": "a", "schema": {"type": f"type{seed}"}}}}, (400,)),
        Request("unknown model", chat, {**ask, "model": f"model{seed}"}, (404,)),
        Request("unknown path", f"/v1/path{seed}", {}, (404,)),
        Request("unknown response", f"/v1/responses/resp_{seed}/cancel", {}, (404,)),
    ]  # fmt: skip


class Load:
    """Clients that send requests until the round ends."""

    def __init__(self, server: Server, seed: int) -> None:
        self.server = server
        self.rng = random.Random(seed)
        self.sent: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()

    async def round(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        async with asyncio.TaskGroup() as clients:
            for number in range(CLIENTS):
                clients.create_task(self._client(KEYS[number % len(KEYS)], end))

    async def _client(self, key: str, end: float) -> None:
        headers = {"Authorization": f"Bearer {key}"}
        async with httpx.AsyncClient(base_url=self.server.url, headers=headers, timeout=120) as client:
            async for request in self._until(end):
                self.sent[request.name] += 1
                try:
                    await self._send(client, request)
                except (Failed, httpx.HTTPError) as problem:
                    self.failed[f"{request.name}: {type(problem).__name__} {problem}"[:300]] += 1

    async def _until(self, end: float) -> AsyncIterator[Request]:
        while True:
            for request in self.rng.sample(all_kinds := requests(self.rng), len(all_kinds)):
                if time.monotonic() >= end:
                    return
                yield request

    async def _send(self, client: httpx.AsyncClient, request: Request) -> None:
        if request.body.get("stream"):
            leaves = self.rng.random() < 0.3  # abandons the stream
            most = self.rng.randrange(1, 40) if leaves else None
            stream = events(client, request)
            try:
                count = 0
                async for _ in stream:
                    count += 1
                    if count == most:
                        break
            finally:
                await stream.aclose()
            return
        answer = await client.post(request.path, json=request.body)
        if answer.status_code not in request.statuses:
            raise Failed(f"{answer.status_code}: {answer.text[:200]}")
        if request.name == "embeddings":  # some requests have no key
            wrong = await client.get("/v1/models", headers={"Authorization": f"Bearer {self.rng.random()}"})
            if wrong.status_code != 401:
                raise Failed(f"{wrong.status_code} for a wrong key")


async def sample(server: Server, tasks_file: pathlib.Path) -> dict[str, Any]:
    """Return the idle server's resources."""
    headers = {"Authorization": f"Bearer {KEYS[0]}"}
    async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=120) as client:
        for _ in range(200):
            found = samples((await client.get("/metrics")).text)
            busy = sum(v for k, v in found.items() if k.startswith("vllm:num_requests_"))
            held = found['pequod:kv_blocks{state="held"}']
            if not busy and not held:
                break
            await asyncio.sleep(0.1)
        tasks_file.unlink(missing_ok=True)
        server.process.send_signal(signal.SIGUSR1)
        while not tasks_file.exists():
            await asyncio.sleep(0.02)
    pids = children(server.process.pid)
    return {
        "resident_kib": {name: resident_kib(pid) for name, pid in pids.items()},
        "descriptors": sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids.values()),
        "threads": sum(len(os.listdir(f"/proc/{pid}/task")) for pid in pids.values()),
        "processes": len(pids),
        "tasks": int(tasks_file.read_text()),
        "series": len(found),
        "held_blocks": held,
    }


def resident_kib(pid: int) -> int:
    return int(pathlib.Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024


def slope(points: list[tuple[float, float]]) -> tuple[float, float, float]:
    """Return the Theil-Sen slope, and its 95 % confidence interval by Kendall's variance."""
    slopes = sorted((b - a) / (t - s) for (s, a), (t, b) in itertools.combinations(points, 2))
    count = len(points)
    spread = 1.96 * math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    low = max(0, round((len(slopes) - spread) / 2))
    high = min(len(slopes) - 1, round((len(slopes) + spread) / 2))
    return statistics.median(slopes), slopes[low], slopes[high]


def judge(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the growth of each resource after the warm-up."""
    kept = rounds[len(rounds) // 2 :]
    first, last = kept[0]["at_s"], kept[-1]["at_s"]
    memory = {}
    for name in kept[0]["resident_kib"]:
        points = [(each["at_s"], float(each["resident_kib"][name])) for each in kept]
        middle, low, high = slope(points)
        memory[name] = {
            "resident_kib": statistics.median(value for _, value in points),
            "growth": middle * (last - first) / statistics.median(value for _, value in points),
            "growth_must_be_at_most": GROWTH,
            "slope_kib_per_minute": middle * 60,
            "interval": [low * 60, high * 60],
        }
    counts = {name: [each[name] for each in kept] for name in COUNTS}
    return {"seconds_judged": last - first, "memory": memory, "counts": counts}


def grown(found: dict[str, Any]) -> list[str]:
    """Return the limits that are exceeded."""
    faults = [name for name, each in found["memory"].items() if each["growth"] > GROWTH]
    # A count may include resources that are about to be freed, but a leak also raises the minimum.
    halves = {
        name: (values[: len(values) // 2], values[len(values) // 2 :]) for name, values in found["counts"].items()
    }
    return faults + [name for name, (before, after) in halves.items() if min(after) > min(before)]


async def measure(server: Server, tasks_file: pathlib.Path, seconds: float, round_s: float, seed: int) -> Any:
    load, rounds = Load(server, seed), []
    began = time.monotonic()
    while (elapsed := time.monotonic() - began) < seconds or len(rounds) < 3:
        await load.round(round_s)
        elapsed = time.monotonic() - began
        rounds.append({"at_s": round(elapsed, 1), **await sample(server, tasks_file)})
    return load, rounds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--round", type=float, default=ROUND_S, help="duration of a round in seconds")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tasks_file = pathlib.Path(folder) / "tasks"
        environment = {TASKS_FILE: str(tasks_file), "PEQUOD_API_KEY": ",".join(KEYS)}
        with Server(args.model, *FLAGS, env=environment, module="benchmarks.watched") as server:
            load, rounds = asyncio.run(measure(server, tasks_file, args.seconds, args.round, args.seed))
            if load.failed:
                print(server.log[-2000:], file=sys.stderr)
    verdict = judge(rounds)
    found = {
        **about(),
        "requests": load.sent.total(),
        "by_kind": dict(sorted(load.sent.items())),
        "failed": dict(load.failed),
        **verdict,
        "grown": grown(verdict),
        "rounds": rounds,
    }
    for name, each in verdict["memory"].items():
        low, high = each["interval"]
        print(
            f"{name:24} {each['resident_kib'] / 1024:8.1f} MiB, growth {each['growth']:+.2%}, "
            f"{each['slope_kib_per_minute']:+.0f} KiB a minute ({low:+.0f} to {high:+.0f})"
        )
    for name, values in verdict["counts"].items():
        print(f"{name:24} {min(values):g} to {max(values):g}, at the end {values[-1]:g}")
    print(
        f"{found['requests']} requests, {load.failed.total()} failed; grown: {', '.join(found['grown']) or 'nothing'}"
    )
    for problem, count in load.failed.items():
        print(f"  FAILED {count} times: {problem}")
    write(found, args.json)
    return 1 if load.failed or found["grown"] else 0


if __name__ == "__main__":
    sys.exit(main())
