"""Measure the packed matmul, beside torch's, and attention:

    python -m engine.bench.kernels --json [--isa auto|amx|avx512bf16|avx512|avxvnni|avx2|torch] [--rows 1,4]
        [--dtype bfloat16]

prints, for each weight shape of Qwen3-0.6B and each number of rows, the time of one matmul, that of torch, the error
against float64, and whether rows have the same bits alone and in the batch; the same for weights in 8 and 4 bits if the
kernels support them. The cases are called in turn, and medians are printed. Each call uses the next of several weights,
which together exceed the caches. Then it measures attention, sampling and log-probabilities in the same way
(attention.py and logits.py in this folder). On an error it exits with status 2 and prints a sentence, or a JSON
object with `error`. With `--isa torch`, "ours" is torch as Pequod uses it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..kernels.library import CHOICES, Kernels, choose, for_sampling
from ..models.layers import Linear, Quantization, can_reorder
from ..types import EngineError
from . import attention, logits
from .timing import interleaved

# Qwen3-0.6B's weights: rows (outputs) and columns.
SHAPES = {
    "qkv": (4096, 1024),
    "output": (1024, 2048),
    "gate_up": (6144, 1024),
    "down": (1024, 3072),
    "head": (151936, 1024),
}
ROWS = (1, 4, 8, 16, 64, 512)
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
LARGE = 64 << 20  # bytes that exceed every cache; a shape's weight is repeated up to this size
MAX_HEAD_ROWS = 64  # logits are computed only for rows that sample a token, which are few
CHECKED = 2048  # outputs that are compared with float64, which is slow
SECONDS = 1.0  # approximate time for one line


def measure(
    name: str,
    rows: int,
    kernels: Kernels | None,
    dtype: torch.dtype,
    seconds: float = SECONDS,
    *,
    bits_of: Sequence[int] = (),  # also measure weights quantized to these numbers of bits
) -> dict[str, Any]:
    """Return one case: times in seconds, `gb_per_s` of weights read, `gflop_per_s`, errors relative to the largest
    number."""
    outputs, columns = SHAPES[name]
    copies = max(1, LARGE // (outputs * columns * dtype.itemsize))
    weights = [torch.empty(outputs, columns, dtype=dtype).normal_(0, columns**-0.5) for _ in range(copies)]
    x = torch.randn(rows, columns).to(dtype)
    own = [_packed(weight, kernels) for weight in weights]
    narrow = {f"int{bits}": [_packed(weight, kernels, bits) for weight in weights] for bits in bits_of}
    others: dict[str, Callable[[int], Tensor]] = {"torch": lambda i: F.linear(x, weights[i])}
    if can_reorder(weights[0]):
        reordered = [_packed(weight, None) for weight in weights]
        others["onednn"] = lambda i: reordered[i](x)
    rounded = {name: partial(_call, each, x) for name, each in narrow.items()}
    times = interleaved({"ours": lambda i: own[i](x), **others, **rounded}, copies, seconds)
    want = x.double() @ weights[0][:CHECKED].double().T
    size, work = outputs * columns * dtype.itemsize, 2 * rows * outputs * columns
    best = min(times[other] for other in others)
    return {
        "shape": name,
        "outputs": outputs,
        "columns": columns,
        "rows": rows,
        "seconds": times["ours"],
        "torch_seconds": times["torch"],
        "onednn_seconds": times.get("onednn"),
        "speedup": best / times["ours"],  # over the faster of torch and oneDNN
        "gb_per_s": size / times["ours"] / 1e9,
        "gflop_per_s": work / times["ours"] / 1e9,
        **_accuracy(own[0], x, want),
        "quantized": {
            name: {
                "seconds": times[name],
                "speedup": times["ours"] / times[name],  # over our matmul with the plain weight
                **_accuracy(each[0], x, want),
            }
            for name, each in narrow.items()
        },
    }


def _call(linears: list[Linear], x: Tensor, number: int) -> Tensor:
    return linears[number](x)


def _accuracy(linear: Linear, x: Tensor, want: Tensor) -> dict[str, Any]:
    """Return the error of a matmul, and whether some rows have the same bits alone."""
    batch, some = linear(x), sorted({0, len(x) // 2, len(x) - 1})
    alone = torch.cat([linear(x[i : i + 1]) for i in some])
    error = (batch[:, : want.shape[1]].double() - want).abs().max() / want.abs().max()
    return {"error": error.item(), "invariant": torch.equal(alone, batch[some])}


def _packed(weight: Tensor, kernels: Kernels | None, bits: int | None = None) -> Linear:
    rows, columns = weight.shape
    linear = Linear(rows, columns, False, weight.dtype, weight.device)
    linear.weight = weight
    linear.pack(kernels, quantization=None if bits is None else Quantization(bits))
    return linear


@torch.inference_mode()
def bench(isa: str, dtype: str, rows: list[int], seconds: float, show: Callable[[str], None]) -> dict[str, Any]:
    """Measure all shapes and numbers of rows, passing each line of text to `show`. Raises ConfigError."""
    choice = choose(isa, torch.device("cpu"), DTYPES[dtype])
    bits_of = (8, 4) if choice.kernels is not None and choice.kernels.quantizes else ()
    torch.manual_seed(0)
    matmuls = []
    show(f"{choice.name} products of {dtype} on {torch.get_num_threads()} threads, torch {torch.__version__}")
    if choice.note:
        show(choice.note)
    show(
        f"{'shape':8} {'rows':>5} {'ms':>9} {'torch ms':>9} {'onednn ms':>9} {'ratio':>6} "
        f"{'GB/s':>6} {'GFLOP/s':>8} {'error':>8} invariant"
    )
    for name in SHAPES:
        for count in rows:
            if name == "head" and count > MAX_HEAD_ROWS:
                continue
            line = measure(name, count, choice.kernels, DTYPES[dtype], seconds, bits_of=bits_of)
            matmuls.append(line)
            onednn = line["onednn_seconds"]
            show(
                f"{name:8} {count:5d} {line['seconds'] * 1e3:9.3f} {line['torch_seconds'] * 1e3:9.3f} "
                f"{'-' if onednn is None else f'{onednn * 1e3:.3f}':>9} {line['speedup']:6.2f} {line['gb_per_s']:6.1f} "
                f"{line['gflop_per_s']:8.0f} {line['error']:8.0e} {'yes' if line['invariant'] else 'no'}"
            )
            for kind, other in line["quantized"].items():
                show(
                    f"  {kind:6} {count:5d} {other['seconds'] * 1e3:9.3f} {'':>9} {'':>9} {other['speedup']:6.2f} "
                    f"{'':>6} {'':>8} {other['error']:8.0e} {'yes' if other['invariant'] else 'no'}"
                )
    show(attention.HEADER)
    attended = []
    for step in attention.STEPS:
        attended.append(attention.measure(*step, isa=isa, dtype=DTYPES[dtype], seconds=seconds))
        show(attention.formatted(attended[-1]))
    show(logits.HEADER)
    sampled, sampling = [], for_sampling(isa, torch.device("cpu"), DTYPES[dtype])
    for case in logits.CASES:
        for count in logits.ROWS:
            sampled.append(logits.measure(case, count, sampling, seconds))
            show(logits.formatted(sampled[-1]))
    return {
        "isa": choice.name,
        "note": choice.note,
        "dtype": dtype,
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
        "products": matmuls,
        "attention": attended,
        "logits": sampled,
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m engine.bench.kernels", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--isa", default="auto", choices=CHOICES, help="instruction set; torch: without Pequod's kernels"
    )
    parser.add_argument("--dtype", default="bfloat16", choices=list(DTYPES))
    parser.add_argument("--rows", default=",".join(map(str, ROWS)), help="comma-separated numbers of rows")
    parser.add_argument("--threads", type=int, help="number of threads (default: torch's choice)")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="approximate time for each line")
    parser.add_argument("--json", action="store_true", help="print one JSON object, and the lines to stderr")
    given = parser.parse_args(arguments)
    try:
        rows = [int(part) for part in given.rows.split(",")]
    except ValueError:
        rows = [0]
    if min(rows) < 1 or (given.threads is not None and given.threads < 1):
        parser.error("--rows and --threads take whole numbers from 1 on")
    if given.threads is not None:
        torch.set_num_threads(given.threads)
    lines = sys.stderr if given.json else sys.stdout
    with contextlib.redirect_stdout(sys.stderr) if given.json else contextlib.nullcontext():
        try:
            result = bench(
                given.isa, given.dtype, rows, given.seconds, lambda text: print(text, file=lines, flush=True)
            )
        except EngineError as error:
            result = {"error": str(error)}
    if given.json:
        print(json.dumps(result))
    elif "error" in result:
        print(result["error"], file=sys.stderr)
    return 2 if "error" in result else 0


if __name__ == "__main__":
    sys.exit(main())
