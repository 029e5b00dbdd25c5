"""The work of a step for the Triton attention kernels: which program attends to which part of which row."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .backend import LayerCache
from .metadata import AttentionMeta, Tables

# Tokens of context per part of a row with one query. It depends on the number of rows alone, or a row's result would
# depend on the other rows' lengths; beside contexts of more than 65,536 tokens it does. On an H200, with contexts of
# 1,024 tokens, parts of 512 are 7 % faster for 64 rows and 66 % slower for one than these, and parts of 128 are 9 %
# slower for 64 and 12 % faster for one: those of a step with few rows.
SPLIT = 256
FEW_ROWS = 8  # of which a step has parts of half as many tokens
MAX_PARTS = 4096  # of one launch: bounds the memory for partial results
ITEM = 8  # int32 numbers per work item, as the kernel reads them

Kind = tuple[int | None, int]  # of layers that share launches: their window, and queries per item of a longer row


def most_parts(rows: int, length: int) -> int:
    """Return the largest number of parts that a step of up to `rows` decodes has, with contexts of `length` tokens."""
    return max(rows * -(-length // SPLIT), min(rows, FEW_ROWS) * -(-length // (SPLIT // 2)))


def pinned(table: NDArray[np.int32], device: torch.device) -> Tensor:
    """Return work items for a copy to the device: that of pageable memory would wait for the steps that the device has
    not computed yet."""
    tensor = torch.from_numpy(table)
    return tensor.pin_memory() if device.type == "cuda" else tensor


def _counts(lengths: NDArray[np.int32], window: int | None, split: int) -> NDArray[np.int32]:
    """Return the number of parts of each context."""
    counts: NDArray[np.int32] = -(-lengths // split)
    return counts if window is None else counts - np.maximum(lengths - window, 0) // split


class HostWork(NamedTuple):
    """The work items of one launch."""

    table: NDArray[np.int32]  # [items + 1, ITEM]
    num_parts: int

    @classmethod
    def of(cls, items: NDArray[np.int32], num_parts: int, meta: AttentionMeta, split: int) -> HostWork:
        """Return the work of items, [items, ITEM], with `split` tokens per part."""
        table = np.empty((len(items) + 1, ITEM), np.int32)
        table[0] = 0
        table[0, :3] = len(items), meta.block_table.stride(0), split
        table[1:] = items
        return cls(table, num_parts)

    @classmethod
    def empty(cls, meta: AttentionMeta) -> HostWork:
        """Return the work of a launch without items."""
        return cls.of(np.zeros((0, ITEM), np.int32), 0, meta, SPLIT)


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
    """The work items of a step, made for the first layer of each kind. `uniform`: see PagedGPU.invariant."""

    def __init__(self, meta: AttentionMeta, *, uniform: bool = False) -> None:
        self.meta, self._uniform = meta, uniform
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
                [
                    Work(pinned(table, device).to(device, non_blocking=True), len(table) - 1, parts)
                    for table, parts in works
                ]
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
        starts = np.array(meta.query_start_list, np.int32)
        lengths, new = np.array(meta.seq_lens_list, np.int32), starts[1:] - starts[:-1]
        return self._decodes(lengths, new, window), self._chunks(lengths, new, queries) if meta.max_query > 1 else []

    def _decodes(self, lengths: NDArray[np.int32], new: NDArray[np.int32], window: int | None) -> list[HostWork]:
        """Return the work of rows of one query: launches of whole rows that have at most MAX_PARTS parts together."""
        (row,) = (new == 1).nonzero()
        if not len(row):  # as in most steps of a long prompt
            return []
        length = lengths[row]
        split = SPLIT if self._uniform or len(row) > FEW_ROWS else SPLIT // 2
        counts = _counts(length, window, split)
        if split < SPLIT and counts.sum() > MAX_PARTS:  # one launch would not do
            split = SPLIT
            counts = _counts(length, window, split)
        ends = counts.cumsum()
        rows = np.zeros((len(row), ITEM), np.int32)
        rows[:, 0], rows[:, 3], rows[:, 4] = row, counts, ends - counts
        works, at, before = [], 0, 0  # the rows and parts of the launches so far
        while at < len(row):
            last = len(row)
            if ends[-1] - before > MAX_PARTS:
                last = max(at + 1, int(ends.searchsorted(before + MAX_PARTS, side="right")))
            total = int(ends[last - 1]) - before
            items = rows[at:last].repeat(counts[at:last], axis=0)
            items[:, 4] -= before
            items[:, 2] = np.arange(total) - items[:, 4]
            works.append(HostWork.of(items, total, self.meta, split))
            at, before = last, before + total
        return works

    def _chunks(self, lengths: NDArray[np.int32], new: NDArray[np.int32], queries: int) -> list[HostWork]:
        """Return the work of longer rows."""
        counts = np.where(new > 1, -(-new // queries), 0)
        row = np.arange(len(new)).repeat(counts)
        items = np.zeros((len(row), ITEM), np.int32)
        items[:, 0] = row
        items[:, 1] = (np.arange(len(row)) - (counts.cumsum() - counts)[row]) * queries
        # Long items first, so that the last ones to end are short.
        order = np.lexsort((items[:, 1], row, items[:, 1] + (lengths - new)[row]))[::-1]
        return [HostWork.of(items[order], 0, self.meta, SPLIT)]
