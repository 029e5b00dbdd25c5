"""Checkpoints: streamed into the model, and refused in one sentence if broken."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import EngineConfig, ModelError, models
from engine.kernels.library import choose
from engine.kernels.matmul import Packing
from engine.models.checkpoint import upload, weights
from engine.models.checkpoint.weights import Checkpoint
from tests.models import load_model, make

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("qwen3", tmp_path_factory.mktemp("weights") / "qwen3", dtype=torch.float32)


@pytest.fixture
def folder(source: Path, tmp_path: Path) -> Path:
    """Return a copy of a model to break."""
    return Path(shutil.copytree(source, tmp_path / "model"))


def edit(folder: Path, **changes: object) -> None:
    """Change config.json; None removes a key."""
    path = folder / "config.json"
    found = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in found.items() if value is not None}))


def load(folder: Path, **settings):
    """Load a folder for torch, which keeps the weights as they were read."""
    return load_model(EngineConfig(model=str(folder), **{"cpu_isa": "torch", **settings}), folder)


def with_kernels() -> None:
    if choose("auto", CPU, torch.float32).kernels is None:
        pytest.skip("no CPU kernels here")


def packed(folder: Path) -> list[torch.Tensor]:
    """Return the packed weights of a folder."""
    with_kernels()
    shares: list[float] = []
    model = load_model(EngineConfig(model=str(folder)), folder, shares.append)
    assert shares == sorted(shares) and shares[-1] == 1.0
    return panels(model)


def panels(model: models.Model) -> list[torch.Tensor]:
    linears = [linear for layer in model.layers for linear in layer.linears]
    return [linear._packed.panels for linear in [*linears, model.head]]


def refused(folder: Path, **settings) -> str:
    with pytest.raises(ModelError) as error:
        load(folder, **settings)
    text = str(error.value)
    assert "\n" not in text and "Traceback" not in text
    return text


def shard(folder: Path) -> list[Path]:
    """Split the weights into three files with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names, index = sorted(tensors), {}
    for part in range(3):
        file = f"model-{part + 1:05d}-of-00003.safetensors"
        save_file({name: tensors[name] for name in names[part::3]}, folder / file)
        index |= dict.fromkeys(names[part::3], file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return sorted(folder.glob("*.safetensors"))


def same(a: models.Model, b: models.Model) -> bool:
    return all(torch.equal(x, b.targets()[name]) for name, x in a.targets().items())


def test_every_number_is_loaded(folder, monkeypatch):
    # Pieces that end inside of rows; and parts of one matrix that come from three tensors.
    monkeypatch.setattr(weights, "PIECE_BYTES", 1000)
    shares: list[float] = []
    model = load_model(EngineConfig(model="", cpu_isa="torch"), folder, shares.append)
    tensors = load_file(folder / "model.safetensors")
    assert shares == sorted(shares) and 0 < shares[0] < 0.1 and shares[-1] == 1.0
    attention = "model.layers.1.self_attn"
    qkv = torch.cat([tensors[f"{attention}.{part}_proj.weight"] for part in "qkv"])
    assert torch.equal(model.layers[1].qkv.weight, qkv)
    assert model.num_params == sum(x.numel() for x in tensors.values()) == model.spec.num_params
    assert model.weights_bytes == 4 * model.num_params == model.spec.weights_bytes
    assert shares == sorted(shares) and shares[-1] == 1.0 and len(shares) > 100


def test_shards_are_the_same_model(folder, source):
    shard(folder)
    assert same(load(folder), load(source))


def test_numbers_are_converted_on_the_way(folder):
    model = load(folder, dtype="float64")
    assert model.embedding.weight.dtype == torch.float64
    assert torch.equal(
        model.embedding.weight, load_file(folder / "model.safetensors")["model.embed_tokens.weight"].double()
    )


def test_file_truncated_while_it_is_read_is_reported(folder, monkeypatch):
    """Once directly into the weights, and once through the buffers in which numbers are converted."""
    read_all = upload.read_all

    def cut(descriptor: int, target: memoryview, offset: int) -> None:
        os.truncate(folder / "model.safetensors", offset)
        read_all(descriptor, target, offset)

    for dtype, module in (("float32", weights), ("float64", upload)):
        with monkeypatch.context() as patch:
            patch.setattr(module, "read_all", cut)
            data = (folder / "model.safetensors").read_bytes()
            with pytest.raises(
                ModelError, match=r"model\.safetensors cannot be read: it ends early; download it again"
            ):
                load(folder, dtype=dtype)
            (folder / "model.safetensors").write_bytes(data)


def test_a_base_model_without_its_prefix(folder):
    tensors = load_file(folder / "model.safetensors")
    save_file({name.removeprefix("model."): x for name, x in tensors.items()}, folder / "model.safetensors")
    assert torch.equal(load(folder).embedding.weight, tensors["model.embed_tokens.weight"])


def test_a_head_in_the_file_decides_over_the_flag(folder):
    tensors = load_file(folder / "model.safetensors")
    edit(folder, tie_word_embeddings=True)
    assert torch.equal(load(folder).head.weight, tensors["lm_head.weight"])
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors")
    model = load(folder)
    assert model.head is model.embedding


def test_checkpoints_have_different_hashes(folder, source):
    before = Checkpoint(source).weights_hash
    assert Checkpoint(folder).weights_hash == before == load(source).weights_hash
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][-1] += 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert Checkpoint(folder).weights_hash != before


