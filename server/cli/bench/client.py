"""Sends requests to an OpenAI-compatible server, and records the time of everything that comes back.

All servers are measured by this code. `connect` finds out which fields a server does not support; the results say so.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...http.sse import EventStream
from ..commands import Failure
from ..openai_client import CONNECT_S, base_url, error_field, open_client, parsed

if TYPE_CHECKING:
    import httpx

SILENCE_S = 900.0  # a long prompt in the queue of a slow machine gets no token for minutes
# Fields that make results comparable, where the server supports them; min_tokens is set to each request's output.
WISHES: dict[str, Any] = {
    "ignore_eos": True,
    "min_tokens": 0,
    "return_token_ids": True,
    "stream_options": {"include_usage": True},
    "temperature": 0,
}
MISSED = {
    "ignore_eos": "the server refuses ignore_eos: outputs may end early",
    "min_tokens": "the server refuses min_tokens",
    "return_token_ids": "the server returns no token ids: a token without visible text has no time of its own",
    "stream_options": "the server refuses stream_options",
    "temperature": "the server refuses temperature 0: outputs are sampled",
}
# Ids of ordinary tokens in the vocabulary of any real model; below are bytes and often special ones.
IDS = range(300, 1000)
PROBE_IDS = [*IDS[:7], IDS[-1]]
PROBE_TOKENS = 3
PROBE_WORDS = 64
# Common words, each one token of most vocabularies with the space before it. Results have the server's own count.
TEXT = (
    "the of and to in is that it was for on are as with his they at be this from have or by one had not but what all"
    " were when we there can an your which their said if do will each about how up out them then she many some so these"
    " would other into has more her two like him see time could no make than first been its who now people my made over"
)
WORDS = TEXT.split()
REFUSALS = (400, 404, 405, 415, 422, 501)  # the server does not support the request; others may be temporary


@dataclass(frozen=True, slots=True)
class Ask:
    """One request to send."""

    prompt: str | list[int]
    input_len: int  # intended tokens; the server's count is in the Shot
    output_len: int
    at: float = 0.0  # seconds after the run's start
    body: Mapping[str, Any] = field(default_factory=dict)  # further fields, which override the wishes


@dataclass(slots=True, eq=False)
class Shot:
    """The result of one request. Times are seconds since the run started."""

    at: float
    input_len: int
    output_len: int
    sent: float
    done: float = 0.0
    times: list[float] = field(default_factory=list)  # of each chunk with tokens
    sizes: list[int] | None = None  # tokens in each of them; None: unknown
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)  # log-probability of a token less that of the best other one
    text: str = ""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None  # from the server's usage
    finish_reason: str | None = None
    streamed: bool = True
    error: str | None = None
    broken: bool = False  # the connection failed, and not the request

    @property
    def ok(self) -> bool:
        return self.error is None

    @property
    def tokens(self) -> int:
        """Output tokens: from usage, else from token ids, else one for each chunk."""
        if self.output_tokens is not None:
            return self.output_tokens
        return sum(self.sizes) if self.sizes is not None else len(self.times)

    @property
    def ttft(self) -> float | None:
        """Seconds to the first token; None without streaming."""
        return self.times[0] - self.sent if self.times and self.streamed else None

    @property
    def gaps(self) -> list[float]:
        """Seconds between the chunks with tokens."""
        return [b - a for a, b in itertools.pairwise(self.times)] if self.streamed else []

    @property
    def decode_rate(self) -> float | None:
        """Tokens per second after the first chunk."""
        if not self.streamed or len(self.times) < 2 or self.times[-1] <= self.times[0]:
            return None
        first = self.sizes[0] if self.sizes else 1
        return (self.tokens - first) / (self.times[-1] - self.times[0])

    def record(self) -> dict[str, Any]:
        """Return everything but the text and the ids, for JSON, with times rounded to microseconds."""
        return {
            "at": round(self.at, 6),
            "sent": round(self.sent, 6),
            "done": round(self.done, 6),
            "times": [round(t, 6) for t in self.times],
            "tokens_of_chunks": self.sizes,
            "input_len": self.input_len,
            "output_len": self.output_len,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "finish_reason": self.finish_reason,
            "error": self.error,
        }


@dataclass(slots=True, eq=False)
class Target:
    """A server, and what `connect` has found out about it."""

    http: httpx.AsyncClient
    url: str
    model: str
    api: str  # completions | chat
    version: dict[str, Any]  # from /version; empty for most servers
    max_len: int | None  # tokens of prompt plus output, if the server reports it
    takes_ids: bool = True  # prompts as token ids
    wishes: dict[str, Any] = field(default_factory=lambda: dict(WISHES))
    words_per_token: float = 1.0  # of text prompts
    notes: list[str] = field(default_factory=list)

    @property
    def is_pequod(self) -> bool:
        return "weights_hash" in self.version

    @property
    def name(self) -> str:
        """A name for reports."""
        number = self.version.get("version", "")
        return f"Pequod {number}" if self.is_pequod else f"{self.url} {number}".strip()

    async def is_alive(self) -> bool:
        """Return whether the server still responds."""
        import httpx

        try:
            return (await self.http.get("/v1/models", timeout=CONNECT_S)).status_code < 500
        except httpx.HTTPError:
            return False

    def body(self, ask: Ask) -> dict[str, Any]:
        """Return the body of a request."""
        body = {"model": self.model, "max_tokens": ask.output_len, "stream": True, **self.wishes}
        if "min_tokens" in body:
            body["min_tokens"] = ask.output_len
        if self.api == "chat" and "messages" not in ask.body:
            body["messages"] = [{"role": "user", "content": ask.prompt}]
        elif self.api == "completions":
            body["prompt"] = ask.prompt
        body |= ask.body
        return {key: value for key, value in body.items() if value is not None}

    async def send(self, ask: Ask, began: float, on_tokens: Any = None) -> Shot:
        """Send a request and read its response. Errors are in the Shot. `on_tokens()` is called for each chunk."""
        import httpx

        shot = Shot(ask.at, ask.input_len, ask.output_len, sent=time.perf_counter() - began)
        path = "/v1/chat/completions" if "messages" in (body := self.body(ask)) else "/v1/completions"
        try:
            async with self.http.stream("POST", path, json=body) as response:
                if response.status_code != 200:
                    shot.error = refusal(response.status_code, await response.aread())
                elif response.headers.get("content-type", "").startswith("text/event-stream"):
                    await self._read(response, shot, began, on_tokens)
                else:
                    shot.streamed = False
                    _take(shot, json.loads(await response.aread()), time.perf_counter() - began)
        except httpx.HTTPError as error:
            shot.error, shot.broken = f"the connection failed: {type(error).__name__}", True
        except ValueError:
            shot.error = "the server sent invalid JSON"
        shot.done = time.perf_counter() - began
        if shot.ok and not shot.times and shot.finish_reason is None:
            shot.error = "the response had neither a token nor a finish reason"
        return shot

    async def _read(self, response: httpx.Response, shot: Shot, began: float, on_tokens: Any) -> None:
        events = EventStream(response)
        async for arrived, event in events:
            if _take(shot, event, arrived - began) and on_tokens is not None:
                on_tokens()
        if not events.is_complete and shot.finish_reason is None and shot.error is None:
            shot.error, shot.broken = "the stream ended without a last event", True


def _take(shot: Shot, event: Any, now: float) -> bool:
    """Add an event, or a whole response; returns whether it had tokens."""
    if not isinstance(event, dict):
        raise ValueError(event)
    if error := event.get("error"):
        shot.error = str(error.get("message", error) if isinstance(error, dict) else error)[:400]
        return False
    if usage := event.get("usage"):
        shot.prompt_tokens, shot.output_tokens = usage.get("prompt_tokens"), usage.get("completion_tokens")
        shot.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    has_tokens = False
    for choice in event.get("choices") or ():
        source = choice.get("delta") or choice.get("message") or choice
        text = "".join(source.get(key) or "" for key in ("reasoning_content", "reasoning", "content", "text"))
        ids = choice.get("token_ids") or []
        shot.text += text
        shot.token_ids += ids
        _take_logprobs(shot, choice.get("logprobs"))
        shot.finish_reason = choice.get("finish_reason") or shot.finish_reason
        if text or ids:
            has_tokens = True
            if ids and (shot.sizes is not None or not shot.times):
                shot.sizes = [*(shot.sizes or []), len(ids)]
            elif not ids:
                shot.sizes = None
            shot.times.append(now)
    return has_tokens


def _take_logprobs(shot: Shot, found: Any) -> None:
    """Add the log-probabilities of completions (columns) or of a chat (one object per token)."""
    if not isinstance(found, dict):
        return
    if "token_logprobs" in found:
        tops = [sorted((top or {}).values(), reverse=True) for top in found.get("top_logprobs") or []]
        own = found["token_logprobs"]
    else:
        entries = found.get("content") or []
        own = [entry["logprob"] for entry in entries]
        tops = [sorted((top["logprob"] for top in entry.get("top_logprobs") or ()), reverse=True) for entry in entries]
    shot.logprobs += own
    shot.margins += [top[0] - top[1] for top in tops if len(top) > 1]


def refusal(status: int, content: bytes) -> str:
    """Return an error response as a sentence, with the server's message."""
    message = error_field(parsed(content), "message")
    return f"the server responded with status {status}" + (f": {message[:300]}" if message else "")


