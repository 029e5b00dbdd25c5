"""Quantized weights for a GPU in Triton's interpreter; test_paged_gpu.py runs this file.

    TRITON_INTERPRET=1 python -m pytest tests/engine/interpreted_weights.py

The interpreter truncates where a GPU rounds to bfloat16, so products are compared in float32 and float16.
"""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine import ConfigError, EngineConfig, ModelError, plan
from engine.gguf import folder
from engine.hub import fetch
from engine.kernels.matmul import GROUP
from engine.models.decoder import Decoder
from engine.models.decoder_layer import Layer
from engine.models.gpu import executor as on_gpu
from engine.models.gpu import measured_tiles, scaled, weight_trial
from engine.models.gpu.executor import OnGPU
from engine.models.gpu.form import ROUNDED, Form
from engine.models.gpu.tiles import CANDIDATES, MOST_ROWS, TILES, Tile, candidates
from engine.models.gpu.weights import GPUProduct, GPUWeight, random_weight, relative
from engine.models.rounding import TOPS, rounded
from tests.engine import test_gguf, test_gguf_architectures
from tests.engine.interpreter import prepare
from tests.engine.test_attention import CPU
from tests.engine.test_kernels_quantized import heavy, in_groups
from tests.engine.test_kernels_quantized import rounded as rounded_to_8
from tests.engine.test_models import Bench, prompt, whole
from tests.engine.test_planned_weights import plant_two_types
from tests.engine.test_quantization import quantized_weights
from tests.engine.test_quantized import KINDS, error
from tests.engine.test_scaled import emulated
from tests.models import MODELS, load_model, make
from tests.quantized import write

prepare()

FORMS = [
    *ROUNDED.values(),
    Form(4, 64, has_zeros=True, scale=torch.float16),
    Form(4, 96),
    Form(4, has_zeros=True),
    Form(8, 32, scale=torch.float16),
    Form(8, 128, has_zeros=True),
    Form(8, is_float=True),
    Form(8, 128, is_float=True),
]
SHAPES = [(1, 32), (64, 64), (70, 96), (130, 200), (33, 1100)]


def product_of(form: Form, rows: int, columns: int, **options: Any) -> tuple[GPUProduct, Tensor]:
    """Return a product with random numbers, and the weight in float32."""
    weight, plain = random_weight(form, rows, columns, torch.Generator().manual_seed(rows))
    return GPUProduct([weight], None, **{"dtype": torch.float32, **options}), plain


def inside(x: Tensor) -> Tensor:
    """Return the same rows within a larger matrix of NaN, which nobody may read."""
    around = x.new_full((len(x) + 2, x.shape[1] + 48), math.nan)
    around[1:-1, 16:-32] = x
    return around[1:-1, 16:-32]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_products_are_those_of_the_dequantized_weight(form, shape):
    rows, columns = shape
    if form.group > columns or columns % (form.group or 1):
        columns = 2 * form.group
    product, plain = product_of(form, rows, columns)
    for tokens in (1, 5, 40):
        x = torch.randn(tokens, columns)
        found, want = product(inside(x)), x.double() @ plain.double().T
        assert found.shape == (tokens, rows)
        assert ((found - want).abs() < 1e-6 * (x.abs() @ plain.abs().T)).all()


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize("tokens", [0, 16, 17, 64, 65, 130, MOST_ROWS, MOST_ROWS + 1])
def test_any_number_of_rows_is_multiplied(form, tokens):
    columns = 2 * form.group or 160
    product, plain = product_of(form, 20, columns)
    x, residual = torch.randn(tokens, columns), torch.randn(tokens, 20)
    assert torch.allclose(product(x, residual), residual + x @ plain.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "tile", list(dict.fromkeys(itertools.chain(*(CANDIDATES[rows] for rows in TILES if rows > 1))))
)
def test_every_tile_computes_the_product(tile):
    """Of weights whose slices do not fill the last step, and whose sums are in several parts."""
    for form in (ROUNDED[4], Form(8, 128, has_zeros=True), Form(4, 128)):
        product, plain = product_of(form, 70, 1024 + 128)
        assert product.parts[0]._parts > 1
        x = torch.randn(3, plain.shape[1])
        assert relative(product.multiply_in(tile, inside(x)), x.double() @ plain.double().T) < 1e-6


