"""Which rows of a step are multiplied by which expert's weight on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

UNIT = 16  # numbers in which the distances of tensors are counted, so that what is read there is aligned


class Order(NamedTuple):
    """The pairs of a step in tiles of one expert each, see kernels/gpu/experts.py."""

    pairs: Tensor  # [tiles * tokens of a tile] int32: numbers of pairs, -1: none
    owners: Tensor  # [tiles] int32: each tile's expert, -1: none
    num_pairs: int


class Routed(NamedTuple):
    """What a product of pairs needs beside the first expert's weight."""

    order: Order
    places: Tensor  # [experts, tensors of a weight] int64, see `places`
    fan: int  # pairs that share a row of x

    @property
    def tiles(self) -> int:
        return self.order.owners.shape[0]

    @property
    def arguments(self) -> tuple[Tensor, Tensor, Tensor, int]:
        """Those of a kernel: pairs, owners, places and FAN."""
        return self.order.pairs, self.order.owners, self.places, self.fan


def places(tensors: Sequence[Sequence[Tensor]], device: torch.device) -> Tensor:
    """Return how far each expert's tensors are from those of the first one, in UNIT numbers."""
    found = []
    for each in tensors:
        distances = [one.data_ptr() - first.data_ptr() for one, first in zip(each, tensors[0], strict=True)]
        units = [UNIT * first.itemsize for first in tensors[0]]
        assert not any(distance % unit for distance, unit in zip(distances, units, strict=True)), "not aligned"
        found.append([distance // unit for distance, unit in zip(distances, units, strict=True)])
    return torch.tensor(found, dtype=torch.int64, device=device)
