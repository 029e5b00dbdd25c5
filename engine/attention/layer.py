"""AttentionLayer: what one attention layer computes, and what it keeps of a token."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """The attention of one layer, fixed when the model is described."""

    num_heads: int  # of queries; a multiple of num_kv_heads
    num_kv_heads: int
    head_dim: int  # of queries and keys
    v_head_dim: int
    scale: float  # scores are the products of queries and keys times this
    window: int | None = None  # a query sees itself and the window - 1 tokens before it
    softcap: float | None = None  # scores become softcap * tanh(score / softcap)
    # The name of the model's parameter [num_heads] of sinks: scores that take part in the softmax and have no value.
    # Layers that differ in it alone are of one kind: a backend plans them together.
    sinks: str | None = field(default=None, compare=False)

    @property
    def numbers(self) -> int:
        """The numbers kept per token: a key and a value of each KV head."""
        return self.num_kv_heads * (self.head_dim + self.v_head_dim)

    def bytes(self, dtype: torch.dtype) -> int:
        """The bytes kept per token in a cache of this dtype."""
        return self.num_kv_heads * (held(self.head_dim, dtype) + held(self.v_head_dim, dtype)) * dtype.itemsize


def held(dim: int, dtype: torch.dtype) -> int:
    """Numbers of a cache's dtype that a key or value of `dim` numbers takes: as many, in int8 four bytes more.

    In int8 it is whole numbers from -127 to 127 and a scale that they are multiplied with, the size of the largest
    number / 127 in float32. A key or value is zeros where that is below float32's smallest normal number.
    """
    return dim + 4 if dtype == torch.int8 else dim
