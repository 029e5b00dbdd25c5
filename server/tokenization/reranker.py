"""Rerankers: language models whose chat template asks whether a document is relevant to a query, yes or no.

Such a template writes the messages of the roles query and document, and as instruction that of the role system. The
score is the probability of yes where the answer is yes or no.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from engine import ModelError

from .renderer import Message, TemplateError
from .tokenizer import Tokenizer

YES, NO = "yes", "no"
MARK = "\ue000"  # a document that shows where documents are in a prompt: a character that no text has
UNCUTTABLE = "The model's chat template does not keep documents as they are, so they cannot be cut."

# Qwen3-Reranker's prompt, as its model card describes it. Its first releases have the chat template of Qwen3 instead.
QWEN3_NAME = "qwen3-reranker"
QWEN3_TEMPLATE = """\
{%- set instruct = messages | selectattr("role", "eq", "system") | map(attribute="content") | first
    | default("Given a web search query, retrieve relevant passages that answer the query") -%}
<|im_start|>system
Judge whether the Document meets the requirements based on the Query and the Instruct provided. \
Note that the answer can only be "yes" or "no".<|im_end|>
<|im_start|>user
<Instruct>: {{ instruct }}
<Query>: {{ messages | selectattr("role", "eq", "query") | map(attribute="content") | first }}
<Document>: {{ messages | selectattr("role", "eq", "document") | map(attribute="content") | first }}<|im_end|>
<|im_start|>assistant
<think>

</think>

{{ "" }}"""


NO_CHAT = "This model is a reranker, whose chat template is not for conversations: use /v1/rerank or /v1/score."


class Reranker(NamedTuple):
    """How a model scores documents."""

    answer_ids: tuple[int, int]  # the tokens whose logits are compared: yes, no
    chats: bool  # the chat template is also for conversations


def selects(template: str, role: str) -> bool:
    """Whether a chat template compares the role of messages with this one."""
    return re.search(rf"""role\W+(\w+\W+)?{role}["']""", template) is not None


def asks_for_relevance(template: str) -> bool:
    """Whether a chat template selects a query and a document and names both answers."""
    names_answers = all(re.search(rf"\b{answer}\b", template) for answer in (YES, NO))
    return names_answers and selects(template, "query") and selects(template, "document")


def own_template(model: str, template: str) -> str | None:
    """Return the template that a model of this name needs in the place of its own; None: its own will do."""
    return QWEN3_TEMPLATE if QWEN3_NAME in model.lower() and not asks_for_relevance(template) else None


def find(template: str, tokenizer: Tokenizer) -> Reranker | None:
    """Return what scores need if the chat template is a reranker's. Raises ModelError if an answer is no token."""
    if not asks_for_relevance(template):
        return None
    answers = [tokenizer.encode(answer, False) for answer in (YES, NO)]
    if any(len(ids) != 1 for ids in answers):
        raise ModelError(
            f"The chat template is a reranker's, but {YES!r} and {NO!r} are not one token each in the model's "
            "tokenizer, so there are no scores."
        )
    return Reranker((answers[0][0], answers[1][0]), chats=selects(template, "user"))


def conversation(query: str, document: str, instruction: str | None) -> list[Message]:
    """Return the messages from which a reranker's template makes its prompt."""
    messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
    return messages if instruction is None else [{"role": "system", "content": instruction}, *messages]


def around(prompt: str) -> tuple[str, str]:
    """Return the parts of a prompt before and after the document MARK; raises TemplateError."""
    before, found, after = prompt.rpartition(MARK)
    if not found or not after:
        raise TemplateError(UNCUTTABLE)
    return before, after
