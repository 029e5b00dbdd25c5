"""What the fields of a request for embeddings do."""

import base64
import struct

import pytest
from openai.types import embedding_create_params as params

from tests.server.api.effects.endpoint import ask_out_of_turn
from tests.server.api.effects.tokens import served
from tests.server.wire import EMBEDDINGS

LONG = "The whale and the sea and the captain. " * 10


def vectors(e, **more):
    return [entry["embedding"] for entry in e.ask(**more)["data"]]


def vector(e, **more):
    [only] = vectors(e, **more)
    return only


def same(one, other):
    return one == pytest.approx(other, abs=1e-4)


def given(e):
    one, other = vectors(e, input=["The sea", "A block"])
    assert same(one, vector(e, input="The sea")) and same(other, vector(e, input="A block"))
    assert not same(one, other)
    ids, more = vectors(e, input=[[50, 60], [70]])
    assert same(ids, vector(e, input=[50, 60])) and same(more, vector(e, input=[70]))


def encoding_format(e):
    packed = base64.b64decode(vector(e, encoding_format="base64"))
    assert same(list(struct.unpack(f"<{len(packed) // 4}f", packed)), vector(e, encoding_format="float"))


def dimensions(e):
    few, all_ = vector(e, dimensions=5), vector(e)
    length = sum(x * x for x in all_[:5]) ** 0.5
    assert same(few, [x / length for x in all_[:5]])
    assert e.post(dimensions=len(all_) + 1).json()["error"]["param"] == "dimensions"


def pooling(e):
    assert same(vector(e, pooling="last"), vector(e))
    assert not same(vector(e, pooling="mean"), vector(e))
    assert same(vector(e, input=[50], pooling="mean"), vector(e, input=[50]))


def tokens(e, **more):
    return e.ask(**more)["usage"]["prompt_tokens"]


def add_special_tokens(e):
    assert tokens(e) == tokens(e, add_special_tokens=False) + 1


def truncate_prompt_tokens(e):
    assert same(vector(e, input=[50, 60, 70], truncate_prompt_tokens=2), vector(e, input=[60, 70]))
    too_long = {"input": [50] * 5000}
    assert e.post(**too_long).status_code == 400
    assert tokens(e, **too_long, truncate_prompt_tokens=-1) < 5000


def truncation_side(e):
    cut = {"input": [50, 60, 70], "truncate_prompt_tokens": 2}
    assert same(vector(e, **cut, truncation_side="right"), vector(e, input=[50, 60]))
    assert same(vector(e, **cut, truncation_side="left"), vector(e, input=[60, 70]))


def priority(e):
    ask_out_of_turn(e)


def cache_salt(e):
    def cached(**salt):
        return e.ask(input=LONG, **salt)["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached(cache_salt="salt of embeddings") == 0
    assert cached(cache_salt="salt of embeddings") > 0
    assert cached(cache_salt="salt of embeddings no more") == 0


EFFECTS = {
    EMBEDDINGS: {
        "model": served(),
        "input": given,
        "encoding_format": encoding_format,
        "dimensions": dimensions,
        "pooling": pooling,
        "add_special_tokens": add_special_tokens,
        "truncate_prompt_tokens": truncate_prompt_tokens,
        "truncation_side": truncation_side,
        "priority": priority,
        "cache_salt": cache_salt,
    }
}
# What no SDK knows: vLLM's protocol.py of pooling requests and older names of it, llama.cpp's server.
NAMES = """
    add_generation_prompt add_special_tokens cache_salt chat_template chat_template_kwargs continue_final_message
    embed_dtype endianness media_io_kwargs messages mm_processor_kwargs normalize padding priority request_id task
    truncate_prompt_tokens truncation_side use_activation

    content embd_normalize
"""
KNOWN = {EMBEDDINGS: {*NAMES.split()}}
SDK_TYPES = {EMBEDDINGS: [params.EmbeddingCreateParams]}
