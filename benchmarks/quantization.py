"""What rounding costs and gives: error, agreement and perplexity against float32, memory, and the time of a step.

    python -m benchmarks.quantization [MODEL …] --random /tmp/qwen3-0.6b-random --json FILE

Trained models (the built-in one, and folders that are named) write texts in float32, drawn at temperature 1 from their
first token; each variant then reads these texts. `perplexity` is over the texts, `divergence` the mean KL divergence
of its distributions from float32's, `agreement` the share of places where the most likely token is the same, `error`
the distance of the logits relative to their spread. For the shape of Qwen3-0.6B with random weights there is the error
on random tokens, and the time of steps, of all variants in turns and as a ratio to bfloat16's.

--variant NAME={"setting": "value"} measures other settings of the engine, or several; --threads 1 counts the thread's
own time, which tells something also while others use the machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from engine import EngineConfig
from engine.attention import AttentionMeta
from engine.build import build
from engine.models import Forward
from engine.runner import Runner
from engine.types import EngineInfo
from server.cli.bench.session import machine

from .model import make

REFERENCE = {"dtype": "float32"}
VARIANTS: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
    "int8 cache": {"dtype": "bfloat16", "kv_dtype": "int8"},
    "int8, int8 cache": {"dtype": "bfloat16", "quantization": "int8", "kv_dtype": "int8"},
}
BASE = "bfloat16"  # what times are compared with
TEXTS, TOKENS = 8, 250  # of a trained model
RANDOM_TOKENS = 192
CONTEXT = 64  # tokens before a measured step
STEPS = {"1 row": (1, 1), "16 rows": (16, 1), "256 tokens": (1, 256)}  # rows, new tokens of each


class Engine:
    """A model with a cache, under some settings, and steps on the first blocks of the cache."""

    def __init__(self, model: str, threads: int | None, settings: dict[str, Any]) -> None:
        told = {"model": model, "device": "cpu", "threads": threads, "num_blocks": 160, "max_seqs": 16, **settings}
        config = msgspec.convert({**told, "max_len": 512}, EngineConfig)
        self.runner: Runner
        self.info: EngineInfo
        self.runner, self.info, self.config = build(config)

    def logits(self, texts: Tensor, cached: int, new: int, *, last: bool = False) -> Tensor:
        """[rows * new, vocab] of texts: [rows, length]; tokens before `cached` are in the cache already."""
        rows, size = len(texts), self.config.block_size
        blocks = -(-texts.shape[1] // size)
        places = [(range(row * blocks, (row + 1) * blocks), cached, new) for row in range(rows)]
        plan = self.runner.cache.plan(AttentionMeta.of(places, size))
        ids = texts[:, cached : cached + new].reshape(-1)
        positions = torch.arange(cached, cached + new).repeat(rows)
        at = torch.arange(new - 1, rows * new, new) if last else torch.arange(rows * new)
        with torch.inference_mode():
            return self.runner.model.forward(Forward(ids, positions, plan, self.runner.cache, at)).logits


def write(engine: Engine, first: int) -> Tensor:
    """[TEXTS, TOKENS] that the model draws behind a first token."""
    draws = torch.Generator().manual_seed(0)
    texts = torch.full((TEXTS, TOKENS), first)
    for place in range(TOKENS - 1):
        chances = engine.logits(texts, place, 1).softmax(-1)
        texts[:, place + 1] = torch.multinomial(chances, 1, generator=draws)[:, 0]
    return texts


def read(engine: Engine, texts: Tensor) -> Tensor:
    """The logits of every place of every text, [TEXTS * length, vocab], one text at a time."""
    return torch.cat([engine.logits(text[None], 0, len(text)) for text in texts])


def judged(got: Tensor, want: Tensor, texts: Tensor) -> dict[str, float]:
    """How far logits are from the reference's; the perplexity counts the places that a token follows."""
    logs, wanted = got.log_softmax(-1), want.log_softmax(-1)
    follows = torch.arange(len(got)).view(texts.shape)[:, :-1].reshape(-1)
    drawn = logs[follows].gather(1, texts[:, 1:].reshape(-1, 1))
    spread = want - want.mean(-1, keepdim=True)
    return {
        "perplexity": (-drawn.mean()).exp().item(),
        "divergence": (wanted.exp() * (wanted - logs)).sum(-1).mean().item(),
        "agreement": (got.argmax(-1) == want.argmax(-1)).float().mean().item(),
        "error": ((got - want).norm() / spread.norm()).item(),
    }


def trained(model: str, variants: dict[str, dict[str, Any]], threads: int | None) -> dict[str, Any]:
    """Each variant's figures on texts of a trained model."""
    reference = Engine(model, threads, REFERENCE)
    texts = write(reference, 0 if model == "builtin" else first_token(Path(model)))
    want = read(reference, texts)
    found = {"float32": {**judged(want, want, texts), **memory(reference)}}
    for name, settings in variants.items():
        engine = Engine(model, threads, settings)
        found[name] = {**judged(read(engine, texts), want, texts), **memory(engine)}
    return found


