"""Quantized safetensors checkpoints: read, packed or dequantized, compared with transformers on the same numbers."""

from __future__ import annotations

import copy
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine import ConfigError, EngineConfig, ModelError, models, plan
from engine.build import describe
from engine.kernels.library import choose
from engine.models.decoder import Decoder
from engine.models.fused import Fused
from engine.quantized.config import parse
from engine.quantized.forms import form_of
from engine.quantized.layouts import LAYOUTS
from tests.engine.test_exact import serve
from tests.engine.test_kernels import CPU, needs_library
from tests.engine.test_models import Bench, whole
from tests.models import load_model, make, prompt
from tests.quantized import (
    Kind,
    awq,
    edit,
    fp8,
    gptq,
    int_quantized,
    pack_quantized,
    write,
)

KINDS = {
    "gptq-4": gptq(packed="Q4_0"),
    "gptq-4-v2": gptq(size=64, v2=True, packed="Q4_0"),
    "gptq-4-zeros": gptq(size=32, sym=False, packed="Q4_Z"),
    "gptq-4-zeros-v2": gptq(sym=False, v2=True, packed="Q4_Z"),
    "gptq-4-row": gptq(size=-1, packed="Q4_0"),
    "gptq-4-order": gptq(size=32, order="shared", packed="Q4_0"),
    "gptq-4-zeros-order": gptq(size=64, sym=False, order="own", packed="Q4_Z"),
    "gptq-8": gptq(8, packed="Q8_0"),
    "gptq-8-order": gptq(8, 64, order="shared", packed="Q8_0"),
    "gptq-8-zeros": gptq(8, sym=False),
    "gptq-4-small-groups": gptq(size=16),
    "awq-128": awq(),
    "awq-64": awq(64),
    "awq-32": awq(32),
    "w4a16": pack_quantized(4, 128, packed="Q4_0"),
    "w4a16-row": pack_quantized(4, -1, packed="Q4_0"),
    "w4a16-zeros": pack_quantized(4, 64, symmetric=False, packed="Q4_Z"),
    "w8a16-packed": pack_quantized(8, 32, packed="Q8_0"),
    "w8a8": int_quantized(),
    "w8a8-tensor": int_quantized("tensor"),
    "w8a8-zeros": int_quantized(symmetric=False, packed=None),
    "fp8-tensor": fp8("tensor"),
    "fp8-block": fp8("block"),
    "fbgemm": fp8("channel", "fbgemm_fp8"),
    "ct-fp8-tensor": fp8("tensor", "compressed-tensors"),
    "ct-fp8-channel": fp8("channel", "compressed-tensors"),
    "ct-fp8-block": fp8("block", "compressed-tensors"),
}
PACKED = {name: kind for name, kind in KINDS.items() if kind.packed}


def load(folder: Path, **settings: Any) -> Decoder:
    model = load_model(EngineConfig(model=str(folder), **{"dtype": "float32", **settings}), folder)
    assert isinstance(model, Decoder)
    return model


def error(model: Decoder, reference: Any) -> float:
    """Return the largest difference between the logits and the reference's, relative to the largest logit."""
    ids = prompt(40, seed=1)
    want, got = whole(reference, ids), Bench(model).step({0: ids})[0]
    return ((got.double() - want).abs().max() / want.abs().max()).item()


def refused(folder: Path, kind: type[Exception] = ModelError, **settings: Any) -> str:
    with pytest.raises(kind) as caught:
        load(folder, **settings)
    text = str(caught.value)
    assert "\n" not in text and len(text) < 400
    return text


# -- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
def test_logits_are_those_of_the_dequantized_model_without_our_kernels(tmp_path, name):
    reference = write(tmp_path, KINDS[name])
    model = load(tmp_path, cpu_isa="torch")
    assert error(model, reference) < 1e-5
    assert model.spec.quantization == "none" and model.weights_bytes == 4 * model.num_params


@needs_library
@pytest.mark.parametrize("name", KINDS)
def test_logits_are_those_of_the_dequantized_model_up_to_the_rounding_of_activations(tmp_path, name):
    kind = KINDS[name]
    reference = write(tmp_path, kind, name="qwen3", head_dim=64, tie_word_embeddings=True)
    fine = load(tmp_path)  # int16: a small model
    assert error(fine, reference) < (1e-5 if kind.packed is None else 1e-3)
    assert set(fine.spec.in_blocks) == ({kind.packed} if kind.packed else set())
    if kind.packed:
        assert 1e-4 < error(load(tmp_path, gguf_activations="int8"), reference) < 0.1