async def connect(url: str, model: str | None, key: str | None, api: str = "completions", ask: bool = True) -> Target:
    """Return the server at a URL; with `ask`, small requests find out what it supports.

    Raises Failure if no server responds, and UsageError for an invalid URL.
    """
    import httpx

    url = base_url(url)
    # No connection is reused: a server may close an idle one at that moment.
    http = open_client(url, key, SILENCE_S, httpx.Limits(max_connections=None, max_keepalive_connections=0))
    try:
        models = await _get(http, "/v1/models")
        cards: list[dict[str, Any]] = models.get("data") or []
        card = next((card for card in cards if not model or card.get("id") == model), {})
        name = model or card.get("id")
        if not name:
            raise Failure(f"{url} does not list its models; name one with --model")
        version = await _get(http, "/version", needed=False)
        target = Target(http, url, name, api, version, card.get("max_model_len"))
        if ask:
            await probe(target)
    except BaseException:
        await http.aclose()
        raise
    return target


async def _get(http: httpx.AsyncClient, path: str, needed: bool = True) -> dict[str, Any]:
    import httpx

    try:
        response = await http.get(path, timeout=CONNECT_S)
        found = response.json() if response.status_code == 200 else None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise Failure(f"no server responds at {http.base_url} ({type(error).__name__})") from None
    except ValueError:
        found = None
    if needed and response.status_code in (401, 403):
        raise Failure(f"{http.base_url} requires a key; pass it with --api-key")
    return found if isinstance(found, dict) else {}


