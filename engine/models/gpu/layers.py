"""Launches of kernels/gpu/layers.py: what is between the products of a layer on a GPU."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from ...attention.gpu_cache import power_of_two, warps
from ...attention.paged_gpu import dependence
from ...kernels.launching import gpu_kernels, launch
from ..families.family import NormKind
from ..norms import RMSNorm
from .gates import Clamp, gate_constants, is_gated

GATE_TILE = 1024


def add_norm(
    x: Tensor, added: Tensor | None, norm: RMSNorm, after: RMSNorm | None = None, scale: Tensor | None = None
) -> Tensor:
    """Add to x [tokens, hidden_size] in place, and return its norm. None: there is nothing to add.

    `after`: the norm of what is added; it is of the same kind. `scale`: [1], what the sum is multiplied by.
    """
    normed = x.new_empty(x.shape)  # of x on META, torch would compute empty_like in Python
    assert x.is_contiguous() and (added is None or added.is_contiguous()) and (scale is None or added is not None)
    _launch(x, added, after, norm, normed, row=x.shape[1], scale=scale)
    return normed


def add(x: Tensor, added: Tensor | None, after: RMSNorm | None, scale: Tensor | None = None) -> None:
    """Add to x [tokens, hidden_size] in place; `after`: the norm of what is added. None: there is nothing to add.

    `scale`: [1], what the sum is multiplied by.
    """
    if added is None:
        assert scale is None
        return
    if after is None:
        x.add_(added)
        if scale is not None:
            x.mul_(scale)
        return
    assert x.is_contiguous() and added.is_contiguous()
    _launch(x, added, after, None, x, row=x.shape[1], scale=scale)


def normalize(x: Tensor, first: int, norm: RMSNorm) -> None:
    """Replace the columns of x [tokens, columns] from `first` on, as many as the norm has, by their norm."""
    assert x.is_contiguous()
    part = x[:, first : first + len(norm.weight)]
    _launch(part, None, None, norm, part, row=x.shape[1])


def _launch(
    x: Tensor,
    added: Tensor | None,
    after: RMSNorm | None,
    norm: RMSNorm | None,
    normed: Tensor,
    *,
    row: int,
    scale: Tensor | None = None,
) -> None:
    tokens, size = x.shape
    first = norm or after
    assert first is not None
    traits = added is not None, after is not None, scale is not None, norm is not None
    launch(gpu_kernels("layers").add_norm, (tokens,),
        x, x if added is None else added, x if after is None else after.gain, x if scale is None else scale,
        x if norm is None else norm.gain, normed, first.eps,
        constants=_norm_constants(size, row, first.kind, traits), **dependence(x.device),
    )  # fmt: skip


@functools.cache
def _norm_constants(size: int, row: int, kind: NormKind, traits: tuple[bool, bool, bool, bool]) -> dict[str, Any]:
    width, (add, after, scale, norm) = power_of_two(size), traits
    return {
        "SIZE": size, "SIZE_P": width, "ROW": row, "ADD": add, "AFTER": after, "SCALE": scale, "NORM": norm,
        "WIDE": kind.is_wide, "CENTERED": kind.is_centered, "num_warps": warps(width),
    }  # fmt: skip


def gated(gate_up: Tensor, activation: str, clamp: Clamp | None = None) -> Tensor:
    """Return activation(gate) * up, [tokens, inner], for gate_up [tokens, 2 * inner]; `clamp`: in place of the
    activation. Without a gate, see Squared, [tokens, inner] for [tokens, inner]."""
    tokens, inner = gate_up.shape[0], gate_up.shape[1] // (1 + is_gated(activation))
    assert gate_up.is_contiguous()
    out, constants = gate_up.new_empty(tokens, inner), _gate_constants(inner, activation, clamp)
    grid = tokens, -(-inner // constants["TILE"])
    launch(gpu_kernels("layers").gate, grid, gate_up, out, constants=constants, **dependence(out.device))
    return out


@functools.cache
def _gate_constants(inner: int, activation: str, clamp: Clamp | None) -> dict[str, Any]:
    tile = min(GATE_TILE, power_of_two(inner))
    return {"INNER": inner, "TILE": tile, **gate_constants(activation, clamp), "num_warps": warps(tile)}


def gate_heads(seen: Tensor, gates: Tensor, *, is_softplus: bool = False) -> None:
    """Multiply what each head has seen by the sigmoid, or the softplus, of its gate, in place: [tokens, heads,
    head_dim].

    gates: of the same shape, or [tokens, heads, 1], of which tokens and heads may have any stride.
    """
    tokens, heads, dim = seen.shape
    assert seen.is_contiguous() and gates.stride()[2] == 1 and gates.shape[2] in (1, dim)
    constants = _head_gate_constants(heads * dim, dim, gates.shape[2] == 1, is_softplus)
    grid = tokens, -(-heads * dim // constants["TILE"])
    launch(gpu_kernels("layers").gate_heads, grid,
        seen, gates, *gates.stride()[:2], constants=constants, **dependence(seen.device),
    )  # fmt: skip


@functools.cache
def _head_gate_constants(numbers: int, dim: int, per_head: bool, is_softplus: bool) -> dict[str, Any]:
    tile = min(GATE_TILE, power_of_two(numbers))
    return {
        "NUMBERS": numbers, "DIM": dim, "PER_HEAD": per_head, "SOFTPLUS": is_softplus, "TILE": tile,
        "num_warps": warps(tile),
    }  # fmt: skip
