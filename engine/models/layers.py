"""The linear layers of decoders, as plain objects with weights."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from ..kernels.blocks import in_blocks, in_one_format, in_one_order
from ..kernels.library import Kernels
from ..kernels.matmul import (
    BlockRows,
    Converted,
    Joined,
    Packed,
    Packing,
    Parts,
    Quantized,
    Sources,
    Stored,
    unquantized,
)
from ..kernels.structures import Gate, Multiplied
from .gpu.coded import CodedRows, load
from .gpu.skinny import UNIFORM_FLOAT32, Alike, AnyTile, AsStored, Uniform, Uniforms, Way, multiply, tile_of
from .gpu.weights import GPUProduct, GPUWeight
from .importance import after_gate
from .norms import RMSNorm
from .rounding import rounded

# Rows for which torch reorders a weight: those of a decode step, where the order matters most.
PACK_ROWS = 16

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


# The number of each activation in our kernels.
GATES = {"silu": 0, "swish": 0, "gelu_pytorch_tanh": 1, "gelu": 3, "relu": 4}
CLAMPED = 2  # of gates with a Clamp


class Clamp(NamedTuple):
    """Gates of gpt-oss: gate * sigmoid(alpha * gate) * (up + 1), with a gate of at most `limit` and up within it."""

    limit: float
    alpha: float

    def apply(self, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(self.alpha * gate) * (up + 1)


class InFile(NamedTuple):
    """A weight that is still in files, in parts, and the Packing that will read and pack it. None: it is for a GPU."""

    parts: Sources | Sequence[CodedRows]
    packing: Packing | None
    activation_bytes: int = 1  # in matmuls with weights in GGUF blocks

    @property
    def converted(self) -> int:
        """The size of the parts that are converted when they are packed, in bytes in files."""
        return sum(part.num_bytes for part in self.parts if isinstance(part, Converted | CodedRows))


class Source(NamedTuple):
    """An InFile whose parts can be packed."""

    parts: Parts
    packing: Packing | None
    activation_bytes: int

    @property
    def blocks(self) -> list[BlockRows]:
        return [part for part in self.parts if isinstance(part, BlockRows)]


def _converted(weight: InFile) -> Source:
    found = cast(Sources, weight.parts)
    parts = [part.convert() if isinstance(part, Converted) else part for part in found]
    return Source(parts, weight.packing, weight.activation_bytes)


class Quantization(NamedTuple):
    """How a weight is quantized."""

    bits: int
    importance: Tensor | None = None  # of its columns, see Quantized
    rows_in_8: int = 0  # its last rows, which have 8 bits
    grouped: bool = False  # on a CPU: groups have scales of their own in 8 bits, too


def _divided(parts: Parts, rows: int) -> tuple[Parts, Parts]:
    """Return the parts of the first `rows` rows of a weight, and those of the others."""
    first, last = [], list(parts)
    while rows and rows >= last[0].shape[0]:
        first.append(last.pop(0))
        rows -= first[-1].shape[0]
    if rows:  # queries, keys and values are one tensor
        part = last.pop(0)
        assert isinstance(part, Stored)
        size = rows * part.shape[1] * part.dtype.itemsize
        first.append(part._replace(shape=(rows, part.shape[1])))
        last.insert(0, part._replace(offset=part.offset + size, shape=(part.shape[0] - rows, part.shape[1])))
    return first, last


class Linear:
    """(x @ weight.T + bias) * scale. `pack` may replace the weight by a form that is smaller, or with which a CPU is
    faster."""

    scale = 1.0
    gate: Gate | None = None  # of a weight that holds gate and up, or of a Squared
    row_scale = 1.0  # of the weight's rows that `rows` returns

    def __init__(self, rows: int, columns: int, bias: bool, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = torch.empty(rows, columns, dtype=dtype, device=device)
        self._device = device
        self.bias = torch.empty(rows, dtype=dtype, device=device) if bias else None
        self._packed: Packed | GPUProduct | None = None  # ours
        self._reordered: Tensor | None = None  # torch's
        self._is_wide = False  # results in float32, on a GPU
        self._uniform: Uniform | None = None
        self.uniforms: Uniforms | None = None  # of `unify`
        self._few: Mapping[int, AnyTile | None] = {}  # by the largest number of rows, ascending

    def defer(self) -> None:
        """Free the memory of the weight until `allocate`."""
        self.weight = torch.empty_like(self.weight, device="meta")

    def allocate(self) -> None:
        """Allocate the weight, if it was deferred."""
        if self.weight.is_meta:
            self.weight = torch.empty_like(self.weight, device=self._device)

    def pack(
        self,
        kernels: Kernels | None,
        *,
        wide: bool = False,
        looked_up: bool = False,
        quantization: Quantization | None = None,
        in_file: InFile | None = None,
    ) -> None:
        """Pack the weight for the CPU, or quantize it for a GPU, if possible; the plain weight is then freed.

        `wide`: return results in float32, in our kernels and on a GPU. `quantization`: quantize the weight; None: do
        not. `in_file`: the weight, if it has not been read; for a CPU the layer is ready when its Packing has run.
        Without CPU kernels both are for a GPU. For torch: `looked_up`: `rows` will be called, which needs the plain
        weight.
        """
        self._is_wide = wide and self.weight.is_cuda and self.weight.dtype in (torch.float16, torch.bfloat16)
        if kernels is not None:
            self._pack(kernels, quantization, None if in_file is None else _converted(in_file), wide=wide)
        elif in_file is not None:
            self._use(load(cast(Sequence[CodedRows], in_file.parts), self._device), wide=wide)
        elif quantization is not None:
            self._use(self._rounded(quantization), wide=wide)
        elif can_reorder(self.weight) and not looked_up:
            self._reordered = torch.ops.mkldnn._reorder_linear_weight(self.weight, PACK_ROWS)
            self.weight = self.weight.new_empty(0)

    def _pack(
        self,
        kernels: Kernels,
        quantization: Quantization | None,
        source: Source | None,
        *,
        wide: bool,
        gated: bool = False,
    ) -> None:
        weight, packing, activation_bytes = source or (self.weight, None, 1)
        if source and (blocks := source.blocks):
            self._packed = in_blocks(
                kernels,
                blocks,
                self.bias,
                wide=wide,
                gated=gated,
                activation_bytes=activation_bytes,
                packing=packing,
            )
        elif quantization is None:
            self._packed = unquantized(kernels, weight, self.bias, wide=wide, gated=gated, packing=packing)
        elif quantization.rows_in_8:
            assert not wide and not gated
            self._packed = self._in_two(kernels, weight, quantization, packing)
        else:
            self._packed = Quantized(
                kernels,
                weight,
                self.bias,
                bits=quantization.bits,
                grouped=quantization.grouped,
                importance=quantization.importance,
                wide=wide,
                gated=gated,
                packing=packing,
            )
        self._packed.finish_with(scale=self.scale, gate=self.gate)
        self.weight = self.weight.new_empty(0)

    def _use(self, parts: Sequence[GPUWeight], *, wide: bool) -> None:
        """Use a quantized weight on a GPU in place of the plain one."""
        self._packed = GPUProduct(parts, self.bias, self.weight.dtype, wide=wide)
        self.weight = torch.empty(0, dtype=self.weight.dtype, device=self._device)

    def _rounded(self, quantization: Quantization) -> list[GPUWeight]:
        """Return the quantized weight for a GPU."""
        rows_in_8 = quantization.rows_in_8
        most, last = self.weight.split([len(self.weight) - rows_in_8, rows_in_8])
        parts = [rounded(most, quantization.bits, quantization.importance)]
        if rows_in_8:
            parts.append(rounded(last, 8))
        return parts

    def _in_two(
        self, kernels: Kernels, weight: Tensor | Parts, quantization: Quantization, packing: Packing | None
    ) -> Joined:
        """Return the weight with its last rows in 8 bits."""
        stride = len(weight) if isinstance(weight, Tensor) else sum(part.shape[0] for part in weight)
        rows = stride - quantization.rows_in_8
        most, last = (weight[:rows], weight[rows:]) if isinstance(weight, Tensor) else _divided(weight, rows)
        biases = (None, None) if self.bias is None else (self.bias[:rows], self.bias[rows:])
        bits, columns, grouped = quantization.bits, quantization.importance, quantization.grouped
        return Joined(
            kernels,
            [
                Quantized(kernels, most, biases[0], bits=bits, importance=columns, stride=stride, packing=packing),
                Quantized(kernels, last, biases[1], bits=8, grouped=grouped, stride=stride, packing=packing),
            ],
        )

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return [rows, weight's rows] for x: [rows, columns]; `residual`, of the same shape, is added at the end."""
        if self._packed is not None:
            if isinstance(self._packed, Packed) or self.scale == 1:
                return self._packed(x, residual)
            out = self._packed(x)
        elif self._reordered is not None:
            out = torch.ops.mkldnn._linear_pointwise(x, self._reordered, self.bias, "none", [], "")
        elif (tile := self.tile(x.shape[0])) is not None:
            out = multiply(x, self.weight, tile, bias=self.bias, dtype=torch.float32 if self._is_wide else None)
        elif self._is_wide and self.bias is None:
            out = torch.mm(x, self.weight.t(), out_dtype=torch.float32)
        else:
            out = F.linear(x, self.weight, self.bias)
        if self.scale != 1:
            out = out * self.scale
        return out if residual is None else residual + out

    def unify(self, uniforms: Uniforms, dtype: torch.dtype) -> None:
        """Let our kernels compute all products on a GPU, with one order of sums for any number of rows.

        `dtype`: the model's, for which the tiles are. A router may be in float32 beside it.
        """
        self.uniforms = uniforms
        if self.quantized is not None:
            self.quantized.unify()
        else:
            rows, columns = self.weight.shape
            own = uniforms if self.weight.dtype == dtype else UNIFORM_FLOAT32[0]
            self._uniform = own.of(rows, columns, is_gated=isinstance(self, Gated))

    def use_for_few(self, tiles: Mapping[int, AnyTile | None]) -> None:
        """Let our kernel compute products on a GPU with few rows: by their largest number, ascending; None: torch."""
        self._few = tiles

    def tile(self, rows: int) -> AnyTile | None:
        """Return the tile with which our kernel computes products of this many rows; None: torch computes them."""
        tiles = self._few if self._uniform is None else self._uniform
        return tile_of(tiles, rows) if tiles else None

    @property
    def quantized(self) -> GPUProduct | None:
        """The product on a GPU, if the weight is quantized."""
        return self._packed if isinstance(self._packed, GPUProduct) else None

    @property
    def is_plain(self) -> bool:
        """Whether the weight is neither packed nor quantized."""
        return self._packed is None and self._reordered is None

    def few(
        self,
        x: Tensor,
        way: Way,
        *,
        residual: Tensor | None = None,
        activation: str = "",
        norm: RMSNorm | None = None,
    ) -> Tensor:
        """Return the layer by our kernels on a GPU, see skinny.multiply; it must be plain, or for AsStored
        quantized."""
        if isinstance(way, AsStored):
            assert self.quantized is not None
            return self.quantized.fused(x, residual=residual, activation=activation, norm=norm)
        assert self.is_plain and (residual is not None or self.scale == 1)
        if isinstance(way, Alike):
            assert self._uniform is not None
            alike = tile_of(self._uniform, len(x))
            assert alike is not None
            way = alike
        return multiply(
            x, self.weight, way,
            bias=self.bias, residual=residual, activation=activation, norm=norm, scale=self.scale,
        )  # fmt: skip

    @property
    def saved_bytes(self) -> int:
        """How much memory compression of the weight saves."""
        return self._packed.saved_bytes if isinstance(self._packed, Packed) else 0

    def multiplied(self) -> Multiplied | None:
        """Return the matmul for kernels that call it; None if the kernels do not compute the whole layer."""
        return self._packed.multiplied() if isinstance(self._packed, Packed) else None

    def rows(self, ids: Tensor) -> Tensor:
        """Return the weight's rows with these indices, [n] int64, times `row_scale`."""
        found = F.embedding(ids, self.weight) if self._packed is None else self._packed.lookup(ids)
        return found if self.row_scale == 1 else found * self.row_scale


