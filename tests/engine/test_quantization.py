"""Whole models with quantized weights: close to the plain ones, of the planned size, and refused if unsupported."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine import ConfigError, EngineConfig, plan
from engine.config import check
from engine.kernels.library import choose
from engine.models.decoder import Decoder
from engine.models.layers import Linear
from engine.models.precision import LayerBits, is_grouped, layer_bits
from tests.engine.test_kernels_quantized import rounded_weight
from tests.engine.test_models import CPU, Bench, prompt
from tests.models import load_model, make

NAMES = ["qwen3-tied", "llama-bias", "qwen2"]


def load(folder: Path, dtype: str = "float32", **settings: str) -> Decoder:
    model = load_model(EngineConfig(model=str(folder), dtype=dtype, **settings), folder)
    assert isinstance(model, Decoder)
    return model


def quantized_weights(
    model: Decoder, quantization: str, round_: Callable[..., Tensor] = rounded_weight
) -> dict[Linear, Tensor]:
    """Return the weight of each linear layer of a plain model as the quantized model has it."""
    grouped = is_grouped(quantization, model.spec.num_params)
    if grouped and round_ is rounded_weight:  # a GPU has no groups in 8 bits
        round_ = partial(round_, grouped=True)
    found = {model.head: round_(model.head.weight, 8)}
    hidden = model.embedding.weight.float().square().mean(0)
    for layer in model.layers:
        bits = layer_bits(quantization, layer.index, len(model.layers), model.spec.num_params)
        assert bits is not None
        after_attention_norm, after_mlp_norm = (
            norm.weight.float().square() * hidden / hidden.mean() for norm in (layer.attention_norm, layer.mlp_norm)
        )
        q, k, v = layer.rows
        queries_and_keys, values = layer.qkv.weight.split([q + k, v])
        found[layer.qkv] = torch.cat(
            [round_(queries_and_keys, bits.others, after_attention_norm), round_(values, bits.value)]
        )
        found[layer.output] = round_(layer.output.weight, bits.others)
        found[layer.gate_up] = round_(layer.gate_up.weight, bits.others, after_mlp_norm)
        gate, up = (half.float().square() @ after_mlp_norm for half in layer.gate_up.weight.chunk(2))
        found[layer.down] = round_(layer.down.weight, bits.down, gate / gate.mean() * up / up.mean())
    return found


def linears(model: Decoder) -> list[tuple[Linear, bool]]:
    """Return all linear layers, each with whether it is the head."""
    found = [part for layer in model.layers for part in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    return [(part, False) for part in found] + [(model.head, True)]


@pytest.fixture
def needs_kernels():
    if choose("auto", CPU, torch.float32).kernels is None:
        pytest.skip("no kernels here")


@pytest.mark.usefixtures("needs_kernels")
@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_those_of_quantized_weights(tmp_path, name, quantization):
    """The remaining error is from 8-bit activations, which a random model amplifies; layer by layer there is none."""
    folder = make(name, tmp_path, dtype=torch.float32)
    plain, model = load(folder, cpu_isa="torch"), load(folder, quantization=quantization)
    for linear, weight in quantized_weights(plain, quantization).items():
        linear.weight = weight.float()
    want, got = (Bench(each).step({0: prompt(40)})[0] for each in (plain, model))
    assert (got - want).norm() < 0.1 * want.norm()
    del model.executors[0]  # what is left computes layer by layer
    apart = Bench(model).step({0: prompt(40)})[0]
    assert (apart - got).norm() < 0.01 * got.norm()


def test_values_and_some_down_projections_have_8_bits_with_int4():
    bits = [layer_bits("int4", layer, 30, 10**9) for layer in range(30)]
    in_8 = [layer for layer in range(30) if bits[layer] == LayerBits(value=8, down=8, others=4)]
    assert in_8 == [0, 1, 2, 5, 8, 11, 14, 17, 20, 23, 26, 27, 28, 29]
    assert all(bits[layer] == LayerBits(8, 4, 4) for layer in range(30) if layer not in in_8)
    assert layer_bits("int4", 0, 1, 10**9) == LayerBits(value=8, down=8, others=4)
    assert layer_bits("int8", 0, 30, 10**9) == LayerBits(8, 8, 8)
    assert layer_bits("none", 0, 30, 10**9) is layer_bits("gguf", 0, 30, 10**9) is None


def test_small_models_have_5_bits_with_int4_and_8_in_the_first_and_last_layers():
    bits = [layer_bits("int4", layer, 30, 135_000_000) for layer in range(30)]
    ends = [0, 1, 2, 26, 27, 28, 29]
    assert all(bits[layer] == LayerBits(8, 8, 8, grouped=True) for layer in ends)
    assert all(bits[layer] == LayerBits(8, 5, 5, grouped=True) for layer in range(30) if layer not in ends)
    assert {layer_bits("int4", layer, 7, 10**6) for layer in range(6)} == {LayerBits(8, 5, 5, grouped=True)}
    assert layer_bits("int8", 0, 30, 135_000_000) == LayerBits(8, 8, 8)


def test_weights_of_8_bits_have_groups_in_small_models_with_int4():
    assert is_grouped("int4", 135_000_000) and not is_grouped("int4", 10**9)
    assert not any(is_grouped(other, 135_000_000) for other in ("int8", "none", "gguf"))


@pytest.mark.usefixtures("needs_kernels")
def test_the_fewer_bits_the_farther_from_the_plain_model(tmp_path):
    folder = make("qwen3-tied", tmp_path, dtype=torch.float32)
    plain, *others = (
        Bench(load(folder, quantization=quantization)).step({0: prompt(40)})[0]
        for quantization in ("none", "int8", "int4")
    )
    lost = [((other - plain).norm() / plain.norm()).item() for other in others]
    assert 0 < lost[0] < 0.1 and 2 * lost[0] < lost[1] < 0.8


@pytest.mark.usefixtures("needs_kernels")
@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("name", NAMES)
def test_quantized_weights_have_the_planned_size(tmp_path, name, quantization):
    folder = make(name, tmp_path, dtype=torch.bfloat16)
    model = load(folder, "bfloat16", quantization=quantization)
    parts = {id(linear): linear for linear, _ in linears(model)} | {id(model.embedding): model.embedding}
    held = 0
    for linear in parts.values():
        assert (linear._packed is None) == (linear is model.embedding and linear is not model.head)
        held += linear.weight.nbytes if linear._packed is None else linear._packed.num_bytes
    padding = sum(48 * 4 * 128 for _ in parts)  # empty rows of the last panels
    assert 0.9 * model.weights_bytes < held < model.weights_bytes + padding
    told = plan.plan(EngineConfig(model=str(folder), device="cpu", quantization=quantization))
    assert (told["weights_bytes"], told["quantization"]) == (model.weights_bytes, quantization)


# -- refused --------------------------------------------------------------------------------------------------------


def test_an_unknown_quantization_is_refused():
    with pytest.raises(ConfigError, match="unknown quantization 'int2'; known: none, int8, int4"):
        check(EngineConfig(model="x", quantization="int2"))


@pytest.mark.parametrize("implementation", ["auto", "transformers"])
def test_transformers_models_are_refused(tmp_path, implementation):
    folder = make("gpt_neox" if implementation == "auto" else "llama", tmp_path, dtype=torch.float32)
    config = EngineConfig(model=str(folder), device="cpu", implementation=implementation, quantization="int8")
    for refuses in (lambda: plan.plan(config), lambda: load_model(config, folder)):
        with pytest.raises(ConfigError, match=r"int8` is for the native implementation, and .*: leave it out"):
            refuses()


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"cpu_isa": "torch"}, "`cpu_isa=torch` disables them"),
        ({"dtype": "float64"}, "not float64: set `dtype=bfloat16`"),
        ({"dtype": "float16"}, "not float16: set `dtype=bfloat16`"),
    ],
)
def test_unsupported_quantization_is_refused_before_loading(tmp_path, settings, why):
    folder = make("llama", tmp_path, dtype=torch.float32)
    config = EngineConfig(model=str(folder), device="cpu", quantization="int4", **settings)
    for refuses in (lambda: plan.plan(config), lambda: load_model(config, folder)):
        with pytest.raises(ConfigError, match=why):
            refuses()
