"""GGUF files of each architecture, with names and numbers as the gguf package and llama.cpp's converter have them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gguf import GGUFValueType as ValueType

from engine import EngineConfig, ModelError, plan, roofline
from engine.gguf import config as gguf_config
from engine.gguf.checkpoint import GgufCheckpoint
from engine.gguf.folder import folder_of
from engine.hub import fetch
from engine.kernels.blocks import Blocks
from engine.models.decoder import Decoder
from engine.models.spec import read_spec
from tests.engine.test_exact import serve
from tests.engine.test_gguf import WORDS, cache  # noqa: F401  # a fixture
from tests.engine.test_kernels import needs_library
from tests.engine.test_models import Bench, oracle, whole
from tests.engine.test_planned_weights import held, size
from tests.models import FLOAT32_ONLY, MAX_LEN, MODELS, config, load_model, make, prompt

# The models of tests/models.py, and their architecture in GGUF files.
ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "phi3": "phi3",
    "phi3-partial": "phi3",
    "phi3-longrope": "phi3",
    "smollm3": "smollm3",
    "granite": "granite",
    "olmo2": "olmo2",
    "olmo3": "olmo2",
    "olmo3-yarn": "olmo2",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "gpt_oss": "gpt-oss",
    "glm4_moe": "glm4moe",
    "glm4_moe-groups": "glm4moe",
    "glm4": "glm4",
    "deepseek_v2": "deepseek2",
    "deepseek_v2-groups": "deepseek2",
    "deepseek_v3": "deepseek2",
    "deepseek_v3-groups": "deepseek2",
    "youtu": "deepseek2",
    "glm4-whole": "glm4",
    "ministral3": "mistral3",
    "mistral-full": "mistral3",
    "cohere2": "cohere2",
    "exaone4": "exaone4",
    "exaone4-full": "exaone4",
    "granitemoe": "granitemoe",
    "gemma4_text": "gemma4",
    "gemma4_text-small": "gemma4",
    "gemma4_text-experts": "gemma4",
    "gemma4_unified_text": "gemma4",
    "ernie4_5": "ernie4_5",
    "olmoe": "olmoe",
    "qwen3_5_text": "qwen35",
    "qwen3_5_text-listed": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "lfm2": "lfm2",
    "lfm2-bias": "lfm2",
    "lfm2_moe": "lfm2moe",
    "granitemoehybrid-mamba": "granitehybrid",
    "granitemoehybrid-experts": "granitehybrid",
    "qwen3_next": "qwen3next",
    "nemotron_h": "nemotron_h",
    "nemotron_h-experts": "nemotron_h_moe",
    "nemotron_h-latents": "nemotron_h_moe",
    "ernie4_5_moe": "ernie4_5-moe",
    "hunyuan_v1_dense": "hunyuan-dense",
    "hunyuan_v1_dense-bias": "hunyuan-dense",
    "minimax_m2": "minimax-m2",
    "glm": "chatglm",
    "glm-whole": "chatglm",
    "gemma": "gemma",
    "dots1": "dots1",
    "seed_oss": "seed_oss",
    "seed_oss-bias": "seed_oss",
    "granitemoeshared": "granitemoe",
    "hunyuan_v1_moe": "hunyuan-moe",
    "exaone_moe": "exaone-moe",
    "solar_open": "glm4moe",
    "solar_open-bias": "glm4moe",
    "internlm3-bias": "llama",
    "arcee": "arcee",
    "afmoe": "afmoe",
    "minicpm3": "minicpm3",
    "mistral4": "mistral4",
    "cohere": "command-r",
}
INTERLEAVED = {"llama", "arcee", "smollm3", "granite", "granitemoe", "granitehybrid", "mistral3"}
OWN_NAMES = {  # which the gguf package does not map
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "layer_scalar": "layer_output_scale.weight",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
}
RECURRENT = "attention.recurrent_layers"  # a key for which the gguf package has no method
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+\.(?:weight|bias))")


def settings_of(model: Any) -> dict[str, Any]:
    """Return the values that llama.cpp's converter writes for a config, by the name of the writer's method."""
    found = {
        "context_length": MAX_LEN,
        "embedding_length": model.hidden_size,
        "block_count": model.num_hidden_layers,
        "feed_forward_length": getattr(model, "intermediate_size", None),
        "head_count": model.num_attention_heads,
        "head_count_kv": model.num_key_value_heads,
        "layer_norm_rms_eps": getattr(model, "rms_norm_eps", None),
        "layer_norm_eps": getattr(model, "layer_norm_eps", None),
        "key_length": getattr(model, "head_dim", None),
        "value_length": getattr(model, "head_dim", None),
        "sliding_window": getattr(model, "sliding_window", None),
        "attention_scale": getattr(model, "attention_multiplier", None),
        "embedding_scale": getattr(model, "embedding_multiplier", None),
        "residual_scale": getattr(model, "residual_multiplier", None),
        "logit_scale": getattr(model, "logits_scaling", None) or getattr(model, "logit_scale", None),
        "attn_logit_softcapping": getattr(model, "attn_logit_softcapping", None),
        "final_logit_softcapping": getattr(model, "final_logit_softcapping", None),
        "expert_count": getattr(model, "num_local_experts", None) or getattr(model, "num_experts", None),
        "expert_used_count": getattr(model, "num_experts_per_tok", None),
        "expert_feed_forward_length": getattr(model, "moe_intermediate_size", None),
    }
    if model.model_type == "glm4_moe":
        found |= {
            "expert_count": model.n_routed_experts,
            "expert_shared_count": model.n_shared_experts,
            "expert_weights_scale": model.routed_scaling_factor,
            "expert_weights_norm": model.norm_topk_prob,
            "expert_gating_func": gguf.ExpertGatingFuncType.SIGMOID,
            "leading_dense_block_count": model.first_k_dense_replace,
            "expert_group_count": model.n_group,
            "expert_group_used_count": model.topk_group,
            "rope_dimension_count": model.head_dim // 2,
        }
    if model.model_type == "minimax_m2":
        found |= {
            "expert_feed_forward_length": model.intermediate_size,
            "expert_gating_func": gguf.ExpertGatingFuncType.SIGMOID,
            "rope_dimension_count": model.rotary_dim,
        }
    if model.model_type == "glm":  # whose heads have the size of the hidden state, divided
        rotated = int(model.head_dim * model.rope_parameters["partial_rotary_factor"])
        found |= {"key_length": None, "value_length": None, "rope_dimension_count": rotated}
    if model.model_type in ("dots1", "solar_open", "exaone_moe"):
        found |= {
            "expert_count": getattr(model, "n_routed_experts", None) or model.num_experts,
            "expert_shared_count": getattr(model, "n_shared_experts", None) or model.num_shared_experts,
            "expert_weights_scale": model.routed_scaling_factor,
            "expert_weights_norm": model.norm_topk_prob,
            "expert_gating_func": gguf.ExpertGatingFuncType.SIGMOID,
            "expert_group_count": model.n_group,
            "expert_group_used_count": model.topk_group,
            "leading_dense_block_count": getattr(model, "first_k_dense_replace", None),
        }
    if model.model_type == "hunyuan_v1_moe":
        found |= {
            "expert_used_count": model.moe_topk[0],
            "expert_feed_forward_length": model.intermediate_size,
            "expert_shared_feed_forward_length": model.intermediate_size,
        }
    if model.model_type == "granitemoeshared":
        found["expert_shared_feed_forward_length"] = model.shared_intermediate_size
    if model.model_type == "ernie4_5_moe":
        found |= {
            "expert_count": model.moe_num_experts,
            "expert_used_count": model.moe_k,
            "expert_shared_count": model.moe_num_shared_experts,
            # As llama.cpp's converter: it is the size of the shared experts of the published model.
            "expert_shared_feed_forward_length": model.intermediate_size // model.num_key_value_heads,
            "leading_dense_block_count": model.moe_layer_start_index,
            "interleave_moe_layer_step": model.moe_layer_interval,
        }
    if model.model_type == "gpt_oss":
        found |= {
            "expert_feed_forward_length": model.intermediate_size,
            "rope_scaling_type": gguf.RopeScalingType.YARN,
            "rope_scaling_factor": model.rope_parameters["factor"],
            "rope_scaling_orig_ctx_len": model.rope_parameters["original_max_position_embeddings"],
        }
    if model.model_type == "glm4":
        found["rope_dimension_count"] = int(model.head_dim * model.rope_parameters["partial_rotary_factor"])
    if "mscale_all_dim" in (model.rope_parameters or {}):
        found |= {
            "rope_scaling_type": gguf.RopeScalingType.YARN,
            "rope_scaling_factor": model.rope_parameters["factor"],
            "rope_scaling_orig_ctx_len": model.rope_parameters["original_max_position_embeddings"],
            "rope_scaling_yarn_beta_fast": model.rope_parameters.get("beta_fast"),
            "rope_scaling_yarn_beta_slow": model.rope_parameters.get("beta_slow"),
            "rope_scaling_yarn_log_mul": model.rope_parameters["mscale_all_dim"],
            "attn_temperature_scale": model.rope_parameters.get("llama_4_scaling_beta", 0.0),
        }
    if hasattr(model, "kv_lora_rank"):
        found |= of_latents(model)
    everywhere = (model.rope_parameters or {}).get("full_attention", {})
    if model.model_type == "olmo3" and everywhere["rope_type"] == "yarn":
        found |= {
            "rope_scaling_type": gguf.RopeScalingType.YARN,
            "rope_scaling_factor": everywhere["factor"],
            "rope_scaling_attn_factors": everywhere["attention_factor"],
            "rope_scaling_orig_ctx_len": everywhere["original_max_position_embeddings"],
        }
    if model.model_type == "afmoe":
        found |= {
            "expert_shared_count": model.num_shared_experts,
            "expert_weights_scale": model.route_scale,
            "expert_weights_norm": True,
            "leading_dense_block_count": model.num_dense_layers,
        }
    if model.model_type in ("cohere", "cohere2"):
        found["rope_scaling_type"] = gguf.RopeScalingType.NONE
    if model.model_type.startswith("gemma4"):
        found |= of_gemma4(model)
    if model.model_type.startswith(("qwen3_5", "qwen3_next")):
        found |= of_qwen35(model)
    if model.model_type.startswith("lfm2"):
        found |= of_lfm2(model)
    if model.model_type == "granitemoehybrid":
        found |= of_granite4(model)
    if model.model_type == "nemotron_h":
        found |= of_nemotron_h(model)
    if model.model_type == "olmo3" or (model.model_type in ("exaone4", "exaone_moe") and model.sliding_window):
        found["sliding_window_pattern"] = [kind == "sliding_attention" for kind in model.layer_types]
    return {key: value for key, value in found.items() if value is not None}


def of_gemma4(model: Any) -> dict[str, Any]:
    """Return the same of a Gemma 4, with a value for each layer where layers differ."""
    windowed, layers = [kind == "sliding_attention" for kind in model.layer_types], range(model.num_hidden_layers)
    sizes = {int(layer): each for layer, each in model.to_dict()["per_layer_config"].items()}
    shared = getattr(model, "num_kv_shared_layers", 0)
    doubled = [layer >= len(layers) - shared and model.use_double_wide_mlp for layer in layers]
    wide = next(each["head_dim"] for each in sizes.values())
    return {
        "key_length": wide,
        "value_length": wide,
        "key_length_swa": model.head_dim,
        "value_length_swa": model.head_dim,
        "rope_dimension_count": wide,
        "rope_dimension_count_swa": model.head_dim,
        "rope_freq_base_swa": model.rope_parameters["sliding_attention"]["rope_theta"],
        "sliding_window_pattern": windowed,
        "shared_kv_layers": shared,
        "embedding_length_per_layer_input": getattr(model, "hidden_size_per_layer_input", 0),
        "head_count_kv": [
            sizes.get(layer, {}).get("num_key_value_heads", model.num_key_value_heads) for layer in layers
        ],
        "feed_forward_length": [(1 + each) * model.intermediate_size for each in doubled],
        "expert_used_count": getattr(model, "top_k_experts", None),
    }


def of_qwen35(model: Any) -> dict[str, Any]:
    """Return the same of a Qwen3.5 or Qwen3-Next. All layers of one with experts have some, and none has an MLP
    alone."""
    has_experts, sections = hasattr(model, "num_experts"), model.rope_parameters.get("mrope_section")
    return {
        "feed_forward_length": None if has_experts else model.intermediate_size,
        "ssm_conv_kernel": model.linear_conv_kernel_dim,
        "ssm_state_size": model.linear_key_head_dim,
        "ssm_group_count": model.linear_num_key_heads,
        "ssm_time_step_rank": model.linear_num_value_heads,
        "ssm_inner_size": model.linear_num_value_heads * model.linear_value_head_dim,
        "full_attention_interval": 4,  # which the converter writes beside any list
        RECURRENT: [kind == "linear_attention" for kind in model.layer_types],
        "rope_dimension_count": int(model.head_dim * model.rope_parameters["partial_rotary_factor"]),
        "rope_dimension_sections": sections and [*sections, 0],
        "expert_shared_feed_forward_length": getattr(model, "shared_expert_intermediate_size", None),
    }


def of_lfm2(model: Any) -> dict[str, Any]:
    """Return the same of an LFM2, whose layers with a convolution have no heads of keys."""
    size = model.intermediate_size
    found = {
        "head_count_kv": [model.num_key_value_heads if kind == "full_attention" else 0 for kind in model.layer_types],
        "shortconv_l_cache": model.conv_L_cache,
        "layer_norm_rms_eps": model.norm_eps,
    }
    if model.model_type == "lfm2_moe":
        return found | {
            "leading_dense_block_count": model.num_dense_layers,
            "expert_gating_func": gguf.ExpertGatingFuncType.SIGMOID,
        }
    if model.block_auto_adjust_ff_dim:
        size, multiple = int(model.block_ffn_dim_multiplier * int(2 * size / 3)), model.block_multiple_of
        size = -(-size // multiple) * multiple
    return found | {"feed_forward_length": size}


def of_granite4(model: Any) -> dict[str, Any]:
    """Return the same of a Granite 4.0, whose layers of Mamba have no heads of keys."""
    has_experts = model.num_local_experts > 0
    return {
        "feed_forward_length": model.intermediate_size if has_experts else model.shared_intermediate_size,
        "expert_shared_feed_forward_length": model.shared_intermediate_size,
        "expert_used_count": model.num_experts_per_tok if has_experts else None,
        "head_count_kv": [model.num_key_value_heads if kind == "full_attention" else 0 for kind in model.layer_types],
        "rope_scaling_finetuned": model.position_embedding_type == "rope",
        "ssm_conv_kernel": model.mamba_d_conv,
        "ssm_state_size": model.mamba_d_state,
        "ssm_group_count": model.mamba_n_groups,
        "ssm_inner_size": model.mamba_expand * model.hidden_size,
        "ssm_time_step_rank": model.mamba_n_heads,
    }


def of_latents(model: Any) -> dict[str, Any]:
    """Return the same of a model with multi-head latent attention."""
    has_experts, rope = hasattr(model, "n_routed_experts"), model.rope_parameters or {}
    found = {
        "head_count_kv": 1,
        "q_lora_rank": model.q_lora_rank,
        "kv_lora_rank": model.kv_lora_rank,
        "key_length": model.kv_lora_rank + model.qk_rope_head_dim,
        "value_length": model.kv_lora_rank,
        "key_length_mla": model.qk_nope_head_dim + model.qk_rope_head_dim,
        "value_length_mla": model.v_head_dim,
        "rope_dimension_count": model.qk_rope_head_dim,
        "rope_scaling_yarn_log_mul": 0.1 * rope["mscale_all_dim"] if "mscale_all_dim" in rope else None,
        "attn_temperature_scale": rope.get("llama_4_scaling_beta"),
        "leading_dense_block_count": model.num_hidden_layers,
        "expert_feed_forward_length": model.intermediate_size,
        "expert_shared_count": 0,
    }
    if model.model_type == "minicpm3":  # whose files have no scales, nor sizes of values
        names = "q_lora_rank", "kv_lora_rank", "rope_dimension_count"
        return {"key_length": found["key_length_mla"], "value_length": None} | {name: found[name] for name in names}
    if not has_experts:
        return found
    has_sigmoids = model.model_type not in ("deepseek_v2", "mistral4")
    return found | {
        "expert_count": model.n_routed_experts,
        "expert_feed_forward_length": model.moe_intermediate_size,
        "expert_shared_count": model.n_shared_experts,
        "expert_weights_scale": model.routed_scaling_factor,
        "expert_weights_norm": True if model.model_type != "deepseek_v2" and model.norm_topk_prob else None,
        "expert_gating_func": gguf.ExpertGatingFuncType.SIGMOID if has_sigmoids else None,
        "leading_dense_block_count": model.first_k_dense_replace,
        "expert_group_count": model.n_group,
        "expert_group_used_count": model.topk_group,
    }


def latents(name: str, numbers: torch.Tensor, model: Any, *, is_old: bool) -> list[tuple[str, torch.Tensor]]:
    """Return the parts of a tensor of such a model as files have them."""
    if not name.endswith("kv_b_proj.weight") or is_old:
        return [(name, numbers)]
    both = numbers.unflatten(0, (model.num_attention_heads, -1))
    keys, values = both.split([model.qk_nope_head_dim, model.v_head_dim], 1)
    return [(name.replace("kv_b", "k_b"), keys.transpose(1, 2).contiguous()), (name.replace("kv_b", "v_b"), values)]


def of_nemotron_h(model: Any) -> dict[str, Any]:
    """Return the same of a Nemotron-H, in which each layer has one part. llama.cpp's converter cannot write a file with
    experts in which other layers have an MLP."""
    kinds, has_experts = model.layer_types, "moe" in model.layer_types
    sizes = {"mlp": model.intermediate_size, "moe": model.moe_intermediate_size}
    found = {
        "feed_forward_length": [sizes.get(kind, 0) for kind in kinds],
        "head_count_kv": [model.num_key_value_heads if kind == "full_attention" else 0 for kind in kinds],
        "layer_norm_rms_eps": model.layer_norm_epsilon,
        "ssm_conv_kernel": model.conv_kernel,
        "ssm_state_size": model.ssm_state_size,
        "ssm_group_count": model.n_groups,
        "ssm_inner_size": model.mamba_num_heads * model.mamba_head_dim,
        "ssm_time_step_rank": model.mamba_num_heads,
    }
    if not has_experts:
        unused = "expert_count", "expert_used_count", "expert_feed_forward_length"
        return found | dict.fromkeys(unused)
    return found | {
        "expert_count": model.n_routed_experts,
        "expert_shared_count": model.n_shared_experts,
        "expert_shared_feed_forward_length": model.moe_shared_expert_intermediate_size,
        "expert_weights_norm": model.norm_topk_prob,
        "expert_weights_scale": model.routed_scaling_factor,
        "expert_group_count": model.n_group,
        "moe_latent_size": model.moe_latent_size,
    }


def nemotron_h(name: str, numbers: torch.Tensor, model: Any) -> list[tuple[str, torch.Tensor]]:
    """Return the parts of a tensor of a Nemotron-H as files have them."""
    name = name.replace("model.embeddings", "backbone.embeddings").replace("model.", "backbone.")
    if name.endswith((".A_log", ".D")):
        numbers = (-numbers.exp() if name.endswith(".A_log") else numbers)[:, None]
    elif name.endswith(".mixer.norm.weight"):
        numbers = numbers.unflatten(0, (model.n_groups, -1))
    if name.endswith((".experts.up_proj", ".experts.down_proj")):
        return [(name.replace("backbone.", "model.").replace(".mixer.", ".mlp.") + ".weight", numbers)]
    return [(name.replace("dt_bias", "dt.bias"), numbers)]


def granite4(name: str, numbers: torch.Tensor, model: Any) -> list[tuple[str, torch.Tensor]]:
    """Return the parts of a tensor of a Granite 4.0 as files have them."""
    if ".shared_mlp." in name and not model.num_local_experts:
        name = name.replace("shared_mlp", "mlp")
    name = name.replace("shared_mlp", "mlp.shared_experts").replace("output_linear", "down_proj")
    if "input_linear" in name:
        halves = zip(("gate_proj", "up_proj"), numbers.chunk(2), strict=True)
        return [(name.replace("input_linear", half), part) for half, part in halves]
    if name.endswith((".A_log", ".D")):
        numbers = (-numbers.exp() if name.endswith(".A_log") else numbers)[:, None]
    elif name.endswith(".mamba.norm.weight"):
        numbers = numbers.unflatten(0, (model.mamba_n_groups, -1))
    return [(name.replace("dt_bias", "dt_proj.bias"), numbers)]


def qwen35(name: str, numbers: torch.Tensor, model: Any) -> tuple[str, torch.Tensor]:
    """Return a tensor of a Qwen3.5 as files have it."""
    if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        numbers = numbers + 1
    _, _, own = name.partition(".linear_attn.")
    keys, dim = model.linear_num_key_heads, model.linear_value_head_dim

    def tiled(x: torch.Tensor, size: int) -> torch.Tensor:
        return x.unflatten(0, (keys, -1, size)).transpose(0, 1).flatten(0, 2)

    if own in ("in_proj_qkv.weight", "conv1d.weight"):
        before = 2 * keys * model.linear_key_head_dim
        numbers = torch.cat([numbers[:before], tiled(numbers[before:], dim)])
    elif own == "out_proj.weight":
        numbers = tiled(numbers.T, dim).T
    elif own == "in_proj_z.weight":
        numbers = tiled(numbers, dim)
    elif own in ("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias"):
        numbers = tiled(numbers, 1)
    if own == "A_log":
        numbers = -numbers.exp()
    return name.replace("dt_bias", "dt_proj.bias"), numbers


def qwen3next(name: str, numbers: torch.Tensor, model: Any) -> list[tuple[str, torch.Tensor]]:
    """Return the parts of a tensor of a Qwen3-Next as files have them."""
    if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        numbers = numbers + 1
    elif name.endswith(".A_log"):
        numbers = -numbers.exp()
    elif name.endswith("in_proj_qkvz.weight") and not model.is_old:
        keys, dim = model.linear_num_key_heads, model.linear_key_head_dim
        values = model.linear_num_value_heads // keys * model.linear_value_head_dim
        groups = numbers.unflatten(0, (keys, -1)).split([dim, dim, values, values], 1)
        *qkv, z = (part.flatten(0, 1) for part in groups)
        return [(name.replace("qkvz", "qkv"), torch.cat(qkv)), (name.replace("qkvz", "z"), z)]
    return [(name.replace("dt_bias", "dt_proj.bias"), numbers)]


def with_joined_qkv(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors with the projections of queries, keys and values in one."""
    joined: dict[str, list[torch.Tensor]] = {}
    for name, numbers in state.items():
        joined.setdefault(re.sub(r"\.[qkv]_proj\.", ".qkv_proj.", name), []).append(numbers)
    return {name: torch.cat(parts) for name, parts in joined.items()}


