"""The sampler against distributions, against a slow obvious version of itself, and against bad input."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from engine.batch import Entered
from engine.runner import logits as operations
from engine.runner.sampler import Sampler, mixed, uniform
from engine.types import ErrorCode, SamplingParams

VOCAB = 300
CPU = torch.device("cpu")


def draw(logits, params, *, positions=None, history=None, prompt_len=3, masks=None, max_seqs=None, **settings):
    """Sample one step of rows with these parameters; slots are in reverse order, so that they differ from rows."""
    count = len(params)
    sampler = Sampler(max_seqs or count, logits.shape[1], CPU, **settings)
    slots = np.arange(count)[::-1].copy()
    for row, slot in enumerate(slots.tolist()):
        tokens = history[row] if history else []
        sampler.add(slot, Entered(row, params[row], prompt_len, tokens if params[row].uses_history else []))
    positions = [0] * count if positions is None else positions
    return sampler.sample(logits.clone(), slots, np.array(positions) + prompt_len, masks).tokens()


def params(**kwargs):
    return SamplingParams(**{"max_tokens": 10, **kwargs})


def random_logits(rows, seed, vocab=VOCAB, spread=3.0):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


# -- the oracle: one row, plain Python, no tricks ---------------------------------------------------------------


def splitmix(seed, position):
    mask = (1 << 64) - 1

    def mix(z):
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    return (mix((mix(seed & mask) + 0x9E3779B97F4A7C15 * (position + 1)) & mask) >> 11) * 2.0**-53


def processed(logits, p, position, tokens, prompt_len):
    """Return the logits of one row after penalties, bias and min_tokens, computed token by token."""
    x = logits.clone()
    output = tokens[prompt_len:]
    if p.uses_history:
        for token in sorted(set(tokens)):
            x[token] = x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
        for token in sorted(set(output)):
            x[token] -= p.frequency_penalty * output.count(token)
            x[token] -= p.presence_penalty
    for token, bias in p.logit_bias.items():
        x[token] = -math.inf if bias <= -100 else x[token] + bias
    only = [token for token, bias in p.logit_bias.items() if bias >= 100]
    if only:
        for token in range(len(x)):
            if token not in only:
                x[token] = -math.inf
    if position < p.min_tokens:
        for token in p.stop_ids:
            x[token] = -math.inf
    return x


def filtered(x, p):
    """Return integer weights of one row's tokens after temperature and filters, by a full sort."""
    scaled = (x - x.max()) / torch.tensor(p.temperature, dtype=x.dtype)
    weights = [int(w * 2.0**44) for w in scaled.exp().tolist()]
    values = x.tolist()
    if 0 < p.top_k < len(values):
        edge = sorted(values, reverse=True)[p.top_k - 1]
        weights = [w if v >= edge else 0 for v, w in zip(values, weights, strict=True)]
    if p.top_p < 1:
        need = max(1, min(sum(weights), math.ceil(p.top_p * float(sum(weights)))))
        mass = 0
        for edge in sorted(weights, reverse=True):
            mass += edge
            if mass >= need:
                break
        weights = [w if w >= edge else 0 for w in weights]
    return [w if w >= p.min_p * 2.0**44 else 0 for w in weights]


def oracle(logits, p, position=0, tokens=(), prompt_len=3):
    x = processed(logits, p, position, list(tokens), prompt_len)
    if p.temperature == 0:
        return x.tolist().index(x.max().item())
    weights = filtered(x, p)
    target = min(int(splitmix(p.seed, position) * float(sum(weights))), sum(weights) - 1)
    for token, weight in enumerate(weights):
        if target < weight:
            return token
        target -= weight
    raise AssertionError