def memory(engine: Engine) -> dict[str, int]:
    """Bytes of the weights, and of a token in the cache."""
    return {"weights_bytes": engine.info.weights_bytes, "kv_bytes_per_token": engine.info.kv_bytes_per_token}


def first_token(folder: Path) -> int:
    """The token that a text begins with."""
    return int(json.loads((folder / "config.json").read_text()).get("bos_token_id") or 0)


def random(model: str, variants: dict[str, dict[str, Any]], threads: int | None, rounds: int) -> dict[str, Any]:
    """Each variant's error on random tokens, and the time of its steps."""
    reference = Engine(model, threads, REFERENCE)
    texts = torch.randint(0, reference.info.vocab_size, (1, RANDOM_TOKENS), generator=torch.Generator().manual_seed(0))
    want = read(reference, texts)
    found: dict[str, Any] = {"float32": {"error": 0.0, **memory(reference)}}
    del reference
    engines = {name: Engine(model, threads, settings) for name, settings in variants.items()}
    for name, engine in engines.items():
        figures = judged(read(engine, texts), want, texts)
        found[name] = {"error": figures["error"], **memory(engine)}
    del want
    now = time.thread_time if threads == 1 else time.perf_counter
    for step, (rows, new) in STEPS.items():
        line = torch.zeros(rows, CONTEXT + new, dtype=torch.int64)
        step_of = {name: partial(engine.logits, line, CONTEXT, new, last=True) for name, engine in engines.items()}
        times = turns(step_of, rounds, now)
        for name, taken in times.items():
            seconds = statistics.median(taken)
            ratios = [base / own for base, own in zip(times[BASE], taken, strict=True)] if BASE in times else []
            ratio = statistics.median(ratios) if ratios else None
            found[name].setdefault("steps", {})[step] = {"seconds": seconds, f"times_{BASE}": ratio}
    return found


def turns(cases: dict[str, Callable[[], Any]], rounds: int, now: Callable[[], float]) -> dict[str, list[float]]:
    """The times of all cases, one after another in every round; a first round warms up."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    for round_ in range(rounds + 1):
        for name, case in cases.items():
            began = now()
            case()
            if round_:
                times[name].append(now() - began)
    return times


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    lines = [
        "| model | variant | weights | cache of a token | logit error | perplexity | same token | KL |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for model, found in result["trained"].items():
        for name, each in found.items():
            sizes = f"{each['weights_bytes'] / 1e6:.1f} MB | {each['kv_bytes_per_token'] / 1e3:.2f} kB"
            lines.append(
                f"| {model} | {name} | {sizes} | {each['error']:.4f} "
                f"| {each['perplexity']:.4f} | {each['agreement']:.2%} | {each['divergence']:.5f} |"
            )
    if result["random"]:
        lines += [
            "",
            f"| 0.6B shape, random | weights | cache of a token | logit error | {' | '.join(STEPS)} |",
            "|---|---|---|---|---|---|---|",
        ]
    for name, each in result["random"].items():
        steps = [
            f"{step['seconds'] * 1e3:.1f} ms ({step[f'times_{BASE}'] or 0:.2f}x)"
            for step in each.get("steps", {}).values()
        ]
        sizes = f"{each['weights_bytes'] / 1e6:.0f} MB", f"{each['kv_bytes_per_token'] / 1e3:.1f} kB"
        cells = [name, *sizes, f"{each['error']:.4f}", *(steps or ["-"] * len(STEPS))]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def variant(text: str) -> tuple[str, dict[str, Any]]:
    """NAME={"setting": value}"""
    name, _, settings = text.partition("=")
    return name, dict(json.loads(settings))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="folders of trained models, beside the built-in one")
    parser.add_argument("--random", metavar="DIR", help="folder of the random 0.6B shape; made when it is not there")
    parser.add_argument("--variant", type=variant, action="append", default=[], metavar="NAME=JSON")
    parser.add_argument("--threads", type=int, help="default: torch's choice")
    parser.add_argument("--rounds", type=int, default=7, help="of timed steps")
    parser.add_argument("--json", metavar="FILE", help="write the result here too")
    given = parser.parse_args()
    variants = {**VARIANTS, **dict(given.variant)}
    threads = given.threads
    result: dict[str, Any] = {
        "machine": machine(),
        "threads": threads,
        "variants": variants,
        "trained": {},
        "random": {},
    }
    for model in ["builtin", *given.models]:
        result["trained"][Path(model).name] = trained(model, variants, threads)
        print(f"{model}: done", file=sys.stderr)
    if given.random:
        folder = make(Path(given.random))
        result["random"] = random(str(folder), variants, threads, given.rounds)
    print(table(result))
    if given.json:
        Path(given.json).write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
