"""The importance of a weight's columns, estimated from other weights: how much the numbers vary that they multiply.

No text is needed. Squared errors of a column count by it when the weight is rounded, see Quantized.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..kernels.matmul import Stored
from .checkpoint.upload import read_all
from .norms import RMSNorm

ROWS = 4096  # of the embedding that are read: with all of them the error of SmolLM2-135M was the same
# Numbers of a weight that are squared at once. On a CPU they are too few for torch to share among threads: where other
# programs kept the processors busy, its threads waited for each other for most of the time. A GPU gets fewer launches.
PIECE_NUMBERS, PIECE_NUMBERS_ON_GPU = 1 << 14, 1 << 24


def of_hidden(embedding: Tensor) -> Tensor:
    """Return how much each number of the hidden state matters: [hidden_size], 1 on average.

    `embedding`: its first rows, usually the most frequent tokens. The hidden state starts as one of them, and numbers
    that are large there stay large.
    """
    found = embedding.float().square().mean(0)
    return _or_alike(found / found.mean())


def after_norm(norm: RMSNorm | None, hidden: Tensor | None) -> Tensor | None:
    """Return the importance of the columns of a weight after a norm: [columns]. None: all matter alike.

    `hidden`: that of the norm's input. A norm multiplies each column by its weight.
    """
    gain = None if norm is None else norm.gain.float().square()
    return gain if hidden is None else hidden if gain is None else gain * hidden


def after_gate(gate_up: Sequence[Tensor | Stored], columns: Tensor | None) -> Tensor:
    """Return the importance of the columns of a weight after activation(x @ gate.T) * (x @ up.T): [columns].

    `gate_up`: parts of the rows of gate, then as many of up. `columns`: the importance of their columns. Of independent
    numbers in x, the mean squares of x @ gate.T and x @ up.T are the sums that are multiplied here; an activation
    changes all columns in a similar way.
    """
    gate, up = torch.cat([_squares(piece, columns) for part in gate_up for piece in _pieces(part)]).chunk(2)
    return _or_alike(gate / gate.mean() * (up / up.mean()))


def after_squares(up: Sequence[Tensor | Stored], columns: Tensor | None) -> Tensor:
    """Return the same after relu(x @ up.T) ** 2, whose mean square grows with the square of that of x @ up.T."""
    squares = torch.cat([_squares(piece, columns) for part in up for piece in _pieces(part)])
    return _or_alike((squares / squares.mean()).square())


def _or_alike(importance: Tensor) -> Tensor:
    """Return 1 for all columns if one is not finite, which zeros and broken weights cause."""
    return torch.where(importance.isfinite().all(), importance, 1.0)


def _squares(rows: Tensor, columns: Tensor | None) -> Tensor:
    """Return the sum of the squares of each row, multiplied by the importance of their columns: [rows]."""
    squares = rows.float().square()
    return (squares if columns is None else squares.mul_(columns)).sum(-1)


def _pieces(part: Tensor | Stored) -> Iterator[Tensor]:
    rows, columns = part.shape
    if isinstance(part, Tensor) and part.device.type != "cpu":
        yield from part.split(max(1, PIECE_NUMBERS_ON_GPU // columns))
        return
    step = max(1, PIECE_NUMBERS // columns)
    if isinstance(part, Tensor):
        yield from part.split(step)
        return
    buffer = torch.empty(min(step, rows), columns, dtype=part.dtype)
    for first in range(0, rows, step):
        piece = buffer[: rows - first]
        data = piece.view(torch.uint8).numpy().reshape(-1).data
        read_all(part.file, data, part.offset + first * columns * part.dtype.itemsize)
        yield piece
