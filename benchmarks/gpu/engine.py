"""Measures an engine without HTTP: the scheduler and the runner in one loop, with random weights.

    python -m benchmarks.gpu.engine --shape 0.6B --device cuda --seconds 60

Prints one line of JSON per measurement. __main__.py runs this in a process of its own, whose memory ends with it.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from engine.batch import Batch
from engine.build import Built, build
from engine.config import EngineConfig
from engine.models.decoder import Decoder
from engine.models.gpu.executor import measured
from engine.models.gpu.scaled import ByTorch, Narrow
from engine.models.gpu.single import Single
from engine.models.gpu.skinny import CANDIDATES, AnyTile, is_measurable
from engine.models.gpu.tiles import AnyTile as QuantizedTile
from engine.runner import Step
from engine.runner.cuda_graphs import CudaGraphs
from engine.scheduler import Scheduler
from engine.types import EngineRequest, SamplingParams, TokenDelta

from . import shapes

GREEDY = {"temperature": 0.0}
POPULAR = {"temperature": 0.7, "top_p": 0.9, "top_k": 20}  # what clients and generation_config.json ask for


class Loop:
    """An engine's loop on one thread. It measures each part of a step on the host's clock.

    With asynchronous scheduling a step is launched before the one before it is collected, as engine/loop.py does it.
    """

    def __init__(self, built: Built) -> None:
        self.built = built
        info, has_states = built.info, bool(built.runner.model.spec.mixers)
        self.scheduler = Scheduler(
            built.config, info.num_blocks, info.vocab_size, groups=info.groups, has_states=has_states
        )
        self.is_ahead = bool(built.config.async_scheduling)
        self.flight: tuple[Batch, Step] | None = None  # launched and not collected
        self.random = random.Random(0)
        self.requests = 0
        self.seconds: dict[str, list[float]] = {}  # by part, of each step

    def add(self, prompt: int, output: int, sampling: dict[str, Any]) -> None:
        self.requests += 1
        tokens = tuple(self.random.randrange(self.built.info.vocab_size) for _ in range(prompt))
        params = SamplingParams(max_tokens=output, seed=self.requests, **sampling)
        refused = self.scheduler.add(EngineRequest(id=self.requests, prompt_ids=tokens, params=params))
        assert refused is None, refused

    def step(self) -> list[TokenDelta]:
        """Launch a step and collect one; returns what the collected one delivers."""
        started = time.perf_counter()
        batch = self.scheduler.schedule()
        assert batch is not None or self.flight is not None, "there is nothing to compute"
        scheduled = time.perf_counter()
        launched = None if batch is None else (batch, self.built.runner.launch(batch).sample())
        due, self.flight = (self.flight, launched) if self.is_ahead else (launched, None)
        if due is None:
            return []
        result = due[1].result()
        computed = time.perf_counter()
        deltas = self.scheduler.update(due[0], result)
        ended = time.perf_counter()
        parts = {"schedule": scheduled - started, "update": ended - computed, "step": ended - started, **result.seconds}
        for name, seconds in parts.items():
            self.seconds.setdefault(name, []).append(seconds)
        return deltas

    def drain(self) -> None:
        """End all requests; the runner forgets them with the next step."""
        for request_id in list(self.scheduler.by_id):
            self.scheduler.abort(request_id)
        if self.flight is not None:
            batch, step = self.flight
            self.scheduler.update(batch, step.result())
            self.flight = None
        self.seconds = {}


def mean_length(loop: Loop) -> float:
    """Return the number of tokens of a running sequence."""
    return statistics.mean(len(seq.tokens) for seq in loop.scheduler.running)


def decode(loop: Loop, rows: int, context: int, sampling: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Return the time of steps in which `rows` sequences sample one token each, after prompts of `context` tokens.

    Where they do not fit the cache together, some are preempted: `tokens_per_s` counts what was delivered.
    """
    for _ in range(rows):
        loop.add(context, 1 << 20, sampling)
    for _ in range(10 * rows + 10):
        loop.step()
        if len(loop.scheduler.running) == rows and not any(seq.is_prompt for seq in loop.scheduler.running):
            break
    for _ in range(3):
        loop.step()
    loop.seconds.clear()
    lengths = [mean_length(loop)]
    preempted, tokens = loop.scheduler.counters.preempted, 0
    end = time.perf_counter() + seconds
    for number in range(loop.scheduler.max_len - context - 8):
        if number >= 3 and time.perf_counter() > end:
            break
        tokens += sum(len(delta.token_ids) for delta in loop.step())
    found = {name: statistics.median(values) for name, values in loop.seconds.items()}
    limits = loop.built.info.roofline
    lengths.append(mean_length(loop))
    length = statistics.mean(lengths)  # in the middle, as the median step
    limit = limits.seconds(rows, int(rows * length), int(rows * length), rows) if limits else None
    steps, took = len(loop.seconds["step"]), sum(loop.seconds["step"])
    loop.drain()
    return {
        "tokens_per_s": tokens / took,
        "ms": {name: 1000 * value for name, value in found.items()},
        "limit_ms": None if limit is None else 1000 * limit,
        "steps": steps,
        "preempted": loop.scheduler.counters.preempted - preempted,
    }


