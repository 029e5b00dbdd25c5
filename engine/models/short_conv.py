"""Gated short convolutions in place of attention, as in LFM2 (Liquid AI 2025).

A token's projection is two gates and numbers. The numbers times the first gate are convolved over the last few tokens,
and the result times the second gate is what the output projection sees.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..kernels.library import Kernels
from .convolution import convolve
from .layers import InFile, Linear
from .states import ConvShape, LayerStates, Segments, States


class ShortConv:
    """The gates and the convolution of a layer, beside its projections. Its operations work on single numbers, so a
    token's results do not depend on the batch."""

    def __init__(self, shape: ConvShape, dtype: torch.dtype, device: torch.device) -> None:
        self.taps = torch.empty(shape.channels, 1, shape.taps, dtype=dtype, device=device)
        self.bias = torch.empty(shape.channels, dtype=dtype, device=device) if shape.has_bias else None

    def __call__(self, x: Tensor, projected: Tensor, states: States | None, number: int) -> Tensor:
        """Return [tokens, channels] for the projection of x: [tokens, 3 * channels]. `number`: of the layer among those
        that keep states."""
        assert states is not None, "a step of this model has states"
        before, after, numbers = projected.chunk(3, -1)
        return after * self.convolved(before * numbers, states.layers[number], states.segments)

    def convolved(self, x: Tensor, states: LayerStates, segments: Segments) -> Tensor:
        """Return the convolution of x over the tokens of each segment's sequence: [tokens, channels]. The states that
        the segments name are read and written."""
        windows, size = states.windows, self.taps.shape[-1] - 1
        if not len(segments.source):
            return torch.empty_like(x)
        if segments.are_single:  # decodes alone
            line = torch.cat([_before(windows, segments.source), x[:, None]], 1)
            windows[segments.target.long()] = line[:, 1:]
            return convolve(line, self.taps, self.bias)[:, 0]
        # The window and the tokens of each row, one row after the other
        row_start, begin = segments.row_start.long(), segments.begin.long()
        rows = torch.arange(len(row_start) - 1, device=x.device)
        first = row_start[:-1].clamp(max=len(segments.source) - 1)  # a row may have no segments
        line = x.new_empty(len(x) + len(rows) * size, x.shape[1])
        reach = torch.arange(-size, 0, device=x.device)
        line[(begin[row_start[:-1]] + (rows + 1) * size)[:, None] + reach] = _before(windows, segments.source[first])
        shift = (rows + 1) * size
        of_token = shift.repeat_interleave(begin[row_start].diff(), output_size=len(x))
        places = torch.arange(len(x), device=x.device) + of_token
        line[places] = x
        of_segment = shift.repeat_interleave(row_start.diff(), output_size=len(segments.source))
        windows[segments.target.long()] = line[(begin[1:] + of_segment)[:, None] + reach]
        reach = torch.arange(-size, 1, device=x.device)
        return convolve(line[places[:, None] + reach], self.taps, self.bias)[:, 0]

    def parts(self, prefix: str) -> list[tuple[str, Linear, int, int]]:
        """Return checkpoint names and places of the weights, as Layer.parts: there are no small linear layers."""
        return []

    def targets(self, prefix: str) -> dict[str, Tensor]:
        """Return checkpoint name -> the tensor to read it into."""
        bias = {} if self.bias is None else {f"{prefix}conv.conv.bias": self.bias}
        return {f"{prefix}conv.conv.weight": self.taps} | bias

    def pack(self, kernels: Kernels | None, in_file: Mapping[Linear, InFile]) -> None:
        """There is nothing to pack."""


def _before(windows: Tensor, source: Tensor) -> Tensor:
    """Return the windows of these states, of -1 zeros: [n, taps - 1, channels]."""
    return windows[source.long().clamp(min=0)].masked_fill_((source < 0)[:, None, None], 0)
