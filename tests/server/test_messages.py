"""Messages in Anthropic's form over a fake engine: the answer, whole and streamed, the prompt, and errors."""

import asyncio
import json
import random

import anthropic
import msgspec
import pytest
from msgspec.structs import replace

from server.errors import ApiError
from server.parsers import Arguments, Call, Content, Reasoning
from server.protocol.common import Head, Output, Prompt, usage
from server.protocol.messages import CountTokensRequest, MessagesRequest
from server.protocol.messages_answer import MessagesAnswer, MessagesError, MessagesWriter
from tests.fakes import INFO, FakeEngine, listening, model_folder, serving, until
from tests.server import coding_agent
from tests.server.wire import LIBRARY, ask, ids, run, saying

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
QUESTION = [{"role": "user", "content": "the sea"}]
ASKED = {"model": "fake", "max_tokens": 300, "messages": QUESTION}
TEMPLATE = (
    "{{ 'quiet ' if enable_thinking is false }}{{ reasoning_effort }}{# <think> </think> #}"
    "{% for t in tools or [] %}<tool_call>{{ t.function.name }} {% endfor %}"
    "{% for m in messages %}{{ m.role }}{{ ' ' + m.name if m.name }}: "
    "{{ '(' + m.reasoning_content + ')' if m.reasoning_content }}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{{ c.id }}{% endfor %}; "
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
LOOK = {
    "name": "look",
    "description": "Looks.",
    "input_schema": {"type": "object", "properties": {"far": {"type": "boolean"}}, "required": ["far"]},
}
CALL = '<tool_call>\n{"name": "look", "arguments": {"far": true}}\n</tool_call>'
THOUGHT = "<think>\nWhales are large.\n</think>\n\n"
LARGE = replace(INFO, max_len=8192)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    config = {"eos_token": "<|end|>", "chat_template": TEMPLATE}
    return model_folder(tmp_path_factory.mktemp("model") / "fake", tokenizer_config=config)


def answer(folder, says, **body):
    response = ask(folder, MESSAGES, {**ASKED, **body}, FakeEngine(saying(says)))
    assert response.status_code == 200, response.text
    MessagesAnswer.model_validate(response.json())
    return response.json()


def prompt(folder, **body):
    """The prompt that a request becomes."""
    engine = FakeEngine(saying("a"), info=LARGE)
    response = ask(folder, MESSAGES, {**ASKED, **body}, engine)
    assert response.status_code == 200, response.text
    return LIBRARY.decode(list(engine.requests[0].prompt_ids), skip_special_tokens=False)


def refusal(folder, path=MESSAGES, *, engine=None, settings=None, **body):
    response = ask(folder, path, {**ASKED, **body}, engine, **(settings or {}))
    return response.status_code, response.json()["error"]


def events(text):
    """A stream's events; each says its type twice."""
    assert text.endswith("\n\n")
    seen = []
    for frame in text[:-2].split("\n\n"):
        head, data = frame.split("\n")
        seen.append(json.loads(data.removeprefix("data: ")))
        assert head == f"event: {seen[-1]['type']}"
    return seen


def as_text(block, arguments):
    """A call whose arguments are no JSON object, as the whole answer has it."""
    return {"type": "text", "text": f'{{"name": "{block["name"]}", "arguments": {arguments}}}'}


def put_together(seen):
    """The message that events make, as a client does it."""
    assert [event["type"] for event in seen[:2]] == ["message_start", "ping"]
    assert [event["type"] for event in seen[-2:]] == ["message_delta", "message_stop"]
    message, inputs, opened = seen[0]["message"], {}, None
    for event in seen[2:-2]:
        assert event["index"] == (len(message["content"]) if opened is None else opened)
        if event["type"] == "content_block_start":
            assert opened is None
            opened = event["index"]
            message["content"].append(event["content_block"])
        elif event["type"] == "content_block_stop":
            block = message["content"][opened]
            if block["type"] == "tool_use":
                try:
                    block["input"] = json.loads(inputs.get(opened) or "{}")
                except ValueError:
                    if seen[-2]["delta"]["stop_reason"] != "max_tokens":
                        message["content"][opened] = as_text(block, inputs[opened])
            opened = None
        elif event["delta"]["type"] == "input_json_delta":
            inputs[opened] = inputs.get(opened, "") + event["delta"]["partial_json"]
        else:
            name = event["delta"]["type"].removesuffix("_delta")
            message["content"][opened][name] += event["delta"][name]
    assert opened is None
    return message | seen[-2]["delta"] | {"usage": seen[-2]["usage"]}


# Answers


def test_an_answer_has_what_anthropic_has(folder):
    told = answer(folder, "the whale")
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


def test_a_stream_is_typed_events_without_a_last_line_of_openai(folder):
    response = ask(folder, MESSAGES, {**ASKED, "stream": True}, FakeEngine(saying("the whale")))
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
def test_a_stream_put_together_is_the_whole_answer(folder, says, more, per_delta):
    whole = answer(folder, says, **more)
    body = {**ASKED, **more, "stream": True}
    streamed = ask(folder, MESSAGES, body, FakeEngine(saying(says), per_delta=per_delta)).text
    assert "\u2028" not in streamed
    message = put_together(events(streamed))
    for told in (message, whole):
        told["content"] = [{**block, "id": ""} for block in told["content"]]  # ids are new each time
    assert {**message, "id": ""} == {**whole, "id": ""}


def test_thinking_text_and_calls_are_blocks_in_their_order(folder):
    told = answer(folder, f"{THOUGHT}Let me look.\n{CALL}\n{CALL}", tools=[LOOK])
    thinking, text, first, second = told["content"]
    assert thinking == {"type": "thinking", "thinking": "Whales are large.", "signature": ""}
    assert text["text"].strip() == "Let me look."
    assert first["id"] != second["id"]
    for call in (first, second):
        assert {**call, "id": 0} == {"type": "tool_use", "id": 0, "name": "look", "input": {"far": True}}
    assert told["stop_reason"] == "tool_use"
    assert 0 < told["usage"]["output_tokens_details"]["thinking_tokens"] < told["usage"]["output_tokens"]


def test_thinking_can_be_left_out(folder):
    told = answer(folder, f"{THOUGHT}Yes.", thinking={"type": "adaptive", "display": "omitted"})
    assert told["content"] == [
        {"type": "thinking", "thinking": "", "signature": ""},
        {"type": "text", "text": "Yes."},
    ]


def test_a_call_that_was_cut_has_no_input_and_the_reason_tells_why(folder):
    told = answer(folder, CALL, tools=[LOOK], max_tokens=len(ids(CALL)) - len(ids("true}}\n</tool_call>")))
    assert told["stop_reason"] == "max_tokens"
    assert [(call["name"], call["input"]) for call in told["content"]] == [("look", {})]


def writer(**more):
    head = Head("msg_1", 0, "fake", "fp", "req-1")
    return MessagesWriter(MessagesRequest(**{**ASKED, **more}), head, [Prompt((1, 2, 3))], lambda _: ("", b""))


PARTS = (
    Reasoning("It"), Reasoning(" is"), Reasoning(""), Content("The "), Content("sea"), Call(0, "call_0", "look"),
    Arguments(0, '{"far"'), Arguments(0, ": true}"), Call(1, "call_1", "look"), Content("."), Reasoning("Hm"),
    Call(2, "call_2", "look"), Arguments(2, '{"fa'),
)  # fmt: skip


@pytest.mark.parametrize("seed", range(20))
def test_events_do_not_depend_on_how_parts_came(seed):
    draw = random.Random(seed)
    told = usage(3, 9, 1, 2)
    whole = writer().whole([Output(0, parts=PARTS, finish_reason="tool_calls")], told)
    MessagesAnswer.model_validate(whole)
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
    assert put_together(seen) == whole


def test_what_the_cache_found_is_counted_beside_the_input(folder):
    class Cached(FakeEngine):
        def _delta(self, *args):
            delta = super()._delta(*args)
            return delta if delta.stats is None else replace(delta, stats=replace(delta.stats, cached_tokens=5))

    size = len(ids("user: the sea; assistant: "))
    for stream in (False, True):
        response = ask(folder, MESSAGES, {**ASKED, "stream": stream}, Cached(saying("the")))
        told = (put_together(events(response.text)) if stream else response.json())["usage"]
        assert (told["input_tokens"], told["cache_read_input_tokens"]) == (size - 5, 5)


@pytest.mark.parametrize(
    ("says", "more", "reason", "stop"),
    [
        ("the whale", {}, "end_turn", None),
        ("the ship, the sea", {"stop_sequences": ["sea", "ship"]}, "stop_sequence", "ship"),
        ("the ship, the sea", {"max_tokens": 2}, "max_tokens", None),
        ("the ship, the sea", {"max_tokens": 0}, "max_tokens", None),
        (CALL, {"tools": [LOOK]}, "tool_use", None),
        ("the sea " * 300, {"max_tokens": 32000}, "model_context_window_exceeded", None),
    ],
)
def test_why_an_answer_ended(folder, says, more, reason, stop):
    told = answer(folder, says, **more)
    assert (told["stop_reason"], told["stop_sequence"]) == (reason, stop)


def test_more_tokens_than_fit_mean_as_many_as_fit(folder):
    engine = FakeEngine(saying("a"))
    ask(folder, MESSAGES, {**ASKED, "max_tokens": 32000}, engine)
    request = engine.requests[0]
    assert request.params.max_tokens == INFO.max_len - len(request.prompt_ids)


def both(*parts, finish_reason="tool_calls"):
    """The same answer whole, and as events put together."""
    told = usage(3, 9, 0, 0)
    whole = writer().whole([Output(0, parts=parts, finish_reason=finish_reason)], told)
    msgspec.json.encode(whole)
    streamed = writer()
    seen = streamed.opening(None)
    for part in parts:
        seen += streamed.chunks(Output(0, parts=(part,)), None)
    seen += streamed.chunks(Output(0, finish_reason=finish_reason), None) + streamed.closing(told)
    return whole, put_together(seen)


NO_OBJECTS = ["{", "{b:1}", "[1]", '"a"', "nothing", '{"a": NaN}', '{"a": 1e999}', "[" * 100_000, '{"a": 1} {"b": 2}']


@pytest.mark.parametrize("arguments", NO_OBJECTS, ids=range(len(NO_OBJECTS)))
def test_arguments_that_are_no_object_are_text_and_no_reason_to_run_a_tool(arguments):
    parts = (Call(0, "call_0", "look"), Arguments(0, arguments))
    whole = writer().whole([Output(0, parts=parts, finish_reason="tool_calls")], usage(3, 9, 0, 0))
    assert whole["content"] == [as_text({"name": "look"}, arguments)]
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("end_turn", None)


def test_a_malformed_call_reads_alike_in_the_stream_and_the_whole_answer(folder):
    says = '<tool_call>{"name": "look", "arguments": {far: 1}}</tool_call>'
    whole = answer(folder, says, tools=[LOOK])
    assert whole["content"] == [as_text(LOOK, "{far: 1}")]
    assert whole["stop_reason"] == "end_turn"
    body = {**ASKED, "tools": [LOOK], "stream": True}
    seen = events(ask(folder, MESSAGES, body, FakeEngine(saying(says))).text)
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
    whole = writer().whole([Output(0, parts=parts, finish_reason="length")], usage(3, 300, 0, 0))
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


# Prompts


def test_the_conversation_reaches_the_template_as_turns(folder):
    conversation = [
        {"role": "user", "content": [{"type": "text", "text": "look"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "far?", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "I do", "citations": None},
                {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"far": True}},
                {"type": "tool_use", "id": "toolu_2", "name": "look", "input": {}, "caller": {"type": "direct"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "a ship"}]},
                {"type": "tool_result", "tool_use_id": "toolu_2", "content": "fog", "is_error": True},
                {"type": "text", "text": "and?"},
                {"type": "tool_result", "tool_use_id": "toolu_3"},
            ],
        },
        {"role": "user", "content": "well"},
    ]
    assert prompt(folder, system="brief", messages=conversation) == (
        'system: brief; user: look; assistant: (far?)I dolook{"far": true}toolu_1look{}toolu_2; tool look: a ship; '
        "tool look: Error: fog; user: and?; tool: ; user: well; assistant: "
    )


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ({}, "Error"),
        ({"content": ""}, "Error"),
        ({"content": []}, "Error"),
        ({"content": [{"type": "text", "text": ""}]}, "Error"),
        ({"content": "fog"}, "Error: fog"),
        ({"content": [{"type": "text", "text": "fog"}, {"type": "text", "text": "ice"}]}, "Error: fog\nice"),
    ],
)
def test_an_error_is_told_also_where_it_has_no_content(folder, content, told):
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "is_error": True, **content}
    assert prompt(folder, messages=[{"role": "user", "content": [result]}]) == f"tool: {told}; assistant: "


