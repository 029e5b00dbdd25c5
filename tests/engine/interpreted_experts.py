"""Mixtures of experts on a GPU in Triton's interpreter; test_paged_gpu.py runs this file.

    TRITON_INTERPRET=1 python -m pytest tests/engine/interpreted_experts.py

The interpreter truncates where a GPU rounds to bfloat16, so results are compared in float32 and float16.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine import EngineConfig
from engine.kernels.gpu import attention as attention_kernels
from engine.kernels.gpu import experts as kernels
from engine.kernels.gpu import layers as layer_kernels
from engine.kernels.gpu import skinny as skinny_kernels
from engine.kernels.gpu import storing as storing_kernels
from engine.models.decoder import Decoder
from engine.models.executor import Eager
from engine.models.experts import Experts, Routing
from engine.models.gpu import choice as gpu_choice
from engine.models.gpu import experts as gpu_experts
from engine.models.gpu import skinny, weight_trial
from engine.models.gpu import weights as gpu_weights
from engine.models.gpu.executor import OnGPU
from engine.models.gpu.experts import RoutedExperts, objection
from engine.models.gpu.form import Form
from engine.models.gpu.layers import gated
from engine.models.gpu.skinny import ANY, Tile, Uniforms
from engine.models.gpu.weights import GPUProduct, random_weight
from engine.models.layers import Linear, Quantization
from tests.engine.interpreted_layers import CHUNKS, DECODES, MIXED, Calls, cache_of, inside, step
from tests.engine.interpreter import prepare
from tests.engine.recorder import Recorder
from tests.engine.test_attention import CPU
from tests.engine.test_experts import KINDS, random_experts
from tests.models import load_model, make

prepare()
SMALL = Tile(16, 16, 2, 2)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Let products have small tiles; the trials of the models are left out."""
    monkeypatch.setattr(skinny, "UNIFORM_FLOAT32", [Uniforms.undivided({ANY: SMALL}, {ANY: SMALL})])
    monkeypatch.setattr(weight_trial, "objection", lambda *_: None)


def experts_of(dtype: torch.dtype = torch.float32, hidden: int = 40, **changes: Any) -> Experts:
    return random_experts(dtype, hidden, **changes)


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(shape[0])).to(dtype)


def slots(x: Tensor) -> Tensor:
    """Return slots for as many tokens, none of which is padding."""
    return torch.arange(len(x))


@pytest.mark.parametrize(
    "kind, dtype, tolerance",
    [
        *((kind, torch.float32, 1e-5) for kind in KINDS),
        ("biases and a clamp", torch.float16, 4e-3),
        ("a router in float32", torch.float16, 4e-3),
    ],
)
def test_results_are_those_of_one_expert_after_the_other(kind, dtype, tolerance, monkeypatch):
    monkeypatch.setattr(gpu_experts, "TILES", {1: SMALL, ANY: Tile(32, 16, 2, 2, columns=64, shared=8)})
    monkeypatch.setattr(gpu_experts, "ARRANGE_TILE", 16)
    experts = experts_of(dtype, **KINDS[kind])
    routed = RoutedExperts(experts, "relu2" if kind == "no gates" else "silu")
    for tokens in (1, 23):
        x, residual = numbers(tokens, 40, dtype=dtype), numbers(tokens, 40, dtype=dtype)
        want = experts(x, residual)
        stream = inside(residual)
        routed.add_to(stream, inside(x), slots(x))
        error = float((stream.double() - want.double()).norm() / want.double().norm())
        assert error < tolerance, tokens


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("kind", ["softmax", "biases and a clamp", "no gates"])
def test_quantized_weights_stay_quantized(bits, kind, monkeypatch):
    tiles = {1: gpu_weights.Tile(16, 16, 2, 2), ANY: gpu_weights.Tile(32, 16, 2, 2)}
    monkeypatch.setattr(gpu_experts, "QUANTIZED_TILES", tiles)
    experts = experts_of(hidden=96, inner=64, **KINDS[kind])
    for linear in [*experts.gate_ups, *experts.downs]:
        linear.pack(None, quantization=Quantization(bits))
        assert not linear.weight.numel()
    assert objection(experts) is None
    routed = RoutedExperts(experts, "relu2" if kind == "no gates" else "silu")
    for tokens in (1, 23):
        x, residual = numbers(tokens, 96), numbers(tokens, 96)
        want = experts(x, residual)
        routed.add_to(residual, x, slots(x))
        torch.testing.assert_close(residual, want, rtol=1e-4, atol=1e-4)


