"""The convolution of layers of LFM2: any step of segments against each segment by itself."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from engine.models.mixers.convolution import convolve
from engine.models.mixers.short_conv import ConvLayer, convolve_segments
from engine.models.mixers.states import ConvShape, LayerStates, Segments

CPU = torch.device("cpu")
CHANNELS, STATES = 6, 8
Rows = Sequence[Sequence[tuple[int, int, int]]]  # see Segments.of
STEPS: list[Rows] = [
    [[(1, 3, 3)], [(1, -1, 0)], [(1, 7, 2)]],  # decodes alone
    [[(1, 3, 5), (1, 5, 3)], [(1, 0, 0)]],  # a snapshot between the two tokens of a row
    [[(4, -1, 1)], [(1, 2, 2)], [(2, 3, 6), (0, 6, 5), (3, 5, 3)]],
    [[(0, 4, 1)], [(1, 6, 7), (1, 7, 6)]],  # a copy beside other rows
    [[(9, 6, 0)]],
]


class Layer:
    def __init__(self, taps: int, dtype: torch.dtype) -> None:
        shape = ConvShape(CHANNELS, taps, has_bias=True)
        generator = torch.Generator().manual_seed(taps)

        def random(*sizes: int) -> Tensor:
            return torch.randn(*sizes, generator=generator).to(dtype)

        self.conv = ConvLayer(shape, random(CHANNELS, 1, taps), random(CHANNELS))
        self.states = LayerStates.allocate(shape, STATES, dtype, CPU)
        self.states.windows.copy_(random(*self.states.windows.shape))
        self.x = random(32, CHANNELS)

    def expected(self, x: Tensor, windows: Tensor, segments: Segments) -> Tensor:
        """Return the results, one segment after the other; the windows are written."""
        found = torch.empty_like(x)
        before = windows.clone()
        written: set[int] = set()
        for first, end, source, target in segments.each:
            # What a row of this step has written is read by that row alone.
            read = windows if source in written else before
            window = read[source] if source >= 0 else torch.zeros_like(before[0])
            line = torch.cat([window, x[first:end]])
            found[first:end] = convolve(line, self.conv.taps, self.conv.bias)
            windows[target] = line[end - first :]
            written.add(target)
        return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("taps", [1, 2, 3, 5])
@pytest.mark.parametrize("rows", STEPS, ids=str)
def test_a_step_computes_each_segment_from_its_own_past(rows, taps, dtype):
    layer, segments = Layer(taps, dtype), Segments.of(rows)
    x = layer.x[: segments.begin_list[-1]]
    windows = layer.states.windows.clone()
    want = layer.expected(x, windows, segments)
    assert torch.equal(convolve_segments(layer.conv, x, layer.states, segments), want)
    assert torch.equal(layer.states.windows, windows)


def test_a_row_without_segments_computes_nothing():
    layer, segments = Layer(3, torch.float32), Segments.of([[(2, 1, 1)], []])
    windows = layer.states.windows.clone()
    want = layer.expected(layer.x[:2], windows, segments)
    assert torch.equal(convolve_segments(layer.conv, layer.x[:2], layer.states, segments), want)
    assert torch.equal(layer.states.windows, windows)


def test_a_state_that_holds_no_numbers_is_not_read():
    layer = Layer(3, torch.float32)
    layer.states.windows.fill_(torch.nan)
    for rows in ([[(1, -1, 0)]], [[(3, -1, 0)], [(1, -1, 1)]]):
        segments = Segments.of(rows)
        found = convolve_segments(layer.conv, layer.x[: segments.begin_list[-1]], layer.states, segments)
        assert not found.isnan().any()
