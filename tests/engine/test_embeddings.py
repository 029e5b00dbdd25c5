"""Embeddings against transformers' last hidden states: alone, mixed, chunked, cached, preempted, and resubmitted."""

import asyncio
import os
import random
import signal
import types
from dataclasses import replace

import numpy as np
import pytest
import torch

from engine import EngineConfig, EngineRequest, LocalEngine, Pooling, ProcessEngine, SamplingParams, TokenDelta
from engine.batch import Batch, Embedded, Entered, Row, RowError, Sampled
from engine.loop import StepOutOfMemory
from engine.models import describe
from engine.models.trial import overheard
from tests.engine.faulty import stopping
from tests.engine.test_runner import GREEDY, make, step
from tests.engine.test_scheduler import Driver
from tests.models import MAX_LEN, VOCAB, cache_groups, oracle
from tests.models import make as make_model

LAST, MEAN = Pooling(kind="last"), Pooling(kind="mean")
LENGTHS = (1, 2, 15, 70, 150, MAX_LEN)
# Three of our own decoder, one with a head of its own, one with capped logits; then transformers' code: other norms,
# learned positions.
NAMES = ("llama", "qwen3", "gemma2", "gpt2", "opt")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("embeddings")


def folder_of(home, name):
    return make_model(name, home / name, seed=5)


def embedding(prompt, pooling=LAST, number=0, **fields) -> EngineRequest:
    params = SamplingParams(max_tokens=0, pooling=pooling)
    return EngineRequest(id=number, prompt_ids=tuple(prompt), params=params, **fields)


def prompts(seed=3) -> list[tuple[int, ...]]:
    rng = random.Random(seed)
    return [tuple(rng.randrange(VOCAB) for _ in range(length)) for length in LENGTHS]


def states(folder, prompt) -> torch.Tensor:
    """Return transformers' last hidden states, [tokens, hidden]."""
    with torch.inference_mode():
        model = oracle(folder, torch.float32).base_model
        return model(torch.tensor([prompt]), use_cache=False).last_hidden_state[0].double()


def expected(folder, request: EngineRequest) -> np.ndarray:
    found = states(folder, request.prompt_ids)
    return (found.mean(0) if request.params.pooling.kind == "mean" else found[-1]).numpy()


def vector(delta: TokenDelta) -> np.ndarray:
    assert delta.embedding is not None, delta
    return np.frombuffer(delta.embedding, "<f4").astype(np.float64)


def check(folder, request: EngineRequest, delta: TokenDelta) -> None:
    got, want = vector(delta), expected(folder, request)
    assert (delta.finish_reason, delta.token_ids) == ("stop", ())
    assert np.linalg.norm(got) == pytest.approx(1, abs=1e-6)
    assert got @ want / np.linalg.norm(want) > 0.99999


async def last(engine, request: EngineRequest) -> TokenDelta:
    return [delta async for delta in engine.generate(request)][-1]


def both(number=0) -> list[EngineRequest]:
    """Return requests for every prompt with each pooling."""
    pairs = [(prompt, pooling) for prompt in prompts() for pooling in (LAST, MEAN)]
    return [embedding(prompt, pooling, number + i) for i, (prompt, pooling) in enumerate(pairs)]


def run(config: EngineConfig, use):
    async def main():
        async with LocalEngine(config) as engine:
            return await use(engine)

    return asyncio.run(main())


def config(folder, **more) -> EngineConfig:
    return EngineConfig(**{"model": str(folder), "dtype": "float32", "block_size": 4, "num_blocks": 800, **more})


@pytest.mark.parametrize("name", NAMES)
def test_embeddings_equal_transformers_alone_and_from_the_prefix_cache(home, name):
    folder = folder_of(home, name)

    async def use(engine):
        assert engine.info.hidden_size == 64
        for number in (0, 100):  # the second time the prompts are known
            for request in both(number):
                delta = await last(engine, request)
                check(folder, request, delta)
                # A block may hold the last token only where more follow: that one is always computed.
                known = (len(request.prompt_ids) - 1) // 4 * 4
                hits = known if number and request.params.pooling == LAST else 0
                # The other pooling of the same prompt came before.
                assert delta.stats.cached_tokens == (hits if number or request.params.pooling == MEAN else 0)
                assert (delta.stats.output_tokens, delta.stats.first_token) == (0, 0.0)
                assert delta.stats.last_token >= delta.stats.scheduled > 0

    run(config(folder, debug=True), use)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
