"""The text part of models that also read images."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import EngineConfig, ModelError, models, plan
from tests.engine.test_models import Bench, dtype_of, limit_of, load, prompt, whole
from tests.models import PARTS, corrections, make, oracle


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


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"text_config": [1]}, "config.json: text_config must be an object"),
        ({"text_config": None}, "config.json: text_config must be an object"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized weights of Mistral3ForCond.* are not supported"),
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
