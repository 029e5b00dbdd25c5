"""The gate after a product, as the Triton kernels take it."""

from __future__ import annotations

from ..families.family import UNGATED

Clamp = tuple[float, float]  # the limit and alpha of a layers.Clamp


def gate_constants(activation: str, clamp: Clamp | None) -> dict[str, str | float]:
    """Return the constants of a kernel that computes a gate, see activations.gated; no activation: there is none."""
    limit, alpha = clamp or (0.0, 0.0)
    return {"ACTIVATION": "clamped" if clamp and activation else activation, "LIMIT": limit, "ALPHA": alpha}


def is_gated(activation: str) -> bool:
    """Return whether a product with this activation has a gate: half as many results as its weight has rows."""
    return activation not in ("", UNGATED)
