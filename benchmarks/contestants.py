"""The servers of a comparison: read from a TOML file, started, asked, and their processor time counted.

A server is asked over HTTP by the client of `pequod bench`. One whose `api` is "in-process" is a library that a driver
of ours runs (benchmarks/openvino_driver.py): it gets a whole workload at once and takes the times itself, so that no
HTTP is in its figures.
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
MOST_FAILURES = 2  # of one server that lives on: each may take as long as SILENCE_S


@dataclass(frozen=True, slots=True)
class Peer:
    """One server, as the TOML file describes it."""

    name: str
    command: tuple[str, ...] = ()
    told: str = ""  # its command or url as the file has it, without this machine's places
    url: str | None = None
    ready: str = "/health"  # path that answers 200 when it takes work
    model: str | None = None  # name in requests; None: the first that it tells
    api: str = "completions"  # completions | chat | in-process
    weights: str = "bf16"  # the first server with the same word is what it is compared with
    version: str = ""  # a command that prints it
    cases: str | None = None  # those it takes part in; None: all
    rounds: int | None = None  # at most so many of each case; None: all
    note: str = ""  # what a reader of its figures must know
    env: dict[str, str] = field(default_factory=dict)
    missing: tuple[str, ...] = ()  # variables that it needs and that are not set

    def takes_part(self, case: str, number: int) -> bool:
        """Whether it is measured in a round of a case; the warm-up is the round -1."""
        return (self.cases is None or case in self.cases) and (self.rounds is None or number < self.rounds)


def read_peers(path: Path, values: Mapping[str, str], only: Collection[str] = ()) -> list[Peer]:
    """The servers of a file, or `only` some, by name; {name} of `values` and $VARIABLES are replaced in what starts or
    finds them. UsageError says what is wrong with the file; a variable that is not set is the server's `missing`."""
    try:
        told = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None
    servers = told.get("server")
    if not isinstance(servers, list) or not servers or set(told) != {"server"}:
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


def _check(where: str, told: dict[str, Any]) -> None:
    if unknown := set(told) - KEYS:
        raise UsageError(f"{where} has {sorted(unknown)[0]!r}, which is none of {', '.join(sorted(KEYS))}")
    if not isinstance(told.get("name"), str) or ("command" in told) == ("url" in told):
        raise UsageError(f"{where} needs a name, and a command or a url")
    env, rounds = told.get("env", {}), told.get("rounds", 1)
    if not isinstance(env, dict) or not all(isinstance(text, str) for text in env.values()):
        raise UsageError(f"{where}: env must be a table of texts")
    if wrong := sorted(key for key in set(told) & TEXTS if not isinstance(told[key], str)):
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
    told = given.get("command") or given["url"]
    return Peer(**given | texts, told=told, missing=tuple(dict.fromkeys(missing)))


@dataclass(slots=True, eq=False)
class Contestant:
    """A peer that runs, or why it does not, and what was measured of it."""

    peer: Peer
    target: Target | None = None
    prompts: Prompts | None = None
    child: Child | None = None
    ready_s: float | None = None
    version: str = ""
    failure: str | None = None  # it takes no further part
    lost: list[str] = field(default_factory=list)  # turns without figures, and why
    rounds: dict[str, dict[int, Figures]] = field(default_factory=dict)  # by case and by the round's number
    runs: dict[str, dict[int, Run]] = field(default_factory=dict)
    stack: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)  # stops it

    @property
    def shots(self) -> list[Shot]:
        """All that was sent."""
        return [shot for runs in self.runs.values() for done in runs.values() for shot in done.shots]

    @property
    def process_seconds(self) -> float | None:
        """Processor time it has used; None for one that was not started here."""
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
        """Send all of them, `at_once` at a time. Failure when the server is gone or answers none."""
        assert self.target is not None
        if self.peer.api == IN_PROCESS:
            return await _drive(self.target, asks, at_once)
        return await run(self.target, asks, at_once, died=self._died)

    async def fail(self, why: str, last: bool) -> None:
        """A turn has no figures. It was the server's last one if it is gone, has failed often, or if `last` says so:
        then it is stopped, so that what it still does disturbs nobody."""
        assert self.target is not None
        self.lost.append(why)
        last = last or self.peer.api == IN_PROCESS  # which keeps the requests of a run that failed
        if last or len(self.lost) >= MOST_FAILURES or self._died() or not await self.target.answers():
            self.failure = why
            await self.stack.aclose()

    def _died(self) -> str | None:
        return self.child.died() if self.child is not None and self.child.process.poll() is not None else None


