"""The products of a model that transformers computes, in our kernels: its plain linear layers give up their weights.

What is not plain keeps torch's product: classes of a model's own, layers with hooks, experts in stacked tensors, a head
that is also an embedding which does more than look up rows.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..kernels.library import Kernels
from ..kernels.matmul import Packed


class PackedLinear(nn.Module):
    """Stands where an nn.Linear was: [..., outputs] of x: [..., columns]."""

    def __init__(self, packed: Packed) -> None:
        super().__init__()
        self._packed = packed

    def forward(self, x: Tensor) -> Tensor:
        return self._packed(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], self._packed.outputs)


class PackedEmbedding(nn.Module):
    """Stands where an nn.Embedding was whose weight is a packed head's: [..., columns] of ids: [...]."""

    def __init__(self, packed: Packed) -> None:
        super().__init__()
        self._packed = packed

    def forward(self, ids: Tensor) -> Tensor:
        return self._packed.lookup(ids.reshape(-1)).view(*ids.shape, self._packed.columns)


def pack(model: Any, kernels: Kernels) -> int:
    """Replace a model's linear layers whose whole work is our product; gives the bytes of their weights.

    They are packed one by one, and each plain weight is freed at once. The model is on the CPU.
    """
    head = model.get_output_embeddings()
    places: dict[nn.Module, list[tuple[nn.Module, str]]] = defaultdict(list)
    holders: dict[int, list[nn.Module]] = defaultdict(list)  # by the id of a parameter
    for parent in model.modules():
        for name, child in parent._modules.items():
            if child is not None:
                places[child].append((parent, name))
        for parameter in parent._parameters.values():
            if parameter is not None:
                holders[id(parameter)].append(parent)
    total = 0
    for linear in [module for module in places if _is_plain(module, kernels)]:
        weight: Tensor = linear.weight  # type: ignore[assignment]
        tied = [module for module in holders[id(weight)] if module is not linear]
        if not all(_only_looks_up(module) for module in tied):
            continue
        total += weight.numel() * weight.itemsize
        rows = weight.detach() if isinstance(linear, nn.Linear) else weight.detach().T
        # Logits are wanted in float32.
        packed = Packed(kernels, rows, linear.bias, wide=linear is head)  # type: ignore[arg-type]
        del weight, rows
        for old in (linear, *tied):
            old.weight = None  # type: ignore[assignment]
            new = PackedLinear(packed) if old is linear else PackedEmbedding(packed)
            for parent, name in places[old]:
                parent._modules[name] = new
    return total


def _is_plain(module: nn.Module, kernels: Kernels) -> bool:
    """Whether a module does nothing but multiply by a weight that our kernels take, and add a bias."""
    if type(module) not in (nn.Linear, Conv1D) or _is_altered(module):
        return False
    weight: Any = module.weight
    return weight.dtype in kernels.multiply and weight.device.type == "cpu"


def _only_looks_up(module: nn.Module) -> bool:
    return type(module) is nn.Embedding and module.max_norm is None and not _is_altered(module)


def _is_altered(module: nn.Module) -> bool:
    """Whether something was hung on a module; parametrizations give it another class besides."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))
