"""`make oracle`: Pequod's greedy tokens against transformers' `generate`, for each architecture, in five situations.

alone      one request at a time, the whole prompt in one step
mixed      each request joins when the one before it has its first token: prompts beside decode rows
chunked    steps of so few tokens that every prompt comes in many chunks
prefix     every prompt after a request that computed it: its beginning comes from the prefix cache
preempted  so few blocks that requests are preempted and computed again

The trained models are compared in float32 with their committed references; random weights in float64, where a
difference is an error and not a rounding. All seeds were fixed before the first run.
"""

from __future__ import annotations

import asyncio
import json
import os
import pathlib
import random
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from engine import EngineConfig, EngineRequest, LocalEngine, SamplingParams

NEW_TOKENS = 20
LENGTHS = (1, 2, 5, 16, 17, 31, 48, 70)
# transformers recomputes these frequencies from the longest position so far, Pequod fixes them once from the model
# length: the two agree where that length is one for which nothing is stretched.
MAX_LEN = {"llama-dynamic": 256, "llama-longrope": 64, "phi3-longrope": 64, "phi3-partial-longrope": 64}
PREEMPTED_CHUNK = 16  # tokens of a step, so that windows hold less than prompts
SITUATIONS = ("alone", "mixed", "chunked", "prefix", "preempted")


@dataclass(frozen=True)
class Case:
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    max_tokens: int
    stop_ids: tuple[int, ...] = ()


async def run(config: EngineConfig, cases: list[Case], situation: str) -> int:
    """How many of the cases come out as they must; raises AssertionError when the situation did not arise."""
    preempted = mixed = 0
    rows: dict[int, int] = {}

    def watch(stats) -> None:
        nonlocal preempted, mixed
        preempted += stats.preempted
        for request_id, _ in stats.rows:
            rows[request_id] = rows.get(request_id, 0) + 1
        mixed += stats.prompt_tokens > 0 and stats.decode_tokens > 0

    begun = [asyncio.Event() for _ in cases]
    async with LocalEngine(config) as engine:
        engine.on_step.append(watch)

        async def one(request_id: int, case: Case) -> tuple[bool, int]:
            params = SamplingParams(max_tokens=case.max_tokens, temperature=0.0, stop_ids=case.stop_ids)
            tokens: list[int] = []
            hits = 0
            if situation == "mixed" and request_id:
                await begun[request_id - 1].wait()
            async for delta in engine.generate(EngineRequest(id=request_id, prompt_ids=case.prompt, params=params)):
                tokens += delta.token_ids
                begun[request_id % len(cases)].set()
                if delta.stats:
                    hits = delta.stats.cached_tokens
            return tuple(tokens) == case.output, hits

        if situation == "prefix":
            for request_id, case in enumerate(cases, start=len(cases)):
                await one(request_id, replace(case, max_tokens=1))
        if situation == "alone":
            found = [await one(request_id, case) for request_id, case in enumerate(cases)]
        else:
            found = await asyncio.gather(*(one(request_id, case) for request_id, case in enumerate(cases)))
        results, hits = zip(*found, strict=True)
        cached = sum(each > 0 for each in hits)
    assert situation != "preempted" or preempted > 0, "nothing was preempted"
    assert situation != "prefix" or cached > 0, "nothing was found in the cache"
    assert situation != "mixed" or mixed > 0, "no step had prompts and decode rows"
    chunked = sum(rows[i] > len(case.output) for i, case in enumerate(cases))
    assert situation != "chunked" or chunked > len(cases) // 2, "most prompts came whole"
    return sum(results)


def settings(folder: pathlib.Path, dtype: str, situation: str, cases: list[Case], max_len: int | None) -> EngineConfig:
    longest = max(len(case.prompt) + case.max_tokens for case in cases)
    block_size = 4 if situation in ("prefix", "preempted") else 16
    num_blocks = 512
    if situation == "preempted":
        from tests.models import cache_groups

        num_blocks = cache_groups(folder).blocks_for(longest, block_size, PREEMPTED_CHUNK) + 4
    return EngineConfig(
        model=str(folder),
        device=os.environ.get("PEQUOD_ORACLE_DEVICE", "cpu"),
        dtype=dtype,
        max_len=max_len,
        block_size=block_size,
        num_blocks=num_blocks,
        max_seqs=4 if situation == "chunked" else 8,
        max_batched_tokens={"chunked": 6, "preempted": PREEMPTED_CHUNK}.get(situation, 512),
        prefix_caching=situation in ("prefix", "preempted"),
        debug=True,
    )


