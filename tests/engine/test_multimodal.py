"""The text part of models that also read images."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import EngineConfig, ModelError, models, plan
from tests.engine.test_models import Bench, dtype_of, limit_of, load, prompt, whole
from tests.models import PARTS, corrections, load_model, make, oracle
from tests.quantized import Kind, fp8, gptq, pack_quantized


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("multimodal")


def copied(folder: Path, to: Path, place: str, head: str = "lm_head.weight") -> Path:
    """Return a copy of a folder with the decoder's tensors in another place."""
    tensors = load_file(folder / "model.safetensors")
    renamed = {}
    for name, tensor in tensors.items():
        _, found, rest = name.partition("language_model.")
        decoders = place + rest.removeprefix("model.") if found else name
        renamed[head if "lm_head" in name else decoders] = tensor
    to.mkdir()
    save_file(renamed, to / "model.safetensors", metadata={"format": "pt"})
    (to / "config.json").write_text((folder / "config.json").read_text())
    return to


@pytest.mark.parametrize("name", PARTS)
def test_logits_of_the_text_part_equal_transformers(home, name):
    dtype = dtype_of(name)
    folder = make(name, home / name, dtype=dtype)
    model, reference = load(folder, dtype), oracle(folder, dtype)
    assert model.spec.implementation == "native" and model.spec.architecture.endswith("ForConditionalGeneration")
    text = [value for place, value in reference.named_parameters() if "vis" not in place and "projector" not in place]
    text += corrections(reference)
    assert model.num_params == model.spec.num_params == sum(map(torch.Tensor.numel, text))
    for length in (1, 40):
        want = whole(reference, prompt(length))
        assert (Bench(model).step({0: prompt(length)})[0] - want).abs().max() < limit_of(name)


@pytest.mark.parametrize("name", PARTS)
def test_both_places_of_the_tensors_are_found(home, name, tmp_path):
    folder = make(name, home / name, dtype=dtype_of(name))
    want = Bench(load(folder, torch.float64)).step({0: prompt(9)})[0]
    places = [("model.language_model.", "lm_head.weight"), ("language_model.model.", "language_model.lm_head.weight")]
    for number, place in enumerate(places):
        found = Bench(load(copied(folder, tmp_path / str(number), *place), torch.float64)).step({0: prompt(9)})[0]
        assert torch.equal(found, want)


def test_the_banner_says_that_images_are_refused(home):
    folder = make("gemma3", home / "gemma3", dtype=torch.float64)
    told = plan.plan(EngineConfig(model=str(folder), device="cpu", dtype="float32"))
    says = "of Gemma3ForConditionalGeneration the text part is served: requests with images are refused"
    assert says in told["notes"]


def test_tensors_of_the_decoder_that_it_does_not_have_are_refused(home, tmp_path):
    folder = copied(
        make("qwen3_vl", home / "qwen3_vl", dtype=torch.float64), tmp_path / "more", "model.language_model."
    )
    tensors = load_file(folder / "model.safetensors")
    for name in ("model.language_model.layers.9.x.weight", "language_model.lm_head.weight"):
        save_file({**tensors, name: torch.zeros(1)}, folder / "model.safetensors")
        with pytest.raises(
            ModelError, match=f"holds the tensor {name}, which Qwen3VLForConditionalGeneration does not"
        ):
            load(folder, torch.float64)


def quantized(folder: Path, to: Path, kind: Kind, plain: str, *, in_text: bool = False) -> tuple[Path, Path]:
    """Write two copies of a folder: with the projections of the decoder quantized, but for those whose name has
    `plain`, and with the numbers that these make. `in_text`: quantization_config is in text_config."""
    tensors = load_file(folder / "model.safetensors")
    stored, numbers = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        module, _, last = name.rpartition(".")
        if "language_model." in name and module.endswith("_proj") and last == "weight" and plain not in name:
            parts, exact = kind.store(tensor.float())
            del stored[name]
            stored |= {f"{module}.{part}": each.contiguous() for part, each in parts.items()}
            numbers[name] = exact.float()
    source = json.loads((folder / "config.json").read_text())
    changed = {**source, "quantization_config": kind.config}
    if in_text:
        changed = {**source, "text_config": {**source["text_config"], "quantization_config": kind.config}}
    for name, config, state in (("quantized", changed, stored), ("plain", source, numbers)):
        (to / name).mkdir()
        (to / name / "config.json").write_text(json.dumps(config))
        save_file(state, to / name / "model.safetensors", metadata={"format": "pt"})
    return to / "quantized", to / "plain"


