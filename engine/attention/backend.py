"""The interface of attention backends: what they support, their caches, their plan of a step, and attention itself."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..config import EngineConfig
from .layer import AttentionLayer
from .metadata import AttentionMeta


@dataclass(frozen=True, slots=True, eq=False)
class LayerCache:
    """An attention layer with its keys and values, as its backend allocated them."""

    layer: AttentionLayer
    block_size: int
    # [blocks, KV heads, a head's part]. A block is contiguous; memory of other layers may separate it from the next one
    # (CacheGroups), so that the distance is stride(0).
    tensor: Tensor
    sinks: Tensor | None = None  # [heads], in the dtype that the backend needs
    group: int = 0  # of layers, whose blocks it uses; layers of several groups may share memory


class Plan(Protocol):
    """What a backend computes once per step, for all layers. Valid until the step's input buffers are written again."""

    @property
    def meta(self) -> AttentionMeta: ...


class AttentionBackend(Protocol):
    """Owns the layout of the cache: only the backend allocates, writes, reads and indexes cache tensors."""

    drawback: str  # of using it instead of a preferred backend that cannot serve the model
    invariant: bool  # a token's result has the same bits in any batch, and however its prompt is divided into chunks
    capturable: bool  # its launches of a step can be captured in a CUDA graph, see StaticPlans
    library: ctypes.CDLL | None  # the library that measures its time

    @classmethod
    def objection(
        cls,
        layers: Sequence[AttentionLayer],
        dtype: torch.dtype,
        cache_dtype: torch.dtype,
        device: torch.device,
        isa: str,
    ) -> str | None:
        """Return why it cannot serve a model with these layers, or None if it can.

        `isa` is the setting of the CPU kernels.
        """

    @classmethod
    def workspace_bytes(
        cls, layers: Sequence[AttentionLayer], dtype: torch.dtype, cache_dtype: torch.dtype, config: EngineConfig
    ) -> int:
        """Return an upper bound of the memory that a step needs beside the caches, for a resolved config."""

    @classmethod
    def as_cached(cls, layer: AttentionLayer) -> AttentionLayer:
        """Return a layer as it is cached: without `values_in_keys` if values cannot be read from keys."""

    @classmethod
    def create(cls, isa: str, *, invariant: bool = False) -> AttentionBackend:
        """Return a new backend. Raises ConfigError if the CPU kernels that `isa` selects cannot be used.

        `invariant`: it should be, even if it is then slower; it may not be all the same.
        """

    def allocate(
        self,
        layer: AttentionLayer,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,  # the model's, or one with scales (see `stored_size`)
        device: torch.device,
        *,
        sinks: Tensor | None = None,  # [heads], if the layer has them
    ) -> LayerCache:
        """Return a layer's cache; its content is undefined."""

    def plan(self, meta: AttentionMeta) -> Plan:
        """Return this backend's plan of a step. Called once per step, before the first layer."""

    def attend(
        self,
        cache: LayerCache,
        q: Tensor,  # [tokens, heads, head_dim]
        k: Tensor,  # [tokens, kv_heads, head_dim]
        v: Tensor,  # [tokens, kv_heads, v_head_dim]
        plan: Any,  # that `plan` has returned
    ) -> Tensor:
        """Store k and v in the cache, then compute causal attention; returns [tokens, heads, v_head_dim].

        If the layer has its values in keys, only k is stored.
        """

    def kernel_address(self, dtype: torch.dtype, cache_dtype: torch.dtype) -> int | None:
        """Return the address of `attend` in C++, as Stack in structures.h declares it, for kernels that call it.

        None if there is none for these dtypes of model and cache. The plans of a backend that has one are cpu.Plan.
        """
