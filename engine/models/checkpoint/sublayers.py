"""Models that count attention, Mamba2, MLPs and experts as layers of their own, as Nemotron-H does.

A layer of the native decoder is attention or a mixer, with the MLP or the experts that follow it. In the config.json
and the checkpoints of these models each of them has a number, a norm called `norm` and a module called `mixer`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...bounds import MAX_EXPERTS, MAX_HEADS
from ...files import shown
from ...types import ModelError
from ..families.keys import count_of, whole
from ..families.mixer_shapes import MAX_DIM, MAX_TAPS

MAX_SUBLAYERS = 1 << 10  # each is sought in the name of each tensor; published models have up to 118
# What hybrid_override_pattern, the list of transformers and that of its older versions call a sublayer.
KINDS = {
    "M": "mamba",
    "*": "full_attention",
    "-": "mlp",
    "E": "moe",
    "mamba": "mamba",
    "linear_attention": "mamba",
    "attention": "full_attention",
    "full_attention": "full_attention",
    "mlp": "mlp",
    "moe": "moe",
}
MODULES = {"mamba": "mamba.", "full_attention": "self_attn.", "mlp": "mlp.", "moe": "mlp."}
AROUND = (  # the names before and after the layers
    ("backbone.", "model."),
    ("model.embeddings.", "model.embed_tokens."),
    ("model.norm_f.", "model.norm."),
)
# The keys of Granite 4.0 for the sizes of Mamba2, with those of Nemotron-H, their defaults and limits.
SIZES = {
    "mamba_n_heads": ("mamba_num_heads", 128, MAX_HEADS),
    "mamba_d_head": ("mamba_head_dim", 64, MAX_DIM),
    "mamba_n_groups": ("n_groups", 8, MAX_HEADS),
    "mamba_d_state": ("ssm_state_size", 128, MAX_DIM),
    "mamba_d_conv": ("conv_kernel", 4, MAX_TAPS),
}


def as_layers(source: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json of the same model whose keys describe layers of the native decoder. Raises ModelError."""
    layers = _layers(source)
    has_experts = any(second == "moe" for _, second in layers)
    sizes = {own: whole(source, key, default, maximum=maximum) for own, (key, default, maximum) in SIZES.items()}
    return {
        "head_dim": source.get("attention_head_dim", 128),
        **source,
        **sizes,
        "mamba_conv_bias": source.get("use_conv_bias", True),
        "mamba_proj_bias": source.get("use_bias", False),
        "num_hidden_layers": len(layers),
        "layer_types": [first for first, _ in layers],
        "layers_without_mlp": [index for index, (_, second) in enumerate(layers) if not second],
        "mlp_only_layers": [index for index, (_, second) in enumerate(layers) if second != "moe"],
        "n_routed_experts": whole(source, "n_routed_experts", 8, maximum=MAX_EXPERTS) if has_experts else 0,
    }


def renames(source: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Return parts of tensors' names in checkpoints, and what the native decoder has for them, see Checkpoint.rename.
    Raises ModelError."""
    found, number = list(AROUND), 0
    for index, kinds in enumerate(_layers(source)):
        for kind, norm in zip(filter(None, kinds), ("input_layernorm.", "post_attention_layernorm."), strict=False):
            old, new = f"model.layers.{number}.", f"model.layers.{index}."
            found += [(f"{old}norm.", new + norm), (f"{old}mixer.", new + MODULES[kind])]
            number += 1
    # GGUF files number the layers that predict further tokens after the others.
    further = range(number, number + count_of(source, "num_nextn_predict_layers", 0, maximum=MAX_SUBLAYERS))
    return *found, *((f"model.layers.{layer}.", f"mtp.layers.{layer}.") for layer in further)


def _layers(source: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the kinds of each layer: what it begins with, and the MLP or the experts; empty: it has neither."""
    listed = next((source[key] for key in ("layers_block_type", "layer_types") if source.get(key)), None)
    listed = listed or source.get("hybrid_override_pattern")
    if not isinstance(listed, str | list) or not 0 < len(listed) <= MAX_SUBLAYERS:
        raise ModelError("config.json: hybrid_override_pattern or layers_block_type must say what each layer is")
    if (given := source.get("num_hidden_layers")) not in (None, len(listed)):
        raise ModelError(f"config.json: num_hidden_layers is {shown(given)}, but {len(listed)} layers are listed")
    layers: list[tuple[str, str]] = []
    for number, name in enumerate(map(str, listed)):
        kind = KINDS.get(name)
        if kind is None:
            raise ModelError(f"config.json: layer {number} is '{shown(name)}', which no layer of this model can be")
        if kind not in ("mlp", "moe"):
            layers.append((kind, ""))
        elif layers and not layers[-1][1]:
            layers[-1] = layers[-1][0], kind
        else:
            raise ModelError(
                f"config.json: layer {number} is an MLP or experts, which must follow a layer of attention or Mamba2"
            )
    return layers
