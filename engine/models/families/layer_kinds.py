"""What a config.json says of the layers of a native decoder: what they cannot be, their sizes, windows and rotary
embeddings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ...bounds import MAX_HEADS, MAX_SIZE
from ...files import shown
from ...types import ModelError
from ..decoder_spec import InputsSpec, LayerShape, Scales
from ..layers import ACTIVATIONS
from ..rope import SCALINGS, Rope, read_rope, rope_parameters, scaling_type
from . import latent_shapes, mixer_shapes
from .family import UNGATED, Family, HeadGate, ScaleKey
from .keys import count_of, number, positive, whole

MAX_PERIODS = 1 << 12  # after which the scale of queries grows; there is a table of them
KINDS = {"full_attention", "sliding_attention"}


def unsupported(source: Mapping[str, Any], architecture: str, family: Family) -> str | None:
    """Return why the native decoder cannot run a model of a known family, or None if it can."""
    activation = activation_of(source, family)
    if not isinstance(activation, str):
        raise ModelError(f"config.json: the activation must be a name, not {shown(activation)}")
    if activation not in ACTIVATIONS and (activation != UNGATED or family.mlp[0]):
        return f"the native implementation has no activation '{shown(activation)}'"
    bidirectional = source.get("use_bidirectional_attention")
    if source.get("is_causal") is False or (bidirectional and bidirectional != "vision"):
        return "the native implementation has no bidirectional attention"
    if source.get("use_sliding_window") and architecture in ("Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"):
        return f"the native implementation has no sliding windows for {architecture}"
    if family.mixer == "linear" and activation not in ("silu", "swish"):
        return f"the native implementation has no linear attention with the activation '{shown(activation)}'"
    if family.mixer == "mamba" and not family.has_sublayers and activation not in ("silu", "swish"):
        return f"the native implementation has no layers of Mamba2 with the activation '{shown(activation)}'"
    if family.head_gate is not None and (key := family.head_gate.key):
        gate = source.get(key, True)
        if gate is not True and gate not in ("per-head", "per-element"):
            return f"the native implementation needs {key} to be true, per-head or per-element, not {shown(repr(gate))}"
    for key, value in family.only:
        if (source.get(key, value) or None) != (value or None):
            given = shown(source.get(key))
            return f"the native implementation needs {key} to be {value} for {architecture}, not {given}"
    if source.get("per_layer_config") and not family.layers_differ:
        return f"the native implementation has no layers of different sizes for {architecture}"
    every = (rope_parameters(source),) if family.local_rope is None else _by_layer(source, family)
    for parameters in every:
        if any(isinstance(value, dict) for value in parameters.values()):
            return f"the native implementation has no rotary embeddings that differ by layer for {architecture}"
        scaling = scaling_type(parameters)
        if scaling not in SCALINGS or (scaling == "proportional" and family.rotated_part is not None):
            return f"the native implementation has no rotary scaling '{shown(scaling)}'"
        part = _rotated_part(source, parameters, 1.0)
        if family.rotated_part is None and part not in (1, _latent_part(source, family)) and scaling != "proportional":
            return f"the native implementation has no partial rotary embeddings for {architecture}"
    return None


def _rotated_part(source: Mapping[str, Any], parameters: Mapping[str, Any], default: float) -> float:
    """Return the part of each head that is rotated."""
    key = "partial_rotary_factor"
    given = {key: parameters.get(key, source.get(key))}
    part = default if given[key] is None else number(given, key, default)
    if not 0 < part <= 1:
        raise ModelError(f"config.json: {key} must be above 0 and at most 1, not {shown(part)}")
    return part


def _latent_part(source: Mapping[str, Any], family: Family) -> float:
    """Return the part of each head that is rotated in latent attention; 1: attention is not latent."""
    if family.latent is None:
        return 1.0
    rotated, plain = (whole(source, key, dict(family.latent)[key]) for key in ("qk_rope_head_dim", "qk_nope_head_dim"))
    return rotated / (rotated + plain)


def _by_layer(source: Mapping[str, Any], family: Family) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the rotary parameters of layers without a window, and of those with one.

    rope_scaling, the old key, is for layers without.
    """
    given, scaling = source.get("rope_parameters") or {}, source.get("rope_scaling") or {}
    if not isinstance(given, dict) or not isinstance(scaling, dict):
        raise ModelError("config.json: rope_scaling and rope_parameters must be objects")
    # One object for all layers, of which transformers ignores the base: accepted if all of it is the default.
    default = {"rope_type": "default", "type": "default", "rope_theta": source.get("rope_theta") or family.theta}
    if not family.scaling and given.items() <= default.items():
        given = {}
    everywhere, windowed = given.get("full_attention") or {}, given.get("sliding_attention") or {}
    if not isinstance(everywhere, dict) or not isinstance(windowed, dict) or given.keys() - KINDS:
        raise ModelError("config.json: rope_parameters must hold objects for full_attention and sliding_attention")
    return everywhere | scaling, windowed