@pytest.mark.parametrize(
    ("budget", "num_blocks"), [(600, 800), (24, 800), (10, 70)], ids=["mixed", "chunked", "preempting"]
)
def test_embeddings_are_the_same_beside_rows_that_generate(home, name, budget, num_blocks):
    folder = folder_of(home, name)
    num_groups = len(cache_groups(folder).windows)
    preempted = mixed = 0

    async def use(engine):
        def watch(stats):
            nonlocal preempted, mixed
            preempted += stats.preempted
            mixed += stats.prompt_tokens > 0 and stats.decode_tokens > 0

        engine.on_step.append(watch)
        talk = [
            EngineRequest(
                id=1000 + i, prompt_ids=prompts()[2], params=SamplingParams(max_tokens=80, seed=i, temperature=1.0)
            )
            for i in range(3)
        ]
        alone = [delta.token_ids for delta in [await whole(engine, request) for request in talk]]
        asked = both()
        again = [EngineRequest(id=r.id + 10, prompt_ids=r.prompt_ids, params=r.params) for r in talk]
        found = await asyncio.gather(*(whole(engine, r) for r in again), *(last(engine, r) for r in asked))
        assert [delta.token_ids for delta in found[:3]] == alone, "an embedding changed what a neighbour says"
        for request, delta in zip(asked, found[3:], strict=True):
            check(folder, request, delta)

    run(config(folder, max_batched_tokens=budget, num_blocks=num_blocks * num_groups, max_seqs=8, debug=True), use)
    assert mixed
    # Of several groups, those with a window free their blocks as fast as the others grow.
    assert (preempted > 0) == (num_blocks == 70) or num_groups > 1


async def whole(engine, request: EngineRequest) -> TokenDelta:
    """Return a request's only delta."""
    deltas = [delta async for delta in engine.generate(request)]
    return TokenDelta(id=request.id, token_ids=tuple(token for delta in deltas for token in delta.token_ids))


def test_fewer_dimensions_are_the_first_ones_at_length_1(home):
    folder = folder_of(home, "llama")

    async def use(engine):
        for pooling in (LAST, MEAN):
            full = vector(await last(engine, embedding(prompts()[2], pooling)))
            short = Pooling(kind=pooling.kind, dimensions=7)
            few = vector(await last(engine, embedding(prompts()[2], short)))
            assert few == pytest.approx(full[:7] / np.linalg.norm(full[:7]), abs=1e-6)

    run(config(folder), use)


def test_input_that_cannot_be_embedded_fails_alone(home):
    folder = folder_of(home, "llama")

    async def use(engine):
        deltas = await asyncio.gather(
            last(engine, embedding(range(MAX_LEN + 1), LAST, 1)),
            last(engine, embedding((5, VOCAB), LAST, 2)),
            last(engine, embedding((5,), Pooling(kind="max"), 3)),
            last(engine, embedding((5,), LAST, 4, output_ids=(6,))),
            last(engine, embedding((), LAST, 5)),
            last(engine, embedding((5,), Pooling(dimensions=0), 7)),
            last(engine, embedding((5,), LAST, 6)),
        )
        told = [delta.error for delta in deltas]
        assert [str(MAX_LEN + 1) in told[0], str(VOCAB) in told[1], "max" in told[2]] == [True] * 3
        assert ["output" in told[3], "no tokens" in told[4], "dimension" in told[5], told[6]] == [True] * 3 + [None]
        assert [delta.embedding is None for delta in deltas] == [True] * 6 + [False]

    run(config(folder), use)


