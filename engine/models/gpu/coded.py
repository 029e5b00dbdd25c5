"""Weights of quantized checkpoints in a form that a GPU computes with, read to a GPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .form import Form
from .weights import GPUWeight


class CodedPiece(NamedTuple):
    """Rows of a weight in a quantized checkpoint, see GPUWeight.write."""

    rows: slice
    numbers: Tensor
    zeros: Tensor | None
    scales: Tensor


class CodedRows(NamedTuple):
    """A weight in a quantized checkpoint, in a form that a GPU computes with."""

    form: Form
    shape: tuple[int, ...]
    read: Callable[[], tuple[Tensor | None, Iterator[CodedPiece]]]  # returns the order of columns, and the rows
    num_bytes: int  # in files


def load(parts: Sequence[CodedRows], device: torch.device) -> list[GPUWeight]:
    """Read the parts of a weight to a GPU. Parts of one form and order of columns become one."""
    found: list[GPUWeight] = []
    for form, group in itertools.groupby(parts, lambda part: part.form):
        same = [(part, *part.read()) for part in group]
        for _, run in itertools.groupby(same, lambda each: None if each[1] is None else each[1].tolist()):
            rows = list(run)
            order = None if rows[0][1] is None else rows[0][1].to(device)
            columns = rows[0][0].shape[1]
            weight, first = GPUWeight(form, sum(part.shape[0] for part, *_ in rows), columns, device, order), 0
            for part, _, pieces in rows:
                for piece in pieces:
                    weight.write(first + piece.rows.start, piece.numbers, piece.scales, piece.zeros)
                first += part.shape[0]
            found.append(weight)
    return found
