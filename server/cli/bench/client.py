"""Sends requests to an OpenAI-compatible server, and records the time of everything that comes back.

All servers are measured by this code. `connect` finds out which fields a server does not support; the results say so.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..commands import Failure
from ..openai_client import CONNECT_S, Shot, base_url, describe, lacks_files, open_client, send

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
ERROR_CHARS = 340  # of an error in reports, which have one for each failed request
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
        number = self.version.get("version", "")
        return f"Pequod {number}" if self.is_pequod else f"{self.url} {number}".strip()

    async def is_alive(self) -> bool:
        """Return whether the server responds; without a file descriptor to find out, it counts as alive."""
        import httpx

        try:
            return (await self.http.get("/v1/models", timeout=CONNECT_S)).status_code < 500
        except httpx.HTTPError as error:
            return lacks_files(error)

    def body(self, ask: Ask) -> dict[str, Any]:
        body = {"model": self.model, "max_tokens": ask.output_len, "stream": True, **self.wishes}
        if "min_tokens" in body:
            body["min_tokens"] = ask.output_len
        if self.api == "chat" and "messages" not in ask.body:
            body["messages"] = [{"role": "user", "content": ask.prompt}]
        elif self.api == "completions":
            body["prompt"] = ask.prompt
        body |= ask.body
        return {key: value for key, value in body.items() if value is not None}

    async def send(self, ask: Ask, began: float) -> Shot:
        """Send a request and read its response. Errors are in the Shot."""
        shot = Shot(ask.at, ask.input_len, ask.output_len, sent=time.perf_counter() - began)
        await send(self.http, self.body(ask), shot, began)
        if shot.error is not None:
            shot.error = shot.error[:ERROR_CHARS]
        return shot


async def connect(
    url: str, model: str | None, key: str | None, api: str = "completions", ask: bool = True, *, is_own: bool = False
) -> Target:
    """Return the server at a URL; with `ask`, small requests find out what it supports.

    `is_own`: it was started by this process, and no proxy of the environment stands before it. Raises Failure if no
    server responds, and UsageError for an invalid URL.
    """
    import httpx

    url = base_url(url)
    # No connection is reused: a server may close an idle one at that moment.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    http = open_client(url, key, SILENCE_S, limits, trust_env=not is_own)
    try:
        name, card, version = await describe(http, model)
        target = Target(http, url, name, api, version, card.get("max_model_len"))
        if ask:
            await probe(target)
    except BaseException:
        await http.aclose()
        raise
    return target


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
    if not first.output_tokens:
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
    if shot.error and (shot.refusal is None or shot.refusal.status not in REFUSALS):
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
    reason = "a chat has no token ids" if target.api == "chat" else "the server refuses token ids as a prompt"
    target.notes.append(f"{reason}: prompts are text of about the requested length")
