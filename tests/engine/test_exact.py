"""The guarantee of `exact`, tested through the whole engine: a request's tokens and the bits of its logprobs in any
batch."""

from __future__ import annotations

import asyncio
import random

import pytest
import torch
from msgspec.structs import replace

from engine import ConfigError, EngineConfig, EngineRequest, LocalEngine, SamplingParams
from engine.build import build, describe
from engine.kernels.library import choose
from tests.engine.test_models import Bench, load
from tests.models import MODELS, VOCAB, cache_groups, make, prompt

FEW = 14  # blocks of each group of layers: so few that requests are preempted
Found = list[tuple[list[int], list[float]]]


def requests() -> list[EngineRequest]:
    rng = random.Random(3)
    shared = tuple(rng.randrange(3, VOCAB) for _ in range(20))
    found = []
    for number, length in enumerate((1, 3, 70, 16, 31, 33, 5, 48)):
        ids = (*shared, *(rng.randrange(3, VOCAB) for _ in range(length)))
        params = SamplingParams(max_tokens=12, temperature=0.8, top_p=0.9, seed=number, logprobs=3)
        found.append(EngineRequest(id=number, prompt_ids=ids, params=params))
    return found


async def serve(config: EngineConfig, *, together: bool) -> tuple[Found, bool, int]:
    """Return the tokens and logprobs of each request, the engine's `exact`, and the number of preemptions."""
    preempted: list[int] = []
    async with LocalEngine(config) as engine:
        engine.on_step.append(lambda stats: preempted.append(stats.preempted))

        async def one(request: EngineRequest) -> tuple[list[int], list[float]]:
            tokens: list[int] = []
            logprobs: list[float] = []
            async for delta in engine.generate(request):
                tokens += delta.token_ids
                for entry in delta.logprobs or ():
                    logprobs += [entry.logprob, *entry.top_logprobs]
            return tokens, logprobs

        if together:
            found = list(await asyncio.gather(*map(one, requests())))
        else:
            found = [await one(request) for request in requests()]
        return found, engine.info.exact, sum(preempted)


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize(
    ("name", "dtype", "quantization", "kv_dtype"),
    [
        ("qwen3", "float32", "none", "auto"),
        ("qwen3", "bfloat16", "none", "auto"),
        ("qwen3", "float32", "int4", "auto"),
        ("qwen3", "bfloat16", "int8", "auto"),
        ("qwen3", "bfloat16", "none", "int8"),
        ("qwen3", "bfloat16", "int8", "int8"),
        ("qwen3_moe", "float32", "none", "auto"),
        ("qwen3_moe", "bfloat16", "int8", "auto"),
        ("mixtral", "bfloat16", "none", "auto"),
        ("gpt_oss", "bfloat16", "none", "auto"),
        ("gpt_oss", "float32", "int8", "int8"),
        ("glm4_moe-groups", "bfloat16", "none", "auto"),
        ("ernie4_5_moe", "bfloat16", "none", "auto"),
        ("minimax_m2", "bfloat16", "int8", "auto"),
        ("hunyuan_v1_dense", "bfloat16", "none", "auto"),
        ("llama-gelu", "bfloat16", "none", "auto"),
        ("smollm3-window", "bfloat16", "none", "auto"),
        ("olmo3", "bfloat16", "none", "auto"),
        ("granite", "bfloat16", "int8", "auto"),
        ("granitemoehybrid-mamba", "float32", "none", "auto"),
        ("granitemoehybrid-mamba", "bfloat16", "int8", "int8"),
        ("granitemoehybrid-experts", "bfloat16", "none", "auto"),
        ("nemotron_h", "float32", "none", "auto"),
        ("nemotron_h", "bfloat16", "int4", "int8"),
        ("nemotron_h-experts", "bfloat16", "none", "auto"),
        ("nemotron_h-experts", "bfloat16", "int8", "auto"),
        ("deepseek_v2", "float32", "none", "auto"),
        ("deepseek_v2-groups", "bfloat16", "none", "auto"),
        ("deepseek_v3", "bfloat16", "int8", "int8"),
        ("deepseek_v3-groups", "bfloat16", "none", "auto"),
        ("youtu", "bfloat16", "int4", "auto"),
        ("mistral4", "bfloat16", "none", "auto"),
        ("minicpm3", "bfloat16", "int8", "auto"),
        ("arcee-bias", "bfloat16", "int8", "auto"),
        ("afmoe", "float32", "none", "auto"),
        ("afmoe", "bfloat16", "int4", "auto"),
        ("laguna", "float32", "none", "auto"),
        ("laguna-layers", "bfloat16", "none", "auto"),
        ("nemotron_h-latents", "bfloat16", "none", "auto"),
        ("nemotron_h-latents", "bfloat16", "int4", "auto"),
        ("granite_swa", "bfloat16", "none", "auto"),
        ("gemma2", "bfloat16", "none", "auto"),
        ("glm4", "bfloat16", "none", "auto"),
        ("ministral3", "bfloat16", "none", "auto"),
        ("cohere2", "bfloat16", "none", "auto"),
        ("phi3-partial", "bfloat16", "none", "auto"),
        ("gemma2", "float32", "int4", "int8"),
        ("gemma3_text-scaled", "bfloat16", "none", "auto"),
        ("gemma4_text-small", "bfloat16", "none", "auto"),
        ("gemma4_text-experts", "float32", "int4", "int8"),
        ("lfm2", "bfloat16", "none", "auto"),
        ("lfm2_moe", "bfloat16", "int8", "auto"),
        ("qwen2_moe", "float32", "none", "auto"),
        ("qwen3_5_moe_text", "bfloat16", "int8", "auto"),
        ("qwen3_5_text", "float32", "none", "auto"),
        ("qwen3_5_text", "bfloat16", "none", "auto"),
        ("qwen3_5_text-listed", "bfloat16", "int8", "int8"),
    ],
)
async def test_an_exact_engine_gives_the_same_bits_however_it_is_used(tmp_path, name, dtype, quantization, kv_dtype):
    if quantization != "none" and not choose("auto", torch.device("cpu"), torch.float32).invariant:
        pytest.skip("no kernels here")
    folder = make(name, tmp_path, dtype=getattr(torch, dtype))
    base = {"model": str(folder), "device": "cpu", "dtype": dtype, "num_blocks": 64, "max_seqs": 8}
    base |= {"quantization": quantization, "kv_dtype": kv_dtype}
    alone, exact, _ = await serve(EngineConfig(**base, prefix_caching=False, threads=1), together=False)
    if not exact:
        pytest.skip("torch computes here")
    assert all(len(tokens) == 12 and len(logprobs) >= 48 for tokens, logprobs in alone)
    num_groups = len(cache_groups(folder).windows)
    few = FEW * num_groups
    for settings in (
        {"prefix_caching": False},
        {"prefix_caching": True, "max_batched_tokens": 9, "threads": 2},  # in chunks, after hits in the cache
        {"prefix_caching": True, "num_blocks": few, "threads": 1},
        {"block_size": 5, "num_blocks": 200},
    ):
        before = torch.get_num_threads()
        try:
            found, _, preempted = await serve(EngineConfig(**{**base, **settings}), together=True)
            assert found == alone
            # Of several groups, those with a window free their blocks as fast as the others grow.
            assert preempted or settings.get("num_blocks") != few or num_groups > 1
        finally:
            torch.set_num_threads(before)


