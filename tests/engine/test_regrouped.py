"""Checkpoints of Qwen3-Next, whose projections before linear attention are grouped by key head."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import EngineConfig, ModelError, models
from engine.kernels.matmul import Stored
from engine.models.checkpoint import regrouped
from engine.models.checkpoint.weights import Checkpoint
from tests.engine.test_exact import serve
from tests.engine.test_kernels import needs_library
from tests.engine.test_quantized import error, load, refused
from tests.models import load_model, make
from tests.quantized import Kind, fp8, gptq, int_quantized, pack_quantized, write

GROUPED = "model.layers.0.linear_attn.in_proj_qkvz.weight"
KINDS = {
    "fp8-block": fp8("block"),
    "fp8-channel": fp8("channel"),
    "fp8-tensor": fp8("tensor"),
    "ct-fp8-block": fp8("block", "compressed-tensors"),
    "w8a8": int_quantized(),
    "w4a16": pack_quantized(4, 32, packed="Q4_0"),
    "w4a16-zeros": pack_quantized(4, 32, symmetric=False, packed="Q4_Z"),
}
WIDE = {
    "head_dim": 64,
    "mlp_only_layers": [0, 1],
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
}


def is_small(module: str) -> bool:
    return module.endswith("in_proj_ba")


def separated(folder: Path) -> dict[str, torch.Tensor]:
    """Return the rows of the first layer's projections as the decoder has them, of 2 key heads of 16 numbers."""
    tensors = load_file(folder / "model.safetensors")
    groups = tensors[GROUPED].unflatten(0, (2, -1)).split([16, 16, 32, 32], 1)
    query, key, value, gate = (part.flatten(0, 1) for part in groups)
    beta, decay = tensors[GROUPED.replace("qkvz", "ba")].unflatten(0, (2, 2, 2)).unbind(1)
    named = {"qkv": torch.cat([query, key, value]), "z": gate, "b": beta.flatten(0, 1), "a": decay.flatten(0, 1)}
    return {GROUPED.replace("qkvz", name): rows for name, rows in named.items()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_are_separated_by_what_they_project_to(tmp_path, dtype):
    folder = make("qwen3_next", tmp_path, dtype=torch.bfloat16)
    _, checkpoint = models.examine(folder, EngineConfig(model=str(folder)))
    want = separated(folder)
    found = {name: torch.empty(rows.shape, dtype=dtype) for name, rows in want.items()}
    read: list[int] = []
    checkpoint.fill(found, read.append)
    assert all(torch.equal(found[name], rows.to(dtype)) for name, rows in want.items())
    assert sum(read) == checkpoint.num_bytes_of(found) == sum(rows.nbytes for rows in want.values())
    checkpoint.close()


def test_rows_are_read_from_the_file_in_pieces(tmp_path):
    folder = make("qwen3_next", tmp_path, dtype=torch.bfloat16)
    _, checkpoint = models.examine(folder, EngineConfig(model=str(folder)))
    name = GROUPED.replace("qkvz", "z")
    parts = checkpoint.stored([name], torch.bfloat16)
    assert [part.shape for part in parts] == [(32, 64)] * 2
    data = (folder / "model.safetensors").read_bytes()
    read = [
        torch.frombuffer(bytearray(data[part.offset : part.offset + 32 * 64 * 2]), dtype=torch.bfloat16)
        for part in parts
        if isinstance(part, Stored)
    ]
    assert torch.equal(torch.cat(read).view(64, 64), separated(folder)[name])
    checkpoint.close()


@needs_library
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])  # packed from the file, and after reading
def test_the_packed_rows_are_those_of_the_checkpoint(tmp_path, dtype):
    folder = make("qwen3_next", tmp_path, dtype=torch.bfloat16)
    model = load_model(EngineConfig(model=str(folder), dtype=str(dtype).removeprefix("torch.")), folder)
    qkv, z, b, a = separated(folder).values()
    layer = model.layers[0]
    assert torch.equal(layer.qkv.rows(torch.arange(192)), torch.cat([qkv, z]).to(dtype))
    assert torch.equal(layer.mixer.gates.rows(torch.arange(8)), torch.cat([b, a]).to(dtype))


def test_the_hash_depends_on_the_last_row_of_each_piece(tmp_path):
    folder = make("qwen3_next", tmp_path, dtype=torch.bfloat16)
    path = folder / "model.safetensors"

    def examined() -> Checkpoint:
        return models.examine(folder, EngineConfig(model=str(folder)))[1]

    before = examined().weights_hash
    pieces = examined().entries[GROUPED.replace("qkvz", "z")].pieces
    assert len(pieces) == 2
    for piece in pieces:
        data = bytearray(path.read_bytes())
        data[piece.offset + piece.num_bytes - 1] ^= 1
        path.write_bytes(data)
        after = examined().weights_hash
        assert after != before
        before = after


