"""Measure the time per token of an engine while other processes compete for its processors.

    python -m benchmarks.busy MODEL --competitors 0,4,16 --json benchmarks/results/busy.json

Starts an engine and, for each level, that many processes that only use CPU time, while one request generates tokens.
Each round measures all levels, so that a change of the machine's speed affects all of them, and medians over the rounds
are reported.

The scheduler gives every runnable thread the same share of the processors: of C processors, T threads of the engine
beside K competitors get T C / (T + K). The fair ratio is the time per token that this share allows, as a multiple of
the quiet time: (T + K) / C, and at least 1. It only counts the engine's computing threads. The exit status is 1 if a
level took more than LIMIT times its fair ratio.

The fair ratio assumes that every thread always has work. A thread that waits for another does not claim its share, so
the CPU time that the engine uses per token is reported too: if it does not rise with the number of competitors, no CPU
time is lost by waiting for each other.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine import EngineConfig, EngineError, EngineRequest, ProcessEngine, SamplingParams
from server.cli.bench.processes import cpu_seconds
from server.cli.bench.session import machine

# Prints a line when it runs, and ends when this process has died.
COMPETITOR = """
import os, sys
print(flush=True)
while os.getppid() == int(sys.argv[1]):
    for _ in range(1_000_000): pass
"""
PROMPT_TOKENS, WARM_TOKENS = 32, 8
LIMIT = 1.5  # times the fair ratio: threads that wait for each other also lose the rest of their time slices


@contextlib.contextmanager
def competitors(count: int) -> Iterator[None]:
    """Run `count` processes that use all CPU time they get, until the block is left."""
    command = [sys.executable, "-S", "-c", COMPETITOR, str(os.getpid())]
    running: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(count):
            # In this process's session: Linux may share CPU time among sessions before it does among threads.
            running.append(subprocess.Popen(command, stdout=subprocess.PIPE))
        for each in running:
            assert each.stdout is not None
            each.stdout.readline()
        yield
    finally:
        for each in running:
            each.kill()
        for each in running:
            each.communicate()


async def seconds_per_token(engine: ProcessEngine, number: int, tokens: int) -> tuple[float, float]:
    """Return the mean seconds per token, and the engine's CPU time in it, over `tokens` tokens after the first few."""
    prompt = tuple(range(1 + number, 1 + number + PROMPT_TOKENS))
    params = SamplingParams(max_tokens=WARM_TOKENS + tokens, temperature=0.0)
    seen, start, first, last, cpu = 0, 0.0, 0, 0.0, 0.0
    assert engine.pid is not None
    async for delta in engine.generate(EngineRequest(id=number, prompt_ids=prompt, params=params)):
        if delta.error is not None:
            raise EngineError(delta.error)
        if not delta.token_ids:
            continue
        seen, last = seen + len(delta.token_ids), time.perf_counter()
        if not first and seen >= WARM_TOKENS:
            first, start, cpu = seen, last, cpu_seconds(engine.pid)
    return (last - start) / (seen - first), (cpu_seconds(engine.pid) - cpu) / (seen - first)


async def measure(
    config: EngineConfig, levels: list[int], rounds: int, tokens: int
) -> dict[int, list[tuple[float, float]]]:
    """Return the seconds and CPU seconds per token of each round, by the number of competitors."""
    found: dict[int, list[tuple[float, float]]] = {level: [] for level in levels}
    numbers = itertools.count(1)
    engine = ProcessEngine(config)
    await engine.start()
    try:
        await engine.ready()
        await seconds_per_token(engine, next(numbers), tokens)  # warms up
        for number in range(rounds):
            for level in levels:
                with competitors(level):
                    found[level].append(await seconds_per_token(engine, next(numbers), tokens))
                print(f"round {number + 1}, {level} competitors: {found[level][-1][0] * 1e3:.2f} ms", file=sys.stderr)
    finally:
        await engine.close()
    return found


def judged(found: dict[int, list[tuple[float, float]]], threads: int, cores: int) -> list[dict[str, Any]]:
    """Return a row per level: the median times, the ratio to the quiet time, and the ratio that is fair."""
    quiet = statistics.median(seconds for seconds, _ in found[0])
    rows = []
    for level, rounds in found.items():
        seconds, cpu = (list(column) for column in zip(*rounds, strict=True))
        ratio, fair = statistics.median(seconds) / quiet, max(1.0, (threads + level) / cores)
        row = {"competitors": level, "seconds_per_token": statistics.median(seconds), "ratio": ratio}
        row["cpu_seconds_per_token"] = statistics.median(cpu)
        rows.append({**row, "fair_ratio": fair, "of_fair": ratio / fair, "rounds": seconds})
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as text."""
    lines = [
        f"{'competitors':>11}  {'ms/token':>9}  {'to quiet':>8}  {'fair':>5}  {'of fair':>7}  {'CPU ms/token':>12}"
    ]
    for row in rows:
        lines.append(
            f"{row['competitors']:11d}  {row['seconds_per_token'] * 1e3:9.2f}  {row['ratio']:8.2f}  "
            f"{row['fair_ratio']:5.2f}  {row['of_fair']:7.2f}  {row['cpu_seconds_per_token'] * 1e3:12.2f}"
        )
    return "\n".join(lines)


def counts(text: str) -> list[int]:
    """Parse comma-separated integers; 0, the quiet machine, is always included."""
    return list(dict.fromkeys([0, *(int(part) for part in text.split(","))]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", help="folder or hub id of the model")
    parser.add_argument("--competitors", type=counts, default=[0, 4, 16], metavar="N,...", help="default: 0,4,16")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, help="of the engine (default: one per processor)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64, help="generated in each measurement (default: 64)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result to this file")
    given = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    if min(given.competitors) < 0 or min(given.rounds, given.tokens, given.threads or 1) < 1:
        parser.error("counts of competitors start at 0, all other numbers at 1")
    threads = given.threads or cores
    config = EngineConfig(model=given.model, device="cpu", dtype=given.dtype, threads=threads, max_seqs=1)
    try:
        found = asyncio.run(measure(config, given.competitors, given.rounds, given.tokens))
    except EngineError as error:
        print(error, file=sys.stderr)
        return 2
    rows = judged(found, threads, cores)
    print(table(rows))
    if given.json:
        result = {
            "machine": machine(),
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "model": Path(given.model).name,
            "dtype": given.dtype,
            "threads": threads,
            "tokens": given.tokens,
            "of_fair_must_be_at_most": LIMIT,
            "levels": rows,
        }
        given.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if all(row["of_fair"] <= LIMIT for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
