"""Injects faults during streams and checks that no byte of their output changes.

    python -m benchmarks.kill --json benchmarks/results/kill.json

First each stream of `generating` is read alone, and then all of them at once, without faults; the hashes must be equal.
Then in each round all of them run at once, and one fault is injected when a random part of their text has come; every
stream's hash must stay the same. The exit code is 1 if one changes or a fault could not be injected.

kill        kill -9 of the engine
stop        SIGSTOP of the engine: it is replaced after --stall-seconds
pause       SIGSTOP of the engine, and SIGCONT a second later
pause all   the same for every process of the server
helpers     kill -9 of the processes that render templates and check grammars
memory      the engine in a cgroup without memory, until the kernel kills it; skipped if no cgroup can be created
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import pathlib
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import httpx

from tests.live import Server, alive

from .traffic import Answer, Failed, Request, about, children, events, generating, samples, write

PAUSE_S = 1.0
OOM_S = 15.0  # within which the engine must be killed
OOM_BYTES = 64 << 10  # new memory that is allowed
ENGINE = "engine.worker"


async def read(client: httpx.AsyncClient, request: Request, answer: Answer | None = None) -> Answer:
    """Return the answer of a request; `answer`: where it is collected meanwhile."""
    answer = answer or Answer()
    async for event in events(client, request):
        answer.add(event)
    return answer


async def kill(server: Server) -> None:
    os.kill(server.engine_pid, signal.SIGKILL)


async def stop(server: Server) -> None:
    os.kill(server.engine_pid, signal.SIGSTOP)


async def pause(server: Server) -> None:
    await _pause(server.engine_pid)


async def pause_all(server: Server) -> None:
    await _pause(*children(server.process.pid).values())


async def _pause(*pids: int) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    await asyncio.sleep(PAUSE_S)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


async def helpers(server: Server) -> None:
    for name, pid in children(server.process.pid).items():
        if name not in ("server", ENGINE):
            os.kill(pid, signal.SIGKILL)


async def memory(server: Server) -> None:
    """Deny the engine's process more memory; raises Failed if it is not killed."""
    pid = server.engine_pid
    with cgroup(pid):
        end = time.monotonic() + OOM_S
        while alive(pid):
            if time.monotonic() > end:
                raise Failed("the engine needed no more memory")
            # A new long prompt uses blocks that have not been written yet, whose memory is not yet allocated.
            body = {"prompt": f"{time.monotonic()} whales. " * 100, "max_tokens": 1}
            await asyncio.to_thread(httpx.post, f"{server.url}/v1/completions", json=body, timeout=120)


