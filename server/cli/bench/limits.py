"""Measures the machine's limits for a model, in a child process, because that imports torch."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Sequence
from statistics import median
from typing import TYPE_CHECKING

from ...child import child_environment
from ...settings import with_flags
from ..commands import Failure

if TYPE_CHECKING:
    from engine import Roofline

    from ...settings import Settings


RATES = ("bytes_per_s", "flops_per_s", "pair_flops_per_s")


def middle(seen: Sequence[Roofline]) -> Roofline:
    """Return the limits with the median of each rate, since the rates of a shared machine change all the time."""
    from msgspec.structs import replace

    return replace(seen[0], **{rate: median(getattr(each, rate) for each in seen) for rate in RATES})


class Probe:
    """Measures the machine on request; between requests it uses no CPU time."""

    def __init__(self, process: asyncio.subprocess.Process, dtype: str) -> None:
        self._process = process
        self.dtype = dtype
        self.seen: list[Roofline] = []

    async def measure(self) -> Roofline:
        """Return the current limits."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        found, _ = await _line(self._process)
        self.seen.append(found)
        return found


@contextlib.asynccontextmanager
async def probe(settings: Settings) -> AsyncIterator[Probe]:
    """Start a probe for the model of these settings. Raises Failure if the work of the model's steps is not known."""
    import msgspec

    config = msgspec.json.encode(settings.engine_config()).decode()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "engine.bench.roofline", "--json", config),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env=child_environment(),
    )
    try:
        first, dtype = await _line(process)
        found = Probe(process, dtype)
        found.seen.append(first)
        yield found
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _line(process: asyncio.subprocess.Process) -> tuple[Roofline, str]:
    from engine import Roofline

    assert process.stdout is not None
    line = await process.stdout.readline()
    try:
        found = json.loads(line)
    except ValueError:
        raise Failure("the machine's limits could not be measured: `python -m engine.bench.roofline` failed") from None
    if "error" in found:
        raise Failure(f"the machine's limits are not known: {with_flags(found['error'])}")
    return Roofline(**{name: found[name] for name in Roofline.__struct_fields__}), found["dtype"]


@contextlib.asynccontextmanager
async def probe_where_known(settings: Settings) -> AsyncIterator[Probe | None]:
    """Start a probe, or return None if the limits are not known."""
    async with contextlib.AsyncExitStack() as stack:
        found = None
        with contextlib.suppress(Failure):
            found = await stack.enter_async_context(probe(settings))
        yield found
