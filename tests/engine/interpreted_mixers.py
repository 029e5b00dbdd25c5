"""The Triton kernels of short convolutions and of Mamba2 in Triton's interpreter; test_paged_gpu.py runs this file.

    TRITON_INTERPRET=1 python -m pytest tests/engine/interpreted_mixers.py

The interpreter truncates where a GPU rounds to bfloat16, so rounding is compared in float16, and bfloat16 in trials.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from engine.models.gpu import mamba2 as gpu_mamba2
from engine.models.gpu import short_conv as gpu_short_conv
from engine.models.gpu import states as gpu_states
from engine.models.gpu.states import TRIAL_ROWS
from engine.models.mixers import mamba2, short_conv
from engine.models.mixers import mixer as mixers
from engine.models.mixers.mixer import gpu_jobs, gpu_limitation, make_mixer
from engine.models.mixers.states import ConvShape, LayerStates, LinearShape, Mamba2Shape, MixerShape, Segments
from tests.engine.interpreter import prepare
from tests.engine.test_attention import CPU

prepare()
TOLERANCE = {torch.float32: 2e-5, torch.float16: 5e-3}
Row = Sequence[tuple[int, int, int]]
ANY = 0.0, math.inf


def mamba(*sizes: int, bias: bool = True, limits: tuple[float, float] = ANY) -> Mamba2Shape:
    return Mamba2Shape(*sizes, has_bias=False, has_conv_bias=bias, limits=limits)


CONV, MAMBA = ConvShape(48, 3, has_bias=True), mamba(2, 4, 32, 16, 4)
SHAPES: dict[str, MixerShape] = {
    "conv": CONV,
    "conv without bias": ConvShape(64, 4, has_bias=False),
    "conv in parts": ConvShape(300, 3, has_bias=True),
    "conv without window": ConvShape(16, 1, has_bias=True),
    "mamba": MAMBA,
    "as in Granite 4.0": mamba(1, 4, 128, 64, 4),
    "no powers of two": mamba(1, 3, 9, 33, 3, bias=False),
    "largest": mamba(1, 1, 256, 256, 2, limits=(0.5, 1.0)),
    "no window": mamba(3, 3, 1, 8, 1),
    "many heads": mamba(1, 130, 4, 2, 4),
}
BOTH = pytest.mark.parametrize("shape", [CONV, MAMBA], ids=["conv", "mamba"])


@dataclass
class Layer:
    """Random weights, the input of tokens, and states."""

    shape: MixerShape
    dtype: torch.dtype = torch.float32
    tokens: int = 64

    def __post_init__(self) -> None:
        self.weights, self.projected, self._states = self.module._tensors(
            self.shape, self.dtype, CPU, self.tokens, is_random=True
        )

    @property
    def module(self) -> ModuleType:
        return gpu_mamba2 if isinstance(self.shape, Mamba2Shape) else gpu_short_conv

    @property
    def by_kernels(self) -> Callable[..., Tensor]:
        return gpu_mamba2.mamba2 if isinstance(self.shape, Mamba2Shape) else gpu_short_conv.gated_conv

    @property
    def by_torch(self) -> Callable[..., Tensor]:
        return mamba2.mamba2 if isinstance(self.shape, Mamba2Shape) else short_conv.gated_conv

    def states(self) -> LayerStates:
        """Return the same random states at each call."""
        return LayerStates(*(each.clone() for each in self._states))

    def compute(self, states: LayerStates, rows: Sequence[Row], tokens: Tensor) -> Tensor:
        """Return the kernels' results for these tokens."""
        segments = Segments.of(rows)
        assert segments.begin_list[-1] == len(tokens)
        return self.by_kernels(self.weights, self.projected[tokens], states, segments)

    def both(self, rows: Sequence[Row]) -> tuple[Tensor, LayerStates, Tensor, LayerStates]:
        """Return the results and states of a step by the kernels, and those by torch."""
        segments, ours, theirs = Segments.of(rows), self.states(), self.states()
        projected = self.projected[: segments.begin_list[-1]]
        found = self.by_kernels(self.weights, projected, ours, segments)
        return found, ours, self.by_torch(self.weights, projected, theirs, segments), theirs

    def compare(self, rows: Sequence[Row]) -> None:
        """Compare the results and all states of a step with those of torch."""
        found, ours, want, theirs = self.both(rows)
        assert torch.equal(ours.windows, theirs.windows), "windows are copies"
        tolerance = TOLERANCE[self.dtype]
        for one, other in ((found, want), (ours.matrices, theirs.matrices)):
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return all(torch.equal(*each) for each in zip(one, other, strict=True))


