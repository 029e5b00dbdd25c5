"""What a config.json says of the layers that have something else in place of attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..bounds import MAX_HEADS
from ..files import shown
from ..types import ModelError
from .decoder_spec import LayerShape
from .family import Family
from .keys import whole
from .states import ConvShape, LinearShape

MAX_DIM, MAX_TAPS = 1 << 10, 1 << 6
KINDS = {"linear": "linear_attention", "conv": "conv"}  # how layer_types names these layers


def read(source: Mapping[str, Any], family: Family, plain: LayerShape, num_layers: int) -> tuple[LayerShape, ...]:
    """Return the shape of each layer of a family that has a mixer; `plain`: that of layers with attention."""
    assert family.mixer
    kind = KINDS[family.mixer]
    kinds = source.get("layer_types")
    if kinds is None:
        kinds = _by_interval(source, num_layers) if family.mixer == "linear" else _by_index(source, num_layers)
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise ModelError(f"config.json: layer_types must name all {num_layers} layers")
    if unknown := sorted({str(each) for each in kinds} - {"full_attention", kind}):
        raise ModelError(f"config.json: layer_types names {shown(unknown[0])}, which no layer of this model can be")
    if "full_attention" not in kinds:
        raise ModelError("config.json: layer_types names no layer with attention")
    mixer = _linear(source) if family.mixer == "linear" else _conv(source)
    other = plain._replace(mixer=mixer)
    return tuple(other if each == kind else plain for each in kinds)


def _by_interval(source: Mapping[str, Any], num_layers: int) -> list[str]:
    interval = whole(source, "full_attention_interval", 4)
    return ["linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(num_layers)]


def _by_index(source: Mapping[str, Any], num_layers: int) -> list[str]:
    listed = source.get("full_attn_idxs")
    if listed is None:
        return ["full_attention"] * num_layers
    if not isinstance(listed, list):
        raise ModelError(f"config.json: full_attn_idxs must be a list, not {shown(listed)}")
    return ["full_attention" if layer in listed else "conv" for layer in range(num_layers)]


def _linear(source: Mapping[str, Any]) -> LinearShape:
    """Return the sizes of layers of linear attention."""
    key_heads = whole(source, "linear_num_key_heads", 16, maximum=MAX_HEADS)
    value_heads = whole(source, "linear_num_value_heads", 32, maximum=MAX_HEADS)
    if value_heads % key_heads:
        raise ModelError(
            f"config.json: {value_heads} value heads of linear attention cannot share {key_heads} key heads evenly"
        )
    return LinearShape(
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=whole(source, "linear_key_head_dim", 128, maximum=MAX_DIM),
        value_dim=whole(source, "linear_value_head_dim", 128, maximum=MAX_DIM),
        taps=whole(source, "linear_conv_kernel_dim", 4, maximum=MAX_TAPS),
    )


def _conv(source: Mapping[str, Any]) -> ConvShape:
    """Return the sizes of layers of short convolution."""
    hidden = whole(source, "hidden_size")
    return ConvShape(hidden, whole(source, "conv_L_cache", 3, maximum=MAX_TAPS), bool(source.get("conv_bias", False)))
