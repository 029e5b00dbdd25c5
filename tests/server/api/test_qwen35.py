"""Qwen3.5: its template opens or closes a block of reasoning in the prompt, and its calls have tags."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from msgspec.structs import replace

from tests.fakes import INFO, FakeEngine, model_folder
from tests.server.api.anthropic.wire import MESSAGES
from tests.server.wire import CHAT, LIBRARY, QUESTION, RESPONSES, ask, chunks, saying

# Like the template of Qwen3.5, which has two forms: small models think only if they are asked to, others by default.
TEMPLATE = """
{%- macro show(content) %}
    {%- if content is string %}
        {{- content }}
    {%- else %}
        {%- for part in content %}
            {{- part.text }}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}
{%- for tool in tools or [] %}
    {{- tool | tojson }}
    {{- "<tool_call>\n<function=name>\n<parameter=key>\nvalue\n</parameter>\n</function>\n</tool_call>" }}
{%- endfor %}
{%- for message in messages %}
    {{- "<|im_start|>" + message.role + "\n" }}
    {%- if message.role == "assistant" and message.reasoning_content %}
        {{- "<think>\n" + message.reasoning_content + "\n</think>\n\n" }}
    {%- endif %}
    {{- show(message.content) }}
    {%- for call in message.tool_calls or [] %}
        {{- "<tool_call>\n<function=" + call.function.name + ">\n" }}
        {%- for name, value in call.function.arguments|items %}
            {{- "<parameter=" + name + ">\n" + (value if value is string else value|tojson) + "\n</parameter>\n" }}
        {%- endfor %}
        {{- "</function>\n</tool_call>" }}
    {%- endfor %}
    {{- "<|im_end|>\n" }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|im_start|>assistant\n" + ("<think>\n" if THINKS else "<think>\n\n</think>\n\n") }}
{%- endif %}
"""
THINKS = {
    "thinks": "enable_thinking is undefined or enable_thinking is true",
    "on request": "enable_thinking is defined and enable_thinking is true",
}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {
                "note": {"type": "string"},
                "days": {"type": "integer"},
                "hourly": {"type": "boolean"},
                "at": {"type": "object", "properties": {"latitude": {"type": "number"}}},
            },
            "required": ["note"],
        },
    },
}
ARGUMENTS = {"note": "two\nlines", "days": 3, "hourly": True, "at": {"latitude": 41.3}}
CALL = (
    "<tool_call>\n<function=weather>\n<parameter=note>\ntwo\nlines\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
    "<parameter=hourly>\nTrue\n</parameter>\n"
    '<parameter=at>\n{"latitude": 41.3}\n</parameter>\n</function>\n</tool_call>'
)


def speaking(says: str) -> FakeEngine:
    return FakeEngine(saying(says), info=replace(INFO, max_len=2048))


def written(folder: Path, condition: str) -> Path:
    template = TEMPLATE.replace("THINKS", condition)
    return model_folder(folder, tokenizer_config={"eos_token": "<|end|>", "chat_template": template})


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: written(tmp_path_factory.mktemp("model") / "fake", condition) for name, condition in THINKS.items()}


@pytest.fixture(scope="module")
def folder(folders: dict[str, Path]) -> Path:
    return folders["thinks"]


async def streamed(folder: Path, says: str, **body: Any) -> list[dict[str, Any]]:
    response = await ask(folder, CHAT, {"messages": QUESTION, **body, "stream": True}, speaking(says))
    return [chunk["choices"][0]["delta"] for chunk in chunks(response.text) if chunk["choices"]]


def calls(deltas: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [call for delta in deltas for call in delta.get("tool_calls", ())]


async def choice(folder: Path, says: str, **body: Any) -> tuple[dict[str, Any], str]:
    """Return the message and the prompt, after checking that a stream has the same message."""
    engine = speaking(says)
    body = {"messages": QUESTION, **body}
    response = await ask(folder, CHAT, body, engine)
    assert response.status_code == 200, response.text
    message = response.json()["choices"][0]["message"]
    deltas = await streamed(folder, says, **body)
    for key in ("content", "reasoning_content"):
        assert "".join(delta.get(key) or "" for delta in deltas) == (message.get(key) or ""), key
    names = [call["function"]["name"] for call in message.get("tool_calls", ())]
    assert [call["function"]["name"] for call in calls(deltas) if "name" in call["function"]] == names
    return message, LIBRARY.decode(engine.requests[0].prompt_ids)


@pytest.mark.parametrize(
    ("kind", "thinks", "asked"),
    [
        ("thinks", True, {}),
        ("thinks", True, {"reasoning_effort": "high"}),
        ("thinks", False, {"enable_thinking": False}),
        ("thinks", False, {"chat_template_kwargs": {"enable_thinking": False}}),
        ("thinks", False, {"reasoning_effort": "none"}),
        ("on request", False, {}),
        ("on request", True, {"enable_thinking": True}),
        ("on request", True, {"reasoning_effort": "low"}),
        ("on request", False, {"reasoning_effort": "none"}),
    ],
)
async def test_reasoning_is_separated_in_both_modes(
    folders: dict[str, Path], kind: str, thinks: bool, asked: dict[str, Any]
) -> None:
    message, prompt = await choice(folders[kind], "Large.\n</think>\n\nYes." if thinks else "Yes.", **asked)
    assert prompt.endswith("<think>\n" if thinks else "<think>\n\n</think>\n\n")
    assert message["content"] == "Yes."
    assert message.get("reasoning_content") == ("Large." if thinks else None)


async def test_what_is_forced_thinks_only_where_the_template_lets_it(tmp_path: Path) -> None:
    for kind, condition in THINKS.items():
        path = written(tmp_path / kind, condition)
        library = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
        library.add_tokens(["<think>", "</think>"])
        library.save(str(path / "tokenizer.json"))
        for asked, thinks in (
            ({}, kind == "thinks"),
            ({"enable_thinking": True}, True),
            ({"enable_thinking": False}, False),
        ):
            engine = FakeEngine(saying("a"), info=replace(INFO, max_len=2048, vocab_size=INFO.vocab_size + 2))
            await ask(
                path, CHAT, {"messages": QUESTION, "tools": [WEATHER], "tool_choice": "required", **asked}, engine
            )
            assert ("thought" in engine.requests[0].params.grammar[1]) == thinks, (kind, asked)


@pytest.mark.parametrize("closes", ["\n</think>\n\n", "\n"], ids=["closed", "unclosed"])
async def test_a_call_has_typed_arguments_and_interrupts_the_reasoning(folder: Path, closes: str) -> None:
    message, prompt = await choice(folder, f"Large.{closes}{CALL}", tools=[WEATHER])
    assert '"name": "weather"' in prompt
    assert (message["reasoning_content"], message["content"]) == ("Large.", None)
    [call] = message["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("weather", ARGUMENTS)


async def test_a_call_that_reasoning_mentions_is_none(folder: Path) -> None:
    thoughts = "I could write <tool_call>\n<function=weather> here.\n<tool_call>\n<function=weather>\nBut no."
    message, _ = await choice(folder, f"{thoughts}\n</think>\n\nNo tool is needed.", tools=[WEATHER])
    assert (message["reasoning_content"], message["content"]) == (thoughts, "No tool is needed.")
    assert "tool_calls" not in message


async def test_reasoning_goes_on_after_a_call_until_it_is_closed(folder: Path) -> None:
    message, _ = await choice(folder, f"Large.\n{CALL}\nMore.\n</think>\n\nYes.", tools=[WEATHER])
    assert (message["reasoning_content"], message["content"]) == ("Large.\nMore.", "Yes.")
    [call] = message["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == ARGUMENTS


async def test_streamed_arguments_come_piece_by_piece(folder: Path) -> None:
    deltas = await streamed(folder, f"Large.\n{CALL}", tools=[WEATHER])
    pieces = [call["function"]["arguments"] for call in calls(deltas)]
    assert len(pieces) > 5 and json.loads("".join(pieces)) == ARGUMENTS
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == "Large."


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
async def test_the_other_apis_see_the_call_too(folder: Path, path: str) -> None:
    function = WEATHER["function"]
    tool: dict[str, Any] = {"name": "weather", "input_schema": function["parameters"]}
    body: dict[str, Any] = {"messages": QUESTION, "max_tokens": 400, "thinking": {"type": "adaptive"}}
    if path == RESPONSES:
        tool = {"type": "function", "name": "weather", "parameters": function["parameters"], "strict": False}
        body = {"input": "the sea"}
    response = await ask(folder, path, {**body, "tools": [tool]}, speaking(f"Large.\n{CALL}"))
    assert response.status_code == 200, response.text
    items = response.json()["content" if path == MESSAGES else "output"]
    assert [item["type"] for item in items] == (
        ["thinking", "tool_use"] if path == MESSAGES else ["reasoning", "function_call"]
    )
    given = items[1]["input"] if path == MESSAGES else json.loads(items[1]["arguments"])
    assert given == ARGUMENTS


NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize("forced", ["required", NAMED], ids=["required", "named"])
@pytest.mark.parametrize("thinks", [True, False])
async def test_a_call_that_must_be_made_is_enforced_in_the_models_format(
    folder: Path, forced: Any, thinks: bool
) -> None:
    engine = speaking(f"Large.\n</think>\n\n{CALL}" if thinks else CALL)
    body = {"messages": QUESTION, "tools": [WEATHER], "tool_choice": forced, "enable_thinking": thinks}
    response = await ask(folder, CHAT, body, engine)
    kind, text = engine.requests[0].params.grammar
    assert kind == "lark" and r'"<function=weather>\n"' in text and r'"<parameter=at>\n"' in text
    message = response.json()["choices"][0]["message"]
    assert message.get("reasoning_content") == ("Large." if thinks else None)
    [call] = message["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == ARGUMENTS


async def test_a_call_inside_reasoning_is_none_where_calls_are_enforced(folder: Path) -> None:
    says = f"Large.\n{CALL}\n</think>\n\n{CALL}"
    message, _ = await choice(folder, says, tools=[WEATHER], tool_choice="required")
    assert (message["reasoning_content"], len(message["tool_calls"])) == (f"Large.\n{CALL}", 1)


@pytest.mark.parametrize(
    ("arguments", "parameters"),
    [
        (json.dumps(ARGUMENTS), CALL[CALL.index("<parameter") : CALL.index("</function>")].replace("True", "true")),
        ('{"note": "two\\nli', "<parameter=note>\ntwo\nli\n</parameter>\n"),
        ("", ""),
    ],
    ids=["whole", "truncated", "none"],
)
async def test_a_conversation_with_calls_continues(folder: Path, arguments: str, parameters: str) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
        *QUESTION,
        {"role": "assistant", "content": None, "reasoning_content": "Large.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Fog."},
    ]
    _, prompt = await choice(folder, "Yes.", messages=messages, tools=[WEATHER])
    assert "<|im_start|>system\nBe brief.<|im_end|>" in prompt
    said = f"<think>\nLarge.\n</think>\n\n<tool_call>\n<function=weather>\n{parameters}</function>\n</tool_call>"
    assert f"<|im_start|>assistant\n{said}<|im_end|>\n<|im_start|>tool\nFog.<|im_end|>\n" in prompt


IMAGE = "data:image/png;base64,AA=="


@pytest.mark.parametrize(
    ("path", "part"),
    [
        (CHAT, {"type": "image_url", "image_url": {"url": IMAGE}}),
        (RESPONSES, {"type": "input_image", "image_url": IMAGE}),
        (MESSAGES, {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}),
    ],
)
async def test_images_are_refused_as_by_other_models(folder: Path, path: str, part: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": [part]}]
    body = {"input": messages} if path == RESPONSES else {"messages": messages, "max_tokens": 9}
    response = await ask(folder, path, body)
    assert response.status_code == 400
    assert "image" in response.json()["error"]["message"] and "not supported" in response.json()["error"]["message"]
