"""Numbers of a config.json, read within bounds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...files import shown
from ...types import ModelError
from ..rope import MAX_NUMBER


def whole(source: Mapping[str, Any], key: str, default: int | None = None, *, maximum: int = MAX_NUMBER) -> int:
    """Return a positive whole number, or the default if the key is missing or null. Raises ModelError."""
    value = source.get(key)
    if value is None:
        value = default
    if value is None:
        raise ModelError(f"config.json has no {key}")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"config.json: {key} must be a positive whole number, not {shown(repr(value))}")
    if value > maximum:
        raise ModelError(f"config.json: {key} must be at most {maximum}, not {shown(value)}")
    return value


def count_of(source: Mapping[str, Any], key: str, default: int, *, maximum: int = MAX_NUMBER) -> int:
    """Return a whole number that may be 0, or the default if the key is missing or null. Raises ModelError."""
    value = source.get(key)
    if value is None:
        return default
    is_zero = value == 0 and not isinstance(value, bool | float)
    return 0 if is_zero else whole(source, key, maximum=maximum)


def number(source: Mapping[str, Any], key: str, default: float) -> float:
    """Return a number, or the default if the key is missing. Raises ModelError."""
    value = source.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_NUMBER:
        raise ModelError(f"config.json: {key} must be a number, not {shown(repr(value))}")
    return float(value)


def positive(source: Mapping[str, Any], key: str, default: float) -> float:
    """Return a number above 0, or the default if the key is missing. Raises ModelError."""
    value = number(source, key, default)
    if not value > 0:
        raise ModelError(f"config.json: {key} must be positive, not {shown(value)}")
    return value