@pytest.mark.parametrize(
    "name, dtype",
    [
        *((name, torch.float32) for name in SHAPES),
        *((name, torch.float16) for name in ("conv", "conv in parts", "mamba", "no powers of two")),
    ],
)
def test_a_step_of_any_segments_equals_torch(name, dtype):
    Layer(SHAPES[name], dtype).compare(TRIAL_ROWS)


@BOTH
def test_numbers_are_rounded_where_torch_rounds_them(shape):
    found, ours, want, theirs = Layer(shape, torch.float16).both(TRIAL_ROWS)
    # Some are in the middle between two numbers.
    assert (found == want).float().mean() > 0.99
    assert torch.equal(ours.windows, theirs.windows)
    if theirs.matrices.numel():
        errors = (ours.matrices - theirs.matrices).abs() / theirs.matrices.abs()
        assert errors.quantile(0.9) < 1e-5


@BOTH
def test_steps_of_decodes_and_of_copies_equal_torch(shape):
    layer = Layer(shape)
    layer.compare([[(1, state, state)] for state in (3, 0, 7, 5)])
    layer.compare([[(0, 1, 2)], [(0, -1, 4), (0, 4, 5)]])
    layer.compare([])


@BOTH
@pytest.mark.parametrize("rows", [2, 3, 7], ids=lambda rows: f"{rows} rows at once")
def test_rows_are_searched_for_in_several_parts(shape, rows, monkeypatch):
    layer = Layer(shape)
    monkeypatch.setattr(layer.module, "SEARCHED_ROWS", 2)
    layer.module._constants.cache_clear()
    layer.compare([[(1 + row % 2, row, row)] for row in range(rows)])
    layer.module._constants.cache_clear()


@BOTH
def test_tokens_are_convolved_in_several_tiles_with_what_is_before_them(shape):
    Layer(shape).compare([[(15, 0, 0)], [(2, 1, 1), (18, 1, 2)], [(29, -1, 3)]])


@BOTH
def test_a_row_has_the_same_bits_beside_any_others(shape):
    layer = Layer(shape)
    together = layer.states()
    rows = [(5, 0, 1), (1, 2, 2), (19, -1, 3), (1, 4, 4)]
    results = layer.compute(together, [[row] for row in rows], torch.arange(26))
    for row, tokens in zip(rows, torch.arange(26).split([count for count, _, _ in rows]), strict=True):
        alone, target = layer.states(), row[2]
        assert torch.equal(layer.compute(alone, [[row]], tokens), results[tokens])
        assert same([each[target] for each in alone], [each[target] for each in together])


@BOTH
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
def test_a_sequence_has_the_same_bits_however_it_is_divided(shape, steps: list[list[tuple[int, int, int]]]):
    layer, results, at = Layer(shape), [], 0
    whole, divided = layer.states(), layer.states()
    want = layer.compute(whole, [[(23, -1, 0)]], torch.arange(23))
    for row in steps:
        count = sum(tokens for tokens, _, _ in row)
        results.append(layer.compute(divided, [row], torch.arange(at, at + count)))
        at += count
    assert torch.equal(torch.cat(results), want)
    assert same([each[0] for each in divided], [each[0] for each in whole])


@BOTH
def test_padding_changes_nothing_and_nothing_else_is_read(shape):
    """Rows without segments and tokens of no row come after the others, and so do numbers of no segment."""
    layer = Layer(shape)
    ours, padded = layer.states(), layer.states()
    rows = [[(3, 1, 1)], [(1, -1, 4)]]
    want = layer.compute(ours, rows, torch.arange(4))
    segments = Segments.of(rows)
    row_start = F.pad(segments.row_start, (0, 3), value=2)
    begin, source, target = (
        F.pad(each, (0, 9), value=1 << 30) for each in (segments.begin, segments.source, segments.target)
    )
    lists: Any = dict.fromkeys(("begin_list", "source_list", "target_list"))  # they are not used
    segments = replace(segments, row_start=row_start, begin=begin, source=source, target=target, **lists)
    for each in padded:  # of states that no row reads
        each[[0, 2, 3, 4, 5, 6, 7]] = math.nan
    projected = layer.projected[:23].clone()
    projected[4:] = math.nan
    found = layer.by_kernels(layer.weights, projected, padded, segments)
    assert torch.equal(found[:4], want)
    for one, other in zip(padded, ours, strict=True):
        assert torch.equal(one[[1, 4]], other[[1, 4]])
        assert one[[0, 2, 3, 5, 6, 7]].isnan().all()


