"""Requests alone and together, with --batch-invariant and without: what differs, and what the mode costs.

    python -m benchmarks.gpu.invariance --shape 0.6B --device cuda

Prints one line of JSON per measurement.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu import shapes
from benchmarks.gpu.engine import GREEDY, Loop, decode, prompt
from engine.build import build
from engine.config import EngineConfig
from engine.types import ConfigError, EngineRequest, SamplingParams

Answer = tuple[list[int], list[float]]  # tokens, and log-probabilities of these and of the most likely ones
MODES = {  # engines that are compared
    "eager": {"batch_invariant": True, "enforce_eager": True},
    "graphs": {"batch_invariant": True},
    "default": {},
}


def prompts(count: int, longest: int, vocab_size: int) -> list[tuple[int, ...]]:
    """Return random prompts, of which some begin alike."""
    rng = random.Random(0)
    shared = tuple(rng.randrange(vocab_size) for _ in range(longest // 3))
    found = []
    for number in range(count):
        own = tuple(rng.randrange(vocab_size) for _ in range(rng.randint(1, longest - len(shared))))
        found.append((*shared, *own) if number % 3 == 0 else own)
    return found


def answers(loop: Loop, asked: list[tuple[int, ...]], output: int, *, together: bool) -> list[Answer]:
    """Return what an engine answers to prompts, one after the other or all at once."""
    found: dict[int, Answer] = {}
    for batch in [asked] if together else [[each] for each in asked]:
        for ids in batch:
            loop.requests += 1
            found[loop.requests] = [], []
            params = SamplingParams(max_tokens=output, temperature=0.8, top_p=0.9, seed=len(found), logprobs=2)
            refused = loop.scheduler.add(EngineRequest(id=loop.requests, prompt_ids=ids, params=params))
            assert refused is None, refused
        while not loop.scheduler.is_idle:
            for delta in loop.step():
                tokens, logprobs = found[delta.id]
                tokens += delta.token_ids
                for entry in delta.logprobs or ():
                    logprobs += [entry.logprob, *entry.top_logprobs]
        loop.drain()
    return list(found.values())


def differences(found: list[Answer], wanted: list[Answer]) -> dict[str, int]:
    """Return how many tokens, and log-probabilities of equal completions, were compared and differ."""
    tokens = logprobs = count = compared = 0
    for (own_tokens, own), (want_tokens, want) in zip(found, wanted, strict=True):
        tokens += sum(one != other for one, other in zip(own_tokens, want_tokens, strict=True))
        if own_tokens == want_tokens:
            logprobs += sum(one != other for one, other in zip(own, want, strict=True))
            compared += len(want)
        count += len(want_tokens)
    return {"tokens": count, "tokens_differing": tokens, "logprobs": compared, "logprobs_differing": logprobs}


def show(measurement: str, **result: Any) -> None:
    print(json.dumps({"measurement": measurement, **result}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(shapes.SHAPES), default="0.6B")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=60.0)
    args = parser.parse_args()
    end, is_tiny = time.perf_counter() + args.seconds, args.shape == "tiny"
    alone: list[Answer] | None = None  # of the first engine
    speeds: dict[str, dict[str, float]] = {}
    for mode, settings in MODES.items():
        if time.perf_counter() + (0 if is_tiny else 12) > end:
            show(mode, skipped="no time was left")
            continue
        with tempfile.TemporaryDirectory() as folder:
            config = EngineConfig(
                model=str(shapes.write(args.shape, Path(folder))),
                load_format="dummy",
                device=args.device,
                max_len=256 if is_tiny else 4096,
                max_seqs=8 if is_tiny else 256,
                num_blocks=128 if is_tiny else 6144,
                **settings,
            )
            started = time.perf_counter()
            try:
                built = build(config)
            except ConfigError as error:
                show(mode, refused=str(error))
                continue
        loop = Loop(built)
        show(f"{mode}, load", load_s=time.perf_counter() - started, exact=built.info.exact, notes=built.info.notes)
        asked = prompts(6 if is_tiny else 24, 40 if is_tiny else 700, built.info.vocab_size)
        output = 4 if is_tiny else 32
        own = answers(loop, asked, output, together=False)
        show(f"{mode}, together", **differences(answers(loop, asked, output, together=True), own))
        if alone is not None and mode != "default":
            show(f"{mode}, alone, beside eager", **differences(own, alone))
        alone = own if alone is None else alone
        speeds[mode] = {}
        for rows in (1, 4) if is_tiny else (1, 16, 64, 256):
            speeds[mode][f"decode {rows}"] = decode(loop, rows, 16 if is_tiny else 128, GREEDY, 0.5)["ms"]["step"]
        speeds[mode]["prompt"] = prompt(loop, 32 if is_tiny else 2048)["ttft_ms"]
    if speeds.keys() >= {"graphs", "default"}:
        ratios = {name: took / speeds["default"][name] for name, took in speeds["graphs"].items()}
        show("times of the default, with --batch-invariant", **ratios)


if __name__ == "__main__":
    main()
