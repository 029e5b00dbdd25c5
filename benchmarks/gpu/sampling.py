"""Sampling and log-probabilities: our kernels beside torch, and beside the time in which the logits can be read once.

    python -m benchmarks.gpu.sampling --device cuda

Prints one line of JSON per measurement.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from engine.kernels.launching import use_device
from engine.roofline import BYTES, read_rate
from engine.runner.logits import ROW_PARAMS, LogitsBackend, TorchLogits
from engine.runner.triton_logits import TritonLogits, objection

from .kernels import seconds_of
from .shapes import SHAPES

OFF = 1 << 62  # top_k
# Name -> temperature, top_p, min_p, random number, top_k. The last one measures log-probabilities.
CASES: dict[str, tuple[float, ...]] = {
    "top_k and top_p": (0.6, 0.95, 0.0, 0.3, 20),
    "greedy": (0.0, 1.0, 0.0, 0.3, OFF),
    "temperature": (0.8, 1.0, 0.0, 0.3, OFF),
    "top_p": (0.8, 0.9, 0.0, 0.3, OFF),
    "5 log-probabilities": (0.0, 1.0, 0.0, 0.0, 5),
}


def work(backend: LogitsBackend, name: str, x: Tensor) -> Callable[[], Tensor]:
    """Return a function that samples from logits, or computes their log-probabilities."""
    params, ids = np.array([CASES[name]] * len(x), ROW_PARAMS), torch.zeros(len(x), dtype=torch.int64, device=x.device)
    params["u"] = (np.arange(len(x)) + 0.5) / len(x)
    if name == "5 log-probabilities":
        return lambda: backend.distribution(x, 5).columns(ids)
    return lambda: backend.sample(x, params)[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try the program")
    parser.add_argument("--seconds", type=float, default=30.0)
    args = parser.parse_args()
    end = time.perf_counter() + args.seconds
    device = torch.device(args.device)
    use_device(device)
    if args.tiny and device.type != "cuda":
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    vocab_size = SHAPES["tiny" if args.tiny else "8B"]["vocab_size"]
    began = time.perf_counter()
    why = objection(vocab_size, torch.bfloat16, device)
    trial = {"seconds": time.perf_counter() - began} if why is None else {"skipped": why}
    print(json.dumps({"measurement": "trial", **trial}), flush=True)
    if why is not None:
        return
    copy = read_rate(device, BYTES // 64 if args.tiny else BYTES, 3)
    ours, torchs = TritonLogits(vocab_size, device), TorchLogits(vocab_size, device)
    with torch.inference_mode():
        for name in CASES:
            for rows in (1,) if args.tiny else (1, 16, 64, 256):
                if time.perf_counter() + 2 > end:
                    return
                # As a model's logits in bfloat16: a few tokens are likely, and many are equal.
                x = (3 * torch.randn(rows, vocab_size, device=device)).bfloat16().float()
                own, theirs = work(ours, name, x), work(torchs, name, x)
                took, torch_took = (seconds_of(each, device, 1 if args.tiny else 20) for each in (own, theirs))
                print(json.dumps({
                    "measurement": f"{name}, {rows} rows", "us": 1e6 * took, "torch_us": 1e6 * torch_took,
                    "times_reading": took * copy / (x.numel() * x.itemsize),
                    "same": torch.allclose(own().double(), theirs().double(), rtol=0.0, atol=1e-4),
                }), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
