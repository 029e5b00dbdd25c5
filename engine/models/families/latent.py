"""The architectures of the native decoder with multi-head latent attention, see latent_shapes.py."""

from __future__ import annotations

from dataclasses import replace

from .family import ExpertKeys, Family, ScaleKey, ScaleKeys, Stacking
from .states import EXPERT_NAMES, SHARED_EXPERTS

EXPERTS = ExpertKeys(
    EXPERT_NAMES,
    normalizes=True,
    has_sigmoids=True,
    groups=(8, 4),
    scale=2.5,
    shared=SHARED_EXPERTS,
    first_dense=3,
)
SIZES = (
    ("q_lora_rank", 1536),
    ("kv_lora_rank", 512),
    ("qk_nope_head_dim", 128),
    ("qk_rope_head_dim", 64),
    ("v_head_dim", 128),
)
LATENT_FAMILIES = {
    "DeepseekV3ForCausalLM": Family(
        qkv_bias=False,
        output_bias=False,
        only=(("attention_bias", False), ("moe_layer_freq", 1)),
        latent=SIZES,
        is_interleaved=True,
        max_positions=4096,
        experts=EXPERTS,
    ),
}
DEEPSEEK = LATENT_FAMILIES["DeepseekV3ForCausalLM"]
LATENT_FAMILIES |= {
    "DeepseekV2ForCausalLM": replace(
        DEEPSEEK,
        only=(*DEEPSEEK.only, ("mlp_bias", False), ("norm_topk_prob", False)),
        max_positions=2048,
        experts=ExpertKeys(
            EXPERT_NAMES,
            is_normalized=False,
            reads_topk_method=True,
            shared=SHARED_EXPERTS,
            num_shared=2,
            first_dense=0,
        ),
    ),
    "Glm4MoeLiteForCausalLM": replace(
        DEEPSEEK,
        latent=(
            ("q_lora_rank", 768),
            ("kv_lora_rank", 512),
            ("qk_nope_head_dim", 192),
            ("qk_rope_head_dim", 64),
            ("v_head_dim", 256),
        ),
        max_positions=202752,
        norm_eps=1e-5,
        experts=EXPERTS._replace(first_dense=1, groups=(1, 1), scale=1.8),
    ),
    # The weights of experts are a softmax. The best of several groups are chosen as in no other family.
    "Mistral4ForCausalLM": replace(
        DEEPSEEK,
        only=(("attention_bias", False), ("n_group", 1), ("topk_group", 1)),
        latent=(
            ("q_lora_rank", 1024),
            ("kv_lora_rank", 256),
            ("qk_nope_head_dim", 64),
            ("qk_rope_head_dim", 64),
            ("v_head_dim", 128),
        ),
        max_positions=1048576,
        scaling=(
            ("rope_type", "yarn"),
            ("rope_theta", 10_000.0),
            ("factor", 128.0),
            ("original_max_position_embeddings", 8192),
            ("mscale", 1.0),
            ("mscale_all_dim", 1.0),
            ("llama_4_scaling_beta", 0.1),
        ),
        scales_queries=True,
        experts=ExpertKeys(
            ("mlp.gate", "mlp.experts.{}.gate_up_proj", "", "mlp.experts.{}.down_proj"),
            stacking=Stacking(),
            normalizes=True,
            reads_topk_method=True,
            shared=SHARED_EXPERTS,
            first_dense=0,
        ),
    ),
    "MiniCPM3ForCausalLM": replace(
        DEEPSEEK,
        only=(("attention_bias", False), ("mlp_bias", False)),
        latent=(  # the default of v_head_dim is hidden_size / heads
            ("q_lora_rank", 768),
            ("kv_lora_rank", 256),
            ("qk_nope_head_dim", 64),
            ("qk_rope_head_dim", 32),
        ),
        is_interleaved=False,
        max_positions=32768,
        norm_eps=1e-5,
        tied=True,
        scales=ScaleKeys(
            embedding=ScaleKey("scale_emb", 12.0),
            residual=ScaleKey("scale_depth", 1.4, factor=("num_hidden_layers", -0.5)),
            logits=ScaleKey("dim_model_base", 256.0, factor=("hidden_size", -1.0)),
        ),
        experts=None,
    ),
    "YoutuForCausalLM": replace(DEEPSEEK, max_positions=131072, tied=True, experts=None),
}
# In GGUF files, in which the projections of latents to keys and to values are two tensors.
LATENT_FAMILIES |= {
    f"{name}Gguf": replace(LATENT_FAMILIES[f"{name}ForCausalLM"], latent_in_two=True)
    for name in ("DeepseekV3", "DeepseekV2", "Mistral4", "Youtu")
}