def random_params(rng, vocab=VOCAB):
    return params(
        seed=rng.getrandbits(64),
        temperature=rng.choice([0.0, 0.3, 0.7, 1.0, 1.0, 1.7]),
        top_k=rng.choice([0, 0, -1, 1, 2, 20, vocab - 1, vocab, vocab + 5]),
        top_p=rng.choice([1.0, 1.0, 0.05, 0.5, 0.9, 0.999]),
        min_p=rng.choice([0.0, 0.0, 0.01, 0.2, 1.0]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.3, 0.8]),
        presence_penalty=rng.choice([0.0, 0.0, 0.5, -1.0]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.4, -0.7]),
        logit_bias=rng.choice([{}, {}, {3: 2.5, 7: -100, 9: -4}, {5: 100, 11: 150, 2: 1}]),
        min_tokens=rng.choice([0, 0, 4]),
        stop_ids=rng.choice([(), (1, 2), (8,)]),
        logprobs=rng.choice([None, None, 0, 5]),
    )


def random_history(rng, vocab=VOCAB, prompt_len=3):
    return [rng.randrange(vocab) for _ in range(prompt_len)] + [rng.randrange(12) for _ in range(rng.randrange(9))]


# -- draws --------------------------------------------------------------------------------------------------------


def test_the_uniform_number_is_splitmix64():
    rng = random.Random(1)
    pairs = [(rng.getrandbits(64), rng.randrange(100_000)) for _ in range(200)] + [(0, 0), (2**64 - 1, 0)]
    got = uniform(mixed(np.array([s for s, _ in pairs], np.uint64)), np.array([p for _, p in pairs]))
    assert got.tolist() == [splitmix(seed, position) for seed, position in pairs]
    assert got.min() >= 0 and got.max() < 1


def test_uniform_numbers_fill_the_interval_along_seeds_and_along_positions():
    many = np.arange(20_000)
    seeds = many.astype(np.uint64)
    for got in (uniform(mixed(seeds), many * 0), uniform(mixed(seeds * 0 + 7), many)):
        counts = np.histogram(got, 50, (0, 1))[0]
        assert p_value(counts, np.full(50, len(many) / 50)) > 0.001


def p_value(observed, expected):
    """Return the p-value of the chi-square test; cells with fewer than five expected are merged."""
    small = expected < 5
    if small.any():
        observed = np.append(observed[~small], observed[small].sum())
        expected = np.append(expected[~small], expected[small].sum())
    statistic = ((observed - expected) ** 2 / np.maximum(expected, 1e-9)).sum()
    degrees = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    return torch.special.gammaincc(degrees, torch.tensor(statistic / 2, dtype=torch.float64)).item()


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.5])
@pytest.mark.parametrize("filters", [{}, {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.02}])
def test_two_thousand_seeds_follow_the_distribution(temperature, filters):
    row = random_logits(1, seed=3, spread=1.5)
    ask = [params(seed=seed, temperature=temperature, logprobs=VOCAB, **filters) for seed in range(2000)]
    drawn = draw(row.expand(2000, -1), ask)
    entry = drawn.logprobs[0]
    expected = torch.zeros(VOCAB, dtype=torch.float64)
    expected[list(entry.top_ids)] = (torch.tensor(entry.top_logprobs, dtype=torch.float64) / temperature).softmax(0)
    kept = torch.tensor(filtered(row[0], ask[0])) > 0
    expected = expected * kept / (expected * kept).sum()
    observed = np.bincount(drawn.token_ids, minlength=VOCAB)
    assert not observed[~kept.numpy()].any()
    assert p_value(observed, expected.numpy() * 2000) > 0.001