def write(
    folder: Path,
    path: Path,
    name: str,
    kind: Type = Type.F32,
    *,
    tensors: dict[str, tuple[int, ...]] | None = None,
    architecture: str = "",
    is_old: bool = False,
    **changed: Any,
) -> Path:
    """Convert the model of a folder as llama.cpp does. `tensors`: names and shapes of more tensors; `architecture`:
    another name of it; `is_old`: as its first versions did."""
    from transformers import AutoModelForCausalLM
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    architecture, model = architecture or ARCHITECTURES[name], config(name)
    model.allow_global_per_layer_attribute_access = True  # of a Gemma 4, whose layers differ
    if model.model_type == "nemotron_h":
        model.rope_parameters = {}  # it has no rotary embedding
    writer = gguf.GGUFWriter(path, architecture)
    settings = {**settings_of(model), **changed}
    if linear := settings.pop(RECURRENT, None):
        writer.add_array(f"{architecture}.{RECURRENT}", linear)
    for key, value in settings.items():
        if value is not None:
            getattr(writer, f"add_{key}")(value)
    rope = model.rope_parameters
    head_dim = getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads
    alpha = rope.get("alpha", 1.0) ** (head_dim / (head_dim - 2))
    writer.add_rope_freq_base(rope.get("full_attention", rope).get("rope_theta", 10000.0) * alpha)
    if architecture == "phi3" and "rope_dimension_count" not in changed:
        writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if architecture == "phi3" and "long_factor" in rope:
        writer.add_rope_scaling_orig_ctx_len(model.original_max_position_embeddings)
    if architecture in ("phi3", "minicpm3") and "long_factor" in rope:
        for length in ("long", "short"):
            writer.add_tensor(f"rope_factors_{length}.weight", np.array(rope[f"{length}_factor"], np.float32))
    if rope.get("rope_type") == "llama3":
        plain = rope["rope_theta"] ** (torch.arange(0, head_dim, 2) / head_dim)
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](model)
        writer.add_tensor("rope_freqs.weight", (1 / (plain * scaled)).float().numpy())
    if architecture == "gemma4":
        factors = np.full(settings_of(model)["key_length"] // 2, 1e30, np.float32)
        factors[: int(len(factors) * rope["full_attention"]["partial_rotary_factor"])] = 1
        writer.add_tensor("rope_freqs.weight", factors)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(WORDS)
    writer.add_token_merges([])
    writer.add_eos_token_id(7)
    known = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    names = gguf.get_tensor_name_map(known, model.num_hidden_layers)
    experts: dict[str, list[np.ndarray]] = {}
    state = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    if architecture in ("qwen35", "qwen35moe"):
        state = dict(qwen35(own, numbers, model) for own, numbers in state.items())
    if architecture == "qwen3next":
        model.is_old = is_old
        state = dict(part for own, numbers in state.items() for part in qwen3next(own, numbers, model))
    if architecture in ("deepseek2", "mistral4"):
        state = dict(part for own, numbers in state.items() for part in latents(own, numbers, model, is_old=is_old))
    if architecture == "granitehybrid" or model.model_type == "granitemoeshared":
        state = dict(part for own, numbers in state.items() for part in granite4(own, numbers, model))
    if model.model_type == "nemotron_h":
        state = dict(part for own, numbers in state.items() for part in nemotron_h(own, numbers, model))
    if architecture == "chatglm" and is_old:
        state = with_joined_qkv(state)
    for own, numbers in state.items():
        if own == "lm_head.weight" and model.tie_word_embeddings:
            continue
        ending = next((ending for ending in OWN_NAMES if own.endswith(ending)), None)
        if architecture == "gemma4" and ending is not None:
            add(writer, f"blk.{own.split('.')[2]}.{OWN_NAMES[ending]}", numbers.numpy(), kind)
            continue
        mapped = own.replace("block_sparse_moe", "mlp").replace("feed_forward.experts", "mlp.experts")
        mapped = mapped.replace("expert_bias", "expert_bias.bias").replace("gate.moe_statics", "moe_statics")
        mapped = mapped.replace(".mlp.e_score", ".mlp.gate.e_score")
        if architecture == "mistral4" and ".experts." in mapped:  # gates are not divided from what they multiply
            add(writer, names.get_name(f"{mapped}.weight", (".weight",)), numbers.numpy(), kind)
            continue
        for part_name, plain in parts(mapped, numbers, alternating=model.model_type == "gpt_oss"):
            part = plain.squeeze(1) if part_name.endswith(("conv.conv.weight", "conv1d.weight")) else plain
            part = part.squeeze(0) if ".moe_statics." in part_name else part
            found = EXPERT.fullmatch(part_name)
            if found is not None:
                experts.setdefault(f"{found[1]}.{found[3]}", []).append(part.numpy())
                continue
            if architecture in INTERLEAVED and re.search(r"\.[qk]_proj\.", part_name):
                part = part.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)
            if architecture in ("gemma", "gemma2", "gemma3") and part_name.endswith("norm.weight"):
                part = part + 1
            named = names.get_name(part_name.replace("_correction_bias", "_correction.bias"), (".weight", ".bias"))
            add(writer, f"{named}.weight" if own.endswith("sinks") else named, part.numpy(), kind)
    for own, each in experts.items():
        add(writer, names.get_name(own, (".weight", ".bias")), np.stack(each), kind)
    for own, shape in (tensors or {}).items():
        add(writer, own, np.zeros(shape, np.float32), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def parts(name: str, numbers: torch.Tensor, *, alternating: bool) -> list[tuple[str, torch.Tensor]]:
    """Return a tensor of transformers' model as files have it: one for each expert. `alternating`: gpt-oss's layout."""
    start, _, own = name.partition(".experts.")
    last, _, _ = own.partition("_proj")
    kind = "bias" if own.endswith("_bias") else "weight"
    if not own:
        return [(name, numbers)]
    if alternating and kind == "weight":
        numbers = numbers.transpose(1, 2)
    halves = {last: numbers}
    if last == "gate_up":
        gate, up = (numbers[:, ::2], numbers[:, 1::2]) if alternating else numbers.chunk(2, dim=1)
        halves = {"gate": gate, "up": up}
    return [
        (f"{start}.experts.{index}.{half}_proj.{kind}", expert)
        for half, each in halves.items()
        for index, expert in enumerate(each)
    ]


def add(writer: gguf.GGUFWriter, name: str, numbers: np.ndarray, kind: Type) -> None:
    plain = "bias", "norm.weight", "ffn_gate_inp.weight"
    if kind == Type.F32 or numbers.ndim == 1 or name.endswith(plain) or numbers.shape[-1] % 32:
        writer.add_tensor(name, np.ascontiguousarray(numbers, dtype=np.float32))
    else:
        writer.add_tensor(name, gguf.quantize(np.ascontiguousarray(numbers), kind), raw_dtype=kind)


def made(name: str, folder: Path) -> Path:
    make(name, folder, dtype=torch.float32)
    if name.startswith(("gemma2", "gemma3")):  # files do not have this value, which is the size of a head
        source = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(source | {"query_pre_attn_scalar": source["head_dim"]}))
    return folder


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_are_those_of_the_model_that_was_converted(tmp_path, name):
    folder = made(name, tmp_path / "model")
    path = write(folder, tmp_path / "model.gguf", name)
    model = load_model(EngineConfig(model=str(path), dtype="float32", max_len=64), fetch(str(path), weights=True).path)
    assert isinstance(model, Decoder)
    ids = prompt(40, seed=1)
    # transformers computes experts in float32 at most.
    want = whole(oracle(folder, torch.float32 if name in FLOAT32_ONLY else torch.float64), ids)
    got = Bench(model).step({0: ids})[0]
    assert ((got.double() - want).abs().max() / want.abs().max()).item() < 1e-4


