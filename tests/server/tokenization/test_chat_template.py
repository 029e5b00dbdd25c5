"""Chat templates: equal to the references, fed as the wire has it, and harmless when they are bad."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from server.tokenization.chat_template import ChatTemplates, TemplateError
from server.tokenization.tokenizer import Tokenizer

TOOLED = "{# tools #}"  # a template that has this renders tools by itself
PLAIN = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
PARTS = "{% for m in messages %}{{ m.role }}:{% for part in m['content'] %}[{{ part.text }}]{% endfor %}{% endfor %}"
BOTH = (
    "{% macro show(content) %}{% if content is string %}{{ content }}{% else %}"
    "{% for part in content %}[{{ part.text }}]{% endfor %}{% endif %}{% endmacro %}"
    "{% for m in messages %}{{ show(m.content) }};{% endfor %}"
)
HELLO: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]


def render(source: str, messages: list[dict[str, Any]] | None = None, **options: Any) -> str:
    return ChatTemplates({"default": source}, {"bos_token": "<s>"}).render(messages or HELLO, **options)


def text(*parts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": part} for part in parts]


def call(arguments: Any) -> list[dict[str, Any]]:
    tool_calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}]
    return [*HELLO, {"role": "assistant", "content": None, "tool_calls": tool_calls}]


def qwen(data: Path) -> tuple[Tokenizer, ChatTemplates]:
    tokenizer = Tokenizer(data / "tokenizers" / "qwen3")
    return tokenizer, ChatTemplates(tokenizer.templates, tokenizer.special_tokens)


# --- equal to the references ------------------------------------------------------------------------


def test_reference_chats(data: Path) -> None:
    tokenizer, templates = qwen(data)
    for case in json.loads((data / "tokenizers" / "qwen3" / "reference_chats.json").read_text()):
        kwargs = dict(case["request"])
        messages, tools = kwargs.pop("messages"), kwargs.pop("tools", None)
        prompt = templates.render(
            messages, tools, add_generation_prompt=case["add_generation_prompt"], template_kwargs=kwargs
        )
        assert prompt == case["text"], case["what"]
        assert tokenizer.encode(prompt, add_special=False) == case["ids"], case["what"]


def test_arguments_as_text_give_the_same_prompt(data: Path) -> None:
    _, templates = qwen(data)
    assert templates.render(call('{"city": "Oslo", "n": 1}')) == templates.render(call({"city": "Oslo", "n": 1}))


def test_qwen_continues_the_final_message(data: Path) -> None:
    _, templates = qwen(data)
    messages = [*HELLO, {"role": "assistant", "content": "The sea is "}]
    prompt = templates.render(messages, add_generation_prompt=False, continue_final_message=True)
    assert prompt.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\nThe sea is ")


# --- what templates find -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}{{ tools is none }}{{ documents is none }}", "<s>TrueTrue"),
        ("{{ {'text': 'é<&>'} | tojson }}", '{"text": "é<&>"}'),
        ("{{ [1] | tojson(indent=1) }}", "[\n 1\n]"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}", "hello"),
        (
            "{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}"
            "{% if i > 3 %}{% break %}{% endif %}{{ i }}{% endfor %}",
            "013",
        ),
        ("{% for i in [5, 6] %}{{ loop.index }}/{{ loop.length }}{{ loop.last }} {% endfor %}", "1/2False 2/2True "),
        ("{% for i in nothing %}{% else %}empty{% endfor %}", "empty"),
        ("{% set ns = namespace(a=1) %}{% for i in [1] %}{% set ns.a = 2 %}{% endfor %}{{ ns.a }}", "2"),
        ("{{ strftime_now('%d %b %Y') }}", "02 Jan 2030"),
        ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),  # block lines leave no blank lines
        ("{{ 3 * 4 }}{{ 'ab' * 2 }}{{ 2 ** 5 }}", "12abab32"),
    ],
)
def test_extras(source: str, expected: str) -> None:
    templates = ChatTemplates({"default": source}, {"bos_token": "<s>"}, now=lambda: datetime(2030, 1, 2))
    assert templates.render(HELLO) == expected


def test_kwargs_reach_the_template_but_replace_nothing() -> None:
    assert render("{{ enable_thinking }}", template_kwargs={"enable_thinking": False}) == "False"
    for name in ("messages", "tools", "documents", "add_generation_prompt", "bos_token"):
        with pytest.raises(TemplateError, match=f"cannot set {name}"):
            render("x", template_kwargs={name: 1})


def test_tool_template_is_taken_with_tools() -> None:
    templates = ChatTemplates({"default": "plain", "tool_use": "tools"}, {})
    assert [templates.render(HELLO), templates.render(HELLO, [{}]), templates.render(HELLO, [])] == [
        "plain",
        "tools",
        "plain",
    ]
    assert ChatTemplates({"only": "one"}, {}).render(HELLO) == "one"


def test_no_template() -> None:
    with pytest.raises(TemplateError, match=r"no chat template.*--chat-template"):
        ChatTemplates({}, {}).render(HELLO)


# --- messages ------------------------------------------------------------------------------------


def test_parts_are_joined_for_templates_that_want_text() -> None:
    assert render(PLAIN, [{"role": "user", "content": text("a", "b")}]) == "user:a\nb;assistant:"


def test_text_becomes_parts_for_templates_that_want_parts() -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": text("a", "b")}, {"role": "assistant"}]
    assert render(PARTS, messages) == "system:[s]user:[a][b]assistant:"


def test_content_goes_as_it_came_to_templates_that_take_both() -> None:
    assert render(BOTH, [{"role": "user", "content": "a"}, {"role": "user", "content": text("b", "c")}]) == "a;[b][c];"


def test_missing_content_is_empty_and_null_keys_are_absent() -> None:
    message: dict[str, Any] = {"role": "assistant", "content": None, "name": None, "tool_calls": []}
    assert render("{{ messages[1] | tojson }}", [*HELLO, message]) == '{"role": "assistant", "content": ""}'


def test_instructions_merge_into_the_first() -> None:
    late = [*HELLO, {"role": "system", "content": "one"}, {"role": "developer", "content": text("two")}]
    assert render(PLAIN, late) == "system:one\n\ntwo;user:hello;assistant:"
    assert render(PARTS, late) == "system:[one][two]user:[hello]"


def test_developer_is_system_unless_the_template_knows_better() -> None:
    messages = [{"role": "developer", "content": "d"}, *HELLO]
    assert render(PLAIN, messages).startswith("system:d;")
    assert render(PLAIN + "{{ '' if messages[0].role == 'developer' }}", messages).startswith("developer:d;")


def test_reasoning_has_all_its_names() -> None:
    messages = [*HELLO, {"role": "assistant", "content": "4", "reasoning": "2+2"}]
    assert render("{{ messages[1].reasoning_content }} {{ messages[1].thinking }}", messages) == "2+2 2+2"


@pytest.mark.parametrize("arguments", ["[1]", "{", "1", "nope", '"{}"'])
def test_arguments_that_are_no_object_stay_text(arguments: str) -> None:
    assert render(TOOLED + "{{ messages[1].tool_calls[0].function.arguments }}", call(arguments)) == arguments


def test_empty_arguments_are_an_empty_object() -> None:
    assert render(TOOLED + "{{ messages[1].tool_calls[0].function.arguments | tojson }}", call("")) == "{}"


def test_parts_that_are_not_text_are_named() -> None:
    with pytest.raises(TemplateError, match=r"messages\[0\]\.content"):
        render(PLAIN, [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])


def test_messages_are_not_changed() -> None:
    messages = [
        *call('{"a": 1}'),
        {"role": "system", "content": text("late")},
        {"role": "assistant", "content": text("x")},
    ]
    before = json.dumps(messages)
    render(PARTS, messages, add_generation_prompt=False, continue_final_message=True)
    assert json.dumps(messages) == before


# --- continue_final_message ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "content", "expected"),
    [
        (PLAIN, "The sea ", "user:hello;assistant:The sea "),
        ("{% for m in messages %}{{ m.content | trim }}!{% endfor %}", "The sea ", "hello!The sea"),
        (PARTS, text("a", "b"), "user:[hello]assistant:[a][b"),
        (PLAIN, "", "user:hello;assistant:"),
    ],
)
def test_continue_final_message(source: str, content: Any, expected: str) -> None:
    messages = [*HELLO, {"role": "assistant", "content": content}]
    assert render(source, messages, add_generation_prompt=False, continue_final_message=True) == expected


def test_what_cannot_be_continued_is_refused() -> None:
    with pytest.raises(TemplateError, match="cannot both be set"):
        render(PLAIN, continue_final_message=True)
    with pytest.raises(TemplateError, match="cannot be continued"):
        render("{{ messages[0].role }}", add_generation_prompt=False, continue_final_message=True)


# --- bad templates ------------------------------------------------------------------------------------


def test_the_templates_own_refusal_is_passed_on() -> None:
    with pytest.raises(TemplateError, match=r"^System role not supported$"):
        render("{{ raise_exception('System role not supported') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ x.y.z }}",
        "{{ 5 / 0 }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ range(1000000) }}",
        "{{ lipsum(n=100) }}",
        "{% include 'file' %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_failures_say_one_fixed_sentence(source: str) -> None:
    with pytest.raises(TemplateError, match=r"^The model's chat template cannot render these messages\.$"):
        render(source)


@pytest.mark.parametrize(
    "source", ["{% for", "{{ a b }}", "{% nonsense %}", "{{ x | nofilter }}", "{{" + "(" * 5000 + "}}"]
)
def test_syntax_errors(source: str) -> None:
    with pytest.raises(TemplateError, match="syntax error"):
        render(source)


def test_endless_text_is_cut() -> None:
    with pytest.raises(TemplateError, match="too long"):
        render("{% for i in range(100000) %}" + "x" * 200 + "{% endfor %}")


def test_a_failure_leaves_the_template_usable() -> None:
    templates = ChatTemplates({"default": "{{ raise_exception('no') if messages | length > 1 }}ok"}, {})
    with pytest.raises(TemplateError):
        templates.render(HELLO * 2)
    assert templates.render(HELLO) == "ok"