def test_random_mixes_of_parameters_equal_the_oracle_row_by_row():
    rng = random.Random(5)
    for seed in range(30):
        count = rng.randrange(1, 17)
        ask = [random_params(rng) for _ in range(count)]
        logits = random_logits(count, seed, spread=rng.choice([0.5, 3.0]))
        if seed % 3 == 0:
            logits = logits.bfloat16().float()  # full of equal values
        history = [random_history(rng) for _ in range(count)]
        positions = [len(tokens) - 3 for tokens in history]
        drawn = draw(logits, ask, positions=positions, history=history)
        assert not drawn.errors
        want = [oracle(*each) for each in zip(logits, ask, positions, history, strict=True)]
        assert drawn.token_ids == want


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_row_samples_the_same_alone_and_in_a_batch(dtype):
    """The vocabulary is large enough for every path: candidates, the fallback to a full sort, and split rows."""
    rng = random.Random(6)
    vocab = 5003
    for seed in range(12):
        count = 24
        ask = [random_params(rng, vocab) for _ in range(count)]
        # Flat rows need the fallback: 1,024 candidates do not reach the mass.
        spread = torch.tensor([rng.choice([0.1, 1.0, 4.0]) for _ in range(count)])[:, None]
        logits = (random_logits(count, 100 + seed, vocab, 1.0) * spread).to(dtype)
        if seed % 2:
            logits = logits.bfloat16().to(dtype)
        history = [random_history(rng, vocab) for _ in range(count)]
        positions = [len(tokens) - 3 for tokens in history]
        together = draw(logits, ask, positions=positions, history=history)
        for row in range(count):
            alone = draw(
                logits[row : row + 1],
                ask[row : row + 1],
                positions=positions[row : row + 1],
                history=history[row : row + 1],
            )
            assert alone.token_ids == together.token_ids[row : row + 1], ask[row]
            assert alone.logprobs.get(0) == together.logprobs.get(row)


def test_the_way_through_the_candidates_and_the_full_sort_agree(monkeypatch):
    vocab = 2000
    logits = random_logits(40, 9, vocab, 0.7).bfloat16().float()
    rng = random.Random(2)
    ask = [params(seed=i, top_k=rng.choice([0, 1, 7, 50]), top_p=rng.choice([0.3, 0.8, 0.99])) for i in range(40)]
    usual = draw(logits, ask).token_ids
    monkeypatch.setattr(operations, "CANDIDATES", 2)
    assert draw(logits, ask).token_ids == usual
    monkeypatch.setattr(operations, "CANDIDATES", vocab)
    assert draw(logits, ask).token_ids == usual
    assert usual == [oracle(row, p) for row, p in zip(logits, ask, strict=True)]


def test_the_same_seed_and_position_twice_is_equal_and_another_of_either_is_not():
    row = torch.zeros(1, VOCAB)
    first = [draw(row, [params(seed=11)], positions=[i]).token_ids[0] for i in range(50)]
    assert first == [draw(row, [params(seed=11)], positions=[i]).token_ids[0] for i in range(50)]
    assert len(set(first)) > 30
    assert first != [draw(row, [params(seed=12)], positions=[i]).token_ids[0] for i in range(50)]


def test_the_position_counts_from_the_end_of_the_prompt():
    row = torch.zeros(1, VOCAB)
    short, long = (draw(row, [params(seed=4)], positions=[2], prompt_len=n).token_ids for n in (1, 200))
    assert short == long


def test_temperature_zero_takes_the_lowest_of_equal_tokens():
    logits = torch.zeros(3, VOCAB)
    logits[0, [40, 7, 200]] = 2.0
    logits[1, [299, 298]] = 1.0
    assert draw(logits, [params(temperature=0.0)] * 3).token_ids == [7, 298, 0]


def test_equal_tokens_at_the_edge_of_top_k_all_stay():
    logits = torch.full((500, VOCAB), -5.0)
    logits[:, [10, 20, 30]] = 1.0
    drawn = draw(logits, [params(seed=i, top_k=2) for i in range(500)])
    assert set(drawn.token_ids) == {10, 20, 30}


def test_equal_tokens_at_the_edge_of_top_p_all_stay_also_beyond_the_candidates(monkeypatch):
    monkeypatch.setattr(operations, "CANDIDATES", 200)  # half of the mass is reached at the 150th of 300 equals
    logits = torch.zeros(6000, VOCAB)
    drawn = draw(logits, [params(seed=i, top_p=0.5) for i in range(6000)])
    assert set(drawn.token_ids) == set(range(VOCAB))


