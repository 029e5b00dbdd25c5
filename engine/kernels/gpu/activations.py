"""The activations of MLPs, for kernels that compute a gate, or the square of ReLU where there is none."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """Return the activation of float32 numbers, by its name in config.json."""
    if ACTIVATION == "silu" or ACTIVATION == "swish":
        x = x / (1.0 + tl.exp(-x))
    elif ACTIVATION == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_pytorch_tanh":
        # 0.5 * (1 + tanh(y)) is 1 / (1 + exp(-2 * y)).
        x = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    else:
        tl.static_assert(ACTIVATION == "relu")
        x = tl.where(x < 0.0, 0.0, x)  # NaN stays
    return x


@triton.jit
def gated(gate, up, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr):
    """Return activation(gate) * up in float32, or what layers.Clamp computes if ACTIVATION is "clamped"; if it is
    "relu2", the square of ReLU of `gate`, which is then no gate, and up is not used."""
    if ACTIVATION == "relu2":
        gate = tl.where(gate < 0.0, 0.0, gate)  # NaN stays
        return gate * gate
    elif ACTIVATION == "clamped":
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
        return gate / (1.0 + tl.exp(-ALPHA * gate)) * (up + 1.0)
    else:
        return activated(gate, ACTIVATION) * up
