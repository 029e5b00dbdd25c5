"""GroupTables: the blocks of running sequences in the groups of layers after the first, see CacheGroups."""

from __future__ import annotations

from collections.abc import Sequence as Ids

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..attention.metadata import Tables
from .buffers import Shape, aligned

Ints = NDArray[np.int64]


class GroupTables:
    """A block table of all slots for each group, and each step's part of it on the device.

    As in Buffers, the addresses of a group's inputs never change, they are valid until the next step, and the tokens
    are padded to number `padded` with slot -1.
    """

    def __init__(
        self, num_groups: int, largest: Shape, *, block_size: int, device: torch.device, padded: int = 0
    ) -> None:
        self._largest, self._block_size, self._padded = largest, block_size, padded
        self._tables = np.zeros((num_groups, largest.rows, largest.width), np.int32)
        on_gpu = device.type == "cuda"
        # Of each group the slots of tokens in int64, then the block table in int32.
        self._longs = aligned(largest.tokens, 8)
        size = self._longs + aligned(largest.rows * largest.width, 4) // 2
        self._host = torch.zeros(num_groups, size, dtype=torch.int64, pin_memory=on_gpu)
        self._device = self._host.to(device) if on_gpu else self._host
        self._copied = torch.cuda.Event() if on_gpu else None
        host = self._host.numpy()
        self._slots, self._rows = host[:, : largest.tokens], host[:, self._longs :].view(np.int32)

    def append(self, slot: int, count: int, block_ids: Ids[int]) -> list[int]:
        """Add blocks of all groups to a slot, which has `count` of each; returns those of the first group."""
        of_groups = np.array(block_ids, np.int32).reshape(-1, len(self._tables) + 1).T
        self._tables[:, slot, count : count + of_groups.shape[1]] = of_groups[1:]
        first: list[int] = of_groups[0].tolist()
        return first

    def upload(self, blocks: Ints, offsets: Ints, of_token: Ints, rows: Ints, width: int) -> tuple[Tables, ...]:
        """Copy a step's part of the tables to the device and return it there.

        blocks, offsets: of each token, the index of its block in its sequence, and its place in the block. of_token:
        its slot. rows: the slot of each row. width: the blocks of the longest row.
        """
        self._wait()
        slots = self._tables[:, of_token, blocks] * np.int64(self._block_size) + offsets
        self._slots[:, : len(blocks)] = slots
        self._slots[:, len(blocks) : self._padded] = -1
        self._rows[:, : len(rows) * width] = self._tables[:, rows, :width].reshape(len(self._tables), -1)
        self._copy(len(rows) * width)
        return self._on_device(len(blocks), len(rows), width)

    def padding(self) -> tuple[Tables, ...]:
        """Return the tables of a step of padding on the device, with the memory of all rows and of all their blocks."""
        self._wait()
        self._slots[:, : self._padded] = -1
        self._copy(0)
        return self._on_device(self._padded, self._largest.rows, self._largest.width)

    def _wait(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()  # the last copy reads the host's memory until then

    def _copy(self, ints: int) -> None:
        if self._copied is not None:
            used = self._longs + -(-ints // 2)
            for device, host in zip(self._device, self._host, strict=True):
                device[:used].copy_(host[:used], non_blocking=True)
            self._copied.record()

    def _on_device(self, tokens: int, rows: int, width: int) -> tuple[Tables, ...]:
        def of(group: Tensor) -> Tables:
            table = group[self._longs :].view(torch.int32)[: rows * width]
            return Tables(group[:tokens], table.view(rows, width))

        return tuple(map(of, self._device))
