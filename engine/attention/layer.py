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
    # A value is the first v_head_dim numbers of its key, and the cache has keys alone, see AttentionBackend.as_cached.
    values_in_keys: bool = False

    @property
    def stored_v_dim(self) -> int:
        """The numbers of a value that the cache holds beside its key."""
        return 0 if self.values_in_keys else self.v_head_dim

    @property
    def numbers(self) -> int:
        """The number of elements per token: what the cache holds for each KV head."""
        return self.num_kv_heads * (self.head_dim + self.stored_v_dim)

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
        return stored_size(self.head_dim, dtype) + stored_size(self.stored_v_dim, dtype)


def stored_size(dim: int, dtype: torch.dtype) -> int:
    """Return the number of elements that a key or value of `dim` numbers has in a cache: 4 more if it is scaled, and
    none if there are no numbers.

    A scaled key or value is numbers of one byte, and a float32 scale to multiply them by: the largest magnitude /
    LARGEST. If that is below the smallest normal float32, all are zero.
    """
    return dim + 4 if dim and dtype in LARGEST else dim
