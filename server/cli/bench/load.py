"""Load: prompts of a given length, arrival times, traces, and the run that sends the requests."""

from __future__ import annotations

import asyncio
import csv
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from ..commands import Failure, UsageError
from .client import IDS, WORDS, Ask, Shot, Target

HASH_BLOCK = 512  # tokens of a prompt for each id in a trace's hash_ids


class Prompts:
    """Random prompts from a seed. They share a prefix only where a trace does, so that a prefix cache does not help."""

    def __init__(self, target: Target, seed: int, words: Sequence[str] = ()) -> None:
        """`words`: each exactly one token of the model, for servers that accept only text."""
        self.target = target
        self.seed = seed
        self.words = words
        self.words_per_token = 1.0 if words else target.words_per_token
        self._made = 0

    def ask(self, input_len: int, output_len: int, *, at: float = 0.0, key: str | None = None) -> Ask:
        """Return a request of these lengths. Equal keys give equal prompts; without a key the prompt is new."""
        self._made += 1
        return Ask(self._text([(key or f"#{self._made}", input_len)]), input_len, output_len, at)

    def shared(self, input_len: int, output_len: int, prefix: str, prefix_len: int, *, key: str | None = None) -> Ask:
        """Return a request: equal prefixes give equal first `prefix_len` tokens, and equal keys an equal rest."""
        self._made += 1
        pieces = [(prefix, prefix_len), (key or f"#{self._made}", input_len - prefix_len)]
        return Ask(self._text(pieces), input_len, output_len)

    def traced(self, arrival: Arrival) -> Ask:
        """Return a request of a trace; equal hash ids give equal tokens."""
        if not arrival.blocks:
            return self.ask(arrival.input_len, arrival.output_len, at=arrival.at)
        self._made += 1
        pieces, left = [], arrival.input_len
        for block in arrival.blocks:
            size = min(left, max(1, arrival.block_len))
            pieces.append((f"block {block}", size))
            left -= size
        pieces.append((f"#{self._made}", left))
        return Ask(self._text(pieces), arrival.input_len, arrival.output_len, arrival.at)

    def _text(self, pieces: Sequence[tuple[str, int]]) -> str | list[int]:
        """Return a prompt of pieces (key, tokens); each depends on its key alone."""
        if self.target.takes_ids:
            return [token for key, size in pieces for token in self._rng(key).choices(IDS, k=size)]
        pool = self.words or WORDS
        sizes = [(key, round(size * self.words_per_token)) for key, size in pieces]
        words = [word for key, size in sizes for word in self._rng(key).choices(pool, k=size)]
        return ("" if self.words else " ").join(words) or pool[0]

    def _rng(self, key: str) -> random.Random:
        return random.Random(f"{self.seed}/{key}")


@dataclass(frozen=True, slots=True)
class Arrival:
    """An entry of a trace. Times are seconds since its start, lengths are tokens."""

    at: float
    input_len: int
    output_len: int
    blocks: tuple[int, ...] = ()  # hash ids: equal leading ones are an equal prefix
    block_len: int = HASH_BLOCK
    is_cut: bool = False  # its lengths did not fit the server


def poisson(rate: float, count: int, seed: int) -> list[float]:
    """Return the arrival times of a Poisson process of `rate` requests per second."""
    rng, at, times = random.Random(f"{seed}/arrivals"), 0.0, []
    for _ in range(count):
        at += rng.expovariate(rate)
        times.append(at)
    return times


def fixed(rate: float, count: int) -> list[float]:
    """Return arrival times at equal intervals, from 0."""
    return [index / rate for index in range(count)]


