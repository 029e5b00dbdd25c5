"""Rotary position embeddings: the frequencies of each scaling, and the rotation.

Dynamic and longrope frequencies are computed once, for the longest sequence that the engine serves, so that a request's
results do not depend on the length of another.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..files import shown
from ..types import ModelError

TABLE = 1024  # positions that tables have at least: trials compute at positions that no request may reach
MAX_NUMBER = (1 << 31) - 1  # in a config.json
ALIASES = {"su": "longrope"}  # older names of scalings
SCALINGS = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional")


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary parameters of a config.json. Those that the scaling does not use have their defaults."""

    head_dim: int  # numbers of a head that are rotated: the first ones
    theta: float = 10000.0
    scaling: str = "default"
    max_positions: int = 2048  # max_position_embeddings
    factor: float | None = None
    original_positions: int | None = None  # original_max_position_embeddings
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    part: float = 1.0  # of the frequencies: the others are 0
    alpha: float = 0.0  # of a dynamic scaling that does not depend on the length; 0: it does
    query_beta: float = 0.0  # see Family.scales_queries; 0: queries are not scaled

    @property
    def longest(self) -> int:
        """The maximum number of tokens for which the scaled embedding is meant."""
        if self.scaling in ("linear", "dynamic"):
            return int(self.max_positions * (self.factor or 1.0))
        if self.scaling == "yarn":
            return max(self.max_positions, int((self.original_positions or self.max_positions) * (self.factor or 1.0)))
        return self.max_positions


