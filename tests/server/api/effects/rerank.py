"""What the fields of requests for rerank and score do; the chat template is `JUDGING` of test_capabilities.py."""

import pytest

from tests.server.api.effects.endpoint import Endpoint, ask_out_of_turn
from tests.server.api.effects.tokens import served
from tests.server.wire import RERANK, SCORE

LONG = "The whale and the sea and the captain. " * 10


class Scoring(Endpoint):
    """Reads responses without what differs from one to the next of the same request."""

    def ask(self, **more):
        answer = super().ask(**more)
        for name in ("id", "created"):
            answer.pop(name, None)
        return answer

    def texts(self, *documents):
        """The field that has these documents."""
        return {"documents" if self.path == RERANK else "text_2": [*documents]}

    def scores(self, **more):
        """The scores, in the order of the documents."""
        answer = self.ask(**more)
        if self.path == SCORE:
            return [entry["score"] for entry in answer["data"]]
        found = {result["index"]: result["relevance_score"] for result in answer["results"]}
        return [found[index] for index in range(len(found))]

    def tokens(self, **more):
        return self.ask(**more)["usage"]["prompt_tokens"]


def same(one, other):
    return one == pytest.approx(other, abs=1e-5)


def query(e):
    one, other = e.scores(query="The sea"), e.scores(query="A block of text")
    assert not same(one, other)


def documents(e):
    one, other = e.scores(documents=["The sea", {"text": "A block"}])
    assert not same(one, other)
    assert same([one, other], e.scores(documents=["The sea"]) + e.scores(documents=["A block"]))


def text(e):
    assert same(e.scores(documents=[{"text": "The sea"}]), e.scores(documents=["The sea"]))


def top_n(e):
    whole = e.ask(documents=["The sea", "A block", "A ship"])["results"]
    assert len(whole) == 3
    assert e.ask(documents=["The sea", "A block", "A ship"], top_n=2)["results"] == whole[:2]


def return_documents(e):
    for value, has in ((None, True), (True, True), (False, False)):
        assert ("document" in e.ask(return_documents=value)["results"][0]) == has


def max_tokens_per_doc(e):
    short, fewer = (e.tokens(documents=[LONG], max_tokens_per_doc=most) for most in (8, 5))
    assert short - fewer == 3 and e.tokens(documents=[LONG]) > short


def text_1(e):
    assert not same(e.scores(text_1="The sea"), e.scores(text_1="A block of text"))
    pairs = {"text_1": ["The sea", "A block of text"], "text_2": ["A ship", "A ship"]}
    assert same(e.scores(**pairs), [e.scores(text_1=one, text_2="A ship")[0] for one in pairs["text_1"]])


def text_2(e):
    one, other = e.scores(text_2=["The sea", "A block"])
    assert same([one, other], e.scores(text_2="The sea") + e.scores(text_2="A block"))
    assert not same(one, other)


def instruction(e):
    assert not same(e.scores(instruction="Find the whale"), e.scores())


def truncate_prompt_tokens(e):
    assert e.tokens(**e.texts(LONG), truncate_prompt_tokens=40) == 40
    too_long = e.texts(LONG * 40)
    assert e.post(**too_long).status_code == 400
    assert e.tokens(**too_long, truncate_prompt_tokens=-1) < 5000


def priority(e):
    ask_out_of_turn(e)


def cache_salt(e):
    def cached(salt):
        usage = e.ask(**e.texts(LONG), cache_salt=f"{salt} of {e.path}")["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    assert [cached("salt"), cached("salt") > 0, cached("pepper")] == [0, True, 0]


COMMON = {
    "model": served(),
    "instruction": instruction,
    "truncate_prompt_tokens": truncate_prompt_tokens,
    "priority": priority,
    "cache_salt": cache_salt,
}
EFFECTS = {
    RERANK: {
        **COMMON,
        "query": query,
        "documents": documents,
        "documents[].text": text,
        "top_n": top_n,
        "return_documents": return_documents,
        "max_tokens_per_doc": max_tokens_per_doc,
    },
    SCORE: {**COMMON, "text_1": text_1, "text_2": text_2},
}
ENDPOINTS = {RERANK: Scoring, SCORE: Scoring}
# vLLM's protocol of scoring requests with its older names, Cohere's and Jina's rerank, SGLang's.
NAMES = "model user truncate_prompt_tokens priority cache_salt mm_processor_kwargs activation softmax use_activation"
KNOWN = {
    RERANK: {*NAMES.split(), "query", "documents", "top_n", "return_documents", "max_tokens_per_doc", "instruct",
             "max_chunks_per_doc", "max_tokens_per_query", "rank_fields", "truncation_side", "chat_template",
             "chat_template_kwargs"},
    SCORE: {*NAMES.split(), "text_1", "text_2", "data_1", "data_2", "queries", "documents", "items",
            "max_tokens_per_doc", "max_tokens_per_query", "padding"},
}  # fmt: skip
