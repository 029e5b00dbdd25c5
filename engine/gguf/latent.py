"""Models with multi-head latent attention in GGUF files, as keys of config.json and names of tensors."""

from __future__ import annotations

from typing import Any

from ..bounds import MAX_HEADS
from ..types import ModelError
from .keys import Keys
from .names import LAYER_NAMES, QWEN_EXPERTS, SHARED_EXPERTS
from .scaling import LOG_MULTIPLIER, ORIGINAL_LENGTH, longrope
from .state_layers import SIGMOID

NAMES = (
    LAYER_NAMES
    | QWEN_EXPERTS
    | SHARED_EXPERTS
    | {
        "attn_q_a": "self_attn.q_a_proj",
        "attn_q_a_norm": "self_attn.q_a_layernorm",
        "attn_q_b": "self_attn.q_b_proj",
        "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
        "attn_kv_a_norm": "self_attn.kv_a_layernorm",
        "attn_kv_b": "self_attn.kv_b_proj",
        "attn_k_b": "self_attn.k_b_proj",
        "attn_v_b": "self_attn.v_b_proj",
        "ffn_gate_inp": "mlp.gate",
    }
)
# The projections of latents: for each head a tensor of its own, or one of all, which is dequantized when it is read.
BY_HEAD, TOGETHER = ("attn_k_b", "attn_v_b"), "attn_kv_b"
SOFTMAX = 1  # the number of the function from which the weights of experts come
# llama.cpp writes this number of mscale_all_dim in place of 1.
LOG_SCALE = 0.1


def deepseek2(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of config.json. Older files have keys and values of each head in place of latents' sizes, and
    one tensor in place of k_b and v_b."""
    found = _sizes(keys, config)
    name = "Youtu"
    if experts := keys.number("expert_count", 0):
        name = "DeepseekV3" if _has_sigmoids(keys) else "DeepseekV2"
        found |= _experts(keys, config, experts)
        if name == "DeepseekV2":
            found["topk_method"] = "group_limited_greedy" if found["n_group"] > 1 else "greedy"
            if found["norm_topk_prob"]:
                raise ModelError(
                    "the GGUF file's experts have weights of a softmax, divided by their sum, which is not supported"
                )
    model_types = {"Youtu": "youtu", "DeepseekV3": "deepseek_v3", "DeepseekV2": "deepseek_v2"}
    return {
        **found,
        "architectures": [f"{name}Gguf" if _in_two(keys) else f"{name}ForCausalLM"],
        "model_type": model_types[name],
    }


def mistral4(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of config.json."""
    if _has_sigmoids(keys):
        raise ModelError(f"the GGUF file's {keys.architecture} must have a softmax over its experts")
    found = _sizes(keys, config) | _experts(keys, config, keys.number("expert_count"))
    if found["n_group"] != 1:
        raise ModelError(f"the GGUF file's {keys.architecture} has groups of experts, which is not supported")
    # Without rope_scaling the family's default would apply, which is YaRN.
    scaling = found.get("rope_scaling") or config.get("rope_scaling") or {"rope_type": "default"}
    if beta := keys.number("attention.temperature_scale", 0):
        original = keys.number(ORIGINAL_LENGTH)
        scaling = scaling | {"llama_4_scaling_beta": beta, "original_max_position_embeddings": original}
    return {
        **found,
        "rope_scaling": scaling,
        "architectures": ["Mistral4Gguf" if _in_two(keys) else "Mistral4ForCausalLM"],
    }


def minicpm3(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of config.json. The scales are the defaults, as in llama.cpp: files do not have them."""
    heads, sizes = config["num_attention_heads"], _sizes(keys, config)
    return {
        **sizes,
        "v_head_dim": config["hidden_size"] // heads,
        **longrope(keys, sizes["qk_rope_head_dim"]),
    }


def _in_two(keys: Keys) -> bool:
    """Return whether keys and values of each head have tensors of their own."""
    return any(name.endswith(".attn_k_b.weight") for name in keys.tensors)


def _sizes(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of config.json for latents and their rotary scaling."""
    rotated = keys.whole("rope.dimension_count", MAX_HEADS)
    key = keys.whole("attention.key_length_mla", MAX_HEADS, config["head_dim"])
    value = keys.whole("attention.value_length_mla", MAX_HEADS, keys.number("attention.value_length", key))
    if key <= rotated:
        raise ModelError(f"the GGUF file's {keys.architecture} has {rotated} of {key} numbers of a key rotated")
    found: dict[str, Any] = {
        "q_lora_rank": keys.number("attention.q_lora_rank", 0) or None,
        "kv_lora_rank": keys.number("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key - rotated,
        "v_head_dim": value,
        "num_key_value_heads": config["num_attention_heads"],
    }
    scaling = config.get("rope_scaling")
    if scaling is not None and scaling["rope_type"] == "yarn":
        both = keys.number(LOG_MULTIPLIER, 0) / LOG_SCALE
        found["rope_scaling"] = scaling | ({"mscale": both, "mscale_all_dim": both} if both else {})
    return found


def _has_sigmoids(keys: Keys) -> bool:
    """Return whether the weights of experts are sigmoids, not a softmax. Older files do not say it."""
    corrects = any(name.endswith(".exp_probs_b.bias") for name in keys.tensors)
    function = keys.number("expert_gating_func", SIGMOID if corrects else SOFTMAX)
    if function not in (SIGMOID, SOFTMAX):
        raise ModelError(
            f"the GGUF file's {keys.architecture}.expert_gating_func must be {SOFTMAX} or {SIGMOID}, not {function}"
        )
    return bool(function == SIGMOID)


def _experts(keys: Keys, config: dict[str, Any], count: int) -> dict[str, Any]:
    unused = keys.number("nextn_predict_layers", 0)
    return {
        "num_hidden_layers": config["num_hidden_layers"] - unused,
        "num_nextn_predict_layers": unused,
        "n_routed_experts": count,
        "num_experts_per_tok": keys.number("expert_used_count"),
        "moe_intermediate_size": keys.number("expert_feed_forward_length"),
        "n_shared_experts": keys.number("expert_shared_count"),
        "first_k_dense_replace": keys.number("leading_dense_block_count", 0),
        "n_group": keys.number("expert_group_count", 1),
        "topk_group": keys.number("expert_group_used_count", 1),
        "routed_scaling_factor": keys.number("expert_weights_scale", 0) or 1.0,
        "norm_topk_prob": keys.get("expert_weights_norm") is True,
    }
