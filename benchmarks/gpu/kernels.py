"""Attention's kernels: against a float64 oracle, and their speed beside the device's limits.

    python -m benchmarks.gpu.kernels --device cuda

Prints one line of JSON per measurement.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from engine.attention import AttentionLayer, AttentionMeta, choose, gpu_plan
from engine.kernels.launching import use_device
from engine.roofline import BYTES, SHAPES, matrix_rate, read_rate

BLOCK = 16
SLEEP_CYCLES = 2_000_000  # about a millisecond
REPLAYS = 20  # of the same step: a race moves the result
# Rows, and tokens of context that one program attends to, for the choice of gpu_plan.SPLIT: with few rows small parts
# occupy more multiprocessors, and with many they only add partial results.
PARTS = [(rows, parts) for parts in (64, 128, 512) for rows in (1, 4, 64)]
NAMES = {torch.int8: "int8", torch.float8_e4m3fn: "fp8"}


def dense(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Return causal attention in float64: q [new, heads, dim] are the last of k's and v's [tokens, kv_heads, dim]."""
    new, heads, _ = q.shape
    k, v = (x.double().repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    position = torch.arange(len(k) - new, len(k), device=q.device)[:, None]
    hidden = torch.arange(len(k), device=q.device) > position
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -math.inf).softmax(-1), v)


