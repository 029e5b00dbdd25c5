"""Pequod beside other servers on one machine, case by case and turn by turn.

    python benchmarks/compare.py benchmarks/peers.toml --model /tmp/qwen3-0.6b-random --out /tmp/compare

The TOML file names servers: how each is started, or where it runs. Nothing is installed. All of them are started first,
then for every case each is measured in turn, round by round in another order, with the machine's bandwidth probed
before each turn, so that what the machine does meanwhile happens to all. Writes compare.json, with the times of all
tokens, and compare.md, a table with ratios. A ratio is the first server's figure to another's: above 1 it is ahead.

A  one request, 32 tokens in, 128 out: tokens/s after the first
B  one request, 512 in, 1 out: seconds
C  16 requests at once, 256 in, 64 out: tokens/s of all
D  8 requests one after another, 512 shared and 16 own in, 16 out: seconds
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine import EngineError, fetch
from server.bench.client import IDS, Target, connect
from server.bench.figures import Figures, median, notes, percentile, rounded, spread, summarize
from server.bench.limits import Probe, probe
from server.bench.load import Prompts, Run, run
from server.bench.options import whole
from server.bench.processes import Child, cpu_seconds, free_port, peak_bytes
from server.bench.session import machine
from server.commands import Failure, UsageError, child_environment
from server.settings import SettingsError, load
from server.tokenizer import Tokenizer

START_S = 1800.0
KEYS = {"name", "command", "url", "ready", "model", "api", "weights", "version", "env"}
POOL = 2000  # words for prompts that are text
WORD = re.compile(r" [a-z0-9]{2,}")


@dataclass(frozen=True, slots=True)
class Case:
    """A workload of performance tables: lengths in tokens."""

    requests: int
    at_once: int
    shared_len: int
    own_len: int
    output_len: int
    figure: str  # of summarize()
    more_is_better: bool

    @property
    def input_len(self) -> int:
        return self.shared_len + self.own_len


CASES = {
    "A": Case(1, 1, 0, 32, 128, "decode_tok_s", True),
    "B": Case(1, 1, 0, 512, 1, "wall_s", False),
    "C": Case(16, 16, 0, 256, 64, "output_tok_s", True),
    "D": Case(8, 1, 512, 16, 16, "wall_s", False),
}


@dataclass(frozen=True, slots=True)
class Peer:
    """One server, as the TOML file describes it."""

    name: str
    command: tuple[str, ...] = ()
    url: str | None = None
    ready: str = "/health"  # path that answers 200 when it takes work
    model: str | None = None  # name in requests; None: the first that it tells
    api: str = "completions"
    weights: str = "bf16"  # for the table
    version: str = ""  # a command that prints it
    env: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Contestant:
    """A peer that runs."""

    peer: Peer
    target: Target
    prompts: Prompts
    child: Child | None
    ready_s: float | None
    version: str
    rounds: dict[str, list[Figures]] = field(default_factory=dict)  # by case
    runs: dict[str, list[Run]] = field(default_factory=dict)


def read_peers(path: Path, values: dict[str, str]) -> list[Peer]:
    """The servers of a file; {model} and $VARIABLES are replaced in commands. UsageError says what is wrong."""
    try:
        told = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None
    servers = told.get("server")
    if not isinstance(servers, list) or not servers or set(told) != {"server"}:
        raise UsageError(f"{path} must hold [[server]] tables and nothing else")
    peers = [_peer(path, number, each, values) for number, each in enumerate(servers, 1)]
    if len({peer.name for peer in peers}) < len(peers):
        raise UsageError(f"{path}: two servers have one name")
    return peers


def _peer(path: Path, number: int, told: dict[str, Any], values: dict[str, str]) -> Peer:
    where = f"{path}: server {number}"
    if unknown := set(told) - KEYS:
        raise UsageError(f"{where} has {sorted(unknown)[0]!r}, which is none of {', '.join(sorted(KEYS))}")
    if not isinstance(told.get("name"), str) or ("command" in told) == ("url" in told):
        raise UsageError(f"{where} needs a name, and a command or a url")
    env = told.pop("env", {})
    if not isinstance(env, dict) or not all(isinstance(value, str) for value in (*told.values(), *env.values())):
        raise UsageError(f"{where}: every value must be text")

    def filled(text: str) -> str:
        for name, value in values.items():
            text = text.replace("{" + name + "}", value)
        text = os.path.expandvars(text)
        if missing := re.search(r"\$\{?\w+", text):
            raise UsageError(f"{where} wants {missing[0]}, which is not set")
        return text

    command = tuple(filled(word) for word in shlex.split(told.pop("command", "")))
    told = {name: filled(value) for name, value in told.items()}
    return Peer(**told, command=command, env={name: filled(value) for name, value in env.items()})


async def enter(stack: contextlib.AsyncExitStack, peer: Peer, words: Sequence[str], seed: int) -> Contestant:
    """Start a peer, or find it; it is stopped when the stack is."""
    child, ready, url = None, None, peer.url
    if peer.command:
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        command = [word.replace("{port}", str(port)) for word in peer.command]
        child = Child(command, url, peer.ready, child_environment() | peer.env)
        stack.callback(child.stop)
        _, ready = await child.ready(START_S)
    assert url is not None
    target = await connect(url, peer.model, None, peer.api)
    stack.push_async_callback(target.http.aclose)
    number = str(target.version.get("version", ""))
    if peer.version:
        number = await asyncio.to_thread(_said, peer)
    return Contestant(peer, target, Prompts(target, seed, words), child, ready, number)


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
    return lines[-1].strip()[:60] if lines else "unknown"


def word_pool(model: str) -> list[str]:
    """Texts that are one token each, alone and one after another; for servers that take no token ids."""
    try:
        tokenizer = Tokenizer(fetch(model, weights=False).path)
    except EngineError as error:
        raise UsageError(f"--model {model}: {error}") from None
    texts = (tokenizer.token_text(token)[0] for token in range(IDS[0], min(tokenizer.vocab_size, 20 * POOL)))
    pool = [text for text in texts if WORD.fullmatch(text) and len(tokenizer.encode(text, add_special=False)) == 1][
        :POOL
    ]
    if len(pool) < 100 or len(tokenizer.encode("".join(pool), add_special=False)) != len(pool):
        raise UsageError(f"--model {model}: its tokenizer has no words that are one token wherever they stand")
    return pool


async def turn(
    each: Contestant, case: Case, number: int, everyone: Sequence[Contestant], limits: Probe
) -> tuple[Figures, Run]:
    """One server's measurement of one round, with what the machine and the other servers did meanwhile."""
    before = await limits.measure()
    idle = {id(other): cpu_seconds(other.child.pid) for other in everyone if other.child and other is not each}
    prefix = f"round {number}"
    asks = [each.prompts.shared(case.input_len, case.output_len, prefix, case.shared_len) for _ in range(case.requests)]

    def died() -> str | None:
        return each.child.died() if each.child is not None and each.child.process.poll() is not None else None

    done = await run(each.target, asks, case.at_once, died=died)
    figures = summarize(done)
    used = sum(
        cpu_seconds(other.child.pid) - idle[id(other)] for other in everyone if other.child and other is not each
    )
    figures |= {"bytes_per_s": before.bytes_per_s, "others_cores": used / done.wall}
    if figures["decode_tok_s"] and case.requests == 1:
        context = case.input_len + case.output_len // 2
        figures["bandwidth_share"] = figures["decode_tok_s"] * before.bytes(context) / before.bytes_per_s
    return figures, done


