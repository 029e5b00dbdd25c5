"""Gated short convolutions in place of attention, as in LFM2 (Liquid AI 2025).

A token's projection is two gates and numbers. The numbers times the first gate are convolved over the last few tokens,
and the result times the second gate is what the output projection sees. Every operation works on single numbers, so a
token's results do not depend on the batch.

`gated_conv` is in torch. It is used on CPUs and where there is no kernel, and it is the oracle of the kernels' tests.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .convolution import convolve
from .states import ConvShape, LayerStates, Segments


class ConvLayer(NamedTuple):
    """A layer between its projections."""

    shape: ConvShape
    taps: Tensor  # [channels, 1, taps], the oldest token first
    bias: Tensor | None  # [channels]


def gated_conv(layer: ConvLayer, projected: Tensor, states: LayerStates, segments: Segments) -> Tensor:
    """Return what a layer computes for each token, before its output projection: [tokens, channels].

    projected: [tokens, 3 * channels]: a gate, the gate of the results, and numbers. The states that the segments name
    are read and written.
    """
    before, after, numbers = projected.chunk(3, -1)
    return after * convolve_segments(layer, before * numbers, states, segments)


def convolve_segments(layer: ConvLayer, x: Tensor, states: LayerStates, segments: Segments) -> Tensor:
    """Return the convolution of x over the tokens of each segment's sequence: [tokens, channels]. The states that
    the segments name are read and written."""
    windows, size = states.windows, layer.taps.shape[-1] - 1
    if not len(segments.source):
        return torch.empty_like(x)
    if segments.are_single:  # decodes alone
        line = torch.cat([_before(windows, segments.source), x[:, None]], 1)
        windows[segments.target.long()] = line[:, 1:]
        return convolve(line, layer.taps, layer.bias)[:, 0]
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
    after = line[(begin[1:] + of_segment)[:, None] + reach]
    last = {target: segment for segment, target in enumerate(segments.target_list)}  # that writes each state
    if len(last) < len(after):  # on a GPU any of several writes to one place may be the last
        windows[list(last)] = after[list(last.values())]
    else:
        windows[segments.target.long()] = after
    reach = torch.arange(-size, 1, device=x.device)
    return convolve(line[places[:, None] + reach], layer.taps, layer.bias)[:, 0]


def _before(windows: Tensor, source: Tensor) -> Tensor:
    """Return the windows of these states, of -1 zeros: [n, taps - 1, channels]."""
    return windows[source.long().clamp(min=0)].masked_fill_((source < 0)[:, None, None], 0)
