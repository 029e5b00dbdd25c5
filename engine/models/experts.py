"""A feed-forward layer of experts, of which a router selects a few for each token."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.library import Kernels
from ..kernels.structures import Mixture, Multiplied
from .families.family import NormKind
from .layers import Clamp, Gated, InFile, Linear, Quantization
from .norms import make_norm
from .precision import LayerBits
from .sigmoid import sigmoid
from .squared import Squared, first_layer


class Routing(NamedTuple):
    """How a token's experts are chosen, see ExpertKeys."""

    has_sigmoids: bool = False  # False: a softmax
    groups: int = 1  # of as many experts each
    kept: int = 1  # groups of a token's experts: the best by their largest score, with sigmoids by the sum of two
    scale: float = 1.0  # of the weights


SOFTMAX = Routing()


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """The shape of a model's layers of experts."""

    count: int
    active: int  # of a token
    inner: int  # intermediate size of an expert
    is_normalized: bool  # whether the weights of a token's experts add up to 1
    dense: frozenset[int]  # layers that have one MLP instead
    names: tuple[str, str, str, str]  # see ExpertKeys
    has_bias: bool = False  # of router and experts
    clamp: Clamp | None = None
    routing: Routing = SOFTMAX
    corrects: bool = False  # see ExpertKeys
    shared: int = 0  # intermediate size of the MLP beside the experts; 0: there is none
    shared_names: tuple[str, str, str] = ("", "", "")  # of its gate, up and down in checkpoints
    shared_gate: str = ""  # see ExpertKeys
    epsilon: float = 1e-20  # see ExpertKeys
    is_beside: bool = False  # see ExpertKeys
    scale: float = 1.0  # of what the experts add to the residual stream
    latent: int = 0  # size of the vectors with which they compute in place of the hidden state; 0: they do not
    latent_names: tuple[str, str] = ("", "")  # of the projections to these vectors and back in checkpoints
    wide_router: bool = False  # the router's weight and logits are in float32, see spec.with_routers

    def linears(self, expert: int) -> tuple[tuple[str, ...], str]:
        """Return the names of an expert's gate and up, which may be one tensor, or of up alone, and of its down
        projection."""
        *first, down = filter(None, (name.format(expert) for name in self.names[1:]))
        return tuple(first), down

    @property
    def shared_linears(self) -> tuple[tuple[str, ...], str]:
        """The same names of the MLP beside the experts."""
        *first, down = filter(None, self.shared_names)
        return tuple(first), down

    @property
    def has_correction(self) -> bool:
        """Whether a bias is added to the weights by which experts are chosen."""
        return self.corrects or self.routing.has_sigmoids

    def num_params(self, hidden: int) -> int:
        """Return the number of a layer's weights beside those of the experts' matrices."""
        biases = 1 + 2 * self.inner + hidden if self.has_bias else 0
        norms = 4 * hidden if self.is_beside else 0
        gate = hidden if self.shared_gate else 0
        return gate + norms + self.count * (hidden + biases + self.has_correction + self.is_beside)


