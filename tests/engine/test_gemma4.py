"""Gemma 4: layers of different sizes, shared keys and values, inputs of each layer, and experts beside an MLP."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import EngineConfig, ModelError, models, plan
from engine.kernels.library import Choice
from engine.models.decoder import Decoder
from engine.models.gpu import executor as on_gpu
from engine.models.rope import frequencies
from engine.models.spec import ModelSpec, read_spec
from engine.roofline import shape
from tests.engine.test_models import CPU, Bench, load, prompt
from tests.models import BASE, make

# The sizes of a small published model, whose last layers share keys and values.
SMALL = {
    "architectures": ["Gemma4ForCausalLM"],
    "hidden_size": 1536,
    "intermediate_size": 6144,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
    "num_kv_shared_layers": 20,
    "use_double_wide_mlp": True,
    "final_logit_softcapping": 30.0,
    "vocab_size": 262144,
    "dtype": "bfloat16",
}
LARGE = {
    "architectures": ["Gemma4ForCausalLM"],
    "hidden_size": 5376,
    "intermediate_size": 21504,
    "num_hidden_layers": 60,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "num_global_key_value_heads": 4,
    "attention_k_eq_v": True,
    "sliding_window": 1024,
    "hidden_size_per_layer_input": 0,
    "use_bidirectional_attention": "vision",
    "vocab_size": 262144,
    "dtype": "bfloat16",
}
EXPERTS = {
    "hidden_size_per_layer_input": 0,
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
}


def spec_of(source: dict[str, Any], **changes: object) -> ModelSpec:
    spec = read_spec({**source, **changes}, EngineConfig(model=""))
    assert spec is not None
    return spec


def tiny(**changes: object) -> ModelSpec:
    return spec_of({**BASE, "num_hidden_layers": 6, "architectures": ["Gemma4ForCausalLM"]}, **changes)


def test_layers_without_a_window_have_other_sizes():
    spec = spec_of(LARGE)
    assert spec.decoder is not None
    assert [layer.window for layer in spec.layers] == ([1024] * 5 + [None]) * 10
    assert {(layer.num_kv_heads, layer.head_dim, layer.scale) for layer in spec.layers} == {(16, 256, 1), (4, 512, 1)}
    assert spec.decoder.rows(0) == (8192, 4096, 4096) and spec.decoder.rows(5) == (16384, 2048, 0)
    assert spec.decoder.turns[:6] == (1, 1, 1, 1, 1, 0) and spec.decoder.inputs is None
    assert spec.kv_bytes_per_token == 2 * 2 * (50 * 4096 + 10 * 2048)
    assert spec.decoder.difference == "layers of several sizes"
    assert on_gpu.objection(spec, CPU, None) == "the Triton kernels need a CUDA device"
    assert tiny(attention_k_eq_v=False, num_global_key_value_heads=1).layers[5].num_kv_heads == 2


def test_both_ways_to_write_the_sizes_of_layers_are_read():
    by_layer = {str(layer).zfill(2): {"head_dim": 512, "num_key_value_heads": 4} for layer in range(5, 60, 6)}
    written = {key: value for key, value in LARGE.items() if key != "num_global_key_value_heads"}
    assert spec_of(written, per_layer_config=by_layer).layers == spec_of(LARGE).layers
    assert {layer.head_dim for layer in tiny(head_dim=16, per_layer_config={}).layers} == {16}


def test_the_last_layer_has_no_window():
    assert tiny(num_hidden_layers=8).layers[7].window is None
    assert tiny(layer_types=["sliding_attention"] * 6, sliding_window=9).layers[5].window is None


def test_the_last_layers_have_no_keys_and_values_of_their_own():
    spec = spec_of(SMALL)
    assert spec.decoder is not None and len(spec.layers) == 15 and len(spec.attended) == 35
    shares = [shape.shares for shape in spec.decoder.shapes]
    assert shares == [None] * 15 + [13, 13, 13, 13, 14] * 4
    assert spec.decoder.caches == (*range(15), *[13, 13, 13, 13, 14] * 4)
    assert {shape.inner for shape in spec.decoder.shapes[:15]} == {6144}
    assert {shape.inner for shape in spec.decoder.shapes[15:]} == {12288}
    assert spec.kv_bytes_per_token == 2 * 2 * (12 * 256 + 3 * 512)
    assert spec.decoder.rows(15) == (2048, 0, 0)
    model = Decoder(spec, torch.device("meta"), Choice(None), tied=True)
    names = {name.removeprefix("layers.15.self_attn.") for name in model.targets()}
    assert {"q_proj.weight", "q_norm.weight", "o_proj.weight"} <= names
    assert not names & {"k_proj.weight", "v_proj.weight", "k_norm.weight"}


@pytest.mark.parametrize("source", [SMALL, LARGE])
def test_only_weights_that_a_layer_has_are_rounded(source):
    spec = spec_of(source)
    assert spec.decoder is not None
    head, *rounded = replace(spec, quantization="int4").rounded
    assert head == (spec.vocab_size, spec.decoder.hidden_size, 8) and min(rows for rows, _, _ in rounded) > 0
    linears = [
        (sum(rows), columns)
        for index in range(len(spec.decoder.shapes))
        for _, rows, columns in spec.decoder.layer_linears(index)
    ]
    assert sum(rows * columns for rows, columns, _ in rounded) == sum(rows * columns for rows, columns in linears)


def test_a_table_of_inputs_is_counted_but_not_read_by_every_token():
    spec, without = spec_of(SMALL), spec_of(SMALL, hidden_size_per_layer_input=0)
    assert spec.decoder is not None
    table = 262144 * 35 * 256
    others = 35 * 256 * 1536 + 256 + 35 * (2 * 256 * 1536 + 1536)
    assert spec.decoder.looked_up == table and spec.num_params - without.num_params == table + others
    assert spec.num_params == 4_628_569_379
    bound = shape(spec)
    assert bound is not None and bound.weights_bytes == spec.weights_bytes - 2 * table


def test_a_plan_counts_keys_and_values_once(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, "max_position_embeddings": 4096}))
    told = plan.plan(EngineConfig(model=str(tmp_path), device="cpu", num_blocks=16, block_size=16))
    # Two groups of six layers with a window, two of which share the place of one of the three without.
    assert told["kv_cache_bytes"] == 16 * 16 * 2 * 2 * 3 * 512
    told = plan.plan(EngineConfig(model=str(tmp_path), device="cpu", num_blocks=16, block_size=16, kv_dtype="int8"))
    assert told["kv_bytes_per_token"] == 2 * (12 * (256 + 4) + 3 * (512 + 4))
    assert told["kv_cache_bytes"] == 16 * 16 * 3 * 2 * 2 * (256 + 4), "two with a window are a little larger"


def test_a_part_of_the_frequencies_is_zero():
    full, windowed = spec_of(LARGE).decoder.ropes  # type: ignore[union-attr]
    assert (full.head_dim, full.theta, full.scaling, full.part) == (512, 1e6, "proportional", 0.25)
    assert (windowed.head_dim, windowed.theta, windowed.scaling) == (256, 1e4, "default")
    angles, scale = frequencies(full, 4096)
    exponents = torch.arange(0, 128, 2, dtype=torch.float32) / 512
    assert scale == 1 and torch.equal(angles[:64], 1 / 1e6**exponents) and not angles[64:].any()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"global_head_dim": 0}, "global_head_dim must be a positive whole number"),
        ({"global_head_dim": 15}, "head_dim must be even for rotary embeddings, not 15"),
        ({"global_head_dim": 1 << 20}, "global_head_dim must be at most 65536"),
        ({"attention_k_eq_v": True, "num_global_key_value_heads": 3}, "4 attention heads cannot share 3 key-value"),
        ({"per_layer_config": [1]}, "per_layer_config must hold head_dim and num_key_value_heads of some of the 6"),
        ({"per_layer_config": {"6": {"head_dim": 16}}}, "per_layer_config must hold"),
        ({"per_layer_config": {"": {"head_dim": 16}}}, "per_layer_config must hold"),
        ({"per_layer_config": {"5": 1}}, "per_layer_config must hold"),
        ({"per_layer_config": {"5": {"skip": ["mlp"]}}}, "per_layer_config must hold"),
        ({"per_layer_config": {"05": {"head_dim": -2}}}, "head_dim must be a positive whole number, not -2"),
        ({"per_layer_config": {"0": {"head_dim": 16}}}, "layers of one type must have heads of one size"),
        ({"num_kv_shared_layers": 6}, "num_kv_shared_layers must be at most 5"),
        ({"num_kv_shared_layers": 1}, "there is no layer whose keys and values layer 5 could share"),
        ({"num_kv_shared_layers": -1}, "num_kv_shared_layers must be a positive whole number"),
        ({"vocab_size_per_layer_input": 100}, "vocab_size_per_layer_input must not be below vocab_size, but is 100"),
        ({"hidden_size_per_layer_input": 1 << 30}, "hidden_size_per_layer_input must be at most"),
        ({**EXPERTS, "top_k_experts": 9}, "top_k_experts must be at most 8"),
        ({**EXPERTS, "num_experts": None}, "config.json has no num_experts"),
        ({"rope_parameters": {"rope_type": "proportional"}}, "must hold objects for full_attention and sliding"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 2}}},
            "partial_rotary_factor must be above 0 and at most 1, not 2",
        ),
    ],
)
def test_settings_that_no_model_has_are_refused(changes, says):
    with pytest.raises(ModelError, match=says):
        tiny(**changes)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ({"use_bidirectional_attention": "all"}, "no bidirectional attention"),
        (
            {"architectures": ["LlamaForCausalLM"], "per_layer_config": {"1": {"head_dim": 8}}},
            "layers of different sizes",
        ),
        (
            {"architectures": ["Phi3ForCausalLM"], "rope_parameters": {"rope_type": "proportional"}},
            "no rotary scaling 'proportional'",
        ),
    ],
)
def test_what_is_not_supported_is_left_to_transformers(source, says):
    source = {**BASE, "architectures": ["Gemma4ForCausalLM"], **source}
    assert read_spec(source, EngineConfig(model="")) is None
    with pytest.raises(ModelError, match=says):
        read_spec(source, EngineConfig(model=""), native_only=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("gemma4_text-small", tmp_path_factory.mktemp("gemma4"), dtype=torch.float64)


def test_keys_and_values_that_no_layer_attends_to_may_be_in_the_checkpoint(folder, tmp_path):
    """As in published checkpoints, of layers that share those of another."""
    tensors = load_file(folder / "model.safetensors")
    want = Bench(load(folder, torch.float64)).step({0: prompt(20)})[0]
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    unused = {f"model.layers.4.self_attn.{name}.weight": torch.zeros(2) for name in ("k_proj", "v_proj", "k_norm")}
    save_file({**tensors, **unused}, tmp_path / "model.safetensors")
    assert torch.equal(Bench(load(tmp_path, torch.float64)).step({0: prompt(20)})[0], want)
    save_file({**tensors, "model.layers.4.self_attn.k.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"layers\.4\.self_attn\.k\.weight, which Gemma4ForCausalLM does not have"):
        load(tmp_path, torch.float64)


def test_layers_that_share_use_one_cache(folder):
    model = load(folder, torch.float64)
    assert isinstance(model, Decoder)
    assert [layer.cache for layer in model.layers] == [0, 1, 2, 1, 1, 2] and len(Bench(model).cache.layers) == 3


def test_weights_of_another_model_are_refused(folder, tmp_path):
    """With the tensors of inputs, of shared layers, and of scales, that config.json does not name."""
    source = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors, tmp_path / "model.safetensors")
    for changes, says in (
        ({"hidden_size_per_layer_input": 0}, "per_layer|embed_tokens_per_layer"),
        ({"num_kv_shared_layers": 0}, "lacks the tensor model.layers.3.self_attn.k"),
        ({"use_double_wide_mlp": False}, "mlp.(down|gate|up)_proj.weight"),
        ({"vocab_size_per_layer_input": 301}, "embed_tokens_per_layer.weight"),
        (EXPERTS, "lacks the tensor|does not have"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**source, **changes}))
        with pytest.raises(ModelError, match=says):
            models.examine(tmp_path, EngineConfig(model=str(tmp_path)))