@pytest.mark.parametrize("name", ["glm", "glm-whole"])
def test_files_of_old_checkpoints_of_glm_have_queries_keys_and_values_in_one_tensor(tmp_path, name):
    folder = made(name, tmp_path / "model")
    logits = []
    for is_old in (False, True):
        path = write(folder, tmp_path / f"model-{is_old}.gguf", name, is_old=is_old)
        model = load_model(EngineConfig(model=str(path), dtype="float32"), fetch(str(path), weights=True).path)
        logits.append(Bench(model).step({0: prompt(40)})[0])
    assert torch.equal(*logits)


@needs_library
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("mixtral", Type.Q8_0),
        ("qwen3_moe", Type.Q8_0),
        ("gpt_oss", Type.MXFP4),
        ("glm4_moe", Type.Q8_0),
        ("phi3", Type.Q8_0),
        ("gemma3_text", Type.Q8_0),
        ("olmo2", Type.Q8_0),
        ("gemma4_text-small", Type.Q8_0),
        ("qwen3_5_text", Type.Q8_0),
        ("qwen3_5_moe_text", Type.Q8_0),
        ("lfm2", Type.Q8_0),
        ("lfm2_moe", Type.Q8_0),
        ("granitemoehybrid-mamba", Type.Q8_0),
        ("granitemoehybrid-experts", Type.Q8_0),
        ("qwen3_next", Type.Q8_0),
        ("nemotron_h", Type.Q8_0),
        ("nemotron_h-experts", Type.Q8_0),
        ("afmoe", Type.Q8_0),
        ("mistral4", Type.Q8_0),
        ("arcee", Type.Q8_0),
    ],
)
async def test_blocks_are_computed_with_and_have_the_same_bits_alone_and_together(tmp_path, name, kind):
    path = write(made(name, tmp_path / "model"), tmp_path / "model.gguf", name, kind)
    base = {"model": str(path), "device": "cpu", "num_blocks": 64, "max_seqs": 8}
    alone, exact, _ = await serve(EngineConfig(**base, prefix_caching=False, threads=1), together=False)
    assert exact and len(alone) == 8
    found, *_ = await serve(EngineConfig(**base, max_batched_tokens=9, threads=2), together=True)
    assert found == alone