def test_missing_folder_and_missing_config_are_refused(folder):
    assert refused(folder / "nowhere") == f"there is no model folder {folder / 'nowhere'}"
    (folder / "config.json").unlink()
    assert "holds no config.json" in refused(folder)


@pytest.mark.parametrize(
    ("text", "says"), [("{", "is not valid JSON"), ("[]", "must hold a JSON object"), ("{}", "names no architecture")]
)
def test_config_that_is_no_json_object_is_refused(folder, text, says):
    (folder / "config.json").write_text(text)
    assert says in refused(folder)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"architectures": ["NovelForCausalLM"], "model_type": "novel"}, "NovelForCausalLM is known neither here"),
        ({"quantization_config": {"quant_method": "gptq"}}, "weights of None bits are not supported, 4 and 8 are"),
        ({"hidden_size": None}, "config.json has no hidden_size"),
        ({"num_hidden_layers": "3"}, "num_hidden_layers must be a positive whole number, not '3'"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3 key-value heads evenly"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps must be a number"),
        ({"dtype": "float4"}, "names the dtype 'float4'"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rotary scaling 'linear' needs 'factor'"),
        ({"rope_parameters": {"rope_type": "linear", "factor": "x"}}, "a rotary parameter is not a number"),
        ({"intermediate_size": 96}, "mlp.gate_proj.weight"),
        ({"vocab_size": 301}, "has the shape [300, 64], but config.json asks for [301, 64]"),
        ({"num_hidden_layers": 4}, "lacks the tensor model.layers.3"),
        ({"num_hidden_layers": 2}, "model.layers.2"),
    ],
)
def test_config_that_contradicts_the_weights_is_refused(folder, changes, says):
    edit(folder, **changes)
    assert says in refused(folder)


def test_numbers_are_bounded_also_without_weights(tmp_path):
    folder = make("gpt2", tmp_path / "gpt2")
    (folder / "model.safetensors").unlink()
    for changes, says in (({"n_layer": 10**9}, "n_layer must be at most"), ({"vocab_size": 1 << 25}, "logits")):
        edit(folder, **{"n_layer": 3, "vocab_size": 300, **changes})
        with pytest.raises(ModelError, match=says):
            models.describe(folder, EngineConfig(model=str(folder)))


def test_pickled_weights_are_refused(folder):
    class Trap:
        def __reduce__(self):
            return Path.touch, (folder / "it ran",)

    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Trap()))
    assert "only as pytorch_model.bin, a format that can run code" in refused(folder)
    assert not (folder / "it ran").exists()
    (folder / "pytorch_model.bin").unlink()
    assert "holds no weights" in refused(folder)


def test_a_whole_file_is_used_though_the_index_of_older_shards_is_beside_it(folder):
    tensors = load_file(folder / "model.safetensors")
    shards = shard(folder)
    tuned = {name: tensor + 1 for name, tensor in tensors.items()}
    save_file(tuned, folder / "model.safetensors")
    model = load_model(EngineConfig(model="", cpu_isa="torch"), folder)
    assert torch.equal(model.targets()["norm.weight"], tuned["model.norm.weight"])
    for path in shards:  # as `save_pretrained` leaves the folder
        path.unlink()
    assert same(load_model(EngineConfig(model="", cpu_isa="torch"), folder), model)


def test_missing_shards_are_refused(folder):
    files = shard(folder)
    files[1].rename(folder / "elsewhere")
    assert refused(folder) == f"the weights file {files[1]} is missing; download the model again"
    (folder / "model.safetensors.index.json").unlink()
    assert "holds 2 of the weights' parts and no index" in refused(folder)


