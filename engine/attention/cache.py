"""The KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .backend import Attention
from .layer import LayerKV
from .metadata import AttentionMeta


@dataclass(slots=True, eq=False)
class KVCache:
    """The keys and values of every layer, in the layout of `backend`. The model thread's."""

    backend: Attention
    layers: list[Tensor]

    @classmethod
    def allocate(
        cls,
        backend: Attention,
        layers: Sequence[LayerKV],
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> KVCache:
        """A new cache of `num_blocks` blocks for these layers."""
        return cls(backend, [backend.allocate(layer, num_blocks, block_size, dtype, device) for layer in layers])

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        meta: AttentionMeta,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attention.attend on the cache of layer number `layer`."""
        return self.backend.attend(
            q, k, v, self.layers[layer], meta, scale=scale, window=window, softcap=softcap, sinks=sinks
        )
