"""The rows of Qwen3-Next's projections before linear attention, which its checkpoints group by key head.

A group of `in_proj_qkvz` has the rows of a key head's queries and keys, then those of the values that share it, and of
the gates of their output. A group of `in_proj_ba` has those of the same values' beta and decay. In the decoder the rows
of all queries come first, then those of all keys, and so on, as Qwen3.5 has them in four tensors.
"""

from __future__ import annotations

Rows = tuple[tuple[int, int], ...]  # of a tensor in a file: the first ones and the numbers of contiguous ones
MAX_PIECES = 1 << 18  # of all tensors of a checkpoint; Qwen3-Next-80B has 3,456 for each tensor of a weight


def grouped_rows(key_heads: int, value_heads: int, key_dim: int, value_dim: int) -> dict[str, dict[str, Rows]]:
    """Return the name of each grouped tensor -> the names of those of Qwen3.5 that it holds -> their rows in it."""
    heads = value_heads // key_heads
    values = heads * value_dim

    def rows(size: int, *parts: tuple[int, int]) -> Rows:
        return tuple((group * size + first, count) for first, count in parts for group in range(key_heads))

    size = 2 * key_dim + 2 * values
    return {
        "in_proj_qkvz": {
            "in_proj_qkv": rows(size, (0, key_dim), (key_dim, key_dim), (2 * key_dim, values)),
            "in_proj_z": rows(size, (2 * key_dim + values, values)),
        },
        "in_proj_ba": {"in_proj_b": rows(2 * heads, (0, heads)), "in_proj_a": rows(2 * heads, (heads, heads))},
    }


def count_of(rows: Rows) -> int:
    """Return the number of rows."""
    return sum(count for _, count in rows)
