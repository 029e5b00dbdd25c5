"""Architectures that differ from Llama: their settings, the size of their weights, and what computes their layers."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine import EngineConfig, ModelError, plan
from engine.kernels.library import Choice, choose
from engine.models import Forward
from engine.models.decoder import Decoder
from engine.models.decoder_layer import Layer
from engine.models.executor import Eager
from engine.models.families.architectures import MODEL_TYPES
from engine.models.fused import Fused
from engine.models.gpu import executor as on_gpu
from engine.models.layers import Gated, softcap
from engine.models.rope import Rotary, frequencies
from engine.models.spec import ModelSpec, read_spec
from tests.engine.test_models import CPU, Bench, prompt, whole
from tests.models import BASE, FLOAT32_ONLY, MODELS, load_model, make, oracle

# What computes the layers on a CPU with our kernels.
EXECUTORS = {
    "smollm3": Fused,
    "olmo2": Eager,
    "exaone4": Eager,
    "olmo3-yarn": Eager,
    "granite-bias": Fused,
    "gemma2": Eager,
    "gemma3_text": Eager,
    "gemma4_text-small": Eager,
    "gemma4_text": Eager,
    "phi3-partial": Fused,
    "cohere2-bias": Eager,
    "ministral": Fused,
    "ministral3": Eager,
    "glm4": Eager,
    "granitemoehybrid": Fused,
    "granitemoehybrid-mamba": Eager,
    "nemotron_h": Eager,
    "seed_oss-bias": Fused,
    "ernie4_5": Eager,
    "hunyuan_v1_dense": Eager,
    "glm": Eager,
    "gemma": Eager,
    "internlm3-bias": Fused,
    "helium": Eager,
    "cwm": Fused,
    "arcee-bias": Fused,
    "minicpm3": Eager,
    "cohere-bias": Eager,
    "vaultgemma": Eager,
    "granite_swa-bases": Eager,
    "mellum": Fused,
    "hy_v3": Fused,
}


def load(folder: Path, **settings: str) -> Decoder:
    model = load_model(EngineConfig(model=str(folder), **settings), folder)
    assert isinstance(model, Decoder)
    return model


def spec_of(kind: str, **changes: object) -> ModelSpec | None:
    return read_spec({**BASE, "architectures": [MODEL_TYPES[kind]], **changes}, EngineConfig(model=""))


def windows(spec: ModelSpec | None) -> list[int | None]:
    assert spec is not None
    return [layer.window for layer in spec.layers]


@pytest.mark.parametrize("name", EXECUTORS)
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_weights_are_quantized_and_counted(tmp_path, name, quantization):
    if choose("auto", CPU, torch.float32).kernels is None:
        pytest.skip("no kernels here")
    folder = make(name, tmp_path, dtype=torch.bfloat16)
    model = load(folder, quantization=quantization)
    assert type(model.executors[0]) is EXECUTORS[name] and type(model.executors[-1]) is Eager
    told = plan.plan(EngineConfig(model=str(folder), device="cpu", quantization=quantization))
    assert told["weights_bytes"] == model.weights_bytes and model.product.invariant
    wide = Bench(load(folder, dtype="float32")).step({0: prompt(40)})[0]
    # Rounding changes the choice of some experts.
    limit = {"none": 0.1 if name in FLOAT32_ONLY else 0.05, "int8": 0.1, "int4": 0.9}[quantization]
    assert (Bench(model).step({0: prompt(40)})[0] - wide).norm() < limit * wide.norm()


# transformers computes experts in float32 at most.
@pytest.mark.parametrize("name", [name for name in EXECUTORS if name not in FLOAT32_ONLY])
@pytest.mark.parametrize("isa", ["auto", "torch"])
def test_bfloat16_is_rounded_as_in_transformers(tmp_path, name, isa):
    """Where norms, rotations and scales are rounded otherwise, errors are larger."""
    folder = make(name, tmp_path, dtype=torch.bfloat16)
    ours, theirs, total = 0.0, 0.0, 0.0
    for seed in range(8):
        ids = prompt(30, seed)
        want, rounded = (whole(oracle(folder, dtype), ids) for dtype in (torch.float64, torch.bfloat16))
        found = Bench(load(folder, cpu_isa=isa)).step({0: ids})[0]
        ours, theirs = ours + (found - want).norm().item(), theirs + (rounded - want).norm().item()
        total += want.norm().item()
    assert ours < 1.1 * theirs


# -- EXAONE 4 and Granite MoE -----------------------------------------------------------------------------------------


def test_only_layers_of_exaone_4_with_a_window_are_rotated_unless_none_has_one():
    spec = spec_of("exaone4", num_hidden_layers=8)
    assert spec is not None and spec.decoder is not None and windows(spec) == [4096, 4096, 4096, None] * 2
    spec = spec_of("exaone4", num_hidden_layers=8, sliding_window=9)
    assert spec is not None and spec.decoder is not None and windows(spec) == [9, 9, 9, None] * 2
    assert spec.decoder.turns == (0, 0, 0, -1) * 2
    listed = spec_of("exaone4", sliding_window=9, layer_types=["full_attention"] * 3)
    assert listed is not None and listed.decoder is not None and listed.decoder.turns == (-1, -1, -1)
    whole_ = spec_of("exaone4", sliding_window=None, layer_types=["full_attention"] * 3)
    assert whole_ is not None and whole_.decoder is not None and whole_.decoder.turns == (0, 0, 0)


def test_what_experts_of_granite_add_is_scaled(tmp_path):
    model = load(make("granitemoe", tmp_path), cpu_isa="torch")
    assert {down.scale for layer in model.layers if layer.experts is not None for down in layer.experts.downs} == {0.22}


@pytest.mark.parametrize(("kind", "turns"), [("rope", (0, 0, 0)), ("nope", (-1, -1, -1)), (None, (-1, -1, -1))])
def test_layers_of_granite_4_may_have_no_rotary_embedding(kind, turns):
    given = {**MODELS["granitemoehybrid"][1], "layer_types": ["attention"] * 3}  # as older versions of transformers
    spec = spec_of("granitemoehybrid", **given | {"position_embedding_type": kind})
    assert spec is not None and spec.decoder is not None and spec.decoder.turns == turns
    assert not spec.mixers and spec.decoder.experts is None


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        ("seed_oss", "attention_out_bias", True),
        ("ernie4_5", "use_bias", True),
        ("internlm3", "qkv_bias", True),
        ("internlm3", "bias", True),
        ("olmoe", "clip_qkv", 8.0),
    ],
)
def test_what_only_transformers_computes_is_left_to_it(kind, key, value):
    experts = {"num_experts": 4, "num_experts_per_tok": 2}
    assert spec_of(kind, **experts, **{key: None}) is not None
    assert spec_of(kind, **experts, **{key: value}) is None


# -- Gemma 1 ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["gelu", "gelu_pytorch_tanh", None])
def test_gelu_of_gemma_1_is_always_approximated(given):
    spec = spec_of("gemma", hidden_act=given, hidden_activation=None)
    assert spec is not None and spec.decoder is not None and spec.decoder.activation == "gelu_pytorch_tanh"
    other = spec_of("gemma", hidden_act="silu")
    assert other is not None and other.decoder is not None and other.decoder.activation == "silu"


# -- HunYuan ----------------------------------------------------------------------------------------------------------


def test_the_rotary_base_of_hunyuan_is_multiplied_once_for_any_length():
    published = {"alpha": 1000.0, "factor": 1.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "type": "dynamic"}
    spec = spec_of("hunyuan_v1_dense", head_dim=128, max_position_embeddings=32768, rope_scaling=published)
    assert spec is not None and spec.decoder is not None and spec.max_len == 32768
    (rope,) = spec.decoder.ropes
    short, long = (frequencies(rope, length)[0] for length in (10, 32768))
    base = 10000.0 * 1000.0 ** (128 / 126)
    assert torch.equal(short, long) and torch.allclose(short, base ** -(torch.arange(0, 128, 2) / 128))


@pytest.mark.parametrize(
    ("alpha", "says"),
    [
        (-1, "alpha of the rotary parameters must be positive, not -1"),
        ("much", "a rotary parameter is not a number"),
        (None, "rotary scaling 'dynamic' needs 'factor'"),
    ],
)
def test_an_alpha_that_no_rotary_embedding_has_is_refused(alpha, says):
    with pytest.raises(ModelError, match=says):
        spec_of("hunyuan_v1_dense", rope_scaling={"type": "dynamic", "alpha": alpha})


# -- SmolLM3 ----------------------------------------------------------------------------------------------------------


def test_every_fourth_layer_of_smollm3_has_no_rotary_embedding():
    spec = spec_of("smollm3", num_hidden_layers=9)
    assert spec is not None and spec.decoder is not None
    assert spec.decoder.turns == (0, 0, 0, -1, 0, 0, 0, -1, 0)
    assert spec.decoder.tied and spec.decoder.ropes[0].theta == 2_000_000
    spec = spec_of("smollm3", no_rope_layer_interval=2, num_hidden_layers=4)
    assert spec is not None and spec.decoder is not None and spec.decoder.turns == (0, -1, 0, -1)


def test_the_kernels_are_tried_on_layers_with_a_rotary_embedding_and_without(monkeypatch):
    spec = spec_of("smollm3", num_hidden_layers=9)
    assert spec is not None
    model, tried = Decoder(spec, CPU, Choice(None), tied=True), []

    def executor(layers: Sequence[Layer]) -> Any:
        tried.append([layer.turn for layer in layers])
        return SimpleNamespace(run=run)

    def run(forward: Forward) -> Tensor:
        forward.cache.backend.lengths.append(torch.ones(1, 1))  # type: ignore[attr-defined]
        return torch.ones(1, 1)

    monkeypatch.setattr(on_gpu, "OnGPU", lambda model, embedding, layers, *_, **__: executor(layers))
    monkeypatch.setattr(on_gpu, "Eager", lambda embedding, layers, *_: executor(layers))
    assert on_gpu.trial(spec, model.embedding, model.layers, model.rotaries) is None
    assert tried == [[0, -1]] * 2


def test_windows_of_smollm3_are_on_layers_without_rotary_embeddings():
    more = {"num_hidden_layers": 4, "sliding_window": 8}
    assert windows(spec_of("smollm3", **more, use_sliding_window=True)) == [None, None, None, 8]
    assert windows(spec_of("smollm3", **more)) == [None] * 4


@pytest.mark.parametrize("listed", [[1, 1], [1, 0, 2], [True, 0, 1], "101", [1, [], 0]])
def test_no_rope_layers_must_be_a_list_with_0_or_1_for_each_layer(listed):
    with pytest.raises(ModelError, match="no_rope_layers must be a list with 0 or 1 for each of the 3 layers"):
        spec_of("smollm3", no_rope_layers=listed)


# -- OLMo -------------------------------------------------------------------------------------------------------------


def test_norms_of_olmo_are_after_attention_and_mlp():
    spec = spec_of("olmo2")
    assert spec is not None
    model = Decoder(spec, CPU, Choice(None), tied=False)
    names = {name.removeprefix("layers.0.") for name in model.layers[0].targets() if "norm" in name}
    assert names == {
        "post_attention_layernorm.weight",
        "post_feedforward_layernorm.weight",
        "self_attn.q_norm.weight",
        "self_attn.k_norm.weight",
    }
    shapes = [len(norm.weight) for norm in (model.layers[0].q_norm, model.layers[0].k_norm) if norm is not None]
    assert shapes == [64, 32]
    assert spec.decoder is not None and spec.decoder.difference == "norms of all heads together"
    large = spec_of("olmo2", num_attention_heads=200, num_key_value_heads=8, head_dim=128)
    assert large is not None
    assert on_gpu.objection(large, CPU, None) == "the Triton kernels normalize up to 16384 numbers of queries together"


def test_every_fourth_layer_of_olmo3_has_no_window_and_a_scaled_rotary_embedding():
    scaling = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
    new = {"rope_parameters": {"full_attention": scaling, "sliding_attention": {"rope_type": "default"}}}
    for rope in ({"rope_scaling": scaling}, new):
        spec = spec_of("olmo3", num_hidden_layers=5, **rope)
        assert spec is not None and spec.decoder is not None
        assert windows(spec) == [4096, 4096, 4096, None, 4096]
        assert spec.decoder.turns == (1, 1, 1, 0, 1)
        assert [(each.scaling, each.theta) for each in spec.decoder.ropes] == [("yarn", 5e5), ("default", 5e5)]
        assert spec.max_len == BASE["max_position_embeddings"]
    both = ["full_attention", "sliding_attention", "full_attention"]
    assert windows(spec_of("olmo3", layer_types=both, sliding_window=7)) == [None, 7, None]
    assert windows(spec_of("olmo3", sliding_window=None)) == [None] * 3


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"layer_types": ["full_attention"]}, "layer_types must name all 3 layers"),
        ({"layer_types": ["full_attention", "chunked", "x"]}, "unknown layer type 'chunked'"),
        ({"sliding_window": 0}, "sliding_window must be a positive whole number"),
        ({"rope_parameters": {"rope_theta": 1e4}}, "must hold objects for full_attention and sliding_attention"),
        ({"rope_parameters": {"rope_type": "linear"}}, "must hold objects for full_attention and sliding_attention"),
        ({"rope_parameters": {"full_attention": 1}}, "must hold objects for full_attention and sliding_attention"),
        ({"rope_scaling": [1]}, "rope_scaling and rope_parameters must be objects"),
    ],
)
def test_settings_of_layers_that_no_model_has_are_refused(changes, says):
    with pytest.raises(ModelError, match=says):
        spec_of("olmo3", **changes)


@pytest.mark.parametrize(("name", "theta"), [("olmo3", 5e5), ("gemma3_text", 1e6)])
def test_one_object_of_default_rotary_parameters_is_for_all_layers_as_in_transformers(tmp_path, name, theta):
    folder = make(name, tmp_path)
    path = folder / "config.json"
    flat = {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}
    path.write_text(json.dumps(json.loads(path.read_text()) | flat))
    ids = prompt(40)
    want, got = whole(oracle(folder, torch.float32), ids), Bench(load(folder, dtype="float32")).step({0: ids})[0]
    assert (got - want).abs().max() < 1e-4 * want.abs().max()


# -- Granite ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key", ["attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"]
)
@pytest.mark.parametrize("value", [0, -1.0])
def test_scales_must_be_positive(key, value):
    with pytest.raises(ModelError, match=f"config.json: {key} must be positive, not {value}"):
        spec_of("granite", **{key: value})
    with pytest.raises(ModelError, match=f"config.json: {key} must be a number, not 'x'"):
        spec_of("granite", **{key: "x"})


# -- Gemma ------------------------------------------------------------------------------------------------------------


def test_every_second_layer_of_gemma2_has_no_window():
    spec = spec_of("gemma2", num_hidden_layers=5, query_pre_attn_scalar=144)
    assert spec is not None and windows(spec) == [4096, None, 4096, None, 4096]
    assert {(layer.scale, layer.softcap, layer.head_dim) for layer in spec.layers} == {(1 / 12, 50.0, 256)}
    assert spec.decoder is not None and spec.decoder.scales.cap == 30 and spec.decoder.activation == "gelu_pytorch_tanh"


def test_layers_of_gemma3_with_and_without_a_window_have_different_rotary_embeddings():
    scaling = {"rope_type": "linear", "factor": 8.0}
    new = {"full_attention": {**scaling, "rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    for rope in ({"rope_scaling": scaling}, {"rope_parameters": new}):
        spec = spec_of("gemma3_text", num_hidden_layers=7, **rope)
        assert spec is not None and spec.decoder is not None
        assert windows(spec) == [4096] * 5 + [None, 4096]
        assert spec.decoder.turns == (1, 1, 1, 1, 1, 0, 1)
        assert [(each.scaling, each.theta) for each in spec.decoder.ropes] == [("linear", 1e6), ("default", 1e4)]
        assert spec.max_len == BASE["max_position_embeddings"]  # already the scaled length
    assert windows(spec_of("gemma3_text", sliding_window_pattern=2)) == [4096, None, 4096]


@pytest.mark.parametrize(("dtype", "scale"), [("bfloat16", 55.5), ("float32", 55.42562484741211)])
def test_embeddings_of_gemma_are_scaled_by_a_number_of_the_models_dtype(dtype, scale):
    spec = spec_of("gemma2", hidden_size=3072, dtype=dtype)
    assert spec is not None and spec.decoder is not None and spec.decoder.scales.embedding == scale
    embedding = Decoder(spec, CPU, Choice(None), tied=True).embedding
    embedding.weight.fill_(0.5)
    assert embedding.rows(torch.tensor([3])).tolist() == [[scale / 2] * 3072]


@pytest.mark.parametrize("kernels", [None, choose("auto", CPU, torch.float32).kernels], ids=["torch", "ours"])
def test_capped_logits(kernels):
    cap = 30.0
    x = torch.cat([torch.linspace(-200, 200, 50_001), torch.tensor([1e-6, -1e-30, torch.inf, -torch.inf])])
    want = cap * torch.tanh(x.double() / cap)
    found = softcap(x.clone(), cap, kernels)
    assert found.dtype == torch.float32 and ((found - want).abs() <= 4e-7 * want.abs()).all()
    assert softcap(torch.tensor([torch.nan]), cap, kernels).isnan()
    if kernels is not None:
        assert torch.equal(torch.cat([softcap(part.clone(), cap, kernels) for part in x.split(7)]), found)


def test_gelu_as_a_gate_has_the_same_bits_in_any_batch():
    kernels = choose("auto", CPU, torch.float32).kernels
    if kernels is None:
        pytest.skip("no kernels here")
    gates = torch.cat([torch.linspace(-12, 12, 1001), torch.tensor([0.0, -0.0, 1e-20, -1e-3, 80.0, -80.0, torch.nan])])
    gated = Gated(1, 2, False, torch.float32, CPU, activation="gelu_pytorch_tanh")
    gated.weight.copy_(torch.eye(2))
    gated.pack(kernels)
    assert gated.multiplied() is not None
    x = torch.stack([gates, torch.ones_like(gates)], 1)
    want = torch.nn.functional.gelu(gates.double(), approximate="tanh")
    found = gated(x)[:, 0]
    assert torch.allclose(found.double(), want, rtol=2e-6, atol=1e-12, equal_nan=True)
    assert torch.allclose(found, torch.cat([gated(row[None]) for row in x])[:, 0], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("key", ["attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar"])
def test_caps_must_be_positive(key):
    with pytest.raises(ModelError, match=f"config.json: {key} must be positive, not 0"):
        spec_of("gemma2", **{key: 0})


def test_bidirectional_attention_is_left_to_transformers():
    assert spec_of("gemma2", use_bidirectional_attention=True) is None
    assert spec_of("qwen2", is_causal=False) is None
    assert spec_of("qwen2", is_causal=True) is not None


# -- Phi-4-mini -------------------------------------------------------------------------------------------------------


def test_a_part_of_each_head_is_rotated():
    for place in (
        {"partial_rotary_factor": 0.75},
        {"rope_scaling": {"type": "default", "partial_rotary_factor": 0.75}},
    ):
        spec = spec_of("phi3", **place)
        assert spec is not None and spec.decoder is not None and spec.decoder.ropes[0].head_dim == 12
    assert spec_of("llama", partial_rotary_factor=0.75) is None
    spec = spec_of("glm4")
    assert spec is not None and spec.decoder is not None and spec.decoder.ropes[0].head_dim == 64


@pytest.mark.parametrize(
    ("part", "says"),
    [
        (0, "partial_rotary_factor must be above 0 and at most 1, not 0"),
        (1.5, "partial_rotary_factor must be above 0 and at most 1, not 1.5"),
        ("x", "partial_rotary_factor must be a number, not 'x'"),
        (0.2, "partial_rotary_factor rotates 3 numbers of a head, not an even number"),
        (0.01, "partial_rotary_factor rotates 0 numbers of a head, not an even number"),
    ],
)
def test_parts_that_cannot_be_rotated_are_refused(part, says):
    with pytest.raises(ModelError, match=says):
        spec_of("phi3", partial_rotary_factor=part)


# -- Cohere 2 ---------------------------------------------------------------------------------------------------------


def test_layers_of_cohere2_without_a_window_have_no_rotary_embedding():
    spec = spec_of("cohere2", num_hidden_layers=5)
    assert spec is not None and spec.decoder is not None
    assert windows(spec) == [4096, 4096, 4096, None, 4096] and spec.decoder.turns == (0, 0, 0, -1, 0)
    assert spec.decoder.difference == "attention beside the MLP"
    assert {name for name in Decoder(spec, CPU, Choice(None), tied=True).targets() if "norm" in name} == {
        "norm.weight",
        *(f"layers.{index}.input_layernorm.weight" for index in range(5)),
    }


# -- Mistral and Ministral --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mistral", "ministral"])
def test_layer_types_name_the_layers_of_mistral_that_have_a_window(kind):
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    assert windows(spec_of(kind, sliding_window=8, layer_types=kinds)) == [None, 8, None]
    assert windows(spec_of(kind, sliding_window=None, layer_types=kinds)) == [None] * 3
    assert windows(spec_of(kind, sliding_window=8, layer_types=None)) == [8] * 3


# -- Ministral 3 ------------------------------------------------------------------------------------------------------


def test_queries_of_ministral3_are_scaled_by_their_position():
    rope = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.1}
    spec = spec_of("ministral3", rope_parameters=rope)
    assert spec is not None and spec.decoder is not None and spec.max_len == 256
    scale = Rotary(spec.decoder.ropes[0], 256, torch.float32, CPU).turn(torch.tensor([0, 15, 16, 255])).query_scale
    assert scale is not None and scale.shape == (4, 1, 1)
    assert torch.allclose(scale.flatten(), torch.tensor([1, 1, 1 + 0.1 * math.log(2), 1 + 0.1 * math.log(16)]))
    assert spec.decoder.difference == "queries that are scaled by their position"
    none = {"rope_type": "default", "original_max_position_embeddings": None}
    for change in (none, {"original_max_position_embeddings": 1, "factor": 1e6}):
        with pytest.raises(ModelError, match="llama_4_scaling_beta needs original_max_position_embeddings of"):
            spec_of("ministral3", rope_parameters={**rope, **change})
    with pytest.raises(ModelError, match="llama_4_scaling_beta must be a number, not 'x'"):
        spec_of("ministral3", rope_parameters={**rope, "llama_4_scaling_beta": "x"})


# -- families with few differences ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["cwm", "granite_swa"])
def test_the_first_of_four_layers_has_no_window_if_the_config_does_not_say_which(kind):
    assert windows(spec_of(kind, num_hidden_layers=5, sliding_window=9)) == [None, 9, 9, 9, None]


@pytest.mark.parametrize(("kind", "heads"), [("granite_swa", 4), ("granitemoe_swa", 8), ("granite", 8)])
def test_granite_with_windows_has_four_heads_of_keys_if_the_config_does_not_say_how_many(kind, heads):
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    source = {**BASE, **experts, "architectures": [MODEL_TYPES[kind]], "num_attention_heads": 8}
    del source["num_key_value_heads"]
    spec = read_spec(source, EngineConfig(model=""))
    assert spec is not None and {layer.num_kv_heads for layer in spec.layers} == {heads}


@pytest.mark.parametrize("kind", ["mellum", "laguna"])
def test_layers_have_windows_only_if_the_config_says_which(kind):
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    assert windows(spec_of(kind, **sizes, num_hidden_layers=2)) == [None, None]
    kinds = ["sliding_attention", "full_attention"]
    assert windows(spec_of(kind, **sizes, num_hidden_layers=2, layer_types=kinds, sliding_window=9)) == [9, None]


def test_layers_of_laguna_have_their_own_numbers_of_heads_and_of_rotated_numbers():
    spec = spec_of("laguna", **MODELS["laguna-layers"][1])
    assert spec is not None and spec.decoder is not None
    assert [(layer.num_heads, layer.num_kv_heads) for layer in spec.layers] == [(4, 2), (6, 2), (6, 2)]
    assert [spec.decoder.gates(layer) for layer in range(3)] == [64, 96, 96]
    assert [rope.head_dim for rope in spec.decoder.ropes] == [8, 12] and spec.decoder.turns == (0, 1, 1)


def test_scales_of_minicpm3_follow_from_its_sizes():
    spec = spec_of("minicpm3", num_hidden_layers=4, hidden_size=64, scale_depth=1.4, dim_model_base=32)
    assert spec is not None and spec.decoder is not None
    assert spec.decoder.scales[:3] == pytest.approx((12.0, 0.7, 0.5))
    spec = spec_of("minicpm3", scale_depth=None, dim_model_base=None)
    assert spec is not None and spec.decoder is not None and spec.decoder.scales[1:3] == (1.0, 1.0)


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("laguna", {"num_attention_heads_per_layer": [4, 4]}, "num_attention_heads_per_layer must list the heads"),
        ("laguna", {"num_attention_heads_per_layer": [4, 5, 4]}, "5 attention heads cannot share 2 key-value heads"),
        ("granite_swa", {"layer_rope_theta": [1e4]}, "layer_rope_theta must list the bases of all 6 layers"),
        ("granite_swa", {"layer_rope_theta": [1e4, "x"] * 3}, "layer_rope_theta must be a number, not 'x'"),
        ("afmoe", {"route_scale": 0}, "route_scale must be positive, not 0"),
        ("minicpm3", {"scale_depth": -1.0}, "scale_depth must be positive, not -1"),
    ],
)  # fmt: skip
def test_what_no_model_of_these_families_has_is_refused(name, changes, says):
    kind, settings = MODELS[name]
    with pytest.raises(ModelError, match=says):
        spec_of(kind, **{**settings, **changes})


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("afmoe", {"route_norm": False}, "needs route_norm to be True for AfmoeForCausalLM, not False"),
        ("afmoe", {"score_func": "softmax"}, "needs score_func to be sigmoid for AfmoeForCausalLM, not softmax"),
        ("afmoe", {"attention_bias": True}, "needs attention_bias to be False for AfmoeForCausalLM"),
        ("laguna", {"moe_router_logit_softcapping": 30.0}, "needs moe_router_logit_softcapping to be 0.0"),
        ("laguna", {"moe_apply_router_weight_on_input": True}, "needs moe_apply_router_weight_on_input to be False"),
        ("laguna", {"gating": False}, "needs gating to be true, per-head or per-element, not False"),
        ("hy_v3", {"mlp_bias": True}, "needs mlp_bias to be False for HYV3ForCausalLM"),
        ("mistral4", {"n_group": 2, "topk_group": 1}, "needs n_group to be 1 for Mistral4ForCausalLM, not 2"),
        ("cohere", {"use_qk_norm": True}, "needs use_qk_norm to be False for CohereForCausalLM"),
        ("arcee", {"hidden_act": "silu"}, "needs hidden_act to be relu2 for ArceeForCausalLM, not silu"),
        ("llama", {"hidden_act": "relu2"}, "the native implementation has no activation 'relu2'"),
        (
            "mistral4",
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "has no partial rotary embeddings for Mistral4ForCausalLM",
        ),
    ],
)
def test_options_that_are_not_read_leave_a_model_to_transformers(name, changes, says):
    kind, settings = MODELS[name]
    source = {"architectures": [MODEL_TYPES[kind]], **settings, **changes}
    assert read_spec(source, EngineConfig(model="")) is None
    with pytest.raises(ModelError, match=says):
        read_spec(source, EngineConfig(model=""), native_only=True)


def test_every_family_has_a_model_that_is_compared_with_transformers():
    assert {kind for kind, _ in MODELS.values()} >= MODEL_TYPES.keys()
