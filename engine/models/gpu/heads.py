"""Products of each head with a weight of its own on a GPU: launches of kernels/gpu/heads.py.

latent_layer.py computes the same in torch. It is used where this kernel cannot be, and it is the tests' oracle.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...attention.paged_gpu import dependence, is_interpreted
from ...kernels.launching import gpu_kernels, launch


class Tile(NamedTuple):
    """What a program of the kernel computes at once: rows of x, rows of a head's weight, and columns of both."""

    tokens: int
    rows: int
    columns: int
    warps: int
    stages: int


# 64 tokens, the fewest that the matrix units of a Hopper multiply, for any number of them: with few the product takes
# the time in which the weights are read. Of many each weight would be read too often.
ANY, MANY = Tile(64, 32, 64, 4, 3), Tile(128, 128, 64, 8, 3)
FLOAT32 = Tile(32, 32, 32, 4, 2)  # without matrix units
MANY_TOKENS = 256


def multiply(x: Tensor, weights: Tensor, out: Tensor | None = None, *, uniform: bool = False) -> Tensor:
    """Return weights[h] @ x[t, h], in `out` if it is given: [tokens, heads, rows].

    x: [tokens, heads, columns]. weights: [heads, rows, columns]. `uniform`: a token's result has the same bits beside
    any number of others.
    """
    tokens, heads, width = x.shape
    size = weights.shape[1]
    out = x.new_empty(tokens, heads, size) if out is None else out
    assert weights.is_contiguous() and weights.dtype == x.dtype == out.dtype
    assert x.stride()[2] == out.stride()[2] == 1 and out.shape == (tokens, heads, size)
    if tokens:
        tile = tile_of(x.dtype, tokens, uniform=uniform)
        constants = _constants(size, width, tile)
        launch(gpu_kernels("heads").multiply, (-(-size // tile.rows), heads, -(-tokens // tile.tokens)),
            x, weights, out, tokens, *x.stride()[:2], *out.stride()[:2],
            constants=constants, WIDEN=is_interpreted(), **dependence(x.device),
        )  # fmt: skip
    return out


def tile_of(dtype: torch.dtype, tokens: int, *, uniform: bool) -> Tile:
    """Return the tile of a product of this many tokens."""
    if dtype == torch.float32:
        return FLOAT32
    return ANY if uniform or tokens < MANY_TOKENS else MANY


@functools.cache
def _constants(size: int, width: int, tile: Tile) -> dict[str, Any]:
    return {
        "SIZE": size, "WIDTH": width, "TOKENS": tile.tokens, "ROWS": tile.rows, "COLUMNS": tile.columns,
        "STAGES": tile.stages, "num_warps": tile.warps,
    }  # fmt: skip
