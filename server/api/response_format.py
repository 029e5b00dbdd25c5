"""The format of the output: OpenAI's response_format and vLLM's structured_outputs."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from msgspec.structs import replace
from pydantic import Field, ValidationInfo, field_validator, model_validator

from ..generation.request import GenerationRequest
from ..grammar.schemas import MAX_SOURCE, Grammar, of_schema
from ..http.fields import LABEL, Wire, clash
from . import notes
from .sampling import CompletionFields, Text

MAX_CHOICES = 8192  # the size of the grammar may allow fewer
ANY_OBJECT = '{"type": "object"}'

Source = Annotated[str, Field(max_length=MAX_SOURCE)]
Schema = dict[str, Any]


class TextFormat(Wire):
    """Any text: the default."""

    type: Literal["text"]


class JsonObjectFormat(Wire):
    """Any JSON object."""

    type: Literal["json_object"]


class NamedSchema(Wire):
    """A JSON schema. Every output that is not cut off follows it, with `strict` and without."""

    name: Annotated[Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_-]+$")], LABEL]
    """Accepted."""
    description: Annotated[Text | None, LABEL] = None
    """Accepted: the schema is not part of the prompt."""
    schema_: Annotated[Schema, Field(alias="schema")]
    """The output follows it."""
    strict: Annotated[bool | None, LABEL] = None
    """Accepted: every schema is enforced."""


class JsonSchemaFormat(Wire):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema
    """The schema and its name."""


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class StructuredOutputs(Wire):
    """One of several kinds of grammar; the others are absent."""

    json_: Annotated[Schema | Source | None, Field(alias="json")] = None
    """A JSON schema, as an object or as its text."""
    regex: Source | None = None
    """A regular expression that the whole content matches."""
    choice: Annotated[list[Source], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)] | None = None
    """The content is one of these texts."""
    grammar: Source | None = None
    """A context-free grammar in Lark's notation, of the whole completion."""
    json_object: bool | None = None
    """true: the content is any JSON object."""

    @field_validator("regex", "choice", "grammar", "json_object")
    @classmethod
    def _alone(cls, value: Any, info: ValidationInfo) -> Any:
        given = [name for name, other in info.data.items() if other is not None and other is not False]
        if value is not None and value is not False and given:
            raise clash("must be the only kind of grammar")
        return value

    @model_validator(mode="after")
    def _says_something(self) -> StructuredOutputs:
        if all(getattr(self, name) is None for name in type(self).model_fields):
            raise clash("must hold a grammar: json, regex, choice, grammar or json_object")
        return self


class FormatFields(CompletionFields):
    """Fields of requests whose output can be constrained by a grammar."""

    response_format: Annotated[ResponseFormat | None, notes.FORMAT] = None
    structured_outputs: Annotated[StructuredOutputs | None, notes.STRUCTURED] = None

    @field_validator("structured_outputs")
    @classmethod
    def _one_grammar(cls, value: StructuredOutputs | None, info: ValidationInfo) -> StructuredOutputs | None:
        if value is not None and not isinstance(info.data.get("response_format"), TextFormat | None):
            raise clash("must be absent where response_format names a format")
        return value

    def resolve(self) -> GenerationRequest:
        return replace(
            super().resolve(), grammar=of_format(self.response_format) or of_outputs(self.structured_outputs)
        )


def of_format(value: TextFormat | JsonObjectFormat | JsonSchemaFormat | None) -> Grammar | None:
    if isinstance(value, JsonObjectFormat):
        return Grammar("json_schema", ANY_OBJECT, "response_format")
    if isinstance(value, JsonSchemaFormat):
        return of_schema(value.json_schema.schema_, "response_format.json_schema.schema")
    return None


def of_outputs(value: StructuredOutputs | None) -> Grammar | None:
    if value is None:
        return None
    field = "structured_outputs"
    if value.json_ is not None:
        return of_schema(value.json_, f"{field}.json")
    if value.regex is not None:
        return Grammar("regex", value.regex, f"{field}.regex")
    if value.choice is not None:
        return Grammar("choice", json.dumps(value.choice, ensure_ascii=False), f"{field}.choice")
    if value.grammar is not None:
        return Grammar("lark", value.grammar, f"{field}.grammar")
    return Grammar("json_schema", ANY_OBJECT, field) if value.json_object else None
