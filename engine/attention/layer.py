"""What an attention layer keeps of a token."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class LayerKV:
    """What one layer keeps of a token: `num_kv_heads` keys of `head_dim` and values of `v_head_dim` numbers."""

    num_kv_heads: int
    head_dim: int
    v_head_dim: int

    @property
    def numbers(self) -> int:
        """Numbers kept per token."""
        return self.num_kv_heads * (self.head_dim + self.v_head_dim)

    def bytes(self, dtype: torch.dtype) -> int:
        """Bytes kept per token in a cache of this dtype."""
        return self.num_kv_heads * (held(self.head_dim, dtype) + held(self.v_head_dim, dtype)) * dtype.itemsize


def held(dim: int, dtype: torch.dtype) -> int:
    """Numbers of a cache's dtype that a key or value of `dim` numbers takes: as many, in int8 four bytes more.

    In int8 it is whole numbers from -127 to 127 and a scale that they are multiplied with, the size of the largest
    number / 127 in float32. A key or value is zeros where that is below float32's smallest normal number.
    """
    return dim + 4 if dtype == torch.int8 else dim
