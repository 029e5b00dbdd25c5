"""The seam that attention backends stand behind."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from .layer import LayerKV
from .metadata import AttentionMeta


class Attention(Protocol):
    """Owns the layout of the cache: it allocates, stores and reads; nobody else indexes a cache tensor."""

    invariant: bool  # a token's result has the same bits whatever else is in the step, and however it was cut

    def allocate(
        self, layer: LayerKV, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """A layer's cache: in the model's dtype, or int8 (see `held`).

        Dimension 0 is the block, and a block is one contiguous run of bytes.
        """

    def attend(
        self,
        q: Tensor,  # [tokens, heads, head_dim]
        k: Tensor,  # [tokens, kv_heads, head_dim]
        v: Tensor,  # [tokens, kv_heads, v_head_dim]
        cache: Tensor,
        meta: AttentionMeta,
        *,
        scale: float,
        window: int | None = None,  # a query sees itself and the window - 1 tokens before it
        softcap: float | None = None,  # scores become softcap * tanh(score / softcap)
        sinks: Tensor | None = None,  # [heads], a score that takes its share of the softmax and gives no value
    ) -> Tensor:
        """Store k and v at meta.slot_mapping, then attend causally; gives [tokens, heads, v_head_dim]."""
