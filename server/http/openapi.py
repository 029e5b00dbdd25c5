"""The bodies in /openapi.json that FastAPI does not derive, since routes read and write them themselves."""

from __future__ import annotations

from typing import Any

import msgspec
from pydantic import BaseModel, ConfigDict

from .errors import ENVELOPE

REF = "#/components/schemas/"


class JsonObject(msgspec.Struct, forbid_unknown_fields=True):
    """A JSON object of a response: a writer builds it, msgspec encodes it, and /openapi.json describes it.

    A field that is UNSET is left out; all others are there, also where they have a default.
    """


def examples(*bodies: dict[str, Any]) -> ConfigDict:
    """Return the configuration of a request model that has these examples in /openapi.json."""
    return ConfigDict(json_schema_extra={"examples": [*bodies]})


def described(model: type[BaseModel]) -> dict[str, Any]:
    """Return the request body of a model, for a route's `openapi_extra`."""
    schema = model.model_json_schema(ref_template=REF + "{model}")
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


Responses = dict[int | str, dict[str, Any]]  # by status, for a route's `responses`


def returned(model: type[JsonObject], description: str, errors: Responses, **streamed: Any) -> Responses:
    """Return the description of a JSON response with status 200 and of errors; `streamed` is from `events`."""
    content = {"application/json": {"schema": reference(model)}, **streamed}
    return {200: {"description": description, "content": content}, **errors}


def events(event: type[JsonObject], example: str, *, is_typed: bool = False) -> dict[str, Any]:
    """Return the description of a stream, each of whose events is an `event` or an error; the last one is [DONE].

    Where events are typed an error is an `event` like others, and the last one is known by its type.
    """
    schema = reference(event)
    shared = schema.pop("$defs")
    data = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"anyOf": [schema] if is_typed else [schema, ENVELOPE]},
    }
    contents = [data] if is_typed else [{"const": "[DONE]"}, data]
    kinds = [{"properties": {"data": content}, "required": ["data"]} for content in contents]
    return {"text/event-stream": {"schema": {"type": "object", "anyOf": kinds, "$defs": shared}, "example": example}}


def reference(model: type[JsonObject]) -> dict[str, Any]:
    """Return a reference to the schema of a model, with all schemas that it needs as `$defs`."""
    (schema,), shared = msgspec.json.schema_components([model], ref_template=REF + "{name}")
    for kind in shared.values():
        required = kind.get("required", [])
        fields = kind["properties"]
        kind["required"] = [name for name in fields if "default" in fields[name] or name in required]
    return {**schema, "$defs": shared}
