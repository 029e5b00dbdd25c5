"""DummyWeights: random weights, so that speed can be measured with config.json alone."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ..kernels.matmul import Parts
from .weights import Checkpoint

STD = 0.02  # of matrices, as models are initialized for training


class DummyWeights(Checkpoint):
    """Takes the place of a folder's checkpoint. The same tensor has the same numbers in every process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.entries = {}

    @property
    def weights_hash(self) -> str:
        return "dummy"

    def check(self, targets: Mapping[str, Tensor]) -> None:
        """Accept any tensors."""

    def num_bytes_of(self, names: Iterable[str]) -> int:
        return 0

    def fill(self, targets: Mapping[str, Tensor], progress: Callable[[int], None]) -> None:
        for name, target in targets.items():
            initialize(name, target)

    def stored(self, names: Sequence[str], dtype: torch.dtype) -> Parts:
        return []

    def close(self) -> None:
        """There is nothing to close."""


def initialize(name: str, target: Tensor) -> None:
    """Write random numbers to a matrix, ones to a norm and zeros to a bias, on the tensor's device."""
    with torch.inference_mode():
        if target.dim() > 1:
            generator = torch.Generator(target.device).manual_seed(zlib.crc32(name.encode()))
            target.normal_(0, STD, generator=generator)
        else:
            target.fill_(0 if name.endswith("bias") else 1)