def test_neighbouring_messages_of_one_role_are_one_turn(folder):
    two = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    assert prompt(folder, messages=two) == "user: a\nb; assistant: "


def test_a_late_system_message_stays_where_it_is(folder):
    late = [*QUESTION, {"role": "system", "content": "9 left"}]
    told = prompt(folder, messages=late)
    assert told == "user: the sea\n<system-reminder>\n9 left\n</system-reminder>; assistant: "
    assert told.startswith(prompt(folder).removesuffix("; assistant: "))


def test_the_answer_goes_on_with_a_last_message_of_the_assistant(folder):
    begun = [*QUESTION, {"role": "assistant", "content": [{"type": "text", "text": "It is"}]}]
    assert prompt(folder, messages=begun) == "user: the sea; assistant: It is"


def test_an_accounting_header_is_no_part_of_the_prompt(folder):
    def told(cch):
        header = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2; cch={cch};"}
        return prompt(folder, system=[header, {"type": "text", "text": "brief"}])

    assert told("aa") == told("bb") == prompt(folder, system="brief")


def test_thinking_and_effort_are_told_to_the_template(folder):
    assert prompt(folder, thinking={"type": "disabled"}).startswith("quiet user")
    assert prompt(folder, thinking={"type": "adaptive"}).startswith("user")
    enabled = MessagesRequest.model_validate({**ASKED, "thinking": {"type": "enabled", "budget_tokens": 2000}})
    assert enabled.render_options["template_kwargs"] == {"enable_thinking": True}
    assert enabled.thinking_budget == ("thinking.budget_tokens", 2000)
    assert prompt(folder, output_config={"effort": "max"}).startswith("maxuser")


