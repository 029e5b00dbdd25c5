"""The servers of a comparison: reads them from a TOML file, starts them, runs workloads, and counts their CPU time.

The client of `pequod bench` sends requests over HTTP. If the `api` is "in-process", the contestant is a library in a
driver (benchmarks/openvino_driver.py), which receives a whole workload and measures times itself, without HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shlex
import subprocess
import time
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx

from server.cli.bench.client import SILENCE_S, Ask, Shot, Target, connect
from server.cli.bench.figures import Figures
from server.cli.bench.load import Prompts, Run, run
from server.cli.bench.processes import Child, cpu_seconds, free_port
from server.cli.commands import Failure, UsageError

START_S = 900.0
IN_PROCESS = "in-process"
TEXTS = {"name", "command", "url", "ready", "model", "api", "weights", "version", "cases", "note"}
KEYS = TEXTS | {"rounds", "env"}
MAX_FAILURES = 2  # of a server that keeps running: each may take SILENCE_S


@dataclass(frozen=True, slots=True)
class Peer:
    """A server of the TOML file."""

    name: str
    command: tuple[str, ...] = ()
    shown: str = ""  # the command or URL as the file has it, without this machine's paths
    url: str | None = None
    ready: str = "/health"  # path that returns 200 when the server is ready
    model: str | None = None  # name in requests; None: the first that the server lists
    api: str = "completions"  # completions | chat | in-process
    weights: str = "bf16"  # compared with the first server of the same value
    version: str = ""  # a command that prints it
    cases: str | None = None  # cases to measure; None: all
    rounds: int | None = None  # maximum for each case; None: all
    note: str = ""  # for readers of its figures
    env: dict[str, str] = field(default_factory=dict)
    missing: tuple[str, ...] = ()  # required variables that are not set

    def takes_part(self, case: str, number: int) -> bool:
        """Return whether it is measured in a round of a case; the warm-up is round -1."""
        return (self.cases is None or case in self.cases) and (self.rounds is None or number < self.rounds)


def read_peers(path: Path, values: Mapping[str, str], only: Collection[str] = ()) -> list[Peer]:
    """Return the servers of a file, or `only` those of some names. Raises UsageError.

    {name} of `values` and $VARIABLES are replaced in commands, URLs and environments. Variables that are not set are in
    the server's `missing`.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None
    servers = document.get("server")
    if not isinstance(servers, list) or not servers or set(document) != {"server"}:
        raise UsageError(f"{path} must hold [[server]] tables and nothing else")
    for number, each in enumerate(servers, 1):
        _check(f"{path}: server {number}", each)
    names = [each["name"] for each in servers]
    if len(set(names)) < len(names):
        raise UsageError(f"{path}: two servers have one name")
    if unknown := sorted(set(only) - set(names)):
        raise UsageError(f"{path} has no server {unknown[0]!r}; it has {', '.join(names)}")
    wanted = [each for each in servers if not only or each["name"] in only]
    return [_peer(each, values) for each in wanted]


def _check(where: str, table: dict[str, Any]) -> None:
    if unknown := set(table) - KEYS:
        raise UsageError(f"{where} has {sorted(unknown)[0]!r}, which is none of {', '.join(sorted(KEYS))}")
    if not isinstance(table.get("name"), str) or ("command" in table) == ("url" in table):
        raise UsageError(f"{where} needs a name, and a command or a url")
    env, rounds = table.get("env", {}), table.get("rounds", 1)
    if not isinstance(env, dict) or not all(isinstance(text, str) for text in env.values()):
        raise UsageError(f"{where}: env must be a table of texts")
    if wrong := sorted(key for key in set(table) & TEXTS if not isinstance(table[key], str)):
        raise UsageError(f"{where}: {wrong[0]} must be text")
    if not isinstance(rounds, int) or isinstance(rounds, bool) or rounds < 1:
        raise UsageError(f"{where}: rounds must be a number from 1")


