"""The coding agents of the table: how each is pointed at a server, asked without a terminal, and asked once more."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

MODEL = "whale"
KEY = "sk-whale"
CONTEXT = 200_000


@dataclasses.dataclass(frozen=True)
class Agent:
    """A program that works on files in its current folder.

    `settings(url)` are files in its home folder, `environment(url)` its variables; `url` has no /v1. `ask` are the
    arguments before a prompt, `ask_again` those that continue the last conversation. `tool(path, text)`: the name and
    the arguments of a call that writes the text to the path.
    """

    package: str
    program: str
    api: str
    ask: Sequence[str]
    ask_again: Sequence[str] | None  # None: it cannot without a terminal
    tool: Callable[[pathlib.Path, str], tuple[str, dict[str, Any]]]
    settings: Callable[[str], Mapping[str, str]] = lambda url: {}
    environment: Callable[[str], Mapping[str, str]] = lambda url: {}


def echoed(path: pathlib.Path, text: str) -> str:
    return f"echo {text} > {path}"


def codex(url: str) -> dict[str, str]:
    return {
        ".codex/config.toml": f"""\
model = "{MODEL}"
model_provider = "pequod"
model_providers.pequod = {{ name = "Pequod", base_url = "{url}/v1", wire_api = "responses", env_key = "KEY" }}
"""
    }


def opencode(url: str) -> dict[str, str]:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{url}/v1", "apiKey": KEY},
        "models": {MODEL: {"limit": {"context": CONTEXT, "output": 4096}}},
    }
    model = f"pequod/{MODEL}"
    settings = {"provider": {"pequod": provider}, "model": model, "autoupdate": False}
    return {".config/opencode/opencode.json": json.dumps(settings)}


def pi(url: str) -> dict[str, str]:
    model = {"id": MODEL, "name": MODEL, "input": ["text"], "contextWindow": CONTEXT, "maxTokens": 4096}
    provider = {"baseUrl": f"{url}/v1", "api": "openai-completions", "apiKey": KEY, "models": [model]}
    return {".pi/agent/models.json": json.dumps({"providers": {"pequod": provider}})}


def continue_dev(url: str) -> dict[str, str]:
    return {
        ".continue/config.yaml": f"""\
name: Pequod
version: 1.0.0
schema: v1
models:
  - name: {MODEL}
    provider: openai
    model: {MODEL}
    apiBase: {url}/v1
    apiKey: {KEY}
    capabilities: [tool_use]
"""
    }


def cline(url: str) -> dict[str, str]:
    provider = {"provider": "openai-compatible", "apiKey": KEY, "model": MODEL, "baseUrl": f"{url}/v1"}
    kept = {"settings": provider, "updatedAt": "2026-01-01T00:00:00.000Z", "tokenSource": "manual"}
    settings = {"version": 1, "lastUsedProvider": "openai-compatible", "providers": {"openai-compatible": kept}}
    return {".cline/data/settings/providers.json": json.dumps(settings)}


AGENTS = {
    "codex": Agent(
        package="@openai/codex",
        program="codex",
        api="/v1/responses",
        ask=("exec", "--dangerously-bypass-approvals-and-sandbox"),
        ask_again=("exec", "resume", "--last", "--dangerously-bypass-approvals-and-sandbox"),
        tool=lambda path, text: ("exec_command", {"cmd": echoed(path, text)}),
        settings=codex,
        environment=lambda url: {"KEY": KEY},
    ),
    "claude": Agent(
        package="@anthropic-ai/claude-code",
        program="claude",
        api="/v1/messages",
        ask=("--allowedTools", "Write", "-p"),
        ask_again=("--continue", "-p"),
        tool=lambda path, text: ("Write", {"file_path": str(path), "content": f"{text}\n"}),
        environment=lambda url: {
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_AUTH_TOKEN": KEY,
            "ANTHROPIC_MODEL": MODEL,
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": MODEL,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
    ),
    "copilot": Agent(
        package="@github/copilot",
        program="copilot",
        api="/v1/chat/completions",
        ask=("--allow-all-tools", "-p"),
        ask_again=("--continue", "-p"),
        tool=lambda path, text: ("bash", {"command": echoed(path, text), "description": "write"}),
        environment=lambda url: {
            "COPILOT_PROVIDER_BASE_URL": f"{url}/v1",
            "COPILOT_PROVIDER_API_KEY": KEY,
            "COPILOT_MODEL": MODEL,
        },
    ),
    "opencode": Agent(
        package="opencode-ai",
        program="opencode",
        api="/v1/chat/completions",
        ask=("run",),
        ask_again=("run", "--continue"),
        tool=lambda path, text: ("write", {"filePath": str(path), "content": f"{text}\n"}),
        settings=opencode,
    ),
    "qwen": Agent(
        package="@qwen-code/qwen-code",
        program="qwen",
        api="/v1/chat/completions",
        ask=("--yolo", "--auth-type", "openai", "-p"),
        ask_again=("--yolo", "--auth-type", "openai", "--continue", "-p"),
        tool=lambda path, text: ("write_file", {"file_path": str(path), "content": f"{text}\n"}),
        environment=lambda url: {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": KEY, "OPENAI_MODEL": MODEL},
    ),
    "cline": Agent(
        package="cline",
        program="cline",
        api="/v1/chat/completions",
        ask=("--json",),
        ask_again=None,
        tool=lambda path, text: ("run_commands", {"commands": [echoed(path, text)]}),
        settings=cline,
    ),
    "continue": Agent(
        package="@continuedev/cli",
        program="cn",
        api="/v1/chat/completions",
        ask=("--auto", "-p"),
        ask_again=("--resume", "--auto", "-p"),
        tool=lambda path, text: ("Write", {"filepath": str(path), "content": f"{text}\n"}),
        settings=continue_dev,
    ),
    "pi": Agent(
        package="@mariozechner/pi-coding-agent",
        program="pi",
        api="/v1/chat/completions",
        ask=("--provider", "pequod", "--model", MODEL, "--mode", "json", "-p"),
        ask_again=("--provider", "pequod", "--model", MODEL, "--mode", "json", "--continue", "-p"),
        tool=lambda path, text: ("write", {"path": str(path), "content": f"{text}\n"}),
        settings=pi,
    ),
}
