"""Writes a GGUF file's hyperparameters as a config.json, and its tensors' names as those of safetensors checkpoints."""

from __future__ import annotations

import re
import struct
from collections import Counter
from collections.abc import Mapping
from math import prod
from typing import Any

from ..types import ModelError
from .reader import PLAIN, TYPES, Model, TensorInfo

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
# llama.cpp rotates neighbouring elements for these, so the rows of each head's queries and keys are interleaved.
INTERLEAVED = {"llama"}
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
LAYER = re.compile(r"blk\.(\d{1,5})\.(\w+)\.(weight|bias)")
FACTORS = "rope_freqs.weight"  # divisors of the rotary frequencies, as Llama 3.1 has them


class _Keys:
    """The metadata of one architecture. Raises ModelError for a missing value or one of another type."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self.metadata = metadata
        name = metadata.get("general.architecture")
        if not isinstance(name, str):
            raise ModelError("the GGUF file names no architecture: it has no general.architecture")
        self.architecture = name

    def get(self, key: str) -> Any:
        return self.metadata.get(f"{self.architecture}.{key}")

    def number(self, key: str, default: float | None = None) -> Any:
        value = self.get(key)
        if isinstance(value, list) and value and all(each == value[0] for each in value):
            value = value[0]  # one for each layer
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int | float):
            state = "no" if value is None else "several values or no number as"
            raise ModelError(f"the GGUF file has {state} {self.architecture}.{key}")
        return value


def config_of(model: Model) -> dict[str, Any]:
    """Return the config.json of a model. Raises ModelError if the architecture is not supported."""
    keys, tensors = _Keys(model.metadata), model.tensors
    name = ARCHITECTURES.get(keys.architecture)
    if name is None:
        known = ", ".join(ARCHITECTURES)
        raise ModelError(
            f"GGUF files of the architecture {keys.architecture[:64]} are not supported; those of {known} are. "
            "Use the model's safetensors files"
        )
    if keys.number("expert_count", 0):
        raise ModelError("GGUF files of models with experts are not supported; use the model's safetensors files")
    heads, hidden = keys.number("attention.head_count"), keys.number("embedding_length")
    head_dim = keys.number("attention.key_length", hidden // heads if isinstance(heads, int) and heads > 0 else None)
    for key in ("rope.dimension_count", "attention.value_length"):
        if keys.number(key, head_dim) != head_dim:
            raise ModelError(f"the GGUF file's {key} differs from the size of a head, which is not supported")
    embedding = tensors.get("token_embd.weight")
    config = {
        "architectures": [name],
        "model_type": keys.architecture,
        "hidden_size": hidden,
        "intermediate_size": keys.number("feed_forward_length"),
        "num_hidden_layers": keys.number("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.number("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": keys.number("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": keys.number("rope.freq_base", 10000.0),
        "vocab_size": embedding.shape[0] if embedding else keys.number("vocab_size"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "hidden_act": "silu",
        "dtype": "float32" if _types(tensors) == {"F32"} else "bfloat16",
    }
    if window := keys.number("attention.sliding_window", 0):
        config |= {"architectures": ["MistralForCausalLM"], "sliding_window": window}
    if scaling := _scaling(keys, tensors, head_dim):
        config["rope_scaling"] = scaling
    if quantized := _types(tensors) - PLAIN:
        numbers: Counter[str] = Counter()
        for tensor in tensors.values():
            numbers[TYPES[tensor.type].name] += prod(tensor.shape)
        config["quantization_config"] = {"quant_method": "gguf", "numbers": numbers, "types": sorted(quantized)}
    return config


def checkpoint_names(model: Model) -> dict[str, tuple[TensorInfo, int]]:
    """Return each tensor by its name in a safetensors checkpoint, with the rows of a head if they are interleaved."""
    config = config_of(model)
    interleaved = config["head_dim"] if config["model_type"] in INTERLEAVED else 0
    named = {}
    for name, tensor in model.tensors.items():
        if name == FACTORS:
            continue
        found = LAYER.fullmatch(name)
        own, _, kind = name.rpartition(".")
        if found is not None and found[2] in LAYER_NAMES:
            own = f"model.layers.{found[1]}.{LAYER_NAMES[found[2]]}"
        else:
            own = NAMES.get(own, own)
        of_heads = found is not None and found[2] in ("attn_q", "attn_k")
        named[f"{own}.{kind}"] = tensor, interleaved if of_heads else 0
    return named


def _types(tensors: Mapping[str, TensorInfo]) -> set[str]:
    """Return the types of the matrices."""
    return {TYPES[tensor.type].name for tensor in tensors.values() if len(tensor.shape) > 1}


def _scaling(keys: _Keys, tensors: Mapping[str, TensorInfo], head_dim: int) -> dict[str, Any] | None:
    """Return the rope_scaling of config.json."""
    if FACTORS in tensors:
        factors = _floats(tensors[FACTORS], head_dim // 2)
        original = keys.number("context_length")
        return {
            "rope_type": "longrope",
            "short_factor": factors,
            "long_factor": factors,
            "attention_factor": 1.0,
            "original_max_position_embeddings": original,
        }
    kind = keys.get("rope.scaling.type")
    if kind in (None, "none"):
        return None
    if kind not in ("linear", "yarn"):
        raise ModelError(f"the GGUF file's rotary scaling {str(kind)[:64]!r} is not supported")
    scaling = {"rope_type": kind, "factor": keys.number("rope.scaling.factor")}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = keys.number("rope.scaling.original_context_length")
    return scaling


def _floats(tensor: TensorInfo, count: int) -> list[float]:
    if TYPES[tensor.type].name != "F32" or tensor.shape != (count,):
        raise ModelError(f"the GGUF file's {FACTORS} is not a list of {count} numbers in F32")
    with tensor.file.open("rb") as file:
        file.seek(tensor.offset)
        return list(struct.unpack(f"<{count}f", file.read(4 * count)))