async def test_embedding_is_computed_after_an_engine_restart():
    prompt = [token % 500 + 20 for token in range(1500)]

    # A prompt takes 375 steps, and the second one stops the engine.
    settings = EngineConfig(model="builtin", num_blocks=400, max_seqs=2, max_batched_tokens=4)
    engine = ProcessEngine(settings, stopping(400))
    await engine.start()
    await engine.ready()
    try:
        undisturbed = vector(await last(engine, embedding(prompt, MEAN, 1)))
        reader = asyncio.create_task(last(engine, embedding(prompt, MEAN, 2)))
        before = engine.status.last_step
        while engine.status.last_step == before:
            await asyncio.sleep(0.005)
        assert not reader.done()
        os.kill(engine.pid, signal.SIGKILL)
        again = vector(await reader)
        assert engine.status.restarts == 1
        assert again @ undisturbed > 0.99999
    finally:
        await engine.close()


def test_abort_ends_a_partly_computed_prompt(home):
    async def use(engine):
        reader = asyncio.create_task(last(engine, embedding(prompts()[-1], MEAN, 1)))
        while not engine.status.running:
            await asyncio.sleep(0)
        engine.abort(1)
        delta = await reader
        assert (delta.finish_reason, delta.embedding) == ("abort", None)

    run(config(folder_of(home, "llama"), max_batched_tokens=4, max_seqs=2, debug=True), use)


# The scheduler's rows


def shapes(driver: Driver) -> list[tuple[int, int, int, bool]]:
    return [(row.start, len(row.token_ids), row.num_hidden, row.embeds) for row in driver.batch.rows]


def test_mean_pooling_computes_every_token_and_publishes_its_blocks():
    driver = Driver(max_batched_tokens=8)
    driver.add("a", range(1, 13), max_tokens=0, params={"pooling": MEAN})
    driver.launch()
    assert shapes(driver) == [(0, 8, 8, False)]
    driver.collect()
    driver.launch()
    assert shapes(driver) == [(8, 4, 4, True)]
    driver.scheduler.abort(1)
    driver.collect()
    driver.add("b", range(1, 13), max_tokens=0, params={"pooling": LAST})
    driver.launch()
    assert shapes(driver) == [(8, 4, 1, True)], "two blocks of four were found"
    driver.scheduler.abort(2)
    driver.collect()
    driver.add("c", range(1, 13), max_tokens=0, params={"pooling": MEAN, "prompt_logprobs": 2})
    driver.launch()
    assert shapes(driver) == [(0, 8, 8, False)], "what is found in the cache has no hidden states"
    assert [row.num_logits for row in driver.batch.rows] == [0]


def test_incomplete_prompt_has_no_embedding():
    driver = Driver(max_batched_tokens=8)
    driver.add("a", 12, max_tokens=0, params={"pooling": LAST})
    driver.launch()
    assert shapes(driver) == [(0, 8, 0, False)]
    assert driver.collect() == []
    driver.launch()
    assert shapes(driver) == [(8, 4, 1, True)]


# The runner's sums


def mean_of(model, tokens) -> np.ndarray:
    """Return MeanModel's hidden states: each is the mean of all tokens so far."""
    one_hot = torch.nn.functional.one_hot(torch.tensor(tokens), model.spec.vocab_size).double()
    found = torch.stack([one_hot[: i + 1].mean(0) for i in range(len(tokens))]).mean(0).numpy()
    return found / np.linalg.norm(found)


def entered(seq_id, pooling, length) -> Entered:
    return Entered(seq_id, SamplingParams(max_tokens=0, pooling=pooling), length, [])


def numbers(data: bytes) -> np.ndarray:
    return np.frombuffer(data, "<f4")


