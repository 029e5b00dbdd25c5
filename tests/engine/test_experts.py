"""Mixtures of experts: which experts a token gets, the size of the weights, and settings that no model has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine import EngineConfig, ModelError, plan
from engine.kernels.library import choose
from engine.models import on_gpu
from engine.models.decoder import Decoder
from engine.models.executor import Eager
from engine.models.experts import Experts, ExpertsSpec
from engine.models.families import FAMILIES
from engine.models.layers import Linear
from engine.models.spec import read_spec
from tests.engine.test_models import CPU, Bench, prompt
from tests.models import BASE, QWEN_MOE, load_model, make

QWEN = {**BASE, **QWEN_MOE, "architectures": ["Qwen3MoeForCausalLM"]}


def experts_of(model: Decoder, layer: int = 0) -> Experts:
    experts = model.layers[layer].experts
    assert experts is not None
    return experts


def load(folder: Path, **settings: str) -> Decoder:
    model = load_model(EngineConfig(model=str(folder), **settings), folder)
    assert isinstance(model, Decoder)
    return model


def small(active: int, *, is_normalized: bool) -> Experts:
    """Three experts that multiply by 1, 10 and 100, roughly, and a router that returns its input."""
    spec = ExpertsSpec(3, active, 4, is_normalized, frozenset(), ("", "", "", ""))
    experts = Experts(3, spec, torch.float64, CPU, activation="relu")
    experts.router.weight.copy_(torch.eye(3))
    for index, (gate_up, down) in enumerate(zip(experts.gate_ups, experts.downs, strict=True)):
        gate_up.weight.zero_()
        gate_up.weight[:4] = 1.0  # the gate: the sum of x
        gate_up.weight[4:] = 1.0
        down.weight.fill_(10.0**index / 4)
    return experts


@pytest.mark.parametrize("is_normalized", [False, True])
def test_the_largest_weights_choose_the_experts(is_normalized):
    experts = small(2, is_normalized=is_normalized)
    x = torch.tensor([[3.0, 2.0, 1.0], [0.0, 1.0, 4.0]], dtype=torch.float64)
    weights, chosen = experts.route(x)
    assert chosen.tolist() == [[0, 1], [2, 1]]
    shares = x.softmax(-1).gather(1, chosen)
    assert torch.equal(weights, shares / shares.sum(1, keepdim=True) if is_normalized else shares)
    residual = torch.randn(2, 3, dtype=torch.float64)
    factors = (weights * 10.0**chosen).sum(1, keepdim=True)
    want = residual + factors * x.sum(1, keepdim=True) ** 2
    assert torch.allclose(experts(x, residual), want.expand(2, 3), rtol=1e-14)


def test_a_token_that_is_no_number_spoils_no_other():
    experts = small(2, is_normalized=True)
    x = torch.randn(5, 3, dtype=torch.float64)
    alone = experts(x, x)
    x[2] = torch.nan
    beside = experts(x, x)
    assert beside[2].isnan().all()
    assert torch.equal(beside[[0, 1, 3, 4]], alone[[0, 1, 3, 4]])


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_experts_are_quantized_and_the_router_is_not(tmp_path, quantization):
    if choose("auto", CPU, torch.float32).kernels is None:
        pytest.skip("no kernels here")
    folder = make("qwen3_moe", tmp_path, dtype=torch.bfloat16)
    model = load(folder, quantization=quantization)
    experts = experts_of(model)
    kinds = {type(linear._packed).__name__ for linear in (*experts.gate_ups, *experts.downs)}
    assert kinds.isdisjoint({type(experts.router._packed).__name__}) and len(kinds) == 1

    linears: list[Linear] = [model.head, model.embedding]
    for layer in model.layers:
        linears += [layer.qkv, layer.output]
        linears += [*experts_of(model, layer.index).gate_ups, *experts_of(model, layer.index).downs]
        linears += [experts_of(model, layer.index).router]
    held = sum(x.weight.nbytes if x._packed is None else x._packed.num_bytes for x in linears)
    assert 0.9 * model.weights_bytes < held < model.weights_bytes + len(linears) * 48 * 4 * 128
    told = plan.plan(EngineConfig(model=str(folder), device="cpu", quantization=quantization))
    assert told["weights_bytes"] == model.weights_bytes

    plain = Bench(load(folder)).step({0: prompt(40)})[0]
    assert (Bench(model).step({0: prompt(40)})[0] - plain).norm() < 0.9 * plain.norm()


def test_layers_without_experts_have_an_mlp(tmp_path):
    model = load(make("qwen3_moe-sparse", tmp_path))
    assert [layer.experts is None for layer in model.layers] == [True, False, True]


def test_only_the_executor_that_runs_layer_by_layer_takes_experts(tmp_path):
    model = load(make("mixtral", tmp_path))
    assert [type(executor) for executor in model.executors] == [Eager]
    assert on_gpu.objection(model.spec, CPU, None) == "the model has experts"


def test_a_checkpoint_without_an_expert_is_refused(tmp_path):
    from engine import models

    folder = make("qwen3_moe", tmp_path)
    config = (folder / "config.json").read_text().replace('"num_local_experts": 8', '"num_local_experts": 9')
    (folder / "config.json").write_text(config.replace('"num_experts": 8', '"num_experts": 9'))
    with pytest.raises(ModelError, match=r"has the shape \[8, 64\], but config.json asks for \[9, 64\]|experts\.8\."):
        models.examine(folder, EngineConfig(model=str(folder)))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_experts": 0}, "num_experts must be a positive whole number"),
        ({"num_experts": 10**9}, "num_experts must be at most 65536"),
        ({"num_experts": 60_000}, "3 layers of 60000 experts are more than 65536 experts"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok must be at most 8"),
        ({"num_experts_per_tok": None}, "has no num_experts_per_tok"),
        ({"moe_intermediate_size": "32"}, "moe_intermediate_size must be a positive whole number"),
        ({"mlp_only_layers": {"0": 1}}, "mlp_only_layers must be a list"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step must be a positive whole number"),
    ],
)
def test_what_no_model_has_is_refused(changes, says):
    with pytest.raises(ModelError, match=says):
        read_spec({**QWEN, **changes}, EngineConfig(model=""))


def test_sliding_windows_of_qwen3_moe_are_left_to_transformers():
    assert read_spec({**QWEN, "use_sliding_window": True}, EngineConfig(model="")) is None
    with pytest.raises(ModelError, match="no sliding windows for Qwen3MoeForCausalLM; leave `implementation` to auto"):
        read_spec({**QWEN, "use_sliding_window": True}, EngineConfig(model=""), native_only=True)


def test_every_family_with_experts_names_their_four_tensors():
    named = [family.experts for family in FAMILIES.values() if family.experts]
    assert len(named) == 2
    for router, *weights in named:
        assert "{}" not in router and all(name.count("{}") == 1 for name in weights)
