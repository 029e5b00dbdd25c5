"""Multi-head latent attention: what config.json says of it, its cache, and the products of each head."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor
from transformers import AutoConfig

from engine import EngineConfig, ModelError
from engine.attention.cpu import Paged
from engine.build import build, describe
from engine.gguf.checkpoint import GgufCheckpoint
from engine.gguf.folder import folder_of
from engine.kernels.head_products import HeadProducts
from engine.machine_memory import Machine
from engine.models.mixers.latent_layer import ByTorch
from engine.models.spec import ModelSpec, read_spec
from tests.engine.test_gguf_architectures import ARCHITECTURES
from tests.engine.test_gguf_architectures import write as write_gguf
from tests.engine.test_kernels import kernels, needs_library
from tests.engine.test_models import Bench, oracle
from tests.engine.test_quantized import error, load
from tests.models import BASE, LATENT, LATENT_EXPERTS, MODEL_TYPES, MODELS, make, prompt
from tests.quantized import awq, fp8, gptq, write

PUBLISHED = {  # DeepSeek-V2-Lite
    "num_attention_heads": 16,
    "hidden_size": 2048,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}


def spec_of(kind: str, **changes: Any) -> ModelSpec:
    source = {**BASE, **LATENT, **LATENT_EXPERTS, "architectures": [MODEL_TYPES[kind]], **changes}
    spec = read_spec(source, EngineConfig(model=""), native_only=True)
    assert spec is not None and spec.decoder is not None
    return spec


# -- config.json ------------------------------------------------------------------------------------------------------


def test_the_cache_of_a_token_has_a_latent_and_the_rotated_part_of_keys_as_the_key_which_has_the_value():
    spec = spec_of("deepseek_v2", **PUBLISHED, num_hidden_layers=27, dtype="bfloat16")
    assert {(each.num_heads, each.num_kv_heads, each.head_dim, each.v_head_dim) for each in spec.layers} == {
        (16, 1, 576, 512)
    }
    assert spec.kv_bytes_per_token == 27 * 576 * 2
    of_all_heads = 27 * 16 * (192 + 128) * 2
    assert spec.kv_bytes_per_token * 8 < of_all_heads
    assert sum(Paged.as_cached(layer).bytes(torch.bfloat16) for layer in spec.layers) == 27 * (576 + 512) * 2


@pytest.mark.parametrize(
    ("kind", "attention", "numbers"),
    [("cuda", "reference", 576), ("cpu", "reference", 576), pytest.param("cpu", "cpu", 1088, marks=needs_library)],
)
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_the_plan_counts_a_latent_once_unless_the_cpu_kernels_need_it_twice(
    tmp_path, monkeypatch, kind, attention, numbers, *, kv_dtype
):
    source = {**BASE, **LATENT, **LATENT_EXPERTS, **PUBLISHED, "architectures": [MODEL_TYPES["deepseek_v2"]]}
    (tmp_path / "config.json").write_text(json.dumps({**source, "num_hidden_layers": 27, "dtype": "bfloat16"}))
    monkeypatch.setattr("engine.build.pick_device", lambda name: torch.device(kind))
    config = EngineConfig(model=str(tmp_path), attention=attention, kv_dtype=kv_dtype, kv_cache_memory=1 << 30)
    found = describe(config, weights=False).arrange(Machine(kind, 64 << 30, 64 << 30))
    line = numbers * 2 if kv_dtype == "auto" else numbers + 4 * (1 + (numbers == 1088))
    assert found.kv_bytes_per_token == 27 * line
    assert found.num_blocks == (1 << 30) // (config.block_size * 27 * line)


@pytest.mark.parametrize("attention", [pytest.param("cpu", marks=needs_library), "reference"])
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_an_engine_allocates_what_its_plan_counts(tmp_path, attention, kv_dtype):
    folder = str(make("youtu", tmp_path))
    built = build(EngineConfig(model=folder, device="cpu", attention=attention, kv_dtype=kv_dtype, num_blocks=11))
    allocated = sum(layer.tensor.untyped_storage().nbytes() for layer in built.runner.cache.layers)
    assert allocated == 11 * built.config.block_size * built.info.kv_bytes_per_token
    assert built.info.kv_cache_bytes == allocated


def test_scores_are_scaled_by_the_size_of_a_heads_keys_not_by_that_in_the_cache():
    spec = spec_of("deepseek_v3")
    assert {layer.scale for layer in spec.layers} == {(16 + 8) ** -0.5}


def test_yarn_scales_scores_as_it_does_those_of_deepseek_v2():
    rope = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "mscale": 0.707}
    spec = spec_of("deepseek_v2", rope_scaling={**rope, "mscale_all_dim": 0.707}, rope_theta=10000)
    (scale,) = {layer.scale for layer in spec.layers}
    assert scale == pytest.approx(24**-0.5 * (0.1 * 0.707 * math.log(40) + 1) ** 2)
    (plain,) = {layer.scale for layer in spec_of("deepseek_v2", rope_scaling=rope).layers}
    assert plain == 24**-0.5


@pytest.mark.parametrize(
    ("kind", "changes", "says"),
    [
        ("deepseek_v3", {"qk_rope_head_dim": 7}, "qk_rope_head_dim must be even for rotary embeddings, not 7"),
        ("deepseek_v3", {"kv_lora_rank": 0}, "kv_lora_rank must be a positive whole number, not 0"),
        ("deepseek_v3", {"kv_lora_rank": 1 << 20}, "kv_lora_rank must be at most 8192"),
        ("deepseek_v3", {"q_lora_rank": "many"}, "q_lora_rank must be a positive whole number, not 'many'"),
        ("deepseek_v3", {"v_head_dim": -1}, "v_head_dim must be a positive whole number, not -1"),
        ("deepseek_v3", {"n_group": 3}, "8 experts cannot be divided into 3 groups"),
        ("deepseek_v3", {"attention_bias": True}, "needs attention_bias to be False for DeepseekV3ForCausalLM"),
        (
            "deepseek_v2",
            {"topk_method": "noaux_tc"},
            "topk_method must be greedy or group_limited_greedy, not noaux_tc",
        ),
        (
            "deepseek_v2",
            {"topk_method": "group_limited_greedy", "n_group": 3},
            "8 experts cannot be divided into 3 groups",
        ),
        ("deepseek_v2", {"norm_topk_prob": True}, "needs norm_topk_prob to be False"),
    ],
)
def test_sizes_that_no_model_has_and_what_only_transformers_computes_get_a_sentence(kind, changes, says):
    with pytest.raises(ModelError, match=says):
        spec_of(kind, **changes)


def test_keys_that_config_json_leaves_out_are_those_of_transformers():
    for kind in ("deepseek_v2", "deepseek_v3", "glm4_moe_lite"):
        theirs = AutoConfig.for_model(kind)
        source = {**BASE, "num_hidden_layers": 5, "architectures": [MODEL_TYPES[kind]]}
        source |= {"n_routed_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 32}
        spec = read_spec(source, EngineConfig(model=""), native_only=True)
        assert spec is not None and spec.decoder is not None and spec.decoder.experts is not None
        latent, experts = spec.decoder.shapes[0].latent, spec.decoder.experts
        assert (latent.query_rank, latent.rank, latent.plain, latent.rotated, latent.value) == (
            theirs.q_lora_rank, theirs.kv_lora_rank, theirs.qk_nope_head_dim, theirs.qk_rope_head_dim, theirs.v_head_dim
        )  # fmt: skip
        assert experts.shared == 32 * theirs.n_shared_experts
        first = theirs.mlp_layer_types.count("dense") if kind == "glm4_moe_lite" else theirs.first_k_dense_replace
        assert experts.dense == frozenset(range(first))
        groups = (1, 1) if kind == "deepseek_v2" else (theirs.n_group, theirs.topk_group)
        assert experts.routing == (kind != "deepseek_v2", *groups, theirs.routed_scaling_factor)


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3", "youtu"])
def test_the_plan_counts_the_weights_that_are_loaded(tmp_path, name):
    folder = make(name, tmp_path)
    model = load(folder)
    assert model.spec.num_params == model.num_params
    assert model.spec.num_params == sum(weight.numel() for weight in oracle(folder, torch.float32).parameters()) + (
        8 * 2 if name == "deepseek_v3" else 0  # the biases by which experts are chosen, which are buffers there
    )


# -- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [fp8("block"), gptq(), awq()], ids=["fp8", "gptq", "awq"])
def test_the_weights_of_heads_are_dequantized_and_counted_as_such(tmp_path, kind):
    sizes = {"q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 96, "qk_rope_head_dim": 32, "v_head_dim": 64}
    reference = write(tmp_path, kind, name="youtu", num_key_value_heads=4, **sizes, bos_token_id=1, eos_token_id=2)
    plain = load(tmp_path, cpu_isa="torch")
    assert error(plain, reference) < 1e-5
    fine = load(tmp_path)
    assert error(fine, reference) < 1e-3
    of_heads, layers = 4 * (96 + 64) * 128, len(fine.layers)
    if fine.spec.in_blocks:
        assert fine.spec.dequantized == of_heads * layers
    packed = [linear.multiplied() for layer in fine.layers for linear in (layer.qkv, layer.output)]
    assert packed and fine.weights_bytes == fine.spec.weights_bytes


@needs_library
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_the_projection_of_queries_from_their_latent_is_quantized(tmp_path, quantization):
    folder = make("youtu", tmp_path, dtype=torch.bfloat16)
    plain, rounded = load(folder, dtype="bfloat16"), load(folder, dtype="bfloat16", quantization=quantization)
    ids = prompt(40, seed=1)
    want, got = (Bench(model).step({0: ids})[0].double() for model in (plain, rounded))
    assert 1e-4 < ((got - want).norm() / want.norm()).item() < 0.4
    queries = rounded.layers[0].latent.queries
    assert queries is not None and queries._packed.bits == (8 if quantization == "int8" else 5)


# -- products ---------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["avx2", "avx512", "avx512bf16", "amx"])
def variant(request):
    return kernels(request.param)


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "rows", "columns"), [(3, 40, 24), (16, 512, 128), (1, 7, 5)])
def test_each_head_is_multiplied_by_its_own_weight(variant, dtype, heads, rows, columns):
    weights = torch.randn(heads, rows, columns).to(dtype)
    x = torch.randn(9, heads, columns + 3).to(dtype)[..., :columns]  # strided
    want = torch.einsum("thc,hrc->thr", x.double(), weights.double())
    got = HeadProducts(variant, weights.flatten(0, 1), heads)(x)
    limit = 1e-5 if dtype == torch.float32 else 1e-2
    assert got.shape == (9, heads, rows) and ((got.double() - want).abs().max() / want.abs().max()).item() < limit
    assert torch.allclose(ByTorch(weights.double())(x.double()), want)


@needs_library
@pytest.mark.usefixtures("same_threads_after")
def test_a_tokens_products_do_not_depend_on_other_tokens_or_threads(variant):
    products = HeadProducts(variant, torch.randn(5 * 64, 32).bfloat16(), 5)
    x = torch.randn(70, 5, 32).bfloat16()
    want = torch.cat([products(each[None]) for each in x])
    for threads in (1, 3, 8):
        torch.set_num_threads(threads)
        for count in (2, 7, 70):
            assert torch.equal(products(x[:count]), want[:count])


@needs_library
def test_products_of_other_shapes_and_types_are_refused():
    products = HeadProducts(kernels("avx2"), torch.randn(3 * 8, 4), 3)
    wrong: list[Tensor] = [
        torch.randn(2, 3, 5),
        torch.randn(2, 4, 4),
        torch.randn(2, 12),
        torch.randn(2, 3, 4).double(),
    ]
    for x in wrong:
        with pytest.raises(ValueError, match=r"not \[tokens, 3, 4\] of torch.float32"):
            products(x)


@needs_library
@pytest.mark.parametrize("kind", [Type.Q8_0, Type.Q4_0], ids=lambda kind: kind.name)
def test_the_weights_of_heads_stay_in_the_blocks_of_a_gguf_file(tmp_path, monkeypatch, kind):
    sizes = {"q_lora_rank": 256, "kv_lora_rank": 256, "qk_nope_head_dim": 256, "v_head_dim": 64, "hidden_size": 256}
    monkeypatch.setitem(MODELS, "wide", ("youtu", {**MODELS["youtu"][1], **sizes, "intermediate_size": 256}))
    monkeypatch.setitem(ARCHITECTURES, "wide", "deepseek2")
    folder = folder_of(write_gguf(make("wide", tmp_path / "model"), tmp_path / "model.gguf", "wide", kind))
    model = load(folder, gguf_activations="int16")
    assert model.weights_bytes == model.spec.weights_bytes
    name, rows = "model.layers.0.self_attn.k_b_proj.weight", torch.empty(4 * 256, 256)
    GgufCheckpoint(folder).fill({name: rows}, lambda num_bytes: None)
    absorb, x = model.layers[0].latent.absorb, torch.randn(5, 4, 256)
    assert isinstance(absorb, HeadProducts) and {packed.format for packed in absorb._packed} == {int(kind)}
    want = ByTorch(rows.double().unflatten(0, (4, -1)))(x.double())
    assert ((absorb(x).double() - want).abs().max() / want.abs().max()).item() < 1e-3