def activation_of(source: Mapping[str, Any], family: Family) -> Any:
    """Return the name of the activation of the gates."""
    key, default = family.activation
    found = source.get(key) or default
    return default if key == "hidden_act" and found == "gelu" and default.startswith("gelu") else found  # as in Gemma


def is_tied(source: Mapping[str, Any], family: Family) -> bool:
    """Return whether the head has the weight of the embedding."""
    first = source.get(family.tied_key)
    return bool(source.get("tie_word_embeddings", family.tied) if first is None else first)


def inner(source: Mapping[str, Any], family: Family) -> int:
    """Return the intermediate size of the MLP."""
    if not family.adjusts_inner:
        return whole(source, family.inner, maximum=MAX_SIZE)
    size = whole(source, "block_ff_dim" if "block_ff_dim" in source else family.inner, maximum=MAX_SIZE)
    if not source.get("block_auto_adjust_ff_dim", True):
        return size
    size, multiple = 2 * size // 3, whole(source, "block_multiple_of", 256, maximum=MAX_SIZE)
    if source.get("block_ffn_dim_multiplier", 1.0) is None:
        return max(1, size)
    size = max(1, -(-int(positive(source, "block_ffn_dim_multiplier", 1.0) * size) // multiple)) * multiple
    if size > MAX_SIZE:
        raise ModelError(
            f"config.json: block_ffn_dim_multiplier makes an intermediate size of {size}, above {MAX_SIZE}"
        )
    return size


def rotates(source: Mapping[str, Any], family: Family, num_layers: int) -> tuple[bool, ...]:
    """Return of each layer whether it has a rotary embedding, unless its window decides."""
    if family.rotating in ("named", "none"):
        return (family.rotating == "named" and source.get("position_embedding_type") == "rope",) * num_layers
    if family.rotating != "listed":
        return (True,) * num_layers
    listed = source.get("no_rope_layers")
    if listed is None:
        interval = whole(source, "no_rope_layer_interval", 4)
        return tuple((layer + 1) % interval != 0 for layer in range(num_layers))
    if not isinstance(listed, list) or len(listed) < num_layers or set(map(repr, listed)) - {"0", "1"}:
        raise ModelError(f"config.json: no_rope_layers must be a list with 0 or 1 for each of the {num_layers} layers")
    return tuple(value == 1 for value in listed[:num_layers])


def windows(
    source: Mapping[str, Any], family: Family, num_layers: int, rotates: Sequence[bool]
) -> tuple[int | None, ...]:
    """Return each layer's sliding window. `rotates`: which layers have a rotary embedding."""
    window = source.get("sliding_window", family.window or None)
    if family.window is None or window is None:
        return (None,) * num_layers
    window = whole(source, "sliding_window", window)
    if family.layer_windows and not source.get("use_sliding_window", False):
        return (None,) * num_layers
    kinds = mixer_shapes.listed(source, family, num_layers) if family.mixer else source.get("layer_types")
    if kinds is None:
        if family.window_step is not None:
            step = whole(source, family.window_step_key, family.window_step)
            found = [window if (layer + (not family.opens_full)) % step else None for layer in range(num_layers)]
            return (*found[:-1], None) if family.layers_differ else tuple(found)
        if not family.layer_windows and family.window_start is None:
            return (window,) * num_layers
        if family.rotating == "listed":
            return tuple(None if turns else window for turns in rotates)
        first = number(source, "max_window_layers", family.window_start or 28)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise ModelError(f"config.json: layer_types must name all {num_layers} layers")
    unknown = sorted({str(kind) for kind in kinds} - KINDS - {mixer_shapes.KINDS.get(family.mixer)})
    if unknown:
        raise ModelError(f"config.json: unknown layer type '{shown(unknown[0])}'")
    found = [window if kind == "sliding_attention" else None for kind in kinds]
    return (*found[:-1], None) if family.layers_differ else tuple(found)


def shapes(
    source: Mapping[str, Any], family: Family, plain: LayerShape, windows: Sequence[int | None]
) -> tuple[LayerShape, ...]:
    """Return the sizes of each layer: `plain`, unless those without a window, or the last ones, differ, or some have
    no attention."""
    if family.mixer:
        return mixer_shapes.read(source, family, plain, len(windows))
    if family.latent is not None:
        heads = whole(source, "num_attention_heads", maximum=MAX_HEADS)
        sizes = latent_shapes.read(source, dict(family.latent), heads, in_two=family.latent_in_two)
        return (plain._replace(kv_heads=1, head_dim=sizes.key, latent=sizes),) * len(windows)
    if family.heads_key:
        return _with_heads(source, family.heads_key, plain, len(windows))
    if not family.layers_differ:
        return (plain,) * len(windows)
    is_joined = bool(source.get("attention_k_eq_v", False))
    everywhere = plain._replace(head_dim=whole(source, "global_head_dim", 512, maximum=MAX_HEADS))
    if is_joined:
        heads = whole(source, "num_global_key_value_heads", plain.kv_heads, maximum=MAX_HEADS)
        everywhere = everywhere._replace(kv_heads=heads)
    found = [everywhere if window is None else plain for window in windows]
    if source.get("per_layer_config") is not None:  # newer versions of transformers write it in place of these keys
        found = _listed(source["per_layer_config"], plain, len(windows))
    if is_joined:
        found = [shape._replace(has_values=window is not None) for shape, window in zip(found, windows, strict=True)]
    own = len(windows) - count_of(source, "num_kv_shared_layers", 0, maximum=len(windows) - 1)
    inner = plain.inner * (2 if source.get("use_double_wide_mlp") else 1)
    for layer in range(own, len(windows)):
        alike = [index for index in range(own) if windows[index] == windows[layer] and found[index] == found[layer]]
        if not alike:
            raise ModelError(f"config.json: there is no layer whose keys and values layer {layer} could share")
        found[layer] = found[layer]._replace(inner=inner, shares=alike[-1])
    return tuple(found)


def _with_heads(source: Mapping[str, Any], key: str, plain: LayerShape, num_layers: int) -> tuple[LayerShape, ...]:
    """Return the sizes of layers that may each have a number of query heads of its own."""
    if (listed := source.get(key)) is None:
        return (plain,) * num_layers
    if not isinstance(listed, list) or len(listed) != num_layers:
        raise ModelError(f"config.json: {key} must list the heads of all {num_layers} layers")
    return tuple(plain._replace(heads=whole({key: each}, key, maximum=MAX_HEADS)) for each in listed)


def _listed(listed: Any, plain: LayerShape, num_layers: int) -> list[LayerShape]:
    """Return the sizes of layers of which per_layer_config says how they differ."""
    found = [plain] * num_layers
    places = {str(layer): layer for layer in range(num_layers)}
    for layer, sizes in (listed if isinstance(listed, dict) else {"": None}).items():
        place = places.get(layer.lstrip("0") or layer[-1:])
        if place is None or not isinstance(sizes, dict) or sizes.keys() - {"head_dim", "num_key_value_heads"}:
            raise ModelError(
                f"config.json: per_layer_config must hold head_dim and num_key_value_heads of some of the {num_layers}"
                " layers, and nothing else"
            )
        found[place] = plain._replace(
            head_dim=whole(sizes, "head_dim", plain.head_dim, maximum=MAX_HEADS),
            kv_heads=whole(sizes, "num_key_value_heads", plain.kv_heads, maximum=MAX_HEADS),
        )
    return found


def head_gate(source: Mapping[str, Any], family: Family) -> HeadGate | None:
    """Return the projection to gates of what heads attend to; None: there is none."""
    gate = family.head_gate
    if gate is None or not gate.key:
        return gate
    return gate._replace(per_head=source.get(gate.key, True) != "per-element")


def inputs(source: Mapping[str, Any]) -> InputsSpec | None:
    """Return the sizes of the layers' own inputs, or None if they have none."""
    size = count_of(source, "hidden_size_per_layer_input", 256, maximum=MAX_HEADS)
    vocab_size = whole(source, "vocab_size_per_layer_input", 262144, maximum=MAX_SIZE)
    if size and vocab_size < whole(source, "vocab_size", maximum=MAX_SIZE):
        raise ModelError(f"config.json: vocab_size_per_layer_input must not be below vocab_size, but is {vocab_size}")
    return InputsSpec(vocab_size, size) if size else None


def ropes(
    source: Mapping[str, Any],
    family: Family,
    shapes: Sequence[LayerShape],
    rotates: Sequence[bool],
    windows: Sequence[int | None],
) -> tuple[tuple[Rope, ...], tuple[int, ...]]:
    """Return the rotary embeddings, and for each layer the index of its own or -1."""
    if odd := next((shape.head_dim for shape in shapes if shape.head_dim % 2), None):
        raise ModelError(f"config.json: head_dim must be even for rotary embeddings, not {odd}")
    head_dim = shapes[0].head_dim if shapes[0].latent is None else shapes[0].latent.rotated
    if family.rotated_part is not None:
        default = family.rotated_part
        if source.get(family.rotated_key) is not None:
            default = whole(source, family.rotated_key, maximum=head_dim) / head_dim
        if family.local_rope is None:  # else they are read for each type of layers
            head_dim = _even(int(head_dim * _rotated_part(source, rope_parameters(source), default)))
    positions = whole(source, "max_position_embeddings", family.max_positions)
    if family.scaling and not rope_parameters(source):
        parameters = dict(family.scaling)
        source = {**source, "rope_parameters": {"full_attention": parameters} if family.local_rope else parameters}
    if (bases := _bases(source, family, len(windows))) is not None:
        return _with_bases(source, bases, head_dim, positions, family.theta)
    if family.local_rope is None:
        rope = read_rope(source, head_dim, positions, theta=family.theta)
        if family.scales_queries:
            rope = _with_scaled_queries(source, rope)
        has_windows = source.get("sliding_window", family.window) is not None
        if family.rotating == "windowed" or (family.rotating == "windowed_or_all" and has_windows):
            rotates = [window is not None for window in windows]
        return (rope,), tuple(0 if turns else -1 for turns in rotates)
    everywhere, windowed = _by_layer(source, family)
    base, default = family.local_rope
    thetas = source.get("rope_theta") or family.theta, source.get(base) or default
    turns = tuple(0 if window is None else 1 for window in windows)
    both = []
    for turn, (theta, parameters) in enumerate(zip(thetas, (everywhere, windowed), strict=True)):
        sizes = {shape.head_dim for shape, own in zip(shapes, turns, strict=True) if own == turn} or {head_dim}
        if len(sizes) > 1:
            raise ModelError("config.json: layers of one type must have heads of one size")
        given = {**source, "rope_scaling": None, "rope_parameters": {"rope_theta": theta, **parameters}}
        part = 1.0 if family.rotated_part is None else _rotated_part({}, parameters, 1.0)
        both.append(read_rope(given, _even(int(sizes.pop() * part)), positions))
    return tuple(both), turns


def _bases(source: Mapping[str, Any], family: Family, num_layers: int) -> list[float] | None:
    """Return the base of each layer's rotary embedding, 0: it has none; None: all have one."""
    if not family.bases_key or (listed := source.get(family.bases_key)) is None:
        return None
    if not isinstance(listed, list) or len(listed) != num_layers:
        raise ModelError(f"config.json: {family.bases_key} must list the bases of all {num_layers} layers")
    return [number({family.bases_key: each}, family.bases_key, 0.0) for each in listed]


def _with_bases(
    source: Mapping[str, Any], bases: Sequence[float], head_dim: int, positions: int, theta: float
) -> tuple[tuple[Rope, ...], tuple[int, ...]]:
    """Return a rotary embedding for each base, and for each layer the index of its own or -1."""
    found, parameters = sorted({base for base in bases if base}), rope_parameters(source)
    each = ({**source, "rope_scaling": {**parameters, "rope_theta": base}} for base in found or [theta])
    turns = tuple(found.index(base) if base else -1 for base in bases)
    return tuple(read_rope(given, head_dim, positions) for given in each), turns


def _even(rotated: int) -> int:
    """Return how many numbers of a head are rotated. Raises ModelError if they are not pairs."""
    if rotated % 2 or not rotated:
        raise ModelError(f"config.json: partial_rotary_factor rotates {rotated} numbers of a head, not an even number")
    return rotated


def _with_scaled_queries(source: Mapping[str, Any], rope: Rope) -> Rope:
    beta = number(rope_parameters(source), "llama_4_scaling_beta", 0.0)
    if beta and (rope.original_positions is None or rope.longest > MAX_PERIODS * rope.original_positions):
        least = rope.longest // MAX_PERIODS + 1
        raise ModelError(f"config.json: llama_4_scaling_beta needs original_max_position_embeddings of {least} or more")
    return replace(rope, query_beta=beta)


def scores(source: Mapping[str, Any], family: Family, shape: LayerShape, rope: Rope) -> tuple[float, float | None]:
    """Return the scale and the cap of the scores of a layer's attention."""
    default = shape.head_dim**-0.5 if shape.latent is None else latent_shapes.scale(shape.latent, rope)
    scale = scale_of(source, family.scales.scores, default)
    return scale, None if family.caps is None else _cap(source, "attn_logit_softcapping", family.caps[0])


def scales(source: Mapping[str, Any], family: Family, hidden: int, dtype: torch.dtype) -> Scales:
    """Return the other scales of a model of this hidden size and dtype."""
    # As in transformers: in bfloat16 the square root of 3072 is 55.5.
    size = torch.tensor(hidden**0.5, dtype=torch.float32).to(dtype).item() if family.scales_by_size else 1.0
    return Scales(
        embedding=scale_of(source, family.scales.embedding, size),
        residual=scale_of(source, family.scales.residual, 1.0),
        logits=scale_of(source, family.scales.logits, 1.0),
        cap=None if family.caps is None else _cap(source, "final_logit_softcapping", family.caps[1]),
    )


def scale_of(source: Mapping[str, Any], key: ScaleKey | None, default: float) -> float:
    if key is None or not key.name:
        return default if key is None else key.default
    if key.enabled and not source.get(key.enabled, False):
        return 1.0
    if key.factor is None:
        return float(positive(source, key.name, key.default) ** key.power)
    name, power = key.factor
    if source.get(key.name, key.default) is None:
        return 1.0
    return float(positive(source, key.name, key.default) ** key.power * whole(source, name) ** power)


def _cap(source: Mapping[str, Any], key: str, default: float | None) -> float | None:
    return None if source.get(key, default) is None else positive(source, key, default or 0.0)