@pytest.mark.parametrize(
    "settings, reason",
    [
        ({"dtype": "float16"}, "the CPU kernels take float32 and bfloat16"),
        ({"cpu_isa": "torch"}, "torch computes the products"),
        ({"attention": "reference"}, "the results of the attention backend depend on it"),
        ({"implementation": "transformers"}, "what it computes can depend on the batch"),
    ],
)
def test_a_batch_invariant_engine_is_exact_or_does_not_start(tmp_path, settings, reason):
    if not choose("auto", torch.device("cpu"), torch.float32).invariant:
        pytest.skip("no kernels here")
    config = EngineConfig(model=str(make("qwen3", tmp_path)), device="cpu", batch_invariant=True, num_blocks=8)
    assert build(config).info.exact
    with pytest.raises(ConfigError, match=f"`batch_invariant` cannot be kept here, so leave it out: .*{reason}"):
        describe(replace(config, **settings))


@pytest.mark.usefixtures("same_threads_after")
def test_gates_of_attention_have_the_same_bits_wherever_threads_divide_them(tmp_path, monkeypatch):
    """Of 33,000 numbers and more in float32, torch's sigmoid rounds some by the thread that computes them."""
    size = {"num_attention_heads": 8, "head_dim": 256, "layer_types": ["full_attention"] * 2 + ["linear_attention"]}
    monkeypatch.setitem(MODELS, "qwen3_5-wide", ("qwen3_5_text", {**MODELS["qwen3_5_text"][1], **size}))
    model = load(make("qwen3_5-wide", tmp_path), torch.float32)
    if not model.product.invariant:
        pytest.skip("torch computes here")
    torch.set_num_threads(3)
    ids = prompt(151)
    whole = Bench(model).step({0: ids})[0]
    bench = Bench(model)
    parts = [bench.step({0: ids[start : start + 13]})[0] for start in range(0, len(ids), 13)]
    assert torch.equal(torch.cat(parts), whole)
