"""The kernel of Mamba2 against the oracle in torch, and the bits of its sequences."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from engine.kernels import build
from engine.kernels.library import Kernels
from engine.kernels.mamba2 import Mamba2Kernel
from engine.models.mixers.mamba2 import Mamba2Layer, Mamba2Weights
from engine.models.mixers.mamba2 import mamba2 as oracle
from engine.models.mixers.states import LayerStates, Mamba2Shape, Segments
from tests.engine.test_delta_kernel import (
    EPS,
    LIMITS,
    NUM_STATES,
    ROUNDED,
    ROWS,
    Rows,
    error,
    num_tokens,
    same_bits,
)
from tests.engine.test_kernels import kernels, needs_library

pytestmark = [needs_library, pytest.mark.usefixtures("same_threads_after")]

CPU = torch.device("cpu")
ANY = 0.0, math.inf


def shape(*sizes: int, has_conv_bias: bool = True, limits: tuple[float, float] = ANY) -> Mamba2Shape:
    return Mamba2Shape(*sizes, has_bias=False, has_conv_bias=has_conv_bias, limits=limits)


# Heads of B and C, heads of x, their sizes, and taps: whole vectors and parts of one, heads of B and C for as many of x
# as several tasks have, and norms over one group and over several.
SHAPES = [
    shape(1, 6, 128, 64, 4),
    shape(1, 24, 16, 32, 4),
    shape(2, 4, 64, 128, 4, has_conv_bias=False),
    shape(2, 6, 9, 33, 3),
    shape(3, 3, 1, 1, 8, limits=(0.5, 1.0)),
    shape(1, 11, 5, 7, 1),
]


@pytest.fixture(params=build.variants("delta"))
def variant(request: pytest.FixtureRequest) -> Kernels:
    return kernels(request.param)


class Layer:
    """A layer's weights, and the projections of tokens, by their positions in one long sequence."""

    def __init__(self, shape: Mamba2Shape, dtype: torch.dtype, tokens: int) -> None:
        self.shape, heads = shape, shape.value_heads
        self.projected = torch.randn(tokens, shape.rows[0]).to(dtype)
        self.weights = Mamba2Weights(
            taps=(torch.randn(shape.channels, 1, shape.taps) * 0.5).to(dtype),
            conv_bias=torch.randn(shape.channels).to(dtype) if shape.has_conv_bias else None,
            a_log=2 * torch.rand(heads),
            dt_bias=torch.randn(heads) - 2,
            skip=torch.randn(heads),
            norm=(1 + torch.randn(shape.values) / 8).to(dtype),
        )
        self.states = LayerStates.allocate(shape, NUM_STATES, dtype, CPU)
        self.states.windows.copy_(torch.randn(self.states.windows.shape))
        self.states.matrices.copy_(torch.randn(self.states.matrices.shape) / 8)

    def copied(self) -> LayerStates:
        return LayerStates(*(tensor.clone() for tensor in self.states))

    def expected(self, rows: Rows, dtype: torch.dtype) -> tuple[Tensor, LayerStates]:
        """Return the oracle's results and states in a dtype; in float64 nothing is rounded."""
        taps, conv_bias, decay, bias, skip, norm = self.weights
        states = self.copied()
        if dtype == torch.float64:
            decay, bias, skip = decay.double(), bias.double(), skip.double()
            states = LayerStates(*(tensor.double() for tensor in states))
        given = None if conv_bias is None else conv_bias.to(dtype)
        weights = Mamba2Weights(taps.to(dtype), given, decay, bias, skip, norm.to(dtype))
        layer = Mamba2Layer(self.shape, EPS, weights)
        return oracle(layer, self.projected.to(dtype), states, Segments.of(rows)), states

    def compute(self, kernels: Kernels, rows: Rows, states: LayerStates, tokens: Tensor | None = None) -> Tensor:
        """Return the kernel's results. `tokens`: which ones, if not all in order."""
        projected = self.projected if tokens is None else self.projected[tokens]
        return Mamba2Kernel(kernels, Mamba2Layer(self.shape, EPS, self.weights))(projected, states, Segments.of(rows))


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


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[1], SHAPES[3], SHAPES[5]], ids=str)
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
                found = layer.compute(variant, [[(end - start, 0, 0)]], by_step, torch.arange(start, end))
                assert torch.equal(found, whole[start:end])
            assert same_bits(by_step, states)
            by_segment = layer.copied()
            assert torch.equal(layer.compute(variant, [[(count, 0, 0) for count in division]], by_segment), whole)
            assert same_bits(by_segment, states)


