"""The architectures of the native decoder."""

from __future__ import annotations

from dataclasses import replace

from .experts import EXPERT_FAMILIES, HUNYUAN_NAMES
from .family import (
    AFTER,
    AROUND,
    JOINED_MLP,
    ONCE,
    UNGATED,
    ExpertKeys,
    Family,
    NormKind,
    NormNames,
    ScaleKey,
    ScaleKeys,
    Stacking,
)
from .latent import LATENT_FAMILIES
from .states import (
    EXPERT_NAMES,
    GRANITE_EXPERTS,
    GRANITE_SCALES,
    MIXTRAL_NAMES,
    SHARED_EXPERTS,
    SHARED_MLP,
    STATE_FAMILIES,
)

FAMILIES = {
    "LlamaForCausalLM": Family(mlp_bias=True),
    "MistralForCausalLM": Family(qkv_bias=False, output_bias=False, kv_heads=8, max_positions=131072, window=4096),
    "Ministral3ForCausalLM": Family(
        qkv_bias=False,
        output_bias=False,
        head_dim=128,
        kv_heads=8,
        max_positions=262144,
        window=0,
        norm_eps=1e-5,
        scaling=(
            ("rope_type", "yarn"),
            ("rope_theta", 1_000_000.0),
            ("factor", 16.0),
            ("original_max_position_embeddings", 16384),
            ("beta_fast", 32.0),
            ("beta_slow", 1.0),
            ("mscale", 1.0),
            ("mscale_all_dim", 1.0),
            ("llama_4_scaling_beta", 0.1),
        ),
        scales_queries=True,
    ),
    "Qwen2ForCausalLM": Family(
        qkv_bias=True, output_bias=False, kv_heads=32, max_positions=32768, window=4096, layer_windows=True
    ),
    "Qwen3ForCausalLM": Family(
        qk_norm="head", head_dim=128, kv_heads=32, max_positions=32768, window=4096, layer_windows=True
    ),
    "Phi3ForCausalLM": Family(
        qkv_bias=False,
        output_bias=False,
        max_positions=4096,
        window=0,
        norm_eps=1e-5,
        mlp=JOINED_MLP,
        joins_qkv=True,
        rotated_part=1.0,
    ),
    "SmolLM3ForCausalLM": Family(
        mlp_bias=True,
        kv_heads=4,
        max_positions=32768,
        window=0,
        layer_windows=True,
        tied=True,
        theta=2_000_000.0,
        rotating="listed",
    ),
    "Olmo2ForCausalLM": Family(
        norm_eps=1e-5,
        qk_norm="all",
        norms=AFTER,
        wide_angles=True,
        norm=NormKind(is_wide=True),
    ),
    "Olmo3ForCausalLM": Family(
        norm_eps=1e-5,
        qk_norm="all",
        norms=AFTER,
        wide_angles=True,
        norm=NormKind(is_wide=True),
        window=4096,
        window_step=4,
        theta=500_000.0,
        local_rope=("rope_theta", 500_000.0),
    ),
    "Exaone4ForCausalLM": Family(
        qkv_bias=False,
        output_bias=False,
        kv_heads=32,
        norm_eps=1e-5,
        qk_norm="head",
        norms=AFTER,
        window=4096,
        window_step=4,
        rotating="windowed_or_all",
    ),
    "CwmForCausalLM": Family(
        qkv_bias=False,
        output_bias=False,
        mlp_bias=True,
        head_dim=128,
        kv_heads=8,
        max_positions=131072,
        norm_eps=1e-5,
        theta=1_000_000.0,
        window=8192,
        window_step=4,
        opens_full=True,
        scaling=(
            ("rope_type", "llama3"),
            ("rope_theta", 1_000_000.0),
            ("factor", 16.0),
            ("low_freq_factor", 1.0),
            ("high_freq_factor", 4.0),
            ("original_max_position_embeddings", 8192),
        ),
    ),
    "ArceeForCausalLM": Family(
        mlp=("", "mlp.up_proj", "mlp.down_proj"),
        activation=("hidden_act", UNGATED),
        only=(("hidden_act", UNGATED),),
        mlp_bias=True,
        max_positions=4096,
        norm_eps=1e-5,
    ),
    "GraniteForCausalLM": Family(
        mlp_bias=True,
        scales=GRANITE_SCALES,
    ),
    "Gemma2ForCausalLM": Family(
        head_dim=256,
        kv_heads=4,
        max_positions=8192,
        window=4096,
        window_step=2,
        tied=True,
        norms=AROUND,
        norm=NormKind(offset=1.0, is_wide=True),
        scales=ScaleKeys(scores=ScaleKey("query_pre_attn_scalar", 256.0, -0.5)),
        scales_by_size=True,
        activation=("hidden_activation", "gelu_pytorch_tanh"),
        caps=(50.0, 30.0),
    ),
    "Gemma3ForCausalLM": Family(
        head_dim=256,
        kv_heads=4,
        qk_norm="head",
        max_positions=131072,
        window=4096,
        window_step=6,
        theta=1_000_000.0,
        local_rope=("rope_local_base_freq", 10_000.0),
        tied=True,
        norms=AROUND,
        norm=NormKind(offset=1.0, is_wide=True),
        scales=ScaleKeys(scores=ScaleKey("query_pre_attn_scalar", 256.0, -0.5)),
        scales_by_size=True,
        activation=("hidden_activation", "gelu_pytorch_tanh"),
        caps=(None, None),
    ),
    "Gemma4ForCausalLM": Family(
        head_dim=256,
        kv_heads=4,
        qk_norm="head",
        norms_values=True,
        max_positions=131072,
        window=512,
        window_step=6,
        theta=1_000_000.0,
        local_rope=("", 10_000.0),
        scaling=(("rope_type", "proportional"), ("partial_rotary_factor", 0.25)),
        tied=True,
        norms=AROUND,
        norm=NormKind(is_wide=True),
        layers_differ=True,
        has_layer_inputs=True,
        scales_layers=True,
        scales=ScaleKeys(scores=ScaleKey("", 1.0)),
        scales_by_size=True,
        activation=("hidden_activation", "gelu_pytorch_tanh"),
        caps=(None, None),
        experts=ExpertKeys(
            ("router.proj", "experts.{}.gate_up_proj", "", "experts.{}.down_proj"),
            stacking=Stacking(),
            active="top_k_experts",
            enabled="enable_moe_block",
            is_normalized=True,
            is_beside=True,
        ),
    ),
    "Cohere2ForCausalLM": Family(
        max_positions=8192,
        window=4096,
        window_step=4,
        rotating="windowed",
        is_interleaved=True,
        rotates_wide=True,
        norm_eps=1e-5,
        eps_key="layer_norm_eps",
        norms=ONCE,
        is_parallel=True,
        norm=NormKind(is_wide=True, is_centered=True),
        tied=True,
        scales=ScaleKeys(logits=ScaleKey("logit_scale", 0.0625)),
    ),
    "Glm4ForCausalLM": Family(
        attention_bias=True,
        output_bias=False,
        head_dim=128,
        kv_heads=2,
        max_positions=131072,
        norm_eps=1.5625e-7,
        mlp=JOINED_MLP,
        rotated_part=0.5,
        is_interleaved=True,
        norms=NormNames(
            "input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"
        ),
    ),
    "GlmForCausalLM": Family(
        attention_bias=True,
        output_bias=False,
        head_dim=128,
        kv_heads=2,
        max_positions=131072,
        norm_eps=1.5625e-7,
        mlp=JOINED_MLP,
        rotated_part=0.5,
        is_interleaved=True,
    ),
    "GemmaForCausalLM": Family(
        head_dim=256,
        kv_heads=16,
        max_positions=8192,
        tied=True,
        norm=NormKind(offset=1.0, is_wide=True),
        scales_by_size=True,
        activation=("hidden_act", "gelu_pytorch_tanh"),
    ),
    "InternLM3ForCausalLM": Family(
        only=(("qkv_bias", False), ("bias", False)),
        mlp_bias=True,
        head_dim=128,
        kv_heads=2,
        max_positions=32768,
        norm_eps=1e-5,
    ),
    "HeliumForCausalLM": Family(
        output_bias=False,
        mlp_bias=True,
        head_dim=128,
        kv_heads=20,
        max_positions=4096,
        norm_eps=1e-8,
        theta=100_000.0,
        is_interleaved=True,
        norm=NormKind(is_wide=True),
    ),
    "MixtralForCausalLM": Family(
        qkv_bias=False,
        output_bias=False,
        kv_heads=8,
        max_positions=131072,
        theta=1_000_000.0,
        window=0,
        norm_eps=1e-5,
        experts=ExpertKeys(
            MIXTRAL_NAMES,
            inner="intermediate_size",
            is_normalized=True,
        ),
    ),
    "SeedOssForCausalLM": Family(
        attention_bias=True,
        output_bias=False,
        only=(("attention_out_bias", False),),
        mlp_bias=True,
        head_dim=128,
        kv_heads=8,
        max_positions=524288,
    ),
    "Ernie4_5ForCausalLM": Family(
        qkv_bias=False,
        output_bias=False,
        only=(("use_bias", False),),
        head_dim=128,
        kv_heads=2,
        max_positions=131072,
        norm_eps=1e-5,
        theta=500_000.0,
        is_interleaved=True,
        rotates_wide=True,
        wide_angles=True,
        tied=True,
    ),
    "HunYuanDenseV1ForCausalLM": Family(
        norm_eps=1e-5,
        qk_norm="head",
        turns_first=True,
        renames=HUNYUAN_NAMES,
    ),
    "GptOssForCausalLM": Family(
        attention_bias=True,
        head_dim=64,
        kv_heads=8,
        max_positions=131072,
        window=128,
        window_step=2,
        norm_eps=1e-5,
        theta=150_000.0,
        scaling=(
            ("rope_type", "yarn"),
            ("factor", 32.0),
            ("beta_fast", 32.0),
            ("beta_slow", 1.0),
            ("truncate", False),
            ("original_max_position_embeddings", 4096),
        ),
        has_sinks=True,
        norm=NormKind(is_wide=True),
        experts=ExpertKeys(
            ("mlp.router", "mlp.experts.{}.gate_up_proj", "", "mlp.experts.{}.down_proj"),
            stacking=Stacking(transposed=True, alternating=True),
            inner="intermediate_size",
            is_normalized=True,
            has_bias=True,
            clamp=True,
        ),
    ),
}
FAMILIES |= EXPERT_FAMILIES
# Mistral with windows on some layers, as transformers names it.
FAMILIES["MinistralForCausalLM"] = FAMILIES["MistralForCausalLM"]
# The text parts of models that read images, as transformers names them.
FAMILIES["Glm4vTextModel"] = replace(
    FAMILIES["Glm4ForCausalLM"], qkv_bias=True, head_dim=None, max_positions=32768, norm_eps=1e-5, rotated_part=1.0
)
FAMILIES["Glm4vMoeTextModel"] = replace(
    FAMILIES["Glm4MoeForCausalLM"], attention_bias=True, qk_norm="", max_positions=65536
)
FAMILIES["Gemma4UnifiedForCausalLM"] = replace(
    FAMILIES["Gemma4ForCausalLM"], has_layer_inputs=False, experts=None, window=1024, max_positions=262144
)
# gpt-oss in GGUF files, in which each expert has tensors of its own, and gate and up are two.
FAMILIES["GptOssGguf"] = replace(
    FAMILIES["GptOssForCausalLM"],
    experts=ExpertKeys(
        ("mlp.router", "mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj", "mlp.experts.{}.down_proj"),
        inner="intermediate_size",
        is_normalized=True,
        has_bias=True,
        clamp=True,
    ),
)
# GLM-4 in GGUF files of old checkpoints.
FAMILIES["GlmJoinedGguf"] = replace(FAMILIES["GlmForCausalLM"], joins_qkv=True)
FAMILIES["GraniteMoeForCausalLM"] = replace(
    FAMILIES["GraniteForCausalLM"],
    mlp_bias=False,
    experts=GRANITE_EXPERTS,
)
FAMILIES["GraniteMoeSharedForCausalLM"] = replace(
    FAMILIES["GraniteMoeForCausalLM"],
    experts=GRANITE_EXPERTS._replace(shared=SHARED_MLP, shared_inner="shared_intermediate_size"),
)
# Both in GGUF files, which have the tensors of Mixtral.
FAMILIES["GraniteMoeGguf"] = replace(
    FAMILIES["GraniteMoeForCausalLM"],
    experts=ExpertKeys(
        MIXTRAL_NAMES,
        inner="intermediate_size",
        is_normalized=True,
        shared=SHARED_EXPERTS,
        shared_inner="shared_intermediate_size",
    ),
)
# Granite with windows and sinks.
FAMILIES["GraniteSWAForCausalLM"] = replace(
    FAMILIES["GraniteForCausalLM"],
    kv_heads=4,
    window=128,
    window_step=4,
    opens_full=True,
    bases_key="layer_rope_theta",
    has_sinks=True,
    norm_eps=1e-5,
    tied=True,
)
# Its experts have the names of transformers' modules.
FAMILIES["GraniteMoeSWAForCausalLM"] = replace(
    FAMILIES["GraniteSWAForCausalLM"],
    mlp_bias=False,
    kv_heads=None,
    norm_eps=1e-6,
    tied=False,
    experts=GRANITE_EXPERTS._replace(
        names=(
            "block_sparse_moe.router",
            "block_sparse_moe.experts.{}.gate_up_proj",
            "",
            "block_sparse_moe.experts.{}.down_proj",
        ),
        shared=SHARED_MLP,
        shared_inner="shared_intermediate_size",
    ),
)
FAMILIES["VaultGemmaForCausalLM"] = replace(
    FAMILIES["Gemma2ForCausalLM"], norms=NormNames("input_layernorm", None, "pre_feedforward_layernorm")
)
FAMILIES["FlexOlmoForCausalLM"] = replace(
    FAMILIES["Olmo2ForCausalLM"],
    max_positions=4096,
    norm_eps=1e-6,
    theta=500_000.0,
    experts=ExpertKeys(EXPERT_NAMES, inner="intermediate_size"),
)
# Command R and Aya.
FAMILIES["CohereForCausalLM"] = replace(
    FAMILIES["Cohere2ForCausalLM"],
    only=(("use_qk_norm", False),),
    window=None,
    window_step=None,
    rotating="all",
    theta=500_000.0,
)
# Families with layers that keep states.
FAMILIES |= STATE_FAMILIES
FAMILIES |= LATENT_FAMILIES