def test_experts_that_are_stored_in_two_forms_or_orders_are_left_to_torch():
    experts = experts_of(hidden=96, inner=64)
    assert objection(experts) is None
    for linear in experts.downs:
        linear.pack(None, quantization=Quantization(8))
    assert objection(experts) == "experts of which some weights are quantized and some are not"
    for linear, bits in zip(experts.gate_ups, (4, 8, 4, 4, 4), strict=True):
        linear.pack(None, quantization=Quantization(bits))
    assert objection(experts) == "experts whose weights are stored in several forms"
    experts = experts_of(hidden=96, inner=64)
    for linear in [experts.router, *experts.gate_ups, *experts.downs]:
        linear.pack(None, quantization=Quantization(8))
    assert objection(experts) is None and gpu_experts.trial(experts, "silu") is None
    (part,) = experts.downs[3].quantized.parts
    part.order = torch.arange(64)
    assert objection(experts) == "experts whose columns are stored in an order of their own"


def routed_of(experts: Experts, chosen: list[list[int]]) -> tuple[list[list[int]], list[int]]:
    """Return the tiles of pairs, and the owners of the tiles."""
    order = RoutedExperts(experts, "silu").arrange(torch.tensor(chosen, dtype=torch.int32))
    return order.pairs.view(len(order.owners), -1).tolist(), order.owners.tolist()


def test_each_pair_is_in_one_tile_of_its_expert_in_order(monkeypatch):
    monkeypatch.setattr(gpu_experts, "ARRANGE_TILE", 32)
    experts = experts_of(active=2)
    draw = torch.Generator().manual_seed(1)
    for tokens in (1, 2, 7, 60):
        chosen = torch.rand(tokens, 5, generator=draw).topk(2).indices.tolist()
        pairs, owners = routed_of(experts, chosen)
        found: dict[int, list[int]] = {}
        for tile, owner in zip(pairs, owners, strict=True):
            if owner >= 0:
                own = [pair for pair in tile if pair >= 0]
                assert own == tile[: len(own)] and own
                found.setdefault(owner, []).extend(own)
        flat = [expert for each in chosen for expert in each]
        assert found == {expert: [at for at, own in enumerate(flat) if own == expert] for expert in sorted({*flat})}
        assert owners == sorted(owners, key=lambda owner: (owner < 0, owner))


def test_there_are_tiles_enough_for_any_choice():
    experts = experts_of(active=2)
    for chosen in ([[4, 4]] * 17, [[0, 4]] * 17, [[at % 5, (at + 1) % 5] for at in range(40)]):
        pairs, owners = routed_of(experts, chosen)
        assert sorted(pair for tile, owner in zip(pairs, owners, strict=True) for pair in tile if owner >= 0)[
            -2 * len(chosen) :
        ] == list(range(2 * len(chosen)))


def test_the_best_experts_are_chosen_and_the_first_of_equals():
    experts = experts_of(hidden=5, active=3, is_normalized=False)
    experts.router.weight.copy_(torch.eye(5))
    x = torch.tensor([[0.0, 2.0, 1.0, 2.0, 1.0], [-1.0, -300.0, -2.0, -300.0, -300.0]])
    weights, chosen = RoutedExperts(experts, "silu").route(x, slots(x))
    assert chosen.tolist() == [[1, 3, 2], [0, 2, 1]]
    torch.testing.assert_close(weights, x.softmax(-1).gather(1, chosen.long()))


def test_a_token_that_is_no_number_spoils_no_other():
    experts = experts_of()
    x = numbers(7, 40)
    alone = x.clone()
    RoutedExperts(experts, "silu").add_to(alone, x, slots(x))
    x[3] = math.nan
    beside = x.clone()
    RoutedExperts(experts, "silu").add_to(beside, x, slots(x))
    assert beside[3].isnan().all()
    others = [0, 1, 2, 4, 5, 6]
    assert torch.equal(beside[others], alone[others])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", [0, 8])
