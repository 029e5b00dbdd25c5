"""What templates demand of tools and calls: conversations that the server made are rendered by them."""

from __future__ import annotations

from typing import Any

import pytest

from server.tokenization.chat_template import ChatTemplates, TemplateError

HELLO: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
TOOLS = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}]
# As in the template of vLLM for Mistral 7B v0.3.
MISTRAL = """
{%- for message in messages %}
    {%- if message["role"] == "user" %}
        {{- "[INST] " + message["content"] + "[/INST]" }}
    {%- elif message["role"] == "tool_calls" or message.tool_calls is defined %}
        {%- if message.tool_calls is defined %}
            {%- set tool_calls = message.tool_calls %}
        {%- else %}
            {%- set tool_calls = message.content %}
        {%- endif %}
        {%- for call in tool_calls %}
            {%- if not call.id is defined or call.id|length != 9 %}
                {{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
            {%- endif %}
            {{- call.function.name + " " + call.id + ";" }}
        {%- endfor %}
    {%- elif message["role"] == "tool" %}
        {%- if message.tool_call_id|length != 9 %}
            {{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
        {%- endif %}
        {{- message.tool_call_id + " " + message.content + ";" }}
    {%- endif %}
{%- endfor %}
"""
LLAMA = """
{%- for message in messages %}
    {%- if message.role == "tool" %}
        {{- message.content + ";" }}
    {%- elif "tool_calls" in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- message.content + tool_call.name + ";" }}
    {%- endif %}
{%- endfor %}
"""
# As in gpt-oss, without what it writes before the messages.
GPT_OSS = """
{%- for tool in tools or [] %}
    {{- "// " + tool.function.description + "\n" }}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "assistant" and "tool_calls" in message %}
        {%- set tool_call = message.tool_calls[0].function %}
        {%- if message.content and message.thinking %}
            {{- raise_exception("Cannot pass both content and thinking in an assistant message with tool calls!") }}
        {%- elif message.content or message.thinking %}
            {%- set text = message.content or message.thinking %}
            {{- "<|start|>assistant<|channel|>analysis<|message|>" + text + "<|end|>" }}
        {%- endif %}
        {{- "<|start|>assistant to=functions." + tool_call.name + "<|channel|>commentary json<|message|>" }}
        {{- tool_call.arguments|tojson + "<|call|>" }}
    {%- endif %}
{%- endfor %}
"""
# As in Qwen3.5 and GLM-4.5, each without what it writes around a call.
QWEN = """
{%- for message in messages %}
    {%- for tool_call in message.tool_calls or [] %}
        {%- for name, value in tool_call.function.arguments|items %}
            {{- name ~ "=" ~ (value|tojson) ~ ";" }}
        {%- endfor %}
    {%- endfor %}
{%- endfor %}
"""
GLM = QWEN.replace(
    "{%- for name, value in tool_call.function.arguments|items %}",
    "{%- set given = tool_call.function.arguments %}{%- for name, value in given.items() %}",
)


