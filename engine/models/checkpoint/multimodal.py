"""The text part of checkpoints that also read images or audio: its config.json and the names of its tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...types import ModelError
from ..families.architectures import architecture


@dataclass(frozen=True, slots=True)
class TextPart:
    """The text part of an architecture."""

    kinds: Mapping[str, str]  # model_type of its text_config -> architecture of the native decoder
    tied: bool  # default of tie_word_embeddings
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of keys that checkpoints leave out


GEMMA4 = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "vocab_size": 262144,
}
TEXT_PARTS = {
    "Gemma3ForConditionalGeneration": TextPart(
        {"gemma3_text": "Gemma3ForCausalLM"},
        tied=True,
        defaults={
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "vocab_size": 262208,
        },
    ),
    "Gemma4ForConditionalGeneration": TextPart({"gemma4_text": "Gemma4ForCausalLM"}, tied=True, defaults=GEMMA4),
    "Gemma4UnifiedForConditionalGeneration": TextPart(
        {"gemma4_unified_text": "Gemma4UnifiedForCausalLM"}, tied=True, defaults=GEMMA4
    ),
    "Glm4vForConditionalGeneration": TextPart({"glm4v_text": "Glm4vTextModel"}, tied=False),
    "Glm4vMoeForConditionalGeneration": TextPart({"glm4v_moe_text": "Glm4vMoeTextModel"}, tied=False),
    "Mistral3ForConditionalGeneration": TextPart(
        {
            "mistral": "MistralForCausalLM",
            "ministral3": "Ministral3ForCausalLM",
            "mistral4": "Mistral4ForCausalLM",
        },
        tied=True,
    ),
    "Qwen3_5ForConditionalGeneration": TextPart({"qwen3_5_text": "Qwen3_5ForCausalLM"}, tied=False),
    "Qwen3_5MoeForConditionalGeneration": TextPart({"qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"}, tied=False),
    "Lfm2VlForConditionalGeneration": TextPart({"lfm2": "Lfm2ForCausalLM"}, tied=True),
    "Lfm3VlForConditionalGeneration": TextPart({"lfm3": "Lfm3ForCausalLM"}, tied=True),
    "Qwen3VLForConditionalGeneration": TextPart(
        {"qwen3_vl_text": "Qwen3ForCausalLM"}, tied=False, defaults={"rope_theta": 500_000.0}
    ),
    "Qwen3VLMoeForConditionalGeneration": TextPart({"qwen3_vl_moe_text": "Qwen3VLMoeTextModel"}, tied=False),
}
# Where checkpoints have the decoder's tensors, and the head's.
PLACES = (
    ("model.", "lm_head.weight"),
    ("model.language_model.", "lm_head.weight"),
    ("language_model.model.", "language_model.lm_head.weight"),
)
NESTED = tuple(prefix for prefix, _ in PLACES[1:])  # prefixes where there are other parts


def text_part(source: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json of the text part, with an architecture of the native decoder if that has it; of other
    models the same config.json. Raises ModelError."""
    name = architecture(source)
    part = TEXT_PARTS.get(name)
    if part is None:
        return source
    text = source.get("text_config")
    if not isinstance(text, dict):
        raise ModelError("config.json: text_config must be an object")
    kind = text.get("model_type")
    found = part.kinds.get(kind) if isinstance(kind, str) else None
    if found is None:
        return source
    # What the whole says of these keys overrides its text part.
    keys = "dtype", "torch_dtype", "tie_word_embeddings", "quantization_config"
    shared = {key: source[key] for key in keys if source.get(key) is not None}
    tied = {"tie_word_embeddings": part.tied}
    return {**tied, **part.defaults, **text, **shared, "architectures": [found]}


def place(names: Iterable[str]) -> tuple[str, str]:
    """Return the prefix of the decoder's tensors in a checkpoint with these names, and the name of the head's."""
    held = set(names)
    return next((each for each in PLACES if f"{each[0]}embed_tokens.weight" in held), ("", "lm_head.weight"))
