"""Messages in Anthropic's form over a fake engine: the answer, whole and streamed, and the page."""

import random

import msgspec
import pytest
from msgspec.structs import replace

from server.api.anthropic.request import CountTokensRequest, MessagesRequest
from server.api.anthropic.response import Message, MessagesWriter
from server.generation.output import Head, Output, Prompt, usage
from server.parsers.parts import Arguments, Call, Content, Reasoning
from tests.fakes import INFO, FakeEngine
from tests.server.api.anthropic.wire import (
    ASKED,
    CALL,
    COUNT,
    LOOK,
    MESSAGES,
    THOUGHT,
    answer,
    as_text,
    events,
    put_together,
)
from tests.server.wire import ask, ids, run, saying

# Answers


async def test_an_answer_has_what_anthropic_has(folder):
    told = await answer(folder, "the whale")
    assert told.pop("id").startswith("msg_")
    assert told == {
        "type": "message",
        "role": "assistant",
        "model": "fake",
        "content": [{"type": "text", "text": "the whale"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": len(ids("user: the sea; assistant: ")),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": len(ids("the whale")) + 1,  # the token that ended it counts
            "output_tokens_details": {"thinking_tokens": 0},
            "service_tier": "standard",
        },
    }


async def test_a_stream_is_typed_events_without_a_last_line_of_openai(folder):
    response = await ask(folder, MESSAGES, {**ASKED, "stream": True}, FakeEngine(saying("the whale")))
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    seen = events(response.text)
    assert [event["type"] for event in seen] == [
        "message_start", "ping", "content_block_start", "content_block_delta", "content_block_delta",
        "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip
    assert seen[0]["message"]["content"] == []
    assert seen[0]["message"]["stop_reason"] is None
    assert seen[0]["message"]["usage"]["input_tokens"] == len(ids("user: the sea; assistant: "))
    assert seen[2] == {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    assert [event["delta"] for event in seen[3:5]] == [
        {"type": "text_delta", "text": "the"},
        {"type": "text_delta", "text": " whale"},
    ]
    assert seen[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}


@pytest.mark.parametrize("per_delta", [1, 3, 100])
@pytest.mark.parametrize(
    ("says", "more"),
    [
        ("the whale\u2028€5 äöü 🐳🐋 日本語", {}),
        (f"{THOUGHT}the whale", {}),
        (f"{THOUGHT}the whale", {"thinking": {"type": "adaptive", "display": "omitted"}}),
        (f"{THOUGHT}Let me look.\n{CALL}\n{CALL}", {"tools": [LOOK]}),
        (CALL, {"tools": [LOOK], "max_tokens": 24}),
        ("the ship, the sea; the whale", {"stop_sequences": ["whale", "the sea"]}),
        ("", {}),
        ("the ship", {"max_tokens": 0}),
    ],
    ids=["text", "thinking", "thinking omitted", "calls", "a call cut", "stop sequence", "nothing", "cache only"],
)
async def test_a_stream_put_together_is_the_whole_answer(folder, says, more, per_delta):
    whole = await answer(folder, says, **more)
    body = {**ASKED, **more, "stream": True}
    streamed = (await ask(folder, MESSAGES, body, FakeEngine(saying(says), per_delta=per_delta))).text
    assert "\u2028" not in streamed
    message = put_together(events(streamed))
    for told in (message, whole):
        told["content"] = [{**block, "id": ""} for block in told["content"]]  # ids are new each time
    assert {**message, "id": ""} == {**whole, "id": ""}


async def test_thinking_text_and_calls_are_blocks_in_their_order(folder):
    told = await answer(folder, f"{THOUGHT}Let me look.\n{CALL}\n{CALL}", tools=[LOOK])
    thinking, text, first, second = told["content"]
    assert thinking == {"type": "thinking", "thinking": "Whales are large.", "signature": ""}
    assert text["text"].strip() == "Let me look."
    assert first["id"] != second["id"]
    for call in (first, second):
        assert {**call, "id": 0} == {"type": "tool_use", "id": 0, "name": "look", "input": {"far": True}}
    assert told["stop_reason"] == "tool_use"
    assert 0 < told["usage"]["output_tokens_details"]["thinking_tokens"] < told["usage"]["output_tokens"]


async def test_thinking_can_be_left_out(folder):
    told = await answer(folder, f"{THOUGHT}Yes.", thinking={"type": "adaptive", "display": "omitted"})
    assert told["content"] == [
        {"type": "thinking", "thinking": "", "signature": ""},
        {"type": "text", "text": "Yes."},
    ]


async def test_a_call_that_was_cut_has_no_input_and_the_reason_says_why(folder):
    told = await answer(folder, CALL, tools=[LOOK], max_tokens=len(ids(CALL)) - len(ids("true}}\n</tool_call>")))
    assert told["stop_reason"] == "max_tokens"
    assert [(call["name"], call["input"]) for call in told["content"]] == [("look", {})]


def writer(**more):
    head = Head("msg_1", 0, "fake", "fp", "req-1")
    return MessagesWriter(MessagesRequest(**{**ASKED, **more}), head, [Prompt((1, 2, 3))], lambda _: ("", b""))


def as_json(message):
    return msgspec.json.decode(msgspec.json.encode(message))


PARTS = (
    Reasoning("It"), Reasoning(" is"), Reasoning(""), Content("The "), Content("sea"), Call(0, "call_0", "look"),
    Arguments(0, '{"far"'), Arguments(0, ": true}"), Call(1, "call_1", "look"), Content("."), Reasoning("Hm"),
    Call(2, "call_2", "look"), Arguments(2, '{"fa'),
)  # fmt: skip


@pytest.mark.parametrize("seed", range(20))
def test_events_do_not_depend_on_how_parts_came(seed):
    draw = random.Random(seed)
    told = usage(3, 9, 1, 2)
    whole = msgspec.to_builtins(writer().whole([Output(0, parts=PARTS, finish_reason="tool_calls")], told))
    msgspec.convert(whole, Message)
    assert [block["type"] for block in whole["content"]] == [
        "thinking", "text", "tool_use", "tool_use", "text", "thinking", "text",
    ]  # fmt: skip
    assert [block["input"] for block in whole["content"] if block["type"] == "tool_use"] == [{"far": True}, {}]
    streamed, left = writer(), list(PARTS)
    seen = streamed.opening(None)
    while left:
        count = draw.randint(0, 4)
        taken, left = left[:count], left[count:]
        seen += streamed.chunks(Output(0, parts=tuple(taken)), None)
    seen += streamed.chunks(Output(0, finish_reason="tool_calls"), None) + streamed.closing(told)
    assert put_together(msgspec.to_builtins(seen)) == whole


async def test_what_the_cache_found_is_counted_beside_the_input(folder):
    class Cached(FakeEngine):
        def _delta(self, *args):
            delta = super()._delta(*args)
            return delta if delta.stats is None else replace(delta, stats=replace(delta.stats, cached_tokens=5))

    size = len(ids("user: the sea; assistant: "))
    for stream in (False, True):
        response = await ask(folder, MESSAGES, {**ASKED, "stream": stream}, Cached(saying("the")))
        told = (put_together(events(response.text)) if stream else response.json())["usage"]
        assert (told["input_tokens"], told["cache_read_input_tokens"]) == (size - 5, 5)


@pytest.mark.parametrize(
    ("says", "more", "reason", "stop"),
    [
        ("the whale", {}, "end_turn", None),
        ("the ship, the sea", {"stop_sequences": ["sea", "ship"]}, "stop_sequence", "ship"),
        (
            '{"a": "the whale"}',
            {
                "stop_sequences": ["whale"],
                "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
            },
            "stop_sequence",
            "whale",
        ),
        ("the ship, the sea", {"max_tokens": 2}, "max_tokens", None),
        ("the ship, the sea", {"max_tokens": 0}, "max_tokens", None),
        (CALL, {"tools": [LOOK]}, "tool_use", None),
        ("the sea " * 300, {"max_tokens": 32000}, "model_context_window_exceeded", None),
    ],
)
async def test_why_an_answer_ended(folder, says, more, reason, stop):
    told = await answer(folder, says, **more)
    assert (told["stop_reason"], told["stop_sequence"]) == (reason, stop)


async def test_more_tokens_than_fit_mean_as_many_as_fit(folder):
    engine = FakeEngine(saying("a"))
    await ask(folder, MESSAGES, {**ASKED, "max_tokens": 32000}, engine)
    request = engine.requests[0]
    assert request.params.max_tokens == INFO.max_len - len(request.prompt_ids)


def both(*parts, finish_reason="tool_calls"):
    """The same answer whole, and as events put together."""
    told = usage(3, 9, 0, 0)
    whole = as_json(writer().whole([Output(0, parts=parts, finish_reason=finish_reason)], told))
    streamed = writer()
    seen = streamed.opening(None)
    for part in parts:
        seen += streamed.chunks(Output(0, parts=(part,)), None)
    seen += streamed.chunks(Output(0, finish_reason=finish_reason), None) + streamed.closing(told)
    return whole, put_together(msgspec.to_builtins(seen))


NO_OBJECTS = ["{", "{b:1}", "[1]", '"a"', "nothing", '{"a": NaN}', '{"a": 1e999}', "[" * 100_000, '{"a": 1} {"b": 2}']


@pytest.mark.parametrize("arguments", NO_OBJECTS, ids=range(len(NO_OBJECTS)))
def test_arguments_that_are_no_object_are_text_and_no_reason_to_run_a_tool(arguments):
    parts = (Call(0, "call_0", "look"), Arguments(0, arguments))
    whole = as_json(writer().whole([Output(0, parts=parts, finish_reason="tool_calls")], usage(3, 9, 0, 0)))
    assert whole["content"] == [as_text({"name": "look"}, arguments)]
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("end_turn", None)


async def test_a_malformed_call_reads_alike_in_the_stream_and_the_whole_answer(folder):
    says = '<tool_call>{"name": "look", "arguments": {far: 1}}</tool_call>'
    whole = await answer(folder, says, tools=[LOOK])
    assert whole["content"] == [as_text(LOOK, "{far: 1}")]
    assert whole["stop_reason"] == "end_turn"
    body = {**ASKED, "tools": [LOOK], "stream": True}
    seen = events((await ask(folder, MESSAGES, body, FakeEngine(saying(says)))).text)
    deltas = [event["delta"] for event in seen if event["type"] == "content_block_delta"]
    assert "".join(delta["partial_json"] for delta in deltas) == "{far: 1}"
    message = put_together(seen)
    assert (message["content"], message["stop_reason"]) == (whole["content"], "end_turn")


def test_a_good_call_beside_a_malformed_one_is_to_be_run():
    bad, good = (Call(0, "call_0", "look"), Arguments(0, "{b:1}")), (Call(1, "call_1", "look"), Arguments(1, "{}"))
    for parts in (bad + good, good + bad):
        whole, streamed = both(*parts)
        assert sorted(block["type"] for block in whole["content"]) == ["text", "tool_use"]
        assert whole["stop_reason"] == "tool_use"
        assert streamed == whole


def test_only_the_last_call_of_a_cut_answer_is_a_cut_call():
    parts = (Call(0, "call_0", "look"), Arguments(0, "{b:1}"), Call(1, "call_1", "look"), Arguments(1, '{"fa'))
    whole = as_json(writer().whole([Output(0, parts=parts, finish_reason="length")], usage(3, 300, 0, 0)))
    assert whole["content"] == [
        as_text(LOOK, "{b:1}"), {"type": "tool_use", "id": "call_1", "name": "look", "input": {}}
    ]  # fmt: skip
    assert whole["stop_reason"] == "max_tokens"


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        ("", {}),
        ('{"a": "\\ud83d"}', {"a": "\ufffd"}),
        ('{"\\udc33": ["\\ud83d\\udc33"]}', {"\ufffd": ["🐳"]}),
        ('{"a": "\\\\ud83d"}', {"a": "\\ud83d"}),
    ],
    ids=["nothing", "half", "half and whole", "no escape"],
)
def test_an_input_holds_no_halves_of_letters(arguments, value):
    whole, _ = both(Call(0, "call_0", "look"), Arguments(0, arguments))
    assert whole["content"] == [{"type": "tool_use", "id": "call_0", "name": "look", "input": value}]
    assert whole["stop_reason"] == "tool_use"


# The page


async def test_the_examples_of_the_api_page_work(folder):
    for path, model in ((MESSAGES, MessagesRequest), (COUNT, CountTokensRequest)):
        for example in model.model_config["json_schema_extra"]["examples"]:
            response = await ask(folder, path, {**example, "model": "fake"}, FakeEngine(saying("a")))
            assert response.status_code == 200, response.text


async def test_the_page_describes_answers_and_errors(folder):
    page = (await run(folder, lambda client: client.get("/openapi.json"))).json()
    operation = page["paths"][MESSAGES]["post"]
    assert set(operation["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
    assert {"400", "401", "404", "413", "503", "504"} <= operation["responses"].keys()
    example = put_together(events(operation["responses"]["200"]["content"]["text/event-stream"]["example"]))
    msgspec.convert(example, Message)
    assert (example["content"], example["stop_reason"]) == ([{"type": "text", "text": "Hello"}], "end_turn")
    schemas = page["components"]["schemas"]
    assert {"input_tokens"} == schemas["TokenCount"]["properties"].keys()