@pytest.mark.parametrize("limits", [ANY, (0.001, 0.1), (0.0, 20.0)])
def test_time_steps_of_large_numbers_equal_torch(limits):
    layer = Layer(replace(MAMBA, limits=limits))
    steps = layer.projected[:, -MAMBA.value_heads :]
    steps.mul_(60)
    steps[:4] = torch.tensor([-200.0, -88.0, 19.9, 200.0])[:, None]
    layer.projected[:, : -MAMBA.value_heads] /= 8
    layer.compare([[(30, 0, 0)]])


def test_slow_decays_are_exact():
    """The errors of decays near 1 add up over the tokens: so small rates have a small relative error, too."""
    layer = Layer(MAMBA)
    steps = layer.projected[:, -MAMBA.value_heads :]
    steps.copy_(torch.linspace(-18, -6, 64)[:, None].expand_as(steps))
    layer.weights.weights.dt_bias.zero_()
    layer.weights.weights.a_log.fill_(math.log(16.0))
    layer.projected[:, MAMBA.values : -MAMBA.value_heads] = 0  # so that a state only decays
    layer.weights.weights.conv_bias.zero_()
    states, rate = layer.states(), 16 * F.softplus(steps[:, 0].double()).sum()
    states.windows.zero_()
    before = states.matrices[0].double()
    layer.compute(states, [[(64, 0, 0)]], torch.arange(64))
    torch.testing.assert_close(states.matrices[0].double(), before * torch.exp(-rate), rtol=3e-6, atol=0)


@pytest.mark.parametrize(
    "name, dtype",
    [
        *((name, torch.float32) for name in SHAPES if name != "many heads"),
        *((name, dtype) for name in ("conv", "mamba") for dtype in (torch.float16, torch.bfloat16)),
    ],
)
def test_the_trial_of_each_shape_finds_no_error(name, dtype):
    assert Layer(SHAPES[name]).module.objection(SHAPES[name], dtype, CPU) is None


@BOTH
def test_the_kernels_are_tried_and_what_they_cannot_compute_has_a_reason(shape, monkeypatch):
    module = Layer(shape).module
    what, function = ("Mamba2", "mamba2") if shape is MAMBA else ("short convolutions", "gated_conv")
    assert module.objection(shape, torch.float64, CPU) == "the Triton kernels do not compute in float64"
    assert list(gpu_jobs(shape, torch.float64)) == []
    compute = getattr(module, function)

    def wrong(*args) -> Tensor:
        found = compute(*args)
        args[-2].windows[2] = math.nan  # a state that a row has written
        return found

    monkeypatch.setattr(module, function, wrong)
    reason = module.objection(shape, torch.bfloat16, CPU)
    assert reason == f"the Triton kernels compute wrong results of {what} on this device (relative error nan)"

    def broken(*_: object) -> Tensor:
        raise RuntimeError("out of resource: shared memory\nmore")

    monkeypatch.setattr(module, function, broken)
    reason = module.objection(shape, torch.bfloat16, CPU)
    assert reason == "the Triton kernels do not run on this device: RuntimeError: out of resource: shared memory"
    monkeypatch.setattr(gpu_states, "is_interpreted", lambda: False)
    assert module.objection(shape, torch.bfloat16, CPU) == "the Triton kernels need a CUDA device"


@pytest.mark.parametrize("shape", [LinearShape(2, 4, 32, 16, 4), CONV, MAMBA], ids=["delta", "conv", "mamba"])
def test_mixers_of_one_shape_are_tried_once_and_torch_computes_what_the_kernels_cannot(shape, monkeypatch):
    tried, module = [], mixers._on_gpu(shape)[0]
    objection = module.objection
    monkeypatch.setattr(module, "objection", lambda *args: tried.append(args) or objection(*args))
    layers = [make_mixer(shape, 16, 1e-6, torch.float32, CPU) for _ in range(3)]
    assert not any(mixer is None or mixer.is_capturable for mixer in layers)
    mixers.use_gpu(layers, torch.float32, CPU)
    assert all(mixer.is_capturable and mixer.objection is None for mixer in layers) and len(tried) == 1
    assert mixers.by_torch(layers) == ""
    wide = make_mixer(shape, 16, 1e-6, torch.float64, CPU)
    mixers.use_gpu([wide], torch.float64, CPU)
    assert not wide.is_capturable and wide.objection == "the Triton kernels do not compute in float64"
    assert mixers.by_torch([layers[0], wide]).endswith(": the Triton kernels do not compute in float64")


def test_mamba_of_too_large_sizes_has_a_limitation():
    heads = gpu_limitation(replace(MAMBA, key_dim=257), torch.float32)
    assert heads == "the Triton kernels serve Mamba2 with heads of up to 256 numbers"
    group = gpu_limitation(mamba(1, 128, 128, 129, 4), torch.float32)
    assert group == "the Triton kernels serve Mamba2 with norms over up to 16384 numbers"
