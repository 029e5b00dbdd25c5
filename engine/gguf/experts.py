"""The experts of some models in GGUF files, as keys of config.json."""

from __future__ import annotations

from typing import Any

from ..types import ModelError
from .keys import Keys, windows_of
from .state_layers import check_sigmoids

CORRECTION = {"exp_probs_b.bias": "block_sparse_moe.gate.e_score_correction_bias"}


def ernie_moe(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    has_shared = any(name.endswith(".ffn_up_shexp.weight") for name in keys.tensors)
    return {
        "moe_num_experts": keys.number("expert_count"),
        "moe_k": keys.number("expert_used_count"),
        "moe_intermediate_size": keys.number("expert_feed_forward_length"),
        "moe_num_shared_experts": keys.number("expert_shared_count") if has_shared else 0,
        "moe_layer_start_index": keys.number("leading_dense_block_count", 0),
        "moe_layer_interval": keys.number("interleave_moe_layer_step"),
    }


def minimax(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    check_sigmoids(keys)
    return {
        "num_local_experts": keys.number("expert_count"),
        "num_experts_per_tok": keys.number("expert_used_count"),
        "intermediate_size": keys.number("expert_feed_forward_length"),
        "rotary_dim": keys.whole("rope.dimension_count", config["head_dim"], config["head_dim"]),
    }


def dots(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    check_sigmoids(keys)
    return {
        "n_routed_experts": keys.number("expert_count"),
        "num_experts_per_tok": keys.number("expert_used_count"),
        "moe_intermediate_size": keys.number("expert_feed_forward_length"),
        "n_shared_experts": keys.number("expert_shared_count"),
        "first_k_dense_replace": keys.number("leading_dense_block_count", 0),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
        "norm_topk_prob": keys.get("expert_weights_norm") is True,
        "sliding_window": None,
    }


def hunyuan_moe(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "num_experts": keys.number("expert_count"),
        "moe_topk": keys.number("expert_used_count"),
        "intermediate_size": keys.number("expert_feed_forward_length"),
    }


def gpt_oss(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    windows = keys.windowed(config["num_hidden_layers"], 2)
    found = {
        "num_local_experts": keys.number("expert_count"),
        "num_experts_per_tok": keys.number("expert_used_count"),
        "intermediate_size": keys.number("expert_feed_forward_length", config["intermediate_size"]),
        **windows_of(keys.number("attention.sliding_window", 128), windows),
    }
    if "rope_scaling" in config:
        found["rope_scaling"] = config["rope_scaling"] | {"truncate": False}
    return found


def glm4moe(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    check_sigmoids(keys)
    unused = keys.number("nextn_predict_layers", 0)
    return {
        "num_hidden_layers": config["num_hidden_layers"] - unused,
        "num_nextn_predict_layers": unused,
        "n_routed_experts": keys.number("expert_count"),
        "num_experts_per_tok": keys.number("expert_used_count"),
        "moe_intermediate_size": keys.number("expert_feed_forward_length"),
        "n_shared_experts": keys.number("expert_shared_count", 1),
        "first_k_dense_replace": keys.number("leading_dense_block_count", int("blk.0.ffn_up.weight" in keys.tensors)),
        "n_group": keys.number("expert_group_count", 1),
        "topk_group": keys.number("expert_group_used_count", 1),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
        "norm_topk_prob": keys.get("expert_weights_norm") is not False,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in keys.tensors,
        "partial_rotary_factor": keys.number("rope.dimension_count", config["head_dim"]) / config["head_dim"],
    }


def afmoe(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    if keys.get("expert_gating_func") is not None:
        check_sigmoids(keys)
    if keys.get("expert_weights_norm") is not True:
        raise ModelError(
            "the GGUF file's experts have weights that are not divided by their sum, which is not supported"
        )
    layers, window = config["num_hidden_layers"], keys.number("attention.sliding_window", 0)
    if not window:
        raise ModelError(f"the GGUF file has no {keys.architecture}.attention.sliding_window")
    return {
        "num_experts": keys.number("expert_count"),
        "num_experts_per_tok": keys.number("expert_used_count"),
        "moe_intermediate_size": keys.number("expert_feed_forward_length"),
        "num_shared_experts": keys.number("expert_shared_count", 0),
        "num_dense_layers": keys.number("leading_dense_block_count", 0),
        "route_scale": keys.number("expert_weights_scale", 0) or 1.0,
        "mup_enabled": True,  # files have no key for it, and llama.cpp always scales embeddings
        **windows_of(window, keys.windowed(layers, 4)),
    }
