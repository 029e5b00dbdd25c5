"""GGUF files of each architecture, with names and numbers as the gguf package and llama.cpp's converter have them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from engine import EngineConfig, ModelError
from engine.gguf.folder import folder_of
from engine.hub import fetch
from engine.models.decoder import Decoder
from tests.engine.test_exact import serve
from tests.engine.test_gguf import WORDS, cache  # noqa: F401  # a fixture
from tests.engine.test_kernels import needs_library
from tests.engine.test_models import Bench, oracle, whole
from tests.models import FLOAT32_ONLY, MAX_LEN, config, load_model, make, prompt

# The models of tests/models.py, and their architecture in GGUF files.
ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "phi3": "phi3",
    "phi3-partial": "phi3",
    "phi3-longrope": "phi3",
    "smollm3": "smollm3",
    "granite": "granite",
    "olmo2": "olmo2",
    "olmo3": "olmo2",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "gpt_oss": "gpt-oss",
    "glm4_moe": "glm4moe",
    "glm4_moe-groups": "glm4moe",
}
INTERLEAVED = {"llama", "smollm3", "granite"}
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+\.(?:weight|bias))")


def settings_of(model: Any) -> dict[str, Any]:
    """Return the values that llama.cpp's converter writes for a config, by the name of the writer's method."""
    found = {
        "context_length": MAX_LEN,
        "embedding_length": model.hidden_size,
        "block_count": model.num_hidden_layers,
        "feed_forward_length": model.intermediate_size,
        "head_count": model.num_attention_heads,
        "head_count_kv": model.num_key_value_heads,
        "layer_norm_rms_eps": model.rms_norm_eps,
        "key_length": getattr(model, "head_dim", None),
        "value_length": getattr(model, "head_dim", None),
        "sliding_window": getattr(model, "sliding_window", None),
        "attention_scale": getattr(model, "attention_multiplier", None),
        "embedding_scale": getattr(model, "embedding_multiplier", None),
        "residual_scale": getattr(model, "residual_multiplier", None),
        "logit_scale": getattr(model, "logits_scaling", None),
        "attn_logit_softcapping": getattr(model, "attn_logit_softcapping", None),
        "final_logit_softcapping": getattr(model, "final_logit_softcapping", None),
        "expert_count": getattr(model, "num_local_experts", None) or getattr(model, "num_experts", None),
        "expert_used_count": getattr(model, "num_experts_per_tok", None),
        "expert_feed_forward_length": getattr(model, "moe_intermediate_size", None),
    }
    if model.model_type == "glm4_moe":
        found |= {
            "expert_count": model.n_routed_experts,
            "expert_shared_count": model.n_shared_experts,
            "expert_weights_scale": model.routed_scaling_factor,
            "expert_weights_norm": model.norm_topk_prob,
            "expert_gating_func": gguf.ExpertGatingFuncType.SIGMOID,
            "leading_dense_block_count": model.first_k_dense_replace,
            "expert_group_count": model.n_group,
            "expert_group_used_count": model.topk_group,
            "rope_dimension_count": model.head_dim // 2,
        }
    if model.model_type == "gpt_oss":
        found |= {
            "expert_feed_forward_length": model.intermediate_size,
            "rope_scaling_type": gguf.RopeScalingType.YARN,
            "rope_scaling_factor": model.rope_parameters["factor"],
            "rope_scaling_orig_ctx_len": model.rope_parameters["original_max_position_embeddings"],
        }
    if model.model_type == "olmo3":
        found["sliding_window_pattern"] = [kind == "sliding_attention" for kind in model.layer_types]
    return {key: value for key, value in found.items() if value is not None}


def write(
    folder: Path,
    path: Path,
    name: str,
    kind: Type = Type.F32,
    *,
    tensors: dict[str, tuple[int, ...]] | None = None,
    **changed: Any,
) -> Path:
    """Convert the model of a folder as llama.cpp does. `tensors`: names and shapes of more tensors."""
    from transformers import AutoModelForCausalLM

    architecture, model = ARCHITECTURES[name], config(name)
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {**settings_of(model), **changed}.items():
        getattr(writer, f"add_{key}")(value)
    rope = model.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope).get("rope_theta", 10000.0))
    head_dim = getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads
    if architecture == "phi3":
        writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
        if "long_factor" in rope:
            writer.add_rope_scaling_orig_ctx_len(model.original_max_position_embeddings)
            for length in ("long", "short"):
                writer.add_tensor(f"rope_factors_{length}.weight", np.array(rope[f"{length}_factor"], np.float32))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(WORDS)
    writer.add_token_merges([])
    writer.add_eos_token_id(7)
    known = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    names = gguf.get_tensor_name_map(known, model.num_hidden_layers)
    experts: dict[str, list[np.ndarray]] = {}
    for own, numbers in AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict().items():
        if own == "lm_head.weight" and model.tie_word_embeddings:
            continue
        for part_name, plain in parts(own, numbers, alternating=model.model_type == "gpt_oss"):
            part = plain
            found = EXPERT.fullmatch(part_name)
            if found is not None:
                experts.setdefault(f"{found[1]}.{found[3]}", []).append(part.numpy())
                continue
            if architecture in INTERLEAVED and part_name.endswith(("q_proj.weight", "k_proj.weight")):
                part = part.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)
            if architecture.startswith("gemma") and part_name.endswith("norm.weight"):
                part = part + 1
            named = names.get_name(part_name.replace("_correction_bias", "_correction.bias"), (".weight", ".bias"))
            add(writer, f"{named}.weight" if own.endswith("sinks") else named, part.numpy(), kind)
    for own, each in experts.items():
        add(writer, names.get_name(own, (".weight", ".bias")), np.stack(each), kind)
    for own, shape in (tensors or {}).items():
        add(writer, own, np.zeros(shape), Type.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def parts(name: str, numbers: torch.Tensor, *, alternating: bool) -> list[tuple[str, torch.Tensor]]:
    """Return a tensor of transformers' model as files have it: one for each expert. `alternating`: gpt-oss's layout."""
    start, _, own = name.partition(".experts.")
    last, _, _ = own.partition("_proj")
    kind = "bias" if own.endswith("_bias") else "weight"
    if not own:
        return [(name, numbers)]
    if alternating and kind == "weight":
        numbers = numbers.transpose(1, 2)
    halves = {last: numbers}
    if last == "gate_up":
        gate, up = (numbers[:, ::2], numbers[:, 1::2]) if alternating else numbers.chunk(2, dim=1)
        halves = {"gate": gate, "up": up}
    return [
        (f"{start}.experts.{index}.{half}_proj.{kind}", expert)
        for half, each in halves.items()
        for index, expert in enumerate(each)
    ]


def add(writer: gguf.GGUFWriter, name: str, numbers: np.ndarray, kind: Type) -> None:
    if kind == Type.F32 or numbers.ndim == 1 or name.endswith("bias") or numbers.shape[-1] % 32:
        writer.add_tensor(name, np.ascontiguousarray(numbers, dtype=np.float32))
    else:
        writer.add_tensor(name, gguf.quantize(np.ascontiguousarray(numbers), kind), raw_dtype=kind)


def made(name: str, folder: Path) -> Path:
    make(name, folder, dtype=torch.float32)
    if name.startswith("gemma"):  # files do not have this value, which is the size of a head
        source = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(source | {"query_pre_attn_scalar": source["head_dim"]}))
    return folder


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_are_those_of_the_model_that_was_converted(tmp_path, name):
    folder = made(name, tmp_path / "model")
    path = write(folder, tmp_path / "model.gguf", name)
    model = load_model(EngineConfig(model=str(path), dtype="float32", max_len=64), fetch(str(path), weights=True).path)
    assert isinstance(model, Decoder)
    ids = prompt(40, seed=1)
    # transformers computes experts in float32 at most.
    want = whole(oracle(folder, torch.float32 if name in FLOAT32_ONLY else torch.float64), ids)
    got = Bench(model).step({0: ids})[0]
    assert ((got.double() - want).abs().max() / want.abs().max()).item() < 1e-4


@needs_library
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("mixtral", Type.Q8_0),
        ("qwen3_moe", Type.Q8_0),
        ("gpt_oss", Type.MXFP4),
        ("glm4_moe", Type.Q8_0),
        ("phi3", Type.Q8_0),
        ("gemma3_text", Type.Q8_0),
        ("olmo2", Type.Q8_0),
    ],
)
async def test_blocks_are_computed_with_and_have_the_same_bits_alone_and_together(tmp_path, name, kind):
    path = write(made(name, tmp_path / "model"), tmp_path / "model.gguf", name, kind)
    base = {"model": str(path), "device": "cpu", "num_blocks": 64, "max_seqs": 8}
    alone, exact, _ = await serve(EngineConfig(**base, prefix_caching=False, threads=1), together=False)
    assert exact and len(alone) == 8
    found, *_ = await serve(EngineConfig(**base, max_batched_tokens=9, threads=2), together=True)
    assert found == alone


def test_flags_of_another_number_of_layers_get_a_sentence(tmp_path):
    folder = made("olmo3", tmp_path / "model")
    path = write(folder, tmp_path / "model.gguf", "olmo3", sliding_window_pattern=[True])
    with pytest.raises(ModelError, match=r"olmo2.attention.sliding_window_pattern is not a list of 5 flags"):
        folder_of(path)


def test_layers_that_predict_further_tokens_are_not_read(tmp_path):
    """llama.cpp's converter counts them as layers."""
    path = write(
        made("glm4_moe", tmp_path / "model"),
        tmp_path / "model.gguf",
        "glm4_moe",
        nextn_predict_layers=1,
        block_count=4,
        tensors={"blk.3.nextn.eh_proj.weight": (2, 2), "blk.3.attn_norm.weight": (64,)},
    )
    model = load_model(EngineConfig(model=str(path), dtype="float32"), fetch(str(path), weights=True).path)
    assert len(model.spec.layers) == 3