def render(source: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> str:
    return ChatTemplates({"default": "{# tools #}" + source}, {}).render(messages, tools)


def turn(*calls: tuple[str, str], results: list[tuple[str, str]], **more: Any) -> list[dict[str, Any]]:
    """Return messages with these calls, each an id and a function, and the results, each an id and a text."""
    made = [{"id": call, "type": "function", "function": {"name": name, "arguments": "{}"}} for call, name in calls]
    said = {"role": "assistant", "content": None, "tool_calls": made, **more}
    return [*HELLO, said, *({"role": "tool", "tool_call_id": call, "content": text} for call, text in results)]


def test_a_name_for_the_calls_or_the_content_leaves_contents_as_text() -> None:
    assert render(MISTRAL, HELLO) == "[INST] hello[/INST]"


def test_ids_have_the_length_that_the_template_demands() -> None:
    ids = ("call_0123456789abcdef01234567", "toolu_01A09q90qw90lq917835lq9", "abcdEF123", "call-1234")
    messages = turn(*((each, "f") for each in ids), results=[(each, "done") for each in ids])
    written = render(MISTRAL, messages).removeprefix("[INST] hello[/INST]").split(";")[:-1]
    of_calls, of_results = [part.removeprefix("f ") for part in written[:4]], [part[:9] for part in written[4:]]
    assert of_calls == of_results and len(set(of_calls)) == 4
    assert all(len(each) == 9 and each.isalnum() for each in of_calls)
    assert of_calls[2] == "abcdEF123"


@pytest.mark.parametrize("message", [{"role": "tool", "content": "x"}, {"role": "assistant", "tool_calls": [{}]}])
def test_a_missing_id_is_refused_by_the_template(message: dict[str, Any]) -> None:
    with pytest.raises(TemplateError):
        render(MISTRAL, [*HELLO, message])


def test_each_of_several_calls_is_followed_by_its_result_where_a_message_may_have_one() -> None:
    messages = turn(
        ("1", "f"), ("2", "g"), ("3", "h"), results=[("2", "two"), ("1", "one"), ("4", "four")], content="So "
    )
    assert render(LLAMA, [*messages, *messages]) == "So f;one;g;two;h;four;" * 2
    assert render(LLAMA, turn(("1", "f"), ("1", "f"), results=[("1", "one"), ("1", "two")])) == "f;one;f;two;"
    assert render(LLAMA, turn(("1", "f"), results=[("1", "one")])) == "f;one;"


def test_gpt_oss_gets_reasoning_preamble_and_call_as_it_wrote_them() -> None:
    said = turn(("1", "f"), ("2", "g"), results=[], content="Let me look.", reasoning_content="Hm.")
    analysis = "<|start|>assistant<|channel|>analysis<|message|>"
    assert render(GPT_OSS, said) == (
        f"{analysis}Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>Let me look.<|end|>"
        "<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{}<|call|>"
        "<|start|>assistant to=functions.g<|channel|>commentary json<|message|>{}<|call|>"
    )
    assert render(GPT_OSS, turn(("1", "f"), results=[], reasoning="Hm.")).startswith(f"{analysis}Hm.<|end|>")
    assert render(GPT_OSS, turn(("1", "f"), results=[], content="So.")).startswith(f"{analysis}So.<|end|>")


@pytest.mark.parametrize("template", [QWEN, GLM], ids=["filter", "method"])
@pytest.mark.parametrize(
    ("arguments", "written"),
    [
        ('{"a": "x", "b": [1]}', 'a="x";b=[1];'),
        ('{"a": "x", "b": [1, {"c": "so f', 'a="x";b=[1, {"c": "so f"}];'),
        ('{"a": "x", "b', 'a="x";'),
        ("", ""),
        ("a whale", 'arguments="a whale";'),
        ("[1]", 'arguments="[1]";'),
    ],
)
def test_truncated_arguments_are_an_object_where_the_template_writes_them_one_by_one(
    template: str, arguments: str, written: str
) -> None:
    messages = turn(("1", "f"), results=[("1", "failed")])
    messages[1]["tool_calls"][0]["function"]["arguments"] = arguments
    assert render(template, messages) == written


def test_a_description_is_added_where_the_template_needs_one() -> None:
    assert render(GPT_OSS, HELLO, TOOLS) == "// \n"
    assert render("{{ tools | tojson }}", HELLO, TOOLS) == (
        '[{"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}]'
    )


# As in Kimi K2, without what it writes around messages.
KIMI = """
{%- for message in messages %}
    {%- for tool_call in message.tool_calls or [] %}
        {{- "<|tool_call_begin|>" + tool_call['id'] + "<|tool_call_argument_begin|>" }}
        {{- tool_call['function']['arguments'] | tojson }}
    {%- endfor %}
    {%- if message.role == "tool" %}
        {{- "## Return of " + message.tool_call_id + "\\n" + message.content + ";" }}
    {%- endif %}
{%- endfor %}
"""
# As in GLM-4-0414.
GLM4 = """
{%- for message in messages %}
    {%- set meta = message.get("metadata", "") %}
    {%- if message.role == "user" %}
        {{- "<|user|>\\n" + message.content }}
    {%- elif message.role == "assistant" and not meta %}
        {{- "<|assistant|>\\n" + message.content }}
    {%- elif message.role == "assistant" and meta %}
        {{- "<|assistant|>" + meta + "\\n" + message.content }}
    {%- elif message.role == "observation" %}
        {{- "<|observation|>\\n" + message.content }}
    {%- endif %}
{%- endfor %}
{%- if tools %}{% endif %}
"""


def called(name: str, call_id: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(call_id: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def test_ids_of_kimi_name_the_function_and_count_the_calls():
    turns = [
        *HELLO,
        {"role": "assistant", "content": "", "tool_calls": [called("find", "x", "{}"), called("ring", "y", "{}")]},
        result("y", "rung"),
        result("x", "found"),
        {"role": "assistant", "content": "", "tool_calls": [called("find", "x", '{"deep": true}')]},
        result("x", "found again"),
        result("unknown", "lost"),
    ]
    between = "<|tool_call_argument_begin|>"
    assert ChatTemplates({"default": KIMI + "{% if tools %}{% endif %}"}, {}).render(turns) == (
        f"<|tool_call_begin|>functions.find:0{between}{{}}<|tool_call_begin|>functions.ring:1{between}{{}}"
        "## Return of functions.ring:1\nrung;## Return of functions.find:0\nfound;"
        f'<|tool_call_begin|>functions.find:2{between}{{"deep": true}}## Return of functions.find:2\nfound again;'
        "## Return of unknown\nlost;"
    )


def test_results_of_calls_with_one_id_belong_to_them_in_their_order():
    calls = [called("find", "x", "{}"), called("ring", "x", "{}")]
    turns = [
        *HELLO,
        {"role": "assistant", "content": "", "tool_calls": calls},
        result("x", "found"),
        result("x", "rung"),
    ]
    rendered = ChatTemplates({"default": KIMI + "{% if tools %}{% endif %}"}, {}).render(turns)
    assert rendered.endswith("## Return of functions.find:0\nfound;## Return of functions.ring:1\nrung;")


def test_glm4_gets_calls_as_messages_with_metadata_and_results_as_observations():
    turns = [
        *HELLO,
        {
            "role": "assistant",
            "content": "I look.",
            "tool_calls": [called("find", "x", '{"deep": true, "at": "\u00e9"}'), called("ring", "y", "{")],
        },
        result("y", "rung"),
        result("x", "found"),
        {"role": "assistant", "content": "Done."},
    ]
    assert ChatTemplates({"default": GLM4}, {}).render(turns) == (
        "<|user|>\nhello<|assistant|>\nI look."
        '<|assistant|>find\n{"deep": true, "at": "\u00e9"}<|observation|>\nfound'
        "<|assistant|>ring\n{<|observation|>\nrung<|assistant|>\nDone."
    )


def test_reasoning_is_in_the_field_that_solar_open_reads():
    template = "{% for m in messages %}{{ m.reasoning }}|{{ m.content }}{% endfor %}"
    turn = {"role": "assistant", "content": "So.", "reasoning_content": "hm"}
    assert ChatTemplates({"default": template}, {}).render([turn]) == "hm|So."
