"""Checkpoints whose experts are in MXFP4, as gpt-oss's are, compared with transformers' own dequantization."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from engine import EngineConfig, ModelError, models, plan
from engine.models import layers
from engine.models.decoder import Decoder
from engine.models.gpu.form import Form
from engine.quantized.config import parse
from engine.quantized.forms import form_of
from tests.engine.test_exact import serve
from tests.engine.test_kernels import needs_library
from tests.engine.test_models import Bench, whole
from tests.models import BASE, cache_groups, load_model, make, oracle, prompt

EXPERTS = "model.layers.{}.mlp.experts."
CONFIG = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
LAYERS = BASE["num_hidden_layers"]


def write(folder: Path, *, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write a model with experts in MXFP4 to folder/quantized, and the same dequantized to folder/plain; return the
    first."""
    plain, quantized = make("gpt_oss-clamped", folder / "plain", dtype=dtype), folder / "quantized"
    quantized.mkdir()
    tensors = load_file(plain / "model.safetensors")
    stored, generator = dict(tensors), torch.Generator().manual_seed(5)
    for layer in range(LAYERS):
        for name in ("gate_up_proj", "down_proj"):
            key = f"{EXPERTS.format(layer)}{name}"
            experts, columns, rows = stored.pop(key).shape
            shape = experts, rows, columns // 32
            blocks = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
            scales = torch.randint(120, 126, shape, generator=generator, dtype=torch.uint8)
            stored |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
            tensors[key] = convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    save_file(stored, quantized / "model.safetensors")
    source = json.loads((plain / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps(source | {"quantization_config": CONFIG}))
    return quantized


def load(folder: Path, **settings: Any) -> Decoder:
    model = load_model(EngineConfig(model=str(folder), **settings), folder)
    assert isinstance(model, Decoder)
    return model


def test_without_a_name_in_config_json_the_dtype_is_that_of_the_embedding(tmp_path):
    folder = write(tmp_path)
    for name in ("plain", "quantized"):
        path = tmp_path / name / "config.json"
        source = json.loads(path.read_text())
        path.write_text(json.dumps({key: value for key, value in source.items() if "dtype" not in key}))
        config = EngineConfig(model=str(path.parent))
        assert models.examine(path.parent, config)[0].dtype == torch.bfloat16
    # Without the weights, that of the published ones, and float32 in unquantized models, as in transformers.
    assert models.describe(folder, EngineConfig(model=str(folder))).dtype == torch.bfloat16
    assert models.describe(tmp_path / "plain", EngineConfig(model=str(folder))).dtype == torch.float32
    change(folder, "embed_tokens.weight", lambda tensor: tensor.half())
    assert models.examine(folder, EngineConfig(model=str(folder)))[0].dtype == torch.float16
    assert models.examine(folder, EngineConfig(model=str(folder), dtype="float32"))[0].dtype == torch.float32


def test_gpt_oss_is_in_bfloat16(data):
    folder = data / "configs/gpt-oss-20b"
    assert models.describe(folder, EngineConfig(model=str(folder))).dtype == torch.bfloat16


@pytest.fixture
def readable(monkeypatch):
    """Keep plain weights in place: where oneDNN has reordered copies, torch would only keep those."""
    monkeypatch.setattr(layers, "can_reorder", lambda weight: False)


def change(folder: Path, end: str, change: Any) -> None:
    """Replace the tensors whose names end so by what `change` makes of them; None: remove them."""
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(end)]:
        found = change(tensors.pop(name))
        if found is not None:
            tensors[name] = found.contiguous()
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.usefixtures("readable")
def test_dequantized_weights_equal_those_of_transformers(tmp_path):
    folder = write(tmp_path)
    model, plain = load(folder, cpu_isa="torch"), load(tmp_path / "plain", cpu_isa="torch")
    assert model.num_params == plain.num_params and model.spec.quantization == "none"
    note = "589,824 weights in mxfp4 are dequantized while they are loaded, and take 1.2 MB in bfloat16"
    assert model.spec.notes == (note,)
    for ours, theirs in zip(model.layers, plain.layers, strict=True):
        assert ours.experts is not None and theirs.experts is not None
        pairs = zip(
            ours.experts.gate_ups + ours.experts.downs, theirs.experts.gate_ups + theirs.experts.downs, strict=True
        )
        assert all(one.weight.numel() and torch.equal(one.weight, other.weight) for one, other in pairs)
    ids = prompt(30)
    assert torch.equal(Bench(model).step({0: ids})[0], Bench(plain).step({0: ids})[0])


@needs_library
@pytest.mark.usefixtures("readable")
def test_blocks_hold_the_numbers_exactly(tmp_path):
    folder = write(tmp_path)
    model, plain = load(folder), load(tmp_path / "plain", cpu_isa="torch")
    assert set(model.spec.in_blocks) == {"MXFP4"} and model.spec.quantization == "mxfp4" and not model.spec.notes
    for ours, theirs in zip(model.layers, plain.layers, strict=True):
        assert ours.experts is not None and theirs.experts is not None
        for one, other in zip(ours.experts.downs, theirs.experts.downs, strict=True):
            assert torch.equal(one.rows(torch.arange(len(other.weight))), other.weight)


