"""Gated DeltaNet: linear attention whose state is a matrix that each token corrects.

The method is from Yang et al. 2024, "Gated Delta Networks: Improving Mamba2 with Delta Rule". A head's matrix maps keys
to values. A token multiplies it by a decay, and adds the outer product of its key and of the difference between its
value and the value that the matrix has for this key, times a gate. What it reads with its query is the output. Queries,
keys and values are convolved over the last tokens before.

`gated_delta` is in torch. It is used where there is no kernel, and it is the oracle of the kernels' tests.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .convolution import convolve
from .states import LayerStates, LinearShape, Segments

L2_EPS = 1e-6  # added to the squared length of a query or key


class DeltaWeights(NamedTuple):
    """The weights of a layer beside its projections."""

    taps: Tensor  # [channels, 1, taps]: of the convolution, the oldest token first
    a_log: Tensor  # [value_heads] float32 (float64 in a model of that): the logarithm of the rate of decay
    dt_bias: Tensor  # [value_heads], of the same dtype: added to the numbers that set a token's decay
    norm: Tensor  # [value_dim]


class DeltaLayer(NamedTuple):
    """A layer between its projections."""

    shape: LinearShape
    eps: float  # of the norm of the output
    weights: DeltaWeights


def gated_delta(layer: DeltaLayer, qkvz: Tensor, gates: Tensor, states: LayerStates, segments: Segments) -> Tensor:
    """Return what a layer reads for each token, before its output projection: [tokens, value_heads * value_dim].

    qkvz: [tokens, channels + values]: queries, keys, values, and the gates of the output. gates: [tokens,
    2 * value_heads], of each head first the numbers that set how much a token corrects the matrix (beta), then those
    that set the decay. The states that the segments name are read and written.
    """
    shape, eps, weights = layer
    x, z = qkvz.split([shape.channels, shape.values], -1)
    convolved = torch.empty_like(x)
    beta, decay = gates.split(shape.value_heads, -1)
    work = states.matrices.dtype
    beta = beta.sigmoid().to(work)
    decay = torch.exp(-weights.a_log.exp() * F.softplus(decay.to(work) + weights.dt_bias))
    read = torch.empty(len(x), shape.value_heads, shape.value_dim, dtype=work, device=x.device)
    for first, end, source, target in segments.each:
        window, matrix = states.before(source)
        line = torch.cat([window, x[first:end]])
        states.windows[target] = line[end - first :]
        convolved[first:end] = F.silu(convolve(line, weights.taps))
        q, k, v = convolved[first:end].to(work).split([shape.keys, shape.keys, shape.values], -1)
        q, k = (_unit(each.unflatten(-1, (shape.key_heads, -1))) for each in (q, k))
        q = q * shape.key_dim**-0.5
        repeats = shape.value_heads // shape.key_heads
        q, k = (each.repeat(1, repeats, 1) if shape.is_tiled else each.repeat_interleave(repeats, 1) for each in (q, k))
        v = v.unflatten(-1, (shape.value_heads, -1))
        for token in range(end - first):
            at = first + token
            matrix = matrix * decay[at][:, None, None]
            found = (matrix * k[token][:, :, None]).sum(1)
            change = (v[token] - found) * beta[at][:, None]
            matrix = matrix + k[token][:, :, None] * change[:, None, :]
            read[at] = (matrix * q[token][:, :, None]).sum(1)
        states.matrices[target] = matrix
    return _gated_norm(read.to(x.dtype), z.unflatten(-1, (shape.value_heads, -1)), weights.norm, eps).flatten(1)


def _unit(x: Tensor) -> Tensor:
    """Return vectors with length 1: [..., dim]."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + L2_EPS)


def _gated_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / rms(x), rounded to the model's dtype, * weight, rounded again, * silu(z): [tokens, heads, dim]."""
    work = torch.float64 if x.dtype == torch.float64 else torch.float32
    wide = x.to(work)
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return ((weight * normed.to(x.dtype)).to(work) * F.silu(z.to(work))).to(x.dtype)