def with_scale_of_activations() -> Kind:
    """Return fp8 as the checkpoints of Ministral 3 have it."""
    kind = fp8("tensor")

    def store(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        parts, exact = kind.store(weight)
        names = {"weight": "weight", "weight_scale": "weight_scale_inv"}
        return {names[part]: each for part, each in parts.items()} | {"activation_scale": torch.ones(())}, exact

    config = {"activation_scheme": "static", "weight_block_size": None}
    return Kind(kind.config | config | {"modules_to_not_convert": ["model.vision_tower", "lm_head"]}, store, None)


PACKED = pack_quantized(4, 32, packed="Q4_0")
# The names of plain modules are those of the checkpoint: beside the decoder's there are others with the same ending.
PLAIN_DOWN = {"ignore": ["re:.*vision.*", "lm_head", "model.language_model.layers.0.mlp.down_proj"]}
GPTQ = gptq(size=32, packed="Q4_0")
MODULES = {
    "modules_in_block_to_quantize": [[f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down", "out")]]
}
QUANTIZED = {
    "fp8 of Ministral 3": ("mistral3-ministral", with_scale_of_activations(), "vision"),
    "compressed-tensors": ("gemma3", Kind(PACKED.config | PLAIN_DOWN, PACKED.store, "Q4_0"), "layers.0.mlp.down_proj"),
    "gptq": ("qwen3_5", Kind(GPTQ.config | MODULES, GPTQ.store, "Q4_0"), "vision"),
}


@pytest.mark.parametrize("name", QUANTIZED)
def test_the_text_part_may_be_quantized(home, tmp_path, name):
    source, kind, plain = QUANTIZED[name]
    folder = make(source, home / f"{source}-32", dtype=torch.float32)
    coded, numbers = quantized(folder, tmp_path, kind, plain)
    settings = EngineConfig(model="", dtype="float32", cpu_isa="torch")
    found, want = (load_model(settings, each) for each in (coded, numbers))
    planned = models.fit(models.describe(coded, settings), settings, torch.device("cpu"))
    assert found.spec.dequantized == planned.dequantized > 0
    difference = Bench(found).step({0: prompt(9)})[0] - Bench(want).step({0: prompt(9)})[0]
    assert difference.abs().max() < 1e-4


@pytest.mark.parametrize("ignored", [".*out_proj", ".*w2", ".*down_proj"])
def test_modules_of_the_text_part_are_named_as_in_the_files(tmp_path, ignored):
    alone = make("lfm2", tmp_path / "alone", dtype=torch.float32)
    source = json.loads((alone / "config.json").read_text())
    settings = {"quantization_config": PACKED.config | {"ignore": ["lm_head", f"re:{ignored}"]}}
    (alone / "config.json").write_text(json.dumps(source | settings))
    stored = {}
    for name, tensor in load_file(alone / "model.safetensors").items():
        module = name.replace("model.", "model.language_model.").removesuffix(".weight")
        is_linear = tensor.dim() == 2 and "embed_tokens" not in name
        parts = PACKED.store(tensor)[0] if is_linear and not re.match(ignored, module) else {"weight": tensor}
        stored |= {f"{module}.{part}": each.contiguous() for part, each in parts.items()}
    part = tmp_path / "part"
    part.mkdir()
    save_file(stored, part / "model.safetensors")
    whole = {"architectures": ["Lfm2VlForConditionalGeneration"], "text_config": source, **settings}
    (part / "config.json").write_text(json.dumps(whole))
    config = EngineConfig(model="")
    in_blocks = models.describe(part, config).in_blocks
    assert in_blocks == models.examine(part, config)[0].in_blocks == models.describe(alone, config).in_blocks != {}


def test_the_text_part_may_have_the_settings_of_quantization(home, tmp_path):
    folder = make("gemma3", home / "gemma3-32", dtype=torch.float32)
    coded, _ = quantized(folder, tmp_path, PACKED, "vision", in_text=True)
    assert models.examine(coded, EngineConfig(model=""))[0].method == "compressed-tensors"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"text_config": [1]}, "config.json: text_config must be an object"),
        ({"text_config": None}, "config.json: text_config must be an object"),
        ({"quantization_config": {"quant_method": "quanto"}}, "asks for quanto quantization, which is not supported"),
    ],
)
def test_configurations_that_cannot_be_used_are_refused(home, tmp_path, changes, says):
    source = json.loads((make("mistral3", home / "mistral3", dtype=torch.float64) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**source, **changes}))
    with pytest.raises(ModelError, match=says):
        models.describe(tmp_path, EngineConfig(model=""))


def test_keys_that_checkpoints_of_gemma3_leave_out_have_defaults(tmp_path):
    text = {"model_type": "gemma3_text", "num_hidden_layers": 34, "sliding_window": 1024}
    source = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text, "torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(source))
    spec = models.describe(tmp_path, EngineConfig(model=""))
    assert spec.dtype == torch.bfloat16 and spec.vocab_size == 262208 and spec.hidden_size == 2304
    assert {layer.window for layer in spec.layers} == {1024, None} and spec.layers[0].num_heads == 8
