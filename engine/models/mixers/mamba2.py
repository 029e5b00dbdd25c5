"""Mamba2: layers whose state is a matrix that each token adds to.

The method is from Dao and Gu 2024, "Transformers are SSMs: Generalized Models and Efficient Algorithms Through
Structured State Space Duality". A head's matrix maps keys (B) to values (x). A token has a time step (dt). The
matrix is multiplied by a decay, which depends on it, and the outer product of the key and the value is added, times the
time step. What is read with the query (C), plus a part of the value itself, is the output. Queries, keys and values are
convolved over the last tokens before.

`mamba2` is in torch. It is used where there is no kernel, and it is the oracle of the kernel's tests.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .convolution import convolve
from .states import LayerStates, Mamba2Shape, Segments


class Mamba2Weights(NamedTuple):
    """The weights of a layer beside its projections."""

    taps: Tensor  # [channels, 1, taps]: of the convolution, the oldest token first
    conv_bias: Tensor | None  # [channels]
    a_log: Tensor  # [value_heads] float32 (float64 in a model of that): the logarithm of the rate of decay (A_log)
    dt_bias: Tensor  # [value_heads], of the same dtype: added to the numbers that set a token's step
    skip: Tensor  # [value_heads], of the same dtype: how much of a token's value is added to what it reads (D)
    norm: Tensor  # [values]


class Mamba2Layer(NamedTuple):
    """A layer between its projections."""

    shape: Mamba2Shape
    eps: float  # of the norm of the output
    weights: Mamba2Weights


def mamba2(layer: Mamba2Layer, projected: Tensor, states: LayerStates, segments: Segments) -> Tensor:
    """Return what a layer reads for each token, before its output projection: [tokens, values].

    projected: [tokens, values + channels + value_heads]: the gates of the output, values, keys and queries, and the
    numbers that set the steps. The states that the segments name are read and written.
    """
    shape, eps, weights = layer
    z, x, steps = projected.split([shape.values, shape.channels, shape.value_heads], -1)
    convolved = torch.empty_like(x)
    work = states.matrices.dtype
    steps = F.softplus(steps.to(work) + weights.dt_bias).clamp(*shape.limits)
    decay = torch.exp(-weights.a_log.exp() * steps)
    read = torch.empty(len(x), shape.value_heads, shape.value_dim, dtype=work, device=x.device)
    for first, end, source, target in segments.each:
        window, matrix = states.before(source)
        line = torch.cat([window, x[first:end]])
        states.windows[target] = line[end - first :]
        convolved[first:end] = F.silu(convolve(line, weights.taps, weights.conv_bias))
        v, k, q = convolved[first:end].to(work).split([shape.values, shape.keys, shape.keys], -1)
        v = v.unflatten(-1, (shape.value_heads, -1))
        repeats = shape.value_heads // shape.key_heads
        q, k = (each.unflatten(-1, (shape.key_heads, -1)).repeat_interleave(repeats, 1) for each in (q, k))
        for token in range(end - first):
            at = first + token
            change = v[token] * steps[at][:, None]
            matrix = matrix * decay[at][:, None, None] + k[token][:, :, None] * change[:, None, :]
            read[at] = (matrix * q[token][:, :, None]).sum(1)
        read[first:end] += v * weights.skip[:, None]
        states.matrices[target] = matrix
    return _gated_norm(read.to(x.dtype).flatten(1), z, weights.norm, shape.key_heads, eps)


def _gated_norm(x: Tensor, z: Tensor, weight: Tensor, groups: int, eps: float) -> Tensor:
    """Return x * silu(z), divided by the root mean square of its group, rounded to the model's dtype, * weight, rounded
    again: [tokens, values]."""
    work = torch.float64 if x.dtype == torch.float64 else torch.float32
    gated = (x.to(work) * F.silu(z.to(work))).unflatten(-1, (groups, -1))
    normed = gated * torch.rsqrt(gated.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normed.flatten(1).to(x.dtype)
