"""The kernel of Gated DeltaNet against the oracle in torch, and the bits of its sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from engine.kernels import build
from engine.kernels.delta import GatedDelta
from engine.kernels.library import Kernels
from engine.models.mixers.delta import DeltaLayer, DeltaWeights
from engine.models.mixers.delta import gated_delta as oracle
from engine.models.mixers.states import LayerStates, LinearShape, Segments
from tests.engine.test_kernels import kernels, needs_library

pytestmark = [needs_library, pytest.mark.usefixtures("same_threads_after")]

CPU = torch.device("cpu")
EPS = 1e-6
# Of the relative error beside the oracle in the same dtype: float32 differs in the order of sums alone, bfloat16 in a
# few numbers that are rounded to a neighbour.
LIMITS = {torch.float32: 2e-6, torch.bfloat16: 1e-3}
# Beside the oracle in float64: bfloat16 has 8 bits.
ROUNDED = {torch.float32: 5e-6, torch.bfloat16: 2e-2}
# Heads of whole vectors and parts of one, one to three value heads for a key head, and one to eight taps.
SHAPES = [
    LinearShape(key_heads=2, value_heads=4, key_dim=128, value_dim=128, taps=4),
    LinearShape(key_heads=1, value_heads=3, key_dim=64, value_dim=64, taps=4),
    LinearShape(key_heads=1, value_heads=1, key_dim=256, value_dim=256, taps=2),
    LinearShape(key_heads=2, value_heads=2, key_dim=16, value_dim=208, taps=3),
    LinearShape(key_heads=2, value_heads=6, key_dim=9, value_dim=33, taps=4),
    LinearShape(key_heads=3, value_heads=3, key_dim=1, value_dim=1, taps=8),
    LinearShape(key_heads=1, value_heads=2, key_dim=5, value_dim=7, taps=1),
    LinearShape(key_heads=2, value_heads=8, key_dim=32, value_dim=16, taps=4, is_tiled=True),
]
NUM_STATES = 8
Rows = Sequence[Sequence[tuple[int, int, int]]]  # see Segments.of
# Of (tokens, source, target): snapshots, empty segments, new sequences, and segments that are shorter than the window.
ROWS: Rows = [
    [(40, 0, 0), (0, 0, 4), (1, 0, 5), (30, 5, 0)],
    [(1, 1, 1)],
    [(0, -1, 2)],
    [],
    [(2, -1, 6), (1, 6, 7), (0, 7, 3)],
]


@pytest.fixture(params=build.variants("delta"))
def variant(request: pytest.FixtureRequest) -> Kernels:
    return kernels(request.param)


class Layer:
    """A layer's weights, and the numbers of tokens, by their positions in one long sequence."""

    def __init__(self, shape: LinearShape, dtype: torch.dtype, tokens: int) -> None:
        self.shape = shape
        self.qkvz = torch.randn(tokens, shape.channels + shape.values).to(dtype)
        self.gates = (2 * torch.randn(tokens, 2 * shape.value_heads)).to(dtype)
        self.weights = DeltaWeights(
            taps=(torch.randn(shape.channels, 1, shape.taps) * 0.5).to(dtype),
            a_log=2 * torch.rand(shape.value_heads),
            dt_bias=torch.randn(shape.value_heads),
            norm=(1 + torch.randn(shape.value_dim) / 8).to(dtype),
        )
        self.states = LayerStates.allocate(shape, NUM_STATES, dtype, CPU)
        self.states.windows.copy_(torch.randn(self.states.windows.shape))
        self.states.matrices.copy_(torch.randn(self.states.matrices.shape) / 8)

    def copied(self) -> LayerStates:
        return LayerStates(*(tensor.clone() for tensor in self.states))

    def expected(self, rows: Rows, dtype: torch.dtype) -> tuple[Tensor, LayerStates]:
        """Return the oracle's results and states in a dtype; in float64 nothing is rounded."""
        taps, decay, bias, norm = self.weights
        states = self.copied()
        if dtype == torch.float64:
            decay, bias = decay.double(), bias.double()
            states = LayerStates(*(tensor.double() for tensor in states))
        weights = DeltaWeights(taps.to(dtype), decay, bias, norm.to(dtype))
        segments = Segments.of(rows)
        layer = DeltaLayer(self.shape, EPS, weights)
        out = oracle(layer, self.qkvz.to(dtype), self.gates.to(dtype), states, segments)
        return out, states

    def compute(
        self,
        kernels: Kernels,
        rows: Rows,
        states: LayerStates,
        tokens: Tensor | None = None,
    ) -> Tensor:
        """Return the kernel's results. `tokens`: which ones, if not all in order."""
        qkvz, gates = (self.qkvz, self.gates) if tokens is None else (self.qkvz[tokens], self.gates[tokens])
        compute = GatedDelta(kernels, DeltaLayer(self.shape, EPS, self.weights))
        return compute(qkvz, gates, states, Segments.of(rows))


