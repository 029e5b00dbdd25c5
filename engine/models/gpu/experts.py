"""A mixture of experts on a GPU: launches of kernels/gpu/experts.py, and products of pairs of a token and an expert.

experts.py computes the same one expert after the other, and must know on the host how many tokens each one has. It is
used where these kernels cannot be, and it is the tests' oracle.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...attention.gpu_cache import power_of_two, warps
from ...attention.paged_gpu import MAX_ERROR, dependence
from ...kernels.launching import META, Job, gpu_kernels, launch
from ..experts import Experts, ExpertsSpec
from ..layers import Clamp, Gated, Linear
from . import skinny
from . import tiles as gpu_tiles
from . import weights as gpu_weights
from .layers import GATE_TILE, gated
from .routing import Order, Routed, places
from .weights import GPUWeight

ARRANGE_TILE = 1024  # pairs that are read at once
ALIKE_ROWS = 64  # any number of pairs has the tile that skinny.Uniforms has for this many rows
# Of products with plain weights, by the largest average number of an expert's pairs.
TILES = {
    8: skinny.Tile(16, 32, 4, 5),  # with more stages it would not fit into all GPUs
    48: skinny.Tile(64, 64, 8, 3),
    skinny.ANY: skinny.Tile(128, 64, 8, 3, columns=64, shared=8),
}
# The same with quantized weights.
QUANTIZED_TILES = dict(zip((8, skinny.ANY), gpu_tiles.ROUTED_TILES, strict=True))


class RoutedExperts:
    """The experts of a layer, whose weights are loaded. A token's result is computed as in Experts."""

    def __init__(self, experts: Experts, activation: str) -> None:
        self.spec = experts.spec
        self._experts, self._activation = experts, activation
        self._up = Grouped(experts.gate_ups)
        self._down = Grouped(experts.downs)
        self._scale = self.spec.scale * self.spec.routing.scale
        self._choose_constants = _choose_constants(self.spec, has_scales=experts.scales is not None)
        size, has_shared = experts.hidden, bool(self.spec.shared)
        if self.spec.latent:  # their results are projected to the hidden state before they are added
            size, has_shared = self.spec.latent, False
        is_gated = has_shared and experts.shared_gate is not None
        self._combine_constants = _combine_constants(size, self.spec.active, has_shared=has_shared, is_gated=is_gated)

    def add_to(self, x: Tensor, normed: Tensor, slots: Tensor) -> None:
        """Add what the experts, and the MLP beside them, compute for `normed` to x in place: [tokens, hidden]. `slots`:
        see `route`."""
        self.compute(x, normed, *self.route(normed, slots))

    def compute(self, x: Tensor, normed: Tensor, weights: Tensor, chosen: Tensor) -> None:
        """Do as `add_to`, with these weights of each token's experts, and their numbers; see `route`."""
        shared = None
        if self._experts.shared is not None:
            gate_up, down = self._experts.shared
            shared = down(gated(gate_up.product(normed), self._activation))
        if self._experts.latents is None:
            gate = self._experts.shared_gate
            self._add(x, normed, weights, chosen, shared=shared, gates=None if gate is None else gate(normed))
            return
        into, back = self._experts.latents
        inner = into(normed)
        found = torch.zeros_like(inner)
        self._add(found, inner, weights, chosen)
        if shared is not None:
            x.add_(self._experts.gated(shared, normed))
        x.add_(back(found))

    def _add(
        self,
        x: Tensor,
        normed: Tensor,
        weights: Tensor,
        chosen: Tensor,
        *,
        shared: Tensor | None = None,
        gates: Tensor | None = None,
    ) -> None:
        """Add what the experts compute for `normed` to x, and `shared`: [tokens, hidden or latent].

        gates: of `shared`, [tokens, 1], before the sigmoid; None: it has none.
        """
        tokens, size = x.shape
        assert x.is_contiguous()
        order = self.arrange(chosen)
        inner = self._up.multiply(normed, order, self.spec.active, self._activation, self.spec.clamp)
        results = self._down.multiply(inner, order, 1)
        launch(gpu_kernels("experts").combine, (tokens, -(-size // self._combine_constants["TILE"])),
            x, results, weights, x if shared is None else shared, x if gates is None else gates,
            constants=self._combine_constants, **dependence(x.device),
        )  # fmt: skip

    def sizes(self) -> list[int]:
        """Return a number of tokens for each kind of tile."""
        spec, means = self.spec, [0, *self._up.tiles][:-1]
        return [mean * spec.count // spec.active + 1 for mean in means]

    def route(self, normed: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights of each token's experts, float32, and their numbers, int32: [tokens, active].

        slots: [tokens] int64, below 0 for padding, which has no experts: its numbers are that of all experts.
        """
        return self.choose(self._experts.logits(normed), slots)

    def choose(self, logits: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return the same for the router's logits: [tokens, experts]."""
        spec, tokens = self.spec, logits.shape[0]
        weights = logits.new_empty(tokens, spec.active, dtype=torch.float32)
        chosen = logits.new_empty(tokens, spec.active, dtype=torch.int32)
        correction, scales = self._experts.correction, self._experts.scales
        launch(gpu_kernels("experts").choose, (tokens,),
            logits.contiguous(), logits if correction is None else correction, logits if scales is None else scales,
            slots, weights, chosen, self._scale,
            constants=self._choose_constants, **dependence(logits.device),
        )  # fmt: skip
        return weights, chosen

    def arrange(self, chosen: Tensor) -> Order:
        """Return the pairs of a step in tiles of one expert each."""
        count, experts = chosen.numel(), self.spec.count
        tokens = self._up.tile(count).tokens
        tiles = count // tokens + min(count, experts)  # each expert can have one that is not full
        pairs, owners = chosen.new_empty(tiles * tokens), chosen.new_empty(tiles)
        launch(gpu_kernels("experts").arrange, (experts,),
            chosen, pairs, owners, count, tiles,
            constants=_arrange_constants(experts, tokens, ARRANGE_TILE), **dependence(chosen.device),
        )  # fmt: skip
        return Order(pairs, owners, num_pairs=count)


@functools.cache
def _choose_constants(spec: ExpertsSpec, *, has_scales: bool) -> dict[str, Any]:
    routing = spec.routing
    groups, size = power_of_two(routing.groups), power_of_two(spec.count // routing.groups)
    return {
        "EXPERTS": spec.count, "ACTIVE": spec.active, "ACTIVE_P": power_of_two(spec.active),
        "GROUPS": routing.groups, "GROUPS_P": groups, "KEPT": routing.kept, "SIZE_P": size,
        "SIGMOID": routing.has_sigmoids, "CORRECT": spec.has_correction, "NORMALIZE": spec.is_normalized,
        "EPSILON": spec.epsilon, "SCALES": has_scales,
        "num_warps": warps(groups * size),
    }  # fmt: skip


@functools.cache
def _arrange_constants(experts: int, tokens: int, tile: int) -> dict[str, Any]:
    return {"EXPERTS": experts, "EXPERTS_P": power_of_two(experts + 1), "TOKENS": tokens, "TILE": tile, "num_warps": 4}


@functools.cache
def _combine_constants(size: int, active: int, *, has_shared: bool, is_gated: bool) -> dict[str, Any]:
    tile = min(GATE_TILE, power_of_two(size))
    return {
        "SIZE": size, "TILE": tile, "ACTIVE": active, "SHARED": has_shared, "GATED": is_gated,
        "num_warps": warps(tile),
    }  # fmt: skip


class Grouped:
    """The product of pairs with the weights of a layer's experts, which have one shape and one form."""

    def __init__(self, linears: Sequence[Linear]) -> None:
        self._first = linears[0]
        self._weights = [_weight(linear) for linear in linears]
        self._biases = [_bias(linear) for linear in linears]
        tensors = [
            [*_tensors(weight), *(() if bias is None else (bias,))]
            for weight, bias in zip(self._weights, self._biases, strict=True)
        ]
        if self._biases[0] is None:
            tensors = [[*each, tensors[0][0]] for each in tensors]
        first = tensors[0][0]
        self._places = places(tensors, first.device)

    @property
    def tiles(self) -> Mapping[int, skinny.Tile] | Mapping[int, gpu_tiles.Tile]:
        """What a program computes, by the largest average number of an expert's pairs."""
        weight, uniforms = self._weights[0], self._first.uniforms
        if isinstance(weight, GPUWeight):
            return {skinny.ANY: gpu_tiles.UNIFORM_TILE} if weight.is_uniform else QUANTIZED_TILES
        if uniforms is None and weight.dtype == torch.float32:
            uniforms = skinny.UNIFORM_FLOAT32[0]
        if uniforms is None:
            return TILES
        # One that is the same for all numbers of rows.
        alike = uniforms.gated if isinstance(self._first, Gated) else uniforms.whole
        return {skinny.ANY: next(tile for most, tile in alike.items() if most >= ALIKE_ROWS)}

    def tile(self, pairs: int) -> skinny.Tile | gpu_tiles.Tile:
        """Return what a program computes of a step with this many pairs."""
        mean = pairs / len(self._weights)
        return next(tile for most, tile in self.tiles.items() if mean <= most)

    def multiply(self, x: Tensor, order: Order, fan: int, activation: str = "", clamp: Clamp | None = None) -> Tensor:
        """Return [pairs, rows] for x: [pairs / fan, columns]; with an activation [pairs, rows / 2], see Gated."""
        routed, weight, bias = Routed(order, self._places, fan), self._weights[0], self._biases[0]
        tile = self.tile(order.num_pairs)
        assert order.pairs.shape[0] == routed.tiles * tile.tokens
        if isinstance(weight, GPUWeight):
            assert isinstance(tile, gpu_tiles.Tile) and bias is not None
            out = torch.empty(order.num_pairs, weight.rows, dtype=x.dtype, device=x.device)
            weight.multiply_routed(x, bias, out, routed, tile)
            return gated(out, activation, clamp) if activation else out
        assert isinstance(tile, skinny.Tile)
        return skinny.multiply(x, weight, tile, bias=bias, activation=activation, clamp=clamp, routed=routed)


def objection(experts: Experts) -> str | None:
    """Return why RoutedExperts cannot compute these experts, or None."""
    if len({each.quantized is None for each in (*experts.gate_ups, *experts.downs)}) > 1:
        return "experts of which some weights are quantized and some are not"
    for linears in (experts.gate_ups, experts.downs):
        forms = {None if each.quantized is None else each.quantized.forms for each in linears}
        if len(forms) > 1 or any(form is not None and len(form) > 1 for form in forms):
            return "experts whose weights are stored in several forms"
        if any(part.order is not None for each in linears if each.quantized for part in each.quantized.parts):
            return "experts whose columns are stored in an order of their own"
    return None


def jobs(experts: Experts, activation: str, dtype: torch.dtype, *, wide: bool) -> Iterator[Job]:
    """Yield what compiles the kernels for experts on META; `wide`: the router's logits are in float32."""
    routed = RoutedExperts(experts, activation)
    logits = torch.empty(1, experts.spec.count, dtype=torch.float32 if wide else dtype, device=META)
    yield partial(routed.choose, logits, torch.empty(1, dtype=torch.int64, device=META))
    hidden, active = experts.hidden, experts.spec.active
    for tokens in routed.sizes():
        x = torch.empty(tokens, hidden, dtype=dtype, device=META)
        weights = torch.empty(tokens, active, dtype=torch.float32, device=META)
        chosen = torch.empty(tokens, active, dtype=torch.int32, device=META)
        yield partial(routed.compute, x, x, weights, chosen)


@torch.inference_mode()
def trial(experts: Experts, activation: str) -> str | None:
    """Compute with each kind of tile; return why the kernels cannot be used, or None.

    Kernels that have not been compiled before are compiled now, and not while a graph is captured.
    """
    device = experts.router.weight.device
    draw = torch.Generator(device).manual_seed(0)
    routed = RoutedExperts(experts, activation)
    for tokens in routed.sizes():
        x = torch.randn(tokens, experts.hidden, generator=draw, dtype=experts.dtype, device=device)
        weights, chosen = routed.route(x, torch.arange(tokens, device=device))
        scaled = experts.route(x)[0] * experts.spec.scale
        ours, nothing = torch.zeros_like(x), torch.zeros_like(x)
        routed.compute(ours, x, weights, chosen)
        # With the same experts: among equal ones torch may choose another one.
        want = experts.weighted(x, nothing, weights / experts.spec.scale, chosen.long())
        error = max(gpu_weights.relative(ours, want), gpu_weights.relative(weights, scaled))
        if not error < MAX_ERROR[x.dtype]:
            return f"the Triton kernels compute wrong results of experts on this device (relative error {error:.2g})"
    return None


def _weight(linear: Linear) -> Tensor | GPUWeight:
    return linear.weight if linear.quantized is None else linear.quantized.parts[0]


def _bias(linear: Linear) -> Tensor | None:
    return linear.bias if linear.quantized is None else linear.quantized.bias


def _tensors(weight: Tensor | GPUWeight) -> tuple[Tensor, ...]:
    return (weight,) if isinstance(weight, Tensor) else weight.tensors
