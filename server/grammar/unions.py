"""`oneOf` whose alternatives differ in the value of one property, like the unions of pydantic and OpenAPI.

llguidance supports it if the alternatives exclude each other, for which the property must be required. Pydantic leaves
a tag with a default out of `required`.
"""

from __future__ import annotations

import json
from typing import Any

from ..parsers.references import referred

MAX_REFERENCES = 8  # that follow each other


def require_tag(schema: dict[str, Any], root: dict[str, Any]) -> None:
    """Require the first property whose values differ between all alternatives of a `oneOf`, if there is one.

    What follows the schema then also follows the one without the change.
    """
    alternatives = [_followed(each, root) for each in schema["oneOf"]] if isinstance(schema["oneOf"], list) else []
    if not alternatives or not all(isinstance(each.get("properties"), dict) for each in alternatives):
        return
    for name in alternatives[0]["properties"]:
        values = [_values(_followed(each["properties"].get(name), root)) for each in alternatives]
        if all(values) and len(set().union(*values)) == sum(map(len, values)):
            for each in alternatives:
                if isinstance(required := each.get("required", []), list) and name not in required:
                    each["required"] = [*required, name]
            return


def _followed(schema: Any, root: dict[str, Any]) -> dict[str, Any]:
    """Return a schema, or the one that it refers to; empty if there is none."""
    for _ in range(MAX_REFERENCES):
        if not isinstance(schema, dict) or not isinstance(reference := schema.get("$ref"), str):
            break
        schema = referred(root, reference)
    return schema if isinstance(schema, dict) else {}


def _values(schema: dict[str, Any]) -> set[str]:
    """Return the values that a schema lists, as JSON; empty if it lists none."""
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    return {json.dumps(value, sort_keys=True) for value in listed} if isinstance(listed, list) else set()
