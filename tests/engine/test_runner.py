"""The runner: steps of a scheduler, with a model whose logits depend on everything in the cache."""

from __future__ import annotations

import types

import numpy as np
import pytest
import torch

from engine.attention import AttentionLayer
from engine.batch import PENDING, Batch, Entered, Masks, Row, RowError, Sampled
from engine.cache_groups import CacheGroups
from engine.config import EngineConfig, resolve
from engine.kernels.library import Choice
from engine.loop import StepOutOfMemory
from engine.models import Outputs
from engine.runner import Runner
from engine.types import SamplingParams

VOCAB = 11


class MeanModel:
    """Logits are a function of the mean of all the sequence's tokens, as read back from the cache."""

    def __init__(self):
        layers = [AttentionLayer(1, 1, VOCAB, VOCAB, scale=1.0)]
        self.sinks = {}
        kinds = {"dtype": torch.float64, "cache_dtype": torch.float64}
        sizes = {"vocab_size": VOCAB, "max_len": 64, "mixers": []}
        self.spec = types.SimpleNamespace(layers=layers, groups=CacheGroups(), **sizes, **kinds)
        self.product = Choice(None)
        self.matrix = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 5
        self.fails_with = None
        self.poison = None  # a token after which this model computes no numbers
        self.calls = []

    def forward(self, step):
        ids, logits_at, hidden_at = step.ids, step.logits_at, step.hidden_at
        self.calls.append((ids.numel(), logits_at.numel()))
        if self.fails_with is not None:
            raise self.fails_with
        kv = torch.nn.functional.one_hot(ids, VOCAB).double().unsqueeze(1)
        mean = step.attend(0, torch.zeros_like(kv), kv, kv).squeeze(1)
        logits = mean[logits_at] @ self.matrix
        if self.poison is not None:
            logits[ids[logits_at] == self.poison] = torch.nan
            mean[ids == self.poison] = torch.nan
        return Outputs(logits, None if hidden_at is None else mean[hidden_at])

    def greedy(self, tokens):
        mean = torch.nn.functional.one_hot(torch.tensor(tokens), VOCAB).double().mean(0)
        return int((mean @ self.matrix).argmax())


GREEDY = SamplingParams(max_tokens=9, temperature=0.0)


def make(num_blocks=12, **config):
    model = MeanModel()
    defaults = {"model": "mean", "device": "cpu", "block_size": 4, "max_seqs": 3, "max_batched_tokens": 16}
    defaults["attention"] = "reference"  # it computes in float64
    resolved = resolve(EngineConfig(**{**defaults, **config}), "cpu", model.spec.max_len)
    return model, Runner(model, resolved, num_blocks)


def step(runner, rows, entered=(), left=()):
    return runner.launch(Batch(1, rows, list(entered), list(left))).sample().result()


def test_chunks_decodes_and_neighbours_read_their_own_past():
    model, runner = make()
    one, two = [3, 1, 4, 1, 5, 9, 2], [6, 5]
    got = step(runner, [Row(1, 0, one[:5], [7, 2], 0)], [Entered(1, GREEDY, 7, [])])
    assert got.outcomes == [None] and model.calls == [(5, 0)]
    got = step(runner, [Row(1, 5, one[5:], [], 1), Row(2, 0, two, [5], 1)], [Entered(2, GREEDY, 2, [])])
    assert got.outcomes == [Sampled([model.greedy(one)]), Sampled([model.greedy(two)])]
    assert set(got.seconds) == {"prepare", "forward", "sample"}
    for _ in range(4):
        one, two = one + got.outcomes[0].token_ids, two + got.outcomes[1].token_ids
        new = [0] if len(one) == 9 else []
        got = step(
            runner,
            [
                Row(1, len(one) - 1, one[-1:], new, 1),
                Row(2, len(two) - 1, two[-1:], [8] if len(two) == 5 else [], 1),
            ],
        )
        assert got.outcomes == [Sampled([model.greedy(one)]), Sampled([model.greedy(two)])]