def prompt(loop: Loop, length: int) -> dict[str, Any]:
    """Return the time to the first token of a prompt on an idle engine: the median of three."""
    found = []
    for _ in range(4):
        loop.add(length, 1, GREEDY)
        started = time.perf_counter()
        while not any(delta.finish_reason for delta in loop.step()):
            pass
        found.append(time.perf_counter() - started)
        loop.drain()
    return {"ttft_ms": 1000 * statistics.median(found[1:]), "first_ms": 1000 * found[0]}


def requests(loop: Loop, count: int, lengths: tuple[int, int], seconds: float) -> dict[str, Any]:
    """Return the throughput of `count` requests with prompts and outputs of random lengths, all there at once."""
    for _ in range(count):
        loop.add(loop.random.randint(*lengths), loop.random.randint(*lengths), {"temperature": 0.6})
    tokens, started = 0, time.perf_counter()
    while not loop.scheduler.is_idle and time.perf_counter() - started < seconds:
        tokens += sum(len(delta.token_ids) for delta in loop.step())
    took = time.perf_counter() - started
    is_whole = loop.scheduler.is_idle
    loop.drain()
    return {"tokens_per_s": tokens / took, "seconds": took, "is_whole": is_whole}


def graphs(built: Built) -> dict[str, Any]:
    """Capture what an idle engine would capture, and return what all graphs take."""
    found = built.runner.graphs
    if found is None:
        reason = "off" if built.config.enforce_eager else built.runner.graphs_note
        return {"skipped": reason or "CUDA graphs need a GPU"}
    device = CudaGraphs(built.runner.device)
    before, started, at_start = device.memory(), time.perf_counter(), found.num_captured
    while found.capture_next():
        pass
    took, after, later = time.perf_counter() - started, device.memory(), found.num_captured - at_start
    # What the driver takes, which `engine/memory.py:GraphReserve` has a maximum for: if nobody else uses the GPU.
    of_driver = (before.free - after.free) - (after.reserved - before.reserved)
    return {
        "at_start": at_start,
        "later": later,
        "later_s": took,
        "mb": found.num_bytes / 1e6,
        "driver_mb_each": of_driver / 1e6 / later if later else None,
        "problem": found.problem,
    }


def products(built: Built) -> Iterator[dict[str, Any]]:
    """Yield the microseconds of a layer's products of few rows by torch and with each tile, as at start."""
    model = built.runner.model
    if not isinstance(model, Decoder) or model.spec.decoder is None or not is_measurable(model.embedding.weight):
        return
    if not all(linear.is_plain for layer in model.layers for linear in layer.linears):
        return
    for rows in CANDIDATES:
        for part, times in measured(model.layers, rows, model.spec.decoder.activation).items():
            labels = {tile: "torch" if tile is None else _label(tile) for tile in times}
            found = {labels[tile]: 1e6 * seconds for tile, seconds in times.items()}
            if times[None] == 0.0:
                continue  # experts take the place of these products
            gb = getattr(model.layers[0], part).weight.nbytes / 1e9
            yield {"measurement": f"{part}, {rows} rows, us", **found, "best_gb_per_s": gb / min(times.values())}


