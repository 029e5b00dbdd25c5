"""What a config.json says of the layers that have something else in place of attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ...bounds import MAX_HEADS
from ...files import shown
from ...types import ModelError
from ..decoder_spec import LayerShape
from ..mixers.states import ConvShape, LinearShape, Mamba2Shape, MixerShape
from .family import Family
from .keys import number, whole

MAX_DIM, MAX_TAPS = 1 << 10, 1 << 6
KINDS = {"linear": "linear_attention", "conv": "conv", "mamba": "mamba"}  # how layer_types names these layers
INFINITE = math.inf, {"__float__": "Infinity"}  # as transformers writes it
# Other spellings of these kinds: of transformers, and of older configs, whose key is layers_block_type.
OTHER_NAMES = {"linear_attention": "mamba", "attention": "full_attention"}


def read(source: Mapping[str, Any], family: Family, plain: LayerShape, num_layers: int) -> tuple[LayerShape, ...]:
    """Return the shape of each layer of a family that has a mixer; `plain`: that of layers with attention."""
    assert family.mixer
    kind, kinds = KINDS[family.mixer], listed(source, family, num_layers)
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise ModelError(f"config.json: layer_types must name all {num_layers} layers")
    windowed = set() if family.window is None else {"sliding_attention"}
    if unknown := sorted({str(each) for each in kinds} - {"full_attention", kind} - windowed):
        raise ModelError(f"config.json: layer_types names {shown(unknown[0])}, which no layer of this model can be")
    if "full_attention" not in kinds:
        raise ModelError("config.json: layer_types names no layer with full attention")
    readers: dict[str, Callable[[Mapping[str, Any]], MixerShape]] = {
        "linear": linear,
        "conv": partial(_conv, family=family),
        "mamba": partial(_mamba, family=family),
    }
    other = plain._replace(mixer=readers[family.mixer](source)) if kind in kinds else plain
    found = [other if each == kind else plain for each in kinds]
    for layer in source.get("layers_without_mlp", []) if family.has_sublayers else []:  # see ../checkpoint/sublayers.py
        found[layer] = found[layer]._replace(inner=0)
    return tuple(found)


def listed(source: Mapping[str, Any], family: Family, num_layers: int) -> Any:
    """Return what layer_types says of a family that has a mixer, or what other keys or the family say without it."""
    if family.mixer == "mamba":
        return _named(source)
    if (kinds := source.get("layer_types")) is not None:
        return kinds
    if family.window is not None:  # LFM3
        cycle = "sliding_attention", "conv", "full_attention", "conv"
        return ["conv", *(cycle[layer % 4] for layer in range(1, num_layers))]
    return _by_interval(source, num_layers) if family.mixer == "linear" else _by_index(source, num_layers)


def _by_interval(source: Mapping[str, Any], num_layers: int) -> list[str]:
    interval = whole(source, "full_attention_interval", 4)
    return ["linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(num_layers)]


def _named(source: Mapping[str, Any]) -> Any:
    kinds = source.get("layer_types") or source.get("layers_block_type")
    return [OTHER_NAMES.get(each, each) for each in map(str, kinds)] if isinstance(kinds, list) else kinds


def _by_index(source: Mapping[str, Any], num_layers: int) -> list[str]:
    full = source.get("full_attn_idxs")
    if full is None:
        return ["full_attention"] * num_layers
    if not isinstance(full, list):
        raise ModelError(f"config.json: full_attn_idxs must be a list, not {shown(full)}")
    return ["full_attention" if layer in full else "conv" for layer in range(num_layers)]


def linear(source: Mapping[str, Any]) -> LinearShape:
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
        is_tiled=source.get("linear_value_heads_tiled") is True,  # our own key, of converted GGUF files
    )


def _conv(source: Mapping[str, Any], family: Family) -> ConvShape:
    """Return the sizes of layers of short convolution."""
    hidden, taps = whole(source, "hidden_size"), whole(source, "conv_L_cache", family.taps, maximum=MAX_TAPS)
    return ConvShape(hidden, taps, bool(source.get("conv_bias", False)))


def _mamba(source: Mapping[str, Any], family: Family) -> Mamba2Shape:
    """Return the sizes of layers of Mamba2."""
    groups = whole(source, "mamba_n_groups", 1, maximum=MAX_HEADS)
    heads = whole(source, "mamba_n_heads", 128, maximum=MAX_HEADS)
    if heads % groups:
        raise ModelError(f"config.json: {heads} heads of Mamba cannot share {groups} groups of states evenly")
    inner = whole(source, "mamba_expand", 2, maximum=MAX_DIM) * whole(source, "hidden_size")
    given = {} if source.get("mamba_d_head") == "auto" else source
    size = whole(given, "mamba_d_head", inner // heads, maximum=MAX_DIM)
    if heads * size != inner and not family.has_sublayers:
        raise ModelError(
            f"config.json: mamba_expand makes {inner} numbers of a token, not those of {heads} heads of {size}"
        )
    return Mamba2Shape(
        key_heads=groups,
        value_heads=heads,
        key_dim=whole(source, "mamba_d_state", 256, maximum=MAX_DIM),
        value_dim=size,
        taps=whole(source, "mamba_d_conv", 4, maximum=MAX_TAPS),
        has_bias=bool(source.get("mamba_proj_bias", False)),
        has_conv_bias=bool(source.get("mamba_conv_bias", True)),
        limits=_limits(source),
    )


def _limits(source: Mapping[str, Any]) -> tuple[float, float]:
    """Return the limits of the time steps."""
    given = source.get("time_step_limit")
    if given is None:
        return 0.0, math.inf
    if not isinstance(given, list) or len(given) != 2:
        raise ModelError(f"config.json: time_step_limit must be two numbers, not {shown(given)}")
    least, most = (
        math.inf if each in INFINITE else number({"time_step_limit": each}, "time_step_limit", 0.0) for each in given
    )
    if not 0 <= least <= most or least == math.inf:
        raise ModelError(f"config.json: time_step_limit must be a range of numbers from 0 on, not {shown(given)}")
    return least, most