def num_tokens(rows: Rows) -> int:
    return sum(count for row in rows for count, _, _ in row)


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def same_bits(found: LayerStates, expected: LayerStates) -> bool:
    return torch.equal(found.windows, expected.windows) and torch.equal(found.matrices, expected.matrices)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_results_and_states_equal_the_oracle(variant, dtype, shape, threads):
    torch.set_num_threads(threads)
    layer = Layer(shape, dtype, num_tokens(ROWS))
    states = layer.copied()
    out = layer.compute(variant, ROWS, states)
    same, same_states = layer.expected(ROWS, dtype)
    assert out.dtype == dtype and error(out, same) < LIMITS[dtype]
    assert torch.equal(states.windows, same_states.windows)
    assert error(states.matrices, same_states.matrices) < LIMITS[dtype]
    exact, exact_states = layer.expected(ROWS, torch.float64)
    assert error(out, exact) < ROUNDED[dtype]
    assert error(states.matrices, exact_states.matrices) < ROUNDED[dtype]


def test_a_state_that_no_segment_names_stays(variant, dtype):
    layer = Layer(SHAPES[0], dtype, 3)
    states = layer.copied()
    layer.compute(variant, [[(3, 1, 2)]], states)
    others = [0, 1, *range(3, NUM_STATES)]
    assert torch.equal(states.windows[others], layer.states.windows[others])
    assert torch.equal(states.matrices[others], layer.states.matrices[others])
    assert not torch.equal(states.matrices[2], layer.states.matrices[2])


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[4], SHAPES[6], SHAPES[7]], ids=str)
def test_bits_depend_on_neither_steps_nor_segments_nor_threads(variant, dtype, shape):
    tokens = 75
    layer = Layer(shape, dtype, tokens)
    torch.set_num_threads(1)
    states = layer.copied()
    whole = layer.compute(variant, [[(tokens, 0, 0)]], states)
    divisions = [[1] * tokens, [32, 32, 11], [2, 1, 40, 32], [74, 1]]
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        for division in divisions:
            ends = torch.tensor([0, *division]).cumsum(0).tolist()
            by_step = layer.copied()
            for start, end in pairwise(ends):
                rows = [[(end - start, 0, 0)]]
                found = layer.compute(variant, rows, by_step, torch.arange(start, end))
                assert torch.equal(found, whole[start:end])
            assert same_bits(by_step, states)
            by_segment = layer.copied()
            assert torch.equal(layer.compute(variant, [[(count, 0, 0) for count in division]], by_segment), whole)
            assert same_bits(by_segment, states)


