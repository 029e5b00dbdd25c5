"""The parts that decoders are made of: plain objects that hold weights, with no framework around them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


class Linear:
    """x @ weight.T + bias. After `pack` the weight may be kept in the form in which the CPU multiplies fastest."""

    def __init__(self, rows: int, columns: int, bias: bool, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = torch.empty(rows, columns, dtype=dtype, device=device)
        self.bias = torch.empty(rows, dtype=dtype, device=device) if bias else None
        self._packed: Tensor | None = None

    def pack(self, rows: int) -> None:
        """Prepare for calls of about `rows` rows; the plain weight is given up where another form takes its place."""
        if can_pack(self.weight):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight, rows)
            self.weight = self.weight.new_empty(0)

    def __call__(self, x: Tensor) -> Tensor:
        if self._packed is None:
            return F.linear(x, self.weight, self.bias)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return out


def can_pack(weight: Tensor) -> bool:
    """Whether this build and CPU have oneDNN products for the weight that do not reorder it on every call."""
    if weight.is_cuda or not torch.backends.mkldnn.is_available():
        return False
    operators = torch.ops.mkldnn
    if not (hasattr(operators, "_reorder_linear_weight") and hasattr(operators, "_linear_pointwise")):
        return False
    if weight.dtype == torch.bfloat16:
        return bool(operators._is_mkldnn_bf16_supported())
    if weight.dtype == torch.float16:
        return bool(operators._is_mkldnn_fp16_supported())
    return False


class RMSNorm:
    """x / rms(x) * weight over the last dimension; the mean in float32 whatever x is."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = torch.empty(size, dtype=dtype, device=device)
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)
