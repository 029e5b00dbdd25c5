"""Buffers: the memory of every step's inputs, allocated once for the largest step."""

from __future__ import annotations

from itertools import accumulate
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


# Triton compiles a kernel once more for addresses that are not multiples of this, and the trials have those that are.
ALIGNMENT = 16  # bytes
NUM_LONGS = 5  # the int64 inputs, which precede the int32 ones


class Shape(NamedTuple):
    """The sizes of a step."""

    tokens: int
    rows: int
    width: int  # blocks of the longest row
    logits: int
    hidden: int

    def num_elements(self) -> tuple[int, ...]:
        """Return the number of elements of each input, in the order of Views."""
        per_token = self.tokens, self.tokens, self.tokens, self.logits, self.hidden
        return *per_token, self.rows + 1, self.rows, self.rows * self.width


def aligned(size: int, itemsize: int) -> int:
    """Return the number of elements after which the next input begins at a multiple of ALIGNMENT bytes."""
    unit = ALIGNMENT // itemsize
    return -(-size // unit) * unit


class Buffers:
    """One piece of memory on the host and one on the device. The address of each input never changes, and is aligned.

    On a CPU both are the same memory. The inputs of a step are valid until `views` is called for the next step. By then
    its forward pass must be queued.

    The step's tokens are followed by padding up to token number `padded`: id 0 at position 0, with slot -1, for which
    nothing is stored. Its logits are followed by those of token 0, up to the same number.
    """

    def __init__(
        self, *, max_tokens: int, max_seqs: int, max_blocks: int, device: torch.device, padded: int = 0
    ) -> None:
        assert padded <= max_tokens
        self._padded = padded
        self._largest = Shape(max_tokens, max_seqs, max_blocks, logits=max_tokens, hidden=max_tokens)
        sizes = self._largest.num_elements()
        *starts, self._longs = accumulate((aligned(size, 8) for size in sizes[:NUM_LONGS]), initial=0)
        *int_starts, ints = accumulate((aligned(size, 4) for size in sizes[NUM_LONGS:]), initial=0)
        self._starts = starts + int_starts  # of each input, among the numbers of its type
        on_gpu = device.type == "cuda"
        self._host = torch.zeros(self._longs + -(-ints // 2), dtype=torch.int64, pin_memory=on_gpu)
        self._device = self._host.to(device) if on_gpu else self._host
        self._copied = torch.cuda.Event() if on_gpu else None
        self._shape = Shape(0, 0, 0, 0, 0)
        self._arrays, self._tensors = self._views(self._shape)
        self._pad(self._shape)

    def views(self, shape: Shape) -> tuple[Views[NDArray], Views[Tensor]]:
        """Return where to write the inputs of a step, and where the device reads them after `upload`."""
        largest = self._largest
        assert shape.tokens <= largest.tokens and shape.rows <= largest.rows, f"{shape} is larger than any step"
        if self._copied is not None:
            self._copied.synchronize()  # the last copy reads the host's memory until then
        if shape != self._shape:  # consecutive decode steps have the same shape, and slicing takes longer than filling
            self._shape = shape
            self._arrays, self._tensors = self._views(shape)
            self._pad(shape)
        return self._arrays, self._tensors

    def padding(self, tokens: int) -> Views[Tensor]:
        """Return the inputs of a step of padding on the device, with the memory of all rows and of all their blocks.

        To be called between steps: it overwrites the inputs of the last one.
        """
        assert tokens <= self._padded
        self.views(Shape(0, 0, 0, 0, 0))
        self.upload()
        rows, width = self._largest.rows, self._largest.width
        return self._views(Shape(tokens, rows, width, tokens, 0))[1]

    def upload(self) -> None:
        """Copy the inputs to the device, in one piece that ends with the block table."""
        if self._copied is not None:
            ints = self._starts[-1] + self._shape.num_elements()[-1]
            used = self._longs + -(-ints // 2)
            self._device[:used].copy_(self._host[:used], non_blocking=True)
            self._copied.record()

    def _pad(self, shape: Shape) -> None:
        """Write the padding after a step of this shape. Other steps of the same shape leave it as it is."""
        arrays, _ = self._views(Shape(self._padded, 0, 0, self._padded, 0))
        arrays.ids[shape.tokens :] = 0
        arrays.positions[shape.tokens :] = 0
        arrays.slot_mapping[shape.tokens :] = -1
        arrays.logits_at[shape.logits :] = 0

    def _views(self, shape: Shape) -> tuple[Views[NDArray], Views[Tensor]]:
        longs, host = self._longs, self._host.numpy()
        arrays = self._slices(host[:longs], host[longs:].view(np.int32), shape)
        return arrays, self._slices(self._device[:longs], self._device[longs:].view(torch.int32), shape)

    def _slices(self, longs: T, ints: T, shape: Shape) -> Views[T]:
        memory = [longs] * NUM_LONGS + [ints] * (len(self._starts) - NUM_LONGS)
        ends = map(int.__add__, self._starts, shape.num_elements())
        *rest, block_table = (part[start:end] for part, start, end in zip(memory, self._starts, ends, strict=True))
        return Views._make([*rest, block_table.reshape(shape.rows, shape.width)])
