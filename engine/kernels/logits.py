"""What a step wants of its logits, by kernels: engine/runner/vocabulary.py tells what each call means."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .library import Kernels

NO_MEMORY = "no memory to look through a vocabulary"


@dataclass(frozen=True, slots=True)
class Told:
    """Log-probabilities of rows of logits, of which only the largest were computed."""

    logits: Tensor  # [rows, vocab] as they were
    logs: Tensor  # [rows] float64, log(sum(exp(logits)))
    values: Tensor  # [rows, count] float32, the largest logits
    ids: Tensor  # [rows, count] int64

    def columns(self, ids: Tensor) -> Tensor:
        """See runner.vocabulary.Distribution. Computed in float64, and rounded to what logits are."""
        logs = self.logs.unsqueeze(1)
        own = self.logits.gather(1, ids.unsqueeze(1)).double() - logs
        logprobs = torch.cat([own, self.values.double() - logs], dim=1).float()
        return torch.cat([logprobs.double(), self.ids.double()], dim=1)


class NativeVocabulary:
    """For float32 logits on the CPU."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def best(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x, values, places = _room(x)
        self._kernels.best(x.data_ptr(), *x.shape, values.data_ptr(), places.data_ptr(), torch.get_num_threads())
        return values, places

    def draw(self, x: Tensor, asked: NDArray) -> tuple[Tensor, Tensor]:
        x, values, places = _room(x)
        pointers = asked.ctypes.data, values.data_ptr(), places.data_ptr()
        if self._kernels.draw(x.data_ptr(), *x.shape, *pointers, torch.get_num_threads()):
            raise MemoryError(NO_MEMORY)
        return values, places

    def distribution(self, x: Tensor, count: int) -> Told:
        """x stays as it is until the last use of the result."""
        _check(x)
        x = x.contiguous()
        logs = torch.empty(len(x), dtype=torch.float64)
        values = torch.full((len(x), count), torch.nan)
        ids = torch.zeros(len(x), count, dtype=torch.int64)
        pointers = logs.data_ptr(), values.data_ptr(), ids.data_ptr()
        if self._kernels.likeliest(x.data_ptr(), *x.shape, count, *pointers, torch.get_num_threads()):
            raise MemoryError(NO_MEMORY)
        return Told(x, logs, values, ids)

    def forbid(self, x: Tensor, rows: NDArray[np.int64], bits: NDArray[np.int32]) -> None:
        _check(x)
        if not x.is_contiguous() or bits.shape[1] * 32 < x.shape[1]:
            raise ValueError(f"not [rows, {bits.shape[1] * 32}] side by side: {tuple(x.shape)}")
        rows, bits = np.ascontiguousarray(rows), np.ascontiguousarray(bits)
        self._kernels.forbid(x.data_ptr(), x.shape[1], rows.ctypes.data, bits.ctypes.data, *bits.shape)


def _check(x: Tensor) -> None:
    if x.dtype != torch.float32 or x.dim() != 2 or x.device.type != "cpu":
        raise ValueError(f"not [rows, vocab] of float32 on the CPU: {tuple(x.shape)} of {x.dtype}")


def _room(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x where pointers may be taken from it, and room for a number and a place of each row."""
    _check(x)
    return x.contiguous(), x.new_empty(len(x)), torch.empty(len(x), dtype=torch.int64)
