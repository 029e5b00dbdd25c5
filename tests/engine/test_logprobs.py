"""Log-probabilities of prompts and outputs against transformers' own log-softmax, in a mixed batch and preempted."""

import asyncio
import random

import pytest
import torch

from engine import EngineConfig, EngineRequest, LocalEngine, SamplingParams
from tests.models import VOCAB, make, oracle

LENGTHS = (1, 2, 15, 70, 150)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make("qwen3", tmp_path_factory.mktemp("logprobs") / "qwen3", seed=5)


def expected(folder, tokens: list[int]) -> torch.Tensor:
    """Return [tokens, vocab]: row i predicts token i + 1."""
    with torch.inference_mode():
        return oracle(folder, torch.float32)(torch.tensor([tokens]), use_cache=False).logits[0].log_softmax(-1)


async def generate(config: EngineConfig, requests: list[EngineRequest]) -> tuple[list[dict], int]:
    preempted = 0

    def watch(stats) -> None:
        nonlocal preempted
        preempted += stats.preempted

    async with LocalEngine(config) as engine:
        engine.on_step.append(watch)

        async def one(request: EngineRequest) -> dict:
            found: dict = {"tokens": [], "logprobs": [], "prompt": None}
            async for delta in engine.generate(request):
                found["tokens"] += delta.token_ids
                found["logprobs"] += delta.logprobs or ()
                if delta.prompt_logprobs is not None:
                    assert found["prompt"] is None, "told twice"
                    found["prompt"] = delta.prompt_logprobs
            return found

        return await asyncio.gather(*(one(request) for request in requests)), preempted


@pytest.mark.parametrize("num_blocks", [400, 60], ids=["roomy", "preempting"])
async def test_prompts_and_outputs_score_as_in_transformers(folder, num_blocks):
    rng = random.Random(3)
    requests = [
        EngineRequest(
            id=index,
            prompt_ids=tuple(rng.randrange(VOCAB) for _ in range(length)),
            params=SamplingParams(max_tokens=60, seed=index, logprobs=3, prompt_logprobs=2 if index % 3 else 0),
        )
        for index, length in enumerate(LENGTHS * 2)
    ]
    config = EngineConfig(
        model=str(folder), dtype="float32", block_size=4, num_blocks=num_blocks, max_batched_tokens=200, debug=True
    )
    answers, preempted = await generate(config, requests)
    assert (preempted > 0) == (num_blocks == 60)
    for request, answer in zip(requests, answers, strict=True):
        prompt = list(request.prompt_ids)
        reference = expected(folder, prompt + answer["tokens"])
        assert len(answer["prompt"]) == len(prompt) - 1
        for place, entry in enumerate(answer["prompt"]):
            assert entry.logprob == pytest.approx(reference[place, prompt[place + 1]].item(), abs=1e-4)
            top = reference[place].topk(request.params.prompt_logprobs).values.tolist()
            assert list(entry.top_logprobs) == pytest.approx(top, abs=1e-4)
        for place, (token, entry) in enumerate(zip(answer["tokens"], answer["logprobs"], strict=True)):
            row = reference[len(prompt) - 1 + place]
            assert entry.logprob == pytest.approx(row[token].item(), abs=1e-4)
            assert list(entry.top_logprobs) == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)


async def test_scored_prompt_skips_the_cache_and_uses_small_chunks(folder):
    prompt = tuple(range(1, 200))
    scored = SamplingParams(max_tokens=1, prompt_logprobs=0)
    config = EngineConfig(model=str(folder), dtype="float32", num_blocks=64, max_batched_tokens=256)
    rows: list[int] = []
    async with LocalEngine(config) as engine:
        engine.on_step.append(lambda stats: rows.extend(count for _, count in stats.rows))
        for number, params in enumerate((SamplingParams(max_tokens=1), scored)):
            request = EngineRequest(id=number, prompt_ids=prompt, params=params)
            last = [delta async for delta in engine.generate(request)][-1]
            assert last.stats.cached_tokens == 0
    assert rows == [199, 64, 64, 64, 7]