def test_a_weight_of_zero_is_never_picked_and_edges_belong_to_the_next():
    weights = torch.tensor([[0, 0, 3, 0, 1, 0]]).repeat(1, 60)  # over several of the sums that are looked at first
    total = int(weights.sum())
    owners = [place for place, weight in enumerate(weights[0].tolist()) for _ in range(weight)]
    u = torch.arange(total, dtype=torch.float64) / total + 1e-9
    u[0] = 0.0
    assert operations._pick(weights.expand(total, -1), u).tolist() == owners


def test_filters_never_leave_their_set():
    logits = random_logits(1, 1).expand(3000, -1)
    order = logits[0].argsort(descending=True)
    probs = logits[0].double().softmax(0)
    nucleus = int((probs[order].cumsum(0) < 0.7).sum()) + 1
    sets = {
        "top_k": (params(top_k=5), set(order[:5].tolist())),
        "top_p": (params(top_p=0.7), set(order[:nucleus].tolist())),
        "min_p": (params(min_p=0.1), set((probs >= 0.1 * probs.max()).nonzero().view(-1).tolist())),
    }
    for name, (p, allowed) in sets.items():
        ask = [params(seed=i, top_k=p.top_k, top_p=p.top_p, min_p=p.min_p) for i in range(len(logits))]
        assert set(draw(logits, ask).token_ids) == allowed, name


def test_a_tiny_top_p_and_a_tiny_temperature_leave_the_best_token():
    logits = random_logits(3, 2)
    best = logits.argmax(1).tolist()
    ask = [params(top_p=1e-9), params(temperature=1e-6), params(temperature=1.2e-5)]
    assert draw(logits, ask).token_ids == best


# -- what changes the logits --------------------------------------------------------------------------------------


def test_bias_of_minus_100_is_never_and_of_100_always():
    logits = torch.zeros(2000, VOCAB)
    logits[:, 5] = 50.0
    never = draw(logits, [params(seed=i, logit_bias={5: -100}) for i in range(2000)])
    assert 5 not in never.token_ids and len(set(never.token_ids)) > 250
    always = draw(logits, [params(seed=i, logit_bias={9: 100, 5: 99, 8: 0}) for i in range(2000)])
    assert set(always.token_ids) == {9}
    two = draw(logits, [params(seed=i, logit_bias={9: 100, 8: 100}) for i in range(2000)])
    assert set(two.token_ids) == {8, 9}


def test_a_bias_moves_a_probability_by_its_exponential():
    logits = torch.zeros(4000, 16)
    drawn = draw(logits, [params(seed=i, logit_bias={3: 2.0}) for i in range(4000)])
    expected = np.ones(16)
    expected[3] = math.exp(2)
    assert p_value(np.bincount(drawn.token_ids, minlength=16), expected / expected.sum() * 4000) > 0.001


def test_infinite_biases_force_and_forbid_a_token():
    logits = random_logits(2, 4)
    drawn = draw(logits, [params(logit_bias={4: math.inf}), params(temperature=0.0, logit_bias={4: -math.inf})])
    assert drawn.token_ids[0] == 4 and drawn.token_ids[1] != 4 and not drawn.errors


def test_min_tokens_forbids_stop_ids_until_then():
    logits = torch.full((4, VOCAB), -9.0)
    logits[:, [2, 6]] = torch.tensor([8.0, 4.0])
    ask = params(temperature=0.0, min_tokens=3, stop_ids=(2, 900_000, -1))
    assert draw(logits, [ask] * 4, positions=[0, 2, 3, 4]).token_ids == [6, 6, 2, 2]


