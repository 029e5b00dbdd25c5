"""What the tests of the generating routes share: a fake engine that says given texts, and readers of streams."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
from msgspec.structs import replace

from engine import EngineRequest, TokenDelta, TokenLogprob
from tests.fakes import FakeEngine, serving
from tests.toys import byte_level

LIBRARY = byte_level()
END = LIBRARY.token_to_id("<|end|>")
QUESTION = [{"role": "user", "content": "the sea"}]
CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
RESPONSES = "/v1/responses"
RERANK, SCORE = "/v1/rerank", "/v1/score"


def ids(text: str) -> list[int]:
    return LIBRARY.encode(text).ids


def saying(*texts: str, end: bool = True) -> Callable[[EngineRequest], Sequence[int]]:
    """Say these texts in turn, one per request, each followed by the end token."""
    spoken: dict[int, list[int]] = {}

    def say(request: EngineRequest) -> Sequence[int]:
        if request.id not in spoken:
            spoken[request.id] = ids(texts[len(spoken) % len(texts)]) + [END] * end
        return spoken[request.id]

    return say


def float32(value: float) -> float:
    return struct.unpack("f", struct.pack("f", value))[0]


class Odds(FakeEngine):
    """A fake engine whose log-probabilities differ from token to token and need all bits of a float32."""

    def _delta(self, request: EngineRequest, tokens: list[int], reason: Any, error: Any, times: Any) -> TokenDelta:
        delta = super()._delta(request, tokens, reason, error, times)
        start = times[3] - len(tokens)

        def entry(place: int, token: int, k: int) -> TokenLogprob:
            top = [(token + i) % 340 for i in range(k)]
            return TokenLogprob(odds(place, token), tuple(top), tuple(odds(place, other) for other in top))

        if (k := request.params.logprobs) is not None:
            delta = replace(delta, logprobs=tuple(entry(start + i, token, k) for i, token in enumerate(tokens)))
        if delta.prompt_logprobs is not None:
            k, ids = request.params.prompt_logprobs, request.prompt_ids[1:]
            delta = replace(delta, prompt_logprobs=tuple(entry(1000 + i, token, k) for i, token in enumerate(ids)))
        return delta


def odds(place: int, token: int) -> float:
    return float32(-10 - 1 / (1 + token + 7 * place))  # between 10 and 16 a float32 needs nine digits


async def run(
    folder: Path, use: Callable[[httpx.AsyncClient], Any], engine: FakeEngine | None = None, **settings: Any
) -> Any:
    """Let `use(client)` talk to an app over a fake engine."""
    async with serving(folder, engine, **settings) as (client, _):
        return await use(client)


async def ask(folder: Path, path: str, body: Any, engine: FakeEngine | None = None, **settings: Any) -> httpx.Response:
    """One POST; `headers` among the settings are the request's."""
    headers = settings.pop("headers", None)
    return await run(folder, lambda client: client.post(path, json=body, headers=headers), engine, **settings)


def events(text: str) -> list[Any]:
    """A stream's events in order: JSON objects, "[DONE]", and comments as they are."""
    assert text.endswith("\n\n")
    frames = text[:-2].split("\n\n")
    return [json.loads(frame[6:]) if frame.startswith("data: {") else frame.removeprefix("data: ") for frame in frames]


def chunks(text: str) -> list[dict[str, Any]]:
    """The JSON objects of a stream that ended well."""
    seen = events(text)
    assert seen[-1] == "[DONE]"
    assert seen.count("[DONE]") == 1
    return [event for event in seen if isinstance(event, dict)]


def typed(text: str) -> list[dict[str, Any]]:
    """The events of a stream of the Responses API, whose type is told twice and whose numbers count up."""
    assert text.endswith("\n\n")
    seen = []
    for frame in text[:-2].split("\n\n"):
        if not frame.startswith(":"):
            kind, _, data = frame.partition("\ndata: ")
            seen.append(json.loads(data))
            assert kind == f"event: {seen[-1]['type']}"
    assert [event["sequence_number"] for event in seen] == list(range(len(seen)))
    return seen


def joined(parts: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Choices of a stream put together as a client does it, in the form of the whole answer's choices."""
    choices: dict[int, dict[str, Any]] = {}
    for part in parts:
        for piece in part["choices"]:
            choice = choices.setdefault(piece["index"], {"text": "", "finish_reason": None, "logprobs": None})
            assert choice["finish_reason"] is None, "something came after the end"
            choice["text"] += piece["delta"].get("content") or "" if "delta" in piece else piece["text"]
            choice["finish_reason"] = piece["finish_reason"]
            if piece["finish_reason"]:
                choice["stop_reason"] = piece["stop_reason"]
            for key in ("token_ids", "prompt_token_ids", "prompt_logprobs"):
                if key in piece:
                    choice[key] = choice.get(key, []) + piece[key]
            if piece["logprobs"] is not None:
                columns = choice["logprobs"] = choice["logprobs"] or {}
                for name, column in piece["logprobs"].items():
                    columns[name] = None if column is None else (columns.get(name) or []) + column
    return choices


def whole(answer: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """The choices of an answer in one piece, in the form of `joined`."""
    choices = {}
    for choice in answer["choices"]:
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        kept = {k: v for k, v in choice.items() if k not in ("index", "message", "text")}
        choices[choice["index"]] = {"text": text, **kept}
    return choices