class Gated(Linear):
    """activation(x @ gate.T) * (x @ up.T); one weight holds gate and up, with `inner` rows each."""

    def __init__(
        self,
        inner: int,
        columns: int,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        *,
        activation: str,
        clamp: Clamp | None = None,  # in place of the activation
    ) -> None:
        super().__init__(2 * inner, columns, bias, dtype, device)
        self._activation, self._clamp = ACTIVATIONS[activation], clamp
        self.gate = Gate(GATES[activation]) if clamp is None else Gate(CLAMPED, *clamp)
        self._kernels: Kernels | None = None
        self._fused = False

    def importance_after(self, columns: Tensor | None, in_file: InFile | None) -> Tensor | None:
        """Return the importance of the columns of the next weight, before this one is packed; None: they matter alike.

        `columns`: that of this weight's columns. `in_file`: see `pack`.
        """
        if self._clamp is not None:
            return None
        return after_gate(plain_parts(self.weight, in_file), columns)

    def _pack(
        self,
        kernels: Kernels,
        quantization: Quantization | None,
        source: Source | None,
        *,
        wide: bool,
        gated: bool = False,
    ) -> None:
        blocks = [] if source is None else source.blocks
        self._fused = gated or not blocks or (in_one_format(blocks) and in_one_order(blocks))
        self._kernels = kernels
        super()._pack(kernels, quantization, source, wide=wide, gated=self._fused)

    def multiplied(self) -> Multiplied | None:
        return super().multiplied() if self._fused else None

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        if self._fused:
            return super().__call__(x, residual)
        out = self._gated(self.product(x))
        return out if residual is None else residual + out

    def _gated(self, both: Tensor) -> Tensor:
        """Return activation(gate) * up, [rows, inner], for both: [rows, 2 * inner]."""
        if self._clamp is not None and self._kernels is None:
            return self._clamp.apply(*both.chunk(2, dim=-1))
        assert self.gate is not None
        return gated(both, self._activation, self.gate, self._kernels)

    def product(self, x: Tensor) -> Tensor:
        """Return gate and up before the activation, [rows, 2 * inner]; not for weights that are packed as gated."""
        assert not self._fused
        return super().__call__(x)


