"""Mixtures of experts: which experts a token gets, the size of the weights, and settings that no model has."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from engine import EngineConfig, ModelError, models, plan
from engine.kernels.library import choose
from engine.models.decoder import Decoder
from engine.models.executor import Eager
from engine.models.experts import Experts, ExpertsSpec, Routing
from engine.models.families.plain import FAMILIES
from engine.models.fused import Fused
from engine.models.layers import Clamp, Gated, Linear
from engine.models.spec import read_spec
from tests.engine.test_models import CPU, Bench, prompt
from tests.models import (
    BASE,
    DOTS1,
    ERNIE_MOE,
    EXAONE_MOE,
    GLM4_MOE,
    MINIMAX,
    QWEN_MOE,
    load_model,
    make,
    narrow,
    oracle,
)
from tests.quantized import fp8

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
    spec = ExpertsSpec(3, active, 4, is_normalized, frozenset(), ("", "", "up", ""))
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


@pytest.mark.parametrize(
    "name",
    [
        "qwen3_moe",
        "gpt_oss",
        "glm4_moe-groups",
        "granitemoe",
        "granitemoehybrid-nope",
        "minimax_m2",
        "hunyuan_v1_moe",
    ],
)
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_experts_are_quantized_and_the_router_is_not(tmp_path, name, quantization):
    if choose("auto", CPU, torch.float32).kernels is None:
        pytest.skip("no kernels here")
    folder = make(name, tmp_path, dtype=torch.bfloat16)
    model = load(folder, quantization=quantization)
    experts = experts_of(model)
    kinds = {type(linear._packed).__name__ for linear in (*experts.gate_ups, *experts.downs)}
    assert kinds.isdisjoint({type(experts.router._packed).__name__}) and len(kinds) == 1

    linears: list[Linear] = [model.head, model.embedding]
    for layer in model.layers:
        linears += [layer.qkv, layer.output]
        linears += [*experts_of(model, layer.index).gate_ups, *experts_of(model, layer.index).downs]
        linears += [experts_of(model, layer.index).router, *(experts_of(model, layer.index).shared or ())]
    held = sum(x.weight.nbytes if x._packed is None else x._packed.num_bytes for x in linears)
    assert 0.9 * model.weights_bytes < held < model.weights_bytes + len(linears) * 48 * 4 * 128
    told = plan.plan(EngineConfig(model=str(folder), device="cpu", quantization=quantization))
    assert told["weights_bytes"] == model.weights_bytes

    plain = Bench(load(folder)).step({0: prompt(40)})[0]
    assert (Bench(model).step({0: prompt(40)})[0] - plain).norm() < 0.9 * plain.norm()


@pytest.mark.parametrize("isa", ["auto", "avx2", "torch"])
@pytest.mark.parametrize("name", ["ernie4_5_moe", "solar_open", "glm4_moe", "deepseek_v3"])
def test_routers_in_float32_choose_the_experts_that_transformers_chooses(tmp_path, name, isa):
    if isa == "avx2" and choose("auto", CPU, torch.float32).kernels is None:
        pytest.skip("no kernels here")
    folder = narrow(make(name, tmp_path))
    model = load(folder, cpu_isa=isa)
    gates = [each for name, each in oracle(folder, torch.bfloat16).named_modules() if name.endswith("mlp.gate")]
    experts = [layer.experts for layer in model.layers if layer.experts is not None]
    draw = torch.Generator().manual_seed(1)
    num_changed = 0
    for gate, own in zip(gates, experts, strict=True):
        assert model.spec.dtype == torch.bfloat16 and gate.weight.dtype == torch.float32
        x = torch.randn(2000, own.hidden, generator=draw).bfloat16()
        with torch.inference_mode():
            weights, chosen = own.route(x)
            _, want_weights, want = gate(x)
            assert torch.equal(chosen.sort().values, want.sort().values)
            order, want_order = chosen.argsort(), want.argsort()
            want_weights = want_weights.gather(1, want_order).float()
            torch.testing.assert_close(weights.gather(1, order), want_weights, rtol=1e-2, atol=1e-5)
            gate.weight.copy_(gate.weight.bfloat16())
            num_changed += int((gate(x)[2].sort().values != chosen.sort().values).any(1).sum())
    assert num_changed > 0  # rounded, the routers would have chosen others
    oracle.cache_clear()  # whose weights have been rounded


@pytest.mark.parametrize(
    ("name", "quantization"), [("qwen3_moe-sparse", "none"), ("qwen3_moe", "int8"), ("minimax_m2", "none")]
)
def test_routers_in_float32_count_as_such(tmp_path, name, quantization):
    rounded, kept = make(name, tmp_path / "rounded", dtype=torch.bfloat16), narrow(make(name, tmp_path / "kept"))
    models = [load(folder, quantization=quantization) for folder in (rounded, kept)]
    for model, dtype in zip(models, (torch.bfloat16, torch.float32), strict=True):
        own = [layer.experts for layer in model.layers if layer.experts is not None]
        assert {experts.router.weight.dtype for experts in own} == {dtype}
        assert {experts.downs[0].weight.dtype for experts in own} == {torch.bfloat16}
        assert all(experts.mixture() is not None for experts in own)
    routers = [layer.experts.spec.count * 64 for layer in models[0].layers if layer.experts is not None]
    assert models[1].weights_bytes - models[0].weights_bytes == 2 * sum(routers)


def test_the_routers_of_models_in_float32_need_no_other_type(tmp_path):
    folder = narrow(make("qwen3_moe", tmp_path))
    for dtype in ("float32", "float64"):
        spec, _ = models.examine(folder, EngineConfig(model=str(folder), dtype=dtype))
        assert spec.decoder is not None and spec.decoder.experts is not None and not spec.decoder.experts.wide_router


def test_a_router_in_float32_gives_the_same_bits_in_one_call_and_in_any_batch(tmp_path):
    if choose("auto", CPU, torch.bfloat16).kernels is None:
        pytest.skip("no kernels here")
    model = load(narrow(make("solar_open", tmp_path)))
    assert [type(executor) for executor in model.executors] == [Fused, Eager]
    ids, other = prompt(30), prompt(21, seed=1)
    alone = Bench(model).step({0: ids})[0]
    assert torch.equal(Bench(model).step({0: ids, 1: other})[0], alone)
    model.executors.pop(0)
    assert torch.equal(Bench(model).step({1: other, 0: ids})[0], alone)


def test_layers_without_experts_have_an_mlp(tmp_path):
    model = load(make("qwen3_moe-sparse", tmp_path))
    assert [layer.experts is None for layer in model.layers] == [True, False, True]


@pytest.mark.parametrize(
    ("name", "executors"),
    [
        ("mixtral", [Fused, Eager]),
        ("qwen3_moe-sparse", [Fused, Eager]),
        ("glm4_moe", [Fused, Eager]),
        ("ernie4_5_moe", [Eager]),
        ("minimax_m2", [Eager]),
        ("dots1", [Fused, Eager]),
        ("granitemoeshared", [Fused, Eager]),
        ("hunyuan_v1_moe", [Eager]),
        ("solar_open-bias", [Fused, Eager]),
        ("exaone_moe", [Fused, Eager]),
        ("granitemoehybrid-nope", [Fused, Eager]),
        ("granitemoehybrid-experts", [Eager]),
        ("gpt_oss", [Eager]),
    ],
)
def test_one_call_of_our_kernels_computes_the_layers_if_they_are_otherwise_those_of_llama(tmp_path, name, executors):
    if choose("auto", CPU, torch.float32).kernels is None:
        pytest.skip("no kernels here")
    model = load(make(name, tmp_path))
    assert [type(executor) for executor in model.executors] == executors
    assert all(layer.experts is None or layer.experts.mixture() is not None for layer in model.layers)


KINDS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "softmax that is not normalized": {"is_normalized": False},
    "one expert per token": {"active": 1},
    "all experts": {"active": 5},
    "biases and a clamp": {"has_bias": True, "clamp": Clamp(0.5, 1.7)},
    "sigmoids": {"routing": Routing(True, scale=2.5)},
    "sigmoids in groups": {"count": 12, "active": 3, "routing": Routing(True, 4, 2, 2.5)},
    "softmax in groups": {"count": 9, "active": 4, "is_normalized": False, "routing": Routing(False, 3, 2, 16.0)},
    "softmax and a correction": {"corrects": True},
    "scaled results and a shared MLP": {"scale": 0.25, "shared": 32},
    "a router in float32": {"wide_router": True},
    "no gates": {"names": ("gate", "", "{}.up", "{}.down"), "routing": Routing(True, scale=2.5), "shared": 32},
}


def random_experts(dtype: torch.dtype, hidden: int, **changes: Any) -> Experts:
    """Return experts with random weights."""
    sizes: dict[str, Any] = {"count": 5, "active": 2, "inner": 24, "is_normalized": True, "dense": frozenset()}
    spec = ExpertsSpec(**{**sizes, "names": ("gate", "{}.gate", "{}.up", "{}.down"), **changes})
    draw = torch.Generator().manual_seed(hidden)
    experts = Experts(hidden, spec, dtype, CPU, activation="silu" if spec.names[1] else "relu2")
    for linear in [experts.router, *experts.gate_ups, *experts.downs, *(experts.shared or ())]:
        linear.weight.normal_(0, 0.3, generator=draw)
        if linear.bias is not None:
            linear.bias.normal_(0, 0.3, generator=draw)
    if experts.correction is not None:
        experts.correction.normal_(0, 0.3, generator=draw)
    return experts


def packed(dtype: torch.dtype, hidden: int, **changes: Any) -> Experts:
    """Return experts with random weights, packed for our kernels."""
    kernels = choose("auto", CPU, dtype).kernels
    if kernels is None:
        pytest.skip("no kernels here")
    experts = random_experts(dtype, hidden, **changes)
    experts.pack(kernels, None, None, {})
    return experts


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_our_kernel_computes_what_is_computed_expert_by_expert(kind, dtype, tolerance, monkeypatch):
    experts, hidden = packed(dtype, 40, **KINDS[kind]), 40
    assert experts.mixture() is not None
    draw = torch.Generator().manual_seed(1)
    for tokens in (1, 2, 23, 70):
        x, residual = (torch.randn(tokens, hidden, generator=draw).to(dtype) for _ in range(2))
        before = residual.clone()
        found = experts(x, residual)
        assert torch.equal(residual, before) and found.dtype == dtype
        with monkeypatch.context() as patch:
            patch.setattr(experts, "mixture", lambda: None)
            want = experts(x, residual)
        torch.testing.assert_close(found, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("wide_router", [False, True])
def test_a_token_has_the_same_bits_among_any_others_in_our_kernel(wide_router):
    routing = Routing(True, scale=2.5)
    experts = packed(torch.bfloat16, 72, count=20, active=4, routing=routing, shared=32, wide_router=wide_router)
    x = torch.randn(90, 72, generator=torch.Generator().manual_seed(2)).bfloat16()
    whole = experts(x, x)
    for first, last in ((0, 1), (89, 90), (7, 40), (1, 90)):
        assert torch.equal(experts(x[first:last], x[first:last]), whole[first:last])
    spoiled = x.clone()
    spoiled[3] = torch.nan
    beside = experts(spoiled, spoiled)
    assert beside[3].isnan().all() and torch.equal(beside[4:], whole[4:])


def test_the_first_of_equal_experts_is_chosen_by_our_kernel():
    experts = packed(torch.float32, 8, active=2)
    kernels = choose("auto", CPU, torch.float32).kernels
    experts.router.weight = torch.ones(5, 8)
    experts.router.pack(kernels, wide=True)
    ones, zeros = torch.ones(1, 8), torch.zeros(1, 8)
    found = experts(ones, zeros)
    want = [each(gate_up(ones)) for gate_up, each in zip(experts.gate_ups[:2], experts.downs[:2], strict=True)]
    torch.testing.assert_close(found, (want[0] + want[1]) / 2)


def test_shapes_that_our_kernel_does_not_take():
    experts = packed(torch.float32, 40)
    with pytest.raises(ValueError, match=r"of torch\.bfloat16 for"):
        experts(torch.ones(2, 40).bfloat16(), torch.ones(2, 40).bfloat16())
    with pytest.raises(ValueError, match=r"experts of \(2, 39\) of torch.float32 for \(2, 40\)"):
        experts(torch.ones(2, 39), torch.ones(2, 40))


def test_a_checkpoint_without_an_expert_is_refused(tmp_path):
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
    named = [family.experts.names for family in FAMILIES.values() if family.experts]
    assert len(named) == 38
    for router, gate, up, down in named:
        assert "{}" not in router and all(name.count("{}") == 1 for name in (down, *filter(None, (gate, up))))


# -- experts in one tensor ------------------------------------------------------------------------------------------


def test_experts_in_one_tensor_are_divided_into_those_of_each(tmp_path):
    folder = make("gpt_oss", tmp_path, dtype=torch.bfloat16)
    tensors = load_file(folder / "model.safetensors")
    _, checkpoint = models.examine(folder, EngineConfig(model=str(folder)))
    start = "model.layers.1.mlp.experts"
    assert checkpoint.num_numbers == sum(tensor.numel() for tensor in tensors.values())
    whole = tensors[f"{start}.gate_up_proj"], tensors[f"{start}.gate_up_proj_bias"], tensors[f"{start}.down_proj"]
    for expert in range(4):
        gate_up, bias, down = (part[expert] for part in whole)
        want = {
            "gate_up_proj.weight": torch.cat([gate_up.T[::2], gate_up.T[1::2]]),
            "gate_up_proj.bias": torch.cat([bias[::2], bias[1::2]]),
            "down_proj.weight": down.T,
            "down_proj.bias": tensors[f"{start}.down_proj_bias"][expert],
        }
        found = {f"{start}.{expert}.{name}": torch.empty_like(tensor) for name, tensor in want.items()}
        checkpoint.fill(found, lambda _: None)
        assert all(torch.equal(found[f"{start}.{expert}.{name}"], tensor) for name, tensor in want.items())
    assert not [name for name in checkpoint.entries if name.startswith(f"{start}.4")]
    checkpoint.close()


def test_gate_and_up_of_each_expert_may_be_one_tensor_or_two(tmp_path):
    folder = make("qwen3_5_moe_text", tmp_path / "two")
    tensors = load_file(folder / "model.safetensors")
    of_two = {name: tensor for name, tensor in tensors.items() if ".experts." in name}
    for layer in range(3):
        start = f"model.layers.{layer}.mlp.experts"
        parts = [[tensors.pop(f"{start}.{i}.{name}_proj.weight") for i in range(8)] for name in ("gate", "up", "down")]
        gate, up, down = (torch.stack(part) for part in parts)
        tensors[f"{start}.gate_up_proj"], tensors[f"{start}.down_proj"] = torch.cat([gate, up], 1), down
    (tmp_path / "one").mkdir()
    shutil.copy(folder / "config.json", tmp_path / "one")
    save_file(tensors, tmp_path / "one" / "model.safetensors")
    _, checkpoint = models.examine(tmp_path / "one", EngineConfig(model=str(tmp_path / "one")))
    found = {name: torch.empty_like(tensor) for name, tensor in of_two.items()}
    checkpoint.fill(found, lambda _: None)
    assert all(torch.equal(found[name], tensor) for name, tensor in of_two.items())
    checkpoint.close()


@pytest.mark.parametrize(
    ("shape", "says"),
    [
        ((4, 64, 128), r"gate_up_proj.weight in .* has the shape \[128, 64\], but config.json asks for \[256, 64\]"),
        ((3, 64, 256), "lacks the tensor model.layers.0.mlp.experts.3.gate_up_proj.weight"),
        ((4, 16384), "lacks the tensor model.layers.0.mlp.experts.0.gate_up_proj.weight"),
        ((0, 64, 256), "lacks the tensor model.layers.0.mlp.experts.0.gate_up_proj.weight"),
        ((1 << 40, 0, 8), "holds the tensors of more than 65536 experts"),
    ],
)
def test_experts_in_one_tensor_of_another_shape_are_refused(tmp_path, shape, says):
    folder = make("gpt_oss", tmp_path)
    file = folder / "model.safetensors"
    with safe_open(file, "pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    name = "model.layers.0.mlp.experts.gate_up_proj"
    tensors[name] = torch.zeros(1) if 0 in shape else torch.zeros(shape)
    save_file(tensors, file)
    if 0 in shape:  # safetensors' own writer cannot
        size, data = int.from_bytes(file.read_bytes()[:8], "little"), file.read_bytes()
        header = json.loads(data[8 : 8 + size])
        begin = header[name]["data_offsets"][0]
        header[name] |= {"shape": shape, "data_offsets": [begin, begin]}
        text = json.dumps(header).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])
    with pytest.raises(ModelError, match=says):
        models.examine(folder, EngineConfig(model=str(folder)))


def test_experts_of_qwen3_vl_may_be_transposed_or_not(tmp_path):
    """transformers writes them as it holds them, the published checkpoints have columns before rows."""
    plain, turned = make("qwen3_vl_moe", tmp_path / "plain"), tmp_path / "turned"
    shutil.copytree(plain, turned)
    tensors = load_file(plain / "model.safetensors")
    experts = [name for name in tensors if ".experts." in name]
    assert {tensors[name].shape for name in experts} == {(8, 96, 64), (8, 64, 48)}
    tensors |= {name: tensors[name].transpose(1, 2).contiguous() for name in experts}
    save_file(tensors, turned / "model.safetensors")
    one, other = (Bench(load(folder)).step({0: prompt(20)})[0] for folder in (plain, turned))
    assert torch.equal(one, other)


# -- DeepSeek-V2 ------------------------------------------------------------------------------------------------------


def test_the_best_expert_of_each_group_decides_which_groups_a_softmax_chooses_from():
    """With sums of two the first group would come before the second; without groups expert 0 would be chosen."""
    spec = ExpertsSpec(6, 2, 4, False, frozenset(), ("", "", "up", ""), routing=Routing(False, 3, 1, 16.0))
    experts = Experts(6, spec, torch.float32, CPU, activation="relu")
    experts.router.weight.copy_(torch.eye(6))
    x = torch.tensor([[3.0, 2.9, 3.1, -1.0, 0.0, 0.0]])
    weights, chosen = experts.route(x)
    assert chosen.tolist() == [[2, 3]]
    assert torch.allclose(weights, 16.0 * x.softmax(-1)[:, 2:4])


# -- GLM-4.5 ----------------------------------------------------------------------------------------------------------

GLM = {**BASE, **GLM4_MOE, "architectures": ["Glm4MoeForCausalLM"]}


@pytest.mark.parametrize("kernels", [None, choose("auto", CPU, torch.float32).kernels], ids=["torch", "ours"])
def test_sigmoids_and_a_correction_choose_experts_of_the_best_groups(kernels):
    """The correction decides who is chosen, not the weights."""
    spec = ExpertsSpec(6, 2, 4, False, frozenset(), ("", "", "up", ""), routing=Routing(True, 3, 1, 2.5))
    experts = Experts(6, spec, torch.float32, CPU, activation="relu")
    experts.router.weight.copy_(torch.eye(6))
    assert experts.correction is not None
    experts.correction.copy_(torch.tensor([0.0, 0.0, 0.0, 0.0, 0.7, 0.0]))
    experts.pack(kernels, None, None, {})
    x = torch.tensor([[3.0, -9.0, 1.0, 0.9, -0.5, -0.4], [4.0, 4.0, 1.0, 0.5, 0.5, -9.0]])
    weights, chosen = experts.route(x)
    # Sums of two: 0.95 + 0.00, 0.73 + 0.71, 0.38 + 0.7 + 0.40; and 0.98 + 0.98, 0.73 + 0.62, 0.62 + 0.7 + 0.00.
    assert chosen.sort(1).values.tolist() == [[4, 5], [0, 1]] and chosen[0, 0] == 4
    assert torch.allclose(weights, 2.5 * x.sigmoid().gather(1, chosen))
    if kernels is not None:
        again = torch.cat([experts.route(row[None])[0] for row in x])
        assert torch.equal(again, weights)


def test_the_first_layers_of_glm_have_an_mlp_and_all_tokens_an_expert(tmp_path):
    model = load(make("glm4_moe", tmp_path))
    assert [layer.experts is None for layer in model.layers] == [True, False, False]
    assert experts_of(model, 1).shared is not None and model.layers[0].q_norm is None
    assert load(make("glm4_moe-groups", tmp_path / "groups")).layers[0].q_norm is not None
    spec = read_spec({**GLM, "n_shared_experts": 0}, EngineConfig(model=""))
    assert spec is not None and spec.decoder is not None
    assert spec.decoder.experts is not None and spec.decoder.experts.shared == 0


def test_layers_that_predict_further_tokens_are_not_read(tmp_path):
    folder = make("glm4_moe", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    extra = {name.replace("layers.2.", "layers.3."): tensor for name, tensor in tensors.items() if "layers.2." in name}
    extra = {name: tensor.clone() for name, tensor in extra.items()} | {"model.layers.3.eh_proj.weight": torch.ones(2)}
    before = Bench(load(folder)).step({0: prompt(9)})[0]
    save_file(tensors | extra, folder / "model.safetensors")
    assert torch.equal(Bench(load(folder)).step({0: prompt(9)})[0], before)
    source = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**source, "num_nextn_predict_layers": 0}))
    with pytest.raises(
        ModelError, match=r"holds the tensor model\.layers\.3\..* which Glm4MoeForCausalLM does not have"
    ):
        load(folder)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"n_routed_experts": -8}, "n_routed_experts must be a positive whole number, not -8"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok must be at most 8"),
        ({"n_group": 3}, "8 experts cannot be divided into 3 groups of two or more"),
        ({"n_group": 8}, "8 experts cannot be divided into 8 groups of two or more"),
        ({"n_group": 4, "topk_group": 5}, "topk_group must be at most 4"),
        ({"n_group": 4, "topk_group": 1}, "1 of 4 groups have fewer than 3 experts"),
        ({"routed_scaling_factor": 0}, "routed_scaling_factor must be positive"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace must be a positive whole number"),
        ({"n_shared_experts": 10**9}, "n_shared_experts must be at most"),
        ({"num_nextn_predict_layers": 10**9}, "num_nextn_predict_layers must be at most 4096"),
    ],
)
def test_experts_of_glm_that_no_model_has_are_refused(changes, says):
    with pytest.raises(ModelError, match=says):
        read_spec({**GLM, **changes}, EngineConfig(model=""))


# -- ERNIE 4.5 --------------------------------------------------------------------------------------------------------

ERNIE = {**BASE, **ERNIE_MOE, "architectures": ["Ernie4_5_MoeForCausalLM"], "num_hidden_layers": 6}


@pytest.mark.parametrize(
    ("changes", "dense"),
    [
        ({}, {0}),
        ({"moe_layer_start_index": 0, "moe_layer_end_index": -1}, set()),
        ({"moe_layer_start_index": 3, "moe_layer_end_index": 4}, {0, 1, 2, 5}),
        ({"moe_layer_interval": 2, "moe_layer_end_index": 9}, {0, 2, 4}),
    ],
)
def test_layers_of_ernie_between_two_have_experts(changes, dense):
    spec = read_spec({**ERNIE, **changes}, EngineConfig(model=""))
    assert spec is not None and spec.decoder is not None and spec.decoder.experts is not None
    assert spec.decoder.experts.dense == dense


@pytest.mark.parametrize("changes", [{"use_bias": True}, {"moe_norm_min": 0.1}])
def test_biases_of_ernie_and_other_least_sums_of_weights_are_left_to_transformers(changes):
    assert read_spec({**ERNIE, **changes}, EngineConfig(model="")) is None


@pytest.mark.parametrize("kernels", [None, choose("auto", CPU, torch.float32).kernels], ids=["torch", "ours"])
def test_a_correction_of_a_softmax_chooses_the_experts_and_is_not_in_their_weights(kernels):
    spec = ExpertsSpec(3, 1, 4, False, frozenset(), ("", "", "up", ""), corrects=True)
    experts = Experts(3, spec, torch.float32, CPU, activation="relu")
    experts.router.weight.copy_(torch.eye(3))
    assert experts.correction is not None
    experts.correction.copy_(torch.tensor([0.0, 0.5, 0.0]))
    experts.pack(kernels, None, None, {})
    x = torch.tensor([[2.0, 1.5, 0.0], [2.0, 0.0, 0.0]])
    weights, chosen = experts.route(x)
    assert chosen.tolist() == [[1], [0]] and torch.allclose(weights, x.softmax(-1).gather(1, chosen))


def test_layers_of_ernie_that_predict_further_tokens_are_not_read(tmp_path):
    folder = make("ernie4_5_moe", tmp_path)
    before = Bench(load(folder)).step({0: prompt(9)})[0]
    tensors = load_file(folder / "model.safetensors")
    assert tensors["model.layers.1.mlp.moe_statics.e_score_correction_bias"].shape == (1, 8)
    further = {"model.mtp_block.0.mlp.up_proj.weight": torch.ones(2), "model.mtp_emb_norm.0.weight": torch.ones(2)}
    save_file(tensors | further, folder / "model.safetensors")
    assert torch.equal(Bench(load(folder)).step({0: prompt(9)})[0], before)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"moe_num_experts": 0}, "moe_num_experts must be a positive whole number, not 0"),
        ({"moe_k": 9}, "moe_k must be at most 8"),
        ({"moe_num_shared_experts": 10**9}, "moe_num_shared_experts must be at most"),
        ({"moe_layer_start_index": [1, 2]}, "moe_layer_start_index must be a positive whole number"),
        ({"moe_layer_end_index": -2}, "moe_layer_end_index must be a positive whole number, not -2"),
        ({"moe_layer_interval": 0}, "moe_layer_interval must be a positive whole number, not 0"),
    ],
)
def test_experts_of_ernie_that_no_model_has_are_refused(changes, says):
    with pytest.raises(ModelError, match=says):
        read_spec({**ERNIE, **changes}, EngineConfig(model=""))


# -- HunYuan and EXAONE -----------------------------------------------------------------------------------------------

HUNYUAN = {**BASE, "architectures": ["HunYuanMoEV1ForCausalLM"], "num_experts": 8, "moe_topk": 3}
EXAONE = {**BASE, **EXAONE_MOE, "architectures": ["ExaoneMoeForCausalLM"]}


def test_numbers_of_experts_may_be_listed_for_each_layer():
    for changes in ({}, {"num_experts": [8, 8, 8], "moe_topk": [3, 3, 3]}):
        spec = read_spec({**HUNYUAN, **changes}, EngineConfig(model=""))
        assert spec is not None and spec.decoder is not None and spec.decoder.experts is not None
        assert (spec.decoder.experts.count, spec.decoder.experts.active) == (8, 3)


def test_mlp_layer_types_say_which_layers_have_experts():
    for changes, dense in (
        ({}, {0}),
        ({"first_k_dense_replace": 3}, {0, 1, 2}),
        ({"first_k_dense_replace": 3, "mlp_layer_types": ["sparse"] * 4 + ["dense"]}, {4}),
    ):
        spec = read_spec({**EXAONE, **changes}, EngineConfig(model=""))
        assert spec is not None and spec.decoder is not None and spec.decoder.experts is not None
        assert spec.decoder.experts.dense == dense and spec.decoder.experts.routing == Routing(True, scale=2.5)


@pytest.mark.parametrize(
    ("source", "changes", "says"),
    [
        (HUNYUAN, {"moe_topk": [3, 2, 3]}, "moe_topk must be the same for all layers"),
        (HUNYUAN, {"num_experts": []}, "num_experts must be the same for all layers"),
        (HUNYUAN, {"moe_topk": None}, "has no moe_topk"),
        (EXAONE, {"mlp_layer_types": ["sparse"]}, "mlp_layer_types must be a list with dense or sparse for each of"),
        (EXAONE, {"mlp_layer_types": [1] * 5}, "mlp_layer_types must be a list with dense or sparse for each of the 5"),
        (EXAONE, {"num_shared_experts": -1}, "num_shared_experts must be a positive whole number"),
    ],
)
def test_lists_that_no_model_has_are_refused(source, changes, says):
    with pytest.raises(ModelError, match=says):
        read_spec({**source, **changes}, EngineConfig(model=""))


# -- dots.llm1 and MiniMax-M2 -----------------------------------------------------------------------------------------


def test_layers_of_dots_have_a_window_from_a_certain_one_on():
    given = {**BASE, **DOTS1, "architectures": ["Dots1ForCausalLM"], "num_hidden_layers": 4, "sliding_window": 8}
    for changes, want in (
        ({"max_window_layers": 2}, [None, None, 8, 8]),
        ({}, [None] * 4),
        ({"max_window_layers": 0, "sliding_window": None}, [None] * 4),
        ({"layer_types": ["sliding_attention"] + ["full_attention"] * 3}, [8, None, None, None]),
    ):
        spec = read_spec({**given, **changes}, EngineConfig(model=""))
        assert spec is not None and [layer.window for layer in spec.layers] == want


MINIMAX_M2 = {**BASE, **MINIMAX, "architectures": ["MiniMaxM2ForCausalLM"]}


@pytest.mark.parametrize("kind", ["minimax", "minimax_m2", None])
def test_the_first_checkpoint_of_minimax_m2_has_the_type_of_another_model(kind):
    spec = read_spec({**MINIMAX_M2, "model_type": kind, "rotary_dim": 8}, EngineConfig(model=""))
    assert spec is not None and spec.decoder is not None and spec.decoder.ropes[0].head_dim == 8


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rotary_dim": 17}, "rotary_dim must be at most 16, not 17"),
        ({"rotary_dim": 7}, "rotates 7 numbers of a head, not an even number"),
        ({"num_local_experts": None}, "has no num_local_experts"),
    ],
)
def test_sizes_that_no_minimax_has_are_refused(changes, says):
    with pytest.raises(ModelError, match=says):
        read_spec({**MINIMAX_M2, **changes}, EngineConfig(model=""))


def test_minimax_in_fp8_has_the_numbers_of_the_published_layout(tmp_path):
    """Blocks of 128 by 128 numbers share a scale. The router, its bias and the head are plain."""
    folder, plain = make("minimax_m2", tmp_path / "fp8"), tmp_path / "plain"
    source = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    assert "model.layers.0.block_sparse_moe.experts.7.w2.weight" in tensors
    assert tensors["model.layers.0.block_sparse_moe.e_score_correction_bias"].shape == (8,)
    rounded = dict(tensors)
    for name, weight in tensors.items():
        if "proj." in name or ".experts." in name:
            del rounded[name]
            stored, numbers = fp8("block").store(weight)
            rounded |= {name.replace("weight", part): tensor for part, tensor in stored.items()}
            tensors[name] = numbers.float()
    skipped = ["gate", "e_score_correction_bias", "lm_head"]
    method = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": skipped}
    shutil.copytree(folder, plain)
    save_file(tensors, plain / "model.safetensors")
    save_file(rounded, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(source | {"quantization_config": method}))
    one, other = (Bench(load(each, dtype="float32")).step({0: prompt(20)})[0] for each in (folder, plain))
    assert torch.equal(one, other)


# -- gpt-oss ----------------------------------------------------------------------------------------------------------

GPT_OSS = {**BASE, "architectures": ["GptOssForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2}


def test_layers_of_gpt_oss_have_sinks_and_every_second_one_a_window():
    spec = read_spec({**GPT_OSS, "num_hidden_layers": 4, "max_position_embeddings": 131072}, EngineConfig(model=""))
    assert spec is not None and spec.decoder is not None
    assert [layer.window for layer in spec.layers] == [128, None, 128, None]
    assert [layer.sinks for layer in spec.layers] == [f"layers.{index}.self_attn.sinks" for index in range(4)]
    rope = spec.decoder.ropes[0]
    assert (rope.scaling, rope.theta, rope.factor, rope.truncate) == ("yarn", 150_000, 32, False)
    assert rope.original_positions == 4096 and spec.max_len == 131072
    assert spec.decoder.difference is not None


@pytest.mark.parametrize("kernels", [None, choose("auto", CPU, torch.float32).kernels], ids=["torch", "ours"])
def test_gates_of_gpt_oss_are_clamped(kernels):
    gated = Gated(1, 2, True, torch.float32, CPU, activation="silu", clamp=Clamp(7.0, 1.702))
    gated.weight.copy_(torch.eye(2))
    assert gated.bias is not None
    gated.bias.copy_(torch.tensor([0.5, -0.25]))
    gated.pack(kernels)
    x = torch.cat([8 * torch.randn(999, 2, generator=torch.Generator().manual_seed(0)), torch.tensor([[90.0, -90.0]])])
    gate, up = (x.double() + torch.tensor([0.5, -0.25])).unbind(1)
    gate, up = gate.clamp(max=7), up.clamp(-7, 7)
    found, want = gated(x), gate * torch.sigmoid(1.702 * gate) * (up + 1)
    assert torch.allclose(found[:, 0].double(), want, rtol=1e-5, atol=1e-6)
    if kernels is not None:
        assert torch.equal(found, torch.cat([gated(row[None]) for row in x]))
    assert gated(torch.tensor([[torch.nan, 1.0], [1.0, torch.nan]])).isnan().all()


@pytest.mark.parametrize("key", ["swiglu_limit", "swiglu_alpha"])
def test_settings_of_gates_must_be_positive(key):
    with pytest.raises(ModelError, match=f"{key} must be positive, not -1"):
        read_spec({**GPT_OSS, key: -1}, EngineConfig(model=""))