@contextlib.contextmanager
def cgroup(pid: int) -> Any:
    """Put the process into a new cgroup below its current one. Raises OSError if that is not permitted."""
    lines = pathlib.Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    here = {line.split(":")[1]: line.split(":", 2)[2].lstrip("/") for line in lines}
    if "memory" in here:
        parent, limit = pathlib.Path("/sys/fs/cgroup/memory") / here["memory"], "memory.limit_in_bytes"
    else:
        parent, limit = pathlib.Path("/sys/fs/cgroup") / here[""], "memory.max"
    folder = parent / f"pequod-{pid}"
    folder.mkdir()
    try:
        # Existing memory stays charged to the parent; the limit applies to new memory.
        (folder / limit).write_text(str(OOM_BYTES))
        (folder / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        with contextlib.suppress(OSError):  # not empty if the process is still alive
            (parent / "cgroup.procs").write_text(str(pid))
        for _ in range(100):
            with contextlib.suppress(OSError):
                folder.rmdir()
                break
            time.sleep(0.05)


def has_cgroups() -> bool:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        try:
            with cgroup(child.pid):
                return True
        except OSError:
            return False
        finally:
            child.kill()


FAULTS: dict[str, Callable[[Server], Awaitable[None]]] = {
    "kill": kill,
    "stop": stop,
    "pause": pause,
    "pause all": pause_all,
    "helpers": helpers,
    "memory": memory,
}
RESTARTED = ("kill", "stop", "memory")  # the faults that end the engine's process


async def counters(client: httpx.AsyncClient) -> dict[str, int]:
    found = samples((await client.get("/metrics")).text)
    return {name: int(found[f"pequod:{name}_total"]) for name in ("engine_restarts", "streams_resumed")}


def size(answers: Iterable[Answer]) -> int:
    """Return the number of characters that have come."""
    return sum(len(text) for answer in answers for text in answer.texts.values())


async def disturbed(server: Server, client: httpx.AsyncClient, requests: list[Request], fault: str, at: float) -> Any:
    """Run all streams at once, with a fault when `at` characters have come; returns hashes or errors by name, and the
    delays. A point in time would come too late, or too early, on a machine whose speed changes."""
    before = await counters(client)
    began = time.perf_counter()
    answers = {request.name: Answer() for request in requests}
    reading = {request.name: asyncio.create_task(read(client, request, answers[request.name])) for request in requests}
    while size(answers.values()) < at and not all(task.done() for task in reading.values()):
        await asyncio.sleep(0.001)
    when, problem = time.perf_counter(), None
    open_streams = sum(not task.done() for task in reading.values())
    try:
        await FAULTS[fault](server)
    except (Failed, LookupError, ProcessLookupError) as error:
        problem = f"{type(error).__name__}: {error}"
    done = await asyncio.gather(*reading.values(), return_exceptions=True)
    hashes, gaps = {}, []
    for name, answer in zip(reading, done, strict=True):
        if isinstance(answer, Answer):
            hashes[name] = answer.hash
            gaps += [after - before for before, after in itertools.pairwise(answer.times) if after > when]
        else:
            hashes[name] = f"{type(answer).__name__}: {answer}"
    restarts = before["engine_restarts"] + (fault in RESTARTED and problem is None)
    while (costs := await counters(client))["engine_restarts"] < restarts:
        await asyncio.sleep(0.05)
    while (await client.get("/ready")).status_code != 200:
        await asyncio.sleep(0.05)
    return {
        "fault": fault,
        "at_s": round(when - began, 3),
        "open_streams": open_streams,
        "seconds": round(time.perf_counter() - began, 3),
        "pause_s": round(max(gaps), 3) if gaps else None,  # of the stream with the longest pause
        **{name: costs[name] - value for name, value in before.items()},
        **({"not_done": problem} if problem else {}),
        "hashes": hashes,
    }


async def measure(server: Server, faults: list[str], rounds: int, tokens: int, seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    requests = generating(tokens, seed)
    fresh = httpx.Limits(max_keepalive_connections=0)  # a stopped server cannot close idle connections
    async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=fresh) as client:
        first = {request.name: (await read(client, request)).hash for request in requests}
        again = dict(zip(first, await asyncio.gather(*(read(client, request) for request in requests)), strict=True))
        whole = size(again.values())
        done = []
        for fault in (fault for _ in range(rounds) for fault in faults):
            done.append(await disturbed(server, client, requests, fault, rng.uniform(0.02, 0.8) * whole))
            changed = [name for name, found in done[-1]["hashes"].items() if found != first[name]]
            done[-1]["changed"] = {name: done[-1]["hashes"][name] for name in changed}
            del done[-1]["hashes"]
            print(*(f"{key} {value}" for key, value in done[-1].items()), sep=", ", flush=True)
    return {
        "undisturbed": first,
        "alone_as_together": first == {name: answer.hash for name, answer in again.items()},
        "rounds": done,
    }


def summary(rounds: list[dict[str, Any]], faults: list[str]) -> dict[str, Any]:
    table = {}
    for fault in faults:
        here = [each for each in rounds if each["fault"] == fault]
        pauses = [each["pause_s"] for each in here if each["pause_s"] is not None]
        table[fault] = {
            "rounds": len(here),
            "not_done": sum("not_done" in each for each in here),
            "streams": sum(each["open_streams"] for each in here),  # open when the fault was injected
            "resumed": sum(each["streams_resumed"] for each in here),
            "restarts": sum(each["engine_restarts"] for each in here),
            "changed": sum(len(each["changed"]) for each in here),
            "pause_s": {"median": statistics.median(pauses), "max": max(pauses)} if pauses else None,
        }
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--faults", default=",".join(FAULTS), help="comma-separated faults, such as kill,stop")
    parser.add_argument("--rounds", type=int, default=10, help="number of rounds for each fault")
    parser.add_argument("--tokens", type=int, default=400, help="length of each stream")
    parser.add_argument("--stall-seconds", type=int, default=3, help="without a step, until the engine is replaced")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    faults, left_out = args.faults.split(","), {}
    if unknown := [fault for fault in faults if fault not in FAULTS]:
        parser.error(f"--faults {unknown[0]}: must be of {', '.join(FAULTS)}")
    if "memory" in faults and not has_cgroups():
        faults.remove("memory")
        left_out["memory"] = "no cgroup can be made here"
    flags = ("--dtype", "float32", "--stall-seconds", str(args.stall_seconds))
    with Server(args.model, *flags) as server:
        found = asyncio.run(measure(server, faults, args.rounds, args.tokens, args.seed))
    table = summary(found["rounds"], faults)
    for fault, row in table.items():
        print(f"{fault:10}", *(f"{name} {value}" for name, value in row.items()), sep="  ")
    for fault, reason in left_out.items():
        print(f"{fault:10} left out: {reason}")
    write({**about(), "faults": table, "left_out": left_out, **found}, args.json)
    failed = any(row["changed"] or row["not_done"] for row in table.values())
    return 1 if failed or not found["alone_as_together"] else 0


if __name__ == "__main__":
    sys.exit(main())
