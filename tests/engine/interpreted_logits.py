"""The Triton kernels for logits in Triton's interpreter, against torch; test_paged_gpu.py runs this file.

TRITON_INTERPRET=1 python -m pytest tests/engine/interpreted_logits.py
TRITON_INTERPRET=1 python -m tests.engine.interpreted_logits --rows 10000    # random rows, until one differs
"""

from __future__ import annotations

import argparse
import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from engine.batch import Entered
from engine.kernels.gpu import changes as change_kernels
from engine.kernels.gpu import logit_numbers, shortlist
from engine.kernels.gpu import logits as kernels
from engine.runner import logits_choice, triton_logits
from engine.runner.logits import ROW_PARAMS, TorchLogits
from engine.runner.sampler import Sampler
from engine.runner.triton_logits import TritonLogits
from engine.types import SamplingParams
from tests.engine.interpreter import prepare
from tests.engine.test_logits import cases
from tests.engine.test_sampler import random_history, random_params

prepare()
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Tiles and parts that a small vocabulary fills, so that the interpreter has little to do."""
    monkeypatch.setattr(triton_logits, "TILE", 128)
    monkeypatch.setattr(triton_logits, "TILES", 4)
    monkeypatch.setattr(triton_logits, "GROUP", 16)


def compare(rng: random.Random, size: int, rows: int) -> None:
    """Compare sampled tokens of random rows with torch's. The filters' edges show in the tokens of many rows."""
    x, params = cases(rng, size, rows)
    pairs = zip(TritonLogits(size, CPU).sample(x, params), TorchLogits(size, CPU).sample(x, params), strict=True)
    for found, want in pairs:
        assert torch.equal(found, want), (size, params[(found != want).numpy()])


@pytest.mark.parametrize("size", [1, 31, 257, 1100])
def test_tokens_equal_those_of_torch(size):
    rng = random.Random(size)
    torch.manual_seed(size)
    for rows in (1, 29):
        compare(rng, size, rows)


def test_tokens_equal_those_of_torch_in_full_tiles(monkeypatch):
    monkeypatch.undo()
    torch.manual_seed(3)
    compare(random.Random(3), triton_logits.TILE * triton_logits.TILES + 5, 4)


def test_kept_tokens_equal_those_of_torch():
    """With evenly spread random numbers every kept token of a small vocabulary is sampled, at its own edges."""
    size, rng, u = 20, random.Random(1), (np.arange(20) + 0.5) / 20
    torch.manual_seed(1)
    for _ in range(3):
        x, params = cases(rng, size, 1)
        params = np.repeat(params, len(u))
        params["u"] = u
        x = x.repeat(len(u), 1)
        found, want = (backend(size, CPU).sample(x, params)[1] for backend in (TritonLogits, TorchLogits))
        assert torch.equal(found, want), params[0]


def test_a_target_at_the_end_of_a_part_is_in_the_next_part():
    size = 2 * triton_logits.TILE * triton_logits.TILES
    x, params = torch.zeros(1, size), np.array([(1.0, 1.0, 0.0, 0.5, size)], ROW_PARAMS)
    x[0, 0] = x[0, size // 2] = -math.inf  # half of the weights are in each part
    for backend in (TritonLogits, TorchLogits):
        assert backend(size, CPU).sample(x, params)[1].tolist() == [size // 2 + 1]


def test_top_p_keeps_the_token_that_exceeds_it_by_half_a_unit():
    x = torch.tensor([[0.0, -0.5, -3.0]])
    weights = (x.double().exp().float() * 2.0**44).floor().double()
    share = float((weights[0, 0] + 0.5) / weights.sum())
    params = np.array([(1.0, share, 0.0, 0.99, 3)], ROW_PARAMS)
    for backend in (TritonLogits, TorchLogits):
        assert backend(3, CPU).sample(x, params)[1].tolist() == [1]


def test_logits_that_differ_in_their_last_bits_are_filtered_as_in_torch():
    """All digits of the thresholds matter. Each row has an edge of its own."""
    size, rows = 200, 12
    x = (5 + 2.0**-21 * torch.randperm(size, generator=torch.Generator().manual_seed(0))).repeat(rows, 1)
    x[:, 150:] -= torch.arange(50) / 7
    edges = [(0.08 * row + 0.08, size) if row % 2 else (1.0, 17 * row + 5) for row in range(rows)]
    params = np.array([(3.0, top_p, 0.0, 0.999, top_k) for top_p, top_k in edges], ROW_PARAMS)
    found, want = (backend(size, CPU).sample(x, params)[1] for backend in (TritonLogits, TorchLogits))
    assert torch.equal(found, want)


SHORT, LONG = ["find_bound", "shortlist", "draw_listed"], ["weigh", "count_digit", "sum_digit", "sum_kept"]


ROWS = 12  # each with logits of its own, and a random number of its own


def peaked(size: int) -> Tensor:
    """Return logits of rows of which a few tokens have nearly all of the weight."""
    x = torch.randn(ROWS, size, generator=torch.Generator().manual_seed(2))
    x[:, :: size // 8] += 9
    return x


@pytest.mark.parametrize("unused", [SHORT, LONG])
@pytest.mark.parametrize("top_p, top_k", [(1.0, 5), (0.8, 30), (0.9, 1 << 62), (0.0, 1 << 62)])
def test_a_short_list_and_the_long_way_draw_the_same_tokens(monkeypatch, unused, top_p, top_k):
    """Without the kernels of one way, the other one draws."""
    size = 1500
    x, params = peaked(size), np.array([(0.9, top_p, 0.001, 0.0, top_k)] * ROWS, ROW_PARAMS)
    params["u"] = (np.arange(ROWS) + 0.5) / ROWS
    want = TorchLogits(size, CPU).sample(x, params)
    for name in unused:
        monkeypatch.setattr(shortlist if name in SHORT else kernels, name, Nothing())
    found = TritonLogits(size, CPU).sample(x, params)
    assert all(torch.equal(mine, wanted) for mine, wanted in zip(found, want, strict=True))


@pytest.mark.parametrize("unused", [SHORT, LONG])
def test_top_p_ends_at_the_token_that_reaches_it_exactly(monkeypatch, unused):
    x = torch.full((1, 1500), -60.0)
    x[0, [0, 500, 1000]] = torch.tensor([0.0, -0.5, -3.0])
    weights = (x.double().exp().float() * 2.0**44).floor().double()
    share = float(weights[0, 0] / weights.sum())
    assert math.ceil(share * float(weights.sum())) == weights[0, 0]
    params = np.array([(1.0, share, 0.0, 0.99, 3)], ROW_PARAMS)
    for name in unused:
        monkeypatch.setattr(shortlist if name in SHORT else kernels, name, Nothing())
    for backend in (TritonLogits, TorchLogits):
        assert backend(1500, CPU).sample(x, params)[1].tolist() == [0]


def test_the_constants_of_launches_and_kernels_are_the_same():
    assert (logit_numbers.STATE.value, shortlist.LENGTH.value) == (triton_logits.STATE, triton_logits.LENGTH)


def test_a_vocabulary_whose_last_part_is_mostly_empty_has_short_lists(monkeypatch):
    """Groups without logits do not count."""
    size = triton_logits.TILE * triton_logits.TILES + 5
    x, params = peaked(size), np.array([(0.9, 0.9, 0.0, 0.3, 1 << 62)] * ROWS, ROW_PARAMS)
    monkeypatch.setattr(shortlist, "NUCLEUS", type(shortlist.NUCLEUS)(1000))  # as many as there are groups
    want = TorchLogits(size, CPU).sample(x, params)[1]
    for name in LONG:
        monkeypatch.setattr(kernels, name, Nothing())
    assert torch.equal(TritonLogits(size, CPU).sample(x, params)[1], want)


def test_masks_that_leave_fewer_tokens_than_top_k_are_drawn_the_long_way():
    x, params = torch.full((2, 600), -math.inf), np.array([(1.0, 1.0, 0.0, 0.6, 9)] * 2, ROW_PARAMS)
    x[0, [3, 300]], x[1, 7] = 1.0, 2.0
    found, want = (backend(600, CPU).sample(x, params)[1] for backend in (TritonLogits, TorchLogits))
    assert torch.equal(found, want)


def test_lists_that_are_too_long_or_hold_too_little_are_left_to_the_long_way():
    """More equal logits than a list holds, and a share of the weight that needs more tokens than it has."""
    size = 2 * triton_logits.LENGTH
    x = torch.zeros(3, size)
    x[1] = torch.linspace(0, 1, size)
    x[2, 7] = 9.0
    params = np.array([(1.0, 1.0, 0.0, 0.7, 3), (1.0, 0.9, 0.0, 0.7, 1 << 62), (1.0, 0.5, 0.0, 0.7, 3)], ROW_PARAMS)
    found, want = (backend(size, CPU).sample(x, params)[1] for backend in (TritonLogits, TorchLogits))
    assert torch.equal(found, want)


def test_the_exponential_is_that_of_torch_rounded_to_float32():
    """A weight is 2^44 times the exponential, so it shows each bit of it: for logits below 0, at all magnitudes."""
    torch.manual_seed(0)
    x = -torch.cat([32 * torch.rand(1000), 2.0 ** -torch.linspace(-5, 60, 1000), torch.tensor([0.0, 30.6, 31, 32])])
    params = np.array([(1.0, 1.0, 0.0, 0.5, 1 << 62), (0.37, 1.0, 0.0, 0.5, 1 << 62)], ROW_PARAMS)
    x = torch.cat([torch.zeros(1), x]).repeat(2, 1)
    weights = weights_of(x, params)
    scaled = x * torch.tensor([[1.0], [1 / 0.37]])
    assert torch.equal(weights, (scaled.double().exp().float() * 2.0**44).floor())


def weights_of(x: Tensor, params: Any) -> Tensor:
    """Return the weights that `weigh` stores."""
    backend, weights = TritonLogits(x.shape[1], CPU), torch.empty_like(x)
    state, counts, sums = backend._memory(x)
    parts = torch.empty(len(x), backend._parts, dtype=torch.int64)
    rows = torch.from_numpy(triton_logits.fields_of(params, x.shape[1]).view(np.int64))
    grid = len(x), backend._parts
    kernels.find_top[grid](x, state, counts, GROUP=0, **backend._tiles)
    kernels.weigh[grid](x, rows, state, counts, sums, weights, parts, SAMPLE=True, **backend._in_parts)
    assert torch.equal(parts.sum(1), weights.long().sum(1))
    return weights


def test_the_lowest_of_equal_logits_is_the_largest_and_nan_is_larger():
    backend = TritonLogits(600, CPU)
    x = torch.randn(7, 600).round()
    x[1, 40], x[1, 500] = math.nan, math.inf
    x[2, 299], x[3] = math.inf, -math.inf
    x[4], x[4, 10] = -0.0, 0.0
    x[5] = -1e-40
    x[6, 599] = 3e38
    for found, want in zip(backend.best(x), TorchLogits(600, CPU).best(x), strict=True):
        assert torch.equal(found.nan_to_num(7.5), want.nan_to_num(7.5))
    assert backend.best(x[:0])[1].shape == (0,)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_row_without_a_finite_maximum_gets_index_minus_1_and_affects_no_other(value):
    x, params = cases(random.Random(3), 300, 4)
    backend = TritonLogits(300, CPU)
    want, entries = backend.sample(x, params)[1], backend.distribution(x, 3).columns(torch.arange(4))
    x[1, slice(None) if value == -math.inf else 70] = value
    others = [0, 2, 3]
    ids, found = backend.sample(x, params)[1], backend.distribution(x, 3).columns(torch.arange(4))
    assert ids[1] == -1 and torch.equal(ids[others], want[others])
    assert found[1, :4].isnan().all() and torch.equal(found[others], entries[others])


def test_a_row_is_the_same_alone_and_beside_others():
    x, params = cases(random.Random(7), 300, 4)
    backend = TritonLogits(300, CPU)
    together = backend.sample(x, params)[1]
    assert torch.equal(torch.cat([backend.sample(x[i : i + 1], params[i : i + 1])[1] for i in range(4)]), together)
    entries = backend.distribution(x, 4).columns(torch.arange(4))
    alone = [backend.distribution(x[i : i + 1], 4).columns(torch.tensor([i])) for i in range(4)]
    assert torch.equal(torch.cat(alone), entries)


@pytest.mark.parametrize("size", [1, 257, 1100])
def test_log_probabilities_are_those_in_float64(size):
    rng = random.Random(size)
    torch.manual_seed(size)
    x, _ = cases(rng, size, 3)
    ids = torch.tensor([rng.randrange(size) for _ in range(3)])
    for count in sorted({0, min(5, size), size}):
        found = TritonLogits(size, CPU).distribution(x, count).columns(ids)
        want = TorchLogits(size, CPU).distribution(x.double(), count).columns(ids)
        torch.testing.assert_close(found[:, : 1 + count], want[:, : 1 + count], rtol=1e-7, atol=1e-7)
        order = (-x).sort(dim=1, stable=True).indices  # in float64 some log-probabilities are equal
        assert torch.equal(found[:, 1 + count :], order[:, :count].double())


@pytest.mark.parametrize("size", [5, 300])
def test_masks_equal_those_of_torch(size):
    rng = np.random.default_rng(size)
    for rows in ([0], [2, 4], [0, 1, 2, 3, 4], []):
        x = torch.randn(5, size)
        want = x.clone()
        bits = rng.integers(-(2**31), 2**31, (len(rows), -(-size // 32))).astype(np.int32)
        for backend, changed in (TritonLogits(size, CPU), x), (TorchLogits(size, CPU), want):
            backend.forbid(changed, np.array(rows, np.int64), bits)
        assert torch.equal(x, want)


def test_what_the_kernels_cannot_read_is_refused():
    backend = TritonLogits(40, CPU)
    for x in (torch.randn(2, 40).double(), torch.randn(2, 39), torch.randn(40)):
        with pytest.raises(ValueError, match="not \\[rows, 40\\] of float32"):
            backend.best(x)
    with pytest.raises(ValueError, match="must be contiguous"):
        backend.forbid(torch.randn(40, 2).T, np.arange(1), np.zeros((1, 2), np.int32))
    with pytest.raises(ValueError, match="masks of 32 tokens for a vocabulary of 40"):
        backend.forbid(torch.randn(2, 40), np.arange(1), np.zeros((1, 1), np.int32))


def test_rows_that_begin_anywhere_are_moved_to_where_kernels_need_no_other_code():
    backend = TritonLogits(39, CPU)
    x = torch.randn(5, 39)
    for rows in (x, x[1:3], x[4:]):
        checked = backend._checked(rows)
        assert checked.data_ptr() % 16 == 0 and torch.equal(checked, rows)


# -- the sampler ------------------------------------------------------------------------------------------------------


def sampled(seed: int, size: int, rows: int, backend: Any) -> Any:
    """Sample a step of random logits, parameters, histories and masks."""
    rng, numbers = random.Random(seed), np.random.default_rng(seed)
    logits = torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * 3
    if seed % 2:
        logits = logits.bfloat16().float()
    logits[rows - 1, 7] = rng.choice([0.0, math.nan])
    sampler = Sampler(rows, size, CPU, backend)
    positions = np.array([rng.randrange(9) for _ in range(rows)])
    for slot in range(rows):
        params = random_params(rng, size)
        if rng.random() < 0.2:
            params = SamplingParams(max_tokens=9, allowed_ids=(1, 5, 9), bad_words=((4,), (3, 5)), seed=slot)
        history = random_history(rng, size)
        sampler.add(slot, Entered(slot, params, 3, history if params.uses_history else []))
    bits = numbers.integers(-(2**31), 2**31, (2, -(-size // 32))).astype(np.int32)
    masks = (np.array([0, rows - 1]), bits) if seed % 3 == 0 else None
    return sampler.sample(logits, np.arange(rows), positions + 3, masks).tokens()


@pytest.mark.parametrize("seed", range(9))
def test_the_sampler_gives_the_same_tokens_and_errors_as_in_torch(seed):
    found, want = (sampled(seed, 300, 8, backend) for backend in (TritonLogits(300, CPU), None))
    assert found.token_ids == want.token_ids and found.errors == want.errors
    assert found.logprobs.keys() == want.logprobs.keys()
    for row, entry in want.logprobs.items():
        assert found.logprobs[row].top_ids == entry.top_ids
        numbers = [found.logprobs[row].logprob, *found.logprobs[row].top_logprobs]
        assert numbers == pytest.approx([entry.logprob, *entry.top_logprobs], abs=1e-5)


class Nothing:
    """A kernel that does nothing."""

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **options: None


class Calls(TorchDispatchMode):
    """Records our kernels and torch's operations, except views and allocations."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.kernels: list[str] = []
        self.operations: list[str] = []
        for module in (kernels, shortlist, change_kernels):
            for name, kernel in vars(module).items():
                if getattr(getattr(kernel, "fn", None), "__module__", "") == module.__name__ and name[0] != "_":
                    monkeypatch.setattr(module, name, Recorded(name, kernel, self.kernels))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::").partition(".")[0]
        if not func.is_view and "empty" not in name:
            self.operations.append(name)
        return func(*args, **(kwargs or {}))


