"""Gated DeltaNet on the CPU by our own kernel, see engine/models/mixers/delta.py, whose function it replaces."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .library import DTYPES, Kernels
from .structures import Delta

if TYPE_CHECKING:
    from ..models.mixers.delta import DeltaLayer
    from ..models.mixers.states import LayerStates, MatrixShape, Segments

INVALID = 2  # returned for segments that do not fit the tokens or the states


class GatedDelta:
    """`gated_delta` for a layer whose weights have been read. For float32 and bfloat16."""

    def __init__(self, kernels: Kernels, layer: DeltaLayer) -> None:
        """Raises ValueError for sizes that no layer has, and for weights of other sizes or data types."""
        self._layer, (shape, eps, weights) = layer, layer
        dtype = self._dtype = weights.taps.dtype
        check_weights(shape, weights.taps, weights.a_log, weights.dt_bias)
        check("norm", weights.norm, dtype, (shape.value_dim,))
        self._compute = kernels.delta[dtype]
        # What is the same in all steps
        self._call = Delta(
            weights=weights.taps.data_ptr(),
            decay=weights.a_log.data_ptr(),
            bias=weights.dt_bias.data_ptr(),
            norm=weights.norm.data_ptr(),
            key_heads=shape.key_heads,
            value_heads=shape.value_heads,
            key_dim=shape.key_dim,
            value_dim=shape.value_dim,
            taps=shape.taps,
            eps=eps,
            is_tiled=shape.is_tiled,
        )

    def __call__(self, qkvz: Tensor, gates: Tensor, states: LayerStates, segments: Segments) -> Tensor:
        """Return what the layer reads for each token, see delta.gated_delta. The tokens of `qkvz` and `gates`, and the
        states, may be strided. Raises ValueError and MemoryError."""
        (shape, _, _), call, dtype, tokens = self._layer, self._call, self._dtype, len(qkvz)
        check("qkvz", qkvz, dtype, (tokens, shape.channels + shape.values), strided=True)
        check("gates", gates, dtype, (tokens, 2 * shape.value_heads), strided=True)
        set_step(call, shape, dtype, states, segments)
        call.tokens = tokens
        call.qkvz_stride, call.gates_stride = qkvz.stride(0), gates.stride(0)
        out = torch.empty(tokens, shape.values, dtype=dtype)
        pointers = qkvz.data_ptr(), gates.data_ptr(), out.data_ptr()
        raise_failure(self._compute(ctypes.addressof(call), *pointers, torch.get_num_threads()), call)
        return out


def check_weights(shape: MatrixShape, taps: Tensor, decay: Tensor, bias: Tensor) -> None:
    """Raise ValueError for sizes that no layer has, and for weights of other sizes or data types."""
    if taps.dtype not in DTYPES:
        raise ValueError(f"the kernel computes in {' and '.join(DTYPES.values())}, not in {taps.dtype}")
    sizes = shape.key_heads, shape.value_heads, shape.key_dim, shape.value_dim, shape.taps
    if min(sizes) < 1 or shape.value_heads % shape.key_heads:
        raise ValueError(f"{shape} has no valid sizes")
    check("taps", taps, taps.dtype, (shape.channels, 1, shape.taps))
    check("decay", decay, torch.float32, (shape.value_heads,))
    check("bias", bias, torch.float32, (shape.value_heads,))


def set_step(call: Delta, shape: MatrixShape, dtype: torch.dtype, states: LayerStates, segments: Segments) -> None:
    """Set what a step has beside its tokens: states, which may be strided, and segments. Raises ValueError."""
    count, rows, parts = len(states.windows), len(segments.row_start) - 1, len(segments.source)
    heads = shape.value_heads, shape.key_dim, shape.value_dim
    check("windows", states.windows, dtype, (count, shape.taps - 1, shape.channels), strided=True)
    check("matrices", states.matrices, torch.float32, (count, *heads), strided=True)
    check("row_start", segments.row_start, torch.int32, (rows + 1,))
    check("begin", segments.begin, torch.int32, (parts + 1,))
    check("source", segments.source, torch.int32, (parts,))
    check("target", segments.target, torch.int32, (parts,))
    call.row_start, call.begin = segments.row_start.data_ptr(), segments.begin.data_ptr()
    call.source, call.target = segments.source.data_ptr(), segments.target.data_ptr()
    call.windows, call.matrices = states.windows.data_ptr(), states.matrices.data_ptr()
    call.rows, call.segments, call.states = rows, parts, count
    call.window_stride, call.matrix_stride = states.windows.stride(0), states.matrices.stride(0)


def raise_failure(failed: int, call: Delta) -> None:
    """Raise ValueError or MemoryError if the kernel returned that it failed."""
    if failed == INVALID:
        raise ValueError(f"the segments do not fit {call.tokens} tokens and {call.states} states")
    if failed:
        raise MemoryError("no memory for the layer's matrices")


def check(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...], *, strided: bool = False) -> None:
    """Raise ValueError unless a tensor has this dtype and shape, is on the CPU, and is contiguous.

    strided: whether the first dimension need not be.
    """
    if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_cpu:
        given = f"{tuple(tensor.shape)} of {tensor.dtype} on {tensor.device}"
        raise ValueError(f"{name} is {given}, and not {shape} of {dtype} on the CPU")
    if not tensor.is_contiguous() and not (strided and tensor[0].is_contiguous()):
        raise ValueError(f"{name} is not contiguous")