def test_tools_and_the_choice_among_them(folder):
    other = {**LOOK, "name": "listen"}
    asked = MessagesRequest.model_validate({**ASKED, "tools": [LOOK, other]})
    assert [tool.name for tool in asked.calling.tools] == ["look", "listen"]
    assert asked.calling.tools[1].field == "tools[1].input_schema"

    def calling(**choice):
        return MessagesRequest.model_validate({**ASKED, "tools": [LOOK, other], "tool_choice": choice}).calling

    assert (calling(type="auto").is_required, calling(type="any").is_required) == (False, True)
    assert not calling(type="any", disable_parallel_tool_use=True).is_parallel
    named = calling(type="tool", name="listen")
    assert [tool.name for tool in named.tools] == ["listen"]
    assert [tool.name for tool in named.in_prompt] == ["look", "listen"]
    assert named.is_required
    assert calling(type="none") is None
    assert prompt(folder, tools=[LOOK, other]).startswith("<tool_call>look <tool_call>listen user")
    assert prompt(folder, tools=[LOOK], tool_choice={"type": "none"}) == prompt(folder)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"system": "brief", "tools": [LOOK]},
        {"thinking": {"type": "disabled"}, "output_config": {"effort": "low"}},
        {"messages": [*QUESTION, {"role": "assistant", "content": "It"}]},
    ],
)
def test_counted_tokens_are_those_of_the_answers_usage(folder, more):
    body = {key: value for key, value in {**ASKED, **more}.items() if key != "max_tokens"}
    counted = ask(folder, COUNT, body).json()
    assert counted == {"input_tokens": answer(folder, "a", **more)["usage"]["input_tokens"]}