@needs_library
@pytest.mark.parametrize("name", PACKED)
def test_blocks_hold_the_numbers_of_the_checkpoint_exactly(tmp_path, name):
    reference = write(tmp_path, PACKED[name])
    model = load(tmp_path)
    for index, layer in enumerate(model.layers):
        own = reference.model.layers[index]
        for ours, theirs in ((layer.output, own.self_attn.o_proj), (layer.down, own.mlp.down_proj)):
            assert torch.equal(ours.rows(torch.arange(len(theirs.weight))).double(), theirs.weight)


@needs_library
def test_scales_that_float16_does_not_hold_are_rounded_to_it(tmp_path):
    reference = write(tmp_path, pack_quantized(4, 32, packed="Q4_0", dtype=torch.float32))
    ours = load(tmp_path).layers[0].down.rows(torch.arange(256)).double()
    theirs = reference.model.layers[0].mlp.down_proj.weight
    assert not torch.equal(ours, theirs)
    assert ((ours - theirs).abs() <= 2**-11 * theirs.abs()).all()


def test_words_are_unpacked_as_published():
    """AutoAWQ's first nibbles are columns 0, 2, 4 and 6; AutoGPTQ's are in order, with zero points less one."""
    word = torch.tensor([[0x76543210]], dtype=torch.int32)
    scheme = parse({"quant_method": "awq", "bits": 4, "group_size": 1}).scheme("a.weight")
    assert LAYOUTS["awq"].numbers({"qweight": word}, scheme, slice(0, 8)).T.tolist() == [[0, 4, 1, 5, 2, 6, 3, 7]]
    assert LAYOUTS["awq"].zeros({"qzeros": word}, scheme, slice(3, 6)).T.tolist() == [[5, 2, 6]]
    scheme = parse({"quant_method": "gptq", "bits": 4, "group_size": 8}).scheme("a.weight")
    assert LAYOUTS["gptq"].numbers({"qweight": word}, scheme, slice(0, 1)).tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]
    assert LAYOUTS["gptq"].zeros({"qzeros": word}, scheme, slice(2, 5)).T.tolist() == [[3, 4, 5]]


@needs_library
@pytest.mark.parametrize("name", ["awq-128", "gptq-4-zeros-order", "fp8-block"])
async def test_requests_have_the_same_bits_alone_and_together(tmp_path, name):
    write(tmp_path, KINDS[name], dtype=torch.bfloat16)
    base = {"model": str(tmp_path), "device": "cpu", "num_blocks": 64, "max_seqs": 8}
    if name == "fp8-block":
        base["cpu_isa"] = choose("auto", CPU, torch.float32).name  # also with AMX
    alone, exact, _ = await serve(EngineConfig(**base, prefix_caching=False, threads=1), together=False)
    assert exact and len(alone) == 8
    for settings in ({"max_batched_tokens": 9, "threads": 2}, {"num_blocks": 14, "threads": 1}):
        found, _, _ = await serve(EngineConfig(**base | settings), together=True)
        assert found == alone


@needs_library
@pytest.mark.parametrize(("order", "joined"), [("shared", "Blocks"), ("own", "Joined")])
def test_only_gate_and_up_in_several_orders_keep_layers_from_being_fused(tmp_path, order, joined):
    write(tmp_path, gptq(size=32, order=order))
    model = load(tmp_path)
    assert isinstance(model.executors[0], Fused) == (order == "shared")
    assert {type(linear._packed).__name__ for linear in model.layers[0].linears[::2]} == {joined}


# -- which weights ----------------------------------------------------------------------------------------------------


@needs_library
def test_modules_that_config_json_leaves_out_stay_plain(tmp_path):
    kind = awq(32)
    kind.config["modules_to_not_convert"] = ["layers.0.mlp"]
    reference = write(tmp_path, kind, plain=lambda module: "layers.0.mlp" in module)
    model = load(tmp_path)
    assert error(model, reference) < 1e-3
    assert model.spec.in_blocks == models.describe(tmp_path, config(tmp_path)).in_blocks
    assert sum(model.spec.in_blocks.values()) == 2 * (256 * 512 + 256 * 256) + 3 * 256 * 384
    edit(tmp_path, modules_to_not_convert=["model.layers.1.mlp.up_proj"])
    assert refused(tmp_path) == (
        "the checkpoint holds model.layers.1.mlp.up_proj.qweight, which is quantized, but config.json does not say how"
    )


