"""Buffers: the memory that the inputs of every step lie in, allocated once for the largest step."""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

T = TypeVar("T", NDArray, Tensor)


class Views(NamedTuple, Generic[T]):
    """The inputs of a step, as arrays on the host or as tensors on the device."""

    ids: T  # [tokens] int64
    positions: T  # [tokens] int64
    slot_mapping: T  # [tokens] int64
    logits_at: T  # [logits] int64, indices of tokens
    hidden_at: T  # [hidden states] int64, indices of tokens
    query_start: T  # [rows + 1] int32
    seq_lens: T  # [rows] int32
    block_table: T  # [rows, width] int32


class Shape(NamedTuple):
    """The sizes of a step."""

    tokens: int
    rows: int
    width: int  # blocks of the longest row
    logits: int
    hidden: int


class Buffers:
    """One piece of memory on the host and one on the device, each input at an address of its own that never changes.

    On a CPU both are the same memory. What a step was given is valid until the next step is laid out: its forward pass
    must have been queued by then.
    """

    def __init__(self, *, max_tokens: int, max_seqs: int, max_blocks: int, device: torch.device) -> None:
        self._max_tokens, self._max_seqs = max_tokens, max_seqs
        longs, ints = 5 * max_tokens, 2 * max_seqs + 1 + max_seqs * max_blocks
        on_gpu = device.type == "cuda"
        self._host = torch.zeros(longs + -(-ints // 2), dtype=torch.int64, pin_memory=on_gpu)
        self._device = self._host.to(device) if on_gpu else self._host
        self._copied = torch.cuda.Event() if on_gpu else None
        self._shape = Shape(0, 0, 0, 0, 0)
        self._arrays, self._tensors = self._views(self._shape)

    def views(self, shape: Shape) -> tuple[Views[NDArray], Views[Tensor]]:
        """Return where to write the inputs of a step, and where the device reads them after `upload`."""
        assert shape.tokens <= self._max_tokens and shape.rows <= self._max_seqs, f"{shape} is larger than any step"
        if self._copied is not None:
            self._copied.synchronize()  # the last copy reads the host's memory until then
        if shape != self._shape:  # steps that only decode are all alike, and to slice takes longer than to fill
            self._shape = shape
            self._arrays, self._tensors = self._views(shape)
        return self._arrays, self._tensors

    def upload(self) -> None:
        """Copy what was written to the device, in one piece."""
        if self._copied is not None:
            shape = self._shape
            ints = 2 * self._max_seqs + 1 + shape.rows * shape.width
            used = 5 * self._max_tokens + -(-ints // 2)
            self._device[:used].copy_(self._host[:used], non_blocking=True)
            self._copied.record()

    def _views(self, shape: Shape) -> tuple[Views[NDArray], Views[Tensor]]:
        longs, host = 5 * self._max_tokens, self._host.numpy()
        arrays = self._divided(host[:longs], host[longs:].view(np.int32), shape)
        return arrays, self._divided(self._device[:longs], self._device[longs:].view(torch.int32), shape)

    def _divided(self, longs: T, ints: T, shape: Shape) -> Views[T]:
        table = ints[2 * self._max_seqs + 1 :]

        def per_token(index: int, count: int) -> T:
            return longs[index * self._max_tokens :][:count]

        return Views(
            ids=per_token(0, shape.tokens),
            positions=per_token(1, shape.tokens),
            slot_mapping=per_token(2, shape.tokens),
            logits_at=per_token(3, shape.logits),
            hidden_at=per_token(4, shape.hidden),
            query_start=ints[: shape.rows + 1],
            seq_lens=ints[self._max_seqs + 1 :][: shape.rows],
            block_table=table[: shape.rows * shape.width].reshape(shape.rows, shape.width),
        )