def read_trace(path: Path, count: int | None) -> list[Arrival]:
    """Return the first `count` arrivals of a trace in Azure's CSV or Mooncake's JSON lines. Raises UsageError."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            first = file.readline()
            file.seek(0)
            parse = _mooncake if first.lstrip().startswith("{") else _azure
            arrivals: list[Arrival] = []
            for number, arrival in enumerate(parse(file), 1):
                if min(arrival.input_len, arrival.output_len) < 1:
                    raise ValueError(f"request {number} has a length below 1")
                if arrivals and arrival.at < arrivals[-1].at:
                    raise ValueError(f"request {number} is earlier than the one before it")
                arrivals.append(arrival)
                if number == count:
                    break
    except OSError as error:
        raise UsageError(f"--trace {path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, csv.Error) as error:
        what = f"there is no {error}" if isinstance(error, KeyError) else error
        raise UsageError(f"--trace {path} is not a trace: {what}") from None
    if not arrivals:
        raise UsageError(f"--trace {path} has no requests")
    start = arrivals[0].at
    return [replace(arrival, at=arrival.at - start) for arrival in arrivals]


def _azure(file: Iterator[str]) -> Iterator[Arrival]:
    for row in csv.DictReader(file):
        # It has seven digits of a second, and Python parses six.
        at = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
        yield Arrival(at, int(row["ContextTokens"]), int(row["GeneratedTokens"]))


def _mooncake(file: Iterator[str]) -> Iterator[Arrival]:
    for line in file:
        row = json.loads(line)
        blocks = tuple(int(block) for block in row.get("hash_ids") or ())
        yield Arrival(float(row["timestamp"]) / 1000, int(row["input_length"]), int(row["output_length"]), blocks)


def scaled(arrivals: Sequence[Arrival], time_scale: float, length_scale: float, max_len: int | None) -> list[Arrival]:
    """Return a trace with scaled times and lengths; a request has at most `max_len` tokens, half of them output."""
    done = []
    for arrival in arrivals:
        lengths = input_len, output_len = [
            max(1, round(length * length_scale)) for length in (arrival.input_len, arrival.output_len)
        ]
        if max_len is not None:
            output_len = min(output_len, max_len // 2)
            input_len = min(input_len, max_len - output_len)
        block_len = max(1, round(HASH_BLOCK * length_scale))
        is_cut = [input_len, output_len] != lengths
        done.append(Arrival(arrival.at * time_scale, input_len, output_len, arrival.blocks, block_len, is_cut))
    return done


@dataclass(slots=True, eq=False)
class Run:
    """The results of requests that were sent together."""

    shots: list[Shot]
    wall: float  # seconds from the first request to the end of the last

    def complete(self) -> Run:
        """Return this run. Raises Failure if a request failed."""
        if errors := [shot.error for shot in self.shots if shot.error is not None]:
            raise Failure(f"{len(errors)} of {len(self.shots)} requests failed: {errors[0]}")
        return self


async def run(
    target: Target,
    asks: Sequence[Ask],
    concurrency: int | None = None,
    on_done: Callable[[], None] = lambda: None,
    died: Callable[[], str | None] = lambda: None,
) -> Run:
    """Send every request at its time, at most `concurrency` at once, and wait for all.

    A failed request has an error in its result. Raises Failure if the server is gone; `died()` returns the reason, if
    it is known.
    """
    slots = asyncio.Semaphore(concurrency or len(asks) or 1)
    began = time.perf_counter()
    gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def one(ask: Ask) -> Shot:
        await asyncio.sleep(max(0.0, ask.at - (time.perf_counter() - began)))
        async with slots:
            shot = await target.send(ask, began)
        if shot.broken and not await target.is_alive() and not gone.done():
            gone.set_result(None)
        on_done()
        return shot

    tasks = [asyncio.create_task(one(ask)) for ask in asks]
    everything = asyncio.gather(*tasks)
    try:
        ends: list[asyncio.Future[Any]] = [everything, gone]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if gone.done():
            ended = [task for task in tasks if task.done() and not task.cancelled() and task.exception() is None]
            good = sum(task.result().ok for task in ended)
            why = died() or "it no longer responds"
            raise Failure(f"the server died after {good} of {len(asks)} responses: {why}")
        shots = everything.result()
    finally:
        gone.cancel()
        everything.cancel()
        await asyncio.gather(everything, *tasks, return_exceptions=True)  # also of tasks that failed meanwhile
    return Run(shots, max(shot.done for shot in shots) - min(shot.sent for shot in shots))
