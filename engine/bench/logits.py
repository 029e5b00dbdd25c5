"""Measures sampling and log-probabilities, for `python -m engine.bench.kernels`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..kernels.library import Kernels
from ..kernels.logits import NativeLogits
from ..runner.logits import ROW_PARAMS, LogitsBackend, TorchLogits
from .timing import interleaved

CPU = torch.device("cpu")
VOCAB = 151936  # of Qwen3
ROWS = (1, 16)
# Name -> temperature, top_p, min_p, random number, top_k. The last one measures log-probabilities.
OFF = VOCAB
CASES: dict[str, tuple[float, ...]] = {
    "greedy": (0.0, 1.0, 0.0, 0.3, OFF),
    "temperature": (0.8, 1.0, 0.0, 0.3, OFF),
    "top_p": (0.8, 0.9, 0.0, 0.3, OFF),
    "top_k": (0.8, 1.0, 0.0, 0.3, 50),
    "min_p": (0.8, 1.0, 0.05, 0.3, OFF),
    "logprobs": (0.0, 1.0, 0.0, 0.0, 5),  # the 5 most likely tokens
}
HEADER = f"{'logits':12} {'rows':>5} {'ms':>9} {'torch ms':>9} {'ratio':>6} invariant"


def measure(name: str, rows: int, kernels: Kernels | None, seconds: float) -> dict[str, Any]:
    """Return one case: times in seconds; `same`: whether torch's results are equal."""
    x = torch.randn(rows, VOCAB) * 3
    params = np.array([CASES[name]] * rows, ROW_PARAMS)
    torchs = TorchLogits(VOCAB, CPU)
    ours: LogitsBackend = torchs if kernels is None else NativeLogits(kernels)

    def result(backend: LogitsBackend, x: Tensor) -> Tensor:
        if name == "logprobs":
            return backend.distribution(x, int(params["top_k"][0])).columns(torch.zeros(len(x), dtype=torch.int64))
        return backend.sample(x, params[: len(x)])[1]

    times = interleaved({"ours": lambda _: result(ours, x), "torch": lambda _: result(torchs, x)}, 1, seconds)
    batch = result(ours, x)
    return {
        "case": name,
        "rows": rows,
        "seconds": times["ours"],
        "torch_seconds": times["torch"],
        "speedup": times["torch"] / times["ours"],
        "same": torch.allclose(batch.double(), result(torchs, x).double(), atol=1e-5),
        "invariant": torch.equal(torch.cat([result(ours, x[i : i + 1]) for i in range(rows)]), batch),
    }


def formatted(line: dict[str, Any]) -> str:
    """Return the result of `measure` as a line below HEADER."""
    return (
        f"{line['case']:12} {line['rows']:5d} {line['seconds'] * 1e3:9.3f} {line['torch_seconds'] * 1e3:9.3f} "
        f"{line['speedup']:6.2f} {'yes' if line['invariant'] else 'no'}"
    )
