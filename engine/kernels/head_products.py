"""The products of each head with a weight of its own, on the CPU by our kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from .blocks import in_blocks
from .library import Kernels
from .matmul import BlockRows, Packed, Packing
from .structures import Multiplied


class HeadProducts:
    """weights[h] @ x[t, h] for each head h of each token t. For float32 and bfloat16."""

    def __init__(
        self,
        kernels: Kernels,
        weights: Tensor | BlockRows,
        heads: int,
        *,
        activation_bytes: int = 1,  # in products with blocks
        packing: Packing | None = None,  # packs the weights when it runs; None: pack them now
    ) -> None:
        """weights: [heads * rows, columns], of which this is a packed copy."""
        self._kernels, self._dtype = kernels, weights.dtype
        self._shape = heads, weights.shape[0] // heads, weights.shape[1]
        work = Packing(kernels) if packing is None else packing
        if isinstance(weights, Tensor):
            self._packed = [Packed(kernels, weight, packing=work) for weight in weights.chunk(heads)]
        else:
            pack = partial(in_blocks, kernels, gated=False, wide=False, activation_bytes=activation_bytes, packing=work)
            self._packed = [pack([part]) for part in _by_head(weights, heads)]
        if packing is None:
            work.run()
        found = [packed.multiplied() for packed in self._packed]
        self._products = (Multiplied * len(found))(*found)

    def __call__(self, x: Tensor) -> Tensor:
        """Return [tokens, heads, rows] for x: [tokens, heads, columns]; both may be strided."""
        heads, rows, columns = self._shape
        tokens = len(x)
        if x.shape != (tokens, heads, columns) or x.dtype != self._dtype:
            raise ValueError(f"not [tokens, {heads}, {columns}] of {self._dtype}: {tuple(x.shape)} of {x.dtype}")
        by_head = x.transpose(0, 1).contiguous()
        out = x.new_empty(heads, tokens, rows)
        steps = tokens * columns * x.itemsize, tokens * rows * x.itemsize
        if self._kernels.head_products(
            ctypes.addressof(self._products), heads, by_head.data_ptr(), out.data_ptr(), *steps, tokens,
            torch.get_num_threads(),
        ):  # fmt: skip
            raise MemoryError("no memory for the activations of heads")
        return out.transpose(0, 1)


def _by_head(weights: BlockRows, heads: int) -> Iterator[BlockRows]:
    rows = weights.shape[0] // heads
    return (weights._replace(data=data, shape=(rows, weights.shape[1])) for data in weights.data.split(rows))
