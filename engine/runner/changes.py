"""Changes of a step's logits before temperature: penalties, biases, and tokens that may not be sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class Tokens(NamedTuple):
    """Several tokens in each of several rows, in two columns."""

    rows: Ints
    ids: Ints

    @classmethod
    def of(cls, rows: Sequence[int], ids: Sequence[Ints]) -> Tokens:
        return cls(np.repeat(np.array(rows, np.int64), [len(own) for own in ids]), np.concatenate(ids))


class Penalties(NamedTuple):
    """The penalties of each token of `Tokens`."""

    repetition: Floats
    frequency: Floats  # subtracted: the penalty times the number of occurrences
    presence: Floats  # subtracted


@dataclass(frozen=True, slots=True)
class Changes:
    """The changes of a step's logits, in the order in which they are made; None: there are none of this kind.

    `penalized` and `biased` name a token at most once.
    """

    penalized: tuple[Tokens, Penalties] | None
    biased: tuple[Tokens, Floats] | None
    exclusive: tuple[Tokens, ...]  # excludes the other tokens of its rows
    excluded: Tokens | None

    def apply(self, x: Tensor) -> None:
        """Change logits [rows, vocab] in place, in torch, on any device.

        The repetition penalty divides positive logits and multiplies others (Keskar et al. 2019, CTRL). The penalties
        have the same order and the same meaning as in transformers and vLLM.
        """
        if self.penalized is not None:
            rows, ids = _indices(self.penalized[0], x.device)
            repetition, frequency, presence = (on_device(column, x.device).to(x.dtype) for column in self.penalized[1])
            logits = x[rows, ids]
            logits = torch.where(logits > 0, logits / repetition, logits * repetition)
            logits -= frequency
            logits -= presence
            x[rows, ids] = logits
        if self.biased is not None:
            rows, ids = _indices(self.biased[0], x.device)
            x[rows, ids] += on_device(self.biased[1], x.device).to(x.dtype)
        for tokens in self.exclusive:
            rows, ids = _indices(tokens, x.device)
            kept = x[rows, ids]
            x[on_device(np.unique(tokens.rows), x.device)] = -torch.inf
            x[rows, ids] = kept
        if self.excluded is not None:
            x[_indices(self.excluded, x.device)] = -torch.inf


def _indices(tokens: Tokens, device: torch.device) -> tuple[Tensor, Tensor]:
    return on_device(tokens.rows, device), on_device(tokens.ids, device)


def on_device(array: NDArray, device: torch.device) -> Tensor:
    """Return an array as a tensor on a device. On a GPU it is copied without waiting for earlier work."""
    tensor = torch.from_numpy(array)
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)
