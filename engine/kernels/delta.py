"""Gated DeltaNet on the CPU by our own kernel, see engine/models/delta.py, whose function it replaces."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .library import DTYPES, Kernels
from .structures import Delta

if TYPE_CHECKING:
    from ..models.delta import DeltaLayer
    from ..models.states import LayerStates, Segments

INVALID = 2  # returned for segments that do not fit the tokens or the states


class GatedDelta:
    """`gated_delta` for a layer whose weights have been read. For float32 and bfloat16."""

    def __init__(self, kernels: Kernels, layer: DeltaLayer) -> None:
        """Raises ValueError for sizes that no layer has, and for weights of other sizes or data types."""
        self._layer, (shape, eps, weights) = layer, layer
        dtype = self._dtype = weights.taps.dtype
        if dtype not in DTYPES:
            raise ValueError(f"the kernel computes in {' and '.join(DTYPES.values())}, not in {dtype}")
        sizes = shape.key_heads, shape.value_heads, shape.key_dim, shape.value_dim, shape.taps
        if min(sizes) < 1 or shape.value_heads % shape.key_heads:
            raise ValueError(f"{shape} has no valid sizes")
        _check("taps", weights.taps, dtype, (shape.channels, 1, shape.taps))
        _check("decay", weights.decay, torch.float32, (shape.value_heads,))
        _check("bias", weights.bias, torch.float32, (shape.value_heads,))
        _check("norm", weights.norm, dtype, (shape.value_dim,))
        self._compute = kernels.delta[dtype]
        # What is the same in all steps
        self._call = Delta(
            weights=weights.taps.data_ptr(),
            decay=weights.decay.data_ptr(),
            bias=weights.bias.data_ptr(),
            norm=weights.norm.data_ptr(),
            key_heads=shape.key_heads,
            value_heads=shape.value_heads,
            key_dim=shape.key_dim,
            value_dim=shape.value_dim,
            taps=shape.taps,
            eps=eps,
        )

    def __call__(self, qkvz: Tensor, gates: Tensor, states: LayerStates, segments: Segments) -> Tensor:
        """Return what the layer reads for each token, see delta.gated_delta. The tokens of `qkvz` and `gates`, and the
        states, may be strided. Raises ValueError and MemoryError."""
        (shape, _, _), call, dtype, tokens = self._layer, self._call, self._dtype, len(qkvz)
        count, rows, parts = len(states.windows), len(segments.row_start) - 1, len(segments.source)
        heads = shape.value_heads, shape.key_dim, shape.value_dim
        _check("qkvz", qkvz, dtype, (tokens, shape.channels + shape.values), strided=True)
        _check("gates", gates, dtype, (tokens, 2 * shape.value_heads), strided=True)
        _check("windows", states.windows, dtype, (count, shape.taps - 1, shape.channels), strided=True)
        _check("matrices", states.matrices, torch.float32, (count, *heads), strided=True)
        _check("row_start", segments.row_start, torch.int32, (rows + 1,))
        _check("begin", segments.begin, torch.int32, (parts + 1,))
        _check("source", segments.source, torch.int32, (parts,))
        _check("target", segments.target, torch.int32, (parts,))
        out = torch.empty(tokens, shape.values, dtype=dtype)
        call.row_start, call.begin = segments.row_start.data_ptr(), segments.begin.data_ptr()
        call.source, call.target = segments.source.data_ptr(), segments.target.data_ptr()
        call.windows, call.matrices = states.windows.data_ptr(), states.matrices.data_ptr()
        call.tokens, call.rows, call.segments, call.states = tokens, rows, parts, count
        call.window_stride, call.matrix_stride = states.windows.stride(0), states.matrices.stride(0)
        call.qkvz_stride, call.gates_stride = qkvz.stride(0), gates.stride(0)
        pointers = qkvz.data_ptr(), gates.data_ptr(), out.data_ptr()
        failed = self._compute(ctypes.addressof(call), *pointers, torch.get_num_threads())
        if failed == INVALID:
            raise ValueError(f"the segments do not fit {tokens} tokens and {count} states")
        if failed:
            raise MemoryError("no memory for the layer's matrices")
        return out


def _check(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...], *, strided: bool = False) -> None:
    """Raise ValueError unless a tensor has this dtype and shape, is on the CPU, and is contiguous.

    strided: whether the first dimension need not be.
    """
    if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_cpu:
        given = f"{tuple(tensor.shape)} of {tensor.dtype} on {tensor.device}"
        raise ValueError(f"{name} is {given}, and not {shape} of {dtype} on the CPU")
    if not tensor.is_contiguous() and not (strided and tensor[0].is_contiguous()):
        raise ValueError(f"{name} is not contiguous")
