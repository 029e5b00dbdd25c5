"""The seam that attention backends stand behind: what a backend says of itself, its caches, its plan and its kernel."""

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
    tensor: Tensor  # dimension 0 is the block, and a block is one contiguous run of bytes
    sinks: Tensor | None = None  # [heads], in the dtype that the backend wants


class Plan(Protocol):
    """What a backend derives from a step once, for all layers; it is valid until the step's memory is written again."""

    @property
    def meta(self) -> AttentionMeta: ...


class AttentionBackend(Protocol):
    """Owns the layout of the cache: it allocates, stores and reads; nobody else indexes a cache tensor."""

    drawback: str  # what is lost where it takes the place of one that cannot serve the model
    invariant: bool  # a token's result has the same bits whatever else is in the step, and however it was cut
    library: ctypes.CDLL | None  # the library whose clock counts its time

    @classmethod
    def objection(
        cls, layers: Sequence[AttentionLayer], dtype: torch.dtype, device: torch.device, isa: str
    ) -> str | None:
        """Return why it cannot serve a model with these layers, or None where it can.

        `isa` is the setting of the CPU kernels.
        """

    @classmethod
    def workspace_bytes(
        cls, layers: Sequence[AttentionLayer], dtype: torch.dtype, cache_dtype: torch.dtype, config: EngineConfig
    ) -> int:
        """Return an upper bound of the memory that a step takes beside the caches, for a resolved config."""

    @classmethod
    def create(cls, isa: str) -> AttentionBackend:
        """Return a new backend; ConfigError where the CPU kernels that `isa` names cannot be used."""

    def allocate(
        self,
        layer: AttentionLayer,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,  # the model's, or int8 (see `held`)
        device: torch.device,
        *,
        sinks: Tensor | None = None,  # [heads], where the layer has them
    ) -> LayerCache:
        """Return a layer's cache, its content undefined."""

    def plan(self, meta: AttentionMeta) -> Plan:
        """Return this backend's plan of a step; once per step, before the first layer."""

    def attend(
        self,
        cache: LayerCache,
        q: Tensor,  # [tokens, heads, head_dim]
        k: Tensor,  # [tokens, kv_heads, head_dim]
        v: Tensor,  # [tokens, kv_heads, v_head_dim]
        plan: Any,  # from this backend's `plan`
    ) -> Tensor:
        """Store k and v in the cache, then attend causally; return [tokens, heads, v_head_dim]."""

    def kernel_address(self, dtype: torch.dtype, cache_dtype: torch.dtype) -> int | None:
        """Return the address of `attend` for kernels that call it themselves, as structures.h declares it in Stack.

        None where there is none for a model and a cache of these dtypes. A backend that has one plans as cpu.Plan.
        """
