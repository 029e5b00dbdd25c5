"""A feed-forward layer of experts, of which a router selects a few for each token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.library import Kernels
from .layers import Clamp, Gated, InFile, Linear, Quantization
from .precision import LayerBits


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

    def linears(self, expert: int) -> tuple[tuple[str, ...], str]:
        """Return the names of an expert's gate and up, which may be one tensor, and of its down projection."""
        _, gate, up, down = (name.format(expert) for name in self.names)
        return (gate, up) if up else (gate,), down

    def num_params(self, hidden: int) -> int:
        """Return the number of a layer's weights beside those of the experts' matrices."""
        biases = 1 + 2 * self.inner + hidden if self.has_bias else 0
        return self.count * (hidden + biases)


class Experts:
    """residual + the sum of weight * expert(x) over a token's experts.

    The products are computed for all tokens of an expert at once. Each token's results are then added in the order of
    its weights, in float32, so they do not depend on the other tokens.
    """

    def __init__(
        self, hidden: int, spec: ExpertsSpec, dtype: torch.dtype, device: torch.device, *, activation: str
    ) -> None:
        self.spec = spec
        self.router = Linear(spec.count, hidden, spec.has_bias, dtype, device)
        self.gate_ups = [
            Gated(spec.inner, hidden, spec.has_bias, dtype, device, activation=activation, clamp=spec.clamp)
            for _ in range(spec.count)
        ]
        self.downs = [Linear(hidden, spec.inner, spec.has_bias, dtype, device) for _ in range(spec.count)]

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        """Return [tokens, hidden] for x: [tokens, hidden]."""
        weights, chosen = self.route(x)
        active = self.spec.active
        order = chosen.flatten().argsort(stable=True)  # the places of each expert's tokens
        results = x.new_empty(len(order), x.shape[1])
        start = 0
        for expert, count in enumerate(torch.bincount(chosen.flatten(), minlength=self.spec.count).tolist()):
            if count:
                places = order[start : start + count]
                results[places] = self.downs[expert](self.gate_ups[expert](x[places // active]))
                start += count
        total = residual.to(weights.dtype)
        for result, weight in zip(results.view(len(x), active, -1).unbind(1), weights.unbind(1), strict=True):
            total = total + result * weight.unsqueeze(1)
        return total.to(x.dtype)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights of each token's experts, largest first, and their numbers: [tokens, active]."""
        logits = self.router(x)
        wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
        weights, chosen = logits.softmax(-1, dtype=wide).topk(self.spec.active, -1)
        return weights / weights.sum(-1, keepdim=True) if self.spec.is_normalized else weights, chosen

    def parts(self, prefix: str) -> list[tuple[str, Linear, int, int]]:
        """Return checkpoint names and places of the weights, as Layer.parts."""
        found = [(prefix + self.spec.names[0], self.router, 0, self.spec.count)]
        for expert, (gate_up, last) in enumerate(zip(self.gate_ups, self.downs, strict=True)):
            gates, down = self.spec.linears(expert)
            rows = 2 * self.spec.inner // len(gates)
            found += [(prefix + name, gate_up, rows * i, rows * (i + 1)) for i, name in enumerate(gates)]
            found.append((prefix + down, last, 0, len(last.weight)))
        return found

    def pack(
        self,
        kernels: Kernels | None,
        bits: LayerBits | None,
        importance: Tensor | None,
        in_file: Mapping[Linear, InFile],
    ) -> None:
        """Pack the weights, see Layer.pack. The router is small, and decides much: it is not quantized.

        `importance`: of the columns of the experts' first weights, see Quantized.
        """
        self.router.pack(kernels, wide=True, in_file=in_file.get(self.router))
        up = down = None
        if bits is not None:
            up, down = Quantization(bits.others, importance), Quantization(bits.down)
        for linears, quantization in ((self.gate_ups, up), (self.downs, down)):
            for linear in linears:
                linear.pack(kernels, quantization=quantization, in_file=in_file.get(linear))
