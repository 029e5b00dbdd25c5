"""Which family of the native decoder a config.json names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...files import shown
from ...types import ModelError

MODEL_TYPES = {  # model_type -> architecture; where config.json has both and they differ, the type counts
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "ministral": "MinistralForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "mistral4": "Mistral4ForCausalLM",
    "minicpm3": "MiniCPM3ForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "youtu": "YoutuForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "lfm2_moe": "Lfm2MoeForCausalLM",
    "lfm3": "Lfm3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "cwm": "CwmForCausalLM",
    "arcee": "ArceeForCausalLM",
    "granite": "GraniteForCausalLM",
    "granite_swa": "GraniteSWAForCausalLM",
    "granitemoe_swa": "GraniteMoeSWAForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "granitemoeshared": "GraniteMoeSharedForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "gemma4_unified_text": "Gemma4UnifiedForCausalLM",
    "vaultgemma": "VaultGemmaForCausalLM",
    "flex_olmo": "FlexOlmoForCausalLM",
    "cohere": "CohereForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "internlm3": "InternLM3ForCausalLM",
    "helium": "HeliumForCausalLM",
    "glm": "GlmForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
    "ernie4_5_moe": "Ernie4_5_MoeForCausalLM",
    "hunyuan_v1_dense": "HunYuanDenseV1ForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "hunyuan_v1_moe": "HunYuanMoEV1ForCausalLM",
    "solar_open": "SolarOpenForCausalLM",
    "exaone_moe": "ExaoneMoeForCausalLM",
    "dots1": "Dots1ForCausalLM",
    "afmoe": "AfmoeForCausalLM",
    "mellum": "MellumForCausalLM",
    "laguna": "LagunaForCausalLM",
    "hy_v3": "HYV3ForCausalLM",
    "minimax_m2": "MiniMaxM2ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
}
# Types of checkpoints that came before transformers had the model, under which it has another one now.
OTHER_TYPES = {("MiniMaxM2ForCausalLM", "minimax")}
OTHER_NAMES = {"ExaoneMoEForCausalLM": "ExaoneMoeForCausalLM"}  # of published checkpoints, by those of transformers


def architecture(source: Mapping[str, Any]) -> str:
    """Return the name of the model class. Raises ModelError if config.json has none."""
    names = source.get("architectures")
    if isinstance(names, list) and names and isinstance(names[0], str):
        return OTHER_NAMES.get(names[0], shown(names[0]))
    model_type = source.get("model_type")
    if isinstance(model_type, str) and model_type:
        return MODEL_TYPES.get(model_type, shown(model_type))
    raise ModelError('config.json names no architecture; it needs "architectures" or "model_type"')


def native_architecture(source: Mapping[str, Any]) -> str | None:
    """Return the name of the native decoder's family; None: the model type is that of a model that transformers has.

    The type counts, as in transformers, which saves some models (EXAONE 3) with the name of another's class.
    """
    name, given = architecture(source), source.get("model_type")
    if (name, given) in OTHER_TYPES:
        return name
    own = [kind for kind, each in MODEL_TYPES.items() if each == name]
    if not own or not isinstance(given, str) or not given or given in own:
        return name
    if given in MODEL_TYPES:
        return MODEL_TYPES[given]
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return None if given in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES else name
