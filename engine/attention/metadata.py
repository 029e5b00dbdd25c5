"""Where the tokens of one step stand, for attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionMeta:
    """Where the tokens of one step stand. Row r owns the tokens query_start[r] to query_start[r + 1]: its last ones.

    The two lists hold the same numbers as the tensors beside them, so that nobody waits for the device.
    """

    query_start: Tensor  # [rows + 1] int32, prefix sum of tokens per row
    seq_lens: Tensor  # [rows] int32, cached and new tokens
    slot_mapping: Tensor  # [tokens] int64, block_id * block_size + offset
    block_table: Tensor  # [rows, max_blocks] int32; entries beyond a row's blocks are any valid block
    max_query: int
    max_seq: int
    query_start_list: list[int]
    seq_lens_list: list[int]

    @classmethod
    def of(
        cls, rows: Sequence[tuple[Sequence[int], int, int]], block_size: int, device: torch.device | str = "cpu"
    ) -> AttentionMeta:
        """From rows of (block ids, tokens cached, new tokens)."""
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
