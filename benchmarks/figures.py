"""The figures of the README, each a ratio taken in one run on one machine.

    python -m benchmarks.figures --model-dir /tmp/qwen3-0.6b-random --json benchmarks/results/cpu.json

decode        batch-1 tokens/s over HTTP, against transformers' `generate` in the same run, in turns
together      16 requests at once, against the same 16 one after another
prefix        TTFT of a second request that shares 512 tokens with the first, against the first's
interference  a 4,000-token prompt arrives beside a stream: the stream's largest gap, the prompt against alone
start         the built-in model: seconds until the port answers, until /ready
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import pathlib
import platform
import random
import statistics
import subprocess
import sys
import time

import httpx

from tests.live import Server

from .model import SHAPE, make

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


def ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(1, SHAPE["vocab_size"]) for _ in range(count)]


async def stream(client: httpx.AsyncClient, prompt: list[int], new: int) -> dict:
    """One request: seconds to the first token and in all, the gaps between chunks, tokens/s after the first."""
    body = {"prompt": prompt, "max_tokens": new, "temperature": 0, "ignore_eos": True, "stream": True}
    times = []
    began = time.perf_counter()
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line.startswith("data: {") and '"text":""' not in line.replace(" ", ""):
                times.append(time.perf_counter())
    gaps = [b - a for a, b in itertools.pairwise(times)]
    return {
        "ttft_s": times[0] - began,
        "total_s": times[-1] - began,
        "max_gap_s": max(gaps, default=0.0),
        "times": times,
        "decode_tok_s": (new - 1) / (times[-1] - times[0]) if new > 1 else None,
    }


async def decode(client: httpx.AsyncClient, folder: pathlib.Path, rounds: int) -> dict:
    rng = random.Random(1)
    prompt = ids(rng, 32)
    command = [sys.executable, "-c", GENERATE, str(folder), json.dumps(prompt)]
    peer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    ours, theirs = [], []
    for turn in range(rounds + 1):  # the first is a warm-up
        peer.stdin.write("\n")
        peer.stdin.flush()
        rate = float(await asyncio.to_thread(peer.stdout.readline))
        mine = (await stream(client, ids(rng, 32), 129))["decode_tok_s"]
        if turn:
            theirs.append(rate)
            ours.append(mine)
    peer.stdin.close()
    peer.wait()
    pairs = [a / b for a, b in zip(ours, theirs, strict=True)]
    return {"pequod_tok_s": ours, "generate_tok_s": theirs, "ratio": statistics.median(pairs), "must_be_at_least": 1.0}


async def together(client: httpx.AsyncClient, rounds: int) -> dict:
    rng = random.Random(2)
    ratios, apart_s, together_s = [], [], []
    await stream(client, ids(rng, 256), 8)
    for _ in range(rounds):
        began = time.perf_counter()
        for _ in range(16):
            await stream(client, ids(rng, 256), 64)
        apart = time.perf_counter() - began
        began = time.perf_counter()
        await asyncio.gather(*(stream(client, ids(rng, 256), 64) for _ in range(16)))
        both = time.perf_counter() - began
        apart_s.append(apart)
        together_s.append(both)
        ratios.append(both / apart)
    return {"apart_s": apart_s, "together_s": together_s, "ratio": statistics.median(ratios), "must_be_at_most": 1 / 3}


async def prefix(client: httpx.AsyncClient, rounds: int) -> dict:
    rng = random.Random(3)
    ratios = []
    for _ in range(rounds + 1):
        shared = ids(rng, 512)
        first = await stream(client, shared + ids(rng, 16), 2)
        second = await stream(client, shared + ids(rng, 16), 2)
        ratios.append(second["ttft_s"] / first["ttft_s"])
    return {"ratio": statistics.median(ratios[1:]), "ratios": ratios[1:], "must_be_at_most": 0.3}


async def interference(client: httpx.AsyncClient, rounds: int) -> dict:
    rng = random.Random(4)
    gaps, ratios = [], []
    for _ in range(rounds):
        alone = await stream(client, ids(rng, 4000), 1)
        running = asyncio.create_task(stream(client, ids(rng, 32), 200))
        await asyncio.sleep(1.5)
        beside = await stream(client, ids(rng, 4000), 1)
        gaps.append((await running)["max_gap_s"])
        ratios.append(beside["ttft_s"] / alone["ttft_s"])
    return {
        "largest_gap_s": max(gaps),
        "gap_must_be_at_most": 2.0,
        "ratio": statistics.median(ratios),
        "must_be_at_most": 1.3,
    }


def start(rounds: int) -> dict:
    ports, readies = [], []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        with Server(wait=False) as server:
            port = None
            while True:
                try:
                    status = server.client.get("/ready").status_code
                except httpx.TransportError:
                    time.sleep(0.01)
                    continue
                port = port or time.perf_counter() - began
                if status == 200:
                    break
                time.sleep(0.01)
            ports.append(port)
            readies.append(time.perf_counter() - began)
            server.stop()
    return {
        "port_s": statistics.median(ports[1:]),
        "port_must_be_at_most": 1.0,
        "ready_s": statistics.median(readies[1:]),
        "must_be_at_most": 4.0,
    }


async def measure(folder: pathlib.Path, rounds: int, cases: list[str]) -> dict:
    found: dict = {}
    if set(cases) - {"start"}:
        with Server(str(folder), "--dtype", "bfloat16") as server:
            async with httpx.AsyncClient(base_url=server.url, timeout=600) as client:
                for name, case in (
                    ("decode", lambda: decode(client, folder, rounds)),
                    ("together", lambda: together(client, 1 if rounds < 5 else 3)),
                    ("prefix", lambda: prefix(client, rounds)),
                    ("interference", lambda: interference(client, 2)),
                ):
                    if name in cases:
                        found[name] = await case()
                        print(name, json.dumps(found[name]), flush=True)
    if "start" in cases:
        found["start"] = start(rounds)
        print("start", json.dumps(found["start"]), flush=True)
    return found


def main() -> None:
    every = ["decode", "together", "prefix", "interference", "start"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-dir", type=pathlib.Path, required=True, help="made when it is not there")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("cases", nargs="*", default=every)
    args = parser.parse_args()
    found = asyncio.run(measure(make(args.model_dir), args.rounds, args.cases))
    processor = next(
        (line.partition(":")[2].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")),
        platform.processor(),
    )
    found["machine"] = {"processor": processor, "python": platform.python_version()}
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