def test_the_index_decides_which_of_two_files_a_tensor_is_read_from(folder):
    shards = shard(folder)
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    names = {path.name: next(name for name, file in index.items() if file == path.name) for path in shards}
    for path in shards:  # each also holds a tensor of each other
        tensors = load_file(path)
        save_file({**{name: torch.ones(3) for name in names.values()}, **tensors}, path)
    entries = Checkpoint(folder).entries
    assert {name: entries[name].file.name for name in names.values()} == {name: file for file, name in names.items()}
    models.examine(folder, EngineConfig(model=""))  # their shapes are those of config.json


def test_a_tensor_in_two_files_that_the_index_does_not_list_is_harmless(folder):
    for path in shard(folder)[:2]:
        save_file({**load_file(path), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}, path)
    models.examine(folder, EngineConfig(model=""))


def test_two_files_with_the_same_tensor_and_no_index_are_refused(folder):
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    save_file({"model.norm.weight": torch.ones(8)}, folder / "b.safetensors")
    assert refused(folder) == (
        f"{folder / 'b.safetensors'} and {folder / 'a.safetensors'} both hold the tensor model.norm.weight; "
        "remove one of them"
    )


def test_a_folder_that_cannot_be_listed_is_reported(folder, monkeypatch):
    def listdir(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    monkeypatch.setattr(os, "listdir", listdir)  # the tests may run as root, who may read everything
    assert refused(folder) == f"{folder} cannot be read: Permission denied"


def test_index_with_missing_tensors_is_refused(folder):
    shard(folder)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.bias"] = "model-00001-of-00003.safetensors"
    path.write_text(json.dumps(index))
    assert "does not hold the tensor model.norm.bias" in refused(folder)
    index["weight_map"]["model.norm.bias"] = "../other/model.safetensors"
    path.write_text(json.dumps(index))
    assert "is not a valid index" in refused(folder)


@pytest.mark.parametrize("keep", [0, 5, 8, 200, -1])
def test_truncated_file_is_refused(folder, keep):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    text = refused(folder)
    assert str(path) in text and "cut short" in text


@pytest.mark.parametrize(
    ("header", "says"),
    [
        (b"not json", "broken safetensors header"),
        (b"[]", "broken safetensors header"),
        (b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}', "broken safetensors header"),
        (b'{"a":{"dtype":"F8_E5M2","shape":[4],"data_offsets":[0,4]}}', "numbers of the type F8_E5M2"),
        (b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', "lacks the tensor"),
    ],
)
def test_invalid_header_is_refused(folder, header, says):
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    assert says in refused(folder)


def test_unknown_tensor_is_refused_unless_it_is_a_rotary_buffer(folder):
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "model.layers.0.rotary_emb.inv_freq": torch.ones(8)}, folder / "model.safetensors")
    load(folder)
    save_file({**tensors, "model.layers.0.self_attn.q_proj.bias": torch.ones(128)}, folder / "model.safetensors")
    assert "which Qwen3ForCausalLM does not have" in refused(folder)


def test_weights_missing_from_a_model_of_transformers(tmp_path):
    folder = make("gpt2", tmp_path / "gpt2")
    tensors = load_file(folder / "model.safetensors")
    gone = "transformer.h.1.mlp.c_fc.weight"
    save_file({name: x for name, x in tensors.items() if name != gone}, folder / "model.safetensors", {"format": "pt"})
    assert f"lacks the tensor {gone}" in refused(folder)
    tensors[gone] = torch.ones(3, 3)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert f"another shape than config.json for the tensor {gone}" in refused(folder)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    assert "cut short" in refused(folder)


def test_weights_are_packed_from_the_file_as_from_memory(folder):
    tensors, from_file = load_file(folder / "model.safetensors"), packed(folder)
    model = load(folder)
    for name, target in model.targets().items():
        target.copy_(tensors[f"model.{name}"])
    model.product = choose("auto", CPU, torch.float32)
    model.pack()
    assert all(map(torch.equal, from_file, panels(model))) and len(from_file) > 5


def test_parts_in_several_files_are_packed_as_one(folder, source):
    shard(folder)
    assert all(map(torch.equal, packed(folder), packed(source)))


def test_file_truncated_during_packing_is_reported(folder, monkeypatch):
    path = folder / "model.safetensors"
    run = Packing.run

    def late(self: Packing) -> None:
        with path.open("r+b") as file:
            file.truncate(4096)
        run(self)

    monkeypatch.setattr(Packing, "run", late)
    with_kernels()
    opened = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read: it ends early"):
        load_model(EngineConfig(model=""), folder)
    assert len(os.listdir("/proc/self/fd")) == opened
