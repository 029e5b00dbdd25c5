"""Messages in Anthropic's form: the prompt that a conversation becomes, and the count of its tokens."""

import json

import pytest
from msgspec.structs import replace

from server.api.anthropic.content import Definitions, turns
from server.api.anthropic.request import CountTokensRequest, MessagesRequest
from tests.fakes import INFO, FakeEngine
from tests.server.api.anthropic.wire import ASKED, CALL, COUNT, FOUND, LARGE, LOOK, MESSAGES, QUESTION, answer, prompt
from tests.server.wire import ask, saying


async def test_the_conversation_reaches_the_template_as_turns(folder):
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
    assert await prompt(folder, system="brief", messages=conversation) == (
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
async def test_an_error_without_content_is_reported_too(folder, content, told):
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "is_error": True, **content}
    assert await prompt(folder, messages=[{"role": "user", "content": [result]}]) == f"tool: {told}; assistant: "


async def test_neighbouring_messages_of_one_role_are_one_turn(folder):
    two = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    assert await prompt(folder, messages=two) == "user: a\nb; assistant: "


async def test_a_late_system_message_stays_where_it_is(folder):
    late = [*QUESTION, {"role": "system", "content": "9 left"}]
    told = await prompt(folder, messages=late)
    assert told == "user: the sea\n<system-reminder>\n9 left\n</system-reminder>; assistant: "
    assert told.startswith((await prompt(folder)).removesuffix("; assistant: "))


async def test_the_answer_goes_on_with_a_last_message_of_the_assistant(folder):
    begun = [*QUESTION, {"role": "assistant", "content": [{"type": "text", "text": "It is"}]}]
    assert await prompt(folder, messages=begun) == "user: the sea; assistant: It is"


async def test_an_accounting_header_is_no_part_of_the_prompt(folder):
    async def told(cch):
        header = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2; cch={cch};"}
        return await prompt(folder, system=[header, {"type": "text", "text": "brief"}])

    assert await told("aa") == await told("bb") == await prompt(folder, system="brief")


async def test_thinking_and_effort_reach_the_template(folder):
    assert (await prompt(folder)).startswith("user"), "without a word about thinking there is none, as Anthropic has it"
    assert (await prompt(folder, thinking={"type": "disabled"})).startswith("user")
    assert (await prompt(folder, thinking={"type": "adaptive"})).startswith("pensive user")
    enabled = MessagesRequest.model_validate({**ASKED, "thinking": {"type": "enabled", "budget_tokens": 2000}})
    assert enabled.render_options["template_kwargs"] == {"enable_thinking": True, "thinking": True}
    assert enabled.thinking_budget == ("thinking.budget_tokens", 2000)
    assert (await prompt(folder, output_config={"effort": "max"})).startswith("maxuser")


async def test_tools_and_the_choice_among_them(folder):
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
    assert (await prompt(folder, tools=[LOOK, other])).startswith("<tool_call>look <tool_call>listen user")
    assert await prompt(folder, tools=[LOOK], tool_choice={"type": "none"}) == await prompt(folder)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"system": "brief", "tools": [LOOK]},
        {"thinking": {"type": "disabled"}, "output_config": {"effort": "low"}},
        {"messages": [*QUESTION, {"role": "assistant", "content": "It"}]},
    ],
)
async def test_counted_tokens_are_those_of_the_answers_usage(folder, more):
    body = {key: value for key, value in {**ASKED, **more}.items() if key != "max_tokens"}
    counted = (await ask(folder, COUNT, body)).json()
    assert counted == {"input_tokens": (await answer(folder, "a", **more))["usage"]["input_tokens"]}


async def test_what_does_not_fit_can_be_counted(folder):
    long = [{"role": "user", "content": "sea " * 600}]
    assert (await ask(folder, COUNT, {"messages": long})).json()["input_tokens"] > INFO.max_len


SEARCH = {**LOOK, "name": "search"}
LATER = {**LOOK, "defer_loading": True}