def ahead(runner, prompt, params, length):
    """Sample `length` tokens, each step launched before the one before it is collected."""
    entered, row, before, tokens = [Entered(1, params, len(prompt), list(prompt))], prompt, None, []
    for number in range(length):
        start = 0 if before is None else len(prompt) + number - 1
        launched = runner.launch(Batch(number, [Row(1, start, row, [3, 4, 5] if before is None else [], 1)], entered))
        launched.sample()
        if before is not None:
            tokens += before.result().outcomes[0].token_ids
        entered, row, before = [], [PENDING], launched
    return tokens + before.result().outcomes[0].token_ids


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SamplingParams(max_tokens=9, seed=7, temperature=1.5),
        SamplingParams(max_tokens=9, temperature=0.0, repetition_penalty=3.0, frequency_penalty=1.0),
        SamplingParams(max_tokens=9, temperature=0.0, bad_words=tuple((a, b) for a in range(VOCAB) for b in range(5))),
    ],
    ids=["greedy", "random", "penalties", "bad words"],
)
def test_a_token_that_the_step_before_samples_is_read_on_the_device(params):
    prompt, tokens = [3, 1, 4], []
    _, runner = make()
    row, entered, start, blocks = prompt, [Entered(1, params, 3, list(prompt))], 0, [3, 4, 5]
    for _ in range(7):
        got = step(runner, [Row(1, start, row, blocks, 1)], entered)
        start, entered, blocks, row = len(prompt) + len(tokens), [], [], got.outcomes[0].token_ids
        tokens += row
    assert ahead(make(async_scheduling=True)[1], prompt, params, 7) == tokens


def test_a_row_after_one_that_failed_computes_something_and_harms_nobody():
    model, runner = make(async_scheduling=True)
    model.poison = 4
    rows = [Row(1, 0, [3, 4], [0], 1), Row(2, 0, [3], [1], 1)]
    first = runner.launch(Batch(1, rows, [Entered(1, GREEDY, 2, []), Entered(2, GREEDY, 1, [])])).sample()
    second = runner.launch(Batch(2, [Row(1, 2, [PENDING], [], 1), Row(2, 1, [PENDING], [], 1)])).sample()
    failed, sampled = first.result().outcomes
    assert isinstance(failed, RowError) and sampled == Sampled([model.greedy([3])])
    assert second.result().outcomes[1] == Sampled([model.greedy([3, *sampled.token_ids])])


def test_a_sequence_that_left_comes_back_and_goes_on_as_if_it_had_stayed():
    """After a preemption it has other blocks and must sample the same tokens."""
    params = SamplingParams(max_tokens=9, seed=77, temperature=1.5, presence_penalty=0.7, repetition_penalty=1.1)
    prompt = [2, 7, 1]

    def run(preempt_at):
        _, runner = make()
        tokens, entered, left, start, blocks = list(prompt), True, [], 0, [1, 2, 3]
        for index in range(6):
            if index == preempt_at:
                entered, left, start, blocks = True, [5], 0, [9, 4, 6]
            enter = [Entered(5, params, 3, list(tokens))] if entered else []
            got = step(runner, [Row(5, start, tokens[start:], blocks if entered else [], 1)], enter, left)
            start, entered, left = len(tokens), False, []
            tokens += got.outcomes[0].token_ids
        return tokens

    assert run(2) == run(4) == run(None)


def test_a_block_and_a_slot_go_from_one_sequence_to_the_next():
    model, runner = make(max_seqs=1)
    for seq_id, tokens in ((1, [3, 3, 3, 8]), (2, [5, 6])):
        left = [seq_id - 1] if seq_id > 1 else []
        got = step(runner, [Row(seq_id, 0, tokens, [0], 1)], [Entered(seq_id, GREEDY, len(tokens), [])], left)
        assert got.outcomes == [Sampled([model.greedy(tokens)])]
    assert step(runner, [], left=[2]).outcomes == []


@pytest.mark.parametrize(("mode", "logprobs"), [({}, "raw"), ({"logprobs_mode": "processed_logprobs"}, "processed")])
def test_logprobs_are_those_of_the_setting(mode, logprobs):
    _, runner = make(**mode)
    ask = SamplingParams(max_tokens=3, top_k=1, logprobs=0)
    [sampled] = step(runner, [Row(1, 0, [3, 1], [7], 1)], [Entered(1, ask, 2, [])]).outcomes
    assert (sampled.logprobs[0].logprob == 0.0) is (logprobs == "processed"), "only one token can be sampled"