def plain_parts(weight: Tensor, in_file: InFile | None) -> list[Tensor | Stored]:
    """Return a weight that is to be rounded, or its parts in files."""
    if in_file is None:
        return [weight]
    parts: list[Tensor | Stored] = [part for part in in_file.parts if isinstance(part, Stored)]
    assert len(parts) == len(in_file.parts), "weights in blocks or codes are not rounded again"
    return parts


def gated(both: Tensor, activation: Callable[[Tensor], Tensor], gate: Gate, kernels: Kernels | None) -> Tensor:
    """Return activation(first half) * second half of the columns of `both`; `gate`: the same, for the kernels."""
    if kernels is not None:  # torch's activations depend on a number's position in the tensor
        out = both.new_empty(len(both), both.shape[1] // 2)
        pointers = ctypes.addressof(gate), both.data_ptr(), out.data_ptr()
        kernels.gates[both.dtype](*pointers, *out.shape, torch.get_num_threads())
        return out
    first, second = both.chunk(2, dim=-1)
    return activation(first) * second


def softcap(x: Tensor, cap: float, kernels: Kernels | None) -> Tensor:
    """Return cap * tanh(x / cap) in float32, or in float64 if x is; x may be overwritten.

    torch computes the last elements of a tensor in another way than those before, so the results of a row depend on
    the number of rows.
    """
    x = x if x.dtype == torch.float64 else x.float()
    if kernels is None or x.dtype != torch.float32:
        return x.div_(cap).tanh_().mul_(cap)  # in place: with prompts that are scored there are many logits
    assert x.is_contiguous()
    kernels.softcap(x.data_ptr(), x.numel(), cap, torch.get_num_threads())
    return x


def can_reorder(weight: Tensor) -> bool:
    """Return whether oneDNN can multiply by the weight in a form that is not reordered on every call."""
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