def quantized(built: Built) -> Iterator[dict[str, Any]]:
    """Yield the tiles of a layer's products with quantized weights, as chosen at start."""
    model = built.runner.model
    for part in ("qkv", "output", "gate_up", "down") if isinstance(model, Decoder) else ():
        linear = getattr(model.layers[0], part, None)
        if linear is not None and linear.quantized is not None:
            tiles = linear.quantized.parts[0].tiles
            yield {
                "measurement": f"{part}, tiles",
                **{f"{most} rows": _name(tile) for most, tile in tiles.items()},
            }


def _name(tile: QuantizedTile | None) -> str:
    if tile is None:
        return "dequantized"
    if isinstance(tile, ByTorch):
        return "in fp8 by torch"
    return f"{'in fp8 ' * isinstance(tile, Narrow)}{tuple(tile)}"


def _label(tile: AnyTile) -> str:
    if isinstance(tile, Single):
        return f"one row, {tile.warps} warps, {tile.numbers} numbers"
    parts = f", {tile.parts} parts" if tile.parts > 1 else ""
    return f"tiles of {tile.rows} by {tile.columns}, {tile.warps} warps, {tile.stages} stages{parts}"


def plan(is_tiny: bool) -> list[tuple[str, float, Callable[[Loop], dict[str, Any]]]]:
    """Return (name, seconds that it takes at most, measurement), the most wanted first."""
    if is_tiny:
        return [
            ("decode 1", 1, lambda loop: decode(loop, 1, 16, GREEDY, 0.2)),
            ("decode 4 sampled", 1, lambda loop: decode(loop, 4, 16, POPULAR, 0.2)),
            ("prompt 64", 1, lambda loop: prompt(loop, 64)),
            ("8 requests", 60, lambda loop: requests(loop, 8, (4, 16), 60)),
        ]
    found: list[tuple[str, float, Callable[[Loop], dict[str, Any]]]] = []
    for rows in (1, 64, 256, 16):
        found.append((f"decode {rows}", 6, lambda loop, rows=rows: decode(loop, rows, 128, GREEDY, 1)))
    found.append(("decode 64 sampled", 6, lambda loop: decode(loop, 64, 128, POPULAR, 1)))
    for length in (128, 512, 2048, 8192):
        found.append((f"prompt {length}", 3, lambda loop, length=length: prompt(loop, length)))
    found.append(("decode 64 at 1k", 6, lambda loop: decode(loop, 64, 1024, GREEDY, 1)))
    found.append(("256 requests", 25, lambda loop: requests(loop, 256, (100, 1024), 25)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(shapes.SHAPES), required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--quantization", default="none", choices=["none", "int8", "int4", "fp8"])
    parser.add_argument("--enforce-eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--async-scheduling", action=argparse.BooleanOptionalAction)
    parser.add_argument("--seconds", type=float, default=120.0)
    args = parser.parse_args()
    end = time.perf_counter() + args.seconds
    is_tiny, is_fp8 = args.shape.startswith("tiny"), args.quantization == "fp8"
    with tempfile.TemporaryDirectory() as folder:
        config = EngineConfig(
            model=str(shapes.write(args.shape, Path(folder), fp8=is_fp8)),
            load_format="dummy",
            device=args.device,
            attention=args.attention,
            quantization="none" if is_fp8 else args.quantization,
            async_scheduling=args.async_scheduling,
            enforce_eager=args.enforce_eager,
            max_len=256 if is_tiny else 10240,
            max_seqs=8 if is_tiny else 256,
            num_blocks=128 if is_tiny else None,
            prefix_caching=False,
        )
        started = time.perf_counter()
        built = build(config)
    info = built.info
    facts = {
        "load_s": time.perf_counter() - started,
        "attention": info.attention,
        "notes": info.notes,
        "num_blocks": info.num_blocks,
        "weights_gb": info.weights_bytes / 1e9,
    }
    print(json.dumps({"measurement": "load", **facts}), flush=True)
    print(json.dumps({"measurement": "graphs", **graphs(built)}), flush=True)
    for result in (*products(built), *quantized(built)):
        print(json.dumps(result), flush=True)
    loop = Loop(built)
    for name, seconds, measure in plan(is_tiny):
        if time.perf_counter() + seconds > end:
            print(json.dumps({"measurement": name, "skipped": "no time was left"}), flush=True)
            continue
        print(json.dumps({"measurement": name, **measure(loop)}), flush=True)


if __name__ == "__main__":
    main()