def _peer(given: dict[str, Any], values: Mapping[str, str]) -> Peer:
    missing: list[str] = []

    def filled(text: str) -> str:
        for name, value in values.items():
            text = text.replace("{" + name + "}", value)
        missing.extend(name for name in re.findall(r"\$\{?(\w+)", text) if name not in os.environ)
        return os.path.expandvars(text)

    texts: dict[str, Any] = {key: filled(given[key]) for key in ("url", "model", "version") if key in given}
    texts["command"] = tuple(filled(word) for word in shlex.split(given.get("command", "")))
    texts["env"] = {name: filled(value) for name, value in given.get("env", {}).items()}
    shown = given.get("command") or given["url"]
    return Peer(**given | texts, shown=shown, missing=tuple(dict.fromkeys(missing)))


@dataclass(slots=True, eq=False)
class Contestant:
    """A running peer, or the reason why it does not run, and its measurements."""

    peer: Peer
    target: Target | None = None
    prompts: Prompts | None = None
    child: Child | None = None
    ready_s: float | None = None
    version: str = ""
    failure: str | None = None  # if set, it is not measured any more
    lost: list[str] = field(default_factory=list)  # reasons of turns without figures
    rounds: dict[str, dict[int, Figures]] = field(default_factory=dict)  # by case and number of the round
    runs: dict[str, dict[int, Run]] = field(default_factory=dict)
    stack: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)  # stops it

    @property
    def shots(self) -> list[Shot]:
        """All requests that were sent."""
        return [shot for runs in self.runs.values() for done in runs.values() for shot in done.shots]

    @property
    def process_seconds(self) -> float | None:
        """The CPU time it has used; None if it was not started here."""
        return None if self.child is None else cpu_seconds(self.child.pid)

    def asks(
        self,
        count: int,
        input_len: int,
        output_len: int,
        prefix: str,
        prefix_len: int,
        *,
        sampling: Mapping[str, float],
    ) -> list[Ask]:
        """Requests whose first tokens are those that `prefix` names; no two have the same rest, and another contestant
        that is asked with the same prefix gets the same. `sampling`: further fields of each."""
        assert self.prompts is not None
        ask = self.prompts.shared
        asks = [ask(input_len, output_len, prefix, prefix_len, key=f"{prefix} #{one}") for one in range(count)]
        return [replace(each, body=sampling) for each in asks]

    async def run(self, asks: Sequence[Ask], at_once: int) -> Run:
        """Send the requests, `at_once` at a time. Raises Failure if the server has died."""
        assert self.target is not None
        if self.peer.api == IN_PROCESS:
            return await _drive(self.target, asks, at_once)
        return await run(self.target, asks, at_once, died=self._died)

    async def fail(self, why: str, last: bool) -> None:
        """Record a turn without figures. Stops the server if it has died or failed too often, or if `last` is set, so
        that it does not disturb the others."""
        assert self.target is not None
        self.lost.append(why)
        last = last or self.peer.api == IN_PROCESS  # the driver would still run the failed workload
        if last or len(self.lost) >= MAX_FAILURES or self._died() or not await self.target.is_alive():
            self.failure = why
            await self.stack.aclose()

    def _died(self) -> str | None:
        return self.child.died() if self.child is not None and self.child.process.poll() is not None else None


