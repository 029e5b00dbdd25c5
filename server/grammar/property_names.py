"""`propertyNames`, which llguidance does not have, by keywords that it has.

Pydantic writes it for dictionaries with keys of an enumeration or of a limited length, and Zod for every record.
"""

from __future__ import annotations

import json
from types import NoneType
from typing import Any

from .lookups import MAX_REFERENCES, Lookups
from .regex_length import MAX_SHORTEST

# Keywords that do not constrain a name.
ANNOTATIONS = frozenset(("title", "description", "default", "examples", "deprecated", "$comment"))
LENGTHS = frozenset(("minLength", "maxLength"))


def replace_names(schema: dict[str, Any], lookups: Lookups, limit: int) -> int:
    """Replace the `propertyNames` of an object's schema; return by how many characters that lengthens it.

    Names that are listed become `properties`, a pattern or a length one of `patternProperties`, and all others are
    forbidden. Where that is impossible, or longer than `limit`, the keyword stays. Raises OutOfWork, without a change.
    """
    names = resolved(schema.get("propertyNames"), lookups)
    if names is None or names.pop("type", "string") != "string":
        return 0
    own, other = schema.get("properties", {}), schema.get("additionalProperties", True)
    if not isinstance(own, dict) or not isinstance(other, bool | dict):
        return 0
    if not names:
        del schema["propertyNames"]
        return 0
    if "patternProperties" in schema:
        return 0
    listed = names.get("enum", [names.get("const")])
    if names.keys() in ({"enum"}, {"const"}) and isinstance(listed, list):
        lookups.spend(len(listed) + len(own))
        allowed = dict.fromkeys(name for name in listed if isinstance(name, str))
        kept = {name: value for name, value in own.items() if name in allowed}
        added = {name: other for name in allowed if other is not False and name not in own}
        change = {"properties": kept | added}
        length = sum(map(len, added)) + len(added) * len(json.dumps(other))
    elif not own and (pattern := pattern_of(names)) is not None:
        change = {"patternProperties": {pattern: other}}
        length = len(pattern)
    else:
        return 0
    if length > limit:
        return 0
    del schema["propertyNames"]
    schema |= change | {"additionalProperties": False}
    return length


def resolved(names: Any, lookups: Lookups) -> dict[str, Any] | None:
    """Return the schema of the names without annotations, or the definition that it refers to; None if unknown."""
    for _ in range(MAX_REFERENCES):
        if not isinstance(names, dict):
            return None
        lookups.spend(len(names))
        names = {keyword: value for keyword, value in names.items() if keyword not in ANNOTATIONS}
        if "$ref" not in names:
            return names
        if len(names) > 1 or "$id" in lookups.root or not isinstance(reference := names["$ref"], str):
            return None
        names = lookups.target(reference)
    return None


def pattern_of(names: dict[str, Any]) -> str | None:
    """Return the regular expression of a pattern or a length, None for other constraints."""
    if names.keys() == {"pattern"} and isinstance(names["pattern"], str):
        return names["pattern"]
    low, high = names.get("minLength", 0), names.get("maxLength")
    if not names.keys() <= LENGTHS or type(low) is not int or type(high) not in (int, NoneType):
        return None
    if not 0 <= low <= MAX_SHORTEST or (high is not None and high < low):  # its error would name the replacement
        return None
    return f"^[\\s\\S]{{{low},{'' if high is None else high}}}$"