async def compare(peers: Sequence[Peer], arguments: argparse.Namespace) -> dict[str, Any]:
    """Everything measured, as JSON has it."""
    words = word_pool(arguments.model)
    settings = load({"model": arguments.model}).settings
    async with contextlib.AsyncExitStack() as stack:
        limits = await stack.enter_async_context(probe(settings))
        seed = time.time_ns()  # one for all, so that they get the same prompts; a server that ran before knows none
        everyone = []
        for peer in peers:
            say(f"starting {peer.name}")
            everyone.append(await enter(stack, peer, words, seed))
        for name in arguments.cases:
            for number in range(-1, arguments.rounds):  # the first is a warm-up
                # Every server is measured first, second… in turn: what one leaves in the caches hits each of them.
                shift = max(number, 0) % len(everyone)
                for each in [*everyone[shift:], *everyone[:shift]]:
                    figures, done = await turn(each, CASES[name], number, everyone, limits)
                    if number >= 0:
                        each.rounds.setdefault(name, []).append(figures)
                        each.runs.setdefault(name, []).append(done)
                    label = "warm-up" if number < 0 else f"round {number + 1}"
                    say(f"{name} {label}: {each.peer.name} {figures[CASES[name].figure] or float('nan'):.4g}")
        return {
            "machine": machine(),
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "model": Path(arguments.model).name,
            "rounds": arguments.rounds,
            "bytes_per_s": [seen.bytes_per_s for seen in limits.seen],
            "servers": [_told(each) for each in everyone],
            "ratios": {name: ratios(everyone, name) for name in arguments.cases},
        }


def _told(each: Contestant) -> dict[str, Any]:
    shots = [shot for runs in each.runs.values() for done in runs for shot in done.shots]
    expected = [note for note in notes(each.target, shots) if "from a cache" not in note]  # which case D is about
    return {
        "name": each.peer.name,
        "version": each.version,
        "weights": each.peer.weights,
        "command": list(each.peer.command),
        "ready_s": each.ready_s,
        "peak_bytes": peak_bytes(each.child.pid) if each.child is not None else None,
        "notes": expected,
        "cases": {name: {"figures": spread(rows), "rounds": rows} for name, rows in each.rounds.items()},
        "requests": {
            name: [[shot.record() for shot in done.shots] for done in runs] for name, runs in each.runs.items()
        },
    }