@pytest.mark.parametrize("form", [ROUNDED[4], Form(4, 32, has_zeros=True)], ids=lambda form: form.name)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_folded_tile_multiplies_the_numbers_that_dequantizing_gives(form, dtype):
    product, _ = product_of(form, 70, 1024 + 128, dtype=dtype)
    x = torch.randn(3, product.parts[0].columns, dtype=dtype)
    want = x.double() @ product.lookup(torch.arange(70)).double().T
    folded = [tile for tile in candidates(64, form) if isinstance(tile, Tile) and tile.folded]
    assert folded
    for tile in folded:
        assert relative(product.multiply_in(tile, x), want) < torch.finfo(dtype).eps
    assert not any(isinstance(tile, Tile) and tile.folded for tile in candidates(64, Form(4, 128)))


def test_the_fastest_tile_that_is_right_is_used_for_all_weights_of_a_shape(monkeypatch):
    first, second, wrong, *_ = CANDIDATES[16]
    products = [product_of(Form(8), 40, 64)[0] for _ in range(3)]
    other, multiply_in = product_of(Form(8), 41, 64)[0], GPUProduct.multiply_in

    def multiply(self: GPUProduct, tile: Tile, x: Tensor) -> Tensor:
        return multiply_in(self, tile, x) * (2 if tile == wrong else 1)

    def seconds(works: Any, device: torch.device) -> float:
        tile = works[0].args[0]
        if tile not in (first, second, wrong) and tile not in TILES.values():
            raise RuntimeError("out of resources")
        return {second: 1.0, wrong: 0.5}.get(tile, 2.0)

    monkeypatch.setattr(GPUProduct, "multiply_in", multiply)
    monkeypatch.setattr(measured_tiles, "seconds", seconds)
    measured_tiles.choose([*products, other], torch.float32)
    assert all(each.parts[0].tiles == TILES for each in (*products, other)), "nothing is measured on a CPU"
    monkeypatch.setattr(measured_tiles, "_is_measurable", lambda weight: weight.rows == 40)
    measured_tiles.choose([*products, other], torch.float32)
    assert all(each.parts[0].tiles == {**TILES, 16: second} for each in products)
    assert other.parts[0].tiles == TILES


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_numbers_are_exact_in_the_dtype_of_activations(form, dtype):
    """A unit vector selects a column: its numbers are rounded once, when the result is."""
    product, plain = product_of(form, 64, 2 * form.group or 160, dtype=dtype, wide=True)
    x = torch.eye(plain.shape[1]).to(dtype)
    assert product(x).dtype == torch.float32
    assert torch.equal(product(x), plain.T)
    ids = torch.tensor([3, 63, 0, 3])
    looked_up = product.lookup(ids)
    assert looked_up.dtype == dtype
    if dtype == torch.float16:
        assert torch.equal(looked_up, plain[ids].to(dtype))


