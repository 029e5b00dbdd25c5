"""What the rewriting of one schema looks up in it: references and listed values, within a budget of work."""

from __future__ import annotations

import json
from typing import Any

from ..parsers.references import referred

MAX_REFERENCES = 8  # that follow each other


class OutOfWork(Exception):
    """The budget does not suffice for this part of the schema. Without a text: the caller knows which part it is."""


class Lookups:
    """Lookups in the schema `root`, each made once. `work`: how many references, values and names may be visited.

    Without a budget many references to one large definition would take time quadratic in the length of the schema, on
    the event loop.
    """

    def __init__(self, root: dict[str, Any], work: int) -> None:
        self.root = root
        self._left = work
        self._targets: dict[str, Any] = {}  # by reference
        # By the id of their schema, which is kept beside them: the id of one that is gone may become another's.
        self._values: dict[int, tuple[dict[str, Any], frozenset[str]]] = {}

    def spend(self, work: int) -> None:
        """Take work from the budget before it is done; raises OutOfWork."""
        self._left -= work
        if self._left < 0:
            raise OutOfWork

    def target(self, reference: str) -> Any:
        """Return what a reference leads to; None if that is nothing."""
        self.spend(1)
        if reference not in self._targets:
            self.spend(len(reference))
            self._targets[reference] = referred(self.root, reference)
        return self._targets[reference]

    def followed(self, schema: Any) -> dict[str, Any]:
        """Return a schema, or the one that it refers to; empty if there is none."""
        for _ in range(MAX_REFERENCES):
            if not isinstance(schema, dict) or not isinstance(reference := schema.get("$ref"), str):
                break
            schema = self.target(reference)
        return schema if isinstance(schema, dict) else {}

    def values(self, schema: dict[str, Any]) -> frozenset[str]:
        """Return the values that a schema lists, as JSON; empty if it lists none."""
        self.spend(1)
        if id(schema) not in self._values:
            listed = [schema["const"]] if "const" in schema else schema.get("enum")
            texts = (json.dumps(value, sort_keys=True) for value in listed) if isinstance(listed, list) else ()
            self._values[id(schema)] = schema, frozenset(texts)
        return self._values[id(schema)][1]
