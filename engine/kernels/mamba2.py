"""Mamba2 on the CPU by our own kernel, see engine/models/mixers/mamba2.py, whose function it replaces."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .delta import check, check_weights, raise_failure, set_step
from .library import Kernels
from .structures import Delta

if TYPE_CHECKING:
    from ..models.mixers.mamba2 import Mamba2Layer
    from ..models.mixers.states import LayerStates, Segments


class Mamba2Kernel:
    """`mamba2` for a layer whose weights have been read. For float32 and bfloat16."""

    def __init__(self, kernels: Kernels, layer: Mamba2Layer) -> None:
        """Raises ValueError for sizes that no layer has, and for weights of other sizes or data types."""
        self._layer, (shape, eps, weights) = layer, layer
        dtype, bias = weights.taps.dtype, weights.conv_bias
        check_weights(shape, weights.taps, weights.a_log, weights.dt_bias)
        check("norm", weights.norm, dtype, (shape.values,))
        check("skip", weights.skip, torch.float32, (shape.value_heads,))
        if bias is not None:
            check("conv_bias", bias, dtype, (shape.channels,))
        self._dtype, self._compute = dtype, kernels.mamba2[dtype]
        # What is the same in all steps
        self._call = Delta(
            weights=weights.taps.data_ptr(),
            decay=weights.a_log.data_ptr(),
            bias=weights.dt_bias.data_ptr(),
            norm=weights.norm.data_ptr(),
            conv_bias=None if bias is None else bias.data_ptr(),
            skip=weights.skip.data_ptr(),
            key_heads=shape.key_heads,
            value_heads=shape.value_heads,
            key_dim=shape.key_dim,
            value_dim=shape.value_dim,
            taps=shape.taps,
            eps=eps,
            least=shape.limits[0],
            most=shape.limits[1],
        )

    def __call__(self, projected: Tensor, states: LayerStates, segments: Segments) -> Tensor:
        """Return what the layer reads for each token, see mamba2.mamba2. The tokens of `projected`, and the states, may
        be strided. Raises ValueError and MemoryError."""
        (shape, _, _), call, dtype, tokens = self._layer, self._call, self._dtype, len(projected)
        check("projected", projected, dtype, (tokens, shape.rows[0]), strided=True)
        set_step(call, shape, dtype, states, segments)
        call.tokens, call.qkvz_stride, call.gates_stride = tokens, projected.stride(0), projected.stride(0)
        out = torch.empty(tokens, shape.values, dtype=dtype)
        z, size = projected.data_ptr(), dtype.itemsize
        xbc = z + shape.values * size
        pointers = xbc, xbc + shape.channels * size, z, out.data_ptr()
        raise_failure(self._compute(ctypes.addressof(call), *pointers, torch.get_num_threads()), call)
        return out
