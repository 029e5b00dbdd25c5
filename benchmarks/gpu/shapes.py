"""The models that are measured: config.json alone, since weights are random."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "attention_bias": False,
    "dtype": "bfloat16",
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "vocab_size": 151936,
}
SHAPES: dict[str, dict[str, Any]] = {
    "0.6B": {
        **QWEN3,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "8B": {
        **QWEN3,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
    "30B-A3B": {
        **QWEN3,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
    "Qwen3.5-0.8B": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "attn_output_gate": True,
        "dtype": "bfloat16",
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 6,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_value_head_dim": 128,
        "max_position_embeddings": 262144,
        "num_attention_heads": 8,
        "num_hidden_layers": 24,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        "tie_word_embeddings": True,
        "vocab_size": 248320,
    },
    "LFM2-1.2B": {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "block_auto_adjust_ff_dim": True,
        "block_ff_dim": 12288,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256,
        "conv_L_cache": 3,
        "conv_bias": False,
        "dtype": "bfloat16",
        "full_attn_idxs": [2, 5, 8, 10, 12, 14],
        "hidden_size": 2048,
        "intermediate_size": 12288,
        "max_position_embeddings": 128000,
        "norm_eps": 1e-5,
        "num_attention_heads": 32,
        "num_hidden_layers": 16,
        "num_key_value_heads": 8,
        "rope_theta": 1e6,
        "vocab_size": 65536,
    },
    "Granite-4.0-H-1B": {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "attention_multiplier": 0.0078125,
        "dtype": "bfloat16",
        "embedding_multiplier": 12,
        "hidden_act": "silu",
        "hidden_size": 1536,
        "intermediate_size": 4096,
        "layer_types": [("attention" if index in (5, 15, 25, 35) else "mamba") for index in range(40)],
        "logits_scaling": 6,
        "mamba_chunk_size": 256,
        "mamba_conv_bias": True,
        "mamba_d_conv": 4,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_expand": 2,
        "mamba_n_groups": 1,
        "mamba_n_heads": 48,
        "mamba_proj_bias": False,
        "max_position_embeddings": 131072,
        "num_attention_heads": 12,
        "num_experts_per_tok": 0,
        "num_hidden_layers": 40,
        "num_key_value_heads": 4,
        "num_local_experts": 0,
        "position_embedding_type": "nope",
        "residual_multiplier": 0.22,
        "rms_norm_eps": 1e-5,
        "shared_intermediate_size": 4096,
        "tie_word_embeddings": True,
        "vocab_size": 100352,
    },
    "tiny": {
        **QWEN3,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 512,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
    },
}
SHAPES["tiny mixture"] = {
    **SHAPES["tiny"],
    **{name: SHAPES["30B-A3B"][name] for name in ("architectures", "model_type", "norm_topk_prob")},
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def write(name: str, folder: Path, *, fp8: bool = False) -> Path:
    """Write the config.json of a shape to a folder, with or without weights in fp8; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**SHAPES[name], **({"quantization_config": FP8} if fp8 else {})}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder
