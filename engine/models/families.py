"""The architectures of the native decoder."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Family:
    """How an architecture of the native decoder differs from Llama, and the defaults of its config.json."""

    qkv_bias: bool | None = None  # None: the key attention_bias decides
    output_bias: bool | None = None
    qk_norm: bool = False
    mlp_bias: bool = False  # whether the key mlp_bias is read
    head_dim: int | None = None  # None: hidden_size / heads
    kv_heads: int | None = None  # None: as many as heads
    max_positions: int = 2048
    window: int | None = None  # default of sliding_window, on every layer; 0: none, None: the key is not read
    layer_windows: bool = False  # use_sliding_window, max_window_layers and layer_types are read
    norm_eps: float = 1e-6
    is_joined: bool = False  # in checkpoints, Q, K and V are one tensor, and gate and up another
    experts: tuple[str, str, str, str] | None = None  # names of their tensors, see ExpertsSpec


FAMILIES = {
    "LlamaForCausalLM": Family(mlp_bias=True),
    "MistralForCausalLM": Family(qkv_bias=False, output_bias=False, kv_heads=8, max_positions=131072, window=4096),
    "Qwen2ForCausalLM": Family(
        qkv_bias=True, output_bias=False, kv_heads=32, max_positions=32768, window=4096, layer_windows=True
    ),
    "Qwen3ForCausalLM": Family(
        qk_norm=True, head_dim=128, kv_heads=32, max_positions=32768, window=4096, layer_windows=True
    ),
    "Phi3ForCausalLM": Family(
        qkv_bias=False, output_bias=False, max_positions=4096, window=0, norm_eps=1e-5, is_joined=True
    ),
    "MixtralForCausalLM": Family(
        qkv_bias=False,
        output_bias=False,
        kv_heads=8,
        max_positions=131072,
        window=0,
        norm_eps=1e-5,
        experts=(
            "block_sparse_moe.gate",
            "block_sparse_moe.experts.{}.w1",
            "block_sparse_moe.experts.{}.w3",
            "block_sparse_moe.experts.{}.w2",
        ),
    ),
    "Qwen3MoeForCausalLM": Family(
        qk_norm=True,
        kv_heads=4,
        max_positions=32768,
        experts=("mlp.gate", "mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj", "mlp.experts.{}.down_proj"),
    ),
}
MODEL_TYPES = {  # for a config.json without `architectures`
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