def test_chunks_are_accumulated_beside_sampling_rows():
    model, runner = make()
    tokens = [3, 1, 4, 1, 5, 9]
    rows = [Row(1, 0, tokens[:4], [0, 1], 0, num_hidden=4), Row(2, 0, [6, 5], [5], 1)]
    got = step(runner, rows, [entered(1, MEAN, 6), Entered(2, GREEDY, 2, [])])
    assert got.outcomes == [None, Sampled([model.greedy([6, 5])])]
    rows = [Row(2, 2, [7], [], 1), Row(1, 4, tokens[4:], [], 0, num_hidden=2, embeds=True)]
    got = step(runner, rows)
    assert got.outcomes[0] == Sampled([model.greedy([6, 5, 7])])
    assert numbers(got.outcomes[1].embedding) == pytest.approx(mean_of(model, tokens), abs=1e-6)


def test_sums_start_at_zero_after_preemption_and_slot_reuse():
    model, runner = make(max_seqs=1)
    step(runner, [Row(1, 0, [3, 3], [0], 0, num_hidden=2)], [entered(1, MEAN, 4)])
    rows = [Row(1, 0, [3, 3, 8, 1], [2], 0, num_hidden=4, embeds=True)]
    got = step(runner, rows, [entered(1, MEAN, 4)], [1])
    assert numbers(got.outcomes[0].embedding) == pytest.approx(mean_of(model, [3, 3, 8, 1]), abs=1e-6)
    rows = [Row(2, 0, [5, 6], [0], 0, num_hidden=2, embeds=True)]
    got = step(runner, rows, [entered(2, MEAN, 2)], [1])
    assert numbers(got.outcomes[0].embedding) == pytest.approx(mean_of(model, [5, 6]), abs=1e-6)


def test_step_repeated_after_out_of_memory_counts_tokens_once(monkeypatch):
    model, runner = make()
    params = SamplingParams(max_tokens=3, temperature=0.0)
    rows = [Row(1, 0, [3, 1, 4], [0], 0, num_hidden=3), Row(2, 0, [6], [5], 1)]
    step(runner, rows, [entered(1, MEAN, 5), Entered(2, params, 1, [])])
    rows = [Row(1, 3, [1, 5], [1], 0, num_hidden=2, embeds=True), Row(2, 1, [7], [], 1)]
    batch = Batch(2, rows)
    for where, name in ((runner.sampler, "sample"), (torch, "stack")):
        with monkeypatch.context() as patch:
            patch.setattr(where, name, lambda *_: (_ for _ in ()).throw(MemoryError()))
            with pytest.raises(StepOutOfMemory):
                runner.launch(batch).sample()
    got = runner.launch(batch).sample().result()
    assert numbers(got.outcomes[0].embedding) == pytest.approx(mean_of(model, [3, 1, 4, 1, 5]), abs=1e-6)


def test_nan_in_hidden_states_fails_only_its_row():
    model, runner = make()
    model.poison = 4
    rows = [Row(i, 0, tokens, [i], 0, num_hidden=1, embeds=True) for i, tokens in enumerate(([3, 4], [4, 3]))]
    got = step(runner, rows, [entered(i, LAST, 2) for i in range(2)])
    failed, embedded = got.outcomes
    assert isinstance(failed, RowError) and "not finite" in failed.message
    assert isinstance(embedded, Embedded)


def test_model_without_hidden_states_fails_only_embedding_rows():
    model, runner = make()
    forward = model.forward
    model.forward = lambda step: forward(replace(step, hidden_at=None))
    rows = [Row(1, 0, [3, 1], [0], 0, num_hidden=2), Row(2, 0, [6], [5], 1)]
    got = step(runner, rows, [entered(1, MEAN, 4), Entered(2, GREEDY, 1, [])])
    failed, sampled = got.outcomes
    assert isinstance(failed, RowError) and "no hidden states" in failed.message
    assert sampled == Sampled([model.greedy([6])])


# transformers' models


def test_model_without_a_separate_head_has_no_hidden_states():
    model = types.SimpleNamespace()
    model.get_decoder = lambda: model
    with overheard(model) as found:
        pass
    assert found == []


def test_the_size_of_hidden_states_is_known_before_the_weights(home):
    for name in NAMES:
        assert describe(folder_of(home, name), EngineConfig(model="m")).hidden_size == 64