def check(
    folder: pathlib.Path,
    dtype: str,
    cases: list[Case],
    max_len: int | None = None,
    situations: Iterable[str] = SITUATIONS,
) -> dict[str, int]:
    """Situation -> number of cases with transformers' tokens."""
    return {
        situation: asyncio.run(run(settings(folder, dtype, situation, cases, max_len), cases, situation))
        for situation in situations
    }


def generated(name: str, folder: pathlib.Path, dtype: str, seed: int) -> list[Case]:
    """Greedy continuations of random prompts by transformers."""
    import torch

    from tests.models import VOCAB, make, oracle

    make(name, folder, dtype=getattr(torch, dtype), seed=seed)
    model = oracle(folder, getattr(torch, dtype))
    rng = random.Random(seed)
    prompts = []
    for length in LENGTHS:
        if length + NEW_TOKENS <= MAX_LEN.get(name, 1000):
            prompts.append([rng.randrange(3, VOCAB) for _ in range(length)])
    with torch.inference_mode():
        outputs = continuations(model, prompts)
    return [Case(tuple(prompt), tuple(output), NEW_TOKENS) for prompt, output in zip(prompts, outputs, strict=True)]


def continuations(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    """What `generate` gives for each prompt alone, in a sixth of the passes.

    All prompts are continued in one padded batch. Padding changes the tokens of some models, so each continuation is
    checked by a pass over the prompt with it: the token of each position must be the likeliest one after the position
    before. Where it is not, `generate` gets the prompt alone.
    """
    import torch

    def generate(rows: list[list[int]]) -> list[list[int]]:
        longest = max(map(len, rows))
        ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
        limits = {"max_new_tokens": NEW_TOKENS, "eos_token_id": None, "pad_token_id": 0}
        return model.generate(ids, attention_mask=mask, do_sample=False, **limits)[:, longest:].tolist()

    outputs = generate(prompts)
    for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        logits = model(torch.tensor([prompt + output[:-1]])).logits[0, len(prompt) - 1 :]
        if logits.argmax(-1).tolist() != output:
            [outputs[i]] = generate([prompt])
    return outputs


def referenced(folder: pathlib.Path) -> list[Case]:
    """The committed references of a trained model."""
    reference = json.loads((folder / "reference_greedy.json").read_text())
    return [
        Case(tuple(c["prompt_token_ids"]), tuple(c["output_token_ids"]), c["max_new_tokens"], (1, 2))
        for c in reference["cases"]
    ]


def main(argv: list[str]) -> int:
    from tests.models import FLOAT32_ONLY, MODELS

    for name, value in {
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }.items():
        os.environ.setdefault(name, value)
    rows: list[tuple[str, str, int, dict[str, int]]] = []
    data = os.environ.get("PEQUOD_TEST_DATA")
    wanted = set(argv)
    print(f"{'architecture':28} {'dtype':8} " + " ".join(f"{name:>10}" for name in SITUATIONS), flush=True)

    def show(name: str, dtype: str, cases: list[Case], counts: dict[str, int]) -> None:
        rows.append((name, dtype, len(cases), counts))
        cells = " ".join(f"{counts[s]} of {len(cases)}".rjust(10) for s in SITUATIONS)
        print(f"{name:28} {dtype:8} {cells}", flush=True)

    for name in ("stories260k", "babyllama-char-940k"):
        if data is None:
            print(f"{name:28} skipped: PEQUOD_TEST_DATA is not set")
        elif not wanted or name in wanted:
            folder = pathlib.Path(data) / "models" / name
            cases = referenced(folder)
            show(name, "float32", cases, check(folder, "float32", cases))
    with tempfile.TemporaryDirectory() as scratch:
        for seed, name in enumerate(MODELS, start=1):
            if wanted and name not in wanted:
                continue
            dtype = "float32" if name in FLOAT32_ONLY else "float64"
            folder = pathlib.Path(scratch) / name
            cases = generated(name, folder, dtype, seed)
            show(name, dtype, cases, check(folder, dtype, cases, MAX_LEN.get(name)))
    wrong = [f"{name} {s}" for name, _, total, counts in rows for s in SITUATIONS if counts[s] != total]
    print("all equal" if not wrong else f"different: {', '.join(wrong)}")
    return 1 if wrong or not rows else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
