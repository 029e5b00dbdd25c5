"""Granite 3 and 4 in GGUF files."""

from __future__ import annotations

from typing import Any

from ..bounds import MAX_HEADS, MAX_SIZE
from ..types import ModelError
from .keys import Keys

MAMBA = {
    "ssm_in": "mamba.in_proj",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj",
}
MAMBA_PARAMETERS = {
    "ssm_a": "mamba.A_log",
    "ssm_d": "mamba.D",
    "ssm_dt.bias": "mamba.dt_bias",
}
ROTATES = "rope.scaling.finetuned"  # llama.cpp's switch of the rotary embedding of files with Mamba layers


def granite(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "attention_multiplier": keys.number("attention.scale", 0) or config["head_dim"] ** -0.5,
        "embedding_multiplier": keys.number("embedding_scale", 1.0),
        "residual_multiplier": keys.number("residual_scale", 1.0),
        "logits_scaling": keys.number("logit_scale", 1.0),
    }


def granitemoe(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    return {
        **granite(keys, config),
        "shared_intermediate_size": keys.number("expert_shared_feed_forward_length", 0),
        "num_local_experts": keys.number("expert_count"),
        "num_experts_per_tok": keys.number("expert_used_count"),
    }


def granitehybrid(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of config.json of a Granite 4.0 with Mamba layers, which have no heads of keys."""
    name, hidden = keys.architecture, config["hidden_size"]
    kv_heads = keys.by_layer("attention.head_count_kv", config["num_hidden_layers"])
    if {*kv_heads} - {0, max(kv_heads)}:
        raise ModelError(f"the GGUF file's {name}.attention.head_count_kv differs among layers that have any")
    heads, inner = keys.whole("ssm.time_step_rank", MAX_HEADS), keys.whole("ssm.inner_size", MAX_SIZE)
    if inner % heads:
        raise ModelError(f"the GGUF file's {name}.ssm.inner_size of {inner} is not that of {heads} heads")
    if inner % hidden:
        raise ModelError(f"the GGUF file's {name}.ssm.inner_size of {inner} is no multiple of {hidden}")
    found = {
        **granite(keys, config),
        "num_key_value_heads": max(kv_heads),
        "layer_types": ["attention" if count else "mamba" for count in kv_heads],
        "position_embedding_type": "nope" if keys.get(ROTATES) is False else "rope",
        "shared_intermediate_size": keys.number("expert_shared_feed_forward_length", config["intermediate_size"]),
        "num_local_experts": keys.number("expert_count", 0),
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_expand": inner // hidden,
        "mamba_d_state": keys.number("ssm.state_size"),
        "mamba_n_groups": keys.number("ssm.group_count"),
        "mamba_d_conv": keys.number("ssm.conv_kernel"),
        "mamba_conv_bias": any(each.endswith(".ssm_conv1d.bias") for each in keys.tensors),
        "mamba_proj_bias": any(each.endswith(".ssm_in.bias") for each in keys.tensors),
    }
    if found["num_local_experts"]:
        found["num_experts_per_tok"] = keys.number("expert_used_count")
    return found
