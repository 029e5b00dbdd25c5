"""`oneOf` whose alternatives differ in the value of one property, like the unions of pydantic and OpenAPI.

llguidance supports it if the alternatives exclude each other, for which the property must be required. Pydantic leaves
a tag with a default out of `required`.
"""

from __future__ import annotations

from typing import Any

from .lookups import Lookups


def require_tag(schema: dict[str, Any], lookups: Lookups) -> None:
    """Require the first property whose values differ between all alternatives of a `oneOf`, if there is one.

    What follows the schema then also follows the one without the change. Raises OutOfWork, without a change.
    """
    alternatives = [lookups.followed(each) for each in schema["oneOf"]] if isinstance(schema["oneOf"], list) else []
    if not alternatives or not all(isinstance(each.get("properties"), dict) for each in alternatives):
        return
    tag = next((name for name in alternatives[0]["properties"] if _differs(name, alternatives, lookups)), None)
    if tag is None:
        return
    required = [each.get("required", []) for each in alternatives]
    lookups.spend(sum(len(names) for names in required if isinstance(names, list)))
    for each, names in zip(alternatives, required, strict=True):
        if isinstance(names, list) and tag not in names:
            each["required"] = [*names, tag]


def _differs(name: str, alternatives: list[dict[str, Any]], lookups: Lookups) -> bool:
    """Whether no two alternatives list the same value of a property, and all list some."""
    seen: set[str] = set()
    for each in alternatives:
        values = lookups.values(lookups.followed(each["properties"].get(name)))
        lookups.spend(len(values))
        if not values or not seen.isdisjoint(values):
            return False
        seen |= values
    return True
