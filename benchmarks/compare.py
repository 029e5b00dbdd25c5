"""Pequod beside other servers on one machine, case by case and turn by turn.

    python benchmarks/compare.py benchmarks/peers.toml --model /tmp/qwen3-0.6b-random --out /tmp/compare

The TOML file lists servers, each with a command that starts it or a URL. Nothing is installed. All servers are started
first. In every round each case is then measured with each server in turn, in an order that rotates by one each round,
and the machine's bandwidth is probed before and after each turn, so that changes of the machine's speed affect all
servers. After each case the program writes compare.json, with the times of all tokens, and compare.md, a table with
ratios, so that a run can be stopped at any time. A ratio compares the first server of a kind of weights with another
one, over the rounds in which both were measured; above 1 the first is faster. A server that fails to start or dies has
a row with the reason. A turn in which a request fails has a note instead of figures.

A  one request, 32 tokens in, 128 out: tokens/s after the first
B  one request, 512 in, 1 out: seconds
C  16 requests at once, 256 in, 64 out: tokens/s in total
P  as C, but sampled with temperature 0.7, top_p 0.9 and top_k 20; all other cases are greedy
D  8 requests one after another, 512 shared and 16 own in, 16 out: seconds
S  requests as in C, one after another, once: seconds; C's time is reported as a share of them
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import re
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.contestants import Contestant, Elsewhere, enter, read_peers
from engine import EngineError, Roofline, fetch
from server.cli.bench.client import IDS
from server.cli.bench.figures import Figures, median, notes, percentile, rounded, spread, summarize
from server.cli.bench.limits import Probe, probe, probe_where_known
from server.cli.bench.processes import peak_bytes
from server.cli.bench.session import machine
from server.cli.commands import Failure, UsageError, whole
from server.settings_sources import load
from server.settings_values import SettingsError
from server.tokenization.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
WEIGHTS = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}  # torch's name -> kind of weights
POOL, MIN_POOL = 2000, 100  # words for prompts that are text
WORD = re.compile(r" [a-z0-9]{2,}")
WARM_UP = -1  # number of the round that is not counted
WARM_UP_SHARE = 4  # its lengths are divided by this
# Threads of many servers spin for about 0.2 s after their last work, which would slow down a probe of the bandwidth.
SETTLE_S = 0.5
STOPPED = 130  # exit status, like that of a command ended by Ctrl-C


@dataclass(frozen=True, slots=True)
class Case:
    """A workload; lengths in tokens."""

    requests: int
    at_once: int
    shared_len: int
    own_len: int
    output_len: int
    figure: str  # key in the result of summarize()
    more_is_better: bool
    once: bool = False  # too long for more than one round, or for a warm-up
    sampling: Mapping[str, float] = field(
        default_factory=dict, hash=False
    )  # fields of each request; without any it is greedy

    @property
    def input_len(self) -> int:
        return self.shared_len + self.own_len

    def at(self, number: int) -> Case | None:
        """Return the workload of a round, or None for none."""
        if self.once and number != 0:
            return None
        if number != WARM_UP:
            return self
        lengths = {name: -(-getattr(self, name) // WARM_UP_SHARE) for name in ("shared_len", "own_len", "output_len")}
        return replace(self, **lengths)


CASES = {
    "A": Case(1, 1, 0, 32, 128, "decode_tok_s", True),
    "B": Case(1, 1, 0, 512, 1, "wall_s", False),
    "C": Case(16, 16, 0, 256, 64, "output_tok_s", True),
    "P": Case(16, 16, 0, 256, 64, "output_tok_s", True, sampling={"temperature": 0.7, "top_p": 0.9, "top_k": 20}),
    "D": Case(8, 1, 512, 16, 16, "wall_s", False),
    "S": Case(16, 1, 0, 256, 64, "wall_s", False, once=True),
}


def word_pool(model: str) -> list[str]:
    """Return words that are one token each, alone and in sequence, for servers that take no token ids; empty if the
    tokenizer has too few."""
    try:
        tokenizer = Tokenizer(fetch(model, weights=False).path)
    except EngineError as error:
        raise UsageError(f"--model {model}: {error}") from None
    texts = (tokenizer.token_text(token)[0] for token in range(IDS[0], min(tokenizer.vocab_size, 20 * POOL)))
    fitting = (text for text in texts if WORD.fullmatch(text) and len(tokenizer.encode(text, add_special=False)) == 1)
    pool = list(itertools.islice(fitting, POOL))
    return pool if len(tokenizer.encode("".join(pool), add_special=False)) == len(pool) >= MIN_POOL else []


async def turn(each: Contestant, name: str, case: Case, number: int, limits: Probe) -> str:
    """Measure one server in one round of a case, and the machine's load meanwhile; returns the figure or error to
    print."""
    before = limits.seen[-1].bytes_per_s
    prefix = f"{name}, round {number}"
    lengths = case.input_len, case.output_len
    asks = each.asks(case.requests, *lengths, prefix, case.shared_len, sampling=case.sampling)
    elsewhere = Elsewhere(each)
    try:
        done = await each.run(asks, case.at_once)
        if lost := [shot.error for shot in done.shots if shot.error is not None]:
            raise Failure(f"{len(lost)} of {case.requests} requests were not answered: {lost[0]}")
        cores = elsewhere.cores()
    except Failure as error:
        await each.fail(f"failed in case {name}, {label(number)}: {error}", last=number == WARM_UP)
        await settled(limits)
        return each.lost[-1]
    after = await settled(limits)
    speed = (before + after.bytes_per_s) / 2
    figures: Figures = summarize(done) | {"bytes_per_s": speed, "elsewhere_cores": cores}
    if case.requests == 1 and figures["decode_tok_s"] and each.peer.weights == WEIGHTS.get(limits.dtype):
        context = case.input_len + case.output_len // 2
        figures["bandwidth_share"] = figures["decode_tok_s"] * after.bytes(context) / speed
    if number != WARM_UP:
        each.rounds.setdefault(name, {})[number] = figures
        each.runs.setdefault(name, {})[number] = done
    return f"{figures[case.figure] or float('nan'):.4g}"


async def settled(limits: Probe) -> Roofline:
    """Return the machine's limits while no server works."""
    await asyncio.sleep(SETTLE_S)
    return await limits.measure()


