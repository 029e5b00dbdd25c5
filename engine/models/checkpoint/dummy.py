"""DummyWeights: random weights, so that speed can be measured with config.json alone."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ...kernels.matmul import Parts
from ...quantized.config import parse
from ...quantized.forms import form_of
from ..gpu.coded import CodedPiece, CodedRows
from ..gpu.form import Form
from ..gpu.weights import FLOAT8_NAN
from ..spec import ModelSpec
from .weights import Checkpoint

STD = 0.02  # of matrices, as models are initialized for training
SPREAD = {4: 4.6, 8: 74.0}  # standard deviation of uniform integers of these bits
FLOAT8_SPREAD = 113.0  # of numbers with random bits, in E4M3
PIECE_ROWS = 1024  # rows with the same random bits follow one another, and so do weights: drawing bits takes long


class DummyWeights(Checkpoint):
    """Takes the place of a folder's checkpoint. The same tensor has the same numbers in every process."""

    def __init__(self, folder: Path, spec: ModelSpec) -> None:
        self.folder, self._spec = folder, spec
        self.entries, self._opened = {}, {}
        self._shapes: dict[str, tuple[int, int]] = {}  # of the weights that may be quantized
        if spec.decoder is not None and spec.method:
            self._scheme = parse(spec.source["quantization_config"]).scheme
            for weights, rows, columns in spec.decoder.linears(spec.vocab_size):
                self._shapes |= {name: (count, columns) for name, count in zip(weights, rows, strict=True)}

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

    def rows(self, name: str, count: int) -> Tensor:
        """Return a row of equal numbers: all columns of random matrices matter alike."""
        assert self._spec.decoder is not None
        return torch.ones(1, self._spec.decoder.hidden_size)

    def stored(self, names: Sequence[str], dtype: torch.dtype) -> Parts:
        return []

    def coded(self, names: Sequence[str]) -> list[CodedRows]:
        if not self._spec.method:
            return []
        full = [name if name in self._shapes else f"model.{name}" for name in names]
        schemes = [self._scheme(name) if name in self._shapes else None for name in full]
        forms = [
            None if scheme is None else form_of(scheme, self._shapes[name][1])
            for name, scheme in zip(full, schemes, strict=True)
        ]
        if None in forms:
            return []
        return [
            CodedRows(form, self._shapes[name], partial(_random, form, self._shapes[name]), 0)
            for name, form in zip(full, forms, strict=True)
            if form is not None
        ]

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


def _random(form: Form, shape: tuple[int, int]) -> tuple[None, Iterator[CodedPiece]]:
    """Return random numbers of a form, as if they were in a checkpoint."""
    rows, columns = shape
    numbers = _numbers(form.bits, columns, is_float=form.is_float)
    groups = -(-columns // form.group) if form.group else 1
    scales = torch.full((rows, groups), STD / (FLOAT8_SPREAD if form.is_float else SPREAD[form.bits]))
    zeros = torch.full((rows, groups), 1 << form.bits - 1, dtype=torch.uint8) if form.has_zeros else None

    def pieces() -> Iterator[CodedPiece]:
        for first in range(0, rows, PIECE_ROWS):
            own = slice(first, min(first + PIECE_ROWS, rows))
            own_zeros = None if zeros is None else zeros[own]
            yield CodedPiece(own, numbers[: own.stop - first], own_zeros, scales[own])

    return None, pieces()


@functools.lru_cache(maxsize=4)
def _numbers(bits: int, columns: int, *, is_float: bool) -> Tensor:
    """Return random numbers [PIECE_ROWS, columns] in bytes."""
    generator = torch.Generator().manual_seed(columns)
    numbers = torch.randint(1 << bits, (PIECE_ROWS, columns), generator=generator, dtype=torch.uint8)
    if is_float:
        numbers[(numbers & FLOAT8_NAN) == FLOAT8_NAN] = 0
    return numbers