@needs_library
def test_weights_that_are_joined_are_in_blocks_together_or_not_at_all(tmp_path):
    kind = pack_quantized(4, 32, packed="Q4_0")
    kind.config["ignore"] = ["lm_head", "re:.*v_proj$", "model.layers.1.mlp.gate_proj"]
    left = ("v_proj", "layers.1.mlp.gate_proj")
    reference = write(tmp_path, kind, plain=lambda module: module.endswith(left))
    model = load(tmp_path)
    assert error(model, reference) < 1e-3
    assert model.spec.in_blocks == {"Q4_0": 2 * 256 * 256 + 3 * 256 * 384 + 256 * 384}
    assert model.spec.dequantized == 2 * 256 * 384 + 256 * 384
    assert model.spec.in_blocks == models.describe(tmp_path, config(tmp_path)).in_blocks
    assert model.spec.notes == (
        "294,912 weights in compressed-tensors are dequantized while they are loaded, and take 1.2 MB in float32",
    )


@needs_library
def test_groups_of_compressed_tensors_have_schemes_of_their_own(tmp_path):
    four, eight = pack_quantized(4, 64, packed="Q4_0"), int_quantized()
    kind = Kind(
        four.config | {"format": "mixed-precision"},
        lambda weight: (eight if weight.shape == (256, 384) else four).store(weight),
        None,
    )
    kind.config["config_groups"] = {
        "group_0": four.config["config_groups"]["group_0"] | {"format": "pack-quantized"},
        "group_1": eight.config["config_groups"]["group_0"]
        | {"format": "int-quantized", "targets": ["re:.*down_proj"]},
    }
    reference = write(tmp_path, kind)
    model = load(tmp_path)
    assert model.spec.in_blocks == {"Q4_0": 2 * (256 * 512 + 256 * 256 + 256 * 768), "Q8_0": 2 * 256 * 384}
    assert error(model, reference) < 1e-3


@pytest.mark.parametrize(
    "method, activations, weights_only",
    [
        ("compressed-tensors", None, True),
        ("compressed-tensors", {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}, False),
        ("fp8", None, False),
        ("fbgemm_fp8", None, False),
    ],
)
def test_activations_stay_in_16_bits_on_a_gpu_if_a_checkpoint_in_fp8_names_weights_alone(
    method, activations, weights_only
):
    found = copy.deepcopy(fp8("channel", method).config)
    if method == "compressed-tensors":
        found["config_groups"]["group_0"]["input_activations"] = activations
    scheme = parse(found).scheme("model.layers.0.mlp.up_proj.weight")
    assert scheme is not None
    form = form_of(scheme, 256)
    assert form is not None and form.is_float and form.weights_only == weights_only


@needs_library
def test_a_quantized_head_is_in_blocks_too(tmp_path):
    kind = gptq(size=64)
    reference = write(tmp_path, kind)
    tensors = load_file(tmp_path / "model.safetensors")
    stored, exact = kind.store(tensors.pop("lm_head.weight")[:296])
    reference.lm_head.weight = torch.nn.Parameter(exact)
    tensors |= {f"lm_head.{part}": tensor.contiguous() for part, tensor in stored.items()}
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:296].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"vocab_size": 300', '"vocab_size": 296'))
    assert "lm_head.qweight, which is quantized, but config.json does not say how" in refused(tmp_path)
    edit(tmp_path, lm_head=True)
    model = load(tmp_path)
    ids = prompt(20, seed=3)
    want, got = whole(reference, ids), Bench(model).step({0: ids})[0]
    assert (got - want).abs().max() < 1e-3 * want.abs().max()
    assert sum(model.spec.in_blocks.values()) == model.num_params - 296 * 256 - 5 * 256