def label(number: int) -> str:
    return "warm-up" if number == WARM_UP else f"round {number + 1}"


async def measure(
    everyone: Sequence[Contestant], arguments: argparse.Namespace, limits: Probe, keep: Callable[[], None]
) -> None:
    """Measure all cases in all rounds for which there is time, calling `keep()` after each case."""
    started = time.monotonic()
    took: dict[tuple[str, str], float] = {}  # a turn's seconds, by case and server
    for number in range(WARM_UP, arguments.rounds):
        # The order rotates by one each round, so that a server is not always affected by the same one before it.
        shift = max(number, 0) % len(everyone)
        order = [*everyone[shift:], *everyone[:shift]]
        turns = {
            (name, case): [each for each in order if each.failure is None and each.peer.takes_part(name, number)]
            for name in arguments.cases
            if (case := CASES[name].at(number))
        }
        expected = sum(took.get((name, each.peer.name), 0.0) for (name, _), group in turns.items() for each in group)
        if number > 0 and arguments.minutes and time.monotonic() - started + expected > 60 * arguments.minutes:
            return
        for (name, case), group in turns.items():
            for each in group:
                if each.failure is None:
                    start = time.monotonic()
                    outcome = await turn(each, name, case, number, limits)
                    took[name, each.peer.name] = time.monotonic() - start
                    say(f"{label(number)}, {name}: {each.peer.name} {outcome}")
            keep()


