"""Small models with random weights, one per architecture, made with transformers: what oracles compare with."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from engine import EngineConfig, models
from engine.cache_groups import CacheGroups
from engine.models.families.architectures import MODEL_TYPES

VOCAB = 300
MAX_LEN = 256
BASE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": MAX_LEN,
}
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "mscale": 1.0,
        "mscale_all_dim": 0.8,
        "truncate": False,
    },
    "longrope": {
        "rope_type": "longrope",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "short_factor": [1.0 + 0.05 * i for i in range(8)],
        "long_factor": [1.5 + 0.25 * i for i in range(8)],
    },
}
HEAD = {"head_dim": 16}
MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
QWEN_MOE = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "norm_topk_prob": True}
GPT_OSS = {
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "sliding_window": 8,
    "swiglu_limit": 0.5,
    "swiglu_alpha": 1.1,
    "attention_bias": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "pad_token_id": None,
}
SMOLLM3 = {"num_hidden_layers": 5, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
OLMO3 = {"num_hidden_layers": 5, "sliding_window": 8, "pad_token_id": None, "eos_token_id": None}
GRANITE = {
    "tie_word_embeddings": True,
    "attention_multiplier": 0.2,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "logits_scaling": 3.0,
}
GEMMA4 = {"head_dim": 8, "global_head_dim": 16, "num_hidden_layers": 6, "sliding_window": 8}
DENSE_GEMMA4 = {**GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1}
SMALL_GEMMA4 = {
    **GEMMA4,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 24,
    "vocab_size_per_layer_input": VOCAB,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "final_logit_softcapping": 30.0,
}
GEMMA4_MOE = {
    "hidden_size_per_layer_input": 0,
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 3,
    "moe_intermediate_size": 48,
}
EXAONE4 = {"num_hidden_layers": 5, "sliding_window": 8, "head_dim": 32}
GRANITE_SWA = {**GRANITE, "num_hidden_layers": 6, "sliding_window": 8, "bos_token_id": 1, "eos_token_id": 2}
GRANITE_MOE = {**GRANITE, "num_local_experts": 6, "num_experts_per_tok": 3, "attention_bias": True}
GRANITE_4 = {
    **GRANITE,
    "num_local_experts": 0,
    "position_embedding_type": "rope",
    "layer_types": ["full_attention"] * 3,
    "shared_intermediate_size": 96,
}
GRANITE_4_MOE = {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 48}
MAMBA = {"layer_types": ["mamba", "attention", "mamba"], "mamba_n_heads": 4, "mamba_d_state": 16}
OLMOE = {"num_experts": 8, "num_experts_per_tok": 3, "pad_token_id": None, "eos_token_id": None}
COHERE2 = {"num_hidden_layers": 5, "sliding_window": 8, "bos_token_id": None, "eos_token_id": None}
EYE = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "patch_size": 14,
}
QWEN3_5 = {
    "head_dim": 32,
    "num_hidden_layers": 3,
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
QWEN3_5_MOE = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 32,
}
QWEN3_NEXT_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
QWEN_EYE = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "patch_size": 14,
    "out_hidden_size": 64,
    "num_position_embeddings": 4,
    "deepstack_visual_indexes": [0],
}
GLM4V_EYE = {**EYE, "depth": 1, "num_heads": 2, "image_size": 28, "out_hidden_size": 64}
GLM4V_ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
MINISTRAL3 = {
    "head_dim": 16,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 0.5,
        "beta_slow": 0.1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.3,
    },
}
GLM4_MOE = {
    "head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "pad_token_id": None,
}
GLM4 = {"pad_token_id": None, "attention_bias": False, "partial_rotary_factor": 1.0}
ERNIE_MOE = {"moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 32, "pad_token_id": None}
NEMOTRON_H = {
    "head_dim": 16,
    "num_hidden_layers": None,
    "mamba_num_heads": 6,
    "mamba_head_dim": 24,
    "n_groups": 2,
    "ssm_state_size": 16,
    "chunk_size": 16,
    "time_step_min": 1e-9,  # transformers' lower limit of the time steps of prompts, which NVIDIA's code does not have
}
NEMOTRON_H_MOE = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "moe_shared_expert_intermediate_size": 56,
    "routed_scaling_factor": 2.5,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
}
LATENT_EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "pad_token_id": None,
}
LATENT_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 0.8,
    "mscale_all_dim": 0.8,
}
MISTRAL4_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.3,
}
MISTRAL4 = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "pad_token_id": None}
MINICPM3 = {"bos_token_id": 1, "eos_token_id": 2}
AFMOE = {
    **HEAD,
    "num_hidden_layers": 5,
    "num_dense_layers": 1,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "num_shared_experts": 2,
    "moe_intermediate_size": 32,
    "sliding_window": 8,
    "route_scale": 1.5,
}
MELLUM = {**HEAD, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "sliding_window": 8}
LAGUNA = {
    **HEAD,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "sliding_window": 8,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    "moe_routed_scaling_factor": 2.5,
}
HY_V3 = {**HEAD, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
CWM = {**HEAD, "num_hidden_layers": 6, "sliding_window": 8, "bos_token_id": 1, "eos_token_id": 2}
HUNYUAN_ROPE = {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 50.0, "factor": 1.0}
MINIMAX = {"head_dim": 16, "intermediate_size": 48, "num_local_experts": 8, "num_experts_per_tok": 3}
DOTS1 = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "routed_scaling_factor": 2.5,
    "head_dim": 16,
}
SOLAR = {**HEAD, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
EXAONE_MOE = {**EXAONE4, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
# name -> (transformers model type, settings)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", BASE),
    "llama-bias": ("llama", {**BASE, "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
    "llama-gelu": ("llama", {**BASE, "hidden_act": "gelu"}),
    **{f"llama-{name}": ("llama", {**BASE, "rope_parameters": rope}) for name, rope in ROPES.items()},
    "mistral": ("mistral", {**BASE, "sliding_window": 8}),
    "mistral-layers": (
        "mistral",
        {**BASE, "sliding_window": 8, "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    ),
    "mistral-full": ("mistral", {**BASE, "sliding_window": None}),
    "ministral": (
        "ministral",
        {**BASE, **HEAD, "sliding_window": 8, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]},
    ),
    "ministral3": ("ministral3", {**BASE, **MINISTRAL3}),
    "qwen2": ("qwen2", {**BASE, "tie_word_embeddings": True}),
    "qwen2-window": (
        "qwen2",
        {**BASE, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {**BASE, **HEAD, "head_dim": 32}),
    "qwen3-tied": ("qwen3", {**BASE, **HEAD, "tie_word_embeddings": True}),
    "phi3": ("phi3", {**BASE, "pad_token_id": None}),
    "phi3-partial": ("phi3", {**BASE, "pad_token_id": None, "partial_rotary_factor": 0.75}),
    "phi3-partial-longrope": (
        "phi3",
        {
            **BASE,
            "num_attention_heads": 2,
            "pad_token_id": None,
            "tie_word_embeddings": True,
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                **{key: value for key, value in ROPES["longrope"].items() if key != "factor"},
                "partial_rotary_factor": 0.5,
            },
        },
    ),
    "phi3-longrope": (
        "phi3",
        {
            **BASE,
            "pad_token_id": None,
            "original_max_position_embeddings": 64,
            "rope_parameters": {k: v for k, v in ROPES["longrope"].items() if k != "factor"},
        },
    ),
    "smollm3": ("smollm3", {**BASE, **SMOLLM3}),
    "smollm3-window": (
        "smollm3",
        {**BASE, **SMOLLM3, "no_rope_layers": [0, 1, 0, 1, 1], "use_sliding_window": True, "sliding_window": 8},
    ),
    "olmo2": ("olmo2", {**BASE, "pad_token_id": None, "eos_token_id": None}),
    "olmo3": ("olmo3", {**BASE, **OLMO3}),
    "olmo3-yarn": ("olmo3", {**BASE, **OLMO3, "rope_scaling": {**ROPES["yarn"], "attention_factor": 1.2}}),
    "exaone4": ("exaone4", {**BASE, **EXAONE4, "rope_parameters": {**ROPES["llama3"], "rope_theta": 1e6}}),
    "exaone4-full": (
        "exaone4",
        {**BASE, "sliding_window": None, "layer_types": ["full_attention"] * 3, "tie_word_embeddings": True},
    ),
    "granitemoe": ("granitemoe", {**BASE, **GRANITE_MOE, "tie_word_embeddings": False}),
    "granitemoe-tied": ("granitemoe", {**BASE, **GRANITE_MOE, "num_experts_per_tok": 1, "attention_bias": False}),
    "cwm": ("cwm", {**BASE, **CWM}),
    "cwm-listed": (
        "cwm",
        {
            **BASE,
            **CWM,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": {**ROPES["llama3"], "rope_theta": 5e5},
        },
    ),
    "arcee": ("arcee", {**BASE, "bos_token_id": 1, "eos_token_id": 2}),
    "arcee-bias": (
        "arcee",
        {
            **BASE,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {**ROPES["yarn"], "rope_theta": 1e4},
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "granite_swa": ("granite_swa", {**BASE, **GRANITE_SWA}),
    "granite_swa-bases": (
        "granite_swa",
        {
            **BASE,
            **GRANITE_SWA,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
            "layer_rope_theta": [10000, 0, 500.0, 10000],
            "mlp_bias": True,
        },
    ),
    "granitemoe_swa": (
        "granitemoe_swa",
        {
            **BASE,
            **GRANITE_SWA,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "shared_intermediate_size": 96,
            "layer_rope_theta": [0, 1e4, 1e4, 1e4, 0, 1e4],
        },
    ),
    "granite": ("granite", {**BASE, **GRANITE}),
    "granite-bias": ("granite", {**BASE, **GRANITE, "attention_bias": True, "mlp_bias": True}),
    "gemma2": ("gemma2", {**BASE, **HEAD, "sliding_window": 8}),
    "gemma2-uncapped": (
        "gemma2",
        {
            **BASE,
            **HEAD,
            "hidden_size": 80,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "query_pre_attn_scalar": 20,
            "layer_types": ["full_attention", "full_attention", "sliding_attention"],
        },
    ),
    "gemma3_text": ("gemma3_text", {**BASE, **HEAD, "sliding_window": 8, "num_hidden_layers": 6}),
    "gemma3_text-scaled": (
        "gemma3_text",
        {
            **BASE,
            **HEAD,
            "sliding_window": 8,
            "sliding_window_pattern": 2,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "rope_local_base_freq": 500.0,
            "final_logit_softcapping": 10.0,
        },
    ),
    "gemma4_text": ("gemma4_text", {**BASE, **DENSE_GEMMA4, "hidden_size_per_layer_input": 0}),
    "gemma4_unified_text": ("gemma4_unified_text", {**BASE, **DENSE_GEMMA4, "final_logit_softcapping": 30.0}),
    "gemma4_text-small": ("gemma4_text", {**BASE, **SMALL_GEMMA4}),
    "gemma4_text-experts": (
        "gemma4_text",
        {**BASE, **GEMMA4, **GEMMA4_MOE, "attention_k_eq_v": True, "attention_bias": True},
    ),
    "vaultgemma": ("vaultgemma", {**BASE, **HEAD, "sliding_window": 8}),
    "cohere": ("cohere", {**BASE, "bos_token_id": None, "eos_token_id": None}),
    "cohere-bias": (
        "cohere",
        {
            **BASE,
            "attention_bias": True,
            "logit_scale": 0.3,
            "tie_word_embeddings": False,
            "bos_token_id": None,
            "eos_token_id": None,
        },
    ),
    "cohere2": ("cohere2", {**BASE, **COHERE2, "logit_scale": 0.3}),
    "cohere2-bias": (
        "cohere2",
        {**BASE, **COHERE2, "attention_bias": True, "sliding_window_pattern": 2},
    ),
    "glm4": ("glm4", {**BASE, "head_dim": 32, "pad_token_id": None}),
    "glm4-whole": ("glm4", {**BASE, **HEAD, **GLM4}),
    "mixtral": ("mixtral", {**BASE, **MOE}),
    "mixtral-window": ("mixtral", {**BASE, **MOE, "sliding_window": 8}),
    "qwen3_moe": ("qwen3_moe", {**BASE, **HEAD, **QWEN_MOE, "head_dim": 32}),
    "qwen3_moe-sparse": (
        "qwen3_moe",
        {**BASE, **HEAD, **QWEN_MOE, "norm_topk_prob": False, "decoder_sparse_step": 2, "mlp_only_layers": [0]},
    ),
    "gpt_oss": ("gpt_oss", {**BASE, **HEAD, **MOE, "sliding_window": 8, "pad_token_id": None}),
    "gpt_oss-clamped": ("gpt_oss", {**BASE, **HEAD, **GPT_OSS}),
    "glm4_moe": ("glm4_moe", {**BASE, **GLM4_MOE, "attention_bias": True, "routed_scaling_factor": 2.5}),
    "glm4_moe-groups": (
        "glm4_moe",
        {
            **BASE,
            **GLM4_MOE,
            "n_group": 4,
            "topk_group": 2,
            "use_qk_norm": True,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
            "first_k_dense_replace": 0,
        },
    ),
    # The text part of models that read images
    "gemma3": (
        "gemma3",
        {
            "text_config": {**BASE, **HEAD, "sliding_window": 8, "num_hidden_layers": 6},
            "vision_config": {**EYE, "model_type": "siglip_vision_model", "image_size": 28},
            "mm_tokens_per_image": 4,
        },
    ),
    "gemma4": (
        "gemma4",
        {"text_config": {**BASE, **SMALL_GEMMA4}, "vision_config": {**EYE, **HEAD, "num_key_value_heads": 2}},
    ),
    "gemma4_unified": (
        "gemma4_unified",
        {
            "text_config": {**BASE, **DENSE_GEMMA4},
            "vision_config": {"patch_size": 4, "mm_embed_dim": 64, "mm_posemb_size": 8, "output_proj_dims": 64},
        },
    ),
    "mistral3": (
        "mistral3",
        {
            "text_config": {**BASE, **HEAD, "model_type": "mistral", "sliding_window": None},
            "vision_config": {**EYE, **HEAD, "model_type": "pixtral", "image_size": 28},
            "tie_word_embeddings": False,
        },
    ),
    "mistral3-ministral": (
        "mistral3",
        {
            "text_config": {**BASE, **MINISTRAL3, "model_type": "ministral3"},
            "vision_config": {**EYE, **HEAD, "model_type": "pixtral", "image_size": 28},
            "tie_word_embeddings": True,
        },
    ),
    "mistral3-mistral4": (
        "mistral3",
        {
            "text_config": {
                **BASE,
                **LATENT,
                **MISTRAL4,
                "model_type": "mistral4",
                "rope_parameters": {**MISTRAL4_ROPE},
            },
            "vision_config": {**EYE, **HEAD, "model_type": "pixtral", "image_size": 28},
            "tie_word_embeddings": False,
        },
    ),
    "qwen3_vl": (
        "qwen3_vl",
        {
            "text_config": {
                **BASE,
                **HEAD,
                "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [4, 2, 2]},
            },
            "vision_config": QWEN_EYE,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_vl_moe": (
        "qwen3_vl_moe",
        {
            "text_config": {
                **BASE,
                **HEAD,
                **QWEN_MOE,
                "moe_intermediate_size": 48,
                "mlp_only_layers": [1],
                "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [4, 2, 2]},
            },
            "vision_config": QWEN_EYE,
        },
    ),
    "glm4v": (
        "glm4v",
        {
            "text_config": {**BASE, "rope_parameters": GLM4V_ROPE, "pad_token_id": None},
            "vision_config": GLM4V_EYE,
        },
    ),
    "glm4v_moe": (
        "glm4v_moe",
        {
            "text_config": {**BASE, **GLM4_MOE, "rope_parameters": GLM4V_ROPE},
            "vision_config": GLM4V_EYE,
        },
    ),
    # Through transformers' own code
    "gpt2": ("gpt2", {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": VOCAB, "n_positions": MAX_LEN}),
    "opt": (
        "opt",
        {
            "hidden_size": 64,
            "ffn_dim": 128,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "vocab_size": VOCAB,
            "max_position_embeddings": MAX_LEN,
            "word_embed_proj_dim": 64,
        },
    ),
    "gpt_neox": ("gpt_neox", {k: v for k, v in BASE.items() if k != "num_key_value_heads"}),
    "granitemoehybrid": ("granitemoehybrid", {**BASE, **GRANITE_4, "attention_bias": True}),
    "seed_oss": ("seed_oss", {**BASE, **HEAD}),
    "seed_oss-bias": ("seed_oss", {**BASE, **HEAD, "attention_bias": False, "mlp_bias": True}),
    "ernie4_5": ("ernie4_5", {**BASE, "head_dim": 32, "pad_token_id": None}),
    "flex_olmo": ("flex_olmo", {**BASE, **OLMOE}),
    "flex_olmo-normalized": ("flex_olmo", {**BASE, **OLMOE, "norm_topk_prob": True, "attention_bias": True}),
    "olmoe": ("olmoe", {**BASE, **OLMOE}),
    "olmoe-normalized": ("olmoe", {**BASE, **OLMOE, "num_key_value_heads": 4, "norm_topk_prob": True}),
    "qwen3_5_text": ("qwen3_5_text", {**BASE, **QWEN3_5}),
    "qwen3_5_text-listed": (
        "qwen3_5_text",
        {
            **BASE,
            **QWEN3_5,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_value_heads": 2,
            "linear_value_head_dim": 24,
            "linear_conv_kernel_dim": 3,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "lfm2": (
        "lfm2",
        {
            **BASE,
            "layer_types": ["conv", "full_attention", "conv"],
            "block_multiple_of": 32,
            "block_ffn_dim_multiplier": 1.2,
        },
    ),
    "lfm2-bias": (
        "lfm2",
        {
            **BASE,
            "full_attn_idxs": [0],
            "conv_bias": True,
            "conv_L_cache": 4,
            "block_auto_adjust_ff_dim": False,
            "tie_word_embeddings": False,
        },
    ),
    "lfm3": (
        "lfm3",
        {
            **BASE,
            "num_hidden_layers": 4,
            "head_dim": 16,
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "conv", "full_attention", "sliding_attention"],
            "conv_L_cache": 7,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "lfm2_moe": (
        "lfm2_moe",
        {
            **BASE,
            "layer_types": ["conv", "full_attention", "conv"],
            "num_dense_layers": 1,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
        },
    ),
    "qwen2_moe": (
        "qwen2_moe",
        {**BASE, **QWEN_MOE, "shared_expert_intermediate_size": 40, "mlp_only_layers": [0], "decoder_sparse_step": 2},
    ),
    "qwen3_5_moe_text": ("qwen3_5_moe_text", {**BASE, **QWEN3_5, **QWEN3_5_MOE}),
    "qwen3_5_moe": (
        "qwen3_5_moe",
        {"text_config": {**BASE, **QWEN3_5, **QWEN3_5_MOE}, "vision_config": QWEN_EYE, "tie_word_embeddings": True},
    ),
    "qwen3_5": (
        "qwen3_5",
        {
            "text_config": {**BASE, **QWEN3_5},
            "vision_config": QWEN_EYE,
            "tie_word_embeddings": True,
        },
    ),
    "granitemoehybrid-mamba": ("granitemoehybrid", {**BASE, **GRANITE_4, **MAMBA, "position_embedding_type": None}),
    "granitemoehybrid-experts": (
        "granitemoehybrid",
        {
            **BASE,
            **GRANITE_4,
            **MAMBA,
            **GRANITE_4_MOE,
            "mamba_n_heads": 8,
            "mamba_n_groups": 2,
            "mamba_expand": 1,
            "mamba_d_conv": 3,
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
        },
    ),
    "granitemoehybrid-nope": (
        "granitemoehybrid",
        {**BASE, **GRANITE_4, **GRANITE_4_MOE, "position_embedding_type": None},
    ),
    "qwen3_next": (
        "qwen3_next",
        {**BASE, **QWEN3_5, **QWEN3_5_MOE, "rope_parameters": QWEN3_NEXT_ROPE},
    ),
    "qwen3_next-listed": (
        "qwen3_next",
        {
            **BASE,
            **QWEN3_5,
            **QWEN3_5_MOE,
            "rope_parameters": QWEN3_NEXT_ROPE,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_value_heads": 6,
            "linear_value_head_dim": 8,
            "mlp_only_layers": [1],
            "norm_topk_prob": False,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "deepseek_v2": ("deepseek_v2", {**BASE, **LATENT, **LATENT_EXPERTS, "q_lora_rank": None}),
    "deepseek_v2-groups": (
        "deepseek_v2",
        {
            **BASE,
            **LATENT,
            **LATENT_EXPERTS,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 16.0,
        },
    ),
    "deepseek_v3": ("deepseek_v3", {**BASE, **LATENT, **LATENT_EXPERTS, "norm_topk_prob": False}),
    "deepseek_v3-groups": (
        "deepseek_v3",
        {**BASE, **LATENT, **LATENT_EXPERTS, "n_group": 4, "topk_group": 2, "rope_parameters": LATENT_ROPE},
    ),
    "glm4_moe_lite": (
        "glm4_moe_lite",
        {
            **BASE,
            **LATENT,
            **LATENT_EXPERTS,
            "rope_interleave": False,
            "rope_parameters": LATENT_ROPE | {"mscale": 1.0},
        },
    ),
    "mistral4": ("mistral4", {**BASE, **LATENT, **MISTRAL4, "rope_parameters": {**MISTRAL4_ROPE}}),
    "mistral4-plain": (
        "mistral4",
        {
            **BASE,
            **LATENT,
            **MISTRAL4,
            "q_lora_rank": None,
            "first_k_dense_replace": 1,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
            "routed_scaling_factor": 2.0,
            "rope_interleave": False,
            "rope_parameters": {**MISTRAL4_ROPE},
        },
    ),
    "minicpm3": ("minicpm3", {**BASE, **LATENT, **MINICPM3, "v_head_dim": None}),
    "minicpm3-longrope": (
        "minicpm3",
        {
            **BASE,
            **LATENT,
            **MINICPM3,
            "q_lora_rank": None,
            "scale_emb": 3,
            "scale_depth": None,
            "dim_model_base": 32,
            "tie_word_embeddings": False,
            "rope_parameters": {
                **ROPES["longrope"],
                "original_max_position_embeddings": MAX_LEN,
                "short_factor": [1.0, 1.1, 1.2, 1.3],
                "long_factor": [1.0, 2.0, 3.0, 4.0],
            },
        },
    ),
    "youtu": ("youtu", {**BASE, **LATENT, "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2}),
    "ernie4_5_moe": ("ernie4_5_moe", {**BASE, **ERNIE_MOE}),
    "ernie4_5_moe-sparse": (
        "ernie4_5_moe",
        {
            **BASE,
            **ERNIE_MOE,
            "num_hidden_layers": 5,
            "moe_num_shared_experts": 0,
            "moe_layer_start_index": 2,
            "moe_layer_end_index": 3,
            "moe_layer_interval": 2,
            "tie_word_embeddings": False,
        },
    ),
    "hunyuan_v1_dense": (
        "hunyuan_v1_dense",
        {**BASE, "head_dim": 32, "tie_word_embeddings": True, "rope_parameters": HUNYUAN_ROPE},
    ),
    "hunyuan_v1_dense-bias": ("hunyuan_v1_dense", {**BASE, **HEAD, "attention_bias": True}),
    "afmoe": ("afmoe", {**BASE, **AFMOE, "mup_enabled": True}),
    "afmoe-step": (
        "afmoe",
        {**BASE, **AFMOE, "global_attn_every_n_layers": 2, "num_dense_layers": 0, "tie_word_embeddings": True},
    ),
    "mellum": (
        "mellum",
        {**BASE, **MELLUM, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "mellum-full": (
        "mellum",
        {
            **BASE,
            **MELLUM,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "norm_topk_prob": False,
            "rope_parameters": {
                "full_attention": {**ROPES["yarn"], "rope_theta": 5e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "laguna": ("laguna", {**BASE, **LAGUNA}),
    "laguna-layers": (
        "laguna",
        {
            **BASE,
            **LAGUNA,
            "num_attention_heads_per_layer": [4, 6, 6],
            "gating": "per-element",
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "rope_parameters": {
                "full_attention": {**ROPES["yarn"], "rope_theta": 5e5, "partial_rotary_factor": 0.5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75},
            },
        },
    ),
    "hy_v3": ("hy_v3", {**BASE, **HY_V3}),
    "hy_v3-listed": (
        "hy_v3",
        {
            **BASE,
            **HY_V3,
            "attention_bias": True,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "num_shared_experts": 2,
            "router_scaling_factor": 1.5,
            "tie_word_embeddings": True,
        },
    ),
    "minimax_m2": ("minimax_m2", {**BASE, **MINIMAX, "rotary_dim": 8}),
    "minimax_m2-whole": ("minimax_m2", {**BASE, **MINIMAX, "head_dim": 32, "num_experts_per_tok": 1}),
    "glm": ("glm", {**BASE, **HEAD, "pad_token_id": None}),
    "glm-whole": ("glm", {**BASE, **HEAD, **GLM4}),
    "granitemoeshared": ("granitemoeshared", {**BASE, **GRANITE_MOE, "shared_intermediate_size": 96}),
    "gemma": ("gemma", {**BASE, **HEAD}),
    "internlm3": ("internlm3", {**BASE, "head_dim": 32, "rope_parameters": {**ROPES["linear"], "rope_theta": 5e7}}),
    "internlm3-bias": ("internlm3", {**BASE, **HEAD, "attention_bias": True, "mlp_bias": True}),
    "helium": ("helium", {**BASE, **HEAD}),
    "hunyuan_v1_moe": (
        "hunyuan_v1_moe",
        {**BASE, **HEAD, "num_experts": 8, "moe_topk": [3, 3, 3], "tie_word_embeddings": True},
    ),
    "solar_open": ("solar_open", {**BASE, **SOLAR, "n_group": 2, "topk_group": 1}),
    "solar_open-bias": ("solar_open", {**BASE, **SOLAR, "attention_bias": True, "norm_topk_prob": False}),
    "exaone_moe": ("exaone_moe", {**BASE, **EXAONE_MOE}),
    "exaone_moe-listed": (
        "exaone_moe",
        {
            **BASE,
            **EXAONE_MOE,
            "mlp_layer_types": ["dense", "sparse", "sparse", "dense", "sparse"],
            "num_shared_experts": 2,
            "routed_scaling_factor": 1.5,
        },
    ),
    "gemma-uneven": ("gemma", {**BASE, "head_dim": 32, "hidden_size": 80, "num_key_value_heads": 1}),
    "dots1": ("dots1", {**BASE, **DOTS1, "norm_topk_prob": True, "sliding_window": None}),
    "dots1-window": (
        "dots1",
        {
            **BASE,
            **DOTS1,
            "first_k_dense_replace": 1,
            "attention_bias": True,
            "sliding_window": 8,
            "max_window_layers": 2,
            "n_group": 2,
            "topk_group": 1,
        },
    ),
    "nemotron_h": ("nemotron_h", {**BASE, **NEMOTRON_H, "hybrid_override_pattern": "M-MM-*-M*-"}),
    "nemotron_h-experts": (
        "nemotron_h",
        {
            **BASE,
            **NEMOTRON_H,
            **NEMOTRON_H_MOE,
            "hybrid_override_pattern": "MEM*EM-",
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "n_groups": 4,
            "conv_kernel": 3,
            "use_conv_bias": False,
            "use_bias": True,
        },
    ),
    "nemotron_h-latents": (
        "nemotron_h",
        {**BASE, **NEMOTRON_H, **NEMOTRON_H_MOE, "hybrid_override_pattern": "MEM*EM-", "moe_latent_size": 24},
    ),
}
NATIVE = [name for name, (kind, _) in MODELS.items() if kind in MODEL_TYPES]
PARTS = (
    "gemma3",
    "gemma4",
    "gemma4_unified",
    "mistral3",
    "mistral3-ministral",
    "mistral3-mistral4",
    "qwen3_vl",
    "qwen3_vl_moe",
    "glm4v",
    "glm4v_moe",
    "qwen3_5",
    "qwen3_5_moe",
)  # whose text part is native
FALLBACK = [name for name in MODELS if name not in NATIVE and name not in PARTS]
FLOAT32_ONLY = (
    "mixtral",
    "mixtral-window",
    "qwen3_moe",
    "qwen3_moe-sparse",
    "gpt_oss",
    "gpt_oss-clamped",
    "olmoe",
    "olmoe-normalized",
    "gemma4_text-experts",
    "glm4_moe",
    "glm4_moe-groups",
    "qwen3_vl_moe",
    "glm4v_moe",
    "granitemoe",
    "granitemoe-tied",
    "lfm2_moe",
    "qwen2_moe",
    "qwen3_5_moe_text",
    "qwen3_5_moe",
    "granitemoehybrid-experts",
    "granitemoehybrid-nope",
    "qwen3_next",
    "deepseek_v2",
    "deepseek_v2-groups",
    "deepseek_v3",
    "deepseek_v3-groups",
    "glm4_moe_lite",
    "qwen3_next-listed",
    "ernie4_5_moe",
    "ernie4_5_moe-sparse",
    "minimax_m2",
    "minimax_m2-whole",
    "granitemoeshared",
    "hunyuan_v1_moe",
    "solar_open",
    "solar_open-bias",
    "exaone_moe",
    "exaone_moe-listed",
    "dots1",
    "dots1-window",
    "nemotron_h-experts",
    "nemotron_h-latents",
    "granitemoe_swa",
    "flex_olmo",
    "flex_olmo-normalized",
    "mistral4",
    "mistral4-plain",
    "mistral3-mistral4",
    "afmoe",
    "afmoe-step",
    "mellum",
    "mellum-full",
    "laguna",
    "laguna-layers",
    "hy_v3",
    "hy_v3-listed",
)  # transformers' grouped products of experts refuse float64


def config(name: str) -> Any:
    """The transformers configuration of a model."""
    from transformers import AutoConfig

    kind, settings = MODELS[name]
    return AutoConfig.for_model(kind, **copy.deepcopy(settings))  # it writes into nested settings


def make(
    name: str, folder: Path, *, dtype: torch.dtype = torch.float32, seed: int = 0, shard: str | None = None
) -> Path:
    """Write a model folder (config.json and safetensors) unless it is there; gives the folder.

    Weights are drawn wider than at a training's start, so that greedy tokens differ and no two logits are close.
    """
    if (folder / "config.json").exists():
        return folder
    torch.manual_seed(seed)
    model = _class(MODELS[name][0]).from_config(config(name)).to(dtype)
    with torch.no_grad():
        for value in model.parameters():
            value.copy_(torch.randn_like(value) * 0.15 if value.dim() > 1 else value + torch.randn_like(value) * 0.1)
        for bias in corrections(model):
            bias.copy_(bias + torch.randn_like(bias) * 0.1)
    model.save_pretrained(folder, **({"max_shard_size": shard} if shard else {}))
    return folder


def narrow(folder: Path) -> Path:
    """Round the weights of a model folder in float32 to bfloat16, all but those by which routers choose."""
    tensors = load_file(folder / "model.safetensors")
    kept = {name for name in tensors if name.endswith((".gate.weight", "correction_bias", "moe_statics"))}
    narrowed = {name: tensor if name in kept else tensor.bfloat16() for name, tensor in tensors.items()}
    save_file(narrowed, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    path.write_text(path.read_text().replace('"float32"', '"bfloat16"'))
    return folder


def corrections(model: Any) -> list[torch.Tensor]:
    """The buffers of a model of transformers that are weights: the biases by which routers choose, scales of layers."""
    kinds = "e_score_correction_bias", "layer_scalar", "expert_bias"
    return [buffer for name, buffer in model.named_buffers() if name.endswith(kinds)]


def _class(kind: str) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, Mistral4Config, Mistral4ForCausalLM

    # transformers knows the class, but finds it in models that also read images alone.
    AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)
    return AutoModelForImageTextToText if kind in PARTS else AutoModelForCausalLM


def load_model(config: EngineConfig, folder: Path, progress: models.Progress = lambda share: None) -> models.Model:
    """The model of a folder on the CPU under these settings."""
    spec, checkpoint = models.examine(folder, config)
    device = torch.device("cpu")
    spec = models.fit(spec, config, device, checkpoint)
    return models.load(spec, checkpoint, device, models.product(config, spec, device), progress)


def cache_groups(folder: Path) -> CacheGroups:
    """How the layers of a folder's model share blocks."""
    return models.describe(folder, EngineConfig(model=str(folder))).groups


@functools.lru_cache(maxsize=4)
def oracle(folder: Path, dtype: torch.dtype, implementation: str = "sdpa") -> Any:
    """The folder as transformers runs it."""
    kind = json.loads((folder / "config.json").read_text())["model_type"]
    eager = kind in ("gpt_oss", "gemma2", "vaultgemma", "granite_swa", "granitemoe_swa")
    model = _class(kind).from_pretrained(folder, dtype=dtype, attn_implementation="eager" if eager else implementation)
    return model.eval()


def prompt(length: int, seed: int = 0) -> list[int]:
    """Token ids that no model here treats as special."""
    return torch.randint(5, VOCAB - 1, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
