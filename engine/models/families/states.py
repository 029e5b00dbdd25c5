"""The architectures of the native decoder with layers that keep states, see mixers/states.py."""

from __future__ import annotations

from dataclasses import replace

from .family import (
    AROUND,
    MLP,
    UNGATED,
    ExpertKeys,
    Family,
    HeadGate,
    NormKind,
    ScaleKey,
    ScaleKeys,
    Stacking,
)

# These are of families without such layers as well.
MIXTRAL_NAMES = (
    "block_sparse_moe.gate",
    "block_sparse_moe.experts.{}.w1",
    "block_sparse_moe.experts.{}.w3",
    "block_sparse_moe.experts.{}.w2",
)
EXPERT_NAMES = ("mlp.gate", "mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj", "mlp.experts.{}.down_proj")
SHARED_EXPERT = ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj", "mlp.shared_expert.down_proj")
SHARED_EXPERTS = ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj", "mlp.shared_experts.down_proj")
GRANITE_SCALES = ScaleKeys(
    scores=ScaleKey("attention_multiplier", 1.0),
    embedding=ScaleKey("embedding_multiplier", 1.0),
    residual=ScaleKey("residual_multiplier", 1.0),
    logits=ScaleKey("logits_scaling", 1.0, -1.0),
)
GRANITE_EXPERTS = ExpertKeys(
    ("block_sparse_moe.router.layer", "block_sparse_moe.{}.input_linear", "", "block_sparse_moe.{}.output_linear"),
    stacking=Stacking(),
    inner="intermediate_size",
    is_normalized=True,
)
SHARED_MLP = ("shared_mlp.input_linear", "", "shared_mlp.output_linear")
LFM2_NAMES = (
    (".operator_norm.", ".input_layernorm."),
    (".ffn_norm.", ".post_attention_layernorm."),
    (".embedding_norm.", ".norm."),
    (".self_attn.out_proj.", ".self_attn.o_proj."),
    (".self_attn.q_layernorm.", ".self_attn.q_norm."),
    (".self_attn.k_layernorm.", ".self_attn.k_norm."),
    (".feed_forward.expert_bias", ".feed_forward.gate.e_score_correction_bias"),
    (".feed_forward.", ".mlp."),
    (".w1.", ".gate_proj."),
    (".w2.", ".down_proj."),
    (".w3.", ".up_proj."),
)
STATE_FAMILIES = {
    # Granite 4.0: with and without Mamba layers, and experts beside the MLP.
    "GraniteMoeHybridForCausalLM": Family(
        scales=GRANITE_SCALES,
        mlp=SHARED_MLP,
        inner="shared_intermediate_size",
        rotating="named",
        mixer="mamba",
        experts=GRANITE_EXPERTS._replace(
            enabled="num_local_experts", shared=SHARED_MLP, shared_inner="shared_intermediate_size"
        ),
    ),
    # The norms are those of Gemma.
    "Qwen3_5ForCausalLM": Family(
        qkv_bias=None,
        qk_norm="head",
        head_dim=256,
        kv_heads=4,
        max_positions=32768,
        rotated_part=0.25,
        norm=NormKind(offset=1.0, is_wide=True),
        gates_attention=True,
        mixer="linear",
    ),
    "Lfm2ForCausalLM": Family(
        qkv_bias=False,
        output_bias=False,
        kv_heads=8,
        max_positions=128000,
        norm_eps=1e-5,
        eps_key="norm_eps",
        qk_norm="head",
        tied=True,
        tied_key="tie_embedding",
        theta=1_000_000.0,
        adjusts_inner=True,
        renames=LFM2_NAMES,
        mixer="conv",
    ),
}
# Nemotron-H, Nemotron Nano 2 and Nemotron 3 Nano.
STATE_FAMILIES["NemotronHForCausalLM"] = Family(
    kv_heads=8,
    head_dim=128,
    max_positions=4096,
    norm_eps=1e-5,
    eps_key="layer_norm_epsilon",
    norm=NormKind(is_wide=True),
    mlp=("", "mlp.up_proj", "mlp.down_proj"),
    activation=("mlp_hidden_act", UNGATED),
    only=(
        ("mlp_hidden_act", UNGATED),
        ("mamba_hidden_act", "silu"),
        ("mlp_bias", False),
        ("residual_in_fp32", False),
    ),
    rotating="none",
    mixer="mamba",
    has_sublayers=True,
    experts=ExpertKeys(
        ("mlp.gate", "", "mlp.experts.{}.up_proj", "mlp.experts.{}.down_proj"),
        enabled="n_routed_experts",
        normalizes=True,
        has_sigmoids=True,
        latent_key="moe_latent_size",
        latent_names=("mlp.fc1_latent_proj", "mlp.fc2_latent_proj"),
        shared=("", "mlp.shared_experts.up_proj", "mlp.shared_experts.down_proj"),
        shared_inner="moe_shared_expert_intermediate_size",
    ),
)
# Granite 4.0 in GGUF files, in which gate and up are two tensors, and each expert has some of its own.
STATE_FAMILIES["GraniteHybridGguf"] = replace(
    STATE_FAMILIES["GraniteMoeHybridForCausalLM"],
    mlp=MLP,
    experts=ExpertKeys(
        MIXTRAL_NAMES,
        inner="intermediate_size",
        enabled="num_local_experts",
        is_normalized=True,
        shared=SHARED_EXPERTS,
        shared_inner="shared_intermediate_size",
    ),
)
STATE_FAMILIES["Qwen3_5MoeForCausalLM"] = replace(
    STATE_FAMILIES["Qwen3_5ForCausalLM"],
    kv_heads=2,
    inner="shared_expert_intermediate_size",  # no layer has an MLP alone
    experts=ExpertKeys(
        EXPERT_NAMES,
        stacking=Stacking(divided="gate_up_proj"),
        is_normalized=True,
        shared=SHARED_EXPERT,
        shared_inner="shared_expert_intermediate_size",
        shared_gate="mlp.shared_expert_gate",
    ),
)
# Qwen3-Next came before Qwen3.5. The rows of the projections before its linear attention are grouped by key head.
STATE_FAMILIES["Qwen3NextForCausalLM"] = replace(
    STATE_FAMILIES["Qwen3_5ForCausalLM"],
    kv_heads=2,
    renames=(
        (".in_proj_qkvz.", ".in_proj_qkv."),
        (".in_proj_qkvz.", ".in_proj_z."),
        (".in_proj_ba.", ".in_proj_b."),
        (".in_proj_ba.", ".in_proj_a."),
    ),
    regroups=True,
    experts=ExpertKeys(
        EXPERT_NAMES,
        normalizes=True,
        shared=SHARED_EXPERT,
        shared_inner="shared_expert_intermediate_size",
        shared_gate="mlp.shared_expert_gate",
    ),
)
# Some of the layers with attention have a window, and a rotary embedding of their own; all sublayers have two norms.
STATE_FAMILIES["Lfm3ForCausalLM"] = replace(
    STATE_FAMILIES["Lfm2ForCausalLM"],
    adjusts_inner=False,
    only=(
        ("use_sandwich_norm", True),
        ("use_attention_gate", True),
        ("attention_bias", False),
        ("hidden_act", "silu"),
    ),
    head_dim=128,
    kv_heads=4,
    taps=7,
    window=256,
    tied_key="tie_word_embeddings",
    local_rope=("", 10_000.0),
    scaling=(("rope_type", "proportional"), ("partial_rotary_factor", 0.5)),
    wide_angles=True,
    norms=AROUND,
    head_gate=HeadGate("self_attn.gate_proj", per_head=True),
    renames=(
        (".post_operator_norm.", ".post_attention_layernorm."),
        (".post_ffn_norm.", ".post_feedforward_layernorm."),
        (".operator_norm.", ".input_layernorm."),
        (".ffn_norm.", ".pre_feedforward_layernorm."),
        (".embedding_norm.", ".norm."),
        (".feed_forward.w1.", ".mlp.gate_proj."),
        (".feed_forward.w2.", ".mlp.down_proj."),
        (".feed_forward.w3.", ".mlp.up_proj."),
    ),
)
STATE_FAMILIES["Lfm2MoeForCausalLM"] = replace(
    STATE_FAMILIES["Lfm2ForCausalLM"],
    adjusts_inner=False,
    only=(("use_expert_bias", True),),
    experts=ExpertKeys(
        EXPERT_NAMES,
        normalizes=True,
        epsilon=1e-6,
        has_sigmoids=True,
        first_dense=2,
        first_dense_key="num_dense_layers",
    ),
)