class Experts:
    """residual + the sum of weight * expert(x) over a token's experts, + the MLP of all tokens; both are scaled.

    The products are computed for all tokens of an expert at once. Each token's results are then added in the order of
    its weights, in float32, so they do not depend on the other tokens. On a CPU one call of our kernels (experts.h)
    computes all of it, if they have all parts.
    """

    def __init__(
        self, hidden: int, spec: ExpertsSpec, dtype: torch.dtype, device: torch.device, *, activation: str
    ) -> None:
        self.spec = spec
        self.router = Linear(spec.count, hidden, spec.has_bias, torch.float32 if spec.wide_router else dtype, device)
        width = spec.latent or hidden
        self.gate_ups = [
            first_layer(spec.inner, width, dtype, device, activation, bias=spec.has_bias, clamp=spec.clamp)
            for _ in range(spec.count)
        ]
        self.downs = [Linear(width, spec.inner, spec.has_bias, dtype, device) for _ in range(spec.count)]
        self.latents: tuple[Linear, Linear] | None = None  # from the hidden state to latents, and back
        if spec.latent:
            self.latents = Linear(width, hidden, False, dtype, device), Linear(hidden, width, False, dtype, device)
        self.correction = None  # of the weights by which experts are chosen
        if spec.has_correction:
            self.correction = torch.empty(spec.count, dtype=torch.float32, device=device)
        # What the weights of a token's experts are multiplied by in the end
        self.scales = torch.empty(spec.count, dtype=dtype, device=device) if spec.is_beside else None
        self._kernels: Kernels | None = None
        self.hidden, self.dtype = hidden, dtype
        self._mixture: Mixture | None = None
        self._is_described = False
        self._matmuls: ctypes.Array[Multiplied] | None = None  # to which it points
        self.shared: tuple[Gated | Squared, Linear] | None = None
        if spec.shared:
            gate_up = first_layer(spec.shared, hidden, dtype, device, activation)
            self.shared = gate_up, Linear(hidden, spec.shared, False, dtype, device)
        self.shared_gate = Linear(1, hidden, False, dtype, device) if spec.shared_gate else None
        for down in (*self.downs, *(self.shared or ())[1:]):
            down.scale = spec.scale

    def __call__(self, x: Tensor, residual: Tensor, routed: Tensor | None = None) -> Tensor:
        """Return [tokens, hidden] for x: [tokens, hidden]; `routed`: what the router sees in place of x."""
        mixture = self.mixture() if routed is None else None
        if mixture is not None:
            return self._mixed(mixture, x, residual)
        return self.weighted(x, residual, *self.route(x if routed is None else routed))

    def weighted(self, x: Tensor, residual: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Return the same with these weights of each token's experts, and their numbers; see `route`."""
        total = residual.to(weights.dtype)
        if self.shared is not None:
            gate_up, down = self.shared
            total = total + self.gated(down(gate_up(x)), x)
        if self.latents is None:
            return self._added(total, x, weights, chosen).to(x.dtype)
        into, back = self.latents
        inner = into(x)
        found = self._added(torch.zeros_like(inner, dtype=weights.dtype), inner, weights, chosen)
        return (total + back(found.to(x.dtype))).to(x.dtype)

    def _added(self, total: Tensor, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Return total + the sum of weight * expert(x) over a token's experts: [tokens, hidden or latent]."""
        active = self.spec.active
        order = chosen.flatten().argsort(stable=True)  # the places of each expert's tokens
        results = x.new_empty(len(order), x.shape[1])
        start = 0
        for expert, count in enumerate(torch.bincount(chosen.flatten(), minlength=self.spec.count).tolist()):
            if count:
                places = order[start : start + count]
                results[places] = self.downs[expert](self.gate_ups[expert](x[places // active]))
                start += count
        for result, weight in zip(results.view(len(x), active, -1).unbind(1), weights.unbind(1), strict=True):
            total = total + result * weight.unsqueeze(1)
        return total

    def gated(self, shared: Tensor, x: Tensor) -> Tensor:
        """Return the output of the MLP of all tokens, times the sigmoid of its gate if it has one."""
        return (
            shared
            if self.shared_gate is None
            else shared * sigmoid(self.shared_gate(x), self._kernels).to(shared.dtype)
        )

    def _mixed(self, mixture: Mixture, x: Tensor, residual: Tensor) -> Tensor:
        """Return the result of our CPU kernel."""
        assert self._kernels is not None
        x, total = x.contiguous(), residual.clone(memory_format=torch.contiguous_format)
        is_ours = x.dtype == total.dtype == self.dtype and x.dim() == 2 and x.shape[1] == self.hidden
        if not is_ours or x.shape != total.shape:
            raise ValueError(f"experts of {tuple(x.shape)} of {x.dtype} for {tuple(total.shape)} of {total.dtype}")
        pointers = ctypes.addressof(mixture), x.data_ptr(), total.data_ptr()
        if self._kernels.experts[x.dtype](*pointers, *x.shape, torch.get_num_threads()):
            raise MemoryError("no memory for the experts' results")
        return total

    def mixture(self) -> Mixture | None:
        """Return the experts for our CPU kernels, valid while this object exists, or None: a part has no kernel. All
        weights must have been packed."""
        if not self._is_described:
            self._mixture, self._is_described = self._described(), True
        return self._mixture

    def _described(self) -> Mixture | None:
        spec, routing = self.spec, self.spec.routing
        if self._kernels is None or self.scales is not None or self.latents is not None:
            return None
        gates = [] if self.shared_gate is None else [self.shared_gate]
        linears = [self.router, *gates, *(self.shared or ()), *self.gate_ups, *self.downs]
        found = [matmul for linear in linears if (matmul := linear.multiplied()) is not None]
        if len(found) < len(linears):
            return None
        router, *rest = found
        gate = rest.pop(0) if gates else Multiplied()
        shared = [rest.pop(0), rest.pop(0)] if self.shared is not None else [Multiplied(), Multiplied()]
        self._matmuls = (Multiplied * len(rest))(*rest)
        address = ctypes.addressof(self._matmuls)
        correction = None if self.correction is None else self.correction.data_ptr()
        return Mixture(
            address,
            address + spec.count * ctypes.sizeof(Multiplied),
            router,
            *shared,
            gate,
            correction,
            spec.count,
            spec.active,
            routing.groups,
            routing.kept,
            spec.inner,
            spec.shared,
            routing.has_sigmoids,
            spec.is_normalized,
            spec.wide_router,
            routing.scale,
            spec.epsilon,
        )

    def logits(self, x: Tensor) -> Tensor:
        """Return the router's logits: [tokens, experts]."""
        return self.router(x.float() if self.spec.wide_router else x)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights of each token's experts, largest first, and their numbers: [tokens, active]."""
        routing, logits = self.spec.routing, self.logits(x)
        wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
        scores = sigmoid(logits.to(wide), self._kernels) if routing.has_sigmoids else logits.softmax(-1, dtype=wide)
        ranked = scores if self.correction is None else scores + self.correction
        if routing.groups > 1:
            ranked = _of_best_groups(ranked, routing)
        chosen = ranked.topk(self.spec.active, -1).indices
        weights = scores.gather(1, chosen)
        if self.spec.is_normalized:
            weights = weights / (weights.sum(-1, keepdim=True) + self.spec.epsilon)
        if self.scales is not None:
            weights = weights * self.scales[chosen].to(weights.dtype)
        return weights * routing.scale, chosen

    def parts(self, prefix: str) -> list[tuple[str, Linear, int, int]]:
        """Return checkpoint names and places of the weights, as Layer.parts."""
        found = [(prefix + self.spec.names[0], self.router, 0, self.spec.count)]
        for expert, (gate_up, last) in enumerate(zip(self.gate_ups, self.downs, strict=True)):
            gates, down = self.spec.linears(expert)
            rows = len(gate_up.weight) // len(gates)
            found += [(prefix + name, gate_up, rows * i, rows * (i + 1)) for i, name in enumerate(gates)]
            found.append((prefix + down, last, 0, len(last.weight)))
        if self.shared is not None:
            (gate_up, last), (gates, down) = self.shared, self.spec.shared_linears
            rows = len(gate_up.weight) // len(gates)
            found += [(prefix + name, gate_up, rows * i, rows * (i + 1)) for i, name in enumerate(gates)]
            found.append((prefix + down, last, 0, len(last.weight)))
        if self.shared_gate is not None:
            found.append((prefix + self.spec.shared_gate, self.shared_gate, 0, 1))
        for name, linear in zip(self.spec.latent_names, self.latents or (), strict=False):
            found.append((prefix + name, linear, 0, len(linear.weight)))
        return found

    def targets(self, prefix: str) -> dict[str, Tensor]:
        """Return checkpoint name -> the tensor to read it into; not those of the linear layers."""
        if self.correction is None:
            return {}
        return {f"{prefix}{self.spec.names[0]}.e_score_correction_bias": self.correction}

    def pack(
        self,
        kernels: Kernels | None,
        bits: LayerBits | None,
        importance: Tensor | None,
        in_file: Mapping[Linear, InFile],
    ) -> None:
        """Pack the weights, see Layer.pack. The router and the gate are small, and decide much: they are not quantized.

        `importance`: of the columns of the experts' first weights, see Quantized.
        """
        self._kernels = kernels
        for linear in (self.router, *([] if self.shared_gate is None else [self.shared_gate])):
            linear.pack(kernels, wide=True, in_file=in_file.get(linear))
        shared = [] if self.shared is None else [self.shared]
        pairs = [*zip(self.gate_ups, self.downs, strict=True), *shared]
        up = None if bits is None else partial(Quantization, bits.others, grouped=bits.grouped)
        for linear in self.latents or ():
            linear.pack(kernels, quantization=None if up is None else up(), in_file=in_file.get(linear))
        inner: list[Tensor | None] = [None] * len(pairs)  # the importance of the columns of each `down`
        for index, (gate_up, _) in enumerate(pairs):
            columns = None if self.latents is not None and index < self.spec.count else importance
            if bits is not None and bits.down < 8:
                inner[index] = gate_up.importance_after(columns, in_file.get(gate_up))
            gate_up.pack(kernels, quantization=None if up is None else up(columns), in_file=in_file.get(gate_up))
        for (_, last), columns in zip(pairs, inner, strict=True):
            down = None if bits is None else Quantization(bits.down, columns, grouped=bits.grouped)
            last.pack(kernels, quantization=down, in_file=in_file.get(last))


def _of_best_groups(ranked: Tensor, routing: Routing) -> Tensor:
    """Return the ranks of each token's experts, those outside of the best groups replaced: [tokens, experts]."""
    groups = ranked.unflatten(-1, (routing.groups, -1))
    sums = groups.topk(2 if routing.has_sigmoids else 1, -1).values.sum(-1)
    kept = sums.topk(routing.kept, -1).indices
    outside = torch.ones(groups.shape[:2], dtype=torch.bool, device=ranked.device).scatter_(1, kept, False)
    return groups.masked_fill(outside.unsqueeze(-1), -torch.inf).flatten(1)


class Beside:
    """norm(MLP's output) + norm(experts of norm(x)): what experts that are beside an MLP need.

    The router sees x, divided by its root mean square times the square root of its size, times a weight.
    """

    def __init__(self, hidden: int, experts: Experts, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        self.experts = experts
        kind = NormKind(is_wide=True)
        self.of_mlp, self.before, self.after, self.of_router = (
            make_norm(hidden, eps, dtype, device, kind) for _ in range(4)
        )
        experts.router.scale = hidden**-0.5

    def __call__(self, mlp: Tensor, x: Tensor) -> Tensor:
        """Return [tokens, hidden] for the MLP's output, and for x before the norm of the MLP: both [tokens, hidden]."""
        found = self.experts(self.before(x), torch.zeros_like(x), self.of_router(x))
        return self.of_mlp(mlp) + self.after(found)

    def targets(self, prefix: str) -> dict[str, Tensor]:
        """Return checkpoint name -> the tensor to read it into; not those of the linear layers."""
        assert self.experts.scales is not None
        return {
            f"{prefix}post_feedforward_layernorm_1.weight": self.of_mlp.weight,
            f"{prefix}pre_feedforward_layernorm_2.weight": self.before.weight,
            f"{prefix}post_feedforward_layernorm_2.weight": self.after.weight,
            f"{prefix}router.scale": self.of_router.weight,
            f"{prefix}router.per_expert_scale": self.experts.scales,
        }

    def pack(self, kernels: Kernels | None) -> None:
        """Use our CPU kernels for the norms, after they have been read."""
        for norm in (self.of_mlp, self.before, self.after, self.of_router):
            norm.pack(kernels)
