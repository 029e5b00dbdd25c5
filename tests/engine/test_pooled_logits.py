"""Logits of selected tokens after a prompt against transformers: alone, mixed, chunked, cached, preempted."""

import asyncio

import numpy as np
import pytest
import torch

from engine import EngineRequest, Pooling, SamplingParams
from engine.batch import Embedded, Entered, Row, RowError, Sampled
from tests.engine.test_embeddings import LAST, config, embedding, folder_of, last, prompts, run, vector
from tests.engine.test_runner import GREEDY, make, step
from tests.models import MAX_LEN, VOCAB, oracle

PAIR = Pooling(kind="logits", token_ids=(7, 250))


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("logits")


def expected(folder, prompt) -> np.ndarray:
    with torch.inference_mode():
        logits = oracle(folder, torch.float32)(torch.tensor([prompt]), use_cache=False).logits[0, -1]
    return logits[[*PAIR.token_ids]].double().numpy()


def talk(number, prompt) -> EngineRequest:
    return EngineRequest(id=number, prompt_ids=prompt, params=SamplingParams(max_tokens=80, seed=3, logprobs=2))


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_logits_equal_transformers_alone_and_from_the_prefix_cache(home, name):
    folder = folder_of(home, name)

    async def use(engine):
        for number in (0, 100):
            for index, prompt in enumerate(prompts()):
                delta = await last(engine, embedding(prompt, PAIR, number + index))
                assert (delta.finish_reason, delta.token_ids, delta.stats.output_tokens) == ("stop", (), 0)
                assert vector(delta) == pytest.approx(expected(folder, prompt), abs=2e-5)
                assert delta.stats.cached_tokens == ((len(prompt) - 1) // 4 * 4 if number else 0)

    run(config(folder, debug=True), use)


@pytest.mark.parametrize(
    ("budget", "num_blocks"), [(600, 800), (24, 800), (10, 70)], ids=["mixed", "chunked", "preempting"]
)
def test_logits_have_the_same_bits_beside_rows_that_sample_and_rows_that_embed(home, budget, num_blocks):
    folder = folder_of(home, "qwen3")
    preempted = 0

    async def use(engine):
        def watch(stats):
            nonlocal preempted
            preempted += stats.preempted

        engine.on_step.append(watch)
        alone = [await last(engine, embedding(prompt, PAIR, index)) for index, prompt in enumerate(prompts())]
        said = [delta async for delta in engine.generate(talk(50, prompts()[2]))]
        found = await asyncio.gather(
            *(last(engine, talk(300 + index, (index, *prompts()[2]))) for index in range(4)),
            *(last(engine, embedding(prompt, PAIR, 100 + index)) for index, prompt in enumerate(prompts())),
            *(last(engine, embedding(prompt, LAST, 200 + index)) for index, prompt in enumerate(prompts())),
        )
        assert [delta.finish_reason for delta in found] == ["length"] * 4 + ["stop"] * 12
        for prompt, before, now in zip(prompts(), alone, found[4:10], strict=True):
            assert vector(now) == pytest.approx(expected(folder, prompt), abs=2e-5)
            assert now.embedding == before.embedding
        again = [delta async for delta in engine.generate(talk(51, prompts()[2]))]
        assert [(delta.token_ids, delta.logprobs) for delta in again] == [(d.token_ids, d.logprobs) for d in said]

    run(config(folder, max_batched_tokens=budget, num_blocks=num_blocks, max_seqs=8, debug=True), use)
    assert (preempted > 0) == (num_blocks == 70)


def test_invalid_pooling_of_logits_fails_alone(home):
    async def use(engine):
        pools = (
            Pooling(kind="logits"),
            Pooling(kind="logits", token_ids=(5, VOCAB)),
            Pooling(kind="logits", token_ids=(-1,)),
            Pooling(kind="last", token_ids=(5,)),
        )
        deltas = [await last(engine, embedding((5,), pooling, number)) for number, pooling in enumerate(pools)]
        assert all("token_ids" in delta.error and delta.embedding is None for delta in deltas)
        assert (await last(engine, embedding(range(MAX_LEN), PAIR, 9))).finish_reason == "stop"

    run(config(folder_of(home, "qwen3")), use)


def entered(seq_id, length) -> Entered:
    params = SamplingParams(max_tokens=0, pooling=Pooling(kind="logits", token_ids=(4, 1)))
    return Entered(seq_id, params, length, [])


def test_a_row_of_logits_samples_nothing_and_its_neighbours_do():
    model, runner = make()
    rows = [Row(1, 0, [3, 1], [0], 1, embeds=True), Row(2, 0, [6, 5], [5], 1), Row(3, 0, [6], [6], 1, embeds=True)]
    got = step(runner, rows, [entered(1, 2), Entered(2, GREEDY, 2, []), entered(3, 1)])
    assert got.outcomes[1] == Sampled([model.greedy([6, 5])])
    assert all(isinstance(outcome, Embedded) and len(outcome.embedding) == 8 for outcome in got.outcomes[::2])
    assert got.outcomes[0] != got.outcomes[2]


def test_nan_in_logits_fails_only_its_row():
    model, runner = make()
    model.poison = 4
    rows = [Row(i, 0, tokens, [i], 1, embeds=True) for i, tokens in enumerate(([3, 4], [4, 3]))]
    failed, pooled = step(runner, rows, [entered(i, 2) for i in range(2)]).outcomes
    assert isinstance(failed, RowError) and "not finite" in failed.message
    assert isinstance(pooled, Embedded)
