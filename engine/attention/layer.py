"""AttentionLayer: the shape of one attention layer, and the size of a token in its cache."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

# The dtypes of caches with scales, and the largest number that each stores.
LARGEST = {torch.int8: 127, torch.float8_e4m3fn: 448}


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """The shape and the constants of one attention layer, known when the model is described."""

    num_heads: int  # of queries; a multiple of num_kv_heads
    num_kv_heads: int
    head_dim: int  # of queries and keys
    v_head_dim: int
    scale: float  # of the scores
    window: int | None = None  # a token attends to itself and the window - 1 tokens before it
    softcap: float | None = None  # scores become softcap * tanh(score / softcap)
    # The name of the model's parameter [num_heads] of sinks: scores in the softmax that have no value. Layers that only
    # differ in it are equal: a backend plans them together.
    sinks: str | None = field(default=None, compare=False)

    @property
    def numbers(self) -> int:
        """The number of elements per token: a key and a value for each KV head."""
        return self.num_kv_heads * (self.head_dim + self.v_head_dim)

    def bytes(self, dtype: torch.dtype) -> int:
        """Return the number of bytes per token in a cache of this dtype."""
        return self.num_kv_heads * self._stored_size(dtype) * dtype.itemsize

    def empty_cache(self, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a cache of this layer: [num_blocks, num_kv_heads, elements of a KV head's part of a block].

        It is not cleared: backends ignore, or overwrite before use, what no token has stored.
        """
        elements = block_size * self._stored_size(dtype)
        return torch.empty(num_blocks, self.num_kv_heads, elements, dtype=dtype, device=device)

    def _stored_size(self, dtype: torch.dtype) -> int:
        return stored_size(self.head_dim, dtype) + stored_size(self.v_head_dim, dtype)


def stored_size(dim: int, dtype: torch.dtype) -> int:
    """Return the number of elements that a key or value of `dim` numbers has in a cache: 4 more if it is scaled.

    A scaled key or value is numbers of one byte, and a float32 scale to multiply them by: the largest magnitude /
    LARGEST. If that is below the smallest normal float32, all are zero.
    """
    return dim + 4 if dtype in LARGEST else dim
