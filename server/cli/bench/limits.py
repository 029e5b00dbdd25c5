"""The machine's limit for a model, measured by a child, since that takes torch."""

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
    """The limits of the medians of all rates: a machine that others share gives one from moment to moment."""
    from msgspec.structs import replace

    return replace(seen[0], **{rate: median(getattr(each, rate) for each in seen) for rate in RATES})


class Probe:
    """Measures the machine whenever it is asked; between two questions it costs nothing."""

    def __init__(self, process: asyncio.subprocess.Process, dtype: str) -> None:
        self._process = process
        self.dtype = dtype
        self.seen: list[Roofline] = []

    async def measure(self) -> Roofline:
        """The limits as they are now."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        found, _ = await _line(self._process)
        self.seen.append(found)
        return found


@contextlib.asynccontextmanager
async def probe(settings: Settings) -> AsyncIterator[Probe]:
    """A probe for the model of these settings. Failure when the model's steps have no known limit."""
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
        told = json.loads(line)
    except ValueError:
        raise Failure("the machine's limits could not be measured: `python -m engine.bench.roofline` failed") from None
    if "error" in told:
        raise Failure(f"the machine's limits are not known: {with_flags(told['error'])}")
    fields = {name: told[name] for name in Roofline.__struct_fields__}
    return Roofline(**fields), told["dtype"]


@contextlib.asynccontextmanager
async def probe_where_known(settings: Settings) -> AsyncIterator[Probe | None]:
    """The same, or None where the model's limits are not known."""
    async with contextlib.AsyncExitStack() as stack:
        found = None
        with contextlib.suppress(Failure):
            found = await stack.enter_async_context(probe(settings))
        yield found


async def known(settings: Settings) -> Roofline | None:
    """The limits, measured once; None where the model's are not known."""
    async with probe_where_known(settings) as found:
        return found.seen[0] if found is not None else None
