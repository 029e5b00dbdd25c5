"""Inputs: converts a batch's rows to the tensors that one forward pass reads.

Each running sequence has a slot: its index in tables that are kept from step to step (the block table here, the
parameters in the sampler). The inputs of all steps share the same buffers, and are copied to the device at once. What
does not change while the same sequences decode is kept, too: the Layout of the last step.
"""

from __future__ import annotations

from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..attention import AttentionMeta, KVCache
from ..batch import PENDING, Row
from ..models import Forward
from .buffers import Buffers, Shape, Views
from .changes import on_device
from .group_tables import GroupTables
from .state_inputs import StateInputs

Ints = NDArray[np.int64]


class Layout(NamedTuple):
    """The places of a step's rows among slots, tokens and logits. Decode steps of the same rows share it."""

    slots: Ints  # [rows]
    counts: Ints  # [rows], tokens
    max_query: int
    query_start: Ints  # see AttentionMeta
    query_start_list: list[int]
    logits_at: Ints  # indices of tokens
    hidden_at: Ints
    sampled_rows: Ints  # indices of the rows that sample
    sampled_slots: Tensor  # their slots, on the device
    sampled_logits: Ints | None = None  # the indices of their logits; None: all logits are theirs
    scored: dict[int, slice] = {}  # row -> its logits that score prompt tokens
    pooled: dict[int, slice] = {}  # row -> its hidden states
    pooled_logits: dict[int, int] = {}  # row -> the index of its logits, if these are pooled


class Prepared(NamedTuple):
    """The input of one step: the model's on the device, and the sampler's and pooler's on the host."""

    forward: Forward
    layout: Layout
    lengths: Ints  # [rows], tokens of the sequence up to the end of the row


