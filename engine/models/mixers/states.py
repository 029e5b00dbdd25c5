"""States: what layers without attention keep of each sequence, in place of keys and values.

Such a layer has one state of a fixed size for each sequence, which every token changes. The states of a layer are rows
of two tensors. A sequence that runs has one of them; the others are snapshots, from which later sequences with the same
beginning start (snapshots.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class MatrixShape:
    """The sizes of a layer whose states are windows and a matrix for each head of values."""

    key_heads: int  # of queries, too
    value_heads: int  # a multiple of key_heads: as many share a head of queries and keys
    key_dim: int
    value_dim: int
    taps: int  # tokens that the convolution sees: the last one, and those before it

    @property
    def keys(self) -> int:
        """The numbers of a token's keys, and of its queries."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """The numbers that are convolved: a token's queries, keys and values."""
        return 2 * self.keys + self.values

    @property
    def seen(self) -> int:
        """The numbers of a token that the output projection multiplies."""
        return self.values

    @property
    def matrices(self) -> tuple[int, int, int]:
        """The sizes of a state's matrices."""
        return self.value_heads, self.key_dim, self.value_dim

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Return the size of a state in a model of this dtype."""
        window = (self.taps - 1) * self.channels * dtype.itemsize
        return window + self.values * self.key_dim * wide(dtype).itemsize


@dataclass(frozen=True, slots=True)
class LinearShape(MatrixShape):
    """The sizes of a layer of linear attention, see delta.py."""

    # Whether value head j shares key head j % key_heads, as in GGUF files; else consecutive value heads share one.
    is_tiled: bool = False

    has_bias: ClassVar[bool] = False  # of the projections
    # Of the large projections
    names: ClassVar[tuple[str, ...]] = "linear_attn.in_proj_qkv", "linear_attn.in_proj_z", "linear_attn.out_proj"
    # Of those of how much a token corrects the state, and of its decay, which `quantization` leaves plain
    small_names: ClassVar[tuple[str, ...]] = "linear_attn.in_proj_b", "linear_attn.in_proj_a"

    @property
    def rows(self) -> tuple[int, int, int]:
        """The rows of the large projections before the states: of what is convolved, and of the output's gates."""
        return self.channels, self.values, 0

    @property
    def small_rows(self) -> tuple[int, ...]:
        return self.value_heads, self.value_heads

    def others(self, hidden: int) -> int:
        """Return the number of a layer's weights beside the large projections."""
        return self.taps * self.channels + 2 * self.value_heads * (hidden + 1) + self.value_dim


@dataclass(frozen=True, slots=True)
class ConvShape:
    """The sizes of a layer of gated short convolution, see short_conv.py. The fields are those of LinearShape."""

    channels: int
    taps: int
    has_bias: bool  # of the projections and the convolution

    names: ClassVar[tuple[str, ...]] = "conv.in_proj", "conv.out_proj"
    small_names: ClassVar[tuple[str, ...]] = ()
    small_rows: ClassVar[tuple[int, ...]] = ()
    matrices: ClassVar[tuple[int, int, int]] = 0, 0, 0  # there are none

    @property
    def rows(self) -> tuple[int, int, int]:
        """The rows of the projection before the convolution: of two gates and of what is convolved."""
        return 3 * self.channels, 0, 0

    @property
    def seen(self) -> int:
        return self.channels

    def others(self, hidden: int) -> int:
        biases = 4 * self.channels + hidden if self.has_bias else 0
        return self.taps * self.channels + biases

    def num_bytes(self, dtype: torch.dtype) -> int:
        return (self.taps - 1) * self.channels * dtype.itemsize


@dataclass(frozen=True, slots=True)
class Mamba2Shape(MatrixShape):
    """The sizes of a layer of Mamba2, see mamba2.py. Its queries, keys and values are C, B and x, and consecutive heads
    of x share one of B and C."""

    has_bias: bool  # of the projections
    has_conv_bias: bool
    limits: tuple[float, float]  # of the time steps

    names: ClassVar[tuple[str, ...]] = "mamba.in_proj", "mamba.out_proj"
    small_names: ClassVar[tuple[str, ...]] = ()
    small_rows: ClassVar[tuple[int, ...]] = ()

    @property
    def rows(self) -> tuple[int, int, int]:
        """The rows of the projection before the states: of the output's gates, what is convolved, and the steps."""
        return self.values + self.channels + self.value_heads, 0, 0

    def others(self, hidden: int) -> int:
        biases = self.rows[0] + hidden if self.has_bias else 0
        return (self.taps + self.has_conv_bias) * self.channels + 3 * self.value_heads + self.values + biases


