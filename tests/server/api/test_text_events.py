"""The event of a text is assembled from parts that are encoded once: it has the same bytes as one that is built."""

import pytest

from engine import TokenLogprob
from server.api.chat.request import ChatRequest
from server.api.chat.response import ChatWriter
from server.api.completions.request import CompletionRequest
from server.api.completions.response import CompletionWriter
from server.generation.output import Head, Output, Prompt, Writer, usage
from server.parsers.parts import Arguments, Call, Content, Reasoning

HEAD = Head("id-1", 1790000000, 'a model "\0" of \u2028 quotes', "fp_1")
TEXTS = [
    "the sea",
    " ",
    '"',
    "\\",
    "\0",
    "\n\r\t",
    "a\u2028b\u2029c\x85d",
    "日本語 🐳",
    "\ufffd",
    '"\\u0000"',
    "</script>",
]


def writer(kind, **fields):
    if kind is ChatWriter:
        request = ChatRequest.model_validate({"messages": [{"role": "user", "content": "a"}], "n": 3, **fields})
    else:
        request = CompletionRequest.model_validate({"prompt": "a", "n": 3, **fields})
    return kind(request, HEAD, [Prompt((1, 2))], lambda token: (str(token), b"1"))


def output(choice, text, **more):
    return Output(choice, text, (Content(text),) if text else (), (1,), (7,), offsets=(0,), **more)


@pytest.mark.parametrize("fields", [{}, {"stream": True, "stream_options": {"include_usage": True}}], ids=["", "usage"])
@pytest.mark.parametrize("kind", [ChatWriter, CompletionWriter])
def test_texts_of_all_choices(kind, fields):
    one = writer(kind, **fields)
    for text in [*TEXTS, ""]:
        for choice in (0, 2, 1):
            each = output(choice, text)
            assert one.events(each, None) == Writer.events(one, each, None)
    assert one.events(output(0, "the sea"), None).count(b"the sea") == 1


SCORED = TokenLogprob(-0.5, (7,), (-0.5,))
CASES = [
    (ChatWriter, {}, {"finish_reason": "stop"}),
    (CompletionWriter, {}, {"finish_reason": "stop"}),
    (ChatWriter, {"logprobs": True}, {"logprobs": (SCORED,)}),
    (CompletionWriter, {"logprobs": 0}, {"logprobs": (SCORED,)}),
    (ChatWriter, {"prompt_logprobs": 1}, {"prompt_logprobs": (SCORED,)}),
    (CompletionWriter, {"prompt_logprobs": 1}, {"prompt_logprobs": (SCORED,)}),
]


@pytest.mark.parametrize("kind, fields, more", CASES)
def test_a_text_with_more_to_report(kind, fields, more):
    one, each = writer(kind, **fields), output(0, "the sea", **more)
    assert one.events(each, None) == Writer.events(one, each, None)
    assert one.events(each, None) != writer(kind).events(output(0, "the sea"), None)


@pytest.mark.parametrize("kind", [ChatWriter, CompletionWriter])
def test_token_ids_and_usage_are_told(kind):
    each = output(0, "the sea")
    assert b'"token_ids":[7]' in writer(kind, return_token_ids=True).events(each, None)
    stream = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    assert b'"completion_tokens":5' in writer(kind, **stream).events(each, usage(2, 5, 0, 0))


def test_parts_of_other_kinds_keep_their_fields():
    parts = (Reasoning("hm"), Content("the"), Content(" sea"), Call(0, "c1", "clock"), Arguments(0, "{}"))
    each = Output(0, "", parts, (5,), (7,))
    one = writer(ChatWriter)
    assert one.events(each, None) == Writer.events(one, each, None)
    assert b'"reasoning_content":"hm"' in one.events(each, None)
    two = Output(0, "the sea", (Content("the"), Content(" sea")), (2,), (7,))
    assert one.events(two, None) == Writer.events(one, two, None)
    assert b'"content":"the sea"' in one.events(two, None)