async def probe(target: Target) -> None:
    """Find out by small requests what the server supports; other fields are noted, and not sent again."""
    first = await _works(target)
    if first is None:
        wishes, target.wishes = target.wishes, {}
        if await _works(target) is None:
            hint = "; try --api chat" if target.api == "completions" else ""
            raise Failure(f"{target.url} refuses a plain request: {(await _try(target)).error}{hint}")
        for wish, value in wishes.items():
            target.wishes[wish] = value
            if (await _try(target)).error:
                del target.wishes[wish]
                target.notes.append(MISSED[wish])
        first = await _try(target)
    if not first.token_ids and target.wishes.pop("return_token_ids", None):
        target.notes.append(MISSED["return_token_ids"])
    if not target.takes_ids:
        await _calibrate(target)
    if first.output_tokens is None:
        target.notes.append("the server sends no usage: each chunk counts as one token")
    if not first.streamed:
        target.notes.append("the server does not stream: only whole responses have times")


async def _works(target: Target) -> Shot | None:
    """Return the result for a prompt of token ids, else of text, or None if both are refused."""
    for takes_ids in (True, False) if target.api == "completions" else (False,):
        target.takes_ids = takes_ids
        shot = await _try(target)
        if shot.ok:
            return shot
    return None


async def _try(target: Target) -> Shot:
    prompt: str | list[int] = PROBE_IDS if target.takes_ids else " ".join(WORDS[: len(PROBE_IDS)])
    shot = await target.send(Ask(prompt, len(PROBE_IDS), PROBE_TOKENS), time.perf_counter())
    if shot.error and (shot.broken or not any(f"with status {code}" in shot.error for code in REFUSALS)):
        raise Failure(f"{target.url} cannot be measured: {shot.error}")
    return shot


async def _calibrate(target: Target) -> None:
    """Compute the words per token from the server's counts of two prompts, whose difference has no chat template."""
    counts = []
    for words in (1, 1 + PROBE_WORDS):
        shot = await target.send(Ask(" ".join(WORDS[:words]), words, PROBE_TOKENS), time.perf_counter())
        counts.append(shot.prompt_tokens)
    if counts[0] is None or counts[1] is None or counts[1] <= counts[0]:
        target.notes.append("prompts are text, and the server reports no token counts: lengths are in words")
        return
    target.words_per_token = PROBE_WORDS / (counts[1] - counts[0])
    target.notes.append("the server refuses token ids as a prompt: prompts are text of about the requested length")
