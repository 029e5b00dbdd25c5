"""The rotary scaling that a GGUF file names."""

from __future__ import annotations

import math
from typing import Any

from ..types import ModelError
from .keys import FACTORS, Keys

LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
LISTS = {FACTORS, LONG_FACTORS, SHORT_FACTORS}  # tensors that become values of config.json
MAX_FACTOR = 1 << 20  # of a linear scaling
LOG_MULTIPLIER = "rope.scaling.yarn_log_multiplier"
ORIGINAL_LENGTH = "rope.scaling.original_context_length"
ATTENTION_FACTORS = "rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"
FACTOR_ERROR = 1e-4  # up to which an attention factor is the one that is computed: converters round it differently
EXTRAPOLATION = "rope.scaling.yarn_ext_factor"  # a negative number leaves it to the program


def scaling_of(keys: Keys, head_dim: int) -> dict[str, Any] | None:
    """Return the rope_scaling of config.json, but for that of `longrope`.

    Raises ModelError if the scaling is not supported.
    """
    if FACTORS in keys.tensors:
        factors = keys.floats(FACTORS, head_dim // 2)
        return {
            "rope_type": "longrope",
            "short_factor": factors,
            "long_factor": factors,
            "attention_factor": 1.0,
            "original_max_position_embeddings": keys.number("context_length"),
        }
    kind = keys.get("rope.scaling.type")
    if keys.architecture in ("phi3", "minicpm3") and LONG_FACTORS in keys.tensors:
        return None
    if (value := keys.number(EXTRAPOLATION, 1.0)) not in (1.0, -1.0):
        raise ModelError(f"the GGUF file's {keys.architecture}.{EXTRAPOLATION} of {value:.6g} is not supported")
    attention = _attention_factor(keys, is_yarn=kind == "yarn")
    if not LISTS.isdisjoint(keys.tensors):
        raise ModelError("the GGUF file has factors of rotary frequencies that its architecture does not use")
    if kind in (None, "linear"):  # older files have no type, and the factor by another name
        factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 0))
        if factor and not 1 <= factor <= MAX_FACTOR:
            raise ModelError(f"the GGUF file's factor of rotary scaling is not from 1 to {MAX_FACTOR}")
        return {"rope_type": "linear", "factor": factor} if factor else None
    if kind == "none":
        return None
    if kind != "yarn":
        raise ModelError(f"the GGUF file's rotary scaling {str(kind)[:64]!r} is not supported")
    scaling = {
        "rope_type": "yarn",
        "factor": keys.number("rope.scaling.factor"),
        "original_max_position_embeddings": keys.number(ORIGINAL_LENGTH),
    }
    given = {name: keys.number(f"rope.scaling.yarn_{name}", 0) for name in ("beta_fast", "beta_slow")}
    given["attention_factor"] = attention
    return scaling | {name: value for name, value in given.items() if value}


def longrope(keys: Keys, rotated: int) -> dict[str, Any]:
    """Return the rope_scaling of config.json as its one key if the file lists factors for `rotated` numbers of a head.

    Raises ModelError if the lists are not complete.
    """
    if LONG_FACTORS not in keys.tensors and SHORT_FACTORS not in keys.tensors:
        return {}
    scaling = {
        "rope_type": "longrope",
        "long_factor": keys.floats(LONG_FACTORS, rotated // 2),
        "short_factor": keys.floats(SHORT_FACTORS, rotated // 2),
        "original_max_position_embeddings": keys.number(ORIGINAL_LENGTH, keys.number("context_length")),
    }
    if factor := keys.number("rope.scaling.attn_factor", 0):
        scaling["attention_factor"] = factor
    return {"rope_scaling": scaling}


def _attention_factor(keys: Keys, *, is_yarn: bool) -> float | None:
    """Return attention_factor of config.json; None: the one that follows from the scaling.

    Raises ModelError if the file names another.
    """
    given = {key: keys.number(key) for key in ATTENTION_FACTORS if keys.get(key) is not None}
    if is_yarn and keys.architecture == "olmo2":  # whose converter copies the value of config.json
        return next(iter(given.values()), None)
    computed = 1.0
    if is_yarn and not keys.number(LOG_MULTIPLIER, 0):
        computed += 0.1 * math.log(max(1.0, keys.number("rope.scaling.factor")))
    for key, value in given.items():
        if min(abs(value - 1.0), abs(value - computed)) > FACTOR_ERROR:
            raise ModelError(f"the GGUF file's {keys.architecture}.{key} of {value:.6g} is not supported")
    return None