class Case:
    """Rows with random keys and values in a cache whose blocks are scattered."""

    def __init__(
        self,
        backend: Any,
        layer: AttentionLayer,
        rows: list[tuple[int, int]],
        device: torch.device,
        dtype: torch.dtype,
        *,
        held: torch.dtype | None = None,
    ) -> None:
        """rows: (cached tokens, new tokens) each. held: the cache's dtype; None: dtype."""
        self.backend, self.layer, self.rows = backend, layer, rows
        draw = torch.Generator(device).manual_seed(len(rows))
        needs = [-(-(cached + new) // BLOCK) for cached, new in rows]
        ids = torch.randperm(sum(needs), generator=torch.Generator().manual_seed(1)).tolist()
        self.blocks = [[ids.pop() for _ in range(need)] for need in needs]

        def numbers(count: int, heads: int, dim: int) -> Tensor:
            return torch.randn(count, heads, dim, generator=draw, device=device, dtype=torch.float32).to(dtype)

        self.keys = [numbers(cached + new, layer.num_kv_heads, layer.head_dim) for cached, new in rows]
        self.values = [numbers(cached + new, layer.num_kv_heads, layer.v_head_dim) for cached, new in rows]
        self.q = numbers(sum(new for _, new in rows), layer.num_heads, layer.head_dim)
        self.cache = backend.allocate(layer, sum(needs), BLOCK, held or dtype, device)
        for row, (cached, _) in enumerate(rows):
            if cached:  # only to store them: the result of a single query is not used
                meta = AttentionMeta.of([(self.blocks[row], 0, cached)], BLOCK, device)
                q = self.q.new_zeros(cached, layer.num_heads, layer.head_dim)
                keys, values = self.keys[row][:cached], self.values[row][:cached]
                backend.attend(self.cache, q, keys, values, backend.plan(meta))
        steps = [(blocks, cached, new) for blocks, (cached, new) in zip(self.blocks, rows, strict=True)]
        self.meta = AttentionMeta.of(steps, BLOCK, device)
        self.k = torch.cat([keys[cached:] for keys, (cached, _) in zip(self.keys, rows, strict=True)])
        self.v = torch.cat([values[cached:] for values, (cached, _) in zip(self.values, rows, strict=True)])
        self.plan = backend.plan(self.meta)

    def run(self) -> Tensor:
        out: Tensor = self.backend.attend(self.cache, self.q, self.k, self.v, self.plan)
        return out

    def oracle(self) -> Tensor:
        queries = self.q.split([new for _, new in self.rows])
        rows = zip(queries, self.keys, self.values, strict=True)
        return torch.cat([dense(q, k, v, self.layer.scale) for q, k, v in rows])


def seconds_of(work: Callable[[], Any], device: torch.device, times: int) -> float:
    """Return the median time of some work, on the device's clock.

    The device sleeps until the work has been queued, so that it never waits for the host.
    """
    found = []
    work()
    for _ in range(times):
        if device.type == "cuda":
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            torch.cuda._sleep(SLEEP_CYCLES)
            events[0].record()
            work()
            events[1].record()
            events[1].synchronize()
            found.append(events[0].elapsed_time(events[1]) / 1000)
        else:
            started = time.perf_counter()
            work()
            found.append(time.perf_counter() - started)
    return statistics.median(found)


def correctness(
    backend: Any, layer: AttentionLayer, device: torch.device, dtype: torch.dtype, held: torch.dtype
) -> dict[str, Any]:
    """Return the error of mixed rows against float64, and whether the same step gives the same bits each time."""
    rows = [(0, 1), (300, 1), (511, 1), (5, 40), (0, 130), (1000, 1)]
    case = Case(backend, layer, rows, device, dtype, held=held)
    first, want = case.run().clone(), case.oracle()
    same = all(torch.equal(first, case.run()) for _ in range(REPLAYS))
    return {"relative_error": float((first.double() - want).norm() / want.norm()), "same_bits": same}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try the program")
    parser.add_argument("--seconds", type=float, default=120.0)
    args = parser.parse_args()
    end = time.perf_counter() + args.seconds
    device, dtype = torch.device(args.device), torch.bfloat16
    use_device(device)
    heads, kv_heads, dim = (4, 2, 16) if args.tiny else (32, 8, 128)
    layer = AttentionLayer(heads, kv_heads, dim, dim, scale=dim**-0.5)
    copy = read_rate(device, BYTES // 64 if args.tiny else BYTES, 3)
    multiply = matrix_rate(device, dtype, (64, 64, 64) if args.tiny else SHAPES[0], 3)
    print(json.dumps({"measurement": "ceilings", "bytes_per_s": copy, "flops_per_s": multiply}), flush=True)
    choice = choose(args.attention, device, [layer], dtype)
    print(json.dumps({"measurement": "attention", "backend": choice.name, "note": choice.note}), flush=True)
    backend = choice.backend.create("auto")
    caches = [dtype]  # in the order of the measurements
    for held, name in NAMES.items():
        reason = choice.backend.objection([layer], dtype, held, device, "auto")
        if reason is None:
            caches.append(held)
        else:
            print(json.dumps({"measurement": f"cache in {name}", "skipped": reason}), flush=True)
    with torch.inference_mode():
        for held in caches:
            found = correctness(backend, layer, device, dtype, held)
            name = "correctness" if held == dtype else f"correctness, cache in {NAMES[held]}"
            print(json.dumps({"measurement": name, **found}), flush=True)
        counts = (1, 4) if args.tiny else (64, 1, 16, 256)
        context = 64 if args.tiny else 1024
        for rows, held in [*((rows, dtype) for rows in counts), *((counts[0], held) for held in caches[1:])]:
            if time.perf_counter() + 5 > end:
                break
            case = Case(backend, layer, [(context - 1, 1)] * rows, device, dtype, held=held)
            took = seconds_of(case.run, device, 3 if args.tiny else 30)
            moved = rows * context * layer.bytes(held)
            cache = "" if held == dtype else f", cache in {NAMES[held]}"
            print(json.dumps({
                "measurement": f"decode of {rows} rows of {context}{cache}", "us": 1e6 * took,
                "of_copy_rate": moved / took / copy,
            }), flush=True)  # fmt: skip
            del case
        for length in (64,) if args.tiny else (2048, 512, 8192):
            if time.perf_counter() + 5 > end:
                break
            case = Case(backend, layer, [(0, length)], device, dtype)
            took = seconds_of(case.run, device, 3 if args.tiny else 10)
            flops = 2 * 2 * heads * dim * length * (length + 1) // 2
            print(json.dumps({
                "measurement": f"prompt of {length}", "us": 1e6 * took, "of_matrix_rate": flops / took / multiply,
            }), flush=True)  # fmt: skip
            del case
        for rows, parts in PARTS[:1] if args.tiny else PARTS:
            if time.perf_counter() + 5 > end:
                break
            # Steps of few rows have parts of half the size.
            split = 2 * parts if rows <= gpu_plan.FEW_ROWS else parts
            with mock.patch.object(gpu_plan, "SPLIT", split):
                case = Case(backend, layer, [(context - 1, 1)] * rows, device, dtype)
                took = seconds_of(case.run, device, 3 if args.tiny else 30)
            print(json.dumps({
                "measurement": f"decode of {rows} rows of {context} in parts of {parts}", "us": 1e6 * took,
            }), flush=True)  # fmt: skip
            del case


if __name__ == "__main__":
    main()