def test_a_mask_forbids_tokens_of_its_row_only():
    logits = torch.zeros(2, VOCAB)
    logits[:, 4] = 3.0
    bits = np.full((2, -(-VOCAB // 32)), -1, np.int32)
    bits[1, 0] &= ~(1 << 4)
    greedy = [params(temperature=0.0)] * 2
    assert draw(logits, greedy, masks=(np.array([0, 1]), bits)).token_ids == [4, 0]
    assert draw(logits, greedy, masks=(np.array([1]), bits[1:])).token_ids == [4, 0]
    assert draw(logits, greedy, masks=(np.array([0]), bits[1:])).token_ids == [0, 4]
    nothing = draw(logits, greedy, masks=(np.array([1]), bits[1:] * 0))
    assert (nothing.token_ids[0], list(nothing.errors)) == (4, [1])
    assert nothing.errors[1].code is ErrorCode.NO_TOKEN_LEFT
    last = np.zeros((1, bits.shape[1]), np.uint32)
    last[0, (VOCAB - 1) // 32] = 1 << (VOCAB - 1) % 32
    assert draw(logits, greedy, masks=(np.array([1]), last.view(np.int32))).token_ids == [4, VOCAB - 1]


def test_penalties_follow_the_tokens_as_they_come():
    """Starting half-way, with some steps repeated: the counts are those of the sequence."""
    p = params(temperature=0.0, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.9)
    rng = random.Random(8)
    tokens = [rng.randrange(6) for _ in range(60)]
    sampler = Sampler(2, 8, CPU)
    sampler.add(1, Entered(7, p, 10, tokens[:14]))
    sampler.observe(1, 0, tokens[:8])  # chunks of what it knows: a prompt computed again after a preemption
    sampler.observe(1, 8, tokens[8:14])
    for length in range(14, 60):
        logits = random_logits(1, length, vocab=8, spread=1.0)
        drawn = sampler.sample(logits.clone(), np.array([1]), np.array([length])).tokens()
        assert drawn.token_ids == [oracle(logits[0], p, length - 10, tokens[:length], 10)]
        for _ in range(2):  # a step that ran out of memory is launched again
            sampler.observe(1, length, tokens[length : length + 1])


def test_reused_slot_has_no_state():
    logits = random_logits(1, 12)
    heavy = params(
        temperature=0.0, repetition_penalty=5.0, logit_bias={1: 100}, min_tokens=5, stop_ids=(3,), logprobs=4, seed=-1,
        allowed_ids=(1, 3), bad_words=((int(logits.argmax()),),),
    )  # fmt: skip
    for first in (heavy, params(top_k=-3, min_p=2.0)):
        sampler = Sampler(1, VOCAB, CPU)
        sampler.add(0, Entered(1, first, 2, [1, 2]))
        sampler.remove(0)
        best = int(logits.argmax())
        sampler.add(0, Entered(2, params(temperature=0.0, stop_ids=(best,)), 2, []))
        drawn = sampler.sample(logits.clone(), np.array([0]), np.array([2])).tokens()
        assert drawn.token_ids == [best]
        assert not drawn.logprobs and not drawn.errors and not sampler.problems


# -- logprobs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_logprobs_are_of_the_raw_distribution(dtype):
    logits = random_logits(3, 20).to(dtype)
    ask = [
        params(temperature=0.0, logprobs=3, logit_bias={50: 100}),
        params(temperature=0.3, top_k=2),
        params(temperature=2.0, logprobs=0, seed=5, repetition_penalty=3.0),
    ]
    drawn = draw(logits, ask, history=[[1, 2, 3]] * 3)
    want = logits.log_softmax(1)
    assert set(drawn.logprobs) == {0, 2}
    assert drawn.token_ids[0] == 50
    assert drawn.logprobs[0].logprob == want[0, 50].item()
    values, ids = want[0].topk(3)
    assert drawn.logprobs[0].top_ids == tuple(ids.tolist())
    assert drawn.logprobs[0].top_logprobs == tuple(values.tolist())
    assert drawn.logprobs[2].logprob == want[2, drawn.token_ids[2]].item()
    assert drawn.logprobs[2].top_ids == ()


def test_processed_logprobs_are_of_the_distribution_that_is_sampled():
    rng = random.Random(12)
    for seed in range(60):
        p, tokens = random_params(rng), random_history(rng)
        p = replace(p, logprobs=5)
        raw = random_logits(1, seed).double()
        drawn = draw(raw, [p], positions=[len(tokens) - 3], history=[tokens], logprobs_mode="processed_logprobs")
        x = processed(raw[0], p, len(tokens) - 3, tokens, 3)
        if p.temperature > 0:
            weights = torch.tensor(filtered(x, p), dtype=torch.float64)
            is_filtered = p.top_p < 1 or p.min_p > 0 or 0 < p.top_k < VOCAB
            x = x.masked_fill(weights == 0, -math.inf) / p.temperature if is_filtered else x / p.temperature
        want = x.log_softmax(0)
        entry = drawn.logprobs[0]
        assert entry.logprob == pytest.approx(want[drawn.token_ids[0]].item()) and math.isfinite(entry.logprob)
        assert entry.top_logprobs == pytest.approx(want.topk(5).values.tolist())
        assert drawn.token_ids == draw(raw, [p], positions=[len(tokens) - 3], history=[tokens]).token_ids


def test_processed_logprobs_of_a_greedy_row_follow_its_mask_and_bias_without_a_temperature():
    raw, bits = random_logits(2, 3), np.array([[0b1110] + [0] * 9], np.int32)
    ask = [params(temperature=0.0, logprobs=3, logit_bias={2: 3.0}), params(temperature=2.0, seed=1)]
    entry = draw(raw, ask, masks=(np.array([0]), bits), logprobs_mode="processed_logprobs").logprobs[0]
    want = (raw[0, 1:4] + torch.tensor([0.0, 3.0, 0.0])).log_softmax(0).sort(descending=True)
    assert entry.top_ids == tuple((want.indices + 1).tolist())
    assert entry.top_logprobs == pytest.approx(want.values.tolist())
    assert entry.logprob == entry.top_logprobs[0]


def test_equal_logprobs_are_listed_by_token_id():
    logits = torch.zeros(2, VOCAB)
    logits[0, [200, 100]] = 1.0
    drawn = draw(logits, [params(logprobs=5), params(logprobs=20)])
    assert drawn.logprobs[0].top_ids == (100, 200, 0, 1, 2)
    assert drawn.logprobs[1].top_ids == tuple(range(20))


# -- rows that cannot be drawn ------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {}, {"top_p": 0.5}, {"top_k": 3, "logprobs": 2}])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_row_of_bad_logits_fails_alone(settings, value):
    logits = random_logits(5, 30)
    ask = [params(seed=i, **settings) for i in range(5)]
    good = draw(logits, ask)
    bad = logits.clone()
    if value == -math.inf:
        bad[2] = value
    else:
        bad[2, 77] = value
    drawn = draw(bad, ask)
    assert list(drawn.errors) == [2] and "not finite" in drawn.errors[2].message
    keep = [0, 1, 3, 4]
    assert [drawn.token_ids[row] for row in keep] == [good.token_ids[row] for row in keep]
    assert {row: drawn.logprobs.get(row) for row in keep} == {row: good.logprobs.get(row) for row in keep}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_no_token_left_fails_alone(temperature):
    logits = random_logits(2, 31)
    ask = [
        params(temperature=temperature, logit_bias={4: 100}, min_tokens=2, stop_ids=(4,)),
        params(temperature=temperature),
    ]
    drawn = draw(logits, ask)
    assert list(drawn.errors) == [0] and "no token" in drawn.errors[0].message
    assert drawn.token_ids[1] == draw(logits[1:], ask[1:]).token_ids[0]


@pytest.mark.parametrize(
    "settings",
    [
        {"logit_bias": {VOCAB: 1.0}},
        {"logit_bias": {-1: 1.0}},
        {"logit_bias": {3: math.nan}},
        {"temperature": math.nan},
        {"temperature": -0.1},
        {"top_p": 1.5},
        {"min_p": -1.0},
        {"repetition_penalty": 0.0},
        {"presence_penalty": math.inf},
        {"logprobs": -2},
    ],
)
def test_invalid_parameters_fail_only_their_row(settings):
    logits = random_logits(2, 32)
    sampler = Sampler(2, VOCAB, CPU)
    sampler.add(0, Entered(1, params(**settings), 3, [1, 2, 3]))
    sampler.add(1, Entered(2, params(temperature=0.0), 3, []))
    drawn = sampler.sample(logits.clone(), np.array([0, 1]), np.array([3, 3])).tokens()
    assert list(sampler.problems) == [0]
    assert next(iter(settings)) in sampler.problems[0].message
    assert drawn.token_ids[1] == int(logits[1].argmax())


@pytest.mark.parametrize(
    "settings",
    [
        {"min_tokens": 2**63, "stop_ids": (1, 2**63)},
        {"min_tokens": -(2**63)},
        {"top_k": 2**63},
        {"seed": 2**64 - 1},
        {"seed": -(2**63)},
        {"repetition_penalty": 1e-300},
        {"repetition_penalty": 1e300},
        {"presence_penalty": 1e308, "frequency_penalty": -1e308},
        {"frequency_penalty": 1e308},
        {"temperature": 1e300},
        {"temperature": 1e-300},
        {"logit_bias": {3: 1e300, 4: -1e300}},
        {"logprobs": 2**63},
    ],
)
def test_extreme_parameters_do_not_affect_other_rows(settings):
    logits = random_logits(2, 33)
    drawn = draw(logits, [params(**settings), params(temperature=0.0)], history=[[1, 2, 3, 4, 4]] * 2, positions=[2, 2])
    assert drawn.token_ids[1] == int(logits[1].argmax())
    assert set(drawn.errors) <= {0}
    assert 0 in drawn.errors or 0 <= drawn.token_ids[0] < VOCAB


def test_history_outside_the_vocabulary_is_reported():
    sampler = Sampler(1, VOCAB, CPU)
    sampler.add(0, Entered(1, params(presence_penalty=1.0), 1, [VOCAB]))
    assert "vocabulary" in sampler.problems[0].message


def test_only_allowed_tokens_are_sampled_even_beside_an_unrestricted_row():
    logits = torch.randn(400, VOCAB, generator=torch.Generator().manual_seed(1))
    limited = [params(seed=i, allowed_ids=(5, 90, 200)) for i in range(200)]
    drawn = draw(logits, limited + [params(seed=i) for i in range(200)]).token_ids
    assert set(drawn[:200]) == {5, 90, 200}
    assert len(set(drawn[200:])) > 50


@pytest.mark.parametrize(
    ("output", "banned"),
    [
        ([], {3}),
        ([7], {3, 8}),
        ([7, 8], {3, 9}),
        ([8, 7], {3, 8}),
        ([7, 8, 9], {3}),
    ],
)
def test_a_bad_word_is_never_completed(output, banned):
    words = ((3,), (7, 8), (7, 8, 9))
    sampler = Sampler(1, 12, torch.device("cpu"))
    sampler.add(0, Entered(1, params(bad_words=words), 2, [7, 8, *output]))  # the prompt's own 7, 8 do not count
    drawn = set()
    for i in range(400):
        sampler._stream[0] = i
        logits = torch.zeros(1, 12)
        drawn |= set(sampler.sample(logits, np.array([0]), np.array([2 + len(output)])).tokens().token_ids)
    assert drawn == set(range(12)) - banned


def test_bad_word_matches_tokens_sampled_since():
    sampler = Sampler(1, 12, torch.device("cpu"))
    sampler.add(0, Entered(1, params(bad_words=((7, 8),), temperature=0.0), 2, [1, 2]))
    sampler.observe(0, 2, [7])
    logits = torch.zeros(1, 12)
    logits[0, 8] = 5.0
    assert sampler.sample(logits, np.array([0]), np.array([3])).tokens().token_ids == [0]


def test_a_prompt_is_scored_in_the_raw_distribution():
    sampler = Sampler(1, VOCAB, torch.device("cpu"))
    sampler.add(0, Entered(1, params(prompt_logprobs=2, temperature=0.1, logit_bias={4: 50.0}), 4, []))
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(2))
    expected = logits.log_softmax(1)
    for row, (target, entry) in enumerate(
        zip([4, 9, 200], sampler.score(logits, 0, [4, 9, 200]).scores(), strict=True)
    ):
        assert entry.logprob == expected[row, target].item()
        assert list(entry.top_ids) == expected[row].topk(2).indices.tolist()
