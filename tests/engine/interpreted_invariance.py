"""The batch-invariant mode in Triton's interpreter; test_paged_gpu.py runs this file.

    TRITON_INTERPRET=1 python -m pytest tests/engine/interpreted_invariance.py

A row must have the same bits alone and in any batch. numpy's products add in an order that depends on a row's place, so
they are replaced by ones that add as matrix units do.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from engine import ConfigError, EngineConfig, EngineRequest, SamplingParams
from engine.attention import AttentionLayer, AttentionMeta, gpu_plan, paged_gpu
from engine.attention.gpu_cache import BRANCH, LOOP
from engine.attention.gpu_plan import FEW_ROWS
from engine.attention.paged_gpu import PagedGPU
from engine.attention.reference import Reference
from engine.build import Built, build, describe
from engine.kernels.gpu import attention as attention_kernels
from engine.kernels.gpu import heads as head_kernels
from engine.kernels.gpu import latents as latent_kernels
from engine.kernels.gpu import layers as layer_kernels
from engine.kernels.gpu import skinny as skinny_kernels
from engine.kernels.gpu import storing as storing_kernels
from engine.models import layers
from engine.models.checkpoint import dummy
from engine.models.decoder import Decoder
from engine.models.gpu import executor as on_gpu
from engine.models.gpu import invariance, skinny
from engine.models.gpu import latent as gpu_latent
from engine.models.gpu import weights as gpu_weights
from engine.models.gpu.executor import OnGPU
from engine.models.gpu.experts import RoutedExperts
from engine.models.gpu.form import ROUNDED
from engine.models.gpu.routing import Order
from engine.models.gpu.skinny import ANY, UNIFORM, UNIFORM_FLOAT32, Tile, Uniforms, multiply, tile_of
from engine.models.gpu.weights import GPUProduct, random_weight
from engine.runner import cuda_graphs, logits_choice, triton_logits
from engine.runner.logits import TorchLogits
from engine.scheduler import Scheduler
from tests.engine.interpreted_graphs import MODELS, SHAPE
from tests.engine.interpreted_layers import CHUNKS, DECODES, MIXED, Calls, cache_of, step
from tests.engine.interpreter import prepare
from tests.engine.recorder import Recorder
from tests.engine.test_attention import CPU, spoil
from tests.models import load_model

prepare()
PART = 16  # tokens of a part of a context, instead of 256
WHOLE_SUMS = {4: Tile(16, 64, 2, 2), ANY: Tile(32, 128, 4, 2, columns=64, shared=2)}
IN_PARTS = {4: Tile(16, 32, 2, 2, parts=2), ANY: Tile(32, 64, 4, 2, columns=64, shared=2, parts=2, is_serial=True)}
SMALL = [
    Uniforms(WHOLE_SUMS, WHOLE_SUMS, IN_PARTS, IN_PARTS),
    Uniforms.undivided({ANY: Tile(32, 64, 4, 2)}, {ANY: Tile(32, 64, 4, 2)}),
]


@pytest.fixture(autouse=True)
def ordered(monkeypatch):
    """Products of tiles that add in one order, and short parts of contexts."""

    def dot(_: Any, a: Any, b: Any, total: Any, *__: Any) -> Any:
        found, a, b = total.data, a.data.astype(np.float32)[:, :, None], b.data.astype(np.float32)[None]
        for k in range(0, a.shape[1], 16):
            found = found + (a[:, k : k + 16] * b[:, k : k + 16]).sum(1)
        return TensorHandle(found, total.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)
    shape = paged_gpu.attend_shape
    monkeypatch.setattr(paged_gpu, "attend_shape", lambda *args, **traits: shape(*args, **traits)._replace(keys=8))
    monkeypatch.setattr(gpu_plan, "SPLIT", PART)


def attended(
    backend: PagedGPU | Reference, layer: AttentionLayer, steps: list[list[tuple[int, int]]], **options: Any
) -> list[Tensor]:
    """Return the results of each sequence, whose tokens are divided into steps: by sequence, how many it has then."""
    dtype, held = options.get("dtype", torch.float32), options.get("held", torch.float32)
    draw = torch.Generator().manual_seed(1)
    lengths = [sum(count for chunks in steps for number, count in chunks if number == each) for each in range(3)]
    shapes = (
        (layer.num_heads, layer.head_dim),
        (layer.num_kv_heads, layer.head_dim),
        (layer.num_kv_heads, layer.v_head_dim),
    )
    q, k, v = (
        [
            torch.randn(length, *shape, generator=torch.Generator().manual_seed(10 * place + number)).to(dtype)
            for number, length in enumerate(lengths)
        ]
        for place, shape in enumerate(shapes)
    )
    if layer.values_in_keys:
        v = [each[..., : layer.v_head_dim] for each in k]
    blocks = torch.randperm(60, generator=draw).tolist()
    sinks = None if layer.sinks is None else torch.linspace(-1, 1, layer.num_heads)
    cache = backend.allocate(layer, 60, 8, held, CPU, sinks=sinks)
    spoil(cache.tensor)
    done, found = [0, 0, 0], [[], [], []]
    for chunks in steps:
        rows = [(blocks[20 * number : 20 * number + 20], done[number], count) for number, count in chunks]
        plan = backend.plan(AttentionMeta.of(rows, 8))
        parts = [
            torch.cat([part[number][done[number] : done[number] + count] for number, count in chunks])
            for part in (q, k, v)
        ]
        out = backend.attend(cache, *parts, plan)
        for (number, count), piece in zip(chunks, out.split([count for _, count in chunks]), strict=True):
            found[number].append(piece)
            done[number] += count
    return [torch.cat(pieces) if pieces else torch.empty(0) for pieces in found]


LENGTH = 2 * PART + 9
WHOLE = [[(0, LENGTH)]]
# As a chunk beside others, then decodes alone and beside others, and chunks beside decodes.
DIVIDED = [
    [(1, 20), (0, 5)],
    [(0, PART)],
    [(2, 3), (1, 1), (0, PART + 1)],
    [(0, 1)],
    [(2, 1), (0, 1)],
    [(0, LENGTH - 2 * PART - 8)],
]
SHAPES = {
    "groups": AttentionLayer(4, 2, 16, 16, scale=0.25),
    "window": AttentionLayer(2, 1, 16, 16, scale=0.25, window=PART + 5),
    "short window": AttentionLayer(2, 2, 16, 16, scale=0.25, window=3, softcap=5.0),
    "sinks": AttentionLayer(4, 1, 16, 24, scale=0.25, sinks="sinks"),
    "keys of two tiles": AttentionLayer(18, 1, 520, 24, scale=0.05),  # and two programs for a KV head
    "values in keys": AttentionLayer(18, 1, 40, 24, scale=0.25, values_in_keys=True),
}


@pytest.mark.parametrize(
    "shape, dtype, held",
    [
        *((shape, torch.float32, torch.float32) for shape in SHAPES),
        ("groups", torch.float16, torch.float16),
        ("window", torch.float32, torch.int8),
    ],
)
def test_attention_to_a_context_has_the_same_bits_however_its_tokens_are_divided(shape, dtype, held):
    layer, options = SHAPES[shape], {"dtype": dtype, "held": held}
    whole, *_ = attended(PagedGPU(invariant=True), layer, WHOLE, **options)
    divided, *_ = attended(PagedGPU(invariant=True), layer, DIVIDED, **options)
    assert torch.equal(divided, whole)
    want, *_ = attended(Reference(), layer, WHOLE, **options)
    torch.testing.assert_close(whole, want, rtol=0, atol=4e-3 if dtype == torch.float16 else 1e-5)


@pytest.mark.parametrize(
    "shape, is_invariant",
    [*((shape, True) for shape in SHAPES), *((shape, False) for shape in ("groups", "short window", "sinks"))],
)
def test_no_masks_of_the_keys_that_all_queries_see_change_no_bit(shape, is_invariant, monkeypatch):
    found, plain = [], paged_gpu.attend_shape
    for skips in (0, BRANCH, LOOP):

        def shape_of(layer: Any, dtype: Any, queries: int, *args: Any, skips: int = skips, **traits: Any) -> Any:
            return plain(layer, dtype, queries, *args, **traits)._replace(skips=skips if queries > 1 else 0)

        monkeypatch.setattr(paged_gpu, "attend_shape", shape_of)
        found.append(attended(PagedGPU(invariant=is_invariant), SHAPES[shape], DIVIDED)[0])
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_smaller_tiles_for_rows_of_one_query_change_no_bit(monkeypatch):
    found, heights, plain = [], [], paged_gpu.attend_shape

    def shape_of(layer: Any, dtype: Any, queries: int, *args: Any, **traits: Any) -> Any:
        heights[-1].add(queries)
        return plain(layer, dtype, queries, *args, **traits)

    monkeypatch.setattr(paged_gpu, "attend_shape", shape_of)
    for are_smaller in (True, False):
        heights.append(set())
        if not are_smaller:
            monkeypatch.setattr(paged_gpu, "is_short", lambda *_, **__: False)
        options = {"dtype": torch.float16, "held": torch.float16}
        found.append(attended(PagedGPU(invariant=True), SHAPES["groups"], DIVIDED, **options)[0])
    assert torch.equal(*found)
    assert heights == [{1, 32}, {32}]


@pytest.mark.parametrize("shape", SHAPES)
def test_one_kind_of_tiles_computes_all_rows_of_a_cache_with_scales(shape, monkeypatch):
    """There a GPU has given other bits with smaller tiles, which the interpreter cannot show."""
    found, plain = set(), paged_gpu.attend_shape

    def shape_of(layer: Any, dtype: Any, queries: int, *args: Any, **traits: Any) -> Any:
        found.add((queries, plain(layer, dtype, queries, *args, **traits)))
        return plain(layer, dtype, queries, *args, **traits)

    monkeypatch.setattr(paged_gpu, "attend_shape", shape_of)
    attended(PagedGPU(invariant=True), SHAPES[shape], DIVIDED, dtype=torch.float16, held=torch.int8)
    assert len(found) == 1
    (queries, _), layer = found.pop(), SHAPES[shape]
    for is_large in (False, True):
        traits = {"uniform": True, "is_scaled": True, "is_large": is_large}
        shapes = {plain(layer, torch.bfloat16, queries, tokens, **traits) for tokens in (1, FEW_ROWS, FEW_ROWS + 1)}
        assert len(shapes) == 1


def test_by_default_a_token_in_a_chunk_is_rounded_otherwise():
    whole, *_ = attended(PagedGPU(), SHAPES["groups"], WHOLE)
    divided, *_ = attended(PagedGPU(), SHAPES["groups"], DIVIDED)
    assert not torch.equal(divided, whole)
    torch.testing.assert_close(divided, whole)


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(shape[0])).to(dtype)


@pytest.mark.parametrize(
    "dtype, candidates", [(torch.float32, UNIFORM_FLOAT32), (torch.float16, UNIFORM), (torch.float32, SMALL)]
)
def test_a_product_of_any_number_of_rows_has_the_same_bits_with_all_tiles(dtype, candidates):
    x, weight, bias = numbers(150, 300, dtype=dtype), numbers(72, 300, dtype=dtype), numbers(72, dtype=dtype)
    found: dict[int, Tensor] = {}  # by the number of parts of a sum
    for tile in {tile for uniforms in candidates for tiles in uniforms for tile in tiles.values()}:
        for first, last in [(0, 150), (0, 1), (149, 150), (3, 20), (1, 66), (5, 5)]:
            result = multiply(x[first:last], weight, tile, bias=bias, dtype=torch.float32)
            assert torch.equal(result, found.setdefault(tile.parts, result)[first:last])
    want = x.double() @ weight.double().T + bias.double()
    for each in found.values():
        torch.testing.assert_close(each.double(), want, rtol=1e-4, atol=1e-4)


def test_which_sums_are_in_parts_depends_on_the_weight_alone():
    first, *others = UNIFORM
    assert first.of(1024, 3072, is_gated=False) is first.quarters
    assert first.of(4096, 12288, is_gated=False) is first.halves
    assert first.of(4096, 1024, is_gated=False) is first.of(151936, 4096, is_gated=False) is first.whole
    assert first.of(1024, 3072, is_gated=True) is first.gated
    for uniforms in UNIFORM:
        for tiles, parts in zip(uniforms, (1, 1, 2, 4) if uniforms is first else (1, 1, 1, 1), strict=True):
            assert {tile.parts for tile in tiles.values()} == {parts}
    assert others and all(next(reversed(tiles)) == ANY for uniforms in UNIFORM for tiles in uniforms)


@pytest.mark.parametrize("activation", ["silu", ""])
def test_gates_and_residuals_have_the_same_bits_for_any_number_of_rows(activation):
    x, weight = numbers(40, 300, dtype=torch.float16), numbers(144, 300, dtype=torch.float16)
    residual = numbers(40, 144, dtype=torch.float16)
    tables = (SMALL[0].gated,) if activation else (SMALL[0].whole, SMALL[0].quarters)
    for tiles in tables:

        def product(first: int, last: int, tiles: Any = tiles) -> Tensor:
            tile = tile_of(tiles, last - first)
            added = None if activation else residual[first:last].clone()
            return multiply(x[first:last], weight, tile, residual=added, activation=activation)

        whole = product(0, 40)
        for first, last in [(0, 1), (39, 40), (3, 20)]:
            assert torch.equal(product(first, last), whole[first:last])


@pytest.mark.parametrize("form", [ROUNDED[8], ROUNDED[4]], ids=lambda form: form.name)
def test_a_quantized_product_of_any_number_of_rows_has_the_same_bits(form, monkeypatch):
    monkeypatch.setattr(gpu_weights, "MOST_ROWS", 64)
    weight, plain = random_weight(form, 70, 1030, torch.Generator().manual_seed(1))
    product, x = GPUProduct([weight], None, torch.float32), numbers(70, 1030)
    rows = [(0, 1), (3, 20), (2, 36)]
    apart = product(x)
    product.unify()
    whole = product(x)
    for first, last in rows:
        assert torch.equal(product(x[first:last]), whole[first:last])
    torch.testing.assert_close(whole, x @ plain.T, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(whole, apart, rtol=1e-3, atol=1e-3)


def test_the_proof_has_steps_for_all_tiles_and_decodes_among_few_and_among_many_tokens():
    runs = invariance._divided(340)
    steps = [step for run in runs for step in run]
    rows = {sum(end - first for _, first, end in step) for step in steps}
    logits = {1, *invariance.CHUNKS, sum(invariance.CHUNKS), invariance.LOGITS}
    for tiles in [tiles for uniforms in UNIFORM for tiles in uniforms]:
        for counts in (rows, logits):
            assert {tile_of(tiles, count) for count in counts} == set(tiles.values())
    decodes = {sum(end - first for _, first, end in step) for step in steps if step[-1][2] - step[-1][1] == 1}
    assert min(decodes) == 1 and 1 < min(decodes - {1}) <= FEW_ROWS < max(decodes)
    for run in runs:
        for sequence in range(2):  # each token once, in order
            chunks = [(first, end) for step in run for own, first, end in step if own == sequence]
            assert [first for first, _ in chunks] == [0, *(end for _, end in chunks)][: len(chunks)]
        assert max(end for step in run for own, _, end in step if own == 0) == 340
    assert runs[-1] == [[(0, token, token + 1) for token in range(340)]]
    assert [len(step) for step in runs[-2]] == [1] + [FEW_ROWS] * invariance.FEW_STEPS


# -- a model ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch):
    """Small tiles, and few tokens in the proof. Other tests compare the kernels with torch."""
    monkeypatch.setattr(skinny, "UNIFORM_FLOAT32", SMALL)
    monkeypatch.setattr(invariance, "OTHERS", 6)
    monkeypatch.setattr(invariance, "CHUNKS", (3, 5))
    monkeypatch.setattr(invariance, "ALONE", 12)
    monkeypatch.setattr(invariance, "FEW_STEPS", 1)
    for module in (paged_gpu, triton_logits, on_gpu):
        monkeypatch.setattr(module, "trial", lambda *_, **__: None)


def config_of(folder: Any, **settings: Any) -> EngineConfig:
    given = {"model": str(folder), "device": "cpu", "cpu_isa": "torch", "attention": "triton", "dtype": "float32"}
    return EngineConfig(**{**given, "batch_invariant": True, **settings})


OTHERS = {
    "granite": {"architectures": ["GraniteForCausalLM"], "model_type": "granite", "residual_multiplier": 0.5},
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 16, "mlp_only_layers": [0],
        "num_hidden_layers": 2,
    },
}  # fmt: skip


def written(name: str, folder: Path, **changes: Any) -> Path:
    """Write the config.json of a small model, whose weights are random."""
    shape = {**SHAPE, **{**MODELS, **OTHERS}[name], **changes}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape))
    return folder


def model_of(name: str, folder: Path, **settings: Any) -> Decoder:
    path = written(name, folder)
    model = load_model(config_of(path, load_format="dummy", **settings), path)
    assert isinstance(model, Decoder) and isinstance(model.executors[0], OnGPU)
    return model


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", ["llama", "granite", "cohere2"])
def test_our_kernels_compute_all_products_of_a_model(tmp_path, name, monkeypatch):
    monkeypatch.setattr(invariance, "proof", lambda *_: None)
    ours, torchs = (model_of(name, tmp_path, batch_invariant=is_ours) for is_ours in (True, False))
    assert (ours.product.name, ours.product.invariant, ours.product.note) == ("triton", True, "")
    assert (torchs.product.name, torchs.product.invariant) == ("torch", False)
    caches, calls, counts = (cache_of(ours), cache_of(torchs)), Calls(), []
    counted = lambda x, *args, **more: counts.append(len(x)) or multiply(x, *args, **more)  # noqa: E731
    monkeypatch.setattr(layers, "multiply", counted)
    for rows, tokens in ((CHUNKS, 11), (MIXED, 3), (DECODES, 2)):
        counts.clear()
        with torch.no_grad(), calls:
            hidden = ours.executors[0].run(step(ours, rows, caches[0]))
            found = ours.project(hidden[-1:])
        assert counts == [tokens] * 4 * len(ours.layers) + [1]
        with torch.inference_mode():
            want = torchs.project(torchs.executors[0].run(step(torchs, rows, caches[1]))[-1:])
        torch.testing.assert_close(found, want, rtol=1e-3, atol=1e-4)
    assert not {"mm", "addmm", "bmm", "linear", "matmul"} & set(calls.names)


@pytest.mark.usefixtures("small")
def test_a_model_whose_small_weights_have_sums_in_parts_is_proved(tmp_path, monkeypatch):
    monkeypatch.setattr(skinny, "QUARTERED", (32, 16))
    monkeypatch.setattr(skinny, "HALVED", (64, 16))
    used = set()
    recorded = lambda x, weight, tile, **more: used.add(tile) or multiply(x, weight, tile, **more)  # noqa: E731
    monkeypatch.setattr(layers, "multiply", recorded)
    model = model_of("qwen3", tmp_path)
    assert model.product.invariant
    assert used == {*WHOLE_SUMS.values(), *IN_PARTS.values()}


@pytest.mark.usefixtures("small")
def test_the_proof_fails_if_a_product_depends_on_the_number_of_rows(tmp_path, monkeypatch):
    real_proof = invariance.proof
    monkeypatch.setattr(invariance, "proof", lambda *_: None)
    model = model_of("qwen3", tmp_path)

    def wrong(x: Tensor, *args: Any, **more: Any) -> Tensor:
        return multiply(x, *args, **more) * (1 + 2.0**-20 * (len(x) == 1))

    monkeypatch.setattr(layers, "multiply", wrong)
    reason = real_proof((model.spec, model.embedding, model.layers, model.rotaries, None), model.project)
    assert reason is not None
    assert re.fullmatch(r"\d+ of \d+ numbers of layer 0 depend on the batch on this device", reason)


@pytest.mark.usefixtures("small")
def test_the_kernels_of_quantized_weights_are_proved_too(tmp_path):
    model = model_of("qwen3", tmp_path, quantization="int4")
    assert model.product.invariant
    products = [linear.quantized for layer in model.layers for linear in layer.linears]
    assert all(weight._is_uniform for product in products if product is not None for weight in product._weights)
    assert None not in products


@pytest.mark.usefixtures("small")
def test_layers_of_several_sizes_with_shared_keys_and_inputs_of_their_own_are_proved_too(tmp_path, monkeypatch):
    model = model_of("gemma4", tmp_path)
    assert (model.product.invariant, model.product.note) == (True, "")
    own_input = on_gpu.own_input
    monkeypatch.setattr(on_gpu, "own_input", lambda layer, x, *more: own_input(layer, x, *more) * (1 + (len(x) == 1)))
    parts = model.spec, model.embedding, model.layers, model.rotaries, model.inputs
    assert "numbers of layer 0 depend on the batch on this device" in str(invariance.proof(parts, model.project))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("architecture", ["YoutuForCausalLM", "YoutuGguf"])
def test_latent_attention_is_proved_too(architecture, tmp_path, monkeypatch):
    """With the projections of latents in one tensor and in two."""
    monkeypatch.setitem(OTHERS, architecture, {**MODELS["youtu"], "architectures": [architecture]})
    model = model_of(architecture, tmp_path)
    assert (model.product.invariant, model.product.note) == (True, "")
    assert model.layers[0].shape.latent.in_two == (architecture == "YoutuGguf")
    if architecture == "YoutuGguf":
        return  # the other one shows that an error is found
    multiply = gpu_latent.multiply
    monkeypatch.setattr(gpu_latent, "multiply", lambda x, *more, **of: multiply(x * (1 + (len(x) == 1)), *more, **of))
    parts = model.spec, model.embedding, model.layers, model.rotaries, model.inputs
    assert "numbers of layer 0 depend on the batch on this device" in str(invariance.proof(parts, model.project))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "deepseek_v3-groups"])
def test_layers_with_experts_are_proved_too(tmp_path, name, monkeypatch):
    model = model_of(name, tmp_path)
    assert (model.product.invariant, model.product.note) == (True, "")
    if name != "gpt_oss":
        return  # one model shows that an error is found
    parts = model.spec, model.embedding, model.layers, model.rotaries, model.inputs
    arrange = RoutedExperts.arrange

    def wrong(self: RoutedExperts, chosen: Tensor) -> Order:
        """Pairs are computed by the next expert in steps of one token."""
        order = arrange(self, chosen)
        if len(chosen) == 1:
            order.owners.copy_(torch.where(order.owners < 0, order.owners, (order.owners + 1) % self.spec.count))
        return order

    monkeypatch.setattr(RoutedExperts, "arrange", wrong)
    reason = invariance.proof(parts, model.project)
    assert reason is not None and "depend on the batch on this device" in reason


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", ["qwen3_5", "nemotron_h"])
def test_layers_that_keep_states_are_proved_too(tmp_path, name):
    model = model_of(name, tmp_path)
    assert (model.product.invariant, model.product.note) == (True, "")
    if name != "qwen3_5":
        return  # one model shows that an error is found
    parts = model.spec, model.embedding, model.layers, model.rotaries, model.inputs
    mixer = model.layers[0].mixer
    assert mixer is not None
    compute = mixer.compute

    def wrong(x: Tensor, *more: Any) -> Tensor:
        """What a layer reads is larger in steps of one token."""
        return compute(x, *more) * (1 + (len(x) == 1))

    mixer.compute = wrong
    assert "numbers of layer 0 depend on the batch on this device" in str(invariance.proof(parts, model.project))


@pytest.mark.usefixtures("small")
def test_tiles_that_round_otherwise_give_way_to_one_for_all_rows(tmp_path, monkeypatch):
    used = set()

    def rounded(x: Tensor, weight: Tensor, tile: Tile, **more: Any) -> Tensor:
        used.add(tile)
        return multiply(x, weight, tile, **more) * (1 + 2.0**-22 * (tile == WHOLE_SUMS[4]))

    monkeypatch.setattr(layers, "multiply", rounded)
    assert model_of("qwen3", tmp_path).product.invariant
    assert SMALL[1].whole[ANY] in used
    monkeypatch.setattr(invariance, "proof", lambda *_: "7 of 9 numbers of the head depend on the batch")
    model = model_of("qwen3", tmp_path / "again")
    assert (model.product.invariant, model.product.note) == (False, "7 of 9 numbers of the head depend on the batch")


def test_what_is_not_invariant_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(paged_gpu, "trial", lambda *_: None)
    folder = written("qwen3", tmp_path / "small")
    with monkeypatch.context() as patch:
        patch.setattr(on_gpu, "MAX_HIDDEN", 8)
        with pytest.raises(
            ConfigError, match=r"`batch_invariant` cannot be kept here.*torch computes norms .*of up to 8 numbers"
        ):
            describe(config_of(folder, load_format="dummy"))
    wide = written("qwen3_5", tmp_path / "wide", linear_key_head_dim=257)
    with pytest.raises(ConfigError, match=r"torch computes layers that keep states: .* heads of up to 256 numbers"):
        describe(config_of(wide, load_format="dummy"))
    with pytest.raises(ConfigError, match="the attention backend depend on it"):
        describe(config_of(folder, attention="reference", load_format="dummy"))
    monkeypatch.setattr(invariance, "settle", lambda *_, **__: "7 of 9 numbers differ")
    with pytest.raises(
        ConfigError, match="`batch_invariant` cannot be kept here, so leave it out: 7 of 9 numbers differ"
    ):
        build(config_of(folder, num_blocks=8, max_len=32, load_format="dummy"))


class Loop:
    """An engine's loop on one thread."""

    def __init__(self, built: Built) -> None:
        self.runner, self.number = built.runner, 0
        self.scheduler = Scheduler(built.config, built.info.num_blocks, built.info.vocab_size, groups=built.info.groups)

    def responses(self, prompts: list[list[int]]) -> list[tuple[list[int], list[float]]]:
        """Return the tokens and log-probabilities of requests that are there at once."""
        found: dict[int, tuple[list[int], list[float]]] = {}
        for prompt in prompts:
            self.number += 1
            found[self.number] = [], []
            params = SamplingParams(max_tokens=3, temperature=0.8, seed=len(prompt), logprobs=2)
            self.scheduler.add(EngineRequest(id=self.number, prompt_ids=tuple(prompt), params=params))
        while (batch := self.scheduler.schedule()) is not None:
            for delta in self.scheduler.update(batch, self.runner.launch(batch).sample().result()):
                tokens, logprobs = found[delta.id]
                tokens += delta.token_ids
                logprobs += [each for entry in delta.logprobs or () for each in (entry.logprob, *entry.top_logprobs)]
        return list(found.values())


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", ["qwen3", "youtu"])
def test_an_engine_gives_the_same_bits_alone_in_a_batch_in_chunks_after_hits_and_replayed(name, tmp_path, monkeypatch):
    recorder = Recorder()
    monkeypatch.setattr(cuda_graphs, "device_for", lambda config: None if config.enforce_eager else recorder)
    monkeypatch.setattr(dummy, "STD", 0.4)  # so that tokens differ
    sampling = logits_choice.Choice("triton", TorchLogits(96, CPU))  # ours are slower here
    monkeypatch.setattr(logits_choice, "choose", lambda *_: sampling)
    sizes = {"load_format": "dummy", "max_len": 64, "max_seqs": 3, "block_size": 4}
    base = config_of(written(name, tmp_path), **sizes, async_scheduling=False)
    prompts = [[(7 * place + number) % 96 for place in range(length)] for number, length in enumerate((PART + 3, 2))]
    prompts[1:] = [[*prompts[0][:8], *prompt] for prompt in prompts[1:]]
    of_latents = latent_kernels, head_kernels
    with recorder.kernels(attention_kernels, storing_kernels, layer_kernels, skinny_kernels, *of_latents):
        eager = build(replace(base, enforce_eager=True, num_blocks=60, max_batched_tokens=48, prefix_caching=False))
        assert eager.info.exact and (eager.info.product, eager.config.products) == ("triton", "torch")
        loop = Loop(eager)
        alone = [loop.responses([prompt])[0] for prompt in prompts]
        assert all(len(tokens) == 3 and len(logprobs) >= 9 for tokens, logprobs in alone)
        assert not recorder.replayed
        monkeypatch.setattr(invariance, "proof", lambda *_: None)
        graphs = build(replace(base, num_blocks=12, max_batched_tokens=7))
        assert Loop(graphs).responses(prompts) == alone
        assert len(recorder.replayed) > 10
