"""The table: the calls, which are its rows, the clients, which are its columns, and what became of each.

A client is a module of this package. It has a function for each row that it offers, under the row's name; it takes a
Place, may be async, and raises what it likes when the call fails. What a client sends by default is left as it is.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType

from .place import Place

# Module and package. The first two are among the packages that the tests of this repository want anyway.
CLIENTS = {
    "openai_sdk": "openai",
    "anthropic_sdk": "anthropic",
    "langchain": "langchain-openai",
    "litellm_sdk": "litellm",
    "pydantic_ai_sdk": "pydantic-ai-slim",
    "agents_sdk": "openai-agents",
    "open_webui": "open-webui",
}
ROWS = {
    "chat": "chat",
    "chat_async": "chat, async",
    "chat_stream": "chat, streamed",
    "chat_stream_async": "chat, streamed, async",
    "chat_usage": "chat, usage at a stream's end",
    "chat_helper": "chat, streaming helper",
    "chat_turns": "chat, a second turn",
    "chat_parse": "chat, parsed into a model",
    "chat_parse_stream": "chat, streamed and parsed",
    "chat_tools": "chat, tools until the answer",
    "chat_tools_stream": "chat, streamed tools until the answer",
    "chat_tools_async": "chat, tools until the answer, async",
    "chat_reasoning": "chat, reasoning",
    "chat_logprobs": "chat, logprobs",
    "chat_title": "title of a chat",
    "chat_tags": "tags of a chat",
    "chat_follow_ups": "follow-up questions",
    "responses": "responses",
    "responses_async": "responses, async",
    "responses_stream": "responses, streamed",
    "responses_stream_async": "responses, streamed, async",
    "responses_parse": "responses, parsed into a model",
    "responses_tools": "responses, tools until the answer",
    "responses_tools_stream": "responses, streamed tools until the answer",
    "responses_stateless": "responses, the items sent back, store false",
    "responses_reasoning": "responses, reasoning",
    "messages": "messages",
    "messages_async": "messages, async",
    "messages_stream": "messages, streamed",
    "messages_stream_async": "messages, streamed, async",
    "messages_parse": "messages, parsed into a model",
    "messages_tools": "messages, tools until the answer",
    "messages_tools_stream": "messages, streamed tools until the answer",
    "messages_thinking": "messages, thinking",
    "count_tokens": "messages, tokens counted",
    "completions": "completions",
    "completions_stream": "completions, streamed",
    "embeddings": "embeddings",
    "models": "models",
    "wrong_key": "error: wrong key",
    "unknown_model": "error: unknown model",
    "bad_field": "error: bad field",
    "hang_up": "hanging up stops the work",
    "hang_up_async": "cancelling a task stops the work",
    "retry": "a 503 is tried again",
}

NOT_OFFERED = "-"


@dataclass(frozen=True)
class Result:
    """What became of a call: `failure` is its reason, None where the call did what it should."""

    row: str
    failure: str | None
    seconds: float


def client(name: str) -> ModuleType:
    """A client's module; ImportError where its packages are missing."""
    return importlib.import_module(f"{__package__}.{name}")


def version(name: str, place: Place) -> str:
    """The version of a client's package; a client that runs as a program of its own has a function for it."""
    module = client(name)
    return module.version(place) if hasattr(module, "version") else importlib.metadata.version(CLIENTS[name])


def missing(module: ModuleType, place: Place) -> str | None:
    """Why a client cannot run on this machine; None: it can."""
    return module.missing(place) if hasattr(module, "missing") else None


def offered(module: ModuleType) -> list[str]:
    """The rows that a client has, in the table's order."""
    return [row for row in ROWS if hasattr(module, row)]


def call(module: ModuleType, row: str, place: Place) -> None:
    """Run one call; raises whatever it raises."""
    made = getattr(module, row)(place)
    if inspect.iscoroutine(made):
        place.runner.run(made)


def results(module: ModuleType, place: Place, rows: list[str]) -> Iterator[Result]:
    """What becomes of each of the calls, one after another."""
    for row in rows:
        began = time.monotonic()
        failure = None
        try:
            call(module, row, place)
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        yield Result(row, failure, time.monotonic() - began)


def markdown(columns: dict[str, dict[str, Result]]) -> str:
    """The table, as docs/clients.md has it; `columns`: results by row, under the client's heading."""
    lines = ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for row, text in ROWS.items():
        cells = [told(column.get(row)) for column in columns.values()]
        if any(cell != NOT_OFFERED for cell in cells):
            lines.append(f"| {text} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def told(result: Result | None) -> str:
    if result is None:
        return NOT_OFFERED
    return "ok" if result.failure is None else "FAILED"
