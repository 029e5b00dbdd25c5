"""The kernels for logits against torch: argmax, sampling, log-probabilities, masks; and the bits of their rows."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.batch import Entered
from engine.config import LOGPROBS_MODES
from engine.kernels import library
from engine.kernels.library import Kernels
from engine.kernels.logits import NativeLogits
from engine.runner.logits import ROW_PARAMS, TorchLogits
from engine.runner.sampler import Sampler
from engine.types import SamplingParams
from tests.engine.test_kernels import kernels, needs_library

CPU = torch.device("cpu")
SIZES = [1, 2, 5, 16, 100, 255, 256, 257, 300, 1000, 8193, 40000]

pytestmark = [needs_library, pytest.mark.usefixtures("same_threads_after")]


@pytest.fixture(params=[isa for isa in library.ISAS if isa not in library.BASES])
def variant(request) -> Kernels:
    return kernels(request.param)


@pytest.fixture
def native(variant) -> NativeLogits:
    return NativeLogits(variant)


# -- the best of a vocabulary -----------------------------------------------------------------------------------------


def check_best(variant: Kernels, x: Tensor) -> None:
    values, places = NativeLogits(variant).best(x)
    want_values, want_places = x.max(dim=1)
    want_places = want_places.where(want_values.isfinite(), -1)
    assert torch.equal(places, want_places)
    assert torch.equal(values.nan_to_num(7.5), want_values.nan_to_num(7.5))
    assert torch.equal(values.isnan(), want_values.isnan())


@pytest.mark.parametrize("size", [1, 5, 16, 100, 8191, 8192, 8193, 40000])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_best_equals_torch(variant, size, threads):
    torch.set_num_threads(threads)
    for rows in (0, 1, 3, 17):
        check_best(variant, torch.randn(rows, size))
        check_best(variant, torch.randint(-3, 3, (rows, size)).float())  # many equals: the lowest wins
    check_best(variant, torch.full((2, size), -math.inf))
    check_best(variant, torch.full((2, size), 1e-40))
    check_best(variant, torch.randn(size, 3).T)


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf, 3e38, -0.0])
def test_best_handles_nan_and_infinity_at_any_index(variant, odd):
    for size in (21, 20000):
        x = torch.randn(6, size) if odd else -torch.rand(6, size)
        for row, place in enumerate([0, 1, 15, 16, size // 2, size - 1]):
            x[row, place] = odd
            x[row, size - 1] = odd
        check_best(variant, x)


# -- draws ------------------------------------------------------------------------------------------------------------


def logits_of(rng: random.Random, size: int) -> Tensor:
    """Return one row: smooth, with many equals, flat, with one dominant token, with forbidden tokens, of any scale."""
    x = torch.randn(size) * rng.choice([0.0, 1e-38, 0.01, 1.0, 5.0, 40.0, 1e30])
    if rng.random() < 0.4:
        x = x.bfloat16().float()
    if rng.random() < 0.2:
        x = x.round()
    if rng.random() < 0.2:
        x[rng.randrange(size)] += rng.choice([3.0, 30.0, 1e4])
    if rng.random() < 0.3:
        x[torch.rand(size) < rng.choice([0.1, 0.9, 1.0])] = -math.inf
        x[rng.randrange(size)] = rng.choice([0.0, 2.0])  # one is left, or more
    if rng.random() < 0.1:
        x[rng.randrange(size)] = -3e38
    return x


def ask(rng: random.Random, size: int) -> tuple[float, ...]:
    return (
        rng.choice([0.0, 1e-5, 0.01, 0.3, 0.7, 1.0, 1.0, 1.7, 50.0, 1e30]),
        rng.choice([1.0, 1.0, 0.0, 1e-9, 0.05, 0.5, 0.9, 0.95, 0.999999, rng.random()]),
        rng.choice([0.0, 0.0, 0.0, 1e-20, 0.01, 0.3, 1.0, rng.random()]),
        rng.choice([0.0, 1.0 - 2.0**-53, rng.random(), rng.random(), rng.random()]),
        max(1, rng.choice([size, size, size + 9, 1, 2, 40, size // 2, size - 1, rng.randrange(1, size + 1)])),
    )


def cases(rng: random.Random, size: int, rows: int) -> tuple[Tensor, NDArray]:
    x = torch.stack([logits_of(rng, size) for _ in range(rows)])
    return x, np.array([ask(rng, size) for _ in range(rows)], ROW_PARAMS)


@pytest.mark.parametrize("size", SIZES)
def test_sampling_equals_torch(native, size):
    rng = random.Random(size)
    oracle = TorchLogits(size, CPU)
    for rows in (1, 2, 7, 30):
        x, asked = cases(rng, size, rows)
        for found, want in zip(native.sample(x, asked), oracle.sample(x, asked), strict=True):
            assert torch.equal(found, want), asked[found != want]


def test_edges_of_filters_equal_torch(native):
    """For a small vocabulary the kept tokens and their probabilities are equal."""
    size, rng = 50, random.Random(1)
    u = (np.arange(400) + 0.5) / 400
    for _ in range(12):
        x, asked = cases(rng, size, 1)
        asked = np.repeat(asked, len(u))
        asked["u"] = u
        x = x.repeat(len(u), 1)
        assert torch.equal(native.sample(x, asked)[1], TorchLogits(size, CPU).sample(x, asked)[1]), asked[0]


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_row_samples_the_same_alone_in_any_order_and_on_any_threads(native, threads):
    rng = random.Random(7)
    x, asked = cases(rng, 20011, 21)
    torch.set_num_threads(1)
    alone = torch.cat([native.sample(x[i : i + 1], asked[i : i + 1])[1] for i in range(len(x))])
    torch.set_num_threads(threads)
    for _ in range(5):
        order = rng.sample(range(len(x)), rng.randrange(1, len(x) + 1))
        assert torch.equal(native.sample(x[order], asked[order])[1], alone[order])
    assert torch.equal(native.sample(x.T.contiguous().T, asked)[1], alone)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_row_without_a_finite_maximum_gets_index_minus_1_and_affects_no_other(native, value):
    x, asked = cases(random.Random(3), 3000, 6)
    want = native.sample(x, asked)[1]
    x[1, 70], x[4] = value, -math.inf
    top, places = native.sample(x, asked)
    assert torch.equal(places[[0, 2, 3, 5]], want[[0, 2, 3, 5]])
    assert not top[[1, 4]].isfinite().any() and places[[1, 4]].tolist() == [-1, -1]
    oracle = TorchLogits(3000, CPU)
    assert torch.equal(oracle.sample(x, asked)[1], places)


# -- the distribution that is sampled ---------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_processed_logits_equal_torch(native, size):
    rng = random.Random(size)
    oracle = TorchLogits(size, CPU)
    for rows in (1, 2, 7, 30):
        x, asked = cases(rng, size, rows)
        if rows == 7:
            x[2], x[4, size // 2] = -math.inf, math.nan
        before = x.clone()
        found, want = native.processed(x, asked), oracle.processed(x, asked)
        for row in range(rows):
            assert found[row].equal(want[row]) or found[row].isnan().any(), asked[row]
        assert torch.equal(x.nan_to_num(7.5), before.nan_to_num(7.5)), "the logits stay, because they are sampled from"


def test_processed_probabilities_are_the_frequencies_of_samples(native):
    size, rng = 50, random.Random(4)
    u = (np.arange(4000) + 0.5) / 4000
    for _ in range(12):
        x, asked = cases(rng, size, 1)
        asked["temperature"] = max(0.3, asked["temperature"][0])
        probabilities = native.processed(x, asked).double().softmax(1)[0]
        asked = np.repeat(asked, len(u))
        asked["u"] = u
        sampled = native.sample(x.repeat(len(u), 1), asked)[1].bincount(minlength=size) / len(u)
        torch.testing.assert_close(sampled.double(), probabilities, rtol=0.0, atol=1 / len(u))


# -- log-probabilities ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_log_probabilities_are_those_in_float64(native, size):
    rng = random.Random(size)
    for count in sorted({0, min(5, size), size // 3}):
        x = torch.stack([logits_of(rng, size) for _ in range(6)])
        ids = torch.tensor([rng.randrange(size) for _ in range(6)])
        found = native.distribution(x, count).columns(ids)
        exact = x.double().log_softmax(1)
        want = TorchLogits(size, CPU).distribution(x.double(), count).columns(ids)
        torch.testing.assert_close(found[:, 0], exact.gather(1, ids.unsqueeze(1)).squeeze(1), rtol=1e-7, atol=1e-7)
        torch.testing.assert_close(found[:, 1 : 1 + count], want[:, 1 : 1 + count], rtol=1e-7, atol=1e-7)
        order = (-x).sort(dim=1, stable=True).indices
        assert torch.equal(found[:, 1 + count :], order[:, :count].double())


def test_log_probabilities_have_the_same_bits_alone_and_on_any_threads(native):
    rng = random.Random(5)
    x = torch.stack([logits_of(rng, 20011) for _ in range(9)])
    ids = torch.arange(9) * 7
    torch.set_num_threads(1)
    alone = torch.cat([native.distribution(x[i : i + 1], 5).columns(ids[i : i + 1]) for i in range(9)])
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        order = rng.sample(range(9), 9)
        assert torch.equal(native.distribution(x[order], 5).columns(ids[order]), alone[order])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_log_probabilities_of_nan_are_nan(native, value):
    x = torch.randn(4, 900)
    want = native.distribution(x, 3).columns(torch.arange(4))
    x[1, 70], x[2] = value, -math.inf
    found = native.distribution(x, 3).columns(torch.arange(4))
    assert torch.equal(found[[0, 3]], want[[0, 3]]) and found[1:3, :4].isnan().all()


# -- masks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_masks_equal_torch(native, size):
    rng = np.random.default_rng(size)
    for chosen in ([0], [2, 4], [0, 1, 2, 3, 4]):
        x = torch.randn(5, size)
        bits = rng.integers(-(2**31), 2**31, (len(chosen), -(-size // 32))).astype(np.int32)
        want = x.clone()
        native.forbid(x, np.array(chosen), bits)
        TorchLogits(size, CPU).forbid(want, np.array(chosen), bits)
        assert torch.equal(x, want)


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("x", [torch.randn(2, 9).double(), torch.randn(9), torch.randn(2, 9).bfloat16()])
def test_kernels_refuse_unsupported_tensors(native, x):
    asked, bits = np.zeros(2, ROW_PARAMS), np.zeros((2, 1), np.int32)
    calls = native.best, lambda x: native.sample(x, asked), lambda x: native.distribution(x, 1)
    calls += (lambda x: native.processed(x, asked),)
    for call in (*calls, lambda x: native.forbid(x, np.arange(2), bits)):
        with pytest.raises(ValueError, match="not \\[rows, vocab\\] of float32"):
            call(x)


def test_a_mask_that_is_too_narrow_is_refused(native):
    for x in (torch.randn(1, 33), torch.randn(9, 1).T):
        with pytest.raises(ValueError, match="side by side"):
            native.forbid(x, np.arange(1), np.zeros((1, 1 if x.shape[1] == 33 else 0), np.int32))


# -- the sampler ------------------------------------------------------------------------------------------------------


def entries(drawn) -> dict:
    return {row: (entry.logprob, *entry.top_logprobs) for row, entry in drawn.logprobs.items()}


@pytest.mark.parametrize("mode", LOGPROBS_MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_sampler_draws_the_same_with_kernels_and_without(variant, dtype, mode):
    rng = random.Random(2)
    for seed in range(20):
        logits = (torch.randint(-40, 40, (5, 300)) / rng.choice([1, 8])).to(dtype)
        logits[3, 7] = math.nan
        drawn, bits = [], np.random.default_rng(seed).integers(-(2**31), 2**31, (2, 10)).astype(np.int32)
        ask = [
            SamplingParams(
                max_tokens=9,
                temperature=rng.choice([0.0, 0.7]),
                top_p=rng.choice([1.0, 0.8]),
                top_k=rng.choice([0, 9]),
                presence_penalty=rng.choice([0.0, 0.0, 1.0]),
                seed=slot,
                logprobs=rng.choice([None, 0, 4]),
            )
            for slot in range(5)
        ]
        for packed in (variant, None):
            sampler = Sampler(5, 300, CPU, None if packed is None else NativeLogits(packed), mode)
            for slot in range(5):
                sampler.add(slot, Entered(slot, ask[slot], 1, [8, 9] if ask[slot].uses_history else []))
            masks = (np.array([0, 2]), bits) if seed % 2 else None
            drawn.append(sampler.sample(logits.clone(), np.arange(5), np.full(5, 9), masks).tokens())
        assert drawn[0].token_ids == drawn[1].token_ids and drawn[0].errors == drawn[1].errors
        assert list(drawn[0].errors) == [3]
        assert entries(drawn[0]).keys() == entries(drawn[1]).keys()
        for row, numbers in entries(drawn[1]).items():
            assert entries(drawn[0])[row] == pytest.approx(numbers, abs=1e-5)