def test_results_stand_at_the_index_of_their_row():
    model, runner = make()
    told = SamplingParams(max_tokens=3, temperature=0.0, logprobs=2)
    bad = SamplingParams(max_tokens=3, logit_bias={VOCAB: 1.0})
    got = step(
        runner,
        [Row(1, 0, [1, 2], [0], 0), Row(2, 0, [3], [1], 0), Row(3, 0, [4, 5], [2], 1)],
        [Entered(1, told, 4, []), Entered(2, bad, 4, []), Entered(3, told, 2, [])],
    )
    chunk, failed, sampled = got.outcomes
    assert chunk is None
    assert isinstance(failed, RowError) and "logit_bias" in failed.message
    assert sampled.token_ids == [model.greedy([4, 5])]
    assert [entry.top_ids[0] for entry in sampled.logprobs] == sampled.token_ids


def test_row_with_nan_logits_fails_alone():
    model, runner = make()
    model.poison = 4
    got = step(
        runner,
        [Row(1, 0, [3, 4], [0], 1), Row(2, 0, [3], [1], 1)],
        [Entered(1, GREEDY, 2, []), Entered(2, GREEDY, 1, [])],
    )
    failed, sampled = got.outcomes
    assert isinstance(failed, RowError) and "not finite" in failed.message
    assert sampled == Sampled([model.greedy([3])])


def test_mask_is_applied_to_sampling():
    model, runner = make()
    best = model.greedy([4])
    bits = np.full((1, -(-VOCAB // 32)), -1, np.int32)
    bits[0, best // 32] &= ~(1 << best % 32)
    # A chunk that draws nothing and a free row stand before the one with a mask.
    rows = [Row(1, 0, [4], [0], 0), Row(2, 0, [4], [1], 1), Row(3, 0, [4], [2], 1)]
    batch = Batch(1, rows, [Entered(row.seq_id, GREEDY, 1, []) for row in rows])
    chunk, free, masked = runner.launch(batch).sample(Masks([2], bits)).result().outcomes
    assert (chunk, free) == (None, Sampled([best]))
    assert masked.token_ids != [best]


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_a_step_without_memory_can_be_launched_again(error):
    model, runner = make()
    params = SamplingParams(max_tokens=3, temperature=0.0, frequency_penalty=1.0)
    model.fails_with = error
    rows = [Row(1, 0, [3, 1, 4, 1, 5], [6, 3], 1)]
    with pytest.raises(StepOutOfMemory):
        step(runner, rows, [Entered(1, params, 5, [3, 1, 4, 1, 5])])
    model.fails_with = None
    # Half of it now: the blocks are known, nothing is counted twice.
    assert step(runner, [Row(1, 0, [3, 1], [], 0)]).outcomes == [None]
    got = step(runner, [Row(1, 2, [4, 1, 5], [], 1)])
    assert got.outcomes == [Sampled([model.greedy([3, 1, 4, 1, 5])])]


def test_out_of_memory_during_sampling_is_reported_the_same_way(monkeypatch):
    _, runner = make()
    batch = Batch(1, [Row(1, 0, [4], [0], 1)], [Entered(1, GREEDY, 1, [])])
    in_flight = runner.launch(batch)
    monkeypatch.setattr(runner.sampler, "sample", lambda *_: (_ for _ in ()).throw(MemoryError()))
    with pytest.raises(StepOutOfMemory):
        in_flight.sample()


def test_other_errors_are_not_taken_for_missing_memory():
    model, runner = make()
    model.fails_with = RuntimeError("shapes do not match")
    with pytest.raises(RuntimeError, match="shapes"):
        step(runner, [Row(1, 0, [4], [0], 1)], [Entered(1, GREEDY, 1, [])])


def test_nothing_needs_a_gradient():
    _, runner = make()
    got = runner.launch(Batch(1, [Row(1, 0, [4], [0], 1)], [Entered(1, GREEDY, 1, [])]))
    assert got.outputs.logits.is_inference()


@pytest.mark.parametrize(("num_blocks", "config"), [(1, {}), (2, {"max_seqs": 8}), (50, {"max_batched_tokens": 64})])
def test_warm_up_stays_within_the_pool_and_leaves_no_sequence(num_blocks, config):
    model, runner = make(num_blocks, **config)
    runner.warm_up()
    assert len(model.calls) == 2 and max(tokens for tokens, _ in model.calls) <= num_blocks * 4
    entered = [Entered(seq_id, GREEDY, 1, []) for seq_id in range(runner.config.max_seqs)]
    rows = [Row(entry.seq_id, 0, [5], [0], 0) for entry in entered]
    step(runner, rows, entered)  # every slot is free again