def test_biases_of_experts_in_blocks_get_a_sentence(tmp_path):
    path = write(made("gpt_oss", tmp_path / "model"), tmp_path / "model.gguf", "gpt_oss")
    name = b"blk.0.ffn_gate_exps.bias"
    data = bytearray(path.read_bytes())
    at = data.index(name) + len(name) + 4 + 2 * 8  # after the number of dimensions and their sizes
    data[at : at + 4] = int(Type.Q8_0).to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(ModelError, match="biases of experts are in Q8_0, which is not supported"):
        folder_of(path)


def test_gates_of_another_function_than_the_sigmoid_get_a_sentence(tmp_path):
    folder, function = made("glm4_moe", tmp_path / "model"), gguf.ExpertGatingFuncType.SOFTMAX
    path = write(folder, tmp_path / "model.gguf", "glm4_moe", expert_gating_func=function)
    with pytest.raises(ModelError, match=r"glm4moe.expert_gating_func must be 2, not 1"):
        folder_of(path)


def test_experts_of_another_architecture_get_a_sentence(tmp_path):
    path = write(made("qwen2", tmp_path / "model"), tmp_path / "model.gguf", "qwen2", expert_count=4)
    with pytest.raises(ModelError, match="of the architecture qwen2 with experts are not supported"):
        folder_of(path)
