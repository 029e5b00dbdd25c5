"""Requests of every API, readers of their streams, and results, for soak.py, kill.py and overload.py."""

from __future__ import annotations

import hashlib
import json
import shlex
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from server.cli.bench.processes import tree
from server.cli.bench.session import machine

STORY = "Tell me a story about the sea."
LOOK = {
    "type": "object",
    "properties": {"place": {"type": "string", "maxLength": 40}, "far": {"type": "boolean"}},
    "required": ["place", "far"],
    "additionalProperties": False,
}


class Request(NamedTuple):
    """A POST request, and the response statuses that are allowed."""

    name: str
    path: str
    body: dict[str, Any]
    statuses: tuple[int, ...] = (200,)


def generating(max_tokens: int, seed: int) -> list[Request]:
    """Return one streamed request of each API and kind, whose output depends only on the seed."""
    sampling = {"temperature": 0.8, "seed": seed}
    ask = {"messages": [{"role": "user", "content": f"{STORY} Begin with the number {seed}."}]}
    long = {**ask, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    schema = {"type": "json_schema", "json_schema": {"name": "look", "schema": LOOK}}
    text = {"prompt": f"{seed} whales", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    function = {"name": "look", "description": "Looks at a place.", "parameters": LOOK}
    return [
        Request("completion, greedy", "/v1/completions", {**text, "temperature": 0}),
        Request("completion, two choices", "/v1/completions", {**text, **sampling, "n": 2}),
        Request("completion, long prompt", "/v1/completions", {**text, **sampling, "prompt": f"{seed} whales. " * 80}),
        Request("completion, penalties", "/v1/completions", {**text, **sampling, "frequency_penalty": 0.3}),
        Request("chat", "/v1/chat/completions", {**long, **sampling}),
        Request("chat, schema", "/v1/chat/completions", {**long, **sampling, "response_format": schema}),
        Request(
            "chat, call",
            "/v1/chat/completions",
            {**long, **sampling, "tools": [{"type": "function", "function": function}], "tool_choice": "required"},
        ),
        Request(
            "response",
            "/v1/responses",
            {"input": f"{STORY} {seed}", "max_output_tokens": max_tokens, "stream": True, "seed": seed},
        ),
        Request("message", "/v1/messages", {**ask, "max_tokens": max_tokens, "stream": True, "temperature": 0}),
    ]


def pieces(event: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the text deltas of a stream's event: the name of a text, and what is appended to it."""
    for choice in event.get("choices") or ():
        said, index = choice.get("delta", choice), choice["index"]
        for name in ("text", "content", "reasoning_content"):
            if said.get(name):
                yield f"{index} {name}", said[name]
        for call in said.get("tool_calls") or ():
            for name, text in call["function"].items():
                yield f"{index} call {call['index']} {name}", text
        if choice.get("finish_reason"):
            yield f"{index} end", choice["finish_reason"]
    kind = event.get("type", "")
    if kind.startswith("response.") and kind.endswith(".delta"):
        yield f"{event['output_index']} {kind}", event["delta"]
    elif kind in ("response.completed", "response.incomplete"):
        yield "end", kind
    elif kind == "content_block_delta":
        for name in ("text", "partial_json", "thinking"):
            if name in event["delta"]:
                yield f"{event['index']} {name}", event["delta"][name]
    elif kind == "message_delta":
        yield "end", event["delta"]["stop_reason"]


class Failed(Exception):
    """A request had an unexpected response."""


async def events(client: httpx.AsyncClient, request: Request) -> AsyncIterator[dict[str, Any]]:
    """Yield the events of a stream. Raises Failed for a refusal, an error event, or a truncated stream."""
    async with client.stream("POST", request.path, json=request.body) as answer:
        if answer.status_code != 200:
            raise Failed(f"{answer.status_code}: {(await answer.aread())[:300]!r}")
        is_whole = False
        async for line in answer.aiter_lines():
            if line == "data: [DONE]":
                is_whole = True
            elif line.startswith("data: "):
                event = json.loads(line[6:])
                kind = event.get("type")
                if "error" in event and kind not in ("response.completed", "response.incomplete"):
                    raise Failed(f"an error event: {str(event['error'])[:300]}")
                is_whole |= kind in ("response.completed", "response.incomplete", "message_stop")
                yield event
        if not is_whole:
            raise Failed("the stream was cut")


class Answer:
    """The text of a stream, independent of how it was split into events."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self.times: list[float] = []  # of each event with text

    def add(self, event: dict[str, Any]) -> None:
        said = False
        for name, text in pieces(event):
            self.texts[name] = self.texts.get(name, "") + text
            said = True
        if said:
            self.times.append(time.perf_counter())

    @property
    def hash(self) -> str:
        return hashlib.sha256(json.dumps(self.texts, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def characters(self) -> int:
        return sum(map(len, self.texts.values()))


def children(pid: int) -> dict[str, int]:
    """Return the pids of a server's processes, by module; `pid` is the server's own."""
    found = {"server": pid}
    for child in tree(pid)[1:]:
        with suppress(OSError):
            words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
            if b"-m" in words:
                found[words[words.index(b"-m") + 1].decode()] = child
    return found


def samples(page: str) -> dict[str, float]:
    """Return the samples of a metrics page, by name and labels."""
    found = {}
    for line in page.splitlines():
        if not line.startswith("#"):
            series, _, value = line.rpartition(" ")
            found[series] = float(value)
    return found


def about() -> dict[str, Any]:
    """Return the header of a result: time, command and machine."""
    command = ["python", "-m", f"benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]]
    return {
        "date": datetime.now(UTC).isoformat(timespec="minutes"),
        "command": shlex.join(command),
        "machine": machine(),
    }


def write(found: dict[str, Any], path: Path | None) -> None:
    """Write a result to a file, unless `path` is None."""
    if path is not None:
        path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
