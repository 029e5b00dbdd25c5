"""Requests for the relevance of documents: rerank, in the form of Cohere and Jina, and score, in that of vLLM."""

from __future__ import annotations

from typing import Annotated, ClassVar, NamedTuple

from pydantic import Field, Tag, field_validator
from pydantic_core.core_schema import ValidationInfo

from ...http.fields import Refused, Wire, chosen_by, clash, refused
from ...http.openapi import examples
from ..extensions import all_refused
from ..sampling import CacheSalt, Count, Limit, ModelName, Priority, Text, User, listed

MAX_DOCUMENTS = 2048  # of one request, as inputs of one request for embeddings

Query = Annotated[Text, Field(min_length=1)]
Texts = Annotated[list[Text], Field(min_length=1, max_length=MAX_DOCUMENTS, fail_fast=True)]


class Pair(NamedTuple):
    """A query and a document to score."""

    query: str
    document: str


class ScoringRequest(Wire):
    """The fields that both requests have."""

    model: ModelName = None
    instruction: Query | None = None
    """What makes a document relevant, part of the prompt; absent: the default of the model's chat template."""
    truncate_prompt_tokens: Limit | None = None
    """The length in tokens, with query and template, to which longer prompts are cut at the end of the document; -1:
    the context's. Absent: they are a 400."""
    priority: Priority = None
    cache_salt: CacheSalt = None

    user: User = None

    # vLLM's, SGLang's and Cohere's
    unsupported: ClassVar[dict[str, Refused]] = {
        "activation": refused(True, hint="scores are probabilities"),
        "add_special_tokens": refused(True, hint="the chat template writes all special tokens"),
        "chat_template": refused(hint="start the server with --chat-template"),
        "chat_template_kwargs": refused({}),
        "instruct": refused(hint="send instruction instead"),
        "max_chunks_per_doc": refused(1, hint="a document is scored as a whole"),
        "max_tokens_per_query": refused(0, hint="queries are not cut"),
        "mm_processor_kwargs": refused({}),
        "request_id": refused(hint="send the header X-Request-Id instead"),
        "softmax": refused(True, hint="scores are probabilities"),
        "truncation_side": refused("right", hint="documents are cut at their end"),
        "use_activation": refused(True, hint="scores are probabilities"),
    }

    @property
    def max_document(self) -> int | None:
        """The length in tokens to which longer documents are cut."""
        return None

    @property
    def cuts(self) -> bool:
        """Whether documents may be cut."""
        return self.truncate_prompt_tokens is not None or self.max_document is not None


class Document(Wire):
    """A document as an object."""

    text: Text
    """Scored; other fields are refused."""


AnyDocument = Annotated[
    Annotated[Text, Tag("text")] | Annotated[Document, Tag("object")],
    chosen_by(
        lambda value: "text" if isinstance(value, str) else "object" if isinstance(value, dict | Document) else None,
        "a string or an object",
    ),
]


class RerankRequest(ScoringRequest):
    """POST /v1/rerank."""

    model_config = examples(
        {"model": "qwen3-reranker", "query": "What is a whale?", "documents": ["A mammal.", "A ship."], "top_n": 1},
        {
            "model": "qwen3-reranker",
            "query": "What is a whale?",
            "documents": [{"text": "A mammal."}],
            "instruction": "Find the passage that answers the question of a child",
            "return_documents": False,
        },
    )

    query: Query
    """Part of each prompt."""
    documents: Annotated[list[AnyDocument], Field(min_length=1, max_length=MAX_DOCUMENTS, fail_fast=True)]
    """Texts or objects with a text; each is a prompt with the query."""
    top_n: Count | None = None
    """The number of results, the most relevant first; absent, or above the number of documents: all."""
    return_documents: bool | None = None
    """false: results have no `document`."""
    max_tokens_per_doc: Count | None = None
    """The length in tokens to which longer documents are cut."""

    unsupported: ClassVar[dict[str, Refused]] = {
        "rank_fields": refused(hint="send documents as texts"),
        "text_1": refused(hint="send query, or POST /v1/score"),
        "text_2": refused(hint="send documents, or POST /v1/score"),
    }

    @property
    def max_document(self) -> int | None:
        return self.max_tokens_per_doc

    @property
    def texts(self) -> list[str]:
        return [document if isinstance(document, str) else document.text for document in self.documents]

    @property
    def pairs(self) -> list[Pair]:
        return [Pair(self.query, text) for text in self.texts]


OneOrMore = Annotated[
    Annotated[Text, Tag("text")] | Annotated[Texts, Tag("texts")],
    chosen_by(
        lambda value: "text" if isinstance(value, str) else "texts" if isinstance(value, list) else None,
        "a string or an array",
    ),
]


class ScoreRequest(ScoringRequest):
    """POST /v1/score."""

    model_config = examples(
        {"model": "qwen3-reranker", "text_1": "What is a whale?", "text_2": ["A mammal.", "A ship."]},
        {"model": "qwen3-reranker", "text_1": ["What is a whale?", "Who is Ahab?"], "text_2": ["A mammal.", "A man."]},
    )

    text_1: OneOrMore
    """A query for all documents, or a list with one for each."""
    text_2: OneOrMore
    """A document or a list of them."""

    unsupported: ClassVar[dict[str, Refused]] = {
        "max_tokens_per_doc": refused(0, hint="send truncate_prompt_tokens instead"),
        "padding": refused("do_not_pad"),
        **all_refused("data_1 queries query", refused(hint="send text_1 instead")),
        **all_refused("data_2 documents items", refused(hint="send text_2 instead")),
    }

    @field_validator("text_2")
    @classmethod
    def _belong_together(cls, value: str | list[str], info: ValidationInfo) -> str | list[str]:
        queries = info.data.get("text_1")
        if isinstance(queries, list) and len(queries) > 1 and len(queries) != len(listed(value)):
            raise clash("must have as many texts as text_1, or text_1 must be one")
        return value

    @property
    def pairs(self) -> list[Pair]:
        queries, documents = listed(self.text_1), listed(self.text_2)
        if len(queries) == 1:
            queries *= len(documents)
        return [Pair(query, document) for query, document in zip(queries, documents, strict=True)]