@needs_library
def test_the_table_of_the_layers_own_inputs_stays_in_its_blocks(tmp_path, monkeypatch):
    kind, sizes = MODELS["gemma4_text-small"]
    monkeypatch.setitem(MODELS, "gemma4_text-small", (kind, sizes | {"hidden_size_per_layer_input": 32}))
    folder = made("gemma4_text-small", tmp_path / "model")
    # Published files have keys and values of layers that share those of another.
    unused = {f"blk.{layer}.{name}.weight": (32, 64) for layer in (3, 4, 5) for name in ("attn_k", "attn_v")}
    path = write(folder, tmp_path / "model.gguf", "gemma4_text-small", Type.Q8_0, tensors=unused)
    model = load_model(EngineConfig(model=str(path)), fetch(str(path), weights=True).path)
    assert isinstance(model, Decoder) and model.inputs is not None
    table, projection = model.inputs.table._packed, model.inputs.projection._packed
    assert isinstance(table, Blocks) and isinstance(projection, Blocks)
    found = plan.plan(EngineConfig(model=str(path), device="cpu", num_blocks=16))
    assert found["weights_bytes"] == model.weights_bytes == held(model)
    bound = roofline.shape(model.spec)
    assert bound is not None and bound.weights_bytes == model.weights_bytes - size(table)[0]
    ids = prompt(40, seed=1)
    want, got = whole(oracle(folder, torch.float64), ids), Bench(model).step({0: ids})[0]
    assert (got.double() - want).norm() < 0.1 * want.norm()


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("gemma4_text", {"sliding_window_pattern": None}, "has no gemma4.attention.sliding_window_pattern"),
        ("gemma4_text", {"sliding_window_pattern": [True]}, "sliding_window_pattern is not a list of 6 flags"),
        ("gemma4_text", {"head_count_kv": [2, 1, 2, 2, 2, 1]}, "head_count_kv differs among layers with a window"),
        ("gemma4_text", {"head_count_kv": [2, 1]}, "head_count_kv is not a list of 6 whole numbers"),
        ("gemma4_text", {"feed_forward_length": [128] * 5 + [256]}, "feed_forward_length differs among layers"),
        ("gemma4_text", {"key_length": 32, "value_length": 32, "rope_dimension_count": 32}, "rope_freqs.weight"),
        ("gemma4_text", {"key_length_swa": None}, "has no gemma4.attention.key_length_swa"),
        ("glm4", {"rope_dimension_sections": [2, 1, 1, 0]}, "GLM-4 models that read images are not supported"),
        ("ministral3", {"rope_scaling_type": None}, "attention.temperature_scale needs YaRN scaling"),
        ("qwen3_5_text", {"ssm_time_step_rank": 3}, "ssm.inner_size of 64 is not that of 3 heads"),
        ("qwen3_5_text", {"ssm_time_step_rank": 0}, "ssm.time_step_rank is not a whole number from 1"),
        ("qwen3_5_text", {"ssm_inner_size": 0.5}, "ssm.inner_size is not a whole number from 1"),
        ("qwen3_5_text", {"ssm_group_count": None}, "has no qwen35.ssm.group_count"),
        ("qwen3_5_text", {"rope_dimension_count": 33}, "rope.dimension_count is not a whole number from 1 to 32"),
        ("qwen3_5_text", {"nextn_predict_layers": 3}, "nextn_predict_layers is not a whole number from 0 to 2"),
        ("qwen3_5_text", {"full_attention_interval": 0}, "full_attention_interval is not a whole number from 1"),
        ("qwen3_5_text", {RECURRENT: [True]}, "attention.recurrent_layers is not a list of 3 flags"),
        ("lfm2", {"head_count_kv": [1, 2, 0]}, "head_count_kv differs among layers that have any"),
        ("lfm2", {"head_count_kv": [2, 0]}, "head_count_kv is not a list of 3 whole numbers"),
        ("lfm2", {"shortconv_l_cache": None}, "has no lfm2.shortconv.l_cache"),
        ("lfm2", {"sliding_window": 8}, "LFM2 models with sliding windows are not supported"),
        (
            "lfm2_moe",
            {"expert_gating_func": gguf.ExpertGatingFuncType.SOFTMAX},
            "lfm2moe.expert_gating_func must be 2, not 1",
        ),
        ("lfm2_moe", {"leading_dense_block_count": 4}, "leading_dense_block_count is not a whole number from 0 to 3"),
        (
            "minimax_m2",
            {"expert_gating_func": gguf.ExpertGatingFuncType.SOFTMAX},
            "minimax-m2.expert_gating_func must be 2, not 1",
        ),
        ("minimax_m2", {"rope_dimension_count": 17}, "rope.dimension_count is not a whole number from 1 to 16"),
        ("dots1", {"expert_shared_count": None}, "has no dots1.expert_shared_count"),
        ("exaone_moe", {"nextn_predict_layers": 5}, "nextn_predict_layers is not a whole number from 0 to 4"),
        ("glm", {"rope_dimension_count": 17}, "rope.dimension_count is not a whole number from 1 to 16"),
        ("ernie4_5_moe", {"interleave_moe_layer_step": None}, "has no ernie4_5-moe.interleave_moe_layer_step"),
        ("qwen3_next", {"ssm_group_count": 3}, "ssm.time_step_rank is no multiple of 3"),
        ("qwen3_next", {"ssm_state_size": 0.5}, "ssm.state_size is not a whole number from 1"),
        ("qwen3_next", {"ssm_group_count": 1, "ssm_time_step_rank": 2}, "ssm_ba.weight has the shape .8, 64., not 4"),
        ("granitemoehybrid-mamba", {"head_count_kv": [1, 2, 0]}, "head_count_kv differs among layers that have any"),
        ("granitemoehybrid-mamba", {"ssm_time_step_rank": 3}, "ssm.inner_size of 128 is not that of 3 heads"),
        ("granitemoehybrid-mamba", {"ssm_inner_size": 96}, "ssm.inner_size of 96 is no multiple of 64"),
        ("granitemoehybrid-mamba", {"ssm_state_size": None}, "has no granitehybrid.ssm.state_size"),
        ("granitemoehybrid-experts", {"expert_used_count": None}, "has no granitehybrid.expert_used_count"),
        ("nemotron_h", {"head_count_kv": [2] * 9}, "head_count_kv is not a list of 10 whole numbers"),
        ("nemotron_h", {"head_count_kv": [0] * 5 + [1, 0, 0, 2, 0]}, "head_count_kv differs among layers"),
        ("nemotron_h", {"feed_forward_length": [0, 9, 0, 0, 8, 0, 8, 0, 0, 8]}, "feed_forward_length differs among"),
        ("nemotron_h", {"ssm_time_step_rank": 5}, "ssm.inner_size of 144 is not that of 5 heads"),
        ("nemotron_h", {"ssm_group_count": None}, "has no nemotron_h.ssm.group_count"),
        ("nemotron_h", {"layer_norm_rms_eps": None}, "has no nemotron_h.attention.layer_norm_rms_epsilon"),
        ("nemotron_h-experts", {"expert_used_count": None}, "has no nemotron_h_moe.expert_used_count"),
        ("nemotron_h-experts", {"expert_gating_func": gguf.ExpertGatingFuncType.SOFTMAX}, "func must be 2, not 1"),
        ("afmoe", {"sliding_window": None}, "has no afmoe.attention.sliding_window"),
        ("afmoe", {"expert_gating_func": gguf.ExpertGatingFuncType.SOFTMAX}, "expert_gating_func must be 2, not 1"),
        (
            "mistral4",
            {"expert_gating_func": gguf.ExpertGatingFuncType.SIGMOID},
            "mistral4 must have a softmax over its experts",
        ),
        (
            "mistral4",
            {"rope_scaling_type": gguf.RopeScalingType.NONE, "rope_scaling_orig_ctx_len": None},
            "has no mistral4.rope.scaling.original_context_length",
        ),
        ("mistral4", {"expert_group_count": 2}, "mistral4 has groups of experts, which is not supported"),
        ("afmoe", {"expert_weights_norm": None}, "experts have weights that are not divided by their sum"),
        ("cohere", {"tensors": {"blk.0.attn_q_norm.weight": (4, 16)}}, "have norms, as in Command R"),
        ("cohere2", {"logit_scale": None}, "has no cohere2.logit_scale"),
        ("cohere2", {"layer_norm_eps": None}, "has no cohere2.attention.layer_norm_epsilon"),
        ("cohere2", {"sliding_window": 0}, "sliding_window is not a whole number from 1"),
        ("cohere2", {"block_count": 2.5}, "block_count is not a whole number from 1 to 4096"),
        ("exaone4", {"block_count": 2.5}, "block_count is not a whole number from 1 to 4096"),
        ("olmo2", {"block_count": 5000}, "block_count is not a whole number from 1 to 4096"),
        ("gemma4_text", {"block_count": 0}, "block_count is not a whole number from 1 to 4096"),
        ("gemma4_text", {"block_count": 2.0}, "block_count is not a whole number from 1 to 4096"),
        ("gemma4_text", {"shared_kv_layers": 0.5}, "shared_kv_layers is not a whole number from 0 to 5"),
        ("gemma4_text", {"shared_kv_layers": 1 << 62}, "shared_kv_layers is not a whole number from 0 to 5"),
        ("gemma4_text", {"shared_kv_layers": 6}, "shared_kv_layers is not a whole number from 0 to 5"),
        ("gemma4_text", {"key_length": 0, "value_length": 0}, "key_length is not a whole number from 1"),
        ("gemma4_text", {"key_length_swa": 0.5}, "key_length_swa is not a whole number from 1"),
        ("gemma4_text", {"value_length_swa": 4}, "value_length_swa differs from gemma4.attention.key_length_swa"),
        ("gemma4_text", {"rope_dimension_count_swa": 4}, "dimension_count_swa differs from gemma4.attention.key"),
        ("glm4", {"key_length": 0, "value_length": 0}, "key_length is not a whole number from 1"),
        ("glm4", {"head_count": 0}, "head_count is not a whole number from 1"),
        ("glm4", {"embedding_length": 0.5}, "embedding_length is not a whole number from 1"),
        ("phi3-longrope", {"rope_dimension_count": 16.0}, "rope.dimension_count is not a whole number from 1 to 16"),
        ("ministral3", {"rope_scaling_yarn_attn_factor": 0.5}, "yarn_attn_factor of 0.5 is not supported"),
        ("ministral3", {"rope_scaling_yarn_ext_factor": 0.5}, "yarn_ext_factor of 0.5 is not supported"),
        ("gpt_oss", {"rope_scaling_attn_factors": 0.5}, "rope.scaling.attn_factor of 0.5 is not supported"),
        ("gpt_oss", {"rope_scaling_attn_factors": 1.345}, "rope.scaling.attn_factor of 1.345 is not supported"),
        ("llama", {"rope_scaling_attn_factors": 1.2}, "rope.scaling.attn_factor of 1.2 is not supported"),
        # With a multiplier, the computed factor is 1.
        ("ministral3", {"rope_scaling_attn_factors": 1.27726}, "rope.scaling.attn_factor of 1.27726 is not supported"),
    ],
)
def test_metadata_that_no_model_has_gets_a_sentence(tmp_path, monkeypatch, name, changes, says):
    def add_number(writer, key, value):
        writer.add_key_value(key, value, ValueType.FLOAT32 if isinstance(value, float) else ValueType.UINT64)

    monkeypatch.setattr(gguf.GGUFWriter, "add_uint32", add_number)
    path = write(made(name, tmp_path / "model"), tmp_path / "model.gguf", name, **changes)
    with pytest.raises(ModelError, match=says):
        folder_of(path)


