"""What a config.json says of the experts of a native decoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...bounds import MAX_EXPERTS, MAX_SIZE
from ...files import shown
from ...types import ModelError
from ..experts import SOFTMAX, ExpertsSpec, Routing
from ..layers import Clamp
from .family import ExpertKeys, Family
from .keys import count_of, positive, whole
from .layer_kinds import scale_of

EXPERT_COUNTS = "num_experts", "n_routed_experts", "moe_num_experts"
METHODS = "greedy", "group_limited_greedy"  # of topk_method


def experts(source: Mapping[str, Any], family: Family, num_layers: int) -> ExpertsSpec | None:
    """Return the shape of a family's experts; None: there are none."""
    keys = family.experts
    if keys is None:
        return None
    if keys.enabled and not source.get(keys.enabled, False):
        return None
    given = next((key for key in EXPERT_COUNTS if key in source), "num_local_experts")
    source = _with_one(_with_one(source, given), keys.active)
    count = whole(source, given, maximum=MAX_EXPERTS)
    if count * num_layers > MAX_EXPERTS:
        raise ModelError(f"config.json: {num_layers} layers of {count} experts are more than {MAX_EXPERTS} experts")
    only = source.get("mlp_only_layers") or []
    if not isinstance(only, list):
        raise ModelError(f"config.json: mlp_only_layers must be a list, not {shown(only)}")
    if (kinds := source.get("mlp_layer_types")) is not None:  # comes before the other keys
        if not isinstance(kinds, list) or len(kinds) != num_layers or {*map(repr, kinds)} - {"'dense'", "'sparse'"}:
            raise ModelError(
                f"config.json: mlp_layer_types must be a list with dense or sparse for each of the {num_layers} layers"
            )
        only = [index for index, kind in enumerate(kinds) if kind == "dense"]
    step = whole(source, keys.step, 1)
    last = source.get(keys.last, -1) if keys.last else -1
    last = num_layers - 1 if last == -1 else count_of(source, keys.last, 0)
    is_normalized = keys.is_normalized
    if is_normalized is None:
        is_normalized = bool(source.get("norm_topk_prob", keys.normalizes))
    first_dense = 0
    if keys.first_dense is not None and kinds is None:
        first_dense = count_of(source, keys.first_dense_key, keys.first_dense)
    inner, active = whole(source, keys.inner, maximum=MAX_SIZE), whole(source, keys.active, maximum=count)
    return ExpertsSpec(
        count=count,
        active=active,
        inner=inner,
        is_normalized=is_normalized,
        dense=frozenset(
            index
            for index in range(num_layers)
            if not first_dense <= index <= last or index in only or (index + 1) % step
        ),
        names=keys.names,
        has_bias=keys.has_bias,
        clamp=_clamp(source) if keys.clamp else None,
        is_beside=keys.is_beside,
        scale=scale_of(source, family.scales.residual, 1.0),
        routing=_routing(source, count, active, keys),
        corrects=keys.corrects,
        shared=_shared(source, keys, inner),
        shared_gate=keys.shared_gate,
        epsilon=keys.epsilon,
        shared_names=keys.shared or ("", "", ""),
        latent=count_of(source, keys.latent_key, 0, maximum=MAX_SIZE) if keys.latent_key else 0,
        latent_names=keys.latent_names,
    )


def _shared(source: Mapping[str, Any], keys: ExpertKeys, inner: int) -> int:
    """Return the intermediate size of the MLP beside the experts; 0: there is none."""
    if keys.shared is None:
        return 0
    if keys.shared_inner:
        return count_of(source, keys.shared_inner, 0, maximum=MAX_SIZE)
    return inner * count_of(source, keys.shared_count, keys.num_shared, maximum=MAX_SIZE // inner)


def _with_one(source: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return config.json with one value of a key that may have a list with the same one for each layer."""
    listed = source.get(key)
    if not isinstance(listed, list):
        return source
    if not listed or any(each != listed[0] for each in listed):
        raise ModelError(f"config.json: {key} must be the same for all layers")
    return {**source, key: listed[0]}


def _routing(source: Mapping[str, Any], count: int, active: int, keys: ExpertKeys) -> Routing:
    if not keys.has_sigmoids and not keys.reads_topk_method:
        return SOFTMAX
    scale = positive(source, keys.scale_key, keys.scale)
    if keys.reads_topk_method:
        method = source.get("topk_method") or METHODS[0]
        if method not in METHODS:
            raise ModelError(f"config.json: topk_method must be {' or '.join(METHODS)}, not {shown(method)}")
        if method == METHODS[0]:
            return Routing(keys.has_sigmoids, scale=scale)
    groups = whole(source, "n_group", keys.groups[0], maximum=count)
    if count % groups or (groups > 1 and count < 2 * groups):
        raise ModelError(f"config.json: {count} experts cannot be divided into {groups} groups of two or more")
    kept = whole(source, "topk_group", keys.groups[1], maximum=groups)
    if active > kept * (count // groups):
        raise ModelError(f"config.json: {kept} of {groups} groups have fewer than {active} experts")
    return Routing(keys.has_sigmoids, groups, kept, scale)


def _clamp(source: Mapping[str, Any]) -> Clamp:
    return Clamp(positive(source, "swiglu_limit", 7.0), positive(source, "swiglu_alpha", 1.702))