class Recorded:
    """A kernel that is recorded instead of what the interpreter does."""

    def __init__(self, name: str, kernel: Any, names: list[str]) -> None:
        self.name, self.kernel, self.names = name, kernel, names

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **options: Any) -> None:
            self.names.append(self.name)
            with _disable_current_modes():
                self.kernel[grid](*args, **options)

        return launch


F = ["find_top", "find_bound", "shortlist", "draw_listed"]
K, P = ["count_digit"] * 4, ["sum_digit", "sum_digit", "sum_kept"]


@pytest.mark.parametrize(
    "params, launches",
    [
        ({"temperature": 0.0}, ["find_top", "pick"]),
        ({}, ["find_top", "weigh", "pick"]),
        ({"top_k": 9}, [*F, *K, "weigh", "pick"]),
        ({"top_p": 0.9}, [*F, "weigh", *P, "pick"]),
        ({"top_k": 9, "top_p": 0.9, "min_p": 0.1}, [*F, *K, "weigh", *P, "pick"]),
        (
            {"temperature": 0.0, "logprobs": 2},
            ["find_top", "weigh", "pick", *K, "tally", "collect", "find_top", "pick"],
        ),
        (
            {"temperature": 0.0, "presence_penalty": 1.0, "logit_bias": {3: 1.0, 5: 120.0}, "bad_words": ((7,),)},
            ["find_top", "pick", "penalize", "add", "forbid", "exclude", "find_top", "pick"],
        ),
    ],
)
def test_any_number_of_rows_takes_the_same_launches_and_waits_once(monkeypatch, params, launches):
    calls, operations = Calls(monkeypatch), []
    for rows in (1, 3):
        sampler = Sampler(rows, 300, CPU, TritonLogits(300, CPU))
        for slot in range(rows):
            own = SamplingParams(max_tokens=9, seed=slot, **params)
            sampler.add(slot, Entered(slot, own, 1, [8, 9] if own.uses_history else []))
        calls.kernels.clear()
        calls.operations.clear()
        logits = torch.randn(rows, 300)
        with calls:
            sampler.sample(logits, np.arange(rows), np.full(rows, 5))
        assert calls.kernels == launches
        operations.append([*calls.operations])
    assert operations[0] == operations[1] and len(operations[0]) < 40
    # What reads a number on the host, or has a size that only the device knows.
    assert not {"_local_scalar_dense", "item", "nonzero", "is_nonzero", "masked_select", "unique"} & set(operations[0])