def test_the_embedding_may_be_packed_too(tmp_path):
    kind = pack_quantized(4, 32, packed="Q4_0")
    reference = write(tmp_path, kind)
    tensors = load_file(tmp_path / "model.safetensors")
    stored, exact = kind.store(tensors.pop("model.embed_tokens.weight"))
    tensors |= {f"model.embed_tokens.{part}": tensor.contiguous() for part, tensor in stored.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    reference.model.embed_tokens.weight = torch.nn.Parameter(exact)
    settings = config(tmp_path, dtype="float32", cpu_isa="torch")
    found = models.examine(tmp_path, settings)[0]
    assert found.quantization == "compressed-tensors"
    assert found.in_blocks == models.describe(tmp_path, settings).in_blocks == {"Q4_0": 983_040}
    model = load(tmp_path, cpu_isa="torch")
    assert plan.plan(settings)["weights_bytes"] == model.weights_bytes
    assert error(model, reference) < 1e-5


@needs_library
def test_names_may_have_no_prefix(tmp_path):
    reference = write(tmp_path, awq(64), tie_word_embeddings=True)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({name.removeprefix("model."): each for name, each in tensors.items()}, tmp_path / "model.safetensors")
    model = load(tmp_path)
    assert error(model, reference) < 1e-3
    assert model.spec.in_blocks == models.describe(tmp_path, config(tmp_path)).in_blocks != {}


def test_gptq_may_name_the_modules_that_are_quantized(tmp_path):
    kind = gptq(size=64)
    kind.config["modules_in_block_to_quantize"] = [["mlp.up_proj", "mlp.gate_proj"], ["mlp.down_proj"]]
    reference = write(tmp_path, kind, plain=lambda module: "self_attn" in module)
    model = load(tmp_path, cpu_isa="torch")
    assert error(model, reference) < 1e-5
    assert models.describe(tmp_path, config(tmp_path)).in_blocks == {"Q4_0": 2 * 3 * 256 * 384}
    edit(tmp_path, modules_in_block_to_quantize=["mlp"])
    assert "modules_in_block_to_quantize must be a list of names" in refused(tmp_path)


@needs_library
def test_scales_of_activations_and_of_the_cache_are_ignored(tmp_path):
    reference = write(tmp_path, fp8("tensor"))
    tensors = load_file(tmp_path / "model.safetensors")
    for name in ("q_proj.input_scale", "q_proj.activation_scale", "k_scale", "k_proj.output_scale"):
        tensors[f"model.layers.0.self_attn.{name}"] = torch.ones(1)
    save_file(tensors, tmp_path / "model.safetensors")
    assert error(load(tmp_path), reference) < 1e-5


# What other programs write for the same layouts.
AUTO_ROUND = {"quant_method": "auto-round", "data_type": "int", "bits": 4, "group_size": 128}
AUTO_GPTQ = AUTO_ROUND | {"packing_format": "auto_round:auto_gptq", "sym": True}
PLAIN16 = {"lm_head": {"bits": 16, "data_type": "fp"}, "model.layers.0.mlp.up_proj": {"bits": 4, "sym": True}}
WRITTEN = {
    "gptq-skip": (gptq(), gptq().config | {"dynamic": {r"-:.*\.v_proj$": {}}}),
    "auto-gptq": (gptq(), AUTO_GPTQ | {"extra_config": PLAIN16}),
    "auto-awq": (awq(), AUTO_ROUND | {"packing_format": "auto_round:auto_awq", "sym": False}),
    "modelopt": (fp8("tensor"), {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head", "*.v_proj"]}),
    "look-ahead": (
        pack_quantized(4, 32, packed="Q4_0"),
        pack_quantized(4, 32, packed="Q4_0").config | {"ignore": ["lm_head", r"re:^(?!.*(mlp|[qko]_proj)).*"]},
    ),
}


@needs_library
@pytest.mark.parametrize("name", WRITTEN)
def test_config_json_may_be_that_of_other_programs(tmp_path, name):
    kind, found = WRITTEN[name]
    skips = name not in ("auto-gptq", "auto-awq")
    reference = write(tmp_path, kind, plain=lambda module: skips and module.endswith("v_proj"))
    edit_config(tmp_path, quantization_config=found)
    model = load(tmp_path)
    assert error(model, reference) < 1e-3
    assert model.spec.method == found["quant_method"]


# Where programs leave the settings: a key of config.json, or a file beside it.
ELSEWHERE = {
    "compression_config": (PACKED["w4a16"], "compression_config", PACKED["w4a16"].config),
    "hf_quant_config.json": (
        fp8("tensor"),
        "hf_quant_config.json",
        {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}},
    ),
    "quantize_config.json": (
        gptq(v2=True, sym=False, packed="Q4_Z"),
        "quantize_config.json",
        {"bits": 4, "group_size": 128, "sym": False, "desc_act": False, "format": "gptq_v2"},
    ),
    "quant_config.json": (
        awq(64),
        "quant_config.json",
        {"zero_point": True, "q_group_size": 64, "w_bit": 4, "version": "GEMM"},
    ),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_the_settings_may_be_elsewhere_than_in_config_json(tmp_path, name):
    kind, place, found = ELSEWHERE[name]
    reference = write(tmp_path, kind)
    edit_config(tmp_path, quantization_config=None)
    if place.endswith(".json"):
        (tmp_path / place).write_text(json.dumps(found))
    else:
        edit_config(tmp_path, **{place: found})
    model = load(tmp_path, cpu_isa="torch")
    assert error(model, reference) < 1e-5
    assert plan.plan(config(tmp_path, cpu_isa="torch"))["weights_bytes"] == model.weights_bytes


def test_a_file_about_the_cache_alone_does_not_make_weights_quantized(tmp_path):
    folder = make("llama", tmp_path / "llama")
    found = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    (folder / "hf_quant_config.json").write_text(json.dumps(found))
    assert load(folder).spec.method == ""


# What programs leave beside plain weights: a key of config.json, or a file.
STRAY = {
    "sparsity alone": (
        "compression_config",
        {
            "quant_method": "compressed-tensors",
            "format": "dense",
            "sparsity_config": {"format": "dense", "global_sparsity": 0.1, "sparsity_structure": "unstructured"},
        },
    ),
    "the cache alone": ("compression_config", {"quant_method": "compressed-tensors", "kv_cache_scheme": {}}),
    "settings of auto-gptq": ("quantize_config.json", {"bits": 4, "group_size": 128, "sym": True}),
    "settings of another program": ("quant_config.json", ["w_bit"]),
    "settings of auto-awq": ("quant_config.json", {"w_bit": 4, "q_group_size": 128, "zero_point": True}),
}


@pytest.mark.parametrize("name", STRAY)
def test_settings_beside_plain_weights_do_not_make_them_quantized(tmp_path, name):
    place, found = STRAY[name]
    folder = make("llama", tmp_path / "llama")
    if place.endswith(".json"):
        (folder / place).write_text(json.dumps(found))
    else:
        edit_config(folder, **{place: found})
    assert load(folder, cpu_isa="torch").spec.method == models.describe(folder, config(folder)).method == ""


def test_settings_of_16_bits_say_nothing_of_packed_weights(tmp_path):
    write(tmp_path, awq(64))
    edit_config(tmp_path, quantization_config=None)
    (tmp_path / "quantize_config.json").write_text(json.dumps({"bits": 16, "group_size": -1}))
    (tmp_path / "quant_config.json").write_text(json.dumps({"w_bit": 4, "q_group_size": 64}))
    assert load(tmp_path, cpu_isa="torch").spec.method == "awq"


@pytest.mark.parametrize(
    ("file", "found", "says"),
    [
        ("quantize_config.json", {"bits": 3}, "weights of 3 bits are not supported"),
        ("quantize_config.json", {"bits": 4, "modules_in_block_to_quantize": 1}, "modules_in_block_to_quantize must"),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 0}, "group_size must be -1 or a positive whole number"),
        (
            "hf_quant_config.json",
            {"quantization": {"quant_algo": "FP8", "exclude_modules": 1}},
            "exclude_modules must be a list of names",
        ),
    ],
)
def test_a_refusal_names_the_file_that_the_value_is_in(tmp_path, file, found, says):
    write(tmp_path, gptq())
    edit_config(tmp_path, quantization_config=None)
    (tmp_path / file).write_text(json.dumps(found))
    assert refused(tmp_path).startswith(f"{file}: {says}")


def test_patterns_of_modelopt_name_plain_modules():
    found = parse(WRITTEN["modelopt"][1])
    assert found.scheme("lm_head.weight") is None
    assert found.scheme("model.layers.0.self_attn.v_proj.weight") is None
    assert found.scheme("model.layers.0.self_attn.v_proj2.weight") is not None


def test_biases_of_zeros_that_gptq_writes_for_each_linear_layer_are_dropped(tmp_path):
    reference = write(tmp_path, gptq())
    tensors = load_file(tmp_path / "model.safetensors")
    biases = {
        name.replace("qweight", "bias"): torch.zeros(tensor.shape[1], dtype=torch.float16)
        for name, tensor in tensors.items()
        if name.endswith("qweight")
    }
    save_file(tensors | biases, tmp_path / "model.safetensors")
    assert error(load(tmp_path, cpu_isa="torch"), reference) < 1e-5
    name = "model.layers.1.mlp.up_proj.bias"
    biases[name][-1] = 0.5
    save_file(tensors | biases, tmp_path / "model.safetensors")
    assert refused(tmp_path) == f"the checkpoint holds the tensor {name}, which LlamaForCausalLM does not have"
    other = {"model.layers.1.mlp.other.bias": torch.zeros(4)}
    save_file(tensors | other, tmp_path / "model.safetensors")
    assert "holds the tensor model.layers.1.mlp.other.bias, which" in refused(tmp_path)


# -- settings and memory ----------------------------------------------------------------------------------------------


def config(folder: Path, **settings: Any) -> EngineConfig:
    return EngineConfig(model=str(folder), device="cpu", **settings)


@needs_library
@pytest.mark.parametrize("name", PACKED)
def test_the_memory_plan_counts_the_packed_blocks(tmp_path, name):
    write(tmp_path, PACKED[name], dtype=torch.bfloat16)
    model = load(tmp_path, dtype="bfloat16")
    linears = [linear for layer in model.layers for linear in layer.linears]
    packed = sum(linear._packed.num_bytes for linear in linears)
    plain = 2 * 2 * 300 * 256 + 2 * 5 * 256
    assert model.weights_bytes == packed + plain
    found = plan.plan(config(tmp_path))
    assert (found["weights_bytes"], found["quantization"]) == (model.weights_bytes, model.spec.method)


@needs_library
def test_float16_becomes_bfloat16_where_our_kernels_compute(tmp_path):
    reference = write(tmp_path, awq(), dtype=torch.float16)
    assert describe(config(tmp_path)).spec.dtype == torch.bfloat16
    assert describe(config(tmp_path, cpu_isa="torch")).spec.dtype == torch.float16
    assert error(load(tmp_path, dtype="auto"), reference) < 0.1
    spec = describe(config(tmp_path, dtype="float16")).spec
    assert (spec.dtype, spec.quantization, spec.in_blocks) == (torch.float16, "none", {})


def test_a_note_says_what_dequantized_weights_need(tmp_path):
    write(tmp_path, awq(), dtype=torch.bfloat16)
    found = plan.plan(config(tmp_path, cpu_isa="torch"))
    assert found["weights_bytes"] == 2 * found["num_params"] and found["quantization"] == "none"
    note = "983,040 weights in awq are dequantized while they are loaded, and take 2.0 MB in bfloat16"
    assert note in found["notes"]


def test_other_settings_of_quantization_are_refused(tmp_path):
    write(tmp_path, awq())
    assert refused(tmp_path, ConfigError, quantization="int4") == (
        "the weights of this checkpoint (awq) are quantized: leave out `quantization=int4`"
    )
    assert "makes awq weights on a GPU alone" in refused(tmp_path, ConfigError, load_format="dummy")
    assert refused(tmp_path, implementation="transformers") == (
        "weights in awq are for the native implementation, and LlamaForCausalLM runs on transformers' code here: use "
        "the unquantized version of the model"
    )


def test_a_model_without_a_native_implementation_is_refused(tmp_path):
    make("gpt2", tmp_path)
    edit_config(tmp_path, quantization_config=awq().config)
    with pytest.raises(ModelError, match="weights in awq are for the native implementation, and GPT2LMHeadModel"):
        plan.plan(config(tmp_path))


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# -- refused ----------------------------------------------------------------------------------------------------------

CT = int_quantized().config


def group(**changes: Any) -> dict[str, Any]:
    """Return config_groups with changed weights."""
    found = CT["config_groups"]["group_0"]
    return {"group_0": found | {"weights": found["weights"] | changes}}


@pytest.mark.parametrize(
    ("found", "says"),
    [
        ("awq", "quantization_config must be an object"),
        ({"bits": 4}, "asks for unnamed quantization, which is not supported; use the unquantized version"),
        ({"quant_method": ["gptq"]}, "asks for ['gptq'] quantization"),
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True},
            "bitsandbytes quantization, which is not supported; use the unquantized version of the model, with "
            "`quantization=int8` or `quantization=int4`",
        ),
        ({"quant_method": "quanto"}, "asks for quanto quantization, which is not supported"),
        ({"quant_method": "gguf", "numbers": {"Q8_0": 1}}, "asks for gguf quantization, which is not supported"),
        ({"quant_method": "gptq"}, "weights of None bits are not supported, 4 and 8 are"),
        ({"quant_method": "gptq", "bits": 3}, "weights of 3 bits are not supported, 4 and 8 are"),
        ({"quant_method": "gptq", "bits": True}, "weights of True bits"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size must be -1 or a positive whole number"),
        ({"quant_method": "gptq", "bits": 4, "group_size": "128"}, "group_size must be -1 or a positive whole number"),
        (
            {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"},
            "with the format marlin are not supported",
        ),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*": {"bits": 8}}}, "differ from weight to weight"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": ["-:a"]}, "differ from weight to weight"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"-:a": {}, "b": {"bits": 8}}}, "differ from weight to weight"),
        ({"quant_method": "gptq", "bits": 4, "pack_dtype": "int16"}, "packed in int16"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt checkpoints with weights in NVFP4 are not"),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": "lm_head"}, "ignore must be a list of names"),
        (AUTO_ROUND, "the format None; auto_round:auto_gptq, auto_round:auto_awq are supported"),
        (AUTO_GPTQ | {"packing_format": "auto_round:exllamav2"}, "the format auto_round:exllamav2; auto_round:auto"),
        (AUTO_GPTQ | {"data_type": "mx_fp"}, "numbers of the type mx_fp"),
        (AUTO_GPTQ | {"extra_config": {"model.layers.0": {"bits": 8}}}, "settings that differ from weight to weight"),
        (AUTO_GPTQ | {"extra_config": {"model.layers.0": {"sym": False}}}, "settings that differ from weight to"),
        (AUTO_GPTQ | {"extra_config": {"model.layers.0": {"group_size": 16}}}, "settings that differ from weight to"),
        (AUTO_GPTQ | {"extra_config": {"a": 1}}, "extra_config of quantization_config must be an object of objects"),
        ({"quant_method": "awq", "bits": 8}, "weights of 8 bits are not supported, 4 are"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "the format gemv"),
        ({"quant_method": "awq", "bits": 4, "zero_point": False}, "without zero points"),
        ({"quant_method": "awq", "bits": 4, "modules_to_not_convert": "all"}, "modules_to_not_convert must be a list"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size must be two positive whole numbers"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "weight_block_size must be two positive"),
        (CT | {"format": "nvfp4-pack-quantized"}, "the format nvfp4-pack-quantized; pack-quantized, int-quantized"),
        (CT | {"config_groups": {}}, "config_groups of quantization_config must be an object"),
        (CT | {"config_groups": {"group_0": []}}, "config_groups of quantization_config must be an object of objects"),
        (CT | {"config_groups": group(num_bits=2)}, "weights of 2 bits are not supported, 4 and 8 are"),
        (CT | {"config_groups": group(type="float", num_bits=4)}, "weights of 4 bits are not supported, 8 are"),
        (CT | {"config_groups": group(type="nf")}, "numbers of the type nf"),
        (CT | {"config_groups": group(strategy="token")}, "scales by token"),
        (CT | {"config_groups": group(strategy="group")}, "group_size must be -1 or a positive whole number"),
        (CT | {"config_groups": group(strategy="block")}, "block_structure must be two positive whole numbers"),
        (CT | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "the sparse format sparse-24-bitmask"),
        (CT | {"transform_config": {"config_groups": {"u": {}}}}, "transforms of the activations"),
        (CT | {"ignore": [1]}, "ignore must be a list of names"),
        (CT | {"ignore": ["re:("]}, "the pattern re:( cannot be used: unclosed group"),
        (
            CT | {"config_groups": {"group_0": CT["config_groups"]["group_0"] | {"targets": ["re:(?!.*mlp)"]}}},
            "the pattern re:(?!.*mlp) cannot be used: look-around",
        ),
        (CT | {"ignore": [f"re:a{i}" for i in range(65)]}, "more than 64 regular expressions"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_is_not_supported_is_named(tmp_path, found, says):
    make("llama", tmp_path)
    edit_config(tmp_path, quantization_config=found)
    assert says in refused(tmp_path)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Return (object or list, key or index) for each value in a JSON document."""
    items = list(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ())
    return [(value, key) for key, _ in items] + [place for _, inner in items for place in places(inner)]


@pytest.mark.parametrize("name", ["gptq-4", "awq-64", "w4a16", "w8a8-zeros", "fp8-block", "ct-fp8-block", *WRITTEN])
@pytest.mark.parametrize("junk", [None, True, -1, 0, 1e400, "", "re:", [], [[]], {}, {"a": []}, "x" * 1000], ids=str)
def test_any_value_is_read_or_refused_in_a_sentence(name, junk):
    text = json.dumps(WRITTEN[name][1] if name in WRITTEN else KINDS[name].config)
    for index in range(len(places(json.loads(text)))):
        found = json.loads(text)
        holder, key = places(found)[index]
        holder[key] = junk
        try:
            scheme = parse(found).scheme("model.layers.0.mlp.up_proj.weight")
        except ModelError as refusal:
            assert "\n" not in str(refusal) and len(str(refusal)) < 300
        else:
            assert scheme is None or scheme.blocks_type(256) in (None, "Q4_0", "Q4_Z", "Q8_0")


def test_a_hostile_pattern_takes_no_time():
    found = parse(CT | {"ignore": ["re:(.|.)*(.|.)*(.|.)*(.|.)*X", "re:(.*)*(.*)*Y"]})
    started = time.process_time()
    for _ in range(1000):
        assert found.scheme(f"model.layers.{'a' * 100}.weight") is not None
    assert time.process_time() - started < 30


def spoilt(tensors: dict[str, Tensor], name: str, change: Any) -> None:
    """Replace a tensor of every weight by what `change` makes of it; None: remove it."""
    for key in [key for key in tensors if key.endswith(name)]:
        found = change(tensors.pop(key))
        if found is not None:
            tensors[key] = found.contiguous()


@needs_library
@pytest.mark.parametrize(
    ("kind", "name", "change", "says"),
    [
        ("gptq-4", "scales", lambda t: None, "the checkpoint lacks model.layers.0.mlp.down_proj.scales, which"),
        ("gptq-4", "qzeros", lambda t: None, "qzeros, which model.layers.0.mlp.down_proj.weight needs"),
        ("awq-64", "qweight", lambda t: t[:-64], "qzeros has the shape"),
        ("awq-64", "qweight", lambda t: t[:-8], "has 376 columns, which groups of 64 do not divide"),
        ("gptq-4", "scales", lambda t: t[:, :-1], "which does not fit a weight of [256, 384]: [3, 256] would"),
        ("gptq-4", "scales", lambda t: t.double(), "in torch.float64, which does not fit"),
        ("gptq-4", "qweight", lambda t: t.short(), "is not stored as gptq weights of 4 bits are"),
        ("gptq-4", "qweight", lambda t: t[0], "is not stored as gptq weights of 4 bits are"),
        ("gptq-4", "g_idx", lambda t: t + 1, "g_idx names groups that model.layers."),
        ("gptq-4", "g_idx", lambda t: (torch.arange(len(t)) // 100).clamp(max=1).int(), "that 32 does not divide"),
        ("gptq-4", "scales", lambda t: t * float("nan"), "has a scale that is not a number"),
        ("gptq-4", "qzeros", lambda t: t * 0, "has zero points, but config.json calls it symmetric"),
        ("w4a16", "weight_scale", lambda t: t.float() * 1e9, "but at most 6.55e+04 is supported"),
        ("w4a16-zeros", "weight_zero_point", lambda t: None, "weight_zero_point, which model"),
        ("w4a16-zeros", "weight_zero_point", lambda t: t[:-1], "weight_zero_point has the shape"),
        ("w8a8", "weight_scale", lambda t: t[1:], "weight_scale has the shape"),
        (
            "w8a8",
            "proj.weight",
            lambda t: t.to(torch.float8_e4m3fn),
            "is not stored as compressed-tensors weights of 8",
        ),
        ("fp8-block", "weight_scale_inv", lambda t: None, "lacks model.layers.0.mlp.down_proj.weight_scale, which"),
        ("fp8-block", "weight_scale_inv", lambda t: t[:1, :1].repeat(5, 5), "has the shape [5, 5] in torch.float32"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_tensors_that_contradict_config_json_get_a_sentence(tmp_path, kind, name, change, says):
    write(tmp_path, KINDS[kind])
    tensors = load_file(tmp_path / "model.safetensors")
    spoilt(tensors, name, change)
    save_file(tensors, tmp_path / "model.safetensors")
    assert says in refused(tmp_path)


def test_a_checkpoint_without_quantized_weights_is_refused(tmp_path):
    write(tmp_path, awq(), plain=lambda module: True)
    assert refused(tmp_path) == (
        "config.json or a file beside it names awq quantization, but the checkpoint holds no quantized weights; remove "
        "quantization_config, or that file"
    )


def test_a_weight_that_is_quantized_and_plain_is_refused(tmp_path):
    write(tmp_path, awq())
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.ones(384, 256)
    save_file(tensors, tmp_path / "model.safetensors")
    assert "mlp.up_proj.weight both quantized and plain" in refused(tmp_path)
