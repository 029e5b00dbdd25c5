"""Nemotron-H in GGUF files, whose layers and names are those of its checkpoints, see models/checkpoint/sublayers.py."""

from __future__ import annotations

from typing import Any

from ..bounds import MAX_HEADS, MAX_SIZE
from ..types import ModelError
from .keys import Keys
from .state_layers import check_sigmoids

NAMES = {
    "attn_norm": "norm",
    "attn_q": "mixer.q_proj",
    "attn_k": "mixer.k_proj",
    "attn_v": "mixer.v_proj",
    "attn_output": "mixer.o_proj",
    "ssm_in": "mixer.in_proj",
    "ssm_conv1d": "mixer.conv1d",
    "ssm_norm": "mixer.norm",
    "ssm_out": "mixer.out_proj",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
    "ffn_gate_inp": "mixer.gate",
    "ffn_up_exps": "mixer.experts.{}.up_proj",
    "ffn_down_exps": "mixer.experts.{}.down_proj",
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
    "ffn_up_shexp": "mixer.shared_experts.up_proj",
    "ffn_down_shexp": "mixer.shared_experts.down_proj",
}
PARAMETERS = {
    "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
    "ssm_a": "mixer.A_log",
    "ssm_d": "mixer.D",
    "ssm_dt.bias": "mixer.dt_bias",
}
EPS = "attention.layer_norm_rms_epsilon", "layer_norm_epsilon"


def nemotron_h(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of config.json. Layers of Mamba have neither heads of keys nor numbers of an MLP."""
    name, blocks = keys.architecture, config["num_hidden_layers"]
    unused = keys.whole("nextn_predict_layers", blocks - 1, 0, minimum=0)
    kv_heads = keys.by_layer("attention.head_count_kv", blocks)[: blocks - unused]
    inner = keys.by_layer("feed_forward_length", blocks)[: blocks - unused]
    if {*kv_heads} - {0, max(kv_heads)}:
        raise ModelError(f"the GGUF file's {name}.attention.head_count_kv differs among layers that have any")
    kinds = [
        "*" if count else "M" if not size else "E" if f"blk.{layer}.ffn_gate_inp.weight" in keys.tensors else "-"
        for layer, (count, size) in enumerate(zip(kv_heads, inner, strict=True))
    ]
    sizes = {size for size, kind in zip(inner, kinds, strict=True) if kind == "-"}
    if len(sizes) > 1:
        raise ModelError(f"the GGUF file's {name}.feed_forward_length differs among layers that have an MLP")
    heads, values = keys.whole("ssm.time_step_rank", MAX_HEADS), keys.whole("ssm.inner_size", MAX_SIZE)
    if values % heads:
        raise ModelError(f"the GGUF file's {name}.ssm.inner_size of {values} is not that of {heads} heads")
    return {
        "num_hidden_layers": blocks - unused,
        "num_nextn_predict_layers": unused,
        "hybrid_override_pattern": "".join(kinds),
        "num_key_value_heads": max(kv_heads) or None,
        "intermediate_size": max(sizes, default=1),
        "mamba_num_heads": heads,
        "mamba_head_dim": values // heads,
        "n_groups": keys.number("ssm.group_count"),
        "ssm_state_size": keys.number("ssm.state_size"),
        "conv_kernel": keys.number("ssm.conv_kernel"),
        "use_conv_bias": any(each.endswith(".ssm_conv1d.bias") for each in keys.tensors),
        "use_bias": any(each.endswith(".ssm_in.bias") for each in keys.tensors),
    }


def nemotron_h_moe(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    check_sigmoids(keys)
    return {
        **nemotron_h(keys, config),
        "n_routed_experts": keys.number("expert_count"),
        "num_experts_per_tok": keys.number("expert_used_count"),
        "moe_intermediate_size": keys.number("expert_feed_forward_length"),
        "moe_latent_size": keys.number("moe_latent_size", 0) or None,
        "moe_shared_expert_intermediate_size": keys.number("expert_shared_feed_forward_length"),
        "norm_topk_prob": keys.get("expert_weights_norm") is not False,
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
        "n_group": keys.number("expert_group_count", 1),
        "topk_group": keys.number("expert_group_used_count", 1),
    }
