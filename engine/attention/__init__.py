"""What attention needs to know about a step, the seam that its backends stand behind, and the choice among them."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from ..types import ConfigError

BACKENDS = {"cpu": "engine.attention.cpu:Paged", "reference": "engine.attention.reference:Reference"}


@dataclass(frozen=True, slots=True)
class LayerKV:
    """What one layer keeps of a token: `num_kv_heads` keys of `head_dim` and values of `v_head_dim` numbers."""

    num_kv_heads: int
    head_dim: int
    v_head_dim: int

    @property
    def numbers(self) -> int:
        """Numbers kept per token."""
        return self.num_kv_heads * (self.head_dim + self.v_head_dim)

    def bytes(self, dtype: torch.dtype) -> int:
        """Bytes kept per token in a cache of this dtype."""
        return self.num_kv_heads * (held(self.head_dim, dtype) + held(self.v_head_dim, dtype)) * dtype.itemsize


def held(dim: int, dtype: torch.dtype) -> int:
    """Numbers of a cache's dtype that a key or value of `dim` numbers takes: as many, in int8 four bytes more.

    In int8 it is whole numbers from -127 to 127 and a scale that they are multiplied with, the size of the largest
    number / 127 in float32. A key or value is zeros where that is below float32's smallest normal number.
    """
    return dim + 4 if dtype == torch.int8 else dim


@dataclass(frozen=True, slots=True)
class AttentionMeta:
    """Where the tokens of one step stand. Row r owns the tokens query_start[r] to query_start[r + 1]: its last ones.

    The two lists hold the same numbers as the tensors beside them, so that nobody waits for the device.
    """

    query_start: Tensor  # [rows + 1] int32, prefix sum of tokens per row
    seq_lens: Tensor  # [rows] int32, cached and new tokens
    slot_mapping: Tensor  # [tokens] int64, block_id * block_size + offset
    block_table: Tensor  # [rows, max_blocks] int32; entries beyond a row's blocks are any valid block
    max_query: int
    max_seq: int
    query_start_list: list[int]
    seq_lens_list: list[int]
    # What a backend derives once per step and shares among the layers; dies with the step.
    scratch: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(
        cls, rows: Sequence[tuple[Sequence[int], int, int]], block_size: int, device: torch.device | str = "cpu"
    ) -> AttentionMeta:
        """From rows of (block ids, tokens cached, new tokens)."""
        queries = [new for _, _, new in rows]
        lens = [cached + new for _, cached, new in rows]
        starts = [0, *accumulate(queries)]
        width = max(len(blocks) for blocks, _, _ in rows)
        slots = [
            blocks[position // block_size] * block_size + position % block_size
            for blocks, cached, new in rows
            for position in range(cached, cached + new)
        ]
        return cls(
            query_start=torch.tensor(starts, dtype=torch.int32, device=device),
            seq_lens=torch.tensor(lens, dtype=torch.int32, device=device),
            slot_mapping=torch.tensor(slots, dtype=torch.int64, device=device),
            block_table=torch.tensor(
                [[*blocks, *[0] * (width - len(blocks))] for blocks, _, _ in rows], dtype=torch.int32, device=device
            ),
            max_query=max(queries),
            max_seq=max(lens),
            query_start_list=starts,
            seq_lens_list=lens,
        )


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


@dataclass(frozen=True, slots=True)
class Choice:
    """The backend for a model; `note` says why it is not the one that its device has."""

    name: str
    note: str = ""


def check(name: str) -> None:
    """ConfigError for a backend that there is not; what a model needs of it is looked at by `choose`."""
    if name != "auto" and name not in BACKENDS:
        raise ConfigError(f"unknown attention backend {name!r}; known: auto, {', '.join(BACKENDS)}")


def choose(name: str, device: torch.device, layers: Sequence[LayerKV], dtype: torch.dtype, isa: str = "auto") -> Choice:
    """The backend that a setting means for a model on a device; "auto" is the best one that can be had.

    `isa` is the setting of the CPU kernels. A backend that was named and cannot serve the model is a ConfigError.
    """
    check(name)
    if name == "reference" or (name == "auto" and device.type != "cpu"):
        return Choice("reference")
    reason = _against_cpu(device, layers, dtype, isa)
    if reason is None:
        return Choice("cpu")
    if name == "cpu":
        raise ConfigError(f"the attention backend cpu cannot be used: {reason}")
    return Choice("reference", f"torch computes attention, slower and with results that depend on the batch: {reason}")


def _against_cpu(device: torch.device, layers: Sequence[LayerKV], dtype: torch.dtype, isa: str) -> str | None:
    """Why the CPU kernel cannot serve these layers, or None."""
    from . import cpu

    if device.type != "cpu":
        return f"the device is {device}"
    if dtype not in cpu.DTYPES:
        return f"it computes in {' and '.join(cpu.DTYPES.values())}, not in {str(dtype).removeprefix('torch.')}"
    if odd := next((layer for layer in layers if layer.head_dim != layer.v_head_dim), None):
        return f"it wants keys as long as values, and here they have {odd.head_dim} and {odd.v_head_dim} numbers"
    try:
        cpu.variant(isa)
    except ConfigError as error:
        return str(error)
    return None


def select(name: str, isa: str = "auto") -> Attention:
    """A new backend by the name that `choose` gave. Each is imported only when it is chosen."""
    module, _, attribute = BACKENDS[name].partition(":")
    make = getattr(importlib.import_module(module), attribute)
    backend: Attention = make.of(isa) if name == "cpu" else make()
    return backend