async def enter(stack: contextlib.AsyncExitStack, peer: Peer, words: Sequence[str], seed: int) -> Contestant:
    """Start a peer, or connect to it; closing the stack stops it. If it cannot run, `failure` has the reason.

    `words`: each is exactly one token of the model in any context.
    """
    found = Contestant(peer)
    if peer.missing:
        found.failure = f"not started: {', '.join(f'${name}' for name in peer.missing)} not set"
        return found
    own = found.stack
    try:
        url = peer.url
        if peer.command:
            port = free_port()
            url = f"http://127.0.0.1:{port}"
            command = [word.replace("{port}", str(port)) for word in peer.command]
            found.child = Child(command, url, peer.ready, os.environ | peer.env)
            own.callback(found.child.stop)
            _, found.ready_s = await found.child.ready(START_S)
            await found.child.quiet()
        assert url is not None
        if peer.api == IN_PROCESS:
            found.target = await _in_process(url, is_own=bool(peer.command))
        else:
            found.target = await connect(url, peer.model, None, peer.api, is_own=bool(peer.command))
        own.push_async_callback(found.target.http.aclose)
        if not found.target.takes_ids and not words:
            raise Failure("it takes no token ids as a prompt, and the model has no words that are one token each")
        found.prompts = Prompts(found.target, seed, words)
        found.version = str(found.target.version.get("version", ""))
        if peer.version:
            found.version = await asyncio.to_thread(_version, peer)
    except (Failure, UsageError) as error:
        found.failure = f"did not start: {error}"
        await own.aclose()
        found.child = None
    except BaseException:
        await own.aclose()
        raise
    stack.push_async_callback(own.aclose)
    return found


def _version(peer: Peer) -> str:
    try:
        done = subprocess.run(
            shlex.split(peer.version),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env=os.environ | peer.env,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"unknown ({type(error).__name__})"
    lines = (done.stdout.strip() or done.stderr.strip()).splitlines()
    numbered = [line for line in lines if re.search(r"\d+[.\d]*", line)]  # some commands print more lines
    return next(iter(numbered), "unknown").strip()[:60]


async def _in_process(url: str, *, is_own: bool) -> Target:
    http = httpx.AsyncClient(base_url=url, timeout=SILENCE_S, trust_env=not is_own)  # as `connect` does
    try:
        version = (await http.get("/version")).json()
    except (httpx.HTTPError, ValueError) as error:
        await http.aclose()
        raise Failure(f"no driver answers at {url} ({type(error).__name__})") from None
    return Target(http, url, IN_PROCESS, IN_PROCESS, version, None, notes=["runs in its own process, without HTTP"])


async def _drive(target: Target, asks: Sequence[Ask], at_once: int) -> Run:
    """Let a driver run a workload; returns its times."""
    work = {
        "prompts": [ask.prompt for ask in asks],
        "output_lens": [ask.output_len for ask in asks],
        "at_once": at_once,
        "sampling": dict(asks[0].body),
    }
    try:
        answer = await target.http.post("/run", json=work)
        result = answer.json()
    except (httpx.HTTPError, ValueError) as error:
        raise Failure(f"the driver died: {type(error).__name__}") from None
    if answer.status_code != 200:
        raise Failure(f"the driver failed: {result.get('error', answer.status_code)}")
    shots = [
        Shot(
            at=one["sent"],
            input_len=ask.input_len,
            output_len=ask.output_len,
            sent=one["sent"],
            done=one["times"][-1],
            times=one["times"],
            sizes=one["sizes"],
            prompt_tokens=len(ask.prompt),
            finish_reason="length",
        )
        for ask, one in zip(asks, result["answers"], strict=True)
    ]
    return Run(shots, max(shot.done for shot in shots) - min(shot.sent for shot in shots))


def busy_seconds() -> float | None:
    """Return the CPU time used on this machine since boot; None if the system does not report it."""
    try:
        user, nice, system, _idle, _waiting, *interrupts = map(int, Path("/proc/stat").read_text().split()[1:8])
    except (OSError, ValueError):
        return None
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")


class Elsewhere:
    """Measures the CPU time of everything except one server and this process, from its creation on."""

    def __init__(self, server: Contestant) -> None:
        self._server = server
        self._started, self._before = time.perf_counter(), self._seconds()

    def cores(self) -> float | None:
        """Return the average number of busy cores; None if the CPU time of the system or the server is not known."""
        after = self._seconds()
        if after is None or self._before is None:
            return None
        return max(0.0, after - self._before) / (time.perf_counter() - self._started)

    def _seconds(self) -> float | None:
        used = self._server.process_seconds
        busy = None if used is None else busy_seconds()
        return None if used is None or busy is None else busy - used - time.process_time()
