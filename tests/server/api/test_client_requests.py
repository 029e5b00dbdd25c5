"""Requests in the form in which chat interfaces, coding agents and other clients send them, each of which is answered.

The texts are ours. The fields are those that the clients send by default or after one of their usual settings: those of
Open WebUI, Codex CLI, opencode, Cline, Continue, aider, Claude Code and LangChain's JavaScript (which n8n and LibreChat
use) were recorded, those of the others read in their sources.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from tests.fakes import INFO, FakeEngine, model_folder
from tests.server.grammar.test_lark import PATCH
from tests.server.wire import CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES, ask, saying

Json = dict[str, Any]
MESSAGES = "/v1/messages"
CONTEXT = 8192
# As Qwen3's: it renders tools and calls, and knows enable_thinking but no reasoning_effort.
TEMPLATE = (
    "{{ 'quiet ' if enable_thinking is false }}{# <think> </think> #}"
    "{% for t in tools or [] %}<tool_call>{{ t.function.name }} {% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}; "
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)

SYSTEM = {"role": "system", "content": "You are an agent that works in a terminal."}
USER = {"role": "user", "content": "How many files are here?"}
ASKED = [SYSTEM, USER]
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
SHELL: Json = {
    "type": "object",
    "properties": {"command": {"type": "string", "description": "The command"}, "timeout": {"type": "integer"}},
    "required": ["command"],
}
SHELL_TOOL = {"type": "function", "function": {"name": "bash", "description": "Runs a command.", "parameters": SHELL}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "bash", "arguments": '{"command":"ls"}'}}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "a.txt\n"}
CALLED = [*ASKED, {"role": "assistant", "content": "", "tool_calls": [CALL]}, RESULT]
TOOLS = {"tools": [SHELL_TOOL]}
AUTO = {**TOOLS, "tool_choice": "auto"}
MARK = {"type": "ephemeral"}


def requests() -> Iterator[tuple[str, str, str, Json]]:
    """Client, situation, path and body of each request."""
    yield from open_webui()
    yield from chat_applications()
    yield from editors()
    yield from codex()
    yield from claude_code()
    yield from workflows()


def open_webui() -> Iterator[tuple[str, str, str, Json]]:
    name = "open_webui"
    clock = {
        "name": "get_current_timestamp",
        "description": "The time.",
        "parameters": {"properties": {}, "type": "object"},
    }
    tools = {"tools": [{"type": "function", "function": clock}]}
    said = {**CALL, "function": {"name": "get_current_timestamp", "arguments": "{}"}}
    called = [USER, {"role": "assistant", "content": "", "tool_calls": [said]}, RESULT]
    panel = {
        "temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "frequency_penalty": 0.1, "presence_penalty": 0,
        "seed": 1, "stop": ["###"], "max_tokens": 128, "logit_bias": {"5": 1},
    }  # fmt: skip
    yield name, "title", CHAT, {"messages": [USER], "stream": False, "max_tokens": 1000}
    yield name, "chat", CHAT, {"stream": True, "messages": [USER], **tools}
    yield name, "result", CHAT, {"stream": True, "messages": called, **tools}
    yield name, "usage", CHAT, {**STREAM, "messages": called, **tools}
    yield name, "panel", CHAT, {"stream": True, "messages": [USER], **panel}
    yield name, "effort", CHAT, {"stream": True, "messages": [USER], "reasoning_effort": "low"}
    yield name, "repeat penalty", CHAT, {"stream": True, "messages": [USER], "repeat_penalty": 1.1}
    yield name, "embeddings", EMBEDDINGS, {"input": ["A whale is white."]}


def chat_applications() -> Iterator[tuple[str, str, str, Json]]:
    user = {"user": "65f0c0ffee65f0c0ffee65f0"}
    named = [*ASKED, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {**RESULT, "name": "bash"}]
    older = {"temperature": 1, "top_p": 1, "presence_penalty": 0, "frequency_penalty": 0}
    yield "librechat", "chat", CHAT, {"messages": [USER], **user, **STREAM}
    yield "librechat", "older", CHAT, {"messages": [USER], **user, **older, "stream": True}
    yield "librechat", "result", CHAT, {"messages": named, **TOOLS, **user, **STREAM}
    yield "librechat", "effort", CHAT, {"messages": [USER], **user, **STREAM, "reasoning_effort": "low"}

    yield "jan", "chat", CHAT, {"messages": ASKED, **AUTO, **STREAM}
    sampling = {"temperature": 0.7, "top_k": 20, "top_p": 0.8}
    yield "jan", "sampling", CHAT, {"messages": ASKED, **STREAM, **sampling}
    yield "jan", "repeat penalty", CHAT, {"messages": ASKED, **STREAM, **sampling, "repeat_penalty": 1.12}

    yield "anythingllm", "chat", CHAT, {"stream": True, "messages": ASKED, "temperature": 0.7, "max_tokens": 1024}
    null = [*ASKED, {"role": "assistant", "content": None, "tool_calls": [CALL]}, RESULT]
    yield "anythingllm", "agent", CHAT, {**STREAM, "messages": null, **TOOLS}
    yield "anythingllm", "embeddings", EMBEDDINGS, {"input": ["A whale.", "A ship."], "encoding_format": "base64"}

    yield (
        "cherry_studio",
        "thinking",
        CHAT,
        {"messages": ASKED, "enable_thinking": True, "thinking_budget": 8192, **STREAM},
    )

    lm_studio = {"messages": ASKED, "temperature": 0.7, "stream": True}
    yield "lm_studio", "chat", CHAT, {**lm_studio, "max_tokens": 100}
    yield "lm_studio", "unlimited", CHAT, {**lm_studio, "max_tokens": -1}
    yield "lm_studio", "ttl", CHAT, {**lm_studio, "ttl": 300}
    yield "lm_studio", "draft model", CHAT, {**lm_studio, "draft_model": "small"}


def editors() -> Iterator[tuple[str, str, str, Json]]:
    thought = [
        *ASKED,
        {"role": "assistant", "content": None, "reasoning_content": "I look.", "tool_calls": [CALL]},
        RESULT,
    ]

    yield "continue", "agent", CHAT, {"messages": ASKED, **TOOLS, **STREAM}
    yield "continue", "result", CHAT, {"messages": CALLED, **TOOLS, **STREAM}
    fim = ["<|endoftext|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>"]
    stop = [*fim, "<|file_sep|>", "<|im_start|>", "<|im_end|>", "/src/", "#- coding: utf-8", "```"]
    completion = {"prompt": "<|fim_prefix|>a = 1\n<|fim_suffix|>\n<|fim_middle|>", "stop": stop, "stream": True}
    yield "continue", "autocomplete", COMPLETIONS, {**completion, "max_tokens": 64, "temperature": 0.01}
    prediction = {"prediction": {"type": "content", "content": "a = 1\n"}}
    yield "continue", "apply", CHAT, {"messages": ASKED, "stream": True, **prediction}

    yield "cline", "agent", CHAT, {"messages": ASKED, **AUTO, **STREAM}
    yield "cline", "result", CHAT, {"messages": thought, **AUTO, **STREAM}
    yield "cline", "effort", CHAT, {"messages": ASKED, **AUTO, **STREAM, "reasoning_effort": "high"}

    required = {**SHELL, "required": ["command", "timeout"], "additionalProperties": False}
    strict = {"type": "function", "function": {"name": "bash", "strict": True, "parameters": required}}
    roo = {"temperature": 0, **STREAM, "tools": [strict], "parallel_tool_calls": True}
    yield "roo", "agent", CHAT, {"messages": ASKED, **roo}
    marked = [{"role": "system", "content": [{"type": "text", "text": "Be brief.", "cache_control": MARK}]}, USER]
    yield "roo", "prompt caching", CHAT, {"messages": marked, **roo}
    yield "roo", "output limit", CHAT, {"messages": ASKED, **roo, "max_completion_tokens": -1}
    yield "roo", "thinking", CHAT, {"messages": ASKED, **roo, "thinking": {"type": "enabled"}}
    details = [{"type": "reasoning.text", "text": "I look.", "format": "unknown", "index": 0}]
    detailed = [
        *ASKED,
        {"role": "assistant", "content": "", "reasoning_details": details, "tool_calls": [CALL]},
        RESULT,
    ]
    yield "roo", "reasoning details", CHAT, {"messages": detailed, **roo}

    reasoned = {"reasoning": "I look.", "reasoning_content": "I look.", "cot_id": "7b1f", "cot_summary": "I look."}
    seen = [*ASKED, {"role": "assistant", "content": "I look.", "tool_calls": [CALL], **reasoned}, RESULT]
    yield "vs_code", "result", CHAT, {"messages": seen, **TOOLS, **STREAM}
    options = {"prompt_cache_options": {"mode": "explicit", "ttl": "30m"}}
    yield "vs_code", "prompt cache", RESPONSES, {"input": "Look.", "stream": True, **options}
    silent = [*ASKED, {"role": "assistant", "content": None, "reasoning_content": "I look."}, USER]
    yield "copilot_cli", "a turn without text", CHAT, {"messages": silent, **TOOLS, **STREAM}
    grammar = {"type": "grammar", "grammar": {"syntax": "lark", "definition": PATCH}}
    patch = {"type": "custom", "custom": {"name": "apply_patch", "description": "Patches.", "format": grammar}}
    patching = {"tools": [SHELL_TOOL, patch], **STREAM}
    yield "copilot_cli", "apply_patch", CHAT, {"messages": ASKED, **patching}
    patched = {"id": "call_1", "type": "custom", "custom": {"name": "apply_patch", "input": "a"}}
    spoken = [*ASKED, {"role": "assistant", "content": None, "tool_calls": [patched]}, RESULT]
    yield "copilot_cli", "patched", CHAT, {"messages": spoken, **patching}

    examples = [*ASKED, {"role": "assistant", "content": "Ok."}, USER]
    yield "aider", "chat", CHAT, {"messages": examples, "temperature": 0, "stream": True}
    yield "aider", "commit message", CHAT, {"messages": ASKED, "temperature": 0, "stream": False}

    limit = {"max_tokens": 32000}
    yield "opencode", "result", CHAT, {"messages": thought, "max_tokens": 2000, **AUTO, **STREAM}
    yield "opencode", "no limits known", CHAT, {"messages": ASKED, **limit, **AUTO, **STREAM}
    # For every model that is named like one of Anthropic's, in the form of the AI SDK's openai-compatible.
    cached = [{**message, "cache_control": MARK} for message in CALLED]
    yield "opencode", "a name of Anthropic's", CHAT, {"messages": cached, **limit, **AUTO, **STREAM}
    titled = [SYSTEM, {"role": "user", "content": "Generate a title:\n"}, USER]
    yield "opencode", "title", CHAT, {"messages": titled, "reasoning_effort": "low", **STREAM}


def codex() -> Iterator[tuple[str, str, str, Json]]:
    name = "codex"

    def message(role: str, text: str) -> Json:
        return {"type": "message", "id": f"msg_{role}", "role": role, "content": [{"type": "input_text", "text": text}]}

    shell = {"type": "function", "name": "exec_command", "description": "Runs.", "strict": False, "parameters": SHELL}
    asked = [message("developer", "You are a coding agent."), message("user", "How many files are here?")]
    call = {"type": "function_call", "name": "exec_command", "arguments": '{"command":"ls"}', "call_id": "call_1"}
    called = [
        *asked,
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": None,
         "content": [{"type": "reasoning_text", "text": "I look."}]},
        {**call, "id": "fc_1", "status": "completed"},
        {"type": "function_call_output", "id": "fco_1", "call_id": "call_1", "output": "a.txt\n"},
    ]  # fmt: skip
    body = {
        "stream": True, "input": asked, "tools": [shell], "tool_choice": "auto", "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"}, "store": False, "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "01a2049b-c62d-7d92-849f-eb4eecb80a11",
    }  # fmt: skip
    agents = {"type": "namespace", "name": "multi_agent_v1", "description": "Agents.", "tools": [shell]}
    web = {"type": "web_search", "external_web_access": False}
    patch = {"type": "custom", "name": "apply_patch", "description": "Patches.",
             "format": {"type": "grammar", "syntax": "lark", "definition": PATCH}}  # fmt: skip
    yield name, "functions alone", RESPONSES, body
    yield name, "result", RESPONSES, {**body, "input": called}
    turn = json.dumps({"installation_id": "0f", "workspaces": {f"/home/ada/src/{n}": {"dirty": n} for n in range(40)}})
    metadata = {"session_id": "1", "turn_id": "2", "x-codex-turn-metadata": turn}
    begun_elsewhere = [*asked, {**called[2], "content": None, "encrypted_content": "gAAAAB"}, *called[3:]]
    yield name, "a session that began at OpenAI", RESPONSES, {**body, "input": begun_elsewhere}
    yield name, "metadata", RESPONSES, {**body, "client_metadata": metadata}
    yield name, "namespace", RESPONSES, {**body, "tools": [shell, agents]}
    spoken = [*asked, {**call, "namespace": "multi_agent_v1"}, called[-1]]
    yield name, "call in a namespace", RESPONSES, {**body, "input": spoken}
    without = {key: value for key, value in body.items() if key != "tools"}
    added = [{"type": "additional_tools", "id": "at_1", "role": "developer", "tools": [agents]}, *spoken]
    context = {"reasoning": {"effort": "medium", "context": "all_turns"}}
    yield name, "additional tools", RESPONSES, {**without, **context, "input": added}
    yield name, "web search", RESPONSES, {**body, "tools": [shell, web]}
    yield name, "apply_patch", RESPONSES, {**body, "tools": [shell, patch]}
    patched = [
        {"type": "custom_tool_call", "status": "completed", "call_id": "call_2", "name": "apply_patch", "input": "a"},
        {"type": "custom_tool_call_output", "call_id": "call_2", "name": "apply_patch", "output": "Done."},
    ]
    yield name, "patched", RESPONSES, {**body, "input": [*asked, *patched], "tools": [shell, patch]}
    for effort in ("high", "max"):
        yield name, f"{effort} effort", RESPONSES, {**body, "reasoning": {"effort": effort, "summary": "auto"}}
    detailed = {**body, "reasoning": {"summary": "detailed"}}
    yield name, "summary", RESPONSES, detailed
    yield (
        name,
        "verbosity",
        RESPONSES,
        {**body, "text": {"verbosity": "low"}},
    )


def claude_code() -> Iterator[tuple[str, str, str, Json]]:
    name = "claude_code"
    user = {"metadata": {"user_id": '{"device_id":"0f","account_uuid":"","session_id":"1c0f"}'}}
    tool = {
        "name": "Bash",
        "description": "Runs a command.",
        "input_schema": {"$schema": "https://json-schema.org/draft/2020-12/schema", **SHELL},
    }
    system = [{"type": "text", "text": "You are an agent.", "cache_control": MARK}]
    asked = {"role": "user", "content": [{"type": "text", "text": "How many files are here?", "cache_control": MARK}]}
    late = {"role": "system", "content": "Agents that may be started: none."}
    thinking = {"type": "thinking", "thinking": "I look.", "signature": ""}
    use = {"type": "tool_use", "id": "call_1", "name": "Bash", "input": {"command": "ls"}}
    result = {
        "type": "tool_result",
        "tool_use_id": "call_1",
        "content": "a.txt",
        "is_error": False,
        "cache_control": MARK,
    }
    body = {
        "max_tokens": 32000, "system": system, "tools": [tool], **user, "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"}, "stream": True,
    }  # fmt: skip
    title = {"type": "object", "properties": {"title": {"type": "string"}}, "required": ["title"]}
    called = [asked, late, {"role": "assistant", "content": [thinking, use]}, {"role": "user", "content": [result]}]
    yield name, "agent", MESSAGES, {**body, "messages": [asked, late]}
    yield name, "result", MESSAGES, {**body, "messages": called}
    forgotten = [{"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 1}}]
    yield name, "after an hour", MESSAGES, {**body, "messages": called, "context_management": {"edits": forgotten}}
    yield name, "quota", MESSAGES, {"max_tokens": 1, "messages": [{"role": "user", "content": "quota"}], **user}
    shape = {"effort": "high", "format": {"type": "json_schema", "schema": {**title, "additionalProperties": False}}}
    yield (
        name,
        "title",
        MESSAGES,
        {"max_tokens": 3000, "messages": [asked], "tools": [], "output_config": shape, "stream": True},
    )


def workflows() -> Iterator[tuple[str, str, str, Json]]:
    strict = {"type": "function", "function": {**SHELL_TOOL["function"], "strict": False}}
    yield "n8n", "chat", CHAT, {"messages": ASKED, "tools": [strict], **STREAM}
    yield "n8n", "whole", CHAT, {"messages": ASKED, "stream": False, "response_format": {"type": "text"}}
    flat = {"type": "function", "name": "bash", "description": "Runs.", "parameters": SHELL, "strict": False}
    items = [{"type": "message", "role": "system", "content": "Be brief."}, {"type": "message", **USER}]
    call = {"type": "function_call", "call_id": "call_1", "name": "bash", "arguments": '{"command":"ls"}'}
    output = {"type": "function_call_output", "call_id": "call_1", "output": "a.txt"}
    responses = {"input": items, "text": {}, "tools": [flat], "stream": True}
    yield "n8n", "responses", RESPONSES, responses
    yield "n8n", "responses, result", RESPONSES, {**responses, "input": [*items, call, output]}
    yield "n8n", "service tier", RESPONSES, {**responses, "service_tier": "flex"}

    told = {"type": "message", "role": "developer", "content": "You control a house."}
    home = {
        "input": [told, {"type": "message", **USER}],
        "max_output_tokens": 3000, "user": "01JHOME", "store": False, "stream": True, "top_p": 1.0, "temperature": 1.0,
        "prompt_cache_retention": "24h", "tools": [flat],
    }  # fmt: skip
    yield "home_assistant", "conversation", RESPONSES, home
    yield "home_assistant", "result", RESPONSES, {**home, "input": [*home["input"], call, output]}
    yield "home_assistant", "verbosity", RESPONSES, {**home, "text": {"verbosity": "medium"}}
    low = {"reasoning": {"effort": "low", "summary": "auto"}, "include": ["reasoning.encrypted_content"]}
    yield "home_assistant", "effort", RESPONSES, {**home, **low}
    limit = {**home, "max_output_tokens": 30000}
    yield "home_assistant", "output limit", RESPONSES, limit
    web = {"type": "web_search", "search_context_size": "medium"}
    yield (
        "home_assistant",
        "web search",
        RESPONSES,
        {**home, "tools": [flat, web]},
    )


def cases() -> Iterator[Any]:
    for client, situation, path, body in requests():
        yield pytest.param(path, body, id=f"{client}: {situation}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    config = {"eos_token": "<|end|>", "chat_template": TEMPLATE}
    return model_folder(tmp_path_factory.mktemp("model") / "fake", tokenizer_config=config)


@pytest.mark.parametrize(("path", "body"), [*cases()])
async def test_a_request_of_a_client_is_answered(folder, path, body):
    # JSON, for the request that names a schema.
    engine = FakeEngine(saying('{"title": "A whale"}'), info=replace(INFO, max_len=CONTEXT))
    response = await ask(folder, path, {"model": "fake", **body}, engine)
    assert response.status_code == 200, response.text
    assert engine.requests, "nothing was asked of the model"
    if body.get("stream"):
        ends = {
            CHAT: "data: [DONE]",
            COMPLETIONS: "data: [DONE]",
            RESPONSES: "response.completed",
            MESSAGES: "message_stop",
        }
        assert ends[path] in response.text and '"error":{' not in response.text