def test_bits_do_not_depend_on_the_other_rows(variant, dtype):
    layer = Layer(SHAPES[1], dtype, 60)
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


def test_extreme_steps_overflow_nothing(variant, dtype):
    layer = Layer(replace(SHAPES[3], limits=(1e-3, 50.0)), dtype, 12)
    extreme = torch.tensor([-1e4, -100.0, -30.0, 0.0, 19.9, 20.1, 100.0, 1e4]).to(dtype)
    steps = layer.projected[:, -layer.shape.value_heads :]
    steps.copy_(extreme[torch.arange(steps.numel()) % 8].view_as(steps))
    layer.weights.a_log[0] = 5.0  # forgets everything at once
    states = layer.copied()
    out = layer.compute(variant, [[(12, 0, 0)]], states)
    same, same_states = layer.expected([[(12, 0, 0)]], dtype)
    assert error(out, same) < LIMITS[dtype]
    assert error(states.matrices, same_states.matrices) < LIMITS[dtype]


def test_a_token_that_is_no_number_spoils_its_own_sequence_alone(variant, dtype):
    layer = Layer(SHAPES[4], dtype, 6)
    clean = layer.compute(variant, [[(3, 0, 0)], [(3, 1, 1)]], layer.copied())
    layer.projected[1] = torch.nan
    states = layer.copied()
    out = layer.compute(variant, [[(3, 0, 0)], [(3, 1, 1)]], states)
    assert torch.equal(out[0], clean[0]) and torch.equal(out[3:], clean[3:])
    assert out[1:3].isnan().all() and states.matrices[0].isnan().all()


def test_tokens_and_states_may_be_strided(variant, dtype):
    layer = Layer(SHAPES[3], dtype, num_tokens(ROWS))
    expected = layer.compute(variant, ROWS, layer.copied())
    layer.projected = torch.cat([layer.projected, layer.projected], 1)[:, : layer.shape.rows[0]]
    strided = LayerStates(*(torch.stack([tensor, tensor], 1)[:, 1] for tensor in layer.states))
    assert not any(tensor.is_contiguous() for tensor in (layer.projected, *strided))
    assert torch.equal(layer.compute(variant, ROWS, strided), expected)


def test_a_step_without_tokens_computes_nothing(variant, dtype):
    layer = Layer(SHAPES[0], dtype, 0)
    steps: list[Rows] = [[], [[]], [[(0, 2, 2)]]]
    for rows in steps:
        states = layer.copied()
        assert layer.compute(variant, rows, states).shape == (0, SHAPES[0].values)
        assert same_bits(states, layer.states)


def test_arguments_that_do_not_fit_are_refused():
    avx2, shape = kernels("avx2"), SHAPES[3]

    def refused(message: str, layer: Layer, states: LayerStates | None = None, target: int = 0) -> None:
        with pytest.raises(ValueError, match=message):
            layer.compute(avx2, [[(2, 0, target)]], layer.states if states is None else states)

    def layer(**changed: Tensor) -> Layer:
        made = Layer(shape, torch.float32, 2)
        made.weights = made.weights._replace(**changed)
        return made

    wide = layer()
    wide.projected = wide.projected.double()
    refused(r"projected is \(2, 438\) of torch.float64 on cpu", wide)
    refused("float32 and bfloat16, not in torch.float64", layer(taps=layer().weights.taps.double()))
    refused("norm is", layer(norm=torch.ones(shape.value_dim)))
    refused("skip is", layer(skip=torch.ones(shape.value_heads, dtype=torch.float64)))
    refused("conv_bias is", layer(conv_bias=torch.ones(1)))
    plain = layer()
    refused("matrices is", plain, plain.states._replace(matrices=plain.states.matrices.bfloat16()))
    refused("segments do not fit 2 tokens and 8 states", plain, target=NUM_STATES)
    uneven = layer()
    uneven.shape = replace(shape, value_heads=4, key_heads=3)
    refused("no valid sizes", uneven)
