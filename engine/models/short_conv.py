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
        windows = states.windows
        if segments.are_single:  # decodes alone: all at once
            source = segments.source.long()
            line = windows[source.clamp(min=0)].masked_fill_((source < 0)[:, None, None], 0)
            line = torch.cat([line, x[:, None]], 1)
            windows[segments.target.long()] = line[:, 1:]
            return convolve(line, self.taps, self.bias)[:, 0]
        found = torch.empty_like(x)
        for first, end, read, written in segments.each:
            window = windows[read] if read >= 0 else torch.zeros_like(windows[0])
            line = torch.cat([window, x[first:end]])
            windows[written] = line[end - first :]
            found[first:end] = convolve(line, self.taps, self.bias)
        return found

    def parts(self, prefix: str) -> list[tuple[str, Linear, int, int]]:
        """Return checkpoint names and places of the weights, as Layer.parts: there are no small linear layers."""
        return []

    def targets(self, prefix: str) -> dict[str, Tensor]:
        """Return checkpoint name -> the tensor to read it into."""
        bias = {} if self.bias is None else {f"{prefix}conv.conv.bias": self.bias}
        return {f"{prefix}conv.conv.weight": self.taps} | bias

    def pack(self, kernels: Kernels | None, in_file: Mapping[Linear, InFile]) -> None:
        """There is nothing to pack."""
