"""AttentionMeta: the positions of a step's tokens, for attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor


class Tables(NamedTuple):
    """The blocks of a step's rows in a group of layers."""

    slot_mapping: Tensor  # [tokens] int64
    block_table: Tensor  # [rows, max_blocks] int32


@dataclass(frozen=True, slots=True)
class AttentionMeta:
    """The rows of one step. Row r has the tokens query_start[r] to query_start[r + 1], the last ones of its sequence.

    The two lists hold the same numbers as their tensors, so that reading them does not wait for the device.
    """

    query_start: Tensor  # [rows + 1] int32, prefix sum of tokens per row
    seq_lens: Tensor  # [rows] int32, cached and new tokens
    slot_mapping: Tensor  # [tokens] int64, block_id * block_size + offset
    # [rows, max_blocks] int32; entries after a row's blocks, and of blocks that are before a window, are any valid ids
    block_table: Tensor
    max_query: int
    max_seq: int
    query_start_list: list[int]
    seq_lens_list: list[int]
    others: tuple[Tables, ...] = ()  # slot_mapping and block_table of the groups of layers after the first

    def tables(self, group: int) -> Tables:
        """Return the blocks of a group of layers, see CacheGroups."""
        return self.others[group - 1] if group else Tables(self.slot_mapping, self.block_table)

    @classmethod
    def of(
        cls, rows: Sequence[tuple[Sequence[int], int, int]], block_size: int, device: torch.device | str = "cpu"
    ) -> AttentionMeta:
        """Return the metadata of rows of (block ids, number of cached tokens, number of new tokens)."""
        queries = [new for _, _, new in rows]
        lens = [cached + new for _, cached, new in rows]
        starts = [0, *accumulate(queries)]
        width = max(len(blocks) for blocks, _, _ in rows)
        slots = [
            blocks[position // block_size] * block_size + position % block_size
            for blocks, cached, new in rows
            for position in range(cached, cached + new)
        ]
        return cls(
            query_start=torch.tensor(starts, dtype=torch.int32, device=device),
            seq_lens=torch.tensor(lens, dtype=torch.int32, device=device),
            slot_mapping=torch.tensor(slots, dtype=torch.int64, device=device),
            block_table=torch.tensor(
                [[*blocks, *[0] * (width - len(blocks))] for blocks, _, _ in rows], dtype=torch.int32, device=device
            ),
            max_query=max(queries),
            max_seq=max(lens),
            query_start_list=starts,
            seq_lens_list=lens,
        )