@pytest.mark.parametrize(("name", "factor"), [("gpt_oss", 1.34657), ("gpt_oss", 1.0), ("ministral3", 1.0)])
def test_an_attention_factor_that_is_computed_anyway_may_be_named(tmp_path, name, factor):
    folder = made(name, tmp_path / "model")
    plain = write(folder, tmp_path / "plain.gguf", name)
    named = write(folder, tmp_path / "named.gguf", name, rope_scaling_attn_factors=factor)
    plain_config, named_config = ((folder_of(path) / "config.json").read_text() for path in (plain, named))
    assert plain_config == named_config


def test_frequencies_that_no_gemma_4_has_get_a_sentence(tmp_path):
    path = write(made("gemma4_text", tmp_path / "model"), tmp_path / "model.gguf", "gemma4_text")
    data = path.read_bytes()
    huge = np.array([1e30], np.float32).tobytes()
    assert data.count(huge) == 6
    path.write_bytes(data.replace(huge, np.array([2.0], np.float32).tobytes()))
    with pytest.raises(ModelError, match=r"rope_freqs.weight is not that of a Gemma 4"):
        folder_of(path)


def test_frequencies_of_a_gemma_4_must_be_there(tmp_path):
    path = write(made("gemma4_text", tmp_path / "model"), tmp_path / "model.gguf", "gemma4_text")
    path.write_bytes(path.read_bytes().replace(b"rope_freqs.weight", b"rope_other.weight"))
    with pytest.raises(ModelError, match=r"has no rope_freqs.weight"):
        folder_of(path)