def test_padding_has_no_experts_and_changes_no_other_token(kind, bits):
    experts, activation = (
        experts_of(hidden=96, **KINDS[kind] | {"inner": 64}),
        "relu2" if kind == "no gates" else "silu",
    )
    for linear in [*experts.gate_ups, *experts.downs] if bits else []:
        linear.pack(None, quantization=Quantization(bits))
    routed, x, at = RoutedExperts(experts, activation), numbers(8, 96), torch.arange(8)
    alone = x.clone()
    routed.add_to(alone, x, at)
    at[[2, 5, 6, 7]] = -1
    kept = [0, 1, 3, 4]
    _, chosen = routed.route(x, at)
    assert torch.equal(chosen[kept], routed.route(x[kept], slots(x[kept]))[1])
    assert chosen[at < 0].unique().tolist() == [experts.spec.count]
    owners = set(routed.arrange(chosen).owners.tolist()) - {-1}
    assert owners == set(chosen[kept].flatten().tolist()), "of these experts weights are read"
    beside = x.clone()
    routed.add_to(beside, x, at)
    assert torch.equal(beside[kept], alone[kept])


def test_the_smallest_weights_are_divided_by_their_sum_and_epsilon():
    """Sigmoids of very negative logits are not larger than the epsilon of a model."""
    experts = experts_of(hidden=5, active=2, routing=Routing(True), epsilon=1e-6)
    experts.router.weight.copy_(torch.eye(5))
    experts.correction.zero_()
    x = torch.full((2, 5), -30.0)
    x[:, 1], x[:, 3] = -14.0, -15.0
    weights, chosen = RoutedExperts(experts, "silu").route(x, slots(x))
    assert chosen.tolist() == [[1, 3]] * 2
    torch.testing.assert_close(weights, experts.route(x)[0], rtol=1e-4, atol=0)
    assert 0.3 < weights[0].sum() < 0.6


@pytest.mark.parametrize("dtype, wide_router", [(torch.float32, False), (torch.float16, False), (torch.float16, True)])
def test_a_token_has_the_same_bits_among_any_others(dtype, wide_router):
    experts = experts_of(dtype, has_bias=True, wide_router=wide_router)
    for linear in [experts.router, *experts.gate_ups, *experts.downs]:
        linear.unify(Uniforms.undivided({ANY: SMALL}, {ANY: SMALL}), dtype)
    assert experts.logits(numbers(2, 40, dtype=dtype)).dtype == (torch.float32 if wide_router else dtype)
    routed, x = RoutedExperts(experts, "silu"), numbers(50, 40, dtype=dtype)
    whole = x.clone()
    routed.add_to(whole, x, slots(x))
    for first, last in ((0, 1), (7, 8), (3, 30)):
        part = x[first:last].clone()
        routed.add_to(part, x[first:last].clone(), slots(part))
        assert torch.equal(part, whole[first:last])


def test_the_launches_can_be_captured_and_replayed_for_another_choice():
    recorder, experts, x, out = Recorder(), experts_of(), numbers(9, 40), torch.zeros(9, 40)
    at = slots(x)
    routed = RoutedExperts(experts, "silu")
    with recorder.kernels(kernels, skinny_kernels), torch.inference_mode():
        replay = recorder.capture(lambda: routed.add_to(out, x, at))
        x.mul_(-2)
        out.zero_()
        replay()
        assert not torch.equal(experts.route(x)[1], experts.route(x / -2)[1])
        torch.testing.assert_close(out, experts(x, torch.zeros_like(x)), rtol=1e-4, atol=1e-4)


def test_several_rows_of_routed_experts_are_not_in_fp8():
    """Their kernel multiplies in 16 bits, and is compared with each expert's product. A shared expert is as others."""
    draw, linears = torch.Generator().manual_seed(0), []
    for _ in range(3):
        linears.append(linear := Linear(128, 128, False, torch.float16, CPU))
        weight, _ = random_weight(Form(8, 128, is_float=True), 128, 128, draw, in_blocks=True)
        linear._packed = GPUProduct([weight], None, torch.float16)
    layers: Any = [SimpleNamespace(experts=SimpleNamespace(gate_ups=linears[:1], downs=linears[1:2]))]
    assert gpu_choice._quantized(linears, layers) == [linears[2].quantized]


# -- models -----------------------------------------------------------------------------------------------------------


def load(folder: Any, dtype: str = "float32", **settings: Any) -> Decoder:
    model = load_model(EngineConfig(model=str(folder), cpu_isa="torch", dtype=dtype, **settings), folder)
    assert isinstance(model, Decoder)
    return model


