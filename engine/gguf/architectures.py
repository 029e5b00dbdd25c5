"""The architectures of GGUF files: how llama.cpp names and stores what the model classes of transformers have."""

from __future__ import annotations

from typing import Any

from ..bounds import MAX_SIZE
from ..types import ModelError
from . import gemma, granite, latent, nemotron, state_layers
from .experts import CORRECTION, afmoe, dots, ernie_moe, glm4moe, gpt_oss, hunyuan_moe, minimax
from .keys import Keys, windows_of
from .names import (
    AFMOE,
    GEMMA4,
    LAYER_NAMES,
    MIXTRAL_EXPERTS,
    NORMS_AROUND,
    PARAMETERS,
    QWEN_EXPERTS,
    SHARED_EXPERT,
    SHARED_EXPERTS,
    Architecture,
)
from .scaling import LOG_MULTIPLIER, longrope


def _llama(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    window = keys.number("attention.sliding_window", 0)
    if experts := keys.number("expert_count", 0):
        return {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "num_local_experts": experts,
            "num_experts_per_tok": keys.number("expert_used_count"),
            "sliding_window": window or None,
        }
    if not window:
        return {}
    return {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}


def _qwen3moe(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "num_experts": keys.number("expert_count"),
        "num_experts_per_tok": keys.number("expert_used_count"),
        "moe_intermediate_size": keys.number("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _olmoe(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    return {"num_experts": keys.number("expert_count"), "num_experts_per_tok": keys.number("expert_used_count")}


def _glm4(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    if keys.get("rope.dimension_sections") is not None:
        raise ModelError("GGUF files of GLM-4 models that read images are not supported; use safetensors files")
    return {
        "partial_rotary_factor": keys.number("rope.dimension_count", config["head_dim"] // 2) / config["head_dim"],
    }


def _chatglm(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    rotated = keys.whole("rope.dimension_count", config["head_dim"], config["head_dim"])
    found: dict[str, Any] = {"partial_rotary_factor": rotated / config["head_dim"]}
    if "blk.0.attn_qkv.weight" not in keys.tensors:
        return found
    return {**found, "architectures": ["GlmJoinedGguf"], "attention_bias": "blk.0.attn_qkv.bias" in keys.tensors}


def _mistral3(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    scaling = config.get("rope_scaling")
    if scaling is not None and scaling["rope_type"] == "yarn":
        scaling = scaling | {"mscale": 1.0, "mscale_all_dim": keys.number(LOG_MULTIPLIER, 0)}
        found["rope_scaling"] = scaling
    if (beta := keys.number("attention.temperature_scale", 0)) == 0:
        return {**found, "architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None}
    if scaling is None or scaling["rope_type"] != "yarn":
        raise ModelError(f"the GGUF file's {keys.architecture}.attention.temperature_scale needs YaRN scaling")
    return {"rope_scaling": scaling | {"llama_4_scaling_beta": beta}}


def _cohere2(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    keys.whole("attention.sliding_window", MAX_SIZE)  # there must be one
    return {"logit_scale": keys.number("logit_scale"), **_three_of_four(keys, config)}


def _three_of_four(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of windows that all layers but every fourth have if the file does not say which; empty: none."""
    layers, window = config["num_hidden_layers"], keys.number("attention.sliding_window", 0)
    if not window:
        return {}
    return windows_of(window, keys.windowed(layers, 4))


def _olmo(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    windows = _three_of_four(keys, config)
    return {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", **windows} if windows else {}


def _exaone4(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    return _three_of_four(keys, config) or {"sliding_window": None}


def _exaone_moe(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    unused = keys.whole("nextn_predict_layers", config["num_hidden_layers"] - 1, 0, minimum=0)
    layers = config["num_hidden_layers"] - unused
    return {
        **dots(keys, config),
        "num_shared_experts": keys.number("expert_shared_count"),
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": unused,
        **_exaone4(keys, config | {"num_hidden_layers": layers}),
    }


def _phi3(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    head_dim = config["head_dim"]
    rotated = keys.whole("rope.dimension_count", head_dim, head_dim)
    return {
        "sliding_window": keys.number("attention.sliding_window", 0) or None,
        "partial_rotary_factor": rotated / head_dim,
        **longrope(keys, rotated),
    }


def _arcee(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    return {"hidden_act": "relu2"}


def _command_r(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    if "blk.0.attn_q_norm.weight" in keys.tensors:
        raise ModelError("the GGUF file's queries and keys have norms, as in Command R+, which is not supported")
    return {"logit_scale": keys.number("logit_scale")}


def _smollm3(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "no_rope_layer_interval": 4,
        "no_rope_layers": [int((i + 1) % 4 != 0) for i in range(config["num_hidden_layers"])],
    }


ARCHITECTURES = {
    "llama": Architecture(
        "LlamaForCausalLM",
        "llama",
        _llama,
        names=LAYER_NAMES | MIXTRAL_EXPERTS | {"ffn_gate_inp": "block_sparse_moe.gate"},
        is_interleaved=True,
        has_experts=True,
    ),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2"),
    "qwen2vl": Architecture("Qwen2ForCausalLM", "qwen2"),  # the text part of Qwen2-VL and Qwen2.5-VL
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": Architecture(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        _qwen3moe,
        names=LAYER_NAMES | QWEN_EXPERTS | {"ffn_gate_inp": "mlp.gate"},
        has_experts=True,
    ),
    "qwen3vl": Architecture("Qwen3ForCausalLM", "qwen3"),  # the part of Qwen3-VL that reads and writes text
    "qwen3vlmoe": Architecture(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        _qwen3moe,
        names=LAYER_NAMES | QWEN_EXPERTS | {"ffn_gate_inp": "mlp.gate"},
        has_experts=True,
    ),
    "qwen35": Architecture(
        "Qwen3_5ForCausalLM",
        "qwen3_5_text",
        state_layers.qwen35,
        names=LAYER_NAMES | state_layers.LINEAR_ATTENTION,
        norm_shift=1.0,
        rotates_partly=True,
    ),
    "qwen35moe": Architecture(
        "Qwen3_5MoeForCausalLM",
        "qwen3_5_moe_text",
        state_layers.qwen35moe,
        names=LAYER_NAMES | state_layers.LINEAR_ATTENTION | QWEN_EXPERTS | SHARED_EXPERT | {"ffn_gate_inp": "mlp.gate"},
        norm_shift=1.0,
        rotates_partly=True,
        has_experts=True,
    ),
    "qwen3next": Architecture(
        "Qwen3NextForCausalLM",
        "qwen3_next",
        state_layers.qwen3next,
        names=LAYER_NAMES
        | state_layers.GROUPED_ATTENTION
        | QWEN_EXPERTS
        | SHARED_EXPERT
        | {"ffn_gate_inp": "mlp.gate"},
        norm_shift=1.0,
        rotates_partly=True,
        has_experts=True,
    ),
    "lfm2": Architecture(
        "Lfm2ForCausalLM",
        "lfm2",
        state_layers.lfm2,
        names=LAYER_NAMES | state_layers.SHORT_CONVOLUTIONS,
        layers_differ=True,
        eps=("attention.layer_norm_rms_epsilon", "norm_eps"),
    ),
    "lfm2moe": Architecture(
        "Lfm2MoeForCausalLM",
        "lfm2_moe",
        state_layers.lfm2moe,
        names=LAYER_NAMES | state_layers.SHORT_CONVOLUTIONS | QWEN_EXPERTS | {"ffn_gate_inp": "mlp.gate"},
        has_experts=True,
        layers_differ=True,
        eps=("attention.layer_norm_rms_epsilon", "norm_eps"),
    ),
    "olmoe": Architecture(
        "OlmoeForCausalLM",
        "olmoe",
        _olmoe,
        names=LAYER_NAMES | QWEN_EXPERTS | {"ffn_gate_inp": "mlp.gate"},
        has_experts=True,
    ),
    "ernie4_5": Architecture("Ernie4_5ForCausalLM", "ernie4_5"),
    "ernie4_5-moe": Architecture(
        "Ernie4_5_MoeForCausalLM",
        "ernie4_5_moe",
        ernie_moe,
        names=LAYER_NAMES | QWEN_EXPERTS | SHARED_EXPERTS | {"ffn_gate_inp": "mlp.gate"},
        has_experts=True,
    ),
    "dots1": Architecture(
        "Dots1ForCausalLM",
        "dots1",
        dots,
        names=LAYER_NAMES | QWEN_EXPERTS | SHARED_EXPERTS | {"ffn_gate_inp": "mlp.gate"},
        has_experts=True,
    ),
    "seed_oss": Architecture("SeedOssForCausalLM", "seed_oss"),
    "minimax-m2": Architecture(
        "MiniMaxM2ForCausalLM",
        "minimax_m2",
        minimax,
        names=LAYER_NAMES | MIXTRAL_EXPERTS | {"ffn_gate_inp": "block_sparse_moe.gate"},
        parameters=PARAMETERS | CORRECTION,
        rotates_partly=True,
        has_experts=True,
    ),
    "hunyuan-dense": Architecture("HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense"),
    "hunyuan-moe": Architecture(
        "HunYuanMoEV1ForCausalLM",
        "hunyuan_v1_moe",
        hunyuan_moe,
        names=LAYER_NAMES | QWEN_EXPERTS | SHARED_EXPERTS | {"ffn_gate_inp": "mlp.gate"},
        has_experts=True,
    ),
    "gpt-oss": Architecture(
        "GptOssGguf",
        "gpt_oss",
        gpt_oss,
        names=LAYER_NAMES | QWEN_EXPERTS | {"ffn_gate_inp": "mlp.router"},
        has_experts=True,
    ),
    "glm4moe": Architecture(
        "Glm4MoeForCausalLM",
        "glm4_moe",
        glm4moe,
        names=LAYER_NAMES | QWEN_EXPERTS | SHARED_EXPERTS | {"ffn_gate_inp": "mlp.gate"},
        rotates_partly=True,
        has_experts=True,
    ),
    "deepseek2": Architecture(
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        latent.deepseek2,
        names=latent.NAMES,
        rotates_partly=True,
        has_experts=True,
        has_latents=True,
    ),
    "chatglm": Architecture(
        "GlmForCausalLM", "glm", _chatglm, names=LAYER_NAMES | {"ffn_up": "mlp.gate_up_proj"}, rotates_partly=True
    ),
    "glm4": Architecture(
        "Glm4ForCausalLM",
        "glm4",
        _glm4,
        names=LAYER_NAMES
        | {
            "ffn_up": "mlp.gate_up_proj",
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        },
        rotates_partly=True,
    ),
    "mistral3": Architecture("Ministral3ForCausalLM", "ministral3", _mistral3, is_interleaved=True),
    "cohere2": Architecture(
        "Cohere2ForCausalLM", "cohere2", _cohere2, eps=("attention.layer_norm_epsilon", "layer_norm_eps")
    ),
    "phi3": Architecture(
        "Phi3ForCausalLM", "phi3", _phi3, names=LAYER_NAMES | {"ffn_up": "mlp.gate_up_proj"}, rotates_partly=True
    ),
    "arcee": Architecture("ArceeForCausalLM", "arcee", _arcee, is_interleaved=True),
    "afmoe": Architecture(
        "AfmoeForCausalLM",
        "afmoe",
        afmoe,
        names=LAYER_NAMES | QWEN_EXPERTS | SHARED_EXPERTS | AFMOE,
        has_experts=True,
    ),
    "minicpm3": Architecture(
        "MiniCPM3ForCausalLM",
        "minicpm3",
        latent.minicpm3,
        names=latent.NAMES,
        rotates_partly=True,
        has_latents=True,
    ),
    "mistral4": Architecture(
        "Mistral4Gguf",
        "mistral4",
        latent.mistral4,
        names=latent.NAMES | {"ffn_gate_up_exps": "mlp.experts.{}.gate_up_proj"},
        rotates_partly=True,
        has_experts=True,
        has_latents=True,
    ),
    "command-r": Architecture(
        "CohereForCausalLM", "cohere", _command_r, eps=("attention.layer_norm_epsilon", "layer_norm_eps")
    ),
    "smollm3": Architecture("SmolLM3ForCausalLM", "smollm3", _smollm3, is_interleaved=True),
    "granite": Architecture("GraniteForCausalLM", "granite", granite.granite, is_interleaved=True),
    "granitemoe": Architecture(
        "GraniteMoeGguf",
        "granitemoe",
        granite.granitemoe,
        names=LAYER_NAMES | MIXTRAL_EXPERTS | SHARED_EXPERTS | {"ffn_gate_inp": "block_sparse_moe.gate"},
        is_interleaved=True,
        has_experts=True,
    ),
    "granitehybrid": Architecture(
        "GraniteHybridGguf",
        "granitemoehybrid",
        granite.granitehybrid,
        names=LAYER_NAMES
        | granite.MAMBA
        | MIXTRAL_EXPERTS
        | SHARED_EXPERTS
        | {"ffn_gate_inp": "block_sparse_moe.gate"},
        parameters=PARAMETERS | granite.MAMBA_PARAMETERS,
        is_interleaved=True,
        has_experts=True,
        layers_differ=True,
    ),
    "nemotron_h": Architecture(
        "NemotronHForCausalLM",
        "nemotron_h",
        nemotron.nemotron_h,
        names=nemotron.NAMES,
        parameters=nemotron.PARAMETERS,
        layers_differ=True,
        eps=nemotron.EPS,
    ),
    "nemotron_h_moe": Architecture(
        "NemotronHForCausalLM",
        "nemotron_h",
        nemotron.nemotron_h_moe,
        names=nemotron.NAMES,
        parameters=nemotron.PARAMETERS,
        has_experts=True,
        layers_differ=True,
        eps=nemotron.EPS,
    ),
    "exaone4": Architecture("Exaone4ForCausalLM", "exaone4", _exaone4),
    "exaone-moe": Architecture(
        "ExaoneMoeForCausalLM",
        "exaone_moe",
        _exaone_moe,
        names=LAYER_NAMES | QWEN_EXPERTS | SHARED_EXPERTS | {"ffn_gate_inp": "mlp.gate"},
        has_experts=True,
    ),
    "olmo2": Architecture("Olmo2ForCausalLM", "olmo2", _olmo),
    "gemma": Architecture("GemmaForCausalLM", "gemma", gemma.gemma, norm_shift=1.0),
    "gemma2": Architecture(
        "Gemma2ForCausalLM", "gemma2", gemma.gemma2, names=LAYER_NAMES | NORMS_AROUND, norm_shift=1.0
    ),
    "gemma3": Architecture(
        "Gemma3ForCausalLM", "gemma3_text", gemma.gemma3, names=LAYER_NAMES | NORMS_AROUND, norm_shift=1.0
    ),
    "gemma4": Architecture(
        "Gemma4ForCausalLM",
        "gemma4_text",
        gemma.gemma4,
        names=LAYER_NAMES | GEMMA4,
        has_experts=True,
        layers_differ=True,
    ),
}


def architecture_of(keys: Keys) -> Architecture:
    """Return the architecture that a file names. Raises ModelError if it is not supported."""
    found = ARCHITECTURES.get(keys.architecture)
    if found is None:
        known = ", ".join(ARCHITECTURES)
        raise ModelError(
            f"GGUF files of the architecture {keys.architecture[:64]} are not supported; those of {known} are. "
            "Use the model's safetensors files"
        )
    return found