def test_factors_of_frequencies_that_an_architecture_does_not_use_get_a_sentence(tmp_path):
    folder, tensors = made("qwen3", tmp_path / "model"), {"rope_factors_long.weight": (16,)}
    path = write(folder, tmp_path / "model.gguf", "qwen3", tensors=tensors)
    with pytest.raises(ModelError, match="factors of rotary frequencies that its architecture does not use"):
        folder_of(path)


def test_scaled_frequencies_need_no_scaled_temperature(tmp_path, monkeypatch):
    """The magnitude of a YaRN scaling is that of the multiplier in the file, also of a mistral3 without temperature."""
    kind, sizes = MODELS["mistral-full"]
    rope = {key: value for key, value in MODELS["ministral3"][1]["rope_parameters"].items() if "llama_4" not in key}
    monkeypatch.setitem(MODELS, "mistral-full", (kind, sizes | {"rope_parameters": rope}))
    folder = made("mistral-full", tmp_path / "model")
    path = write(folder, tmp_path / "model.gguf", "mistral-full")
    model = load_model(EngineConfig(model=str(path), dtype="float32"), fetch(str(path), weights=True).path)
    ids = prompt(40, seed=1)
    want, got = whole(oracle(folder, torch.float64), ids), Bench(model).step({0: ids})[0]
    assert ((got.double() - want).abs().max() / want.abs().max()).item() < 1e-4


@pytest.mark.parametrize("beta", [0.0, 0.25])
def test_a_mistral4_without_yarn_has_no_scaling_by_default(tmp_path, beta):
    none = {"rope_scaling_type": gguf.RopeScalingType.NONE, "attn_temperature_scale": beta}
    path = write(made("mistral4", tmp_path / "model"), tmp_path / "model.gguf", "mistral4", **none)
    spec = read_spec(json.loads((folder_of(path) / "config.json").read_text()), EngineConfig(model=""))
    assert spec is not None and spec.decoder is not None
    (rope,) = spec.decoder.ropes
    assert (rope.scaling, rope.query_beta) == ("default", beta)


