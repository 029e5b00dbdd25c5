"""Inputs: a Batch -> the tensors that one forward pass reads.

Each running sequence has a slot: its place in the columns that live from step to step (here the block table, in
the sampler its parameters). What a step needs is laid out in one buffer and crosses to the device in one copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..attention import AttentionMeta, KVCache
from ..batch import Row
from ..models import Forward

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Prepared:
    """One step: the model's input, on the device, and what the sampler needs on the host."""

    forward: Forward
    slots: Ints  # [rows]
    drawing: Ints  # [drawing rows], indices of rows
    lengths: Ints  # [rows] tokens of the sequence up to the end of the row
    draws_at: Ints | None  # [drawing rows], places among the logits; None: they are all the logits
    scored: dict[int, slice]  # row -> its places among the logits that score the prompt
    pooled: dict[int, slice]  # row -> its places among the hidden states


class Inputs:
    """Slots and block tables of the sequences that the device knows. The model thread's."""

    def __init__(self, max_seqs: int, max_blocks: int, block_size: int, cache: KVCache, device: torch.device) -> None:
        self.block_size = block_size
        self.cache = cache
        self.device = device
        self._free = list(range(max_seqs - 1, -1, -1))
        self._slot_of: dict[int, int] = {}
        self._table = np.zeros((max_seqs, max_blocks), np.int32)
        self._num_blocks = [0] * max_seqs

    def enter(self, seq_id: int) -> int:
        """Give a sequence a slot, with no blocks."""
        assert seq_id not in self._slot_of, f"sequence {seq_id} has entered before"
        slot = self._slot_of[seq_id] = self._free.pop()
        self._num_blocks[slot] = 0
        return slot

    def leave(self, seq_id: int) -> int:
        slot = self._slot_of.pop(seq_id)
        self._free.append(slot)
        return slot

    def slots(self, rows: list[Row]) -> Ints:
        return np.array([self._slot_of[row.seq_id] for row in rows], np.int64)

    def append_blocks(self, rows: list[Row]) -> None:
        for row in rows:
            if row.new_block_ids:
                slot = self._slot_of[row.seq_id]
                count = self._num_blocks[slot]
                self._num_blocks[slot] = count + len(row.new_block_ids)
                self._table[slot, count : self._num_blocks[slot]] = row.new_block_ids

    def prepare(self, rows: list[Row]) -> Prepared:
        """Return the step of these rows, at least one; their sequences have entered and have their blocks."""
        slots = self.slots(rows)
        counts = [len(row.token_ids) for row in rows]
        query_start = [0, *accumulate(counts)]
        starts = np.array([row.start for row in rows], np.int64)
        lengths = starts + counts
        drawing = np.array([index for index, row in enumerate(rows) if row.draws], np.int64)
        draws_at, scored, places = _logits(rows, query_start)
        pooled, hidden_places = _hidden(rows, query_start)
        width = -(-int(lengths.max()) // self.block_size)

        size = query_start[-1]
        longs = (size, size, size, len(places), len(hidden_places))
        host = _Buffer(longs, (len(rows) + 1, len(rows), len(rows) * width), self.device)
        ids, positions, slot_mapping, logits_at, hidden_at, starts_of, seq_lens, table = host.arrays
        ids[:] = np.fromiter(chain.from_iterable(row.token_ids for row in rows), np.int64, size)
        starts_of[:] = query_start
        seq_lens[:] = lengths
        if size == len(rows):  # only decode rows: each token is its row
            of_token, positions[:] = slots, starts
        else:
            of_token = np.repeat(slots, counts)
            positions[:] = np.arange(size) + np.repeat(starts - starts_of[:-1], counts)
        blocks, offsets = np.divmod(positions, self.block_size)
        slot_mapping[:] = self._table[of_token, blocks] * np.int64(self.block_size) + offsets
        logits_at[:] = places
        hidden_at[:] = hidden_places
        table[:] = self._table[slots, :width].ravel()

        on_device = host.to_device()
        meta = AttentionMeta(
            query_start=on_device[5],
            seq_lens=on_device[6],
            slot_mapping=on_device[2],
            block_table=on_device[7].view(len(rows), width),
            max_query=max(counts),
            max_seq=int(lengths.max()),
            query_start_list=query_start,
            seq_lens_list=lengths.tolist(),
        )
        forward = Forward(
            ids=on_device[0],
            positions=on_device[1],
            plan=self.cache.plan(meta),
            cache=self.cache,
            logits_at=on_device[3],
            hidden_at=on_device[4] if pooled else None,
        )
        return Prepared(
            forward,
            slots=slots,
            drawing=drawing,
            lengths=lengths,
            draws_at=draws_at,
            scored=scored,
            pooled=pooled,
        )


def _logits(rows: list[Row], query_start: list[int]) -> tuple[Ints | None, dict[int, slice], list[int]]:
    """draws_at and scored of Prepared, and the places in the line of tokens that need logits: each row's last ones."""
    places: list[int] = []
    draws: list[int] = []
    scored: dict[int, slice] = {}
    for index, row in enumerate(rows):
        if row.scored:
            scored[index] = slice(len(places), len(places) + len(row.scored))
        places += range(query_start[index + 1] - row.num_logits, query_start[index + 1])
        if row.draws:
            draws.append(len(places) - 1)
    return (np.array(draws, np.int64) if scored else None), scored, places


def _hidden(rows: list[Row], query_start: list[int]) -> tuple[dict[int, slice], list[int]]:
    """pooled of Prepared, and the places in the line of tokens whose hidden states are pooled: rows' last ones."""
    places: list[int] = []
    pooled: dict[int, slice] = {}
    for index, row in enumerate(rows):
        if row.num_hidden:
            pooled[index] = slice(len(places), len(places) + row.num_hidden)
            places += range(query_start[index + 1] - row.num_hidden, query_start[index + 1])
    return pooled, places


class _Buffer:
    """Arrays of int64, then of int32, in one piece of host memory; fresh each step, so that a copy may still run."""

    def __init__(self, longs: tuple[int, ...], ints: tuple[int, ...], device: torch.device) -> None:
        self._device = device
        self._longs, self._ints = longs, ints
        self._host = torch.empty(sum(longs) + -(-sum(ints) // 2), dtype=torch.int64, pin_memory=device.type == "cuda")
        flat = self._host.numpy()
        narrow = flat[sum(longs) :].view(np.int32)
        self.arrays: list[NDArray] = [flat[end - n : end] for n, end in zip(longs, accumulate(longs), strict=True)]
        self.arrays += [narrow[end - n : end] for n, end in zip(ints, accumulate(ints), strict=True)]

    def to_device(self) -> list[Tensor]:
        if self._device.type == "cpu":
            return [torch.from_numpy(array) for array in self.arrays]
        wide = self._host.to(self._device, non_blocking=True)
        narrow = wide[sum(self._longs) :].view(torch.int32)[: sum(self._ints)]
        return [*wide[: sum(self._longs)].split(self._longs), *narrow.split(self._ints)]
