"""The multi-head latent attention of a decoder layer, beside the projections before and after it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ...kernels.head_products import HeadProducts
from ...kernels.library import Kernels
from ...kernels.matmul import BlockRows
from ..families.latent_shapes import LatentShape
from ..forward import Forward
from ..layers import InFile, Linear, Quantization
from ..norms import RMSNorm
from ..precision import LayerBits

NORM_EPS = 1e-6  # of the norms of queries and latents, whatever config.json says of the others

# Returns weights[h] @ x[t, h] for x: [tokens, heads, columns].
Products = Callable[[Tensor], Tensor]


class LatentAttention:
    """Attention of all heads to one vector per token, see LatentShape.

    A head's score is q · (W c) for its queries q and a latent c, which is (q W) · c: W is multiplied by each query,
    and not by each latent of the cache. Values are multiplied likewise, after attention.
    """

    def __init__(self, shape: LatentShape, dtype: torch.dtype, device: torch.device, *, on_gpu: bool) -> None:
        """`on_gpu`: the weights are quantized, and a GPU computes with them."""
        self._on_gpu = on_gpu
        self.shape, heads, rank = shape, shape.heads, shape.rank
        self.query_norm: RMSNorm | None = None
        self.queries: Linear | None = None  # from their latent to queries
        if shape.query_rank:
            self.query_norm = RMSNorm(shape.query_rank, NORM_EPS, dtype, device)
            self.queries = Linear(shape.queries, shape.query_rank, False, dtype, device)
        self.norm = RMSNorm(rank, NORM_EPS, dtype, device)
        sizes = [(heads * (shape.plain + shape.value), rank)]
        if shape.in_two:
            sizes = [(heads * rank, shape.plain), (heads * shape.value, rank)]
        # The projections of latents as in checkpoints, until they are packed
        self._of_heads = tuple(Linear(*each, False, dtype, device) for each in sizes)
        self.absorb: Products | None = None  # from a head's queries to those of latents
        self.expand: Products | None = None  # from latents to a head's values

    def __call__(
        self,
        projected: Tensor,
        turned: Callable[[Tensor], Tensor],
        query_scale: Tensor | None,
        forward: Forward,
        cache: int,
    ) -> Tensor:
        """Return what all heads read, [tokens, heads * value], for the projections of x: [tokens, rows].

        `turned` rotates parts of queries and keys: [tokens, heads, rotated]. `query_scale`: [tokens, 1, 1].
        """
        assert self.absorb is not None and self.expand is not None
        shape = self.shape
        q, latent, key = projected.split([shape.rows[0], shape.rank, shape.rotated], -1)
        if self.queries is not None and self.query_norm is not None:
            q = self.queries(self.query_norm(q))
        q = q.unflatten(-1, (shape.heads, -1))
        plain, rotated = (q if query_scale is None else q * query_scale).split([shape.plain, shape.rotated], -1)
        latent = self.norm(latent).unsqueeze(1)
        keys = torch.cat([latent, turned(key.unsqueeze(1))], -1)
        seen = forward.attend(cache, torch.cat([self.absorb(plain), turned(rotated)], -1), keys, latent)
        return self.expand(seen).flatten(1)

    def parts(self, prefix: str) -> list[tuple[str, Linear, int, int]]:
        """Return checkpoint names and places of the weights, as Layer.parts."""
        found: list[tuple[str, Linear, int, int]] = []
        if self.queries is not None:
            found.append((f"{prefix}self_attn.q_b_proj", self.queries, 0, self.shape.queries))
        if self.shape.in_two and not self._on_gpu and self.absorb is None:  # which may be in blocks, until packed
            named = zip(self.shape.head_names, self._of_heads, strict=True)
            found += [(prefix + name, linear, 0, len(linear.weight)) for name, linear in named]
        return found

    def targets(self, prefix: str) -> dict[str, Tensor]:
        """Return checkpoint name -> the tensor to read it into, of the weights that are no linear layers."""
        found = {f"{prefix}self_attn.kv_a_layernorm.weight": self.norm.weight}
        if self.query_norm is not None:
            found[f"{prefix}self_attn.q_a_layernorm.weight"] = self.query_norm.weight
        named = zip(self.shape.head_names, self._of_heads, strict=True)
        return found | {f"{prefix}{name}.weight": linear.weight for name, linear in named}

    def pack(self, kernels: Kernels | None, bits: LayerBits | None, in_file: Mapping[Linear, InFile]) -> None:
        """Pack the weights, after they have been read. Those of each head keep their data type or blocks."""
        quantization = None if bits is None else Quantization(bits.others, grouped=bits.grouped)
        if self.queries is not None and self.query_norm is not None:
            self.queries.pack(kernels, quantization=quantization, in_file=in_file.get(self.queries))
            self.query_norm.pack(kernels)
        self.norm.pack(kernels)
        if self.shape.in_two:
            weights = [(linear.weight, in_file.get(linear)) for linear in self._of_heads]
        else:
            weights = [(weight, None) for weight in self._divided()]
        self.absorb, self.expand = (_products(kernels, *each, heads=self.shape.heads) for each in weights)
        for linear in self._of_heads:
            linear.weight = linear.weight.new_empty(0)

    def _divided(self) -> tuple[Tensor, Tensor]:
        """Return the weights of queries, [heads * rank, plain], and of values, [heads * value, rank]."""
        of_heads = self._of_heads[0].weight.unflatten(0, (self.shape.heads, -1))
        keys, values = of_heads.split([self.shape.plain, self.shape.value], 1)
        return keys.transpose(1, 2).contiguous().flatten(0, 1), values.contiguous().flatten(0, 1)


def _products(kernels: Kernels | None, weights: Tensor, in_file: InFile | None, *, heads: int) -> Products:
    """Return the products of each head with its rows of a weight, which `in_file` has if it has not been read."""
    if kernels is None:
        return ByTorch(weights.unflatten(0, (heads, -1)))
    if in_file is None:
        return HeadProducts(kernels, weights, heads)
    (part,) = in_file.parts
    assert isinstance(part, BlockRows)
    return HeadProducts(kernels, part, heads, activation_bytes=in_file.activation_bytes, packing=in_file.packing)


class ByTorch:
    """weights[h] @ x[t, h] for each head h of each token t."""

    def __init__(self, weights: Tensor) -> None:
        """weights: [heads, rows, columns]."""
        self.weights = weights

    def __call__(self, x: Tensor) -> Tensor:
        """Return [tokens, heads, rows] for x: [tokens, heads, columns]."""
        return torch.bmm(x.transpose(0, 1), self.weights.transpose(1, 2)).transpose(0, 1)