async def enter(stack: contextlib.AsyncExitStack, peer: Peer, words: Sequence[str], seed: int) -> Contestant:
    """Start a peer, or find it; it is stopped when the stack is. One that cannot take part says so in `failure`.

    `words`: each exactly one token of the model, wherever it stands.
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
        assert url is not None
        found.target = await (_in_process(url) if peer.api == IN_PROCESS else connect(url, peer.model, None, peer.api))
        own.push_async_callback(found.target.http.aclose)
        if not found.target.takes_ids and not words:
            raise Failure("it takes no token ids as a prompt, and the model has no words that are one token each")
        found.prompts = Prompts(found.target, seed, words)
        found.version = str(found.target.version.get("version", ""))
        if peer.version:
            found.version = await asyncio.to_thread(_said, peer)
    except (Failure, UsageError) as error:
        found.failure = f"did not start: {error}"
        await own.aclose()
        found.child = None
    except BaseException:
        await own.aclose()
        raise
    stack.push_async_callback(own.aclose)
    return found


def _said(peer: Peer) -> str:
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
    numbered = [line for line in lines if re.search(r"\d+[.\d]*", line)]  # some print more around it
    return next(iter(numbered), "unknown").strip()[:60]


async def _in_process(url: str) -> Target:
    http = httpx.AsyncClient(base_url=url, timeout=SILENCE_S)
    try:
        version = (await http.get("/version")).json()
    except (httpx.HTTPError, ValueError) as error:
        await http.aclose()
        raise Failure(f"no driver answers at {url} ({type(error).__name__})") from None
    return Target(http, url, IN_PROCESS, IN_PROCESS, version, None, notes=["runs in its own process, without HTTP"])


async def _drive(target: Target, asks: Sequence[Ask], at_once: int) -> Run:
    """A workload that a driver runs, with the times that it took."""
    work = {
        "prompts": [ask.prompt for ask in asks],
        "output_lens": [ask.output_len for ask in asks],
        "at_once": at_once,
        "sampling": dict(asks[0].body),
    }
    try:
        answer = await target.http.post("/run", json=work)
        told = answer.json()
    except (httpx.HTTPError, ValueError) as error:
        raise Failure(f"the driver died: {type(error).__name__}") from None
    if answer.status_code != 200:
        raise Failure(f"the driver failed: {told.get('error', answer.status_code)}")
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
        for ask, one in zip(asks, told["answers"], strict=True)
    ]
    return Run(shots, max(shot.done for shot in shots) - min(shot.sent for shot in shots))


def busy_seconds() -> float | None:
    """Processor time that all of this machine has used; None where the system does not tell."""
    try:
        user, nice, system, _idle, _waiting, *interrupts = map(int, Path("/proc/stat").read_text().split()[1:8])
    except (OSError, ValueError):
        return None
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")


class Elsewhere:
    """Processor time that a machine spends on anything but one server and this process, from now on."""

    def __init__(self, server: Contestant) -> None:
        self._server = server
        self._began, self._before = time.perf_counter(), self._seconds()

    def cores(self) -> float | None:
        """How many cores it kept busy on average; None where the system or the server does not tell."""
        after = self._seconds()
        if after is None or self._before is None:
            return None
        return max(0.0, after - self._before) / (time.perf_counter() - self._began)

    def _seconds(self) -> float | None:
        used = self._server.process_seconds
        busy = None if used is None else busy_seconds()
        return None if used is None or busy is None else busy - used - time.process_time()
