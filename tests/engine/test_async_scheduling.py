"""Steps that are launched before the one before them is collected: every response is the same, to the last bit."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from engine import EngineConfig, EngineRequest, LocalEngine, Pooling, SamplingParams, build
from engine.config import resolve
from engine.step_thread import LoopThread, ModelThread
from server.offline import LLM
from tests.engine.grammars import ENDS, PROMPT, SCHEMA, TOKENS, WORDS

BASE = EngineConfig(model="builtin", device="cpu", num_blocks=256, debug=True)
LONG = tuple(TOKENS.encode("The ship sailed over the sea, and the captain looked at the sky. " * 4).ids)
HOT: dict[str, Any] = {"max_tokens": 24, "temperature": 1.2, "stop_ids": ENDS}
PARAMS: list[dict[str, Any]] = [
    {"max_tokens": 40, "temperature": 0.0, "stop_ids": ENDS},
    {**HOT, "max_tokens": 1},
    {**HOT, "max_tokens": 2, "logprobs": 0},
    {**HOT, "top_p": 0.8, "top_k": 20, "logprobs": 3},
    {**HOT, "stop_ids": tuple(range(0, 4096, 3))},  # soon one of these is sampled
    {**HOT, "stop_ids": tuple(range(0, 4096, 3)), "min_tokens": 6},
    {**HOT, "presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    {"max_tokens": 24, "temperature": 0.0, "repetition_penalty": 1.5, "logprobs": 2},
    {**HOT, "temperature": 0.0, "bad_words": (*((a,) for a in range(260, 400)), (400, 401))},
    {**HOT, "prompt_logprobs": 2, "logprobs": 1},
    {**HOT, "max_tokens": 120, "grammar": SCHEMA},
    {**HOT, "max_tokens": 120, "grammar": SCHEMA, "logprobs": 1},
    {**HOT, "max_tokens": 120, "grammar": WORDS, "presence_penalty": 1.0},
    {**HOT, "max_tokens": 7, "grammar": SCHEMA},
    {**HOT, "allowed_ids": (10, 20, 30), "logit_bias": {10: 5.0}},
    {"max_tokens": 1, "pooling": Pooling(kind="mean")},
    {"max_tokens": 1, "pooling": Pooling(kind="last")},
    {**HOT, "temperature": 0.0, "logit_bias": {99999: 1.0}},  # invalid: fails alone
]


def requests() -> list[EngineRequest]:
    """Each of PARAMS with two prompts, of which the longer one is shared; the first three with several seeds."""
    found = []
    for params in [*PARAMS, *PARAMS[:4], *PARAMS[:4]]:
        for prompt in (PROMPT, LONG):
            number = len(found) + 1
            settings = SamplingParams(**{"seed": number, **params})
            found.append(EngineRequest(id=number, prompt_ids=prompt, params=settings))
    return found


async def responses(config: EngineConfig) -> tuple[list[list[Any]], int]:
    """Return all that each request has delivered, and the number of preemptions. Every fifth one is aborted."""
    preempted: list[int] = []
    async with LocalEngine(config) as engine:
        engine.on_step.append(lambda stats: preempted.append(stats.preempted))

        async def response(request: EngineRequest) -> list[Any]:
            tokens: list[int] = []
            logprobs: list[Any] = []
            others: list[Any] = []
            async for delta in engine.generate(request):
                tokens += delta.token_ids
                logprobs += delta.logprobs or ()
                others += [found for found in (delta.prompt_logprobs, delta.embedding, delta.error) if found]
                if request.id % 5 == 0 and len(tokens) >= 3:
                    engine.abort(request.id)
                    return [tokens[:3], logprobs[:3], others]
                if delta.finish_reason:
                    others.append(delta.finish_reason)
            return [tokens, logprobs, others]

        found = await asyncio.gather(*map(response, requests()))
        assert not engine._loop.scheduler.pool.num_held  # type: ignore[union-attr]
        return found, sum(preempted)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_batched_tokens": 20, "max_seqs": 5},
        {"num_blocks": 40, "block_size": 4, "max_seqs": 8},
        {"policy": "prefill-first", "prefix_caching": False, "max_batched_tokens": 32},
    ],
    ids=["one batch", "chunks", "few blocks", "prompts first"],
)
async def test_responses_have_the_same_bits_when_steps_are_launched_ahead(settings):
    config = replace(BASE, **settings)
    collected, _ = await responses(config)
    ahead, preempted = await responses(replace(config, async_scheduling=True))
    for request, one, other in zip(requests(), collected, ahead, strict=True):
        assert one == other, request.params
    assert {reason for _, _, others in ahead for reason in others if isinstance(reason, str)} >= {"stop", "length"}
    assert preempted or "num_blocks" not in settings


async def test_responses_have_the_same_bits_when_steps_run_on_the_loops_own_thread(monkeypatch):
    collected, _ = await responses(BASE)
    used: list[LoopThread] = []

    async def loop_thread(device: torch.device, model_thread: ModelThread) -> LoopThread:
        await model_thread.close()
        used.append(LoopThread())
        return used[-1]

    monkeypatch.setattr(build, "step_thread", loop_thread)
    ahead, _ = await responses(replace(BASE, async_scheduling=True))
    assert used
    for request, one, other in zip(requests(), collected, ahead, strict=True):
        assert one == other, request.params


@pytest.mark.parametrize(("device", "is_own"), [("cpu", False), ("cuda", True)])
async def test_steps_have_the_loops_own_thread_unless_the_device_is_a_cpu(monkeypatch, device, is_own):
    used: list[torch.device] = []
    monkeypatch.setattr(build, "use_device", used.append)
    model_thread = ModelThread()
    thread = await build.step_thread(torch.device(device), model_thread)
    assert isinstance(thread, LoopThread) is is_own and used == [torch.device("cuda")] * is_own
    if not is_own:
        assert thread is model_thread
        await model_thread.close()


def test_stop_strings_end_the_same_texts():
    bodies = {"max_tokens": 60, "n": 2, "seed": 5, "temperature": 1.0, "stop": ["e ", "."], "logprobs": True}
    texts = []
    for is_ahead in (False, True):
        with LLM(async_scheduling=is_ahead, device="cpu") as llm:
            outputs = llm.chat(["Tell me about the sea.", "Who are you?", "What is a ship?"], **bodies)
            texts.append([output.response["choices"] for output in outputs])
    assert texts[0] == texts[1]
    assert any(choice["finish_reason"] == "stop" for choices in texts[0] for choice in choices)


@pytest.mark.parametrize(("device", "is_ahead"), [("cpu", False), ("cuda", True)])
def test_steps_are_launched_ahead_unless_the_device_is_a_cpu(device, is_ahead):
    config = EngineConfig(model="m")
    assert resolve(config, device, 64).async_scheduling is is_ahead
    assert resolve(replace(config, async_scheduling=not is_ahead), device, 64).async_scheduling is not is_ahead
