"""Multi-head latent attention on a GPU: launches of kernels/gpu/latents.py and heads.py around those of attention.

A layer takes six launches between the projections before and after it, where other attention takes two, and one more if
queries have a low rank.
latent_layer.py computes the same in torch. It is used where these kernels cannot be, and it is the tests' oracle.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ...attention import LayerCache
from ...attention.gpu_cache import power_of_two, warps
from ...attention.gpu_plan import Plan
from ...attention.paged_gpu import PagedGPU, Rotation, dependence
from ...kernels.launching import gpu_kernels, launch
from ..families.latent_shapes import LatentShape
from ..mixers.latent_layer import ByTorch, LatentAttention
from .heads import multiply


class GPULatent:
    """The latent attention of a layer; until its weights have been read, kernels are only compiled."""

    def __init__(self, layer: LatentAttention, dtype: torch.dtype) -> None:
        self._layer, shape = layer, layer.shape
        absorb, expand = layer.absorb, layer.expand
        if absorb is None:
            absorb, expand = (
                ByTorch(torch.empty(shape.heads, *sizes, dtype=dtype, device=layer.norm.weight.device))
                for sizes in ((shape.rank, shape.plain), (shape.value, shape.rank))
            )
        assert isinstance(absorb, ByTorch) and isinstance(expand, ByTorch)
        self._absorb, self._expand = absorb.weights, expand.weights

    def attend(
        self, projected: Tensor, rotation: Rotation | None, backend: PagedGPU, cache: LayerCache, plan: Plan
    ) -> Tensor:
        """Return what all heads read, [tokens, heads * value], as LatentAttention does."""
        layer, shape, uniform = self._layer, self._layer.shape, backend.invariant
        normed, keys = _normalized(layer, projected, rotation)
        if layer.queries is None:
            q = projected[:, : shape.queries]
        elif normed.is_meta:  # torch would import its compiler; our kernels for products are compiled by other jobs
            q = normed.new_empty(len(normed), shape.queries)
        else:
            q = layer.queries(normed)
        q = q.unflatten(1, (shape.heads, shape.plain + shape.rotated))
        if rotation is not None and rotation.query_scales is not None and not q.is_meta:
            q.mul_(rotation.query_scales[rotation.positions // rotation.period][:, None, None])
        queries = q.new_empty(len(q), shape.heads, shape.key)
        multiply(q[..., : shape.plain], self._absorb, queries[..., : shape.rank], uniform=uniform)
        _rotate(shape, q, rotation, queries)
        keys = keys.unsqueeze(1)
        seen = backend.attend(cache, queries, keys, keys[..., : shape.rank], plan)
        return multiply(seen, self._expand, uniform=uniform).flatten(1)


def _normalized(layer: LatentAttention, projected: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor]:
    """Return the norm of the latents of queries, [tokens, query_rank], if they have any, and keys: [tokens, key]."""
    shape, tokens, turn = layer.shape, len(projected), rotation or Rotation(projected, projected)
    of_queries = layer.query_norm or layer.norm
    keys = projected.new_empty(tokens, shape.key)
    normed = projected.new_empty(tokens, shape.query_rank) if shape.query_rank else keys
    assert projected.stride()[1] == 1
    launch(gpu_kernels("latents").normalize, (tokens, 2 if shape.query_rank else 1),
        projected, of_queries.gain, layer.norm.gain, turn.positions, turn.angles, normed, keys,
        of_queries.eps, layer.norm.eps, projected.stride()[0],
        constants=_norm_constants(shape), **_turn(rotation), **dependence(projected.device),
    )  # fmt: skip
    return normed, keys


def _rotate(shape: LatentShape, q: Tensor, rotation: Rotation | None, out: Tensor) -> None:
    """Write the rotated numbers of queries q [tokens, heads, plain + rotated] to out [tokens, heads, key]."""
    turn = rotation or Rotation(q, q)  # which are not read
    launch(gpu_kernels("latents").rotate, (len(q),),
        q, turn.positions, turn.angles, out, q.stride()[0],
        constants=_turn_constants(shape), **_turn(rotation), **dependence(q.device),
    )  # fmt: skip


def _turn(rotation: Rotation | None) -> dict[str, bool]:
    """Return the constants of a rotation."""
    return {
        "TURNED": rotation is not None, "INTERLEAVED": rotation is not None and rotation.is_interleaved,
        "WIDE": rotation is not None and rotation.is_wide, "enable_fp_fusion": False,
    }  # fmt: skip


@functools.cache
def _norm_constants(shape: LatentShape) -> dict[str, Any]:
    queries, rank = shape.rows[0], power_of_two(shape.rank)
    width = power_of_two(shape.query_rank or 1)
    return {
        "QUERIES": queries, "QUERIES_P": width, "RANK": shape.rank, "RANK_P": rank, "PAIRS": shape.rotated // 2,
        "PAIRS_P": power_of_two(shape.rotated // 2), "num_warps": warps(max(width, rank)),
    }  # fmt: skip


@functools.cache
def _turn_constants(shape: LatentShape) -> dict[str, Any]:
    heads, pairs = power_of_two(shape.heads), power_of_two(shape.rotated // 2)
    return {
        "HEADS": shape.heads, "HEADS_P": heads, "PLAIN": shape.plain, "RANK": shape.rank,
        "PAIRS": shape.rotated // 2, "PAIRS_P": pairs, "num_warps": warps(2 * heads * pairs),
    }  # fmt: skip
