"""The Triton kernels of Gated DeltaNet in Triton's interpreter; test_paged_gpu.py runs this file.

    TRITON_INTERPRET=1 python -m pytest tests/engine/interpreted_delta.py

The interpreter truncates where a GPU rounds to bfloat16, so rounding is compared in float16.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from engine.models.gpu import delta as gpu_delta
from engine.models.gpu.delta import gated_delta, objection
from engine.models.gpu.states import TRIAL_ROWS, TRIAL_STATES
from engine.models.mixers import delta
from engine.models.mixers.delta import DeltaLayer, DeltaWeights
from engine.models.mixers.mixer import gpu_jobs
from engine.models.mixers.states import LayerStates, LinearShape, Segments
from tests.engine.interpreter import prepare
from tests.engine.test_attention import CPU

prepare()
EPS = 1e-6
SHAPE = LinearShape(key_heads=2, value_heads=4, key_dim=32, value_dim=16, taps=4)
SHAPES = {
    "grouped": SHAPE,
    "as in Qwen3.5": LinearShape(1, 2, 128, 128, 4),
    "no powers of two": LinearShape(2, 2, 48, 80, 3),
    "largest": LinearShape(1, 1, 256, 256, 2),
    "no window": LinearShape(1, 3, 16, 16, 1),
    "heads of 8 and 12": LinearShape(1, 2, 8, 12, 2),
    "heads of 1 and 33": LinearShape(2, 2, 1, 33, 4),
    "tiled": replace(SHAPE, is_tiled=True),
}
TOLERANCE = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
Row = Sequence[tuple[int, int, int]]


class Layer:
    """Random weights of a layer, and what it gets for tokens."""

    def __init__(self, shape: LinearShape, dtype: torch.dtype = torch.float32, tokens: int = 64) -> None:
        torch.manual_seed(shape.key_dim)
        self.shape = shape
        self.weights = DeltaWeights(
            taps=torch.randn(shape.channels, 1, shape.taps).to(dtype),
            a_log=torch.randn(shape.value_heads) - 1,
            dt_bias=torch.randn(shape.value_heads),
            norm=torch.rand(shape.value_dim).to(dtype) + 0.5,
        )
        self.qkvz = torch.randn(tokens, shape.channels + shape.values).to(dtype)
        self.gates = torch.randn(tokens, 2 * shape.value_heads).to(dtype)

    def states(self) -> LayerStates:
        """Return random states, the same at each call."""
        states = LayerStates.allocate(self.shape, TRIAL_STATES, self.qkvz.dtype, CPU)
        draw = torch.Generator().manual_seed(1)
        for each in states:
            each.copy_(torch.randn(each.shape, generator=draw))
        return states

    def compute(self, states: LayerStates, rows: Sequence[Row], tokens: Tensor) -> Tensor:
        """Return what the kernels read for these tokens."""
        segments = Segments.of(rows)
        assert segments.begin_list[-1] == len(tokens)
        qkvz, gates = self.qkvz[tokens], self.gates[tokens]
        return gated_delta(DeltaLayer(self.shape, EPS, self.weights), qkvz, gates, states, segments)

    def compare(self, rows: Sequence[Row]) -> None:
        """Compute a step by the kernels and by torch, and compare the results and all states."""
        segments, ours, theirs = Segments.of(rows), self.states(), self.states()
        tokens = segments.begin_list[-1]
        args = DeltaLayer(self.shape, EPS, self.weights), self.qkvz[:tokens], self.gates[:tokens]
        found = gated_delta(*args, ours, segments), ours.matrices
        want = delta.gated_delta(*args, theirs, segments), theirs.matrices
        assert torch.equal(ours.windows, theirs.windows), "windows are copies"
        tolerance = TOLERANCE[self.qkvz.dtype]
        for one, other in zip(found, want, strict=True):
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def same(one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(*each) for each in zip(one, other, strict=True))


@pytest.mark.parametrize(
    "name, dtype",
    [
        *((name, torch.float32) for name in SHAPES),
        *((name, torch.float16) for name in ("grouped", "no powers of two", "tiled")),
        *((name, torch.bfloat16) for name in ("grouped", "no window", "heads of 1 and 33")),
    ],
)
def test_a_step_of_any_segments_equals_torch(name, dtype):
    Layer(SHAPES[name], dtype).compare(TRIAL_ROWS)


def test_numbers_are_rounded_where_torch_rounds_them():
    layer = Layer(SHAPE, torch.float16)
    segments, ours, theirs = Segments.of(TRIAL_ROWS), layer.states(), layer.states()
    tokens = segments.begin_list[-1]
    args = DeltaLayer(SHAPE, EPS, layer.weights), layer.qkvz[:tokens], layer.gates[:tokens]
    found, want = gated_delta(*args, ours, segments), delta.gated_delta(*args, theirs, segments)
    # Some are in the middle between two numbers.
    assert (found == want).float().mean() > 0.99
    errors = (ours.matrices - theirs.matrices).abs() / theirs.matrices.abs()
    assert errors.quantile(0.9) < 1e-5


def test_a_step_of_decodes_equals_torch():
    Layer(SHAPE).compare([[(1, state, state)] for state in (3, 0, 7, 5)])


def test_a_step_without_tokens_copies_states():
    layer = Layer(SHAPE)
    layer.compare([[(0, 1, 2)], [(0, -1, 4), (0, 4, 5)]])
    layer.compare([])


@pytest.mark.parametrize("rows", [2, 3, 7], ids=lambda rows: f"{rows} rows at once")
def test_rows_are_searched_for_in_several_parts(rows, monkeypatch):
    monkeypatch.setattr(gpu_delta, "SEARCHED_ROWS", 2)
    gpu_delta._constants.cache_clear()
    Layer(SHAPE).compare([[(1 + row % 2, row, row)] for row in range(rows)])
    gpu_delta._constants.cache_clear()


def test_tokens_are_convolved_in_several_tiles_with_what_is_before_them():
    Layer(SHAPE).compare([[(15, 0, 0)], [(2, 1, 1), (18, 1, 2)], [(29, -1, 3)]])


def test_a_row_has_the_same_bits_beside_any_others():
    layer = Layer(SHAPE)
    together = layer.states()
    rows = [(5, 0, 1), (1, 2, 2), (19, -1, 3), (1, 4, 4)]
    results = layer.compute(together, [[row] for row in rows], torch.arange(26))
    for row, tokens in zip(rows, torch.arange(26).split([count for count, _, _ in rows]), strict=True):
        alone, target = layer.states(), row[2]
        assert torch.equal(layer.compute(alone, [[row]], tokens), results[tokens])
        assert same(tuple(each[target] for each in alone), tuple(each[target] for each in together))


@pytest.mark.parametrize(
    "steps",
    [
        [[(23, -1, 0)]],
        [[(1, -1, 0), (22, 0, 0)]],
        [[(16, -1, 5), (2, 5, 6), (0, 6, 7), (5, 7, 0)]],
        [[(4, -1, 0)], [(17, 0, 3), (1, 3, 0)], [(1, 0, 0)]],
        [[(1, -1 if not token else 0, 0)] for token in range(23)],
    ],
)
def test_a_sequence_has_the_same_bits_however_it_is_divided(steps: list[list[tuple[int, int, int]]]):
    layer, results, at = Layer(SHAPE), [], 0
    whole, divided = layer.states(), layer.states()
    want = layer.compute(whole, [[(23, -1, 0)]], torch.arange(23))
    for row in steps:
        count = sum(tokens for tokens, _, _ in row)
        results.append(layer.compute(divided, [row], torch.arange(at, at + count)))
        at += count
    assert torch.equal(torch.cat(results), want)
    assert same(tuple(each[0] for each in divided), tuple(each[0] for each in whole))


def test_padding_changes_nothing_and_nothing_else_is_read():
    """Rows without segments and tokens of no row come after the others, and so do numbers of no segment."""
    layer, ours, padded = Layer(SHAPE), Layer(SHAPE).states(), Layer(SHAPE).states()
    rows = [[(3, 1, 1)], [(1, -1, 4)]]
    want = layer.compute(ours, rows, torch.arange(4))
    segments = Segments.of(rows)
    row_start = F.pad(segments.row_start, (0, 3), value=2)
    begin, source, target = (
        F.pad(each, (0, 9), value=1 << 30) for each in (segments.begin, segments.source, segments.target)
    )
    segments = replace(segments, row_start=row_start, begin=begin, source=source, target=target)
    for each in padded:  # of states that no row reads
        each[[0, 2, 3, 4, 5, 6, 7]] = math.nan
    qkvz, gates = layer.qkvz[:23].clone(), layer.gates[:23].clone()
    qkvz[4:], gates[4:] = math.nan, math.nan
    found = gated_delta(DeltaLayer(SHAPE, EPS, layer.weights), qkvz, gates, padded, segments)
    assert torch.equal(found[:4], want)
    for one, other in zip(padded, ours, strict=True):
        assert torch.equal(one[[1, 4]], other[[1, 4]])
        assert one[[0, 2, 3, 5, 6, 7]].isnan().all()


def test_gates_of_large_numbers_equal_torch():
    layer = Layer(SHAPE)
    layer.gates = 60 * torch.randn_like(layer.gates)
    layer.gates[:4, 4:] = torch.tensor([-200.0, -88.0, 19.9, 200.0])[:, None]
    layer.compare([[(30, 0, 0)]])


def test_slow_decays_are_exact():
    """The errors of decays near 1 add up over the tokens: so small rates have a small relative error, too."""
    layer = Layer(SHAPE)
    layer.gates[:, 4:] = torch.linspace(-18, -6, 64)[:, None]
    layer.weights.dt_bias.zero_()
    layer.weights.a_log.fill_(math.log(16.0))
    layer.qkvz[:, : SHAPE.channels] = 0  # so that a state only decays
    states, rate = layer.states(), 16 * F.softplus(layer.gates[:, 4].double()).sum()
    states.windows.zero_()
    before = states.matrices[0].double()
    layer.compute(states, [[(64, 0, 0)]], torch.arange(64))
    torch.testing.assert_close(states.matrices[0].double(), before * torch.exp(-rate), rtol=3e-6, atol=0)


def test_the_kernels_are_tried_and_what_they_cannot_compute_has_a_reason(monkeypatch):
    for dtype in TOLERANCE:
        assert objection(SHAPE, dtype, CPU) is None
    assert objection(SHAPE, torch.float64, CPU) == "the Triton kernels do not compute in float64"
    reason = objection(replace(SHAPE, value_dim=257), torch.float32, CPU)
    assert reason == "the Triton kernels serve linear attention with heads of up to 256 numbers"
    assert list(gpu_jobs(replace(SHAPE, key_dim=257), torch.float32)) == []
    compute = gpu_delta.gated_delta

    def wrong(*args) -> Tensor:
        found = compute(*args)
        args[-2].windows[2] = 0  # a state that a row has written
        return found

    monkeypatch.setattr(gpu_delta, "gated_delta", wrong)
    reason = objection(SHAPE, torch.bfloat16, CPU)
    assert reason is not None and "wrong results of linear attention on this device (relative error 0." in reason

    def broken(*_: object) -> Tensor:
        raise RuntimeError("out of resource: shared memory\nmore")

    monkeypatch.setattr(gpu_delta, "gated_delta", broken)
    reason = objection(SHAPE, torch.bfloat16, CPU)
    assert reason == "the Triton kernels do not run on this device: RuntimeError: out of resource: shared memory"
