"""Buffers: the memory of every step's inputs, allocated once for the largest step."""

from __future__ import annotations

from itertools import accumulate
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..graph_sizes import MAX_ROWS

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
# The most tokens of a step whose int64 inputs lie next to the int32 ones: with the memory for prompts in between, a
# decode would copy 300 kB. As many as the largest captured decodes have.
SMALL = MAX_ROWS


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
    """One piece of memory on the host and one on the device. The addresses of an input never change, and are aligned.

    The memory begins with the int64 inputs of many tokens, which have another address than those of up to SMALL. On a
    CPU host and device are the same memory. The inputs of a step are valid until `views` is called for the next step.
    By then its forward pass must be queued.

    The step's tokens are followed by padding up to token number `padded`, in the memory of few tokens up to SMALL at
    most: id 0 at position 0, with slot -1, for which nothing is stored. Its logits are followed by those of token 0, up
    to the same number.
    """

    def __init__(
        self, *, max_tokens: int, max_seqs: int, max_blocks: int, device: torch.device, padded: int = 0
    ) -> None:
        assert padded <= max_tokens
        self._padded = padded
        self._largest = Shape(max_tokens, max_seqs, max_blocks, logits=max_tokens, hidden=max_tokens)
        small = aligned(min(SMALL, max_tokens), 8)
        many = aligned(max_tokens, 8) if max_tokens > SMALL else 0
        self._many = [many * index for index in range(NUM_LONGS)]
        self._few = [many * NUM_LONGS + small * index for index in range(NUM_LONGS)]
        self._longs = (many + small) * NUM_LONGS
        int_sizes = self._largest.num_elements()[NUM_LONGS:]
        *self._ints, ints = accumulate((aligned(size, 4) for size in int_sizes), initial=0)
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
        rows, width = self._largest.rows, self._largest.width
        shape = Shape(tokens, rows, width, tokens, 0)
        self.views(shape)
        self._pad(Shape(0, 0, 0, 0, 0), region=shape)
        self.upload()
        self._shape = Shape(-1, 0, 0, 0, 0)  # none: a step of this shape must not take the padding for its inputs
        return self._tensors

    def upload(self) -> None:
        """Copy the inputs to the device, in one piece that ends with the block table."""
        if self._copied is not None:
            ints = self._ints[-1] + self._shape.num_elements()[-1]
            longs = self._shape.num_elements()[:NUM_LONGS]
            first = min(self._start(index, size) for index, size in enumerate(longs))
            used = slice(first, self._longs + -(-ints // 2))
            self._device[used].copy_(self._host[used], non_blocking=True)
            self._copied.record()

    def are_static(self, ids: Tensor) -> bool:
        """Return whether a step's ids lie where those of a captured step of as many tokens do."""
        return ids.data_ptr() == self._device.data_ptr() + self._start(0, len(ids)) * self._device.itemsize

    def are_together(self, tokens: int, others: int) -> bool:
        """Return whether steps with these numbers of tokens have inputs at the same addresses."""
        return self._is_many(tokens) == self._is_many(others)

    def _pad(self, shape: Shape, region: Shape | None = None) -> None:
        """Write the padding after a step of this shape. Other steps of the same shape leave it as it is. `region`: the
        shape of the step whose memory is padded; None: the same."""
        counts = (region or shape).num_elements()
        host = self._host.numpy()
        for index, (count, own, value) in enumerate(zip(counts, shape.num_elements(), (0, 0, -1, 0), strict=False)):
            start = self._start(index, count)
            end = self._padded if self._is_many(count) else min(self._padded, SMALL)
            host[start + own : start + max(own, end)] = value

    def _views(self, shape: Shape) -> tuple[Views[NDArray], Views[Tensor]]:
        longs, host = self._longs, self._host.numpy()
        arrays = self._slices(host[:longs], host[longs:].view(np.int32), shape)
        return arrays, self._slices(self._device[:longs], self._device[longs:].view(torch.int32), shape)

    def _slices(self, longs: T, ints: T, shape: Shape) -> Views[T]:
        sizes = shape.num_elements()
        starts = [self._start(index, size) for index, size in enumerate(sizes[:NUM_LONGS])] + self._ints
        memory = [longs] * NUM_LONGS + [ints] * len(self._ints)
        *rest, block_table = (part[at : at + size] for part, at, size in zip(memory, starts, sizes, strict=True))
        return Views._make([*rest, block_table.reshape(shape.rows, shape.width)])

    def _start(self, index: int, count: int) -> int:
        """Return where the int64 input with this index begins, if it has this many numbers."""
        return (self._many if self._is_many(count) else self._few)[index]

    def _is_many(self, count: int) -> bool:
        return count > SMALL
