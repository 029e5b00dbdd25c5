"""Sessions: a server to measure, with a client and prompts."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import platform
import random
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..commands import Failure, UsageError, settings_from
from ..commands.serve import raise_open_files
from ..machine import cpu_facts
from .client import Ask, Target, connect
from .figures import notes, outcome, spread, summarize
from .load import Prompts, Run, run
from .processes import Child, flags, peak_bytes, pequod, variables
from .show import Result
from .steps import Step, StepLog

if TYPE_CHECKING:
    from rich.progress import Progress


START_S = 3600.0  # a large model is first downloaded
LOGGED_S = 0.1  # the server's thread may write a step to the log after the response that it belongs to
LATE_S = 30.0  # the limit of that; a step whose line the server had to drop never comes


class Session:
    """A server that is measured; `opened` creates it."""

    def __init__(self, target: Target, child: Child | None, seed: int, progress: Progress) -> None:
        self.target = target
        self.child = child  # None: the server was not started here, and its memory and steps cannot be read
        self.seed = seed
        self.prompts = Prompts(target, seed)
        self.progress = progress
        self.failure: str | None = None  # why the measurement ended early: the server is gone
        self._steps = StepLog(child.folder / "steps.jsonl") if child is not None else None
        self._received = 0  # output tokens since the last call of `steps`

    async def send(self, asks: Sequence[Ask], concurrency: int | None = None, label: str = "requests") -> Run:
        """Send requests and show their progress."""
        task = self.progress.add_task(label, total=len(asks))
        try:
            sent = await run(
                self.target, asks, concurrency, on_done=lambda: self.progress.advance(task), died=self._died
            )
            self._received += sum(shot.tokens for shot in sent.shots)
            return sent
        finally:
            self.progress.remove_task(task)

    async def steps(self) -> list[Step]:
        """Return the engine's steps since the last call; none of a server that was not started here."""
        if self._steps is None:
            return []
        steps: list[Step] = []
        late = time.monotonic() + LATE_S
        while True:
            await asyncio.sleep(LOGGED_S)
            steps += self._steps.read()
            if sum(step.output_tokens for step in steps) >= self._received or time.monotonic() > late:
                self._received = 0
                return steps

    def peak_bytes(self) -> int | None:
        """Return the peak memory of the server's processes; None if it is not known."""
        return peak_bytes(self.child.pid) if self.child is not None else None

    def lengths(self, arguments: argparse.Namespace) -> tuple[int, int]:
        """Return the tokens of a prompt and of its output. Raises UsageError if they do not fit the model."""
        lengths = arguments.input_len, arguments.output_len
        if self.target.max_len is not None and (total := sum(lengths)) > self.target.max_len:
            raise UsageError(f"{total} tokens of prompt and output are more than the server's {self.target.max_len}")
        return lengths

    def result(self, bench: str, workload: dict[str, Any], runs: Sequence[Run]) -> Result:
        """Return the result of these runs for JSON."""
        shots = [shot for each in runs for shot in each.shots]
        return {
            "bench": bench,
            **self.about(),
            "workload": workload,
            **outcome(shots),
            "failure": self.failure,
            "figures": spread([summarize(each) for each in runs]),
            "peak_bytes": self.peak_bytes(),
            "notes": notes(self.target, shots),
            "requests": [[shot.record() for shot in each.shots] for each in runs],
        }

    def about(self) -> dict[str, Any]:
        """Return facts about the server and the machine for the result."""
        return {
            "server": {
                "name": self.target.name,
                "model": self.target.model,
                "api": self.target.api,
                "command": self.child.command if self.child is not None else None,
                "version": self.target.version,
            },
            "machine": machine(),
            "seed": self.seed,
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }

    def _died(self) -> str | None:
        if self.child is None:
            return None
        with contextlib.suppress(Exception):
            self.child.process.wait(1)
        return self.child.died() if self.child.process.poll() is not None else None


def machine() -> dict[str, Any]:
    name, _, cores = cpu_facts()
    return {"processor": name, "cores": cores, "python": platform.python_version(), "system": platform.platform()}


@contextlib.asynccontextmanager
async def opened(arguments: argparse.Namespace) -> AsyncIterator[Session]:
    """Use the server at --url, or a Pequod that runs until the block ends."""
    loaded = settings_from(arguments)
    values = loaded.settings
    raise_open_files()  # each request has a connection
    async with contextlib.AsyncExitStack() as stack:
        progress = stack.enter_context(bar())
        if arguments.url is not None:
            url, child = arguments.url, None
            model = None if loaded.sources["model"] == "default" else values.model
            # A new seed each time: the server may have cached the prompts of an earlier measurement.
            seed = random.randrange(2**31) if values.seed is None else values.seed
        else:
            child = pequod(values.model, flags(loaded), variables(loaded))
            stack.callback(child.stop)
            task = progress.add_task(f"starting {values.model}", total=None)
            await child.ready(START_S)
            await child.quiet()
            progress.remove_task(task)
            url, model, seed = child.url, values.names[0], values.seed or 0
        target = await connect(url, model, values.first_key, arguments.api, is_own=child is not None)
        stack.push_async_callback(target.http.aclose)
        yield Session(target, child, seed, progress)


def bar() -> Progress:
    """Return a progress bar on stderr, if that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(
        *columns,
        console=Console(file=sys.stderr),
        transient=True,
        disable=not sys.stderr.isatty(),
        refresh_per_second=4,
    )


async def rounds(
    session: Session,
    arguments: argparse.Namespace,
    asks: Callable[[], Sequence[Ask]],
    concurrency: int | None,
    warmup: Callable[[], Sequence[Ask]] | None = None,
) -> list[Run]:
    """Return the measured repetitions of a case; those of the warm-up, and their steps, are discarded.

    If the server is gone, `session.failure` has the reason, and the repetitions before it are returned.
    """
    runs: list[Run] = []
    try:
        for _ in range(arguments.warmup):
            await session.send((warmup or asks)(), concurrency, "warm-up")
        await session.steps()
        for number in range(arguments.rounds):
            done = await session.send(asks(), concurrency, f"round {number + 1} of {arguments.rounds}")
            runs.append(done)
    except Failure as error:
        session.failure = str(error)
    return runs
