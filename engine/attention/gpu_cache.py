"""Caches as the Triton attention kernels read them, and the constants of these kernels: what a layer's launches have in
common is made once."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .backend import LayerCache
from .layer import LARGEST, AttentionLayer

LINE = 64  # numbers of 16 bits in a line of a GPU's cache
MOST_NEAR = 32  # tokens of a block: `attend` brings eight blocks to the cache, if a part has as many
# Numbers of the widest tile of keys or values, and of a second one, which keys may have: those of multi-head latent
# attention have 512 + 64 numbers.
WIDEST, WIDEST_REST = 512, 64


BRANCH, LOOP = 1, 2  # see Shape


class Shape(NamedTuple):
    """How a program of `attend` computes."""

    keys: int  # that are multiplied at once
    warps: int
    stages: int  # of the loop over keys; the ids of blocks take two of them
    is_early: bool = False  # keys and values are prefetched before the preceding kernel has ended
    # With BRANCH or LOOP the keys that all queries see are not masked: a branch decides, or they have a loop.
    skips: int = 0
    sharing: int = 1  # programs that share a KV head, each with as many of its query heads


class GPUCache(LayerCache):
    """A cache as the kernels read it. What is derived from its fields is kept, in a dictionary that LayerCache has not:
    each launch would derive it again."""

    @functools.cached_property
    def is_scaled(self) -> bool:
        return self.tensor.dtype in LARGEST

    @functools.cached_property
    def scales(self) -> Tensor:
        return self.tensor.view(torch.float32) if self.is_scaled else self.tensor

    @functools.cached_property
    def strides(self) -> tuple[int, ...]:
        """Of blocks and heads, in numbers of the tensor and of the scales."""
        return *self.tensor.stride()[:2], *self.scales.stride()[:2]

    @functools.cached_property
    def rotate_constants(self) -> dict[str, Any]:
        return rotate_constants(self.layer, self.block_size, is_scaled=self.is_scaled)


@functools.cache
def rotate_constants(layer: AttentionLayer, block_size: int, *, is_scaled: bool) -> dict[str, Any]:
    """Return the constants of the kernel `rotate_store` that depend on the layer and its cache alone."""
    group, half = power_of_two(layer.num_heads // layer.num_kv_heads), power_of_two(layer.head_dim // 2)
    return {
        "HEADS": layer.num_heads, "KV_HEADS": layer.num_kv_heads, "DIM": layer.head_dim, "GROUP_P": group,
        "HALF_P": half, "BLOCK": block_size, "SCALED": is_scaled, "num_warps": warps(2 * group * half),
    }  # fmt: skip


@functools.cache
def attend_constants(
    layer: AttentionLayer,
    queries: int,
    shape: Shape,
    cached: tuple[int, bool, bool],  # tokens of a block, and whether rows have parts and the layer has sinks
    *,
    uniform: bool,
    is_scaled: bool,
) -> dict[str, Any]:
    """Return the constants of the kernel `attend`, except WIDEN and `dependence`."""
    block_size, split, has_sinks = cached
    return {
        "HEADS": layer.num_heads, "KV_HEADS": layer.num_kv_heads, "SHARING": shape.sharing, **tile_widths(layer),
        "BLOCK": block_size, "PARTED": split, "SINKS": has_sinks, "QUERIES": queries,
        "ROWS": tile_rows(layer, queries, shape.sharing), "TILE": shape.keys, "UNIFORM": uniform, "SKIP": shape.skips,
        "WINDOW": layer.window or 0,
        "SOFTCAP": layer.softcap is not None, "SCALED": is_scaled,
        "NEAR": near_lines(layer, block_size) if shape.is_early and not is_scaled else 0,
        "num_warps": shape.warps, "num_stages": shape.stages,
        # Fused, a compiler may round parts that are added up in two places in two ways.
        "enable_fp_fusion": not uniform,
    }  # fmt: skip


def near_lines(layer: AttentionLayer, block_size: int) -> int:
    """Return the constant NEAR of `attend`: the lines of a head's share of a block, or 0."""
    if layer.window is not None or block_size > MOST_NEAR:
        return 0
    return power_of_two(-(-block_size * (layer.head_dim + layer.stored_v_dim) // LINE))


def tile_widths(layer: AttentionLayer) -> dict[str, int]:
    """Return the constants of `attend` for the numbers of a head: of a key in one tile, or in two; and of a value."""
    dim, rest, in_keys = layer.head_dim, max(0, layer.head_dim - WIDEST), layer.values_in_keys
    width = padded(min(dim, WIDEST))
    return {
        "DIM": dim, "V_DIM": layer.v_head_dim, "DIM_P": width, "REST": padded(rest) if rest else 0,
        "V_DIM_P": width if in_keys else padded(layer.v_head_dim), "IN_KEYS": in_keys,
    }  # fmt: skip


def tile_rows(layer: AttentionLayer, queries: int, sharing: int = 1) -> int:
    """Return the height of the tile of this many queries: a power of two, at least what a product of tiles needs.
    `sharing`: see Shape."""
    return padded(queries * -(-layer.num_heads // layer.num_kv_heads // sharing))


def padded(dim: int) -> int:
    """Return the width of a tile for heads of `dim` numbers: a power of two, at least what a product of tiles needs."""
    return max(16, power_of_two(dim))


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is not below a number."""
    return 1 << (number - 1).bit_length()


def warps(numbers: int) -> int:
    """Return the warps of a program for this many numbers: eight per thread, if possible, are one load of 16 bytes."""
    return min(16, max(1, numbers // 256))