async def test_a_deferred_tool_is_in_the_prompt_where_a_search_found_it(folder):
    plain = await prompt(folder, tools=[SEARCH])
    assert await prompt(folder, tools=[SEARCH, LATER]) == plain == "<tool_call>search user: the sea; assistant: "
    found = await prompt(folder, tools=[SEARCH, LATER], messages=FOUND)
    assert found.startswith(plain.removesuffix("assistant: ")), "what was in the cache stays there"
    definition = json.dumps({"type": "function", "function": {
        "name": "look", "description": "Looks.", "parameters": LOOK["input_schema"]
    }})  # fmt: skip
    assert found.endswith(f"tool search: One tool:\n{definition}; assistant: ")
    for choice in ("auto", "any"):  # a client answers a call of a tool that was not loaded; nothing forces one
        asked = {"messages": FOUND, "tools": [SEARCH, LATER], "tool_choice": {"type": choice}}
        assert (await answer(folder, CALL, **asked))["content"][-1]["name"] == "look"


@pytest.mark.parametrize("path", [MESSAGES, COUNT])
async def test_references_to_a_long_definition_are_bounded(folder, path):
    long = {**LOOK, "description": "y" * 100_000}
    found = {"type": "tool_reference", "tool_name": "look"}

    def asking(count):
        result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [found] * count}
        body = {"tools": [long], "messages": [{"role": "user", "content": [result]}]}
        return body if path == COUNT else {**body, "max_tokens": 4}

    response = await ask(folder, path, asking(80))
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "messages")
    assert error["message"].startswith("prompt is too long: ")
    assert "tool_reference" in error["message"]


async def test_references_are_bounded_by_the_context(folder):
    """Before the template renders them."""
    long, found = {**LOOK, "description": "y" * 1000}, {"type": "tool_reference", "tool_name": "look"}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [found] * 400}
    asked = {"tools": [long], "messages": [{"role": "user", "content": [result]}], "max_tokens": 4}
    for max_len, message in ((2048, "tool_reference, have more than the"), (1 << 20, "")):
        engine = FakeEngine(saying("a"), info=replace(INFO, max_len=max_len))
        response = await ask(folder, MESSAGES, asked, engine)
        assert response.status_code == (400 if message else 200), response.text
        assert message in response.text


def test_a_definition_is_written_once_for_all_its_references():
    long, found = {"name": "look", "description": "y" * 1000}, {"type": "tool_reference", "tool_name": "look"}
    results = [
        {"type": "tool_result", "tool_use_id": f"toolu_{number}", "content": [found] * 3, "is_error": number == 2}
        for number in range(3)
    ]
    asked = CountTokensRequest.model_validate({"messages": [{"role": "user", "content": results}], "tools": [LOOK]})
    made = [
        part["text"] for turn in turns(None, asked.messages, Definitions({"look": long})) for part in turn["content"]
    ]
    assert made == [json.dumps(long)] * 6 + [f"Error: {json.dumps(long)}"] + [json.dumps(long)] * 2
    assert len({id(text) for text in made}) == 2


async def test_a_call_of_a_tool_that_was_not_loaded_reaches_the_client(folder):
    assert (await answer(folder, CALL, tools=[SEARCH, LATER]))["content"][-1]["name"] == "look"
    named = {"type": "tool", "name": "look"}
    assert (await answer(folder, CALL, tools=[SEARCH, LATER], tool_choice=named))["content"][-1]["name"] == "look"


async def test_no_call_of_a_tool_that_was_not_loaded_is_forced(folder):
    texts = []
    for messages in (QUESTION, FOUND):
        engine = FakeEngine(saying(CALL), info=LARGE)
        asked = {"tools": [SEARCH, LATER], "tool_choice": {"type": "any"}, "messages": messages}
        await ask(folder, "/v1/messages", {**ASKED, **asked}, engine)
        texts.append(engine.requests[0].params.grammar)
    assert "look" not in repr(texts[0])
    assert "look" in repr(texts[1])
