"""Architectures of the native decoder with experts; more of them are in families.py and state_families.py."""

from __future__ import annotations

from .family import ExpertKeys, Family
from .state_families import EXPERT_NAMES, MIXTRAL_NAMES, SHARED_EXPERTS

HUNYUAN_NAMES = ((".query_layernorm.", ".q_norm."), (".key_layernorm.", ".k_norm."))
EXPERT_FAMILIES = {
    "Ernie4_5_MoeForCausalLM": Family(
        qkv_bias=False,
        output_bias=False,
        only=(("use_bias", False), ("moe_norm_min", 1e-12)),
        kv_heads=4,
        max_positions=131072,
        norm_eps=1e-5,
        theta=500_000.0,
        is_interleaved=True,
        rotates_wide=True,
        wide_angles=True,
        tied=True,
        renames=((".moe_statics.", ".gate."),),
        experts=ExpertKeys(
            EXPERT_NAMES,
            active="moe_k",
            is_normalized=True,
            corrects=True,
            shared=SHARED_EXPERTS,
            shared_count="moe_num_shared_experts",
            first_dense=1,
            first_dense_key="moe_layer_start_index",
            step="moe_layer_interval",
            last="moe_layer_end_index",
        ),
    ),
    "HunYuanMoEV1ForCausalLM": Family(
        norm_eps=1e-5,
        qk_norm="head",
        turns_first=True,
        renames=(*HUNYUAN_NAMES, (".mlp.gate.wg.", ".mlp.gate."), (".mlp.shared_mlp.", ".mlp.shared_experts.")),
        experts=ExpertKeys(
            EXPERT_NAMES,
            inner="intermediate_size",
            active="moe_topk",
            is_normalized=True,
            shared=SHARED_EXPERTS,
            shared_inner="intermediate_size",
        ),
    ),
    "SolarOpenForCausalLM": Family(
        output_bias=False,
        inner="moe_intermediate_size",  # no layer has an MLP alone
        head_dim=128,
        kv_heads=8,
        max_positions=131072,
        norm_eps=1e-5,
        theta=1_000_000.0,
        experts=ExpertKeys(
            EXPERT_NAMES,
            normalizes=True,
            has_sigmoids=True,
            shared=SHARED_EXPERTS,
        ),
    ),
    "ExaoneMoeForCausalLM": Family(
        qkv_bias=False,
        output_bias=False,
        kv_heads=32,
        norm_eps=1e-5,
        qk_norm="head",
        window=4096,
        window_step=4,
        rotating="windowed_or_all",
        renames=((".mlp.e_score", ".mlp.gate.e_score"),),
        experts=ExpertKeys(
            EXPERT_NAMES,
            normalizes=True,
            has_sigmoids=True,
            scale=2.5,
            shared=SHARED_EXPERTS,
            shared_count="num_shared_experts",
            first_dense=1,
        ),
    ),
    "Dots1ForCausalLM": Family(
        kv_heads=32,
        qk_norm="head",
        window=4096,
        window_start=62,
        experts=ExpertKeys(
            EXPERT_NAMES,
            has_sigmoids=True,
            shared=SHARED_EXPERTS,
            first_dense=0,
        ),
    ),
    "MiniMaxM2ForCausalLM": Family(
        qkv_bias=False,
        output_bias=False,
        head_dim=128,
        kv_heads=8,
        qk_norm="all",
        max_positions=196608,
        theta=5_000_000.0,
        rotated_part=1.0,
        rotated_key="rotary_dim",
        renames=((".block_sparse_moe.e_score", ".block_sparse_moe.gate.e_score"),),
        experts=ExpertKeys(
            MIXTRAL_NAMES,
            inner="intermediate_size",
            is_normalized=True,
            has_sigmoids=True,
        ),
    ),
}
