"""Norms of rows, by our CPU kernels, a kernel that an executor sets, or torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..kernels.library import Kernels
from .families.family import PLAIN, NormKind


class RMSNorm:
    """x / rms(x) * weight over the last dimension. The mean is computed in float32."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device, kind: NormKind = PLAIN) -> None:
        self.weight = torch.empty(size, dtype=dtype, device=device)
        self.eps, self.kind = eps, kind
        self._kernel: Callable[[Tensor], Tensor] | None = None
        self._gain: Tensor | None = None  # kept, once the weight has been read

    @property
    def gain(self) -> Tensor:
        """What x / rms(x) is multiplied by: the weight, or in float32 the weight plus the kind's offset."""
        return self._new_gain() if self._gain is None else self._gain

    def _new_gain(self) -> Tensor:
        if self.kind.offset == 0:
            return self.weight
        gain = self.weight.float()
        return gain if gain.is_meta else gain + self.kind.offset  # on META torch would add in Python

    def pack(self, kernels: Kernels | None) -> None:
        """Use our CPU kernel, see `use`. The weight must have been read."""
        self._gain = self.gain
        if kernels is not None:
            gain = self.gain.float() if self.kind.is_wide else self.weight
            self.use(partial(self._on_cpu, self._function(kernels), gain))

    def use(self, kernel: Callable[[Tensor], Tensor]) -> None:
        """Let a kernel compute the norm. It is called with contiguous x: [rows, size]."""
        self._kernel = kernel

    def __call__(self, x: Tensor) -> Tensor:
        if self._kernel is not None:
            return self._kernel(x.contiguous())
        normed = self._normalize(x.float())
        return (self.gain * normed).to(x.dtype) if self.kind.is_wide else self.weight * normed.to(x.dtype)

    def _normalize(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def _function(self, kernels: Kernels) -> Any:
        return (kernels.norm_wide if self.kind.is_wide else kernels.norm)[self.weight.dtype]

    def _on_cpu(self, norm: Any, gain: Tensor, x: Tensor) -> Tensor:
        if x.dtype != self.weight.dtype or x.dim() != 2 or x.shape[1] != len(gain):
            raise ValueError(f"not [rows, {len(gain)}] of {self.weight.dtype}: {tuple(x.shape)} of {x.dtype}")
        y = torch.empty_like(x)
        pointers = x.data_ptr(), gain.data_ptr(), y.data_ptr()
        norm(*pointers, *x.shape, self.eps, torch.get_num_threads())
        return y


class LayerNorm(RMSNorm):
    """(x - mean) / deviation * weight over the last dimension, computed in float32."""

    def _new_gain(self) -> Tensor:
        return self.weight.float()

    def _normalize(self, x: Tensor) -> Tensor:
        return super()._normalize(x - x.mean(-1, keepdim=True))

    def _function(self, kernels: Kernels) -> Any:
        return kernels.norm_centered[self.weight.dtype]


def make_norm(size: int, eps: float, dtype: torch.dtype, device: torch.device, kind: NormKind) -> RMSNorm:
    """Return a norm of this kind."""
    return (LayerNorm if kind.is_centered else RMSNorm)(size, eps, dtype, device, kind)
