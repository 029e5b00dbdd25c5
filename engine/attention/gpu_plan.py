"""The work of a step for the Triton attention kernels: which program attends to which part of which row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .backend import LayerCache
from .metadata import AttentionMeta, Tables

# Tokens of context per part of a row with one query. Fixed, so that a row's result does not depend on other rows.
SPLIT = 256
MAX_PARTS = 4096  # of one launch: bounds the memory for partial results
ITEM = 8  # int32 numbers per work item, as the kernel reads them

Kind = tuple[int | None, int]  # of layers that share launches: their window, and queries per item of a longer row


class HostWork(NamedTuple):
    """The work items of one launch."""

    table: Tensor  # [items + 1, ITEM] int32 on the host, pinned if there is a GPU
    num_parts: int

    @classmethod
    def of(cls, items: Sequence[tuple[int, ...]], num_parts: int, meta: AttentionMeta) -> HostWork:
        table = np.zeros((len(items) + 1, ITEM), np.int32)
        table[0, :2] = len(items), meta.block_table.stride(0)
        for place, item in enumerate(items, 1):
            table[place, : len(item)] = item
        tensor = torch.from_numpy(table)
        # The copy of pageable memory would wait for the steps that the device has not computed yet.
        return cls(tensor.pin_memory() if meta.block_table.is_cuda else tensor, num_parts)


class Work(NamedTuple):
    """The work items of one launch on the device, which reads their number."""

    table: Tensor  # [max_items + 1, ITEM] int32
    max_items: int
    num_parts: int


class Launches(NamedTuple):
    """What a step launches for layers of one kind."""

    decodes: list[Work]  # rows of one query
    chunks: list[Work]  # longer rows


class Plan:
    """The work items of a step, made for the first layer of each kind."""

    def __init__(self, meta: AttentionMeta) -> None:
        self.meta = meta
        self._on_host: dict[Kind, tuple[list[HostWork], list[HostWork]]] = {}
        self._launches: dict[Kind, Launches] = {}

    def tables(self, cache: LayerCache) -> Tables:
        """Return the blocks of a layer."""
        return self.meta.tables(cache.group)

    def launches(self, kind: Kind) -> Launches:
        """Return the launches for layers of a kind."""
        if kind not in self._launches:
            device = self.meta.block_table.device
            decodes, chunks = (
                [Work(table.to(device, non_blocking=True), len(table) - 1, parts) for table, parts in works]
                for works in self.on_host(kind)
            )
            self._launches[kind] = Launches(decodes, chunks)
        return self._launches[kind]

    def on_host(self, kind: Kind) -> tuple[list[HostWork], list[HostWork]]:
        """Return the works of `launches` before they are copied to the device."""
        if kind not in self._on_host:
            self._on_host[kind] = self._made(*kind)
        return self._on_host[kind]

    def _made(self, window: int | None, queries: int) -> tuple[list[HostWork], list[HostWork]]:
        meta = self.meta
        decodes: list[HostWork] = []
        parts: list[tuple[int, ...]] = []
        chunks: list[tuple[int, int, int]] = []  # tokens of context, row, first query
        for row, length in enumerate(meta.seq_lens_list):
            new = meta.query_start_list[row + 1] - meta.query_start_list[row]
            if new == 1:
                begin = 0 if window is None else max(0, length - window) // SPLIT
                count = -(-length // SPLIT) - begin
                if parts and len(parts) + count > MAX_PARTS:
                    decodes.append(HostWork.of(parts, len(parts), meta))
                    parts = []
                base = len(parts)
                parts += [(row, 0, part, count, base) for part in range(count)]
            else:
                chunks += [(length - new + first, row, first) for first in range(0, new, queries)]
        if parts:
            decodes.append(HostWork.of(parts, len(parts), meta))
        # Long items first, so that the last ones to end are short.
        items = [(row, first) for _, row, first in sorted(chunks, reverse=True)]
        return decodes, [HostWork.of(items, 0, meta)] if items else []
