"""Checkpoints of LFM2 and LFM3, whose tensors have names of their own, and what config.json says of its sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import EngineConfig, ModelError, models
from engine.models.spec import ModelSpec, read_spec
from tests.engine.test_models import Bench, load
from tests.models import config, make, oracle, prompt


def spec_of(**changes: Any) -> ModelSpec:
    source = {**config("lfm2").to_dict(), "architectures": ["Lfm2ForCausalLM"], **changes}
    found = read_spec({key: value for key, value in source.items() if value is not None}, EngineConfig(model=""))
    assert found is not None and found.decoder is not None
    return found


@pytest.fixture(params=["lfm2", "lfm3"])
def folder(request, tmp_path: Path) -> Path:
    return make(request.param, tmp_path)


def changed(folder: Path, changes: dict[str, torch.Tensor | None], **keys: Any) -> EngineConfig:
    """Replace tensors, None: remove them, and keys of config.json."""
    file, source = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    tensors = load_file(file) | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)
    (folder / "config.json").write_text(json.dumps(source | keys))
    return EngineConfig(model=str(folder))


def test_the_intermediate_size_is_computed_from_another():
    def inner(**changes: Any) -> int:
        decoder = spec_of(**changes).decoder
        assert decoder is not None
        return decoder.shapes[0].inner

    given = {"intermediate_size": 12288, "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0}
    assert inner(**given) == 8192, "that of LFM2-1.2B"
    assert inner(**given | {"intermediate_size": None, "block_ff_dim": 6656}) == 4608, "that of LFM2-350M"
    assert inner(**given | {"block_auto_adjust_ff_dim": False}) == 12288
    with pytest.raises(ModelError, match="block_ffn_dim_multiplier makes an intermediate size of 8589934592"):
        inner(**given | {"block_ffn_dim_multiplier": 1 << 20})


def test_a_key_of_its_own_says_whether_the_head_is_the_embedding():
    def tied(**changes: Any) -> bool:
        decoder = spec_of(**changes).decoder
        assert decoder is not None
        return decoder.tied

    assert tied(tie_word_embeddings=None) and not tied(tie_word_embeddings=False)
    assert tied(tie_embedding=True, tie_word_embeddings=False) and not tied(tie_embedding=False)
    llama = read_spec({**config("llama").to_dict(), "tie_embedding": True}, EngineConfig(model=""))
    assert llama is not None and llama.decoder is not None and not llama.decoder.tied, "which does not read that key"


def test_errors_name_the_tensors_of_the_files(folder):
    name = "model.layers.0.feed_forward.w1.weight"
    with pytest.raises(ModelError, match=f"lacks the tensor {name}"):
        models.examine(folder, changed(folder, {name: None}))
    with pytest.raises(ModelError, match=f"the tensor {name} in .* has the shape"):
        models.examine(folder, changed(folder, {name: torch.zeros(3, 4)}))


def test_two_tensors_of_one_kind_are_refused(folder):
    with pytest.raises(
        ModelError, match=r"holds two tensors for model.norm.weight, one of which is model\.(embedding_)?norm"
    ):
        models.examine(folder, changed(folder, {"model.norm.weight": torch.ones(64)}))


@pytest.mark.parametrize("targets", ["Linear", "re:.*feed_forward.*", "model.layers.0.feed_forward.w1"])
def test_a_quantized_checkpoint_names_its_modules_as_the_files_do(folder, targets):
    name = "model.layers.0.feed_forward.w1"
    weight = load_file(folder / "model.safetensors")[f"{name}.weight"]
    scale = weight.abs().amax(1, keepdim=True) / 448
    group = {
        "targets": [targets],
        "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
    }
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
    stored = {f"{name}.weight": (weight / scale).to(torch.float8_e4m3fn), f"{name}.weight_scale": scale}
    spec, checkpoint = models.examine(folder, changed(folder, stored, quantization_config=quantization))
    assert spec.dequantized + sum(spec.in_blocks.values()) == weight.numel()
    found = torch.empty_like(weight)
    checkpoint.fill({"model.layers.0.mlp.gate_proj.weight": found}, lambda _: None)
    assert (found - weight).abs().max() <= weight.abs().max() / 16
    checkpoint.close()


def test_weights_of_experts_are_divided_as_in_transformers_when_all_are_small(tmp_path):
    folder = make("lfm2_moe", tmp_path)
    file = folder / "model.safetensors"
    name = "model.layers.1.feed_forward.gate.weight"
    tensors = load_file(file)
    save_file(tensors | {name: tensors[name] - tensors[name].mean() - 0.4}, file)
    source = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({key: value for key, value in source.items() if key != "use_expert_bias"})
    )
    with torch.inference_mode():
        want = oracle(folder, torch.float32)(torch.tensor([prompt(40)]), use_cache=False).logits[0]
    assert (Bench(load(folder, torch.float32)).step({0: prompt(40)})[0] - want).abs().max() < 2e-5


def test_a_router_without_a_bias_is_refused(tmp_path):
    folder = make("lfm2_moe", tmp_path)
    with pytest.raises(ModelError, match="needs use_expert_bias to be True for Lfm2MoeForCausalLM, not False"):
        models.examine(folder, changed(folder, {}, use_expert_bias=False))


def test_layers_of_lfm3_that_no_key_lists():
    source = {**config("lfm3").to_dict(), "architectures": ["Lfm3ForCausalLM"], "num_hidden_layers": 8}
    for key in ("layer_types", "rope_parameters", "sliding_window", "conv_L_cache"):
        source.pop(key, None)
    found = read_spec(source, EngineConfig(model=""))
    assert found is not None and found.decoder is not None
    taps = [None if shape.mixer is None else shape.mixer.taps for shape in found.decoder.shapes]
    assert taps == [7, 7, None, 7, None, 7, None, 7]
    assert [layer.window for layer in found.layers] == [None, 256, None], (
        "of the third, the fifth and the seventh layer"
    )
    full, windowed = found.decoder.ropes
    assert (full.theta, full.part, windowed.theta, windowed.part) == (1_000_000, 0.5, 10_000, 1)
    assert [found.decoder.turns[layer] for layer in (2, 4, 6)] == [0, 1, 0]


def test_lfm3_without_the_norms_after_each_part_is_refused():
    source = {**config("lfm3").to_dict(), "architectures": ["Lfm3ForCausalLM"], "use_sandwich_norm": False}
    with pytest.raises(ModelError, match="needs use_sandwich_norm to be True for Lfm3ForCausalLM, not False"):
        read_spec(source, EngineConfig(model=""))


def test_tensors_of_lfm3_have_their_own_names_in_errors(tmp_path):
    folder = make("lfm3", tmp_path)
    for part in ("self_attn.gate_proj", "self_attn.o_proj", "self_attn.q_norm", "post_operator_norm"):
        name = f"model.layers.0.{part}.weight"
        kept = load_file(folder / "model.safetensors")[name]
        with pytest.raises(ModelError, match=f"lacks the tensor {name}"):
            models.examine(folder, changed(folder, {name: None}))
        changed(folder, {name: kept})