def test_bits_do_not_depend_on_the_other_rows(variant, dtype):
    shape, tokens = SHAPES[1], 60
    layer = Layer(shape, dtype, tokens)
    alone, together = layer.copied(), layer.copied()
    bounds = [(0, 1), (1, 2), (2, 45), (45, 47), (47, 60)]
    torch.set_num_threads(1)
    parts = [
        layer.compute(variant, [[(end - start, row, row)]], alone, torch.arange(start, end))
        for row, (start, end) in enumerate(bounds)
    ]
    torch.set_num_threads(2)
    rows = [[(end - start, row, row)] for row, (start, end) in enumerate(bounds)]
    assert torch.equal(layer.compute(variant, rows, together), torch.cat(parts))
    assert same_bits(together, alone)


def test_a_snapshot_continues_a_sequence_with_the_same_bits(variant, dtype):
    layer = Layer(SHAPES[0], dtype, 50)
    states = layer.copied()
    whole = layer.compute(variant, [[(20, -1, 1), (0, 1, 3), (30, 1, 1)]], states)
    after = layer.compute(variant, [[(30, 3, 2)]], states, torch.arange(20, 50))
    assert torch.equal(after, whole[20:])
    assert torch.equal(states.matrices[2], states.matrices[1])
    assert torch.equal(states.windows[2], states.windows[1])


def test_value_heads_in_tiled_order_have_the_bits_of_consecutive_ones(variant, dtype):
    tiled = SHAPES[7]
    keys, group = tiled.key_heads, tiled.value_heads // tiled.key_heads
    order = torch.arange(tiled.value_heads).view(group, keys).T.flatten()  # of tiled heads, so that sharing ones follow
    layer, same = (Layer(tiled, dtype, num_tokens(ROWS)) for _ in range(2))
    same.shape = replace(tiled, is_tiled=False)

    def reordered(x: Tensor, first: int, size: int) -> Tensor:
        """Return x, whose heads of `size` numbers from the column `first` on are in the other order."""
        moved = x[:, first : first + tiled.value_heads * size].unflatten(1, (tiled.value_heads, size))[:, order]
        return torch.cat([x[:, :first], moved.flatten(1), x[:, first + tiled.value_heads * size :]], 1)

    values, dim = 2 * tiled.keys, tiled.value_dim
    same.qkvz = reordered(reordered(layer.qkvz, values, dim), tiled.channels, dim)
    same.gates = reordered(reordered(layer.gates, 0, 1), tiled.value_heads, 1)
    taps, decay, bias, norm = layer.weights
    same_taps = reordered(taps.view(1, tiled.channels, tiled.taps).flatten(1), values * tiled.taps, dim * tiled.taps)
    same.weights = DeltaWeights(same_taps.view_as(taps), decay[order], bias[order], norm)
    states = layer.copied()
    windows = reordered(states.windows.flatten(0, 1), values, dim).view_as(states.windows)
    same_states = LayerStates(windows, states.matrices[:, order].contiguous())
    for threads in (1, 3):
        torch.set_num_threads(threads)
        ours, theirs = (LayerStates(*(each.clone() for each in own)) for own in (states, same_states))
        found, want = layer.compute(variant, ROWS, ours), same.compute(variant, ROWS, theirs)
        assert torch.equal(reordered(found, 0, dim), want)
        assert torch.equal(ours.matrices[:, order], theirs.matrices)


def test_extreme_gates_overflow_nothing(variant, dtype):
    shape = SHAPES[1]
    layer = Layer(shape, dtype, 12)
    extreme = torch.tensor([-1e4, -100.0, -30.0, 0.0, 19.9, 20.1, 100.0, 1e4]).to(dtype)
    layer.gates.copy_(extreme[torch.arange(layer.gates.numel()) % 8].view_as(layer.gates))
    layer.weights.a_log[0] = 5.0  # forgets everything at once
    states = layer.copied()
    out = layer.compute(variant, [[(12, 0, 0)]], states)
    same, same_states = layer.expected([[(12, 0, 0)]], dtype)
    assert error(out, same) < LIMITS[dtype]
    assert error(states.matrices, same_states.matrices) < LIMITS[dtype]


