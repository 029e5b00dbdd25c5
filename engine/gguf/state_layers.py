"""Models with layers that keep states in GGUF files: Qwen3-Next, Qwen3.5 and LFM2."""

from __future__ import annotations

from typing import Any

from ..bounds import MAX_HEADS, MAX_LAYERS, MAX_SIZE
from ..types import ModelError
from .keys import Keys

LINEAR_ATTENTION = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
GROUPED_ATTENTION = LINEAR_ATTENTION | {  # of Qwen3-Next
    "ssm_in": "linear_attn.in_proj_qkvz",  # in older files, in place of attn_qkv and attn_gate
    "ssm_ba": "linear_attn.in_proj_ba",
}
SHORT_CONVOLUTIONS = {
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
}
CONVOLUTIONS = {"ssm_conv1d", "shortconv.conv"}  # [channels, taps] in files, [channels, 1, taps] in checkpoints
SIGMOID = 2  # as expert_gating_func


def qwen35(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    name, blocks, head_dim = keys.architecture, config["num_hidden_layers"], config["head_dim"]
    unused = keys.whole("nextn_predict_layers", blocks - 1, 0, minimum=0)
    interval = keys.whole("full_attention_interval", MAX_LAYERS, 4)
    listed = keys.flags("attention.recurrent_layers", blocks)
    linear = [(i + 1) % interval != 0 for i in range(blocks)] if listed is None else listed
    heads, inner = keys.whole("ssm.time_step_rank", MAX_HEADS), keys.whole("ssm.inner_size", MAX_SIZE)
    if inner % heads:
        raise ModelError(f"the GGUF file's {name}.ssm.inner_size of {inner} is not that of {heads} heads")
    return {
        "num_hidden_layers": blocks - unused,
        "num_nextn_predict_layers": unused,
        "layer_types": ["linear_attention" if each else "full_attention" for each in linear[: blocks - unused]],
        "linear_conv_kernel_dim": keys.number("ssm.conv_kernel"),
        "linear_num_key_heads": keys.number("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": keys.number("ssm.state_size"),
        "linear_value_head_dim": inner // heads,
        "linear_value_heads_tiled": True,
        "partial_rotary_factor": keys.whole("rope.dimension_count", head_dim, head_dim) / head_dim,
    }


def qwen35moe(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    return {
        **qwen35(keys, config),
        "num_experts": keys.number("expert_count"),
        "num_experts_per_tok": keys.number("expert_used_count"),
        "moe_intermediate_size": keys.number("expert_feed_forward_length"),
        "shared_expert_intermediate_size": keys.number("expert_shared_feed_forward_length"),
    }


def qwen3next(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    key_heads, name = keys.whole("ssm.group_count", MAX_HEADS), keys.architecture
    keys.whole("ssm.state_size", MAX_SIZE)
    found = qwen35moe(keys, config)
    if found["linear_num_value_heads"] % key_heads:
        raise ModelError(f"the GGUF file's {name}.ssm.time_step_rank is no multiple of {key_heads}")
    return {**found, "linear_value_heads_tiled": False, "norm_topk_prob": True}


def lfm2(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    if keys.number("attention.sliding_window", 0):
        raise ModelError("GGUF files of LFM2 models with sliding windows are not supported")
    heads = keys.by_layer("attention.head_count_kv", config["num_hidden_layers"])
    if {*heads} - {0, max(heads)}:
        raise ModelError(
            f"the GGUF file's {keys.architecture}.attention.head_count_kv differs among layers that have any"
        )
    return {
        "num_key_value_heads": max(heads),
        "layer_types": ["full_attention" if count else "conv" for count in heads],
        "conv_L_cache": keys.number("shortconv.l_cache"),
        "conv_bias": any(name.endswith(".shortconv.conv.bias") for name in keys.tensors),
        "block_auto_adjust_ff_dim": False,
    }


def lfm2moe(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    check_sigmoids(keys)
    return {
        **lfm2(keys, config),
        "num_experts": keys.number("expert_count"),
        "num_experts_per_tok": keys.number("expert_used_count"),
        "moe_intermediate_size": keys.number("expert_feed_forward_length"),
        "num_dense_layers": keys.whole("leading_dense_block_count", config["num_hidden_layers"], 0, minimum=0),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
        "norm_topk_prob": True,
        "use_expert_bias": True,
    }


def check_sigmoids(keys: Keys) -> None:
    """Raise ModelError unless the weights of experts are sigmoids."""
    if (gates := keys.number("expert_gating_func", SIGMOID)) != SIGMOID:
        raise ModelError(f"the GGUF file's {keys.architecture}.expert_gating_func must be {SIGMOID}, not {gates}")
