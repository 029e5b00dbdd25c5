"""The planned size of a model's weights is the size of what is loaded, in every kind of linear layer."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine import EngineConfig, plan
from engine.kernels.library import Choice
from engine.kernels.matmul import Joined, Packed
from engine.models.decoder import Decoder
from engine.models.spec import read_spec
from tests.engine.test_kernels import needs_library
from tests.engine.test_models import Bench
from tests.models import load_model, prompt
from tests.quantized import Kind, int_quantized, pack_quantized

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 300,
    "max_position_embeddings": 256,
    "dtype": "bfloat16",
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
GEMMA4 = {"global_head_dim": 64, "hidden_size_per_layer_input": 0, "sliding_window": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "MixtralForCausalLM": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "GraniteMoeForCausalLM": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "Qwen3MoeForCausalLM": {**EXPERTS, "mlp_only_layers": [1]},
    "Glm4MoeForCausalLM": {**EXPERTS, "n_routed_experts": 6, "tie_word_embeddings": True},
    "Gemma4ForCausalLM": {
        **GEMMA4,
        "hidden_size_per_layer_input": 32,
        "vocab_size_per_layer_input": 300,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
    },
    "Gemma4ForCausalLM-experts": {
        **GEMMA4,
        **EXPERTS,
        "enable_moe_block": True,
        "top_k_experts": 2,
        "attention_k_eq_v": True,
    },
    "AfmoeForCausalLM": {**EXPERTS, "num_shared_experts": 1, "sliding_window": 8},
    "LagunaForCausalLM": {**EXPERTS, "shared_expert_intermediate_size": 32},
}
HEADS = "lm_head.weight", "model.embed_tokens.weight"


def plant(folder: Path, family: str, kind_of: Callable[[str], Kind | None] = lambda name: None, **changes: Any) -> None:
    """Write a checkpoint of random weights. `kind_of`: how a weight of a linear layer is quantized, by its name."""
    source = {"architectures": [family.partition("-")[0]], **SIZES, **FAMILIES[family], **changes}
    spec = read_spec({**source, "quantization_config": None}, EngineConfig(model=""))
    assert spec is not None and spec.decoder is not None
    model = Decoder(spec, torch.device("meta"), Choice(None), tied=spec.decoder.tied)
    targets = {f"model.{name}": target for name, target in model.targets().items()}
    if not spec.decoder.tied:
        targets["lm_head.weight"] = model.head.weight
    linears = {name for names, _, _ in spec.decoder.linears(spec.vocab_size) for name in names} - {*HEADS}
    tensors, generator = {}, torch.Generator().manual_seed(0)
    for name, target in targets.items():
        values = torch.randn(target.shape, generator=generator) * (0.05 if target.dim() > 1 else 0.1)
        kind = kind_of(name) if name in linears else None
        if kind is None:
            tensors[name] = values.bfloat16() if target.dim() > 1 else values.bfloat16() + 1
        else:
            stored, _ = kind.store(values)
            tensors |= {f"{name.removesuffix('weight')}{part}": each for part, each in stored.items()}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(source))
    save_file({name: each.contiguous() for name, each in tensors.items()}, folder / "model.safetensors")


def plant_two_types(folder: Path, family: str, eight: str) -> None:
    """Write a checkpoint with weights in 4 bits, and in 8 bits where names end with `eight`."""
    four, wide = pack_quantized(4, 32, packed="Q4_0"), int_quantized()
    groups = {"group_0": wide.config["config_groups"]["group_0"] | {"format": "int-quantized"}}
    groups["group_0"] |= {"targets": [f"re:.*{eight}$"]}
    groups["group_1"] = four.config["config_groups"]["group_0"] | {"format": "pack-quantized"}
    config = four.config | {"format": "mixed-precision", "config_groups": groups}
    plant(folder, family, lambda name: wide if name.endswith(f"{eight}.weight") else four, quantization_config=config)


def held(model: Decoder) -> int:
    """Return the bytes of a loaded model: of what its linear layers have packed, and of all other numbers."""
    linears = {model.head, model.embedding, *(linear for layer in model.layers for _, linear, *_ in layer.parts())}
    if model.inputs is not None:
        linears |= {model.inputs.table, model.inputs.projection}
    found = others = 0
    for linear in linears:
        assert linear.bias is None
        if isinstance(linear._packed, Packed):
            num_bytes, numbers = size(linear._packed)
        else:
            num_bytes, numbers = linear.weight.nbytes, linear.weight.numel()
        found, others = found + num_bytes, others - numbers
    return found + 2 * (model.num_params + others)


def size(packed: Packed) -> tuple[int, int]:
    """Return the bytes of a packed weight without the empty rows of its last panel, and its numbers."""
    if isinstance(packed, Joined):
        num_bytes, numbers = zip(*map(size, packed._parts), strict=True)
        return sum(num_bytes), sum(numbers)
    rows = packed.outputs * (2 if packed._gated else 1)
    return packed.num_bytes * rows // (packed._matrix.num_panels * packed._kernels.width), rows * packed.columns


def load(folder: Path, **settings: Any) -> Decoder:
    model = load_model(EngineConfig(model=str(folder), device="cpu", **settings), folder)
    assert isinstance(model, Decoder)
    return model


def planned(folder: Path, **settings: Any) -> dict[str, Any]:
    return plan.plan(EngineConfig(model=str(folder), device="cpu", num_blocks=16, **settings))


@needs_library
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_plan_is_the_size_of_weights_that_are_rounded_while_they_are_loaded(tmp_path, family, quantization):
    plant(tmp_path, family)
    model = load(tmp_path, quantization=quantization)
    assert planned(tmp_path, quantization=quantization)["weights_bytes"] == model.weights_bytes == held(model)


@needs_library
@pytest.mark.parametrize("family", FAMILIES)
def test_the_plan_is_the_size_of_a_quantized_checkpoint(tmp_path, family):
    """Of which all linear layers are quantized, those of routers and of the layers' own inputs too."""
    kind = pack_quantized(4, 32, packed="Q4_0")
    plant(tmp_path, family, lambda name: kind, quantization_config=kind.config)
    model = load(tmp_path)
    assert planned(tmp_path)["weights_bytes"] == model.weights_bytes == held(model)
    assert model.spec.dequantized == 0 and not model.spec.notes
    assert model.spec.in_blocks == {"Q4_0": quantized_numbers(model)}
    assert math.isfinite(Bench(model).step({0: prompt(20)})[0].sum())