class Inputs:
    """The slots and block tables of running sequences. Owned by the runner."""

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
        states: StateInputs | None = None,  # of models whose layers keep states
    ) -> None:
        self.block_size = block_size
        self.cache, self.states = cache, states
        self.device = device
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
        self._layout: Layout | None = None  # of the last step, if its rows do nothing but sample
        self._laid_out: tuple[list[int], ...] = ()  # sequences, tokens and logits of its rows
        # Where the last step's inputs are, until its layout or a block of its rows changes: only some of them are new.
        self._filled: Views[NDArray] | None = None

    def enter(self, seq_id: int) -> int:
        """Assign a slot without blocks to a sequence, and return it."""
        assert seq_id not in self._slot_of, f"sequence {seq_id} has entered before"
        slot = self._slot_of[seq_id] = self._free.pop()
        self._num_blocks[slot] = 0
        return slot

    def leave(self, seq_id: int) -> int:
        slot = self._slot_of.pop(seq_id)
        self._free.append(slot)
        self._layout = None  # the sequence may enter again, with another slot
        return slot

    def append_blocks(self, rows: list[Row]) -> None:
        for row in [row for row in rows if row.new_block_ids]:
            new, self._filled = row.new_block_ids, None
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
        layout = self._lay_out(rows)
        slots, counts, size = layout.slots, layout.counts, layout.query_start_list[-1]
        starts = np.array([row.start for row in rows], np.int64)
        lengths = starts + counts
        seq_lens = lengths.tolist()
        longest = max(seq_lens)
        width = -(-longest // self.block_size)

        shape = Shape(size, len(rows), width, len(layout.logits_at), len(layout.hidden_at))
        host, device = self.buffers.views(shape)
        if self._filled is not host:
            host.query_start[:] = layout.query_start
            host.logits_at[:] = layout.logits_at
            host.hidden_at[:] = layout.hidden_at
            host.block_table[:] = self._table[slots, :width]
            self._filled = host
        host.seq_lens[:] = lengths
        if size == len(rows):  # only decode rows: one token per row
            ids = [row.token_ids[0] for row in rows]
            of_token, host.positions[:] = slots, starts
        else:
            ids = list(chain.from_iterable([row.token_ids for row in rows]))
            of_token = np.repeat(slots, counts)
            host.positions[:] = np.arange(size) + np.repeat(starts - host.query_start[:-1], counts)
        blocks, offsets = np.divmod(host.positions, self.block_size)
        host.slot_mapping[:] = self._table[of_token, blocks] * np.int64(self.block_size) + offsets
        num_pending = 0 if last is None else ids.count(PENDING)
        if num_pending < size:
            host.ids[:] = ids
        if 0 < num_pending < size:  # the device reads such a token at its sequence's slot
            np.copyto(host.ids, -1 - of_token, where=host.ids < 0)
        others = () if self.others is None else self.others.upload(blocks, offsets, of_token, slots, width)
        self.buffers.upload()
        if last is not None and num_pending == size:  # so each row samples
            torch.index_select(last, 0, layout.sampled_slots, out=device.ids)
        elif last is not None and num_pending:
            read = device.ids
            tokens = last.index_select(0, (-1 - read).clamp_(min=0))
            read.copy_(torch.where(read < 0, tokens, read))

        meta = AttentionMeta(
            query_start=device.query_start,
            seq_lens=device.seq_lens,
            slot_mapping=device.slot_mapping,
            block_table=device.block_table,
            max_query=layout.max_query,
            max_seq=longest,
            query_start_list=layout.query_start_list,
            seq_lens_list=seq_lens,
            others=others,
        )
        forward = Forward(
            ids=device.ids,
            positions=device.positions,
            plan=self.cache.plan(meta),
            cache=self.cache,
            logits_at=device.logits_at,
            states=None if self.states is None else self.states.prepare(rows, slots.tolist()),
            hidden_at=device.hidden_at if layout.pooled else None,
        )
        return Prepared(forward, layout, lengths)

    def _lay_out(self, rows: list[Row]) -> Layout:
        """Return the places of a step's rows: those of the step before, if the same rows sample again."""
        seq_ids, counts = [row.seq_id for row in rows], [len(row.token_ids) for row in rows]
        laid_out = seq_ids, counts, [row.num_logits for row in rows]
        only_samples = not any([row.scored or row.embeds or row.num_hidden for row in rows])
        if only_samples and self._layout is not None and laid_out == self._laid_out:
            return self._layout
        slots = _ints([self._slot_of[seq_id] for seq_id in seq_ids])
        layout = _new_layout(rows, slots, counts, self.device, only_samples=only_samples)
        self._layout, self._laid_out, self._filled = layout if only_samples else None, laid_out, None
        return layout


def _new_layout(rows: list[Row], slots: Ints, counts: list[int], device: torch.device, *, only_samples: bool) -> Layout:
    query_start = [0, *accumulate(counts)]
    if only_samples:  # nearly always: all logits are of last tokens
        sampled_rows = np.flatnonzero([row.num_logits for row in rows])
        ends = _ints(query_start)
        logits_at = ends[1:][sampled_rows] - 1
        places = slots, _ints(counts), max(counts), ends, query_start, logits_at, _ints([])
        return Layout(*places, sampled_rows, on_device(slots[sampled_rows], device))
    at: list[int] = []
    hidden_at: list[int] = []
    sampled: list[int] = []
    scored: dict[int, slice] = {}
    pooled: dict[int, slice] = {}
    pooled_logits: dict[int, int] = {}
    for index, (row, end) in enumerate(zip(rows, query_start[1:], strict=True)):
        if row.scored:
            scored[index] = slice(len(at), len(at) + len(row.scored))
        at += range(end - row.num_logits, end)
        if row.is_sampled:
            sampled.append(len(at) - 1)
        elif row.embeds and row.num_logits:
            pooled_logits[index] = len(at) - 1
        if row.num_hidden:
            pooled[index] = slice(len(hidden_at), len(hidden_at) + row.num_hidden)
            hidden_at += range(end - row.num_hidden, end)
    sampled_rows = _ints([index for index, row in enumerate(rows) if row.is_sampled])
    return Layout(
        slots,
        _ints(counts),
        max(counts),
        _ints(query_start),
        query_start,
        logits_at=_ints(at),
        hidden_at=_ints(hidden_at),
        sampled_rows=sampled_rows,
        sampled_slots=on_device(slots[sampled_rows], device),
        sampled_logits=_ints(sampled) if len(sampled) < len(at) else None,
        scored=scored,
        pooled=pooled,
        pooled_logits=pooled_logits,
    )


def _ints(numbers: list[int]) -> Ints:
    return np.array(numbers, np.int64)
