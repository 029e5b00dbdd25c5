"""Measures the figures of docs/performance.md, each a ratio within one run on one machine.

    python -m benchmarks.figures --model-dir /tmp/qwen3-0.6b-random --json benchmarks/results/cpu.json

decode        batch-1 tokens/s over HTTP, relative to transformers' `generate`, measured alternately
together      16 requests at once, relative to the same 16 one after another
prefix        TTFT of a second request that shares 512 tokens with the first, relative to the first's
interference  a 4,000-token prompt during a stream: the stream's largest gap, the prompt's time relative to alone
start         the built-in model: seconds until the port accepts connections, and until /ready
"""

from __future__ import annotations

import argparse
import asyncio
import json
import pathlib
import statistics
import subprocess
import sys

from server.cli.bench.client import Ask, Shot, Target, connect
from server.cli.bench.load import Prompts, run
from server.cli.bench.processes import pequod
from server.cli.bench.session import machine

from .model import make

GENERATE = """
import json, sys, time, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16, local_files_only=True).eval()
ids = torch.tensor([json.loads(sys.argv[2])])
for line in sys.stdin:
    with torch.inference_mode():
        began = time.perf_counter()
        model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=1, min_new_tokens=1,
                       eos_token_id=None, pad_token_id=0)
        first = time.perf_counter()
        model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=129,
                       min_new_tokens=129, eos_token_id=None, pad_token_id=0)
        done = time.perf_counter()
    print(128 / (done - first - (first - began)), flush=True)
"""


async def one(target: Target, ask: Ask) -> Shot:
    """Send one request; a failure ends the measurement."""
    return (await run(target, [ask])).complete().shots[0]


async def decode(target: Target, prompts: Prompts, folder: pathlib.Path, rounds: int) -> dict:
    command = [sys.executable, "-c", GENERATE, str(folder), json.dumps(prompts.ask(32, 129).prompt)]
    peer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    ours, theirs = [], []
    for turn in range(rounds + 1):  # the first is a warm-up
        peer.stdin.write("\n")
        peer.stdin.flush()
        rate = float(await asyncio.to_thread(peer.stdout.readline))
        mine = (await one(target, prompts.ask(32, 129))).decode_rate
        if turn:
            theirs.append(rate)
            ours.append(mine)
    peer.stdin.close()
    peer.wait()
    pairs = [a / b for a, b in zip(ours, theirs, strict=True)]
    return {"pequod_tok_s": ours, "generate_tok_s": theirs, "ratio": statistics.median(pairs), "must_be_at_least": 1.0}


async def together(target: Target, prompts: Prompts, rounds: int) -> dict:
    apart_s, together_s = [], []
    await one(target, prompts.ask(256, 8))
    for _ in range(rounds):
        for at_once, walls in ((1, apart_s), (16, together_s)):
            asks = [prompts.ask(256, 64) for _ in range(16)]
            walls.append((await run(target, asks, at_once)).complete().wall)
    ratio = statistics.median(both / apart for both, apart in zip(together_s, apart_s, strict=True))
    return {"apart_s": apart_s, "together_s": together_s, "ratio": ratio, "must_be_at_most": 1 / 3}


async def prefix(target: Target, prompts: Prompts, rounds: int) -> dict:
    ratios = []
    for turn in range(rounds + 1):
        first, second = [await one(target, prompts.shared(528, 2, f"turn {turn}", 512)) for _ in range(2)]
        ratios.append(second.ttft / first.ttft)
    return {"ratio": statistics.median(ratios[1:]), "ratios": ratios[1:], "must_be_at_most": 0.3}


async def interference(target: Target, prompts: Prompts, rounds: int) -> dict:
    gaps, ratios = [], []
    for _ in range(rounds):
        alone = await one(target, prompts.ask(4000, 1))
        asks = [prompts.ask(32, 200), prompts.ask(4000, 1, at=1.5)]
        running, beside = (await run(target, asks)).complete().shots
        gaps.append(max(running.gaps))
        ratios.append(beside.ttft / alone.ttft)
    return {
        "largest_gap_s": max(gaps),
        "gap_must_be_at_most": 2.0,
        "ratio": statistics.median(ratios),
        "must_be_at_most": 1.3,
    }


async def start(rounds: int) -> dict:
    ports, readies = [], []
    for _ in range(rounds + 1):
        child = pequod("builtin", [])
        try:
            port, ready = await child.ready(120)
        finally:
            child.stop()
        ports.append(port)
        readies.append(ready)
    return {
        "port_s": statistics.median(ports[1:]),
        "port_must_be_at_most": 1.0,
        "ready_s": statistics.median(readies[1:]),
        "must_be_at_most": 4.0,
    }


async def measure(folder: pathlib.Path, rounds: int, cases: list[str]) -> dict:
    found: dict = {}
    if set(cases) - {"start"}:
        child = pequod(str(folder), ["--dtype", "bfloat16"])
        try:
            await child.ready(600)
            target = await connect(child.url, None, None, is_own=True)
            prompts = Prompts(target, seed=1)
            for name, case in (
                ("decode", lambda: decode(target, prompts, folder, rounds)),
                ("together", lambda: together(target, prompts, 1 if rounds < 5 else 3)),
                ("prefix", lambda: prefix(target, prompts, rounds)),
                ("interference", lambda: interference(target, prompts, 2)),
            ):
                if name in cases:
                    found[name] = await case()
                    print(name, json.dumps(found[name]), flush=True)
            await target.http.aclose()
        finally:
            child.stop()
    if "start" in cases:
        found["start"] = await start(rounds)
        print("start", json.dumps(found["start"]), flush=True)
    return found


def main() -> None:
    every = ["decode", "together", "prefix", "interference", "start"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-dir", type=pathlib.Path, required=True, help="created if it does not exist")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("cases", nargs="*", default=every)
    args = parser.parse_args()
    found = asyncio.run(measure(make(args.model_dir), args.rounds, args.cases))
    found["machine"] = machine()
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
