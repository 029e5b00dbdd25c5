"""How GGUF files of an architecture name and store what safetensors checkpoints have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .keys import Keys

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "token_embd_norm": "model.norm",  # of LFM2
    "output": "lm_head",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
LOOKED_UP = {"token_embd.weight", "per_layer_token_embd.weight"}  # tables of which a token needs a row
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Tensors of all experts of a layer, one expert after another.
QWEN_EXPERTS = {
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
MIXTRAL_EXPERTS = {
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
SHARED_EXPERTS = {
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
SHARED_EXPERT = {
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
GEMMA4 = {
    "ffn_norm": "pre_feedforward_layernorm",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "ffn_gate_inp": "router.proj",
    "ffn_gate_up_exps": "experts.{}.gate_up_proj",
    "ffn_down_exps": "experts.{}.down_proj",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
AFMOE = {
    "attn_gate": "self_attn.gate_proj",
    "ffn_norm": "pre_mlp_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
    "ffn_gate_inp": "mlp.gate",
}
# Tensors whose names end otherwise in safetensors checkpoints than with "weight" or "bias".
PARAMETERS = {
    "attn_sinks.weight": "self_attn.sinks",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "layer_output_scale.weight": "layer_scalar",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
}
NEGATIVE_EXPONENTIALS = {"ssm_a"}  # of which files have -exp(x)
FLAT = {"ssm_a", "ssm_d", "ssm_norm"}  # vectors that files of Mamba2 have as matrices
SINGLE_ROWS = {"ffn_gate_inp_shexp"}  # matrices of one row, which some files have as vectors
NORMS_AROUND = {"ffn_norm": "pre_feedforward_layernorm"}  # there is one after attention, too


def _no_settings(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    return {}


class Architecture(NamedTuple):
    """How files of an architecture differ from the config.json and the tensors of transformers' model."""

    name: str
    model_type: str
    settings: Callable[[Keys, dict[str, Any]], dict[str, Any]] = _no_settings  # more keys of config.json
    names: Mapping[str, str] = LAYER_NAMES  # of a layer's tensors
    parameters: Mapping[str, str] = PARAMETERS  # of those with other endings, see PARAMETERS
    # llama.cpp rotates neighbouring elements for these, so the rows of each head's queries and keys are interleaved.
    is_interleaved: bool = False
    norm_shift: float = 0.0  # added to the weights of norms
    rotates_partly: bool = False
    has_experts: bool = False  # whether it may have some
    has_latents: bool = False  # in the KV cache, see latent.py; keys are not as long as values
    layers_differ: bool = False  # keys may have a value for each layer
    eps: tuple[str, str] = ("attention.layer_norm_rms_epsilon", "rms_norm_eps")  # the keys in files and in config.json


def is_norm(name: str) -> bool:
    """Return whether a tensor is the weight of a norm that `norm_shift` is added to."""
    return name.endswith("norm.weight") and not name.endswith("ssm_norm.weight")
