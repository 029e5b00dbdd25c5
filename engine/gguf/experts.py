"""The experts of some models in GGUF files, as keys of config.json."""

from __future__ import annotations

from typing import Any

from .keys import Keys
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