@needs_library
@pytest.mark.parametrize("family", ["Qwen3MoeForCausalLM", "Gemma4ForCausalLM"])
def test_the_plan_is_the_size_of_a_quantized_checkpoint_that_is_dequantized(tmp_path, family):
    kind = pack_quantized(4, 16, packed=None)
    plant(tmp_path, family, lambda name: kind, quantization_config=kind.config)
    model = load(tmp_path)
    assert model.spec.dequantized == quantized_numbers(model)
    assert planned(tmp_path)["weights_bytes"] == model.weights_bytes == held(model) == 2 * model.num_params


@needs_library
@pytest.mark.parametrize(
    ("family", "eight"),
    [
        ("LlamaForCausalLM", "up_proj"),
        ("LlamaForCausalLM", "v_proj"),
        ("Qwen3MoeForCausalLM", "up_proj"),
        ("Gemma4ForCausalLM-experts", "k_proj"),  # beside queries alone, in layers whose keys are values
    ],
)
def test_weights_of_one_linear_layer_may_be_in_blocks_of_two_types(tmp_path, family, eight):
    plant_two_types(tmp_path, family, eight)
    model = load(tmp_path)
    assert model.spec.dequantized == 0 and set(model.spec.in_blocks) == {"Q4_0", "Q8_0"}
    assert planned(tmp_path)["weights_bytes"] == model.weights_bytes == held(model)
    ids = prompt(20)
    got, want = (Bench(each).step({0: ids})[0] for each in (load(tmp_path, dtype="float32"), dequantized(tmp_path)))
    assert (got - want).abs().max() < 3e-3 * want.abs().max()


def quantized_numbers(model: Decoder) -> int:
    """Return the numbers of all linear layers but the head."""
    assert model.spec.decoder is not None
    linears = model.spec.decoder.linears(model.spec.vocab_size)
    return sum(sum(rows) * columns for names, rows, columns in linears if names != HEADS[:1])


def dequantized(folder: Path) -> Decoder:
    """Return the same model, with plain weights and torch's products."""
    return load(folder, dtype="float32", cpu_isa="torch")