MixerShape = LinearShape | ConvShape | Mamba2Shape


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the matrices of a model of this dtype: errors in them would add up over the tokens."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class LayerStates(NamedTuple):
    """The states of one layer."""

    windows: Tensor  # [states, taps - 1, channels]: of the last tokens what is convolved, in the model's dtype
    # [states, value_heads, key_dim, value_dim] float32, or float64 if the model's dtype is; of short convolutions empty
    matrices: Tensor

    @classmethod
    def allocate(cls, shape: MixerShape, count: int, dtype: torch.dtype, device: torch.device) -> LayerStates:
        """Return `count` states. They are not cleared: a sequence starts from zeros or from a snapshot."""
        windows = torch.empty(count, shape.taps - 1, shape.channels, dtype=dtype, device=device)
        return cls(windows, torch.empty(count, *shape.matrices, dtype=wide(dtype), device=device))

    def before(self, source: int) -> tuple[Tensor, Tensor]:
        """Return the window and the matrices from which a segment continues; -1: zeros."""
        if source < 0:
            return torch.zeros_like(self.windows[0]), torch.zeros_like(self.matrices[0])
        return self.windows[source], self.matrices[source]


@dataclass(frozen=True, slots=True)
class Segments:
    """From which states the tokens of a step continue, and which ones they write.

    The tokens of a row are one segment, or several: at the end of each the state is written. Segments of a row follow
    each other: each but the first continues from what the one before it has written. A segment may be empty: it copies
    a state. The rows are independent: no row reads or writes a state that another one writes.

    The lists hold the same numbers as the tensors, so that reading them does not wait for the device.
    """

    row_start: Tensor  # [rows + 1] int32, the first segment of each row
    begin: Tensor  # [segments + 1] int32, the first token of each segment
    source: Tensor  # [segments] int32, the state that it continues from; -1: zeros
    target: Tensor  # [segments] int32, the state that it writes
    begin_list: list[int]
    source_list: list[int]
    target_list: list[int]

    @property
    def each(self) -> Iterator[tuple[int, int, int, int]]:
        """The first token, the token after the last, the source and the target of each segment."""
        return zip(self.begin_list[:-1], self.begin_list[1:], self.source_list, self.target_list, strict=True)

    @property
    def are_single(self) -> bool:
        """Whether each row is one segment of one token, as when all rows decode. Of a row with two such segments the
        second continues from what the first has written."""
        count = len(self.begin_list)
        return len(self.row_start) == count and self.begin_list == list(range(count))

    @classmethod
    def of(cls, rows: Sequence[Sequence[tuple[int, int, int]]], device: torch.device | str = "cpu") -> Segments:
        """Return the segments of rows of (number of tokens, source, target)."""
        lists = cls.lists(rows)
        numbers = torch.tensor([number for each in lists for number in each], dtype=torch.int32)
        if torch.device(device).type == "cuda":
            numbers = numbers.pin_memory()  # so that the copy does not wait for the step in flight
        row_start, begin, source, target = numbers.to(device, non_blocking=True).split(list(map(len, lists)))
        return cls(row_start, begin, source, target, *lists[1:])

    @staticmethod
    def lists(rows: Sequence[Sequence[tuple[int, int, int]]]) -> tuple[list[int], list[int], list[int], list[int]]:
        """Return what the tensors of `of` hold, in the order of the fields."""
        flat = [segment for row in rows for segment in row]
        starts = [0, *accumulate(map(len, rows))]
        begins = [0, *accumulate(count for count, _, _ in flat)]
        return starts, begins, [source for _, source, _ in flat], [target for _, _, target in flat]


class States(NamedTuple):
    """The states of all layers, by the number of the layer among those that keep states, and a step's segments."""

    layers: list[LayerStates]
    segments: Segments
