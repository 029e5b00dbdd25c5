"""Inputs: converts a batch's rows to the tensors that one forward pass reads.

Each running sequence has a slot: its index in tables that are kept from step to step (the block table here, the
parameters in the sampler). The inputs of all steps share the same buffers, and are copied to the device at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..attention import AttentionMeta, KVCache
from ..batch import Row
from ..models import Forward
from .buffers import Buffers, Shape
from .group_tables import GroupTables

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Prepared:
    """The input of one step: the model's on the device, and the sampler's and pooler's on the host."""

    forward: Forward
    slots: Ints  # [rows]
    sampled_rows: Ints  # indices of the rows that sample
    lengths: Ints  # [rows], tokens of the sequence up to the end of the row
    sampled_logits: Ints | None  # the indices of their logits; None: all logits are theirs
    scored: dict[int, slice]  # row -> its logits that score prompt tokens
    pooled: dict[int, slice]  # row -> its hidden states
    pooled_logits: dict[int, int]  # row -> the index of its logits, if these are pooled


class Inputs:
    """The slots and block tables of running sequences. Owned by the model thread."""

    def __init__(
        self,
        *,
        max_seqs: int,
        max_tokens: int,  # of a step
        max_blocks: int,  # of a sequence
        block_size: int,
        cache: KVCache,
        device: torch.device,
        padded: int = 0,  # tokens, see Buffers
    ) -> None:
        self.block_size = block_size
        self.cache = cache
        self.buffers = Buffers(
            max_tokens=max_tokens, max_seqs=max_seqs, max_blocks=max_blocks, device=device, padded=padded
        )
        self.others: GroupTables | None = None
        if cache.num_groups > 1:
            largest = Shape(max_tokens, max_seqs, max_blocks, 0, 0)
            self.others = GroupTables(
                cache.num_groups - 1, largest, block_size=block_size, device=device, padded=padded
            )
        self._free = list(range(max_seqs - 1, -1, -1))
        self._slot_of: dict[int, int] = {}
        self._table = np.zeros((max_seqs, max_blocks), np.int32)
        self._num_blocks = [0] * max_seqs

    def enter(self, seq_id: int) -> int:
        """Assign a slot without blocks to a sequence, and return it."""
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
            new = row.new_block_ids
            if new:
                slot = self._slot_of[row.seq_id]
                count = self._num_blocks[slot]
                if self.others is not None:
                    new = self.others.append(slot, count, new)
                self._num_blocks[slot] = count + len(new)
                self._table[slot, count : self._num_blocks[slot]] = new

    def prepare(self, rows: list[Row], last: Tensor | None = None) -> Prepared:
        """Return the input for these rows, at least one, whose sequences have entered and have their blocks.

        It is valid until the next call, see Buffers. last: the last sampled token of each slot, on the device, for rows
        whose token is PENDING.
        """
        slots = self.slots(rows)
        counts = [len(row.token_ids) for row in rows]
        query_start = [0, *accumulate(counts)]
        starts = np.array([row.start for row in rows], np.int64)
        lengths = starts + counts
        needed = _logits(rows, query_start)
        logits_at = needed.at
        pooled, hidden_at = _hidden(rows, query_start)
        width = -(-int(lengths.max()) // self.block_size)

        size = query_start[-1]
        host, device = self.buffers.views(Shape(size, len(rows), width, len(logits_at), len(hidden_at)))
        host.ids[:] = np.fromiter(chain.from_iterable(row.token_ids for row in rows), np.int64, size)
        host.query_start[:] = query_start
        host.seq_lens[:] = lengths
        if size == len(rows):  # only decode rows: one token per row
            of_token, host.positions[:] = slots, starts
        else:
            of_token = np.repeat(slots, counts)
            host.positions[:] = np.arange(size) + np.repeat(starts - host.query_start[:-1], counts)
        blocks, offsets = np.divmod(host.positions, self.block_size)
        host.slot_mapping[:] = self._table[of_token, blocks] * np.int64(self.block_size) + offsets
        pending = last is not None and bool((host.ids < 0).any())
        if pending:  # the device reads such a token at its sequence's slot
            np.copyto(host.ids, -1 - of_token, where=host.ids < 0)
        host.logits_at[:] = logits_at
        host.hidden_at[:] = hidden_at
        host.block_table[:] = self._table[slots, :width]
        others = () if self.others is None else self.others.upload(blocks, offsets, of_token, slots, width)
        self.buffers.upload()
        if pending:
            assert last is not None
            ids = device.ids
            ids.copy_(torch.where(ids < 0, last[(-1 - ids).clamp_(min=0)], ids))

        meta = AttentionMeta(
            query_start=device.query_start,
            seq_lens=device.seq_lens,
            slot_mapping=device.slot_mapping,
            block_table=device.block_table,
            max_query=max(counts),
            max_seq=int(lengths.max()),
            query_start_list=query_start,
            seq_lens_list=lengths.tolist(),
            others=others,
        )
        forward = Forward(
            ids=device.ids,
            positions=device.positions,
            plan=self.cache.plan(meta),
            cache=self.cache,
            logits_at=device.logits_at,
            hidden_at=device.hidden_at if pooled else None,
        )
        return Prepared(
            forward,
            slots=slots,
            sampled_rows=needed.sampled_rows,
            lengths=lengths,
            sampled_logits=needed.sampled,
            scored=needed.scored,
            pooled=pooled,
            pooled_logits=needed.pooled,
        )


class _Logits(NamedTuple):
    """The tokens that need logits, and what these are for; see Prepared."""

    at: Ints | list[int]
    sampled_rows: Ints
    sampled: Ints | None
    scored: dict[int, slice]
    pooled: dict[int, int]


def _logits(rows: list[Row], query_start: list[int]) -> _Logits:
    counts = np.array([row.num_logits for row in rows], np.int64)
    is_plain = not any(row.scored or (row.embeds and row.num_logits) for row in rows)
    if is_plain:  # nearly always: all logits are of last tokens, to sample
        sampled_rows = np.flatnonzero(counts)
        return _Logits(np.array(query_start[1:], np.int64)[sampled_rows] - 1, sampled_rows, None, {}, {})
    sampled_rows = np.array([index for index, row in enumerate(rows) if row.is_sampled], np.int64)
    logits_at: list[int] = []
    sampled: list[int] = []
    scored: dict[int, slice] = {}
    pooled: dict[int, int] = {}
    for index, row in enumerate(rows):
        if row.scored:
            scored[index] = slice(len(logits_at), len(logits_at) + len(row.scored))
        logits_at += range(query_start[index + 1] - row.num_logits, query_start[index + 1])
        if row.is_sampled:
            sampled.append(len(logits_at) - 1)
        elif row.embeds and row.num_logits:
            pooled[index] = len(logits_at) - 1
    return _Logits(logits_at, sampled_rows, np.array(sampled, np.int64), scored, pooled)


def _hidden(rows: list[Row], query_start: list[int]) -> tuple[dict[int, slice], list[int]]:
    """Return `pooled` of Prepared, and the indices of the tokens whose hidden states are pooled, each row's last."""
    hidden_at: list[int] = []
    pooled: dict[int, slice] = {}
    for index, row in enumerate(rows):
        if row.num_hidden:
            pooled[index] = slice(len(hidden_at), len(hidden_at) + row.num_hidden)
            hidden_at += range(query_start[index + 1] - row.num_hidden, query_start[index + 1])
    return pooled, hidden_at