async def compare(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure everything; returns the result for JSON, which is also written to --out after each case."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)  # stops the servers too
    values = {"model": arguments.model, "python": sys.executable, "root": str(ROOT)}
    peers = read_peers(arguments.peers, values, arguments.servers)
    words = word_pool(arguments.model)
    settings = load({"model": arguments.model}).settings
    arguments.out.mkdir(parents=True, exist_ok=True)
    async with contextlib.AsyncExitStack() as stack:
        limits = await stack.enter_async_context(probe_where_known(settings))
        if limits is None:  # a step of a mixture of experts reads what its tokens choose; the bandwidth has no model
            limits = await stack.enter_async_context(probe(load({}).settings))
            limits.dtype = ""  # no share of it is known
        seed = time.time_ns()  # the same prompts for all servers, and new ones for a server that ran before
        everyone = []
        for peer in peers:
            say(f"starting {peer.name}")
            everyone.append(await enter(stack, peer, words, seed))
            say(f"  {everyone[-1].failure or 'ready'}")
        await settled(limits)
        await measure(everyone, arguments, limits, lambda: write(arguments, everyone, limits))
        if not any(each.rounds for each in everyone):
            raise Failure("no server could be measured: " + "; ".join(f"{e.peer.name} {e.failure}" for e in everyone))
        return write(arguments, everyone, limits)


def write(arguments: argparse.Namespace, everyone: Sequence[Contestant], limits: Probe) -> dict[str, Any]:
    """Write the measurements so far to the folder --out; returns them for JSON."""
    rounds = [number + 1 for each in everyone for rows in each.rounds.values() for number in rows]
    result = {
        "machine": machine(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "model": Path(arguments.model).name,
        "rounds": max(rounds, default=0),
        "bytes_per_s": [seen.bytes_per_s for seen in limits.seen],
        "servers": [_record(each) for each in everyone],
        "ratios": {name: ratios(everyone, name) for name in arguments.cases if not CASES[name].once},
    }
    if rounds:
        for name, text in (("json", json.dumps(rounded(result)) + "\n"), ("md", markdown(result))):
            beside = arguments.out / f"compare.{name}.new"  # renamed when complete, so that a result is always whole
            beside.write_text(text)
            beside.replace(arguments.out / f"compare.{name}")
    return result


def _record(each: Contestant) -> dict[str, Any]:
    found = [] if each.target is None else notes(each.target, each.shots)
    expected = [note for note in found if "from a cache" not in note]  # case D measures that
    return {
        "name": each.peer.name,
        "version": each.version,
        "weights": each.peer.weights,
        "command": each.peer.shown,
        "failure": each.failure,
        "ready_s": each.ready_s,
        "peak_bytes": peak_bytes(each.child.pid) if each.child is not None else None,
        "notes": list(dict.fromkeys(note for note in (each.peer.note, *each.lost, each.failure, *expected) if note)),
        "cases": {
            name: {
                "figures": spread(list(rows.values())),
                "rounds": [{"round": number + 1} | figures for number, figures in rows.items()],
            }
            for name, rows in each.rounds.items()
        },
        "requests": {
            name: [[shot.record() for shot in done.shots] for done in runs.values()] for name, runs in each.runs.items()
        },
    }


def ratios(everyone: Sequence[Contestant], name: str) -> dict[str, dict[str, Any]]:
    """Return the ratios of the first server of each kind of weights to the others of its kind, by the others' names.

    Each has the ratio of medians and the quartiles of the rounds' ratios, over the rounds in which both were measured.
    """
    case = CASES[name]

    def ratio(mine: float, other: float) -> float:
        return mine / other if case.more_is_better else other / mine

    firsts: dict[str, Contestant] = {}
    found = {}
    for each in everyone:
        first = firsts.setdefault(each.peer.weights, each)
        ours, theirs = ({n: row[case.figure] for n, row in one.rounds.get(name, {}).items()} for one in (first, each))
        pairs = [(mine, other) for n, mine in ours.items() if mine and (other := theirs.get(n))]
        if first is not each and pairs:
            quotients = [ratio(*pair) for pair in pairs]
            found[each.peer.name] = {
                "to": first.peer.name,
                "ratio": ratio(*(median(side) or 0.0 for side in zip(*pairs, strict=True))),
                "q1": percentile(quotients, 0.25) or 0.0,
                "q3": percentile(quotients, 0.75) or 0.0,
                "rounds": len(pairs),
            }
    return found


def markdown(result: dict[str, Any]) -> str:
    """Return the tables of compare.md."""
    speeds = sorted(each / 1e9 for each in result["bytes_per_s"])
    elsewhere = median(
        figures["elsewhere_cores"]
        for each in result["servers"]
        for case in each["cases"].values()
        for figures in case["rounds"]
    )
    busy = "" if elsewhere is None else f", {elsewhere:.2f} cores busy with anything else"
    lines = [
        f"{result['machine']['processor']}, {result['machine']['cores']} cores; model {result['model']};"
        f" {result['rounds']} rounds, medians; read bandwidth {speeds[len(speeds) // 2]:.1f} GB/s"
        f" ({speeds[0]:.1f} to {speeds[-1]:.1f} in {len(speeds)} probes){busy}; {result['time'][:10]}",
        "",
        "| server | weights | rounds | A tok/s (ms per token) | A, share of bandwidth | B s | C tok/s (ms per token)"
        " | C, share of the time one after another | P tok/s (ms per token) | D s | ready s | peak GiB |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for each in result["servers"]:
        cells = [
            f"{each['name']} {each['version']}".strip(),
            each["weights"],
            _counts(len(case["rounds"]) for name, case in each["cases"].items() if name in result["ratios"]),
            _cell(each, "A", "decode_tok_s", "{:.1f}") + _cell(each, "A", "tpot_p50_s", " ({:.1f})", 1e3),
            _cell(each, "A", "bandwidth_share", "{:.0f} %", 100),
            _cell(each, "B", "wall_s", "{:.3f}"),
            _cell(each, "C", "output_tok_s", "{:.1f}") + _cell(each, "C", "tpot_p50_s", " ({:.1f})", 1e3),
            _share(each),
            _cell(each, "P", "output_tok_s", "{:.1f}") + _cell(each, "P", "tpot_p50_s", " ({:.1f})", 1e3),
            _cell(each, "D", "wall_s", "{:.2f}"),
            "" if each["ready_s"] is None else f"{each['ready_s']:.1f}",
            "" if each["peak_bytes"] is None else f"{each['peak_bytes'] / 2**30:.1f}",
        ]
        if each["failure"] and not each["cases"]:
            cells[3] = " ".join(each["failure"].split()).replace("|", "/")
        lines.append("| " + " | ".join(cells) + " |")
    for weights in dict.fromkeys(each["weights"] for each in result["servers"]):
        lines += _ratio_table(result, [each["name"] for each in result["servers"] if each["weights"] == weights])
    remarks = [f"- {each['name']}: {' '.join(note.split())}" for each in result["servers"] for note in each["notes"]]
    return "\n".join([*lines, *([""] if remarks else []), *remarks]) + "\n"


def _ratio_table(result: dict[str, Any], names: Sequence[str]) -> list[str]:
    """Return the table of the ratios of the first of some servers to the others; empty without ratios."""
    first, *others = names
    cases = result["ratios"]
    if not any(other in case for other in others for case in cases.values()):
        return []
    lines = ["", f"| {first} to | rounds | " + " | ".join(cases) + " |", "|---" * (2 + len(cases)) + "|"]
    for other in others:
        found = [case.get(other) for case in cases.values()]
        cells = [
            "" if each is None else f"{each['ratio']:.2f} ({each['q1']:.2f} to {each['q3']:.2f})" for each in found
        ]
        counts = _counts(each["rounds"] for each in found if each is not None)
        lines.append(f"| {other} | {counts} | " + " | ".join(cells) + " |")
    best = []
    for case in cases.values():
        rivals = [(case[other]["ratio"], other) for other in others if other in case]
        best.append("{:.2f} ({})".format(*min(rivals)) if rivals else "")
    lines.append("| **the best of them** | | " + " | ".join(best) + " |")
    return [
        *lines,
        "",
        "Above 1: ahead. Of the medians of the rounds that both had; in brackets quartiles of their ratios.",
    ]


def _counts(rounds: Iterable[int]) -> str:
    """Return the number of rounds: `5`, or `4 to 5` if the cases differ."""
    found = sorted(rounds)
    return " to ".join(str(count) for count in dict.fromkeys((*found[:1], *found[-1:])))


def _cell(each: dict[str, Any], case: str, figure: str, form: str, scale: float = 1.0) -> str:
    """Return a median, formatted with `form`; empty if it was not measured."""
    found = each["cases"].get(case, {}).get("figures", {}).get(figure)
    return "" if found is None else form.format(found["median"] * scale)


def _share(each: dict[str, Any]) -> str:
    """Return the time of concurrent requests as a share of their sequential time in the same round."""
    together, serial = (
        {row["round"]: row["wall_s"] for row in each["cases"].get(case, {}).get("rounds", ())} for case in "CS"
    )
    share = median(together[number] / serial[number] for number in serial if number in together)
    return "" if share is None else f"{share:.3f}"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="compare.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("peers", type=Path, help="TOML file of servers; see benchmarks/peers.toml")
    parser.add_argument("--model", required=True, help="folder of the model that all servers use")
    parser.add_argument("--rounds", type=whole(1), default=5)
    parser.add_argument("--minutes", type=whole(1), help="start no round that would end later (default: all rounds)")
    parser.add_argument("--cases", default="".join(CASES), help=f"cases to measure, of {''.join(CASES)} (default: all)")
    parser.add_argument("--servers", default="", help="comma-separated names of servers in the file (default: all)")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder for compare.json and .md")
    arguments = parser.parse_args(argv)
    arguments.servers = [name.strip() for name in arguments.servers.split(",") if name.strip()]
    try:
        if not arguments.cases or set(arguments.cases) - set(CASES):
            raise UsageError(f"--cases {arguments.cases}: some of {''.join(CASES)}")
        result = asyncio.run(compare(arguments))
    except (UsageError, SettingsError) as error:
        say(f"compare.py: {error}")
        return 2
    except (Failure, OSError) as error:
        say(f"compare.py: {error}")
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        say(f"compare.py: stopped; cases that were measured are in {arguments.out}")
        return STOPPED
    print(markdown(result), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
