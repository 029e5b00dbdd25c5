"""Nemotron-H: layers of one part each in config.json and checkpoints, and MLPs without a gate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine import EngineConfig, ModelError, plan
from engine.kernels.library import choose
from engine.kernels.structures import Gate
from engine.models.checkpoint import sublayers
from engine.models.checkpoint.weights import original
from engine.models.decoder import Decoder
from engine.models.decoder_spec import DecoderSpec
from engine.models.importance import after_squares
from engine.models.layers import Linear, Quantization
from engine.models.mixers.states import Mamba2Shape
from engine.models.spec import ModelSpec, read_spec
from engine.models.squared import SQUARED, Squared
from tests.engine.test_models import CPU, Bench, prompt
from tests.models import load_model, make

NANO_9B = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "hidden_size": 4480,
    "intermediate_size": 15680,
    "num_hidden_layers": 56,
    "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "mamba_num_heads": 128,
    "mamba_head_dim": 80,
    "n_groups": 8,
    "ssm_state_size": 128,
    "conv_kernel": 4,
    "vocab_size": 131072,
    "max_position_embeddings": 131072,
    "time_step_limit": [0.0, float("inf")],
    "torch_dtype": "bfloat16",
}
NANO_30B_A3B = NANO_9B | {
    "hidden_size": 2688,
    "intermediate_size": 1856,
    "num_hidden_layers": 52,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "mamba_num_heads": 64,
    "mamba_head_dim": 64,
    "n_routed_experts": 128,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "routed_scaling_factor": 2.5,
}
SMALL = NANO_9B | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": None,
    "hybrid_override_pattern": "M-M*-",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "ssm_state_size": 16,
    "vocab_size": 96,
}
EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 48,
}


def spec_of(source: dict[str, Any] = SMALL, **changes: Any) -> ModelSpec:
    found = read_spec({**source, **changes}, EngineConfig(model=""))
    assert found is not None
    return found


def decoder_of(source: dict[str, Any] = SMALL, **changes: Any) -> DecoderSpec:
    decoder = spec_of(source, **changes).decoder
    assert decoder is not None
    return decoder


def kinds_of(decoder: DecoderSpec) -> list[str]:
    """Return what each layer has: m or a, and d for an MLP or e for experts."""
    return [
        ("a" if shape.mixer is None else "m")
        + ("" if not shape.inner else "d" if decoder.experts_of(index) is None else "e")
        for index, shape in enumerate(decoder.shapes)
    ]


def load(folder: Path, **settings: Any) -> Decoder:
    model = load_model(EngineConfig(model=str(folder), **settings), folder)
    assert isinstance(model, Decoder)
    return model


# -- config.json ----------------------------------------------------------------------------------------------------


def test_an_mlp_or_experts_are_part_of_the_layer_before_them():
    assert kinds_of(decoder_of()) == ["md", "m", "ad"]
    with_experts = decoder_of(**EXPERTS, hybrid_override_pattern="MEMM*EM-*")
    assert kinds_of(with_experts) == ["me", "m", "m", "ae", "md", "a"]
    assert with_experts.turns == (-1,) * 6, "there are no rotary embeddings"


@pytest.mark.parametrize("key", ["layers_block_type", "layer_types"])
@pytest.mark.parametrize("names", [("mamba", "attention"), ("linear_attention", "full_attention")])
def test_a_list_of_transformers_says_the_same_and_is_preferred(key, names):
    mamba, attention = names
    listed = [mamba, "mlp", attention, "moe", mamba]
    assert kinds_of(decoder_of(**EXPERTS, **{key: listed})) == ["md", "ae", "m"]


def test_models_of_nvidia_have_their_number_of_weights():
    assert spec_of(NANO_9B).num_params == pytest.approx(8.89e9, rel=0.005)
    experts = spec_of(NANO_30B_A3B)
    assert experts.num_params == pytest.approx(31.6e9, rel=0.005)
    assert experts.decoder is not None and experts.decoder.experts is not None
    active = sum(map(experts.decoder.multiplied_numbers, range(len(experts.decoder.shapes))))
    head = experts.vocab_size * experts.decoder.hidden_size
    assert active + head == pytest.approx(3.2e9, rel=0.01)
    assert experts.decoder.experts.dense == {
        index for index, kind in enumerate(kinds_of(experts.decoder)) if kind not in {"me", "ae"}
    }


def test_heads_of_mamba_may_have_any_size():
    shape = decoder_of(mamba_num_heads=6, mamba_head_dim=40, n_groups=3, use_bias=True, use_conv_bias=False).shapes[0]
    assert isinstance(shape.mixer, Mamba2Shape)
    assert (shape.mixer.key_heads, shape.mixer.value_heads, shape.mixer.value_dim) == (3, 6, 40)
    assert shape.mixer.has_bias and not shape.mixer.has_conv_bias


def test_a_model_without_experts_may_have_their_keys():
    assert decoder_of(**EXPERTS).experts is None


def test_layers_differ_from_those_of_llama():
    assert decoder_of().difference == "layers that keep states"
    assert decoder_of(hybrid_override_pattern="*-**-").difference == "layers of several sizes"
    assert decoder_of(hybrid_override_pattern="**").difference == "layers without an MLP"
    assert decoder_of(hybrid_override_pattern="*-*-").difference == "norms of another kind than RMSNorm"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"hybrid_override_pattern": None}, "hybrid_override_pattern or layers_block_type must say what each layer is"),
        ({"hybrid_override_pattern": 5}, "hybrid_override_pattern or layers_block_type must say what each layer is"),
        ({"hybrid_override_pattern": "M*" * 4000}, "must say what each layer is"),
        ({"hybrid_override_pattern": "M-X*"}, "layer 2 is 'X', which no layer of this model can be"),
        ({"layers_block_type": ["mamba", ["mlp"]]}, "layer 1 is .*mlp.*, which no layer of this model can be"),
        ({"hybrid_override_pattern": "-M*"}, "layer 0 is an MLP or experts, which must follow a layer of attention"),
        ({"hybrid_override_pattern": "M-E*"}, "layer 2 is an MLP or experts, which must follow a layer of attention"),
        ({"hybrid_override_pattern": "M-M-"}, "names no layer with full attention"),
        ({"num_hidden_layers": 4}, "num_hidden_layers is 4, but 5 layers are listed"),
        ({"mlp_hidden_act": "silu"}, "needs mlp_hidden_act to be relu2 for NemotronHForCausalLM, not silu"),
        ({"mlp_hidden_act": "cube"}, "has no activation 'cube'"),
        ({"mamba_hidden_act": "gelu"}, "needs mamba_hidden_act to be silu"),
        ({"mlp_bias": True}, "needs mlp_bias to be False"),
        (
            {**EXPERTS, "hybrid_override_pattern": "ME*", "moe_latent_size": -1},
            "moe_latent_size must be a positive whole number, not -1",
        ),
        ({"residual_in_fp32": True}, "needs residual_in_fp32 to be False"),
        ({"mamba_num_heads": 5}, "5 heads of Mamba cannot share 2 groups of states evenly"),
        ({"mamba_head_dim": 0}, "mamba_head_dim must be a positive whole number, not 0"),
        ({"ssm_state_size": 1 << 20}, "ssm_state_size must be at most 1024"),
        ({"time_step_limit": [1.0]}, "time_step_limit must be two numbers"),
        ({"hybrid_override_pattern": "ME*", "n_routed_experts": 0}, "n_routed_experts must be a positive whole number"),
        ({**EXPERTS, "hybrid_override_pattern": "ME*", "num_experts_per_tok": 9}, "experts_per_tok must be at most 8"),
        ({**EXPERTS, "hybrid_override_pattern": "ME*", "moe_intermediate_size": None}, "has no moe_intermediate_size"),
    ],
)  # fmt: skip
def test_what_no_model_has_is_refused(changes, says):
    with pytest.raises(ModelError, match=says):
        spec_of(**changes)


# -- checkpoints ----------------------------------------------------------------------------------------------------


def test_each_part_of_a_layer_has_a_number_of_its_own_in_checkpoints():
    pairs = sublayers.renames(SMALL)

    def renamed(name: str) -> str:
        for old, new in pairs:
            name = name.replace(old, new)
        return name

    names = {
        "backbone.embeddings.weight": "model.embed_tokens.weight",
        "backbone.norm_f.weight": "model.norm.weight",
        "backbone.layers.0.norm.weight": "model.layers.0.input_layernorm.weight",
        "backbone.layers.0.mixer.norm.weight": "model.layers.0.mamba.norm.weight",
        "backbone.layers.1.norm.weight": "model.layers.0.post_attention_layernorm.weight",
        "backbone.layers.1.mixer.up_proj.weight": "model.layers.0.mlp.up_proj.weight",
        "backbone.layers.2.mixer.A_log": "model.layers.1.mamba.A_log",
        "backbone.layers.3.mixer.q_proj.weight": "model.layers.2.self_attn.q_proj.weight",
        "backbone.layers.4.norm.weight": "model.layers.2.post_attention_layernorm.weight",
        "lm_head.weight": "lm_head.weight",
        "mtp.layers.0.mixer.q_proj.weight": "mtp.layers.0.mixer.q_proj.weight",
    }
    for stored, own in names.items():
        assert renamed(stored) == own and original(own, pairs) == stored
    assert renamed("model.layers.4.mixer.down_proj.weight") == "model.layers.2.mlp.down_proj.weight"


def test_names_without_backbone_and_layers_that_predict_further_tokens_are_read_as_well(tmp_path):
    folder = make("nemotron_h-experts", tmp_path / "model")
    before = Bench(load(folder)).step({0: prompt(9)})[0]
    tensors = {
        name.replace("backbone.", "model."): each for name, each in load_file(folder / "model.safetensors").items()
    }
    further = {"mtp.layers.0.mixer.q_proj.weight": torch.ones(2), "mtp.layers.1.norm.weight": torch.ones(2)}
    save_file(tensors | further, folder / "model.safetensors")
    assert torch.equal(Bench(load(folder)).step({0: prompt(9)})[0], before)


def test_a_config_of_nvidia_gives_the_same_model_as_one_of_transformers(tmp_path):
    folder = make("nemotron_h-experts", tmp_path / "model")
    before = Bench(load(folder)).step({0: prompt(9)})[0]
    path = folder / "config.json"
    source = json.loads(path.read_text())
    del source["layers_block_type"]
    changes = {"hybrid_override_pattern": "MEM*EM-", "num_hidden_layers": 7, "time_step_limit": [0.0, float("inf")]}
    path.write_text(json.dumps(source | changes))
    assert "Infinity" in path.read_text()
    assert torch.equal(Bench(load(folder)).step({0: prompt(9)})[0], before)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"backbone.layers.1.mixer.up_proj.weight": None}, "lacks the tensor backbone.layers.1.mixer.up_proj.weight"),
        ({"backbone.layers.0.mixer.gate_proj.weight": (4, 4)}, "holds the tensor backbone.layers.0.mixer.gate_proj"),
        ({"backbone.layers.3.mixer.D": (5,)}, r"backbone.layers.3.mixer.D in \S+ has the shape \[5\]"),
        ({"model.layers.3.mixer.D": (6,)}, "holds two tensors for model.layers.2.mamba.D"),
    ],
)
def test_tensors_of_another_model_are_called_by_their_names_in_the_file(tmp_path, change, says):
    folder = make("nemotron_h", tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    for name, shape in change.items():
        if shape is None:
            del tensors[name]
        else:
            tensors[name] = torch.zeros(shape)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=says):
        load(folder)


@pytest.mark.parametrize("name", ["nemotron_h", "nemotron_h-experts"])
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_weights_are_counted_and_may_be_random(tmp_path, name, quantization):
    if choose("auto", CPU, torch.float32).kernels is None:
        pytest.skip("no kernels here")
    folder = make(name, tmp_path, dtype=torch.bfloat16)
    config = EngineConfig(model=str(folder), device="cpu", quantization=quantization)
    model = load(folder, quantization=quantization)
    assert plan.plan(config)["weights_bytes"] == model.weights_bytes and model.product.invariant
    (folder / "model.safetensors").unlink()
    random = load(folder, quantization=quantization, load_format="dummy")
    assert random.weights_bytes == model.weights_bytes and random.num_params == model.num_params
    assert Bench(random).step({0: prompt(5)})[0].isfinite().all()


# -- MLPs without a gate ----------------------------------------------------------------------------------------------


def squared(inner: int, columns: int, dtype: torch.dtype, **settings: Any) -> tuple[Squared, Tensor]:
    """Return a layer packed for the CPU, and its weight."""
    kernels = choose("auto", CPU, dtype, quantized=True).kernels
    if kernels is None:
        pytest.skip("no kernels here")
    layer = Squared(inner, columns, False, dtype, CPU)
    weight = torch.randn(inner, columns, generator=torch.Generator().manual_seed(1)).to(dtype) / columns**0.5
    layer.weight.copy_(weight)
    layer.pack(kernels, **settings)
    return layer, weight


@pytest.mark.parametrize("inner", [5, 32, 90])
@pytest.mark.parametrize("bits", [None, 8, 4])
def test_our_kernels_square_what_is_above_0_with_the_same_bits_in_any_batch(inner, bits):
    for dtype in (torch.float32, torch.bfloat16):
        layer, weight = squared(inner, 130, dtype, quantization=None if bits is None else Quantization(bits))
        assert layer.multiplied() is not None
        x = torch.randn(60, 130, generator=torch.Generator().manual_seed(2)).to(dtype)
        found, want = layer(x), (x.float() @ weight.float().T).relu().square()
        limit = {None: 1e-2 if dtype == torch.bfloat16 else 1e-5, 8: 0.05, 4: 0.4}[bits]
        assert (found.float() - want).norm() < limit * want.norm()
        for first, last in ((0, 1), (3, 10), (17, 60)):
            assert torch.equal(layer(x[first:last]), found[first:last])


def test_the_square_of_what_is_not_finite(monkeypatch):
    x = torch.tensor([[torch.inf, -torch.inf, torch.nan, -0.0, 3.0, -3.0]]).T
    plain = Squared(1, 1, False, torch.float32, CPU)
    plain.weight.fill_(1)
    want = plain(x)
    kernels = choose("auto", CPU, torch.float32).kernels
    if kernels is None:
        pytest.skip("no kernels here")
    plain.pack(kernels)
    torch.testing.assert_close(plain(x), want, equal_nan=True)
    assert want[:2].tolist() == [[torch.inf], [0.0]] and want[2].isnan().all() and want[4] == 9
    assert isinstance(plain.gate, Gate) and plain.gate.activation == SQUARED and Linear.gate is None


def test_columns_after_a_square_matter_by_the_squares_of_the_products(monkeypatch):
    weight, columns = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]), torch.tensor([1.0, 3.0])
    found = after_squares([weight], columns)
    assert torch.allclose(found / found[0], torch.tensor([1.0, 9.0, 16.0]))
