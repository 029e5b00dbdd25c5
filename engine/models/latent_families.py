"""The architectures of the native decoder with multi-head latent attention, see latent.py."""

from __future__ import annotations

from dataclasses import replace

from .family import ExpertKeys, Family
from .state_families import EXPERT_NAMES, SHARED_EXPERTS

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
    "YoutuForCausalLM": replace(DEEPSEEK, max_positions=131072, tied=True, experts=None),
}
# In GGUF files, in which the projections of latents to keys and to values are two tensors.
LATENT_FAMILIES |= {
    f"{name}Gguf": replace(LATENT_FAMILIES[f"{name}ForCausalLM"], latent_in_two=True)
    for name in ("DeepseekV3", "DeepseekV2", "Youtu")
}