def ratios(everyone: Sequence[Contestant], name: str) -> dict[str, dict[str, float]]:
    """The first server to each other one in a case: the ratio of medians, and quartiles of the rounds' own ratios."""
    case = CASES[name]

    def figures(each: Contestant) -> list[float]:
        return [figures[case.figure] or 0.0 for figures in each.rounds[name]]

    def ratio(ours: float, theirs: float) -> float:
        ahead, behind = (ours, theirs) if case.more_is_better else (theirs, ours)
        return ahead / behind if behind else 0.0

    first, *others = everyone
    found = {}
    for other in others:
        pairs = [ratio(a, b) for a, b in zip(figures(first), figures(other), strict=True)]
        found[other.peer.name] = {
            "ratio": ratio(median(figures(first)) or 0.0, median(figures(other)) or 0.0),
            "q1": percentile(pairs, 0.25) or 0.0,
            "q3": percentile(pairs, 0.75) or 0.0,
        }
    return found


def markdown(result: dict[str, Any]) -> str:
    """The table that is committed."""
    speeds = sorted(each / 1e9 for each in result["bytes_per_s"])
    lines = [
        f"{result['machine']['processor']}, {result['machine']['cores']} cores; model {result['model']};"
        f" {result['rounds']} rounds, medians; read bandwidth {speeds[len(speeds) // 2]:.1f} GB/s"
        f" ({speeds[0]:.1f} to {speeds[-1]:.1f} in {len(speeds)} probes); {result['time'][:10]}",
        "",
        "| server | weights | A tok/s (ms per token) | A, share of bandwidth | B s | C tok/s (ms per token) | D s"
        " | ready s | peak GiB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for each in result["servers"]:
        cells = [
            f"{each['name']} {each['version']}".strip(),
            each["weights"],
            _cell(each, "A", "decode_tok_s", "{:.1f}") + _cell(each, "A", "itl_p50_s", " ({:.1f})", 1e3),
            _cell(each, "A", "bandwidth_share", "{:.0f} %", 100),
            _cell(each, "B", "wall_s", "{:.3f}"),
            _cell(each, "C", "output_tok_s", "{:.1f}") + _cell(each, "C", "itl_p50_s", " ({:.1f})", 1e3),
            _cell(each, "D", "wall_s", "{:.2f}"),
            "" if each["ready_s"] is None else f"{each['ready_s']:.1f}",
            "" if each["peak_bytes"] is None else f"{each['peak_bytes'] / 2**30:.1f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    names = list(next(iter(result["ratios"].values())))
    if names:
        first = result["servers"][0]["name"]
        lines += [
            "",
            f"| {first} to | " + " | ".join(result["ratios"]) + " |",
            "|---" * (1 + len(result["ratios"])) + "|",
        ]
        for other in names:
            each_case = [case[other] for case in result["ratios"].values()]
            cells = [f"{case['ratio']:.2f} ({case['q1']:.2f} to {case['q3']:.2f})" for case in each_case]
            lines.append(f"| {other} | " + " | ".join(cells) + " |")
        lines += ["", "A ratio above 1: ahead. In brackets the quartiles of the rounds' own ratios."]
    told = [f"- {each['name']}: {note}" for each in result["servers"] for note in each["notes"]]
    return "\n".join([*lines, *([""] if told else []), *told]) + "\n"


def _cell(each: dict[str, Any], case: str, figure: str, form: str, scale: float = 1.0) -> str:
    """A median as `form` has it; nothing where it was not seen."""
    found = each["cases"].get(case, {}).get("figures", {}).get(figure)
    return "" if found is None else form.format(found["median"] * scale)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="compare.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("peers", type=Path, help="TOML file of servers; the first is compared with each other one")
    parser.add_argument("--model", required=True, help="folder of the model that all of them serve")
    parser.add_argument("--rounds", type=whole(1), default=5)
    parser.add_argument("--cases", default="ABCD", help="some of ABCD (default: all)")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder for compare.json and .md")
    arguments = parser.parse_args(argv)
    try:
        if not arguments.cases or set(arguments.cases) - set(CASES):
            raise UsageError(f"--cases {arguments.cases}: some of {''.join(CASES)}")
        peers = read_peers(arguments.peers, {"model": arguments.model})
        result = asyncio.run(compare(peers, arguments))
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "compare.json").write_text(json.dumps(rounded(result)) + "\n")
        (arguments.out / "compare.md").write_text(markdown(result))
    except (UsageError, SettingsError) as error:
        say(f"compare.py: {error}")
        return 2
    except (Failure, OSError) as error:
        say(f"compare.py: {error}")
        return 1
    print(markdown(result), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
