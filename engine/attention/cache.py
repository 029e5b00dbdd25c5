"""KVCache: the keys and values of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..cache_groups import CacheGroups
from .backend import AttentionBackend, LayerCache, Plan
from .layer import AttentionLayer
from .metadata import AttentionMeta, Place


@dataclass(slots=True, eq=False)
class KVCache:
    """The keys and values of every layer, in the layout of `backend`. Owned by the model thread."""

    backend: AttentionBackend
    layers: list[LayerCache]
    num_groups: int = 1  # see CacheGroups

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
        groups: CacheGroups | None = None,  # None: all layers are one group
    ) -> KVCache:
        """Return a new cache of `num_blocks` blocks for these layers."""
        groups = groups or CacheGroups.of([None] * len(layers), 1)
        tensors: dict[int, Tensor] = {}  # by the layers' places in their groups
        caches = []
        everything = zip(layers, groups.of_layer, groups.places, groups.shares, strict=True)
        for layer, group, place, (parts, part) in everything:
            own = None if layer.sinks is None else (sinks or {})[layer.sinks]
            count = 0 if place in tensors else num_blocks * parts
            cache = backend.allocate(layer, count, block_size, dtype, device, sinks=own)
            tensor = tensors.setdefault(place, cache.tensor)
            if tensor.shape[1:] != cache.tensor.shape[1:]:
                tensor = tensor.view(num_blocks * parts, *cache.tensor.shape[1:])
            caches.append(replace(cache, tensor=tensor, place=Place(group, parts, part)))
        return cls(backend, caches, len(groups.windows))

    @property
    def dtype(self) -> torch.dtype:
        return self.layers[0].tensor.dtype

    def plan(self, meta: AttentionMeta) -> Plan:
        """Return the backend's plan of a step."""
        return self.backend.plan(meta)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> Tensor:
        """Call AttentionBackend.attend with the cache of layer number `layer`."""
        return self.backend.attend(self.layers[layer], q, k, v, plan)