def test_rows_and_comparisons_are_of_all_pieces(tmp_path):
    folder = make("qwen3_next", tmp_path, dtype=torch.bfloat16)
    _, checkpoint = models.examine(folder, EngineConfig(model=str(folder)))
    z, b = GROUPED.replace("qkvz", "z"), GROUPED.replace("qkvz", "b")
    assert torch.equal(checkpoint.rows(z, 100), separated(folder)[z])
    assert torch.equal(checkpoint.rows(z, 40), separated(folder)[z][:40])
    assert checkpoint.equal(z, z) and not checkpoint.equal(z, b)
    piece = checkpoint.entries[z].pieces[-1]
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[piece.offset + piece.num_bytes - 1] ^= 1
    (tmp_path / "other").mkdir()
    (tmp_path / "other/model.safetensors").write_bytes(data)
    other = [replace(each, file=tmp_path / "other/model.safetensors") for each in checkpoint.entries[z].pieces]
    checkpoint.entries["other"] = replace(checkpoint.entries[z], parts=tuple(other))
    assert not checkpoint.equal(z, "other")
    checkpoint.close()


def test_tensors_in_too_many_pieces_get_a_sentence(tmp_path, monkeypatch):
    folder = make("qwen3_next", tmp_path)
    monkeypatch.setattr(regrouped, "MAX_PIECES", 5)
    with pytest.raises(ModelError, match="tensors are in more than 5 pieces"):
        models.examine(folder, EngineConfig(model=str(folder)))


@needs_library
@pytest.mark.parametrize("quantization", ["int8", "int4"])
async def test_rounded_weights_have_the_same_bits_alone_and_together(tmp_path, quantization):
    folder = make("qwen3_next", tmp_path, dtype=torch.bfloat16)
    base = {"model": str(folder), "device": "cpu", "num_blocks": 64, "max_seqs": 8, "quantization": quantization}
    alone, exact, _ = await serve(EngineConfig(**base, prefix_caching=False, threads=1), together=False)
    assert exact and len(alone) == 8
    together, *_ = await serve(EngineConfig(**base, max_batched_tokens=9, threads=2), together=True)
    assert together == alone


@pytest.mark.parametrize("name", KINDS)
def test_quantized_rows_are_those_of_the_dequantized_model(tmp_path, name):
    reference = write(tmp_path, KINDS[name], name="qwen3_next", plain=is_small, **WIDE)
    assert error(load(tmp_path, cpu_isa="torch"), reference) < 5e-5


@needs_library
def test_quantized_rows_are_packed_in_blocks(tmp_path):
    reference = write(tmp_path, KINDS["w4a16"], name="qwen3_next", plain=is_small, **WIDE)
    model = load(tmp_path)
    assert error(model, reference) < 2e-3 and set(model.spec.in_blocks) == {"Q4_0"}


def test_modules_that_are_not_quantized_have_the_names_of_the_checkpoint(tmp_path):
    kind = fp8("block")
    kind.config["modules_to_not_convert"] = ["lm_head", "model.layers.0.linear_attn.in_proj_ba"]
    write(tmp_path, kind, name="qwen3_next", plain=is_small, **WIDE)
    spec = models.describe(tmp_path, EngineConfig(model=str(tmp_path)))
    assert spec.dequantized == load(tmp_path, cpu_isa="torch").spec.dequantized > 0


@pytest.mark.parametrize(
    ("kind", "changes"), [(fp8("block"), {"linear_key_head_dim": 64}), (gptq(size=128), {})]
)  # fmt: skip
def test_rows_that_cannot_be_separated_get_a_sentence(tmp_path, kind: Kind, changes):
    write(tmp_path, kind, name="qwen3_next", plain=is_small, **WIDE | changes)
    assert "rows that are grouped by key head cannot be separated" in refused(tmp_path)


def test_a_checkpoint_with_grouped_and_separated_rows_gets_a_sentence(tmp_path):
    folder = make("qwen3_next", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {GROUPED.replace("qkvz", "z"): torch.zeros(64, 64)}, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"holds both \S*in_proj_qkvz.weight and \S*in_proj_z.weight"):
        models.examine(folder, EngineConfig(model=str(folder)))


def test_a_missing_tensor_has_the_name_of_the_checkpoint(tmp_path):
    folder = make("qwen3_next", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors[GROUPED]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"lacks the tensor \S*linear_attn.in_proj_qkvz.weight"):
        models.examine(folder, EngineConfig(model=str(folder)))


def test_heads_that_the_rows_do_not_fit_get_a_sentence(tmp_path):
    folder = make("qwen3_next", tmp_path)
    source = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(source | {"linear_num_value_heads": 8}))
    with pytest.raises(ModelError, match=r"has the shape \[8, 64\], in which the 16 rows"):
        models.examine(folder, EngineConfig(model=str(folder)))
