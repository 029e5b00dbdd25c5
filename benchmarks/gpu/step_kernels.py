"""Measures what each kernel of a decode step takes on a GPU, by torch's profiler.

    python -m benchmarks.gpu.step_kernels --shape Qwen3.5-0.8B --rows 1 16

Prints one line of JSON for each number of rows: the time of a step without the profiler, its launches, and of each
kernel its launches and microseconds in a step. A kernel that is launched before the one before it has ended also counts
the time in which it waits, so the sum may be more than the step's time.
"""

from __future__ import annotations

import argparse
import collections
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu import shapes
from benchmarks.gpu.engine import GREEDY, Loop
from engine.build import build
from engine.config import EngineConfig

WARM, TIMED, PROFILED = 20, 50, 10  # steps
LISTED = 20  # kernels
NAME = 60  # characters


def measure(loop: Loop, rows: int, context: int) -> dict[str, Any]:
    """Return the times of steps in which `rows` sequences decode, after prompts of `context` tokens."""
    for _ in range(rows):
        loop.add(context, 1 << 20, GREEDY)
    while len(loop.scheduler.running) < rows or any(seq.is_prompt for seq in loop.scheduler.running):
        loop.step()
    for _ in range(WARM):
        loop.step()
    started = time.perf_counter()
    for _ in range(TIMED):
        loop.step()
    step = (time.perf_counter() - started) / TIMED
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(PROFILED):
            loop.step()
        torch.cuda.synchronize()
    kernels: dict[str, list[float]] = collections.defaultdict(lambda: [0, 0.0])
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    for event in profiler.profiler.kineto_results.events():
        if str(event.device_type()).endswith("CUDA"):
            found = kernels[event.name()[:NAME]]
            found[0] += 1 / PROFILED
            found[1] += event.duration_ns() / 1000 / PROFILED
    loop.drain()
    longest = sorted(kernels.items(), key=lambda item: -item[1][1])[:LISTED]
    return {
        "measurement": f"decode {rows}, kernels",
        "step_us": 1e6 * step,
        "launches": sum(count for count, _ in kernels.values()),
        "kernels": {name: {"launches": count, "us": total} for name, (count, total) in longest},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(shapes.SHAPES), required=True)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--quantization", default="none", choices=["none", "int8", "int4", "fp8"])
    args = parser.parse_args()
    is_fp8 = args.quantization == "fp8"
    with tempfile.TemporaryDirectory() as folder:
        model = str(shapes.write(args.shape, Path(folder), fp8=is_fp8))
        quantization = "none" if is_fp8 else args.quantization
        built = build(
            EngineConfig(
                model=model,
                load_format="dummy",
                device="cuda",
                quantization=quantization,
                async_scheduling=True,
                max_len=args.context + 1024,
                max_seqs=256,
                prefix_caching=False,
            )
        )
    print(json.dumps({"measurement": "load", "graphs": built.info.graphs, "notes": built.info.notes}), flush=True)
    loop = Loop(built)
    for rows in args.rows:
        print(json.dumps(measure(loop, rows, args.context)), flush=True)


if __name__ == "__main__":
    main()
