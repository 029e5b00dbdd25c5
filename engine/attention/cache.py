"""KVCache: the keys and values of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .backend import AttentionBackend, LayerCache, Plan
from .layer import AttentionLayer
from .metadata import AttentionMeta


@dataclass(slots=True, eq=False)
class KVCache:
    """The keys and values of every layer, in the layout of `backend`. Owned by the model thread."""

    backend: AttentionBackend
    layers: list[LayerCache]

    @classmethod
    def allocate(
        cls,
        backend: AttentionBackend,
        layers: Sequence[AttentionLayer],
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        sinks: Mapping[str, Tensor] | None = None,  # the parameters that the layers name
    ) -> KVCache:
        """Return a new cache of `num_blocks` blocks for these layers."""

        def layer_cache(layer: AttentionLayer) -> LayerCache:
            own = None if layer.sinks is None else (sinks or {})[layer.sinks]
            return backend.allocate(layer, num_blocks, block_size, dtype, device, sinks=own)

        return cls(backend, [layer_cache(layer) for layer in layers])

    @property
    def dtype(self) -> torch.dtype:
        return self.layers[0].tensor.dtype

    def plan(self, meta: AttentionMeta) -> Plan:
        """Return the backend's plan of a step."""
        return self.backend.plan(meta)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> Tensor:
        """Call AttentionBackend.attend with the cache of layer number `layer`."""
        return self.backend.attend(self.layers[layer], q, k, v, plan)
