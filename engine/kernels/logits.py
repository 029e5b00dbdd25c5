"""Operations on logits by kernels; engine/runner/logits.py documents the interface."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .library import Kernels

if TYPE_CHECKING:
    from ..runner.changes import Changes

NO_MEMORY = "no memory to sample"


@dataclass(frozen=True, slots=True)
class TopLogits:
    """The log-probabilities of some rows, see Distribution in engine/runner/logits.py."""

    logits: Tensor  # [rows, vocab]
    logs: Tensor  # [rows] float64, log(sum(exp(logits)))
    values: Tensor  # [rows, count] float32, the largest logits
    ids: Tensor  # [rows, count] int64

    def columns(self, ids: Tensor) -> Tensor:
        """See Distribution. Computed in float64 and rounded to float32."""
        logs = self.logs.unsqueeze(1)
        own = self.logits.gather(1, ids.unsqueeze(1)).double() - logs
        logprobs = torch.cat([own, self.values.double() - logs], dim=1).float()
        return torch.cat([logprobs.double(), self.ids.double()], dim=1)


class NativeLogits:
    """Operations on float32 logits on the CPU, see LogitsBackend in engine/runner/logits.py."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def best(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x, values, indices = _outputs(x)
        self._kernels.best(x.data_ptr(), *x.shape, values.data_ptr(), indices.data_ptr(), torch.get_num_threads())
        return values, indices

    def sample(self, x: Tensor, params: NDArray) -> tuple[Tensor, Tensor]:
        x, values, indices = _outputs(x)
        pointers = params.ctypes.data, values.data_ptr(), indices.data_ptr()
        if self._kernels.sample(x.data_ptr(), *x.shape, *pointers, torch.get_num_threads()):
            raise MemoryError(NO_MEMORY)
        return values, indices

    def processed(self, x: Tensor, params: NDArray) -> Tensor:
        _check(x)
        x, out = x.contiguous(), torch.empty(x.shape)
        pointers = params.ctypes.data, out.data_ptr()
        if self._kernels.process(x.data_ptr(), *x.shape, *pointers, torch.get_num_threads()):
            raise MemoryError(NO_MEMORY)
        return out

    def distribution(self, x: Tensor, count: int) -> TopLogits:
        """See LogitsBackend. x must not change until the last use of the result."""
        _check(x)
        x = x.contiguous()
        logs = torch.empty(len(x), dtype=torch.float64)
        values = torch.full((len(x), count), torch.nan)
        ids = torch.zeros(len(x), count, dtype=torch.int64)
        pointers = logs.data_ptr(), values.data_ptr(), ids.data_ptr()
        if self._kernels.top_logits(x.data_ptr(), *x.shape, count, *pointers, torch.get_num_threads()):
            raise MemoryError(NO_MEMORY)
        return TopLogits(x, logs, values, ids)

    def change(self, x: Tensor, changes: Changes) -> None:
        """See LogitsBackend. Torch does it: changes are few."""
        changes.apply(x)

    def forbid(self, x: Tensor, rows: NDArray[np.int64], bits: NDArray[np.int32]) -> None:
        _check(x)
        if not x.is_contiguous() or bits.shape[1] * 32 < x.shape[1]:
            raise ValueError(f"not [rows, {bits.shape[1] * 32}] side by side: {tuple(x.shape)}")
        rows, bits = np.ascontiguousarray(rows), np.ascontiguousarray(bits)
        self._kernels.forbid(x.data_ptr(), x.shape[1], rows.ctypes.data, bits.ctypes.data, *bits.shape)


def _check(x: Tensor) -> None:
    if x.dtype != torch.float32 or x.dim() != 2 or not x.is_cpu:
        raise ValueError(f"not [rows, vocab] of float32 on the CPU: {tuple(x.shape)} of {x.dtype}")


def _outputs(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return contiguous x, and memory for a value and an index for each row."""
    _check(x)
    rows = x.shape[0]
    return x.contiguous(), torch.empty(rows), torch.empty(rows, dtype=torch.int64)
