"""The settings of Gemma 2, 3 and 4 in GGUF files."""

from __future__ import annotations

from typing import Any

from ..bounds import MAX_HEADS
from ..types import ModelError
from .keys import FACTORS, Keys, windows_of

LAYERS_27B = {46, 62}  # their scores are scaled by the width of all heads, which no key says
UNROTATED = 1e20  # divisor of a rotary frequency from which on a number is not rotated


def _gemma(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    layers = config["num_hidden_layers"]
    wide = layers in LAYERS_27B
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": config["hidden_size"] // config["num_attention_heads"] if wide else config["head_dim"],
    }


def gemma(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    return {"hidden_act": "gelu_pytorch_tanh"}


def gemma2(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    windows = keys.windowed(config["num_hidden_layers"], 2)
    return {
        **_gemma(keys, config),
        **windows_of(keys.number("attention.sliding_window", 4096), windows),
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0),
    }


def gemma3(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    window = keys.number("attention.sliding_window", 0)
    windows = [window > 0 and has_window for has_window in keys.windowed(config["num_hidden_layers"], 6)]
    return {
        **_gemma(keys, config),
        **windows_of(window or config["max_position_embeddings"], windows),
        "rope_local_base_freq": keys.number("rope.freq_base_swa", 10000.0),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 0) or None,
        "attn_logit_softcapping": None,
    }


def gemma4(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of config.json of a Gemma 4, whose layers without a window have heads of another size."""
    layers, name = config["num_hidden_layers"], keys.architecture
    windowed = keys.flags("attention.sliding_window_pattern", layers)
    if windowed is None:
        raise ModelError(f"the GGUF file has no {name}.attention.sliding_window_pattern")
    heads = keys.by_layer("attention.head_count_kv", layers, config["num_attention_heads"])
    head_dim = keys.whole("attention.key_length_swa", MAX_HEADS)
    for key in ("rope.dimension_count_swa", "attention.value_length_swa"):
        if keys.number(key, head_dim) != head_dim:
            raise ModelError(f"the GGUF file's {name}.{key} differs from {name}.attention.key_length_swa")
    inner = keys.by_layer("feed_forward_length", layers)
    shared = keys.whole("attention.shared_kv_layers", layers - 1, 0, minimum=0)
    own = {count for count, has_window in zip(heads, windowed, strict=True) if has_window}
    if len(own) > 1:
        raise ModelError(f"the GGUF file's {name}.attention.head_count_kv differs among layers with a window")
    is_wider = inner[-1] == 2 * inner[0]
    if inner != [inner[0]] * (layers - shared) + [(1 + is_wider) * inner[0]] * shared:
        raise ModelError(f"the GGUF file's {name}.feed_forward_length differs among layers in a way of no Gemma 4")
    count, table = keys.number("expert_count", 0), keys.tensors.get("per_layer_token_embd.weight")
    found = {
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": head_dim,
        "num_key_value_heads": min(own, default=heads[0]),
        "per_layer_config": {
            str(layer): {"head_dim": config["head_dim"], "num_key_value_heads": heads[layer]}
            for layer in range(layers)
            if not windowed[layer]
        },
        "attention_k_eq_v": any(
            not windowed[layer] and f"blk.{layer}.attn_v.weight" not in keys.tensors for layer in range(layers - shared)
        ),
        "num_kv_shared_layers": shared,
        "use_double_wide_mlp": is_wider,
        "hidden_size_per_layer_input": keys.number("embedding_length_per_layer_input", 0),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 0) or None,
        "rope_scaling": None,
        "rope_parameters": {
            "full_attention": {"rope_theta": config["rope_theta"], **_rotated_part(keys, config["head_dim"])},
            "sliding_attention": {"rope_theta": keys.number("rope.freq_base_swa", 10000.0)},
        },
        **windows_of(keys.number("attention.sliding_window"), windowed),
    }
    if table is not None:
        found["vocab_size_per_layer_input"] = table.shape[0]
    if count:
        found |= {
            "enable_moe_block": True,
            "num_experts": count,
            "top_k_experts": keys.number("expert_used_count"),
            "moe_intermediate_size": keys.number("expert_feed_forward_length"),
        }
    return found


def _rotated_part(keys: Keys, head_dim: int) -> dict[str, Any]:
    """Return the rotary parameters that say which part of each head is rotated.

    A file has a divisor for each frequency: 1 for those of the rotated part, and a huge number for the others.
    """
    factors = keys.floats(FACTORS, head_dim // 2)
    rotated = factors.count(1.0)
    ends = all(factor > UNROTATED for factor in factors[rotated:])
    if not rotated or factors[:rotated] != [1.0] * rotated or not ends:
        raise ModelError(f"the GGUF file's {FACTORS} is not that of a Gemma 4")
    return {"rope_type": "proportional", "partial_rotary_factor": 2 * rotated / head_dim}