def test_a_trial_finds_products_and_choices_that_are_wrong(monkeypatch):
    experts = experts_of(routing=Routing(True, scale=2.5), scale=0.5)
    assert gpu_experts.trial(experts, "silu") is None
    assert "wrong results of experts" in str(gpu_experts.trial(experts, "gelu"))
    choose = RoutedExperts.choose
    monkeypatch.setattr(RoutedExperts, "choose", lambda self, logits, at: choose(self, -logits, at))
    assert "wrong results of experts" in str(gpu_experts.trial(experts, "silu"))


def test_a_layer_of_experts_takes_twelve_launches(tmp_path, monkeypatch):
    model, calls = load(make("mixtral", tmp_path)), Calls()
    for module, names in (
        (attention_kernels, ["attend"]),
        (storing_kernels, ["rotate_store"]),
        (layer_kernels, ["add_norm"]),
        (skinny_kernels, ["multiply"]),
        (kernels, ["choose", "arrange", "combine"]),
    ):
        for name in names:
            monkeypatch.setattr(module, name, calls.kernel(getattr(module, name), runs=False))
    cache = cache_of(model)
    for rows in (CHUNKS, MIXED, DECODES):
        forward = step(model, rows, cache)
        model.executors[0].run(forward)  # makes the step's plan and the workspace
    calls.names.clear()
    with torch.no_grad(), calls:
        model.executors[0].run(forward)
    attention = ["add_norm", "mm", "rotate_store", "attend", "mm", "add_norm"]
    layer = [*attention, "mm", "choose", "arrange", "multiply", "multiply", "combine"]
    assert calls.names == ["embedding", *layer * len(model.layers)]


def test_the_gate_of_a_shared_expert_takes_its_product_alone(tmp_path, monkeypatch):
    """And its sigmoid is rounded as torch rounds it, before it is multiplied and after."""
    model = load(make("qwen2_moe", tmp_path), dtype="float16")
    experts = next(layer.experts for layer in model.layers if layer.experts is not None)
    routed, calls, x = RoutedExperts(experts, "silu"), Calls(), numbers(3, experts.hidden, dtype=torch.float16)
    assert experts.shared is not None and experts.shared_gate is not None
    weights, chosen = routed.route(x, slots(x))
    found, want = x.clone(), x.clone()
    names = {layer_kernels: ["gate"], skinny_kernels: ["multiply"], kernels: ["arrange", "combine"]}
    for module, name in [(module, name) for module, own in names.items() for name in own]:
        monkeypatch.setattr(module, name, calls.kernel(getattr(module, name)))
    with torch.no_grad(), calls:
        routed.compute(found, x, weights, chosen)
    assert calls.names == ["mm", "gate", "mm", "mm", "arrange", "multiply", "multiply", "combine"]
    gate_up, down = experts.shared
    beside = down(gated(gate_up.product(x), "silu")) * experts.shared_gate(x).sigmoid()
    experts.shared_gate = None
    RoutedExperts(experts, "silu")._add(want, x, weights, chosen, shared=beside)
    assert torch.equal(found, want)


MIXTURES = [
    "qwen3_moe",
    "qwen3_moe-sparse",
    "mixtral-window",
    "gpt_oss-clamped",
    "qwen3_vl_moe",
    "granitemoe",
    "glm4_moe",
    "qwen2_moe",
    "gemma4_text-experts",
    "ernie4_5_moe",
    "hunyuan_v1_moe",
    "minimax_m2",
]


@pytest.mark.parametrize("name", MIXTURES)
def test_steps_of_models_with_experts_equal_torch_and_ask_the_host_nothing(tmp_path, name, monkeypatch):
    if name not in ("gpt_oss-clamped", "qwen2_moe"):  # whose experts have all that experts may have
        monkeypatch.setattr(gpu_experts, "trial", lambda *_: None)
    model = load(make(name, tmp_path))
    assert [type(each) for each in model.executors] == [OnGPU, Eager]
    ours, torchs = cache_of(model), cache_of(model)
    with torch.inference_mode():
        for rows in (CHUNKS, MIXED, DECODES):
            want = model.executors[1].run(step(model, rows, torchs))
            with monkeypatch.context() as patch:
                patch.setattr(Experts, "__call__", lambda *_: pytest.fail("torch computes the experts"))
                for asked in ("item", "tolist", "cpu"):
                    patch.setattr(Tensor, asked, lambda *_: pytest.fail("the host waits"))
                found = model.executors[0].run(step(model, rows, ours))
            torch.testing.assert_close(found, want, rtol=1e-3, atol=1e-4)