def test_every_float_of_8_bits_is_decoded():
    numbers = torch.arange(256, dtype=torch.uint8)
    numbers[[0x7F, 0xFF]] = 0
    weight = GPUWeight(Form(8, is_float=True), 256, 1, CPU)
    weight.write(0, numbers[:, None], torch.ones(256, 1))
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        found = GPUProduct([weight], None, dtype, wide=True)(torch.ones(1, 1, dtype=dtype))
        assert torch.equal(found[0], numbers.view(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("form", FORMS[:3] + FORMS[-1:], ids=lambda form: form.name)
def test_a_row_has_the_same_bits_among_any_number_of_others_in_a_range(form):
    product, plain = product_of(form, 70, 16 * form.group or 1100)
    x = torch.randn(MOST_ROWS, plain.shape[1])
    for fewest, most in pairwise([1, 17, 33, 65, MOST_ROWS + 1]):
        together = product(x[: most - 1])
        for first in (0, 7):
            rows = slice(first, first + fewest)
            assert torch.equal(product(x[rows]), together[rows])


def test_parts_of_a_sum_are_added_in_one_order_and_can_be_added_again():
    weight, plain = random_weight(ROUNDED[4], 40, 2048, torch.Generator().manual_seed(0))
    assert weight._parts == 4
    product, x = GPUProduct([weight], None, torch.float32), torch.randn(20, 2048)
    first = product(x)
    assert relative(first, x @ plain.T) < 1e-6
    assert torch.equal(first, product(x)) and not weight._arrived.any()


def test_weights_of_two_forms_with_a_bias_are_one_product():
    draw = torch.Generator().manual_seed(0)
    (most, first), (last, second) = (random_weight(ROUNDED[bits], 48, 96, draw) for bits in (4, 8))
    bias, x = torch.randn(96), torch.randn(300, 96)
    product = GPUProduct([most, last], bias, torch.float32)
    want = x @ torch.cat([first, second]).T + bias
    for tokens in (2, 300):
        assert torch.allclose(product(x[:tokens]), want[:tokens], rtol=1e-4, atol=1e-4)


def test_columns_may_be_stored_in_another_order():
    draw, form = torch.Generator().manual_seed(0), Form(4, 32)
    order = torch.randperm(96, generator=draw)
    weight, plain = random_weight(form, 10, 96, draw)
    weight.order = order
    product, original = GPUProduct([weight], None, torch.float32), torch.empty_like(plain)
    original[:, order] = plain
    for tokens in (3, MOST_ROWS + 1):
        x = torch.randn(tokens, 96)
        assert relative(product(x), x @ original.T) < 1e-6
    assert torch.equal(product.lookup(torch.arange(10)), original)


# -- rounding ---------------------------------------------------------------------------------------------------------


def rounded_on_gpu(weight: Tensor, bits: int, importance: Tensor | None = None) -> Tensor:
    """Return the weight quantized to 8 or 4 bits and back. With 4 bits a group has the scale with the smallest error,
    of its largest magnitude divided by TOPS."""
    if bits > 4:
        return rounded_to_8(weight, weight.shape[1])
    groups = in_groups(weight, GROUP)
    matter = in_groups(torch.ones(1, weight.shape[1]) if importance is None else importance[None], GROUP)
    farthest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    best, least = torch.zeros_like(groups), torch.full_like(farthest, torch.inf)
    for top in TOPS:
        scale = (farthest / torch.full_like(farthest, top)).bfloat16().float()
        scale = torch.where(farthest.abs() < 2.0**-100, 0.0, scale)
        inverse = torch.where(scale != 0, torch.ones_like(scale) / scale, 0.0)
        found = (groups * inverse).round().clamp(-8, 7) * scale
        errors = squares(groups - found, matter)
        best = torch.where((errors < least) | (top == TOPS[0]), found, best)
        least = torch.where((errors < least) | (top == TOPS[0]), errors, least)
    return best.double().flatten(1)[:, : weight.shape[1]]


def squares(off: Tensor, matter: Tensor) -> Tensor:
    """Return each group's sum of matter * off^2, added from the first column to the last by fused multiply-adds."""
    total = torch.zeros_like(off[..., :1])
    for column, factor in zip(off.split(1, -1), (matter * off).split(1, -1), strict=True):
        total = (factor.double() * column.double() + total.double()).float()
    return total


@pytest.mark.parametrize("bits", ROUNDED)
@pytest.mark.parametrize("shape", [(1, 1), (33, 65), (130, 77), (500, 257)])
def test_weights_in_4_bits_have_the_best_of_eight_scales(shape, bits):
    torch.manual_seed(0)
    weight, importance = heavy(*shape, dtype=torch.float32), torch.rand(shape[1])
    weight[0] = 0
    found = rounded(weight, bits, importance).lookup(torch.arange(shape[0]), torch.float32)
    want = rounded_on_gpu(weight, bits, importance)
    same = torch.isclose(found.double(), want, rtol=1e-6, atol=0).float().mean()
    assert same > 0.999  # sums of errors in another order may find another of two scales that are as good


@pytest.mark.parametrize("bits", ROUNDED)
def test_a_large_weight_is_rounded_in_pieces(bits, monkeypatch):
    weight = torch.randn(50, 64)
    whole = rounded(weight, bits).lookup(torch.arange(50), torch.float32)
    monkeypatch.setattr("engine.models.rounding.ROUNDED_NUMBERS", 7 * 64)
    assert torch.equal(rounded(weight, bits).lookup(torch.arange(50), torch.float32), whole)


# -- models -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def untried(monkeypatch):
    """Leave out the trials of the kernels, which take longer than these models."""
    monkeypatch.setattr(weight_trial, "objection", lambda *_: None)
    monkeypatch.setattr(on_gpu, "trial", lambda *_: None)


def load(folder: Any, dtype: str = "float32", **settings: str) -> Decoder:
    model = load_model(EngineConfig(model=str(folder), cpu_isa="torch", dtype=dtype, **settings), folder)
    assert isinstance(model, Decoder)
    return model


@pytest.mark.parametrize("name, quantization", [("qwen3-tied", "int8"), ("qwen3-tied", "int4"), ("llama-bias", "int4")])
def test_logits_are_those_of_the_rounded_weights(tmp_path, name, quantization):
    folder = make(name, tmp_path, dtype=torch.float32)
    plain, model = load(folder), load(folder, quantization=quantization)
    assert isinstance(model.executors[0], OnGPU)
    for linear, weight in quantized_weights(plain, quantization, rounded_on_gpu).items():
        linear.weight = weight.float()
    want, got = (Bench(each).step({0: prompt(40)})[0] for each in (plain, model))
    assert relative(got, want) < 1e-4


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize("name, quantization", [("qwen3-tied", "int4"), ("llama", "int8"), ("mixtral", "int4")])
def test_weights_have_the_planned_size_and_no_plain_ones_are_left(tmp_path, name, quantization):
    folder = make(name, tmp_path, dtype=torch.float32)
    model = load(folder, quantization=quantization)
    parts = {id(linear): linear for layer in model.layers for _, linear, *_ in layer.parts()}
    parts |= {id(linear): linear for linear in (model.head, model.embedding)}
    held = sum(each.weight.nbytes + (each._packed.num_bytes if each._packed else 0) for each in parts.values())
    norms = (2 * len(model.layers) + 1) * model.spec.hidden_size * 4
    assert 0.9 * model.weights_bytes < held + norms < 1.1 * model.weights_bytes
    planned = plan.plan(EngineConfig(model=str(folder), cpu_isa="torch", dtype="float32", quantization=quantization))
    assert (planned["weights_bytes"], planned["quantization"]) == (model.weights_bytes, quantization)


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize("name", ["qwen3-tied", "llama", "mixtral"])
def test_the_plain_weights_of_one_layer_are_in_memory_at_a_time(tmp_path, monkeypatch, name):
    counts, sizes, pack = [], [], Decoder._pack_layer

    def plain(model: Decoder) -> int:
        linears = [linear for layer in model.layers for _, linear, *_ in layer.parts()]
        return sum(not linear.weight.is_meta for linear in {*linears, model.head} if linear.weight.numel())

    def counted(model: Decoder, layer: Layer, *rest: Any) -> None:
        sizes.append(len({linear for _, linear, *_ in layer.parts()}))
        before = plain(model)
        pack(model, layer, *rest)
        counts.append((before, plain(model)))

    monkeypatch.setattr(Decoder, "_pack_layer", counted)
    load(make(name, tmp_path, dtype=torch.float32), quantization="int8")
    routers = int(name == "mixtral")  # of each layer, which stay plain
    assert counts == [(size + index * routers, (index + 1) * routers) for index, size in enumerate(sizes)]


def test_without_kernels_that_work_quantization_is_refused(tmp_path, monkeypatch):
    folder = make("llama", tmp_path, dtype=torch.float32)

    def fails(*_: Any, **__: Any) -> float:
        raise RuntimeError("ptxas fatal: no such GPU\nstack")

    monkeypatch.setattr(weight_trial, "_error", fails)
    says = "`quantization=int8` makes weights that cpu cannot compute with, so leave it out: "
    with pytest.raises(ConfigError) as caught:
        load(folder, quantization="int8")
    why = "the Triton kernels do not run on this device: RuntimeError: ptxas fatal: no such GPU"
    assert str(caught.value) == says + why
    monkeypatch.setattr(weight_trial, "_error", lambda *_, **__: math.nan)
    with pytest.raises(ConfigError, match="compute wrong results with int8 in rows"):
        load(folder, quantization="int8")
    monkeypatch.setattr(weight_trial, "is_interpreted", lambda: False)
    found = weight_trial.objection([(ROUNDED[8], 64, 64)], torch.float32, CPU, head=70)
    assert found == "the Triton kernels for them compute in bfloat16 (`dtype=bfloat16`) and float16, not in float32"


def test_the_trial_finds_a_wrong_scale(monkeypatch):
    form = Form(4, 32, scale=torch.float16)
    assert weight_trial.objection([(form, 70, 100)], torch.float32, CPU, head=70) is None
    correct = GPUWeight.write

    def wrong(self: GPUWeight, first: int, numbers: Tensor, scales: Tensor, zeros: Tensor | None = None) -> None:
        correct(self, first, numbers, scales.flip(1), zeros)

    monkeypatch.setattr(GPUWeight, "write", wrong)
    says = weight_trial.objection([(replace(form, group=64), 70, 128)], torch.float32, CPU, head=70)
    assert says is not None and "wrong results with int4 in groups of 64" in says


# -- checkpoints ------------------------------------------------------------------------------------------------------

STORED = {
    "gptq-4": "int4 in groups of 128",
    "gptq-4-zeros-v2": "int4 in groups of 128 with zero points",
    "gptq-4-row": "int4 in rows",
    "gptq-4-order": "int4 in groups of 32",
    "gptq-4-zeros-order": "int4 in groups of 64 with zero points",
    "gptq-8-zeros": "int8 in groups of 128 with zero points",
    "awq-64": "int4 in groups of 64 with zero points",
    "w8a16-packed": "int8 in groups of 32",
    "w8a8": "int8 in rows",
    "w8a8-zeros": "int8 in rows with zero points",
    "fp8-tensor": "float8 in rows",
    "fp8-block": "float8 in groups of 128",
    "ct-fp8-channel": "float8 in rows",
    "gptq-4-small-groups": None,
}


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize("name", STORED)
def test_checkpoints_are_kept_as_they_are_stored(tmp_path, name):
    reference = write(tmp_path, KINDS[name])
    model = load(tmp_path)
    forms = {form.name for form, *_ in model.spec.coded}
    assert forms == ({STORED[name]} - {None}) and bool(forms) == model.spec.on_gpu
    assert (model.spec.notes == ()) == bool(forms)
    for index, layer in enumerate(model.layers):
        own = reference.model.layers[index]
        for ours, theirs in ((layer.output, own.self_attn.o_proj), (layer.down, own.mlp.down_proj)):
            found = ours.rows(torch.arange(len(theirs.weight)))
            torch.testing.assert_close(found.double(), theirs.weight, rtol=2**-23, atol=0)


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize("name", ["gptq-4-zeros-order", "w8a8-zeros", "fp8-block"])
def test_logits_are_those_of_the_checkpoints_numbers(tmp_path, name):
    reference = write(tmp_path, KINDS[name])
    assert error(load(tmp_path), reference) < 1e-5


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize("name", ["awq-64", "w8a8", "fp8-block"])
def test_checkpoints_have_the_planned_size(tmp_path, name):
    write(tmp_path, KINDS[name])
    model = load(tmp_path)
    linears = [linear for layer in model.layers for linear in layer.linears]
    assert not any(linear.weight.numel() for linear in linears)
    held = sum(linear._packed.num_bytes for linear in linears if linear._packed)
    rest = [model.embedding.weight, model.head.weight, model.norm.weight]
    rest += [norm.weight for layer in model.layers for norm in (layer.attention_norm, layer.mlp_norm)]
    assert model.weights_bytes == held + sum(weight.nbytes for weight in rest)
    planned = plan.plan(EngineConfig(model=str(tmp_path), cpu_isa="torch", dtype="float32"))
    assert planned["weights_bytes"] == model.weights_bytes
    assert not any("dequantized" in note for note in planned["notes"])


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize("name", ["ct-fp8-channel", "fp8-block"])
@pytest.mark.parametrize(
    "reasons, ways",
    [
        ((None, None), (True, True)),
        ((None, "torch's product fails"), (True, False)),
        (("this GPU does not multiply fp8", None), (False, False)),
    ],
)
def test_fp8_weights_are_multiplied_in_fp8_by_what_succeeds_in_its_trial(tmp_path, monkeypatch, name, reasons, ways):
    write(tmp_path, KINDS[name])
    monkeypatch.setattr(scaled, "objection", lambda device: reasons[0])
    monkeypatch.setattr(scaled, "objection_to_torch", lambda device, is_blocked: reasons[1])
    monkeypatch.setattr(torch, "_scaled_mm", emulated)
    model = load(tmp_path, "bfloat16")
    weights = [weight for linear in model.layers[0].linears for weight in linear._packed._weights]
    of_kernel, of_torch = ways
    for weight in weights:
        is_even = not weight.form.group or weight.columns % (scaled.BLOCKS * scaled.GROUP) == 0
        assert (weight.is_scaled, weight.is_by_torch) == (of_kernel, of_torch and is_even)
    reason = reasons[0] or reasons[1]
    assert model.product.note == (f"fp8 weights are dequantized for prompts: {reason}" if reason else "")


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize("name", ["awq-64", "gptq-8-zeros", "fp8-block", "ct-fp8-channel"])
def test_random_weights_are_made_in_the_form_of_a_checkpoint(tmp_path, name):
    write(tmp_path, KINDS[name])
    (tmp_path / "model.safetensors").unlink()
    model = load(tmp_path, load_format="dummy")
    assert {form.name for form, *_ in model.spec.coded} == {STORED[name]}
    for linear in model.layers[1].linears:
        rows = linear.rows(torch.arange(256))
        assert not linear.weight.numel() and 0.015 < rows.std() < 0.025 and abs(rows.mean()) < 0.005
    assert Bench(model).step({0: prompt(4)})[0].isfinite().all()


@pytest.mark.usefixtures("untried")
def test_parts_of_one_weight_are_read_into_one_if_they_share_form_and_order(tmp_path):
    counts = {}
    for name in ("gptq-4-order", "gptq-4-zeros-order", "fp8-tensor"):
        write(tmp_path / name, KINDS[name])
        layer = load(tmp_path / name).layers[0]
        counts[name] = [len(linear._packed._weights) for linear in (layer.qkv, layer.gate_up)]
    assert counts == {"gptq-4-order": [1, 1], "gptq-4-zeros-order": [3, 2], "fp8-tensor": [1, 1]}


@pytest.mark.usefixtures("untried")
def test_gate_and_up_may_be_stored_in_two_forms(tmp_path):
    plant_two_types(tmp_path, "LlamaForCausalLM", "up_proj")
    model = load(tmp_path)
    assert model.spec.dequantized == 0 and len(model.layers[0].gate_up._packed._weights) == 2
    on_cpu = load_model(EngineConfig(model=str(tmp_path), dtype="float32"), tmp_path)
    got, want = (Bench(each).step({0: prompt(12, seed=1)})[0] for each in (model, on_cpu))
    assert relative(got, want) < 1e-3


def test_without_kernels_that_work_a_checkpoint_is_dequantized_and_the_banner_says_why(tmp_path, monkeypatch):
    write(tmp_path, KINDS["fp8-block"])
    monkeypatch.setattr(weight_trial, "objection", lambda *_: "no compiler")
    monkeypatch.setattr(on_gpu, "trial", lambda *_: None)
    model = load(tmp_path)
    assert model.spec.quantization == "none" and model.weights_bytes == 4 * model.num_params
    (note,) = model.spec.notes
    assert "weights in fp8 are dequantized while they are loaded, and take" in note
    assert note.endswith("in float32: no compiler")


def test_a_checkpoints_own_shapes_are_tried(tmp_path, monkeypatch):
    write(tmp_path, KINDS["awq-64"])
    tried = []
    monkeypatch.setattr(on_gpu, "trial", lambda *_: None)
    monkeypatch.setattr(
        weight_trial, "_error", lambda form, rows, columns, *_, **__: tried.append((rows, columns)) or 0.0
    )
    load(tmp_path)
    assert sorted(tried) == [(128, 256), (256, 256), (256, 384), (384, 256)]


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize(
    ("kind", "part", "number", "says"),
    [
        ("fp8-tensor", "weight", 0x7F, "has a weight that is not a number; download the checkpoint again"),
        ("gptq-4", "qzeros", 0, "has zero points, but config.json calls it symmetric"),
        ("w8a16-packed", "weight_scale", 2**17, "has a scale of 1.31e+05, but at most 6.55e+04 is supported"),
        ("fp8-block", "weight_scale_inv", math.nan, "has a scale that is not a number"),
        ("gptq-4-order", "g_idx", 1, "has groups of columns that are not of 32 each"),
    ],
)
def test_numbers_that_cannot_be_stored_get_a_sentence(tmp_path, kind, part, number, says):
    write(tmp_path, KINDS[kind])
    tensors = load_file(tmp_path / "model.safetensors")
    name = f"model.layers.1.mlp.down_proj.{part}"
    flat = tensors[name].view(torch.uint8 if tensors[name].dtype == torch.float8_e4m3fn else tensors[name].dtype)
    flat.view(-1)[3] = number
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=re.escape(f"model.layers.1.mlp.down_proj.weight {says}")):
        load(tmp_path)


# -- GGUF files -------------------------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "cache_folder", lambda: tmp_path / "cache")


@pytest.mark.usefixtures("cache", "untried")
@pytest.mark.parametrize(
    ("kind", "architecture", "tied"),
    [(Type.Q4_0, "llama", True), (Type.Q8_0, "qwen3", False), (Type.Q4_K, "llama", False), (Type.F16, "llama", True)],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_gguf_files_are_computed_with_in_q4_0_and_q8_0(tmp_path, kind, architecture, tied):
    path = test_gguf.write(tmp_path / "model.gguf", kind, architecture, tied=tied)
    found = fetch(str(path), weights=True).path
    model = load(found)
    ids = prompt(12, seed=1)
    want, got = whole(test_gguf.by_transformers(path, rounds=False), ids), Bench(model).step({0: ids})[0]
    assert relative(got, want) < (0.02 if kind is Type.Q4_K else 1e-5)
    is_plain = kind is Type.F16
    assert model.spec.on_gpu == (not is_plain) and (model.layers[0].down._packed is None) == is_plain
    if not is_plain:
        assert model.spec.notes == (() if kind is not Type.Q4_K else (CONVERTED.format("Q4_K"),))
        linears = {model.embedding, model.head, *(linear for layer in model.layers for linear in layer.linears)}
        packed = sum(linear._packed.num_bytes for linear in linears)
        assert packed <= model.weights_bytes <= packed * 1.02


@pytest.mark.usefixtures("cache", "untried")
def test_the_table_of_the_layers_own_inputs_is_looked_up_in_its_form(tmp_path, monkeypatch):
    kind, sizes = MODELS["gemma4_text-small"]
    monkeypatch.setitem(MODELS, "gemma4_text-small", (kind, sizes | {"hidden_size_per_layer_input": 32}))
    written = make("gemma4_text-small", tmp_path / "model", dtype=torch.float32)
    path = test_gguf_architectures.write(written, tmp_path / "model.gguf", "gemma4_text-small", Type.Q8_0)
    model = load(fetch(str(path), weights=True).path)
    assert model.inputs is not None and not model.inputs.table.weight.numel()
    planned = plan.plan(EngineConfig(model=str(path), cpu_isa="torch", dtype="float32"))
    assert planned["weights_bytes"] == model.weights_bytes
    ids = prompt(12, seed=1)
    got, want = Bench(model).step({0: ids})[0], Bench(load(written)).step({0: ids})[0]
    assert relative(got, want) < 0.1


CONVERTED = "weights in {} are converted to Q8_0, which needs more memory than the file"


@pytest.mark.usefixtures("cache")
def test_a_gguf_file_is_refused_where_the_kernels_do_not_work(tmp_path, monkeypatch):
    path = test_gguf.write(tmp_path / "model.gguf", Type.Q8_0)
    monkeypatch.setattr(weight_trial, "objection", lambda *_: "no compiler")
    says = "cpu cannot compute with weights of a GGUF file, so use safetensors: no compiler"
    with pytest.raises(ConfigError, match=says):
        load(fetch(str(path), weights=True).path)