def frequencies(rope: Rope, max_len: int) -> tuple[Tensor, float]:
    """Return the angles per position, [head_dim / 2] float32, and the factor for cosines and sines."""
    dim, base = rope.head_dim, rope.theta
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    original = rope.original_positions or rope.max_positions
    factor = rope.factor if rope.factor is not None else rope.max_positions / original
    if rope.scaling == "linear":
        return 1.0 / base**exponents / factor, 1.0
    if rope.scaling == "proportional":
        angles = torch.zeros(dim // 2)
        turned = int(rope.part * dim // 2)
        angles[:turned] = 1.0 / base ** exponents[:turned] / (rope.factor or 1.0)
        return angles, 1.0
    if rope.scaling == "dynamic" and rope.alpha:
        return 1.0 / (base * rope.alpha ** (dim / (dim - 2))) ** exponents, 1.0
    if rope.scaling == "dynamic":
        length = max(max_len, rope.max_positions)
        base *= (factor * length / rope.max_positions - (factor - 1)) ** (dim / (dim - 2))
        return 1.0 / base**exponents, 1.0
    if rope.scaling == "yarn":
        return _yarn(rope, base**exponents, factor, original)
    if rope.scaling == "longrope":
        stretch = torch.tensor(rope.long_factor if max_len > original else rope.short_factor, dtype=torch.float32)
        scale = rope.attention_factor
        if scale is None:
            scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
        return 1.0 / (stretch * base**exponents), scale
    if rope.scaling == "llama3":
        return _llama3(rope, 1.0 / base**exponents, factor, original), 1.0
    return 1.0 / base**exponents, 1.0


def _yarn(rope: Rope, spread: Tensor, factor: float, original: int) -> tuple[Tensor, float]:
    """Interpolate low frequencies, keep high ones, and blend those between. From the YaRN paper (arXiv 2309.00071)."""

    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    def dimension(rotations: float) -> float:  # whose frequency makes this number of rotations over the original length
        return rope.head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    scale = rope.attention_factor
    if scale is None:
        both = rope.mscale and rope.mscale_all_dim
        scale = magnitude(rope.mscale) / magnitude(rope.mscale_all_dim) if both else magnitude(1.0)  # type: ignore[arg-type]
    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.head_dim - 1)
    if low == high:
        high += 0.001  # avoids a division by zero
    keep = 1 - ((torch.arange(rope.head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return 1.0 / (factor * spread) * (1 - keep) + 1.0 / spread * keep, scale


def _llama3(rope: Rope, plain: Tensor, factor: float, original: int) -> Tensor:
    """Divide the frequencies of long wavelengths by the factor, keep those of short ones, and blend those between."""
    wavelength = 2 * math.pi / plain
    longest, shortest = original / rope.low_freq_factor, original / rope.high_freq_factor
    blend = (original / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - blend) * plain / factor + blend * plain
    scaled = torch.where(wavelength > longest, plain / factor, plain)
    return torch.where((wavelength >= shortest) & (wavelength <= longest), blended, scaled)


class Turn(NamedTuple):
    """What a layer needs of a step's positions."""

    cos: Tensor  # [tokens, 1, head_dim], for `rotate`
    sin: Tensor
    query_scale: Tensor | None  # [tokens, 1, 1]


class Rotary:
    """Computes cosines and sines of positions, and scales of queries."""

    def __init__(self, rope: Rope, max_len: int, dtype: torch.dtype, device: torch.device) -> None:
        angles, self.scale = frequencies(rope, max_len)
        self.angles = angles.to(device)
        self.dtype = dtype
        self._table = torch.empty(0, 2, len(angles))
        self.period = rope.original_positions or rope.max_positions
        self.query_scales: Tensor | None = None  # of positions up to each multiple of the period
        if rope.query_beta:
            logs = torch.log(torch.arange(1, 2 + max(max_len, TABLE) // self.period, dtype=torch.float32))
            self.query_scales = (1 + rope.query_beta * logs).to(device, dtype)

    def turn(self, positions: Tensor) -> Turn:
        """Return what layers need of these positions."""
        scales = self.query_scales
        return Turn(*self.at(positions), None if scales is None else scales[positions // self.period][:, None, None])

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [tokens, 1, head_dim] for `rotate`: computed in float32, in the model's dtype."""
        cos, sin = self._cos_sin(positions[:, None, None])
        # With the first half's sine negated, rotating is two products and a swap of halves.
        return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)

    def table(self, length: int) -> Tensor:
        """Return the cosines and sines of `at` for `length` positions or more: [positions, 2, head_dim / 2] float32.

        On the meta device, whose arithmetic torch does in Python, the table is only as large.
        """
        if len(self._table) < length and self.angles.is_meta:
            self._table = torch.empty(length, *self._table.shape[1:], device=self.angles.device)
        if len(self._table) < length:
            # Double the table: a model's maximum length is rarely needed.
            positions = torch.arange(max(TABLE, 2 * len(self._table), length), device=self.angles.device)
            self._table = torch.stack(self._cos_sin(positions[:, None]), dim=1).float()
        return self._table

    def _cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions.float() * self.angles
        return (angles.cos() * self.scale).to(self.dtype), (angles.sin() * self.scale).to(self.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [tokens, heads, head_dim] by its positions' angles; element i is paired with i + head_dim / 2.

    Angles of fewer numbers rotate the first numbers of each head.
    """
    if cos.shape[-1] < x.shape[-1]:
        turned, others = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], dim=-1)
        return torch.cat([rotate(turned, cos, sin), others], -1)
    half = x.shape[-1] // 2
    return x * cos + torch.cat([x[..., half:], x[..., :half]], -1) * sin


def rope_parameters(source: Mapping[str, Any]) -> dict[str, Any]:
    """Return rope_scaling, the old key, or else rope_parameters, as transformers does."""
    found = source.get("rope_scaling") or source.get("rope_parameters") or {}
    if not isinstance(found, dict):
        raise ModelError("config.json: rope_scaling and rope_parameters must be objects")
    return found


def scaling_type(parameters: Mapping[str, Any]) -> str:
    """Return the name of the scaling that rotary parameters of a config.json ask for."""
    name = parameters.get("rope_type", parameters.get("type")) or "default"
    return ALIASES.get(name, name) if isinstance(name, str) else shown(name)


def read_rope(source: Mapping[str, Any], head_dim: int, max_positions: int, *, theta: float = 10000.0) -> Rope:
    """Return the rotary parameters of a config.json, whose default base is `theta`. Raises ModelError."""
    found = rope_parameters(source)
    scaling = scaling_type(found)
    base = found.get("rope_theta") or source.get("rope_theta") or theta
    original = found.get("original_max_position_embeddings")
    if scaling in ("llama3", "yarn", "longrope"):
        original = source.get("original_max_position_embeddings") or original or max_positions
    needed = {
        "linear": ("factor",),
        "dynamic": ("factor",),
        "yarn": (),
        "longrope": ("short_factor", "long_factor"),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    }.get(scaling, ())
    for key in () if scaling == "dynamic" and found.get("alpha") else needed:
        if found.get(key) is None:
            raise ModelError(f"config.json: rotary scaling {scaling!r} needs {key!r}")

    def optional(key: str) -> float | None:
        return None if found.get(key) is None else float(found[key])

    factors = {key: tuple(found.get(key) or ()) for key in ("short_factor", "long_factor")}
    if scaling == "longrope":
        for key, values in factors.items():
            if len(values) != head_dim // 2:
                raise ModelError(f"config.json: {key} must hold {head_dim // 2} numbers, not {len(values)}")
    try:
        rope = Rope(
            head_dim=head_dim,
            theta=float(base),
            scaling=scaling,
            max_positions=max_positions,
            factor=optional("factor"),
            original_positions=None if original is None else int(original),
            attention_factor=optional("attention_factor"),
            beta_fast=float(found.get("beta_fast") or 32),
            beta_slow=float(found.get("beta_slow") or 1),
            mscale=optional("mscale"),
            mscale_all_dim=optional("mscale_all_dim"),
            truncate=bool(found.get("truncate", True)),
            low_freq_factor=float(found.get("low_freq_factor") or 1),
            high_freq_factor=float(found.get("high_freq_factor") or 4),
            short_factor=factors["short_factor"],
            long_factor=factors["long_factor"],
            alpha=float(found.get("alpha") or 0) if scaling == "dynamic" else 0.0,
            part=float(found.get("partial_rotary_factor") or 1) if scaling == "proportional" else 1.0,
        )
        longest = rope.longest
    except (TypeError, ValueError, OverflowError):
        raise ModelError("config.json: a rotary parameter is not a number") from None
    if rope.alpha < 0:
        raise ModelError(f"config.json: alpha of the rotary parameters must be positive, not {shown(rope.alpha)}")
    if not 1 <= longest <= MAX_NUMBER:
        raise ModelError(f"config.json: the rotary parameters are for {longest:.3g} tokens, which no model takes")
    try:
        angles, scale = frequencies(rope, longest)
    except (TypeError, ValueError, ArithmeticError):
        angles, scale = torch.tensor([math.nan]), math.nan
    if not (angles.isfinite().all() and math.isfinite(scale)):
        raise ModelError("config.json: no angles can be computed from the rotary parameters")
    return rope