@needs_library
def test_logits_are_those_of_transformers_up_to_the_rounding_of_activations(tmp_path):
    folder = write(tmp_path, dtype=torch.float32)
    reference = oracle(tmp_path / "plain", torch.float32)
    ids = prompt(40)
    want = whole(reference, ids)

    def error(**settings: Any) -> float:
        return ((Bench(load(folder, **settings)).step({0: ids})[0] - want).norm() / want.norm()).item()

    assert error(cpu_isa="torch") < 1e-5
    assert error(gguf_activations="int16") < 1e-3
    assert 1e-4 < error(gguf_activations="int8") < 0.1


@needs_library
async def test_requests_have_the_same_bits_alone_and_together(tmp_path):
    folder = write(tmp_path)
    base: dict[str, Any] = {"model": str(folder), "device": "cpu", "num_blocks": 64, "max_seqs": 8}
    alone, exact, _ = await serve(EngineConfig(**base, prefix_caching=False, threads=1), together=False)
    assert exact and len(alone) == 8
    for settings in (
        {"max_batched_tokens": 9, "threads": 2},
        {"num_blocks": 14 * len(cache_groups(folder).windows), "threads": 1},
    ):
        found, _, _ = await serve(EngineConfig(**base | settings), together=True)
        assert found == alone


@needs_library
def test_the_memory_plan_counts_the_blocks(tmp_path):
    folder = write(tmp_path)
    model = load(folder)
    numbers = sum(model.spec.in_blocks.values())
    assert model.weights_bytes == 2 * (model.num_params - numbers) + numbers // 32 * 17
    found = plan.plan(EngineConfig(model=str(folder), device="cpu"))
    assert (found["weights_bytes"], found["quantization"]) == (model.weights_bytes, "mxfp4")


def test_the_smallest_and_the_largest_scales(tmp_path):
    """2^-127 is no normal number, and 255 is no number at all."""
    folder = write(tmp_path)
    change(folder, "down_proj_scales", torch.zeros_like)
    model = load(folder, dtype="float32", gguf_activations="int16")
    experts = model.layers[0].experts
    assert experts is not None
    down = experts.downs[0]
    numbers = down.weight if down._packed is None else down.rows(torch.arange(64))
    assert numbers.abs().max() == 6 * 2.0**-127 and len(numbers.unique()) == 15
    change(folder, "down_proj_scales", lambda scales: torch.full_like(scales, 255))
    with pytest.raises(ModelError, match="has a scale that is not a number"):
        load(folder)


@needs_library
def test_a_scale_that_the_kernels_do_not_hold_is_refused(tmp_path):
    folder = write(tmp_path)
    change(folder, "down_proj_scales", lambda scales: torch.full_like(scales, 200))
    with pytest.raises(ModelError, match=r"has a scale of 9\.44e\+21, but at most 9\.22e\+18 is supported"):
        load(folder)


@pytest.mark.usefixtures("readable")
def test_a_gpu_gets_integers_that_are_exact(tmp_path):
    folder = write(tmp_path)
    plain = load(tmp_path / "plain", cpu_isa="torch").layers[1].experts
    _, checkpoint = models.examine(folder, EngineConfig(model=str(folder)))
    assert plain is not None
    weights = {"3.gate_up_proj.weight": plain.gate_ups[3].weight, "7.down_proj.weight": plain.downs[7].weight}
    for name, weight in weights.items():
        (part,) = checkpoint.coded([f"{EXPERTS.format(1)}{name}"])
        order, pieces = part.read()
        found = torch.cat([(each.numbers.float() - 128) * each.scales.repeat_interleave(32, 1) for each in pieces])
        assert part.form == Form(8, 32) and order is None
        assert torch.equal(found, weight.float())
    checkpoint.close()


def test_only_experts_that_are_not_excluded_are_quantized():
    expert, attention = f"{EXPERTS.format(3)}7.gate_up_proj.weight", "model.layers.3.self_attn.q_proj.weight"
    found = parse(CONFIG)
    assert found.scheme(attention) is None and found.scheme("lm_head.weight") is None
    scheme = found.scheme(expert)
    assert scheme is not None and scheme.blocks_type(64) == "MXFP4" and scheme.blocks_type(48) is None
    assert form_of(scheme, 64) == Form(8, 32)  # on a GPU: as integers
    for skipped in ("model.layers.*.mlp.experts", "model.layers.3.mlp"):
        assert parse({**CONFIG, "modules_to_not_convert": [skipped]}).scheme(expert) is None


@pytest.mark.parametrize(
    ("end", "how", "says"),
    [
        ("up_proj_scales", lambda t: None, "lacks model.layers.0.mlp.experts.0.gate_up_proj.scales, which"),
        ("up_proj_blocks", lambda t: t[..., :8], "scales has the shape [256, 2] in torch.uint8, which does not fit"),
        ("up_proj_blocks", lambda t: t.int(), "blocks is not stored as mxfp4 weights of 4 bits are"),
        ("up_proj_blocks", lambda t: t[:, :-2], "which does not fit a weight of [254, 64]: [254, 2] would"),
        ("up_proj_blocks", lambda t: t.flatten(2), "lacks the tensor"),
        ("up_proj_scales", lambda t: t.float(), "in torch.float32, which does not fit"),
        ("down_proj_blocks", lambda t: t[:5], "lacks the tensor model.layers.0.mlp.experts.5.down_proj.weight"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_tensors_that_contradict_config_json_get_a_sentence(tmp_path, end, how, says):
    folder = write(tmp_path)
    change(folder, end, how)
    with pytest.raises(ModelError) as caught:
        models.examine(folder, EngineConfig(model=str(folder)))
    assert says in str(caught.value) and "\n" not in str(caught.value)