def test_what_does_not_fit_can_be_counted(folder):
    long = [{"role": "user", "content": "sea " * 600}]
    assert ask(folder, COUNT, {"messages": long}).json()["input_tokens"] > INFO.max_len


# Errors


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"n": 2}, "n"),
        ({"stop": ["a"]}, "stop"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages.0.content.0.type"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages.0.content.0.type"),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image"}]}],
                    }
                ]
            },
            "messages.0.content.0.content.0.type",
        ),
        (
            {"messages": [*QUESTION, {"role": "assistant", "content": [{"type": "server_tool_use"}]}]},
            "messages.1.content.0.type",
        ),
        (
            {
                "messages": [
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "look", "input": {}}]}
                ]
            },
            "messages",
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type"),
        ({"tools": [{"name": "look"}]}, "tools.0.input_schema"),
        ({"tools": [{**LOOK, "defer_loading": True}]}, "tools.0.defer_loading"),
        ({"tools": [{**LOOK, "name": "a b"}]}, "tools.0.name"),
        ({"tools": [LOOK, LOOK]}, "tools"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [LOOK], "tool_choice": {"type": "tool", "name": "listen"}}, "tool_choice"),
        ({"tools": [LOOK], "tool_choice": {"type": "required"}}, "tool_choice.type"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        # The marks of this model's reasoning are not tokens: nothing can end it in time.
        ({"thinking": {"type": "enabled", "budget_tokens": 2}}, "thinking.budget_tokens"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "output_config.format.schema"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
        ({"container": "c"}, "container"),
        ({"mcp_servers": [{"name": "m"}]}, "mcp_servers"),
        ({"colour": "blue"}, "colour"),
        ({"system": [{"type": "image"}]}, "system.0.type"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_wrong_is_named(folder, change, param):
    status, error = refusal(folder, **change)
    assert status == 400
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert param in error["message"]


def test_a_thread_is_refused_in_the_words_by_which_the_sdks_tool_runner_goes_on_without(folder):
    status, error = refusal(folder, thread={"type": "create"})
    assert (status, error["param"]) == (400, "thread")
    assert error["details"]["error_code"] == "thread_unsupported_request"


def test_a_format_and_a_stop_sequence_exclude_each_other(folder):
    output = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    _, error = refusal(folder, output_config=output, stop_sequences=["a"])
    assert error["param"] == "stop_sequences"


def test_a_prompt_that_does_not_fit_is_told_in_the_words_that_agents_look_for(folder):
    status, error = refusal(folder, messages=[{"role": "user", "content": "sea " * 600}])
    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", "messages")
    assert error["message"].startswith("prompt is too long")
    assert str(INFO.max_len) in error["message"]


def test_every_error_on_these_paths_has_anthropics_envelope(folder):
    seen = []

    async def main():
        engine = FakeEngine(is_loaded=False)
        async with serving(folder, engine, wait=False, api_key=["k"], max_body_bytes=2000) as (client, app):

            async def post(path=MESSAGES, key="k", **more):
                headers = {"x-api-key": key, **more.pop("headers", {})}
                response = await client.post(path, **{"json": ASKED, **more}, headers=headers)
                seen.append((response.status_code, response))

            await post()  # loading
            engine.finish_loading()
            await app.state.pequod.ready()
            await post(key="other")
            await post(COUNT, key="other")
            await post(json={**ASKED, "model": "gpt"})
            await post(COUNT, json={"messages": QUESTION, "model": "gpt"})
            await post("/v1/messages/batches")
            await post(content=b"{", headers={"content-type": "application/json"}, json=None)
            await post(content=b"a" * 3000, json=None)
            await post(headers={"host": "evil.example"})
            await post(headers={"x-deadline-ms": "never"})
            seen.append((405, await client.get(MESSAGES, headers={"x-api-key": "k"})))
            engine.hold()
            await post(headers={"x-deadline-ms": "50"})
            app.state.pequod.begin_drain()
            await post()

    asyncio.run(main())
    kinds = []
    for status, response in seen:
        assert response.status_code == status
        MessagesError.model_validate(response.json())
        assert response.json()["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]
        kinds.append((status, response.json()["error"]["type"]))
    assert kinds == [
        (503, "overloaded_error"), (401, "authentication_error"), (401, "authentication_error"),
        (404, "not_found_error"), (404, "not_found_error"), (404, "not_found_error"), (400, "invalid_request_error"),
        (413, "request_too_large"), (400, "invalid_request_error"), (400, "invalid_request_error"),
        (405, "invalid_request_error"), (504, "timeout_error"), (503, "overloaded_error"),
    ]  # fmt: skip


def test_other_paths_keep_openais_envelope(folder):
    for path in ("/v1/messagesX", "/v1/chat/completions"):
        body = ask(folder, path, {"messages": QUESTION, "model": "gpt"}).json()
        assert set(body) == {"error"}


@pytest.mark.parametrize(
    ("status", "kind"), [(403, "permission_error"), (429, "rate_limit_error"), (500, "api_error"), (502, "api_error")]
)
def test_statuses_have_their_types(status, kind):
    assert json.loads(ApiError(status, "No.").anthropic("req-1"))["error"]["type"] == kind


def test_an_error_after_the_first_byte_is_an_event_of_its_own(folder):
    engine = FakeEngine(saying("the whale"))
    engine.error_at = (2, "out of memory")
    response = ask(folder, MESSAGES, {**ASKED, "stream": True}, engine)
    assert response.status_code == 200
    *_, last = events(response.text)
    assert last["type"] == "error"
    MessagesError.model_validate(last)
    assert last["error"]["type"] == "api_error"
    assert last["request_id"] == response.headers["request-id"]
    assert "[DONE]" not in response.text


# Agents and the SDK


def test_what_a_coding_agent_sends_is_answered(folder):
    engine = FakeEngine(
        saying(f'{THOUGHT}<tool_call>\n{{"name": "Bash", "arguments": {{"command": "ls"}}}}\n</tool_call>')
    )
    engine._info = LARGE
    engine.finish_loading()

    async def use(client):
        first = await client.post(coding_agent.PATH, json=coding_agent.REQUEST, headers=coding_agent.HEADERS)
        assert first.status_code == 200, first.text
        message = put_together(events(first.text))
        call = message["content"][-1]
        assert (call["name"], call["input"], message["stop_reason"]) == ("Bash", {"command": "ls"}, "tool_use")
        result, late = coding_agent.NEXT
        result = {**result, "content": [{**result["content"][0], "tool_use_id": call["id"]}]}
        said = {"role": "assistant", "content": message["content"]}
        body = {**coding_agent.REQUEST, "messages": [*coding_agent.REQUEST["messages"], said, result, late]}
        second = await client.post(coding_agent.PATH, json=body, headers=coding_agent.HEADERS)
        assert second.status_code == 200, second.text
        counted = {key: body[key] for key in ("model", "messages", "system", "tools", "thinking")}
        count = await client.post(f"{COUNT}?beta=true", json=counted, headers=coding_agent.HEADERS)
        assert count.status_code == 200, count.text

    run(folder, use, engine)
    first, second = (LIBRARY.decode(list(request.prompt_ids)) for request in engine.requests)
    assert second.startswith(first.removesuffix("assistant: ")), "the prefix is found again"
    assert "x-anthropic" not in first
    assert "tool Bash: 41" in second


def sdk(folder, use, engine, **settings):
    """Let `use(client)` talk to the server through the SDK."""

    async def main():
        async with serving(folder, engine, **settings) as (_, app), listening(app) as url:
            async with anthropic.AsyncAnthropic(base_url=url, api_key="k", max_retries=0) as client:
                return await use(client)

    return asyncio.run(main())


def test_the_sdk_reads_whole_answers_streams_and_counts(folder):
    async def use(client):
        whole = await client.messages.create(**ASKED)
        assert whole.content[0].text == "the whale"
        assert whole.stop_reason == "end_turn"
        assert whole._request_id.startswith("req-")
        raw = [event.type async for event in await client.messages.create(**ASKED, stream=True)]
        assert raw[0] == "message_start" and raw[-1] == "message_stop"
        async with client.messages.stream(**ASKED) as stream:
            text = "".join([piece async for piece in stream.text_stream])
            final = await stream.get_final_message()
        assert text == final.content[0].text == "the whale"
        assert final.usage.output_tokens == whole.usage.output_tokens
        count = await client.messages.count_tokens(model="fake", messages=QUESTION)
        assert count.input_tokens == whole.usage.input_tokens
        beta = await client.beta.messages.create(**ASKED, betas=["interleaved-thinking-2025-05-14"])
        assert beta.content[0].text == "the whale"

    sdk(folder, use, FakeEngine(saying("the whale")))


def test_the_sdk_without_asyncio_does_too(folder):
    def work(url):
        with anthropic.Anthropic(base_url=url, auth_token="k", api_key=None, max_retries=0) as client:
            assert client.messages.create(**ASKED).content[0].text == "the whale"
            with client.messages.stream(**ASKED) as stream:
                assert stream.get_final_text() == "the whale"

    async def main():
        async with serving(folder, FakeEngine(saying("the whale")), api_key=["k"]) as (_, app), listening(app) as url:
            await asyncio.to_thread(work, url)

    asyncio.run(main())


@pytest.mark.parametrize("is_streamed", [False, True])
def test_the_sdk_runs_tools_until_the_final_answer(folder, is_streamed):
    engine = FakeEngine(saying(f"{THOUGHT}Let me look.\n{CALL}", "a whale"))

    async def use(client):
        messages, steps = [*QUESTION], 0
        while True:
            asked = {**ASKED, "messages": messages, "tools": [LOOK]}
            if is_streamed:
                async with client.messages.stream(**asked) as stream:
                    told = await stream.get_final_message()
            else:
                told = await client.messages.create(**asked)
            messages.append({"role": "assistant", "content": told.content})
            if told.stop_reason != "tool_use":
                return steps, told.content[-1].text
            calls = [block for block in told.content if block.type == "tool_use"]
            assert [call.input for call in calls] == [{"far": True}]
            steps += 1
            results = [{"type": "tool_result", "tool_use_id": call.id, "content": "a ship"} for call in calls]
            messages.append({"role": "user", "content": results})

    assert sdk(folder, use, engine) == (1, "a whale")
    assert "tool look: a ship" in LIBRARY.decode(list(engine.requests[1].prompt_ids))


def test_errors_become_the_exceptions_of_the_sdk(folder):
    engine = FakeEngine(saying("the whale"))

    async def use(client):
        with pytest.raises(anthropic.BadRequestError) as bad:
            await client.messages.create(**ASKED, extra_body={"colour": "blue"})
        assert bad.value.type == "invalid_request_error"
        assert bad.value.body["error"]["param"] == "colour"
        assert bad.value.request_id.startswith("req-")
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.create(**{**ASKED, "model": "gpt"})
        with pytest.raises(anthropic.AuthenticationError):
            await client.with_options(api_key="other").messages.create(**ASKED)
        with pytest.raises(anthropic.APIStatusError) as late:
            engine.hold()
            await client.messages.create(**ASKED, extra_headers={"x-deadline-ms": "50"})
        assert (late.value.status_code, late.value.type) == (504, "timeout_error")
        engine.let_go()
        engine.error_at = (2, "out of memory")
        with pytest.raises(anthropic.APIStatusError) as cut:
            async with client.messages.stream(**ASKED) as stream:
                await stream.get_final_message()
        assert cut.value.type == "api_error"

    sdk(folder, use, engine, api_key=["k"])


def test_a_stream_that_is_left_ends_its_work(folder):
    engine = FakeEngine(saying("the sea " * 50), delay=0.01)

    async def use(client):
        async with client.messages.stream(**ASKED) as stream:
            async for _ in stream.text_stream:
                break
        await until(lambda: not engine.open)

    sdk(folder, use, engine)
    assert engine.aborted


# The page


def test_the_examples_of_the_api_page_work(folder):
    for path, model in ((MESSAGES, MessagesRequest), (COUNT, CountTokensRequest)):
        for example in model.model_config["json_schema_extra"]["examples"]:
            response = ask(folder, path, {**example, "model": "fake"}, FakeEngine(saying("a")))
            assert response.status_code == 200, response.text


def test_the_page_describes_answers_and_errors(folder):
    page = run(folder, lambda client: client.get("/openapi.json")).json()
    operation = page["paths"][MESSAGES]["post"]
    assert set(operation["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
    assert {"400", "401", "404", "413", "503", "504"} <= operation["responses"].keys()
    example = put_together(events(operation["responses"]["200"]["content"]["text/event-stream"]["example"]))
    MessagesAnswer.model_validate(example)
    assert (example["content"], example["stop_reason"]) == ([{"type": "text", "text": "Hello"}], "end_turn")
    schemas = page["components"]["schemas"]
    assert {"input_tokens"} == schemas["TokenCount"]["properties"].keys()
