"""Measuring what a step does with its logits, for `python -m engine.bench.kernels`: draws and log-probabilities."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..kernels.library import Kernels
from ..kernels.logits import NativeVocabulary
from ..runner.logits import ASKED, TorchVocabulary, Vocabulary
from .timing import interleaved

CPU = torch.device("cpu")
VOCAB = 151936  # of Qwen3
ROWS = (1, 16)
# What is asked, by name: temperature, top_p, min_p, uniform number, top_k. The last one is no draw.
OFF = VOCAB
CASES: dict[str, tuple[float, ...]] = {
    "greedy": (0.0, 1.0, 0.0, 0.3, OFF),
    "temperature": (0.8, 1.0, 0.0, 0.3, OFF),
    "top_p": (0.8, 0.9, 0.0, 0.3, OFF),
    "top_k": (0.8, 1.0, 0.0, 0.3, 50),
    "min_p": (0.8, 1.0, 0.05, 0.3, OFF),
    "logprobs": (0.0, 1.0, 0.0, 0.0, 5),  # so many of the likeliest
}
HEADER = f"{'vocabulary':12} {'rows':>5} {'ms':>9} {'torch ms':>9} {'ratio':>6} invariant"


def measure(name: str, rows: int, kernels: Kernels | None, seconds: float) -> dict[str, Any]:
    """One line: times in seconds; `same`: whether torch finds the same tokens."""
    x = torch.randn(rows, VOCAB) * 3
    asked = np.array([CASES[name]] * rows, ASKED)
    torchs = TorchVocabulary(VOCAB, CPU)
    ours: Vocabulary = torchs if kernels is None else NativeVocabulary(kernels)

    def found(vocabulary: Vocabulary, x: Tensor) -> Tensor:
        if name == "logprobs":
            return vocabulary.distribution(x, int(asked["top_k"][0])).columns(torch.zeros(len(x), dtype=torch.int64))
        return vocabulary.draw(x, asked[: len(x)])[1]

    times = interleaved({"ours": lambda _: found(ours, x), "torch": lambda _: found(torchs, x)}, 1, seconds)
    batch = found(ours, x)
    return {
        "case": name,
        "rows": rows,
        "seconds": times["ours"],
        "torch_seconds": times["torch"],
        "speedup": times["torch"] / times["ours"],
        "same": torch.allclose(batch.double(), found(torchs, x).double(), atol=1e-5),
        "invariant": torch.equal(torch.cat([found(ours, x[i : i + 1]) for i in range(rows)]), batch),
    }


def told(line: dict[str, Any]) -> str:
    """What `measure` found as a line below HEADER."""
    return (
        f"{line['case']:12} {line['rows']:5d} {line['seconds'] * 1e3:9.3f} {line['torch_seconds'] * 1e3:9.3f} "
        f"{line['speedup']:6.2f} {'yes' if line['invariant'] else 'no'}"
    )