def test_the_original_length_of_minicpm3_selects_its_long_factors(tmp_path, monkeypatch):
    kind, sizes = MODELS["minicpm3"]
    factors = {"short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 3.0, 4.0]}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 16, **factors}
    monkeypatch.setitem(MODELS, "minicpm3", (kind, sizes | {"rope_parameters": rope}))
    folder = made("minicpm3", tmp_path / "model")
    path = write(folder, tmp_path / "model.gguf", "minicpm3", rope_scaling_orig_ctx_len=16)
    model = load_model(EngineConfig(model=str(path), dtype="float32"), fetch(str(path), weights=True).path)
    ids = prompt(40, seed=1)
    want, got = whole(oracle(folder, torch.float64), ids), Bench(model).step({0: ids})[0]
    assert ((got.double() - want).abs().max() / want.abs().max()).item() < 1e-4


@pytest.mark.parametrize(
    ("name", "architecture"), [("qwen2", "qwen2vl"), ("qwen3-tied", "qwen3vl"), ("qwen3_moe", "qwen3vlmoe")]
)
def test_of_models_that_read_images_the_text_part_is_read(tmp_path, name, architecture):
    folder = made(name, tmp_path / "model")
    sections = {"rope_dimension_sections": [4, 2, 2, 0], "num_deepstack_layers": 3}
    path = write(folder, tmp_path / "model.gguf", name, architecture=architecture, **sections)
    model = load_model(EngineConfig(model=str(path), dtype="float32"), fetch(str(path), weights=True).path)
    ids = prompt(20, seed=1)
    want, got = whole(oracle(folder, torch.float32), ids), Bench(model).step({0: ids})[0]
    assert (got - want).abs().max() < 1e-4 * want.abs().max()


def test_flags_of_another_number_of_layers_get_a_sentence(tmp_path):
    folder = made("olmo3", tmp_path / "model")
    path = write(folder, tmp_path / "model.gguf", "olmo3", sliding_window_pattern=[True])
    with pytest.raises(ModelError, match=r"olmo2.attention.sliding_window_pattern is not a list of 5 flags"):
        folder_of(path)


@pytest.mark.parametrize("name", ["gemma2", "gemma3_text", "gpt_oss", "cohere2", "olmo3"])
def test_a_file_may_name_the_period_of_layers_without_a_window(tmp_path, name):
    folder = made(name, tmp_path / "model")
    path = write(folder, tmp_path / "model.gguf", name, sliding_window_pattern=2)
    kinds = json.loads((folder_of(path) / "config.json").read_text())["layer_types"]
    assert kinds == [("sliding_attention", "full_attention")[layer % 2] for layer in range(len(kinds))]


def test_older_files_of_qwen_3_5_have_an_interval_in_place_of_a_list(tmp_path):
    folder = made("qwen3_5_text", tmp_path / "model")
    older = write(folder, tmp_path / "older.gguf", "qwen3_5_text", **{RECURRENT: None}, full_attention_interval=2)
    listed = write(folder, tmp_path / "listed.gguf", "qwen3_5_text")
    one, other = ((folder_of(path) / "config.json").read_text() for path in (older, listed))
    assert one == other


@pytest.mark.parametrize("kind", [Type.F32, Type.Q8_0])
@needs_library
def test_older_files_of_qwen3_next_have_one_tensor_in_place_of_two(tmp_path, kind):
    folder = made("qwen3_next", tmp_path / "model")
    ids = prompt(40, seed=1)
    logits = [
        Bench(load_model(EngineConfig(model=str(path)), fetch(str(path), weights=True).path)).step({0: ids})[0]
        for is_old in (False, True)
        for path in [write(folder, tmp_path / f"{is_old}.gguf", "qwen3_next", kind, is_old=is_old)]
    ]
    assert torch.equal(*logits)


@needs_library
def test_layers_of_qwen_3_5_that_predict_further_tokens_are_not_read(tmp_path):
    path = write(
        made("qwen3_5_text", tmp_path / "model"),
        tmp_path / "model.gguf",
        "qwen3_5_text",
        Type.Q8_0,
        nextn_predict_layers=1,
        block_count=4,
        tensors={"blk.3.nextn.eh_proj.weight": (64, 128), "blk.3.attn_q.weight": (256, 64)},
        **{RECURRENT: [True, False, True, False]},
    )
    model = load_model(EngineConfig(model=str(path)), fetch(str(path), weights=True).path)
    assert isinstance(model, Decoder) and len(model.layers) == 3
    assert model.weights_bytes == held(model)


@pytest.mark.parametrize("kind", [Type.F32, Type.Q8_0])
@needs_library
def test_routers_in_f32_stay_so_and_those_in_blocks_stay_in_blocks(tmp_path, monkeypatch, kind):
    def add_mixed(writer: gguf.GGUFWriter, name: str, numbers: np.ndarray, others: Type) -> None:
        if name.endswith("ffn_gate_inp.weight") and kind != Type.F32:
            writer.add_tensor(name, gguf.quantize(np.ascontiguousarray(numbers), kind), raw_dtype=kind)
        else:
            plain(writer, name, numbers, others)

    plain = add
    monkeypatch.setitem(globals(), "add", add_mixed)
    folder = made("glm4_moe", tmp_path / "model")
    path = write(folder, tmp_path / "model.gguf", "glm4_moe", Type.Q8_0)
    model = load_model(EngineConfig(model=str(path)), fetch(str(path), weights=True).path)
    assert isinstance(model, Decoder) and model.spec.dtype == torch.bfloat16
    routers = [layer.experts.router for layer in model.layers if layer.experts is not None]
    packed = {(each.weight.dtype, isinstance(each._packed, Blocks)) for each in routers}
    assert packed == {(torch.float32, False) if kind == Type.F32 else (torch.bfloat16, True)}
    found = plan.plan(EngineConfig(model=str(path), device="cpu", num_blocks=16))
    assert found["weights_bytes"] == model.weights_bytes
    ids = prompt(40, seed=1)
    want, got = whole(oracle(folder, torch.float32), ids), Bench(model).step({0: ids})[0]
    assert (got.double() - want).norm() < 0.15 * want.norm()


@needs_library
def test_layers_of_nemotron_h_that_predict_further_tokens_are_not_read(tmp_path):
    folder = made("nemotron_h-experts", tmp_path / "model")
    paths = [write(folder, tmp_path / "plain.gguf", "nemotron_h-experts", Type.Q8_0)]
    changes = {"feed_forward_length": [0, 40, 0, 0, 40, 0, 128, 40], "head_count_kv": [0, 0, 0, 2, 0, 0, 0, 2]}
    changes |= {"block_count": 8, "nextn_predict_layers": 1}
    further = {"blk.7.nextn.eh_proj.weight": (64, 128), "blk.7.attn_q.weight": (64, 64), "blk.7.attn_norm.weight": (9,)}
    paths.append(write(folder, tmp_path / "further.gguf", "nemotron_h-experts", Type.Q8_0, tensors=further, **changes))
    one, other = (load_model(EngineConfig(model=str(path)), fetch(str(path), weights=True).path) for path in paths)
    assert isinstance(one, Decoder) and isinstance(other, Decoder) and len(other.layers) == 4
    assert other.weights_bytes == one.weights_bytes
    ids = prompt(20, seed=1)
    assert torch.equal(Bench(one).step({0: ids})[0], Bench(other).step({0: ids})[0])


@pytest.mark.parametrize(
    "name", ["qwen3_5_text", "qwen3_5_moe_text", "lfm2_moe", "granitemoehybrid-mamba", "qwen3_next", "nemotron_h"]
)
@needs_library
def test_weights_of_layers_with_states_take_the_planned_memory(tmp_path, name):
    path = write(made(name, tmp_path / "model"), tmp_path / "model.gguf", name, Type.Q8_0)
    model = load_model(EngineConfig(model=str(path)), fetch(str(path), weights=True).path)
    assert model.weights_bytes == held(model)


@needs_library
@pytest.mark.parametrize("kind", [Type.Q4_0, Type.F32])
def test_the_two_gates_of_linear_attention_may_have_different_types(tmp_path, monkeypatch, kind):
    plain = add

    def add_mixed(writer: gguf.GGUFWriter, name: str, numbers: np.ndarray, others: Type) -> None:
        plain(writer, name, numbers, kind if name.endswith("ssm_alpha.weight") else others)

    monkeypatch.setitem(globals(), "add", add_mixed)
    folder = made("qwen3_5_text", tmp_path / "model")
    path = write(folder, tmp_path / "model.gguf", "qwen3_5_text", Type.Q8_0)
    model = load_model(EngineConfig(model=str(path)), fetch(str(path), weights=True).path)
    ids = prompt(40, seed=1)
    want, got = whole(oracle(folder, torch.float64), ids), Bench(model).step({0: ids})[0]
    assert (got.double() - want).norm() < 0.15 * want.norm()


@pytest.mark.parametrize("value", [0.0, 0.5, float("nan")])
def test_decays_that_no_layer_has_get_a_sentence(tmp_path, monkeypatch, value):
    plain = gguf.GGUFWriter.add_tensor

    def add_tensor(writer, name, numbers, **kind):
        plain(writer, name, np.full_like(numbers, value) if name == "blk.2.ssm_a" else numbers, **kind)

    monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", add_tensor)
    path = write(made("qwen3_5_text", tmp_path / "model"), tmp_path / "model.gguf", "qwen3_5_text")
    with pytest.raises(
        ModelError, match=r"model.gguf: the numbers of the tensor model.layers.2.\S*A_log must be below 0"
    ):
        load_model(EngineConfig(model=str(path), dtype="float32"), fetch(str(path), weights=True).path)


def test_vectors_in_blocks_get_a_sentence(tmp_path, monkeypatch):
    plain, blocks = gguf.GGUFWriter.add_tensor, {"raw_dtype": Type.Q8_0}

    def add_tensor(writer, name, numbers, **kind):
        is_norm = name == "output_norm.weight"
        plain(writer, name, gguf.quantize(numbers, Type.Q8_0) if is_norm else numbers, **(blocks if is_norm else kind))

    monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", add_tensor)
    path = write(made("qwen3", tmp_path / "model"), tmp_path / "model.gguf", "qwen3")
    with pytest.raises(ModelError, match=r"vector output_norm.weight is in Q8_0, which is not supported"):
        folder_of(path)


def test_a_file_of_qwen3_next_in_too_many_pieces_gets_a_sentence(tmp_path, monkeypatch):
    path = write(made("qwen3_next", tmp_path / "model"), tmp_path / "model.gguf", "qwen3_next")
    monkeypatch.setattr(gguf_config, "MAX_PIECES", 3)
    with pytest.raises(ModelError, match="tensors are in more than 3 pieces"):
        folder_of(path)


@pytest.mark.parametrize(
    "after, named", [("blk.0.attn_gate", "blk.0.ssm_in"), ("token_embd", "blk.0.attn_(qkv|gate)")]
)  # fmt: skip
def test_a_file_of_qwen3_next_with_both_kinds_of_tensors_gets_a_sentence(tmp_path, monkeypatch, after, named):
    plain = gguf.GGUFWriter.add_tensor

    def add_tensor(writer, name, numbers, **kind):
        plain(writer, name, numbers, **kind)
        if name == f"{after}.weight":
            plain(writer, "blk.0.ssm_in.weight", np.zeros((192, 64), np.float32))

    monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", add_tensor)
    path = write(made("qwen3_next", tmp_path / "model"), tmp_path / "model.gguf", "qwen3_next")
    with pytest.raises(ModelError, match=f"holds {named}.weight and other tensors for the same weights"):
        folder_of(path)


def test_norms_of_mamba_may_be_vectors(tmp_path, monkeypatch):
    """llama-quantize writes them so if there is one group of states."""
    plain = gguf.GGUFWriter.add_tensor

    def add_tensor(writer, name, numbers, **kind):
        plain(writer, name, numbers.ravel() if name.endswith("ssm_norm.weight") else numbers, **kind)

    folder = made("granitemoehybrid-mamba", tmp_path / "model")
    matrices = write(folder, tmp_path / "matrices.gguf", "granitemoehybrid-mamba")
    monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", add_tensor)
    vectors = write(folder, tmp_path / "vectors.gguf", "granitemoehybrid-mamba")
    shapes = [
        {name: entry.shape for name, entry in GgufCheckpoint(folder_of(path)).entries.items()}
        for path in (matrices, vectors)
    ]
    assert shapes[0] == shapes[1] and shapes[0]["model.layers.0.mamba.norm.weight"] == (128,)


def test_a_model_that_attends_to_later_tokens_gets_a_sentence(tmp_path):
    folder = made("lfm2", tmp_path / "model")
    path = write(folder, tmp_path / "model.gguf", "lfm2", causal_attention=False)
    with pytest.raises(ModelError, match="attends to later tokens, too, which is not supported"):
        folder_of(path)


def test_the_gate_of_a_shared_expert_may_be_a_vector(tmp_path, monkeypatch):
    """llama-quantize writes it so."""
    plain = gguf.GGUFWriter.add_tensor

    def add_tensor(writer, name, numbers, **kind):
        plain(writer, name, numbers[0] if name.endswith("ffn_gate_inp_shexp.weight") else numbers, **kind)

    folder = made("qwen3_5_moe_text", tmp_path / "model")
    matrices = write(folder, tmp_path / "matrices.gguf", "qwen3_5_moe_text")
    monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", add_tensor)
    vectors = write(folder, tmp_path / "vectors.gguf", "qwen3_5_moe_text")
    ids = prompt(20, seed=1)
    one, other = (
        Bench(load_model(EngineConfig(model=str(path), dtype="float32"), fetch(str(path), weights=True).path)).step(
            {0: ids}
        )
        for path in (matrices, vectors)
    )
    assert torch.equal(one[0], other[0])


def test_layers_that_predict_further_tokens_are_not_read(tmp_path):
    """llama.cpp's converter counts them as layers."""
    path = write(
        made("glm4_moe", tmp_path / "model"),
        tmp_path / "model.gguf",
        "glm4_moe",
        nextn_predict_layers=1,
        block_count=4,
        tensors={"blk.3.nextn.eh_proj.weight": (2, 2), "blk.3.attn_norm.weight": (64,)},
    )
    model = load_model(EngineConfig(model=str(path), dtype="float32"), fetch(str(path), weights=True).path)
    assert len(model.spec.layers) == 3


@needs_library
def test_layers_that_predict_further_tokens_are_not_in_the_memory_plan(tmp_path):
    path = write(
        made("glm4_moe-groups", tmp_path / "model"),
        tmp_path / "model.gguf",
        "glm4_moe-groups",
        Type.Q8_0,
        nextn_predict_layers=1,
        block_count=4,
        tensors={"blk.3.nextn.eh_proj.weight": (64, 128), "blk.3.attn_q.weight": (64, 64)},
    )
    model = load_model(EngineConfig(model=str(path)), fetch(str(path), weights=True).path)
    assert isinstance(model, Decoder) and len(model.layers) == 3
    assert model.weights_bytes == held(model)


def test_layers_that_predict_further_tokens_may_be_among_those_that_share_keys(tmp_path):
    tensors = {"blk.5.nextn.eh_proj.weight": (64, 128)}
    folder = made("gemma4_text-small", tmp_path / "model")
    path = write(folder, tmp_path / "model.gguf", "gemma4_text-small", Type.Q8_0, tensors=tensors)
    assert json.loads((folder_of(path) / "config.json").read_text())["num_kv_shared_layers"] > 0


def test_biases_of_experts_in_blocks_get_a_sentence(tmp_path):
    path = write(made("gpt_oss", tmp_path / "model"), tmp_path / "model.gguf", "gpt_oss")
    name = b"blk.0.ffn_gate_exps.bias"
    data = bytearray(path.read_bytes())
    at = data.index(name) + len(name) + 4 + 2 * 8  # after the number of dimensions and their sizes
    data[at : at + 4] = int(Type.Q8_0).to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(ModelError, match="biases of experts are in Q8_0, which is not supported"):
        folder_of(path)


def test_gates_of_another_function_than_the_sigmoid_get_a_sentence(tmp_path):
    folder, function = made("glm4_moe", tmp_path / "model"), gguf.ExpertGatingFuncType.SOFTMAX
    path = write(folder, tmp_path / "model.gguf", "glm4_moe", expert_gating_func=function)
    with pytest.raises(ModelError, match=r"glm4moe.expert_gating_func must be 2, not 1"):
        folder_of(path)


def test_experts_of_another_architecture_get_a_sentence(tmp_path):
    path = write(made("qwen2", tmp_path / "model"), tmp_path / "model.gguf", "qwen2", expert_count=4)
    with pytest.raises(ModelError, match="of the architecture qwen2 with experts are not supported"):
        folder_of(path)
