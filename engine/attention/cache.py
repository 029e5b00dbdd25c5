"""KVCache: the keys and values of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..cache_groups import CacheGroups
from .backend import AttentionBackend, LayerCache, Plan
from .layer import AttentionLayer
from .metadata import AttentionMeta


@dataclass(slots=True, eq=False)
class KVCache:
    """The keys and values of every layer, in the layout of `backend`. Owned by the runner."""

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

        def allocate(layer: AttentionLayer, count: int) -> LayerCache:
            own = None if layer.sinks is None else (sinks or {})[layer.sinks]
            return backend.allocate(layer, count, block_size, dtype, device, sinks=own)

        caches = [allocate(layer, 0) for layer in layers]
        sizes = [cache.tensor.shape[1:].numel() for cache in caches]  # elements of a block
        blocks: dict[int, int] = {}  # place -> elements from one block to the next
        for place, (parts, _), size in zip(groups.places, groups.shares, sizes, strict=True):
            blocks[place] = max(blocks.get(place, 0), parts * size)
        tensors: dict[int, Tensor] = {}
        everything = zip(layers, caches, sizes, groups.of_layer, groups.places, groups.shares, strict=True)
        for index, (layer, cache, size, group, place, (_, part)) in enumerate(everything):
            if place not in tensors:
                # Rounded up: the stride of a place need not be a multiple of this layer's block.
                tensors[place] = allocate(layer, -(-num_blocks * blocks[place] // size)).tensor
            shape = num_blocks, *cache.tensor.shape[1:]
            strides = blocks[place], *cache.tensor.stride()[1:]
            tensor = tensors[place].as_strided(shape, strides, part * size)
            caches[index] = replace(cache, tensor=tensor, group=group)
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