# -- the choice -------------------------------------------------------------------------------------------------------


def test_kernels_that_fail_or_err_are_replaced_by_torch_with_a_note(monkeypatch):
    chosen = logits_choice.choose("torch", CPU, torch.bfloat16, 300)
    assert chosen.name == "triton" and isinstance(chosen.backend, TritonLogits) and not chosen.note
    monkeypatch.setattr(triton_logits, "_masks", lambda *_: 1 / 0)
    chosen = logits_choice.choose("torch", CPU, torch.bfloat16, 300)
    assert (chosen.name, chosen.backend) == ("torch", None)
    assert chosen.note.startswith("torch samples: the Triton kernels do not run on this device: ZeroDivisionError")
    assert "float64" in logits_choice.choose("torch", CPU, torch.float64, 300).note


@pytest.mark.parametrize("name", ["find_top", "count_digit", "sum_kept", "collect", "penalize", "forbid"])
def test_a_kernel_that_does_nothing_is_noticed(monkeypatch, name):
    module = change_kernels if hasattr(change_kernels, name) else kernels
    monkeypatch.setattr(module, name, Nothing())
    assert "the Triton kernels compute wrong results on this device" in triton_logits.trial(300, CPU)


def test_small_vocabularies_pass_the_trial():
    for size in (1, 40):
        assert triton_logits.trial(size, CPU) is None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    triton_logits.TILE, triton_logits.TILES, triton_logits.GROUP = 512, 4, 32
    rng, done = random.Random(args.seed), 0
    torch.manual_seed(args.seed)
    while done < args.rows:
        rows = min(20, args.rows - done)
        compare(rng, rng.choice([50, 300, 1000, 3000]), rows)
        done += rows
        print(f"\r{done} rows are equal", end="", flush=True)
    print()


if __name__ == "__main__":
    main()
