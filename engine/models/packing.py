"""Packs the plain linear layers of a transformers model, so that the CPU kernels compute their matmuls.

torch still computes the others: subclasses of nn.Linear, layers with hooks, experts in stacked tensors, and a head that
is tied to an embedding which does more than look up rows.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..kernels.library import Kernels
from ..kernels.matmul import Packed, unquantized


class PackedLinear(nn.Module):
    """Replaces an nn.Linear: returns [..., outputs] for x: [..., columns]."""

    def __init__(self, packed: Packed) -> None:
        super().__init__()
        self._packed = packed

    def forward(self, x: Tensor) -> Tensor:
        return self._packed(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], self._packed.outputs)


class PackedEmbedding(nn.Module):
    """Replaces an nn.Embedding that is tied to a packed head: returns [..., columns] for ids: [...]."""

    def __init__(self, packed: Packed) -> None:
        super().__init__()
        self._packed = packed

    def forward(self, ids: Tensor) -> Tensor:
        return self._packed.lookup(ids.reshape(-1)).view(*ids.shape, self._packed.columns)


@dataclass(frozen=True, slots=True)
class Swap:
    """A packed linear layer, the embeddings tied to it, and their parents in the model."""

    packed: Packed
    linear: nn.Module
    parents: dict[nn.Module, list[tuple[nn.Module, str]]]  # module -> its parents, and its name in each

    @property
    def num_bytes(self) -> int:
        """The size of the plain weight."""
        return self.packed.outputs * self.packed.columns * self.packed.dtype.itemsize


def pack(model: Any, kernels: Kernels) -> list[Swap]:
    """Replace a model's plain linear layers with packed ones; returns what `unpack` needs to undo it.

    Layers are packed one by one, and each plain weight is freed at once. The model must be on the CPU.
    """
    head = model.get_output_embeddings()
    parents: dict[nn.Module, list[tuple[nn.Module, str]]] = defaultdict(list)
    holders: dict[int, list[nn.Module]] = defaultdict(list)  # by the id of a parameter
    for parent in model.modules():
        for name, child in parent._modules.items():
            if child is not None:
                parents[child].append((parent, name))
        for parameter in parent._parameters.values():
            if parameter is not None:
                holders[id(parameter)].append(parent)
    swaps = []
    for linear in [module for module in parents if _is_plain(module, kernels)]:
        weight: Tensor = linear.weight  # type: ignore[assignment]
        tied = [module for module in holders[id(weight)] if module is not linear]
        if not all(_only_looks_up(module) for module in tied):
            continue
        rows = weight.detach() if isinstance(linear, nn.Linear) else weight.detach().T
        # Logits must be float32.
        packed = unquantized(kernels, rows, linear.bias, wide=linear is head)  # type: ignore[arg-type]
        del weight, rows
        for old in (linear, *tied):
            old.weight = None  # type: ignore[assignment]
            new = PackedLinear(packed) if old is linear else PackedEmbedding(packed)
            for parent, name in parents[old]:
                parent._modules[name] = new
        swaps.append(Swap(packed, linear, {old: parents[old] for old in (linear, *tied)}))
    return swaps


def unpack(swaps: list[Swap]) -> None:
    """Restore the layers with identical weights, one by one, so that only one weight is in memory twice."""
    while swaps:
        swap = swaps.pop()
        rows = swap.packed.lookup(torch.arange(swap.packed.outputs))
        weight = nn.Parameter(rows if isinstance(swap.linear, nn.Linear) else rows.T.contiguous(), requires_grad=False)
        for old, parents in swap.parents.items():
            old.weight = weight
            for parent, name in parents:
                parent._modules[name] = old


def _is_plain(module: nn.Module, kernels: Kernels) -> bool:
    """Return whether a module only multiplies by a weight that the kernels support, and adds a bias."""
    if type(module) not in (nn.Linear, Conv1D) or _is_altered(module):
        return False
    weight: Any = module.weight
    return weight.dtype in kernels.multiply and weight.device.type == "cpu"


def _only_looks_up(module: nn.Module) -> bool:
    return type(module) is nn.Embedding and module.max_norm is None and not _is_altered(module)


def _is_altered(module: nn.Module) -> bool:
    """Return whether a module has hooks or another `forward`. Parametrized modules are excluded by their class."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))