def test_a_token_that_is_no_number_spoils_its_own_sequence_alone(variant, dtype):
    layer = Layer(SHAPES[1], dtype, 6)
    clean = layer.compute(variant, [[(3, 0, 0)], [(3, 1, 1)]], layer.copied())
    layer.qkvz[1] = torch.nan
    states = layer.copied()
    out = layer.compute(variant, [[(3, 0, 0)], [(3, 1, 1)]], states)
    assert torch.equal(out[0], clean[0]) and torch.equal(out[3:], clean[3:])
    assert out[1:3].isnan().all() and states.matrices[0].isnan().all()


def test_tokens_and_states_may_be_strided(variant, dtype):
    layer = Layer(SHAPES[4], dtype, num_tokens(ROWS))
    expected = layer.compute(variant, ROWS, layer.copied())
    joined = torch.cat([layer.qkvz, layer.gates], 1)
    layer.qkvz, layer.gates = joined.split([layer.qkvz.shape[1], layer.gates.shape[1]], 1)
    strided = LayerStates(*(torch.stack([tensor, tensor], 1)[:, 1] for tensor in layer.states))
    assert not any(tensor.is_contiguous() for tensor in (layer.qkvz, *strided))
    assert torch.equal(layer.compute(variant, ROWS, strided), expected)


def test_a_step_without_tokens_computes_nothing(variant, dtype):
    layer = Layer(SHAPES[0], dtype, 0)
    steps: list[Rows] = [[], [[]], [[(0, 2, 2)]]]
    for rows in steps:
        states = layer.copied()
        assert layer.compute(variant, rows, states).shape == (0, SHAPES[0].values)
        assert same_bits(states, layer.states)


@pytest.mark.parametrize(
    "rows",
    [[[(2, 0, NUM_STATES)]], [[(2, NUM_STATES, 0)]], [[(2, 0, -1)]], [[(2, -2, 0)]], [[(1, 0, 0)]], [[(3, 0, 0)]]],
    ids=str,
)
def test_segments_that_do_not_fit_are_refused(rows):
    layer = Layer(SHAPES[1], torch.float32, 2)
    with pytest.raises(ValueError, match="segments do not fit 2 tokens and 8 states"):
        layer.compute(kernels("avx2"), rows, layer.states)


def test_arguments_that_do_not_fit_are_refused():
    avx2, shape, rows = kernels("avx2"), SHAPES[1], [[(2, 0, 0)]]

    def refused(message: str, layer: Layer, states: LayerStates | None = None) -> None:
        with pytest.raises(ValueError, match=message):
            layer.compute(avx2, rows, layer.states if states is None else states)

    def layer(**changed: Tensor) -> Layer:
        made = Layer(shape, torch.float32, 2)
        made.weights = made.weights._replace(**changed)
        return made

    wide = layer()
    wide.qkvz = wide.qkvz.double()
    refused(r"qkvz is \(2, 512\) of torch.float64 on cpu", wide)
    refused("float32 and bfloat16, not in torch.float64", layer(taps=layer().weights.taps.double()))
    short = layer()
    short.gates = short.gates[:1]
    refused(r"gates is \(1, 6\) of torch.float32 on cpu", short)
    turned = layer()
    turned.qkvz = turned.qkvz.T.contiguous().T
    refused("qkvz is not contiguous", turned)
    refused("norm is", layer(norm=torch.ones(shape.value_dim + 1)))
    refused("taps is", layer(taps=torch.ones(shape.channels, 1, shape.taps + 1)))
    refused("decay is", layer(a_log=torch.ones(shape.value_heads, dtype=torch.float64)))
    plain = layer()
    refused("matrices is", plain, plain.states._replace(matrices=plain.states.matrices.bfloat16()))
    refused("windows is", plain, plain.states._replace(windows=plain.states.windows[:, :, 1:]))
    uneven = layer()
    uneven.shape = replace(shape, value_heads=4, key_heads=3)
    refused("no valid sizes", uneven)
