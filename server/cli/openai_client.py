"""The client of an OpenAI-compatible server that `pequod chat`, `complete` and `bench` share."""

from __future__ import annotations

import errno
import itertools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from ..http.sse import EventStream
from .commands import Failure, UsageError

if TYPE_CHECKING:
    import httpx

CONNECT_S = 10.0
# Chunks that come in one read are some 15 µs apart; tokens that are generated one after another are further apart.
TOGETHER_S = 1e-4


def base_url(url: str) -> str:
    """Return the server's URL without /v1, with which it may be given. Raises UsageError."""
    import httpx

    base = url.rstrip("/").removesuffix("/v1")
    try:
        parsed_url = httpx.URL(base)
        is_valid = parsed_url.scheme in ("http", "https") and parsed_url.host and (parsed_url.port or 0) < 1 << 16
    except httpx.InvalidURL:
        is_valid = False
    if not is_valid:
        raise UsageError(f"--url {url[:64]} is not a URL such as http://127.0.0.1:8000")
    return base


def open_client(
    url: str, key: str | None, silence_s: float, limits: httpx.Limits | None = None, *, trust_env: bool = True
) -> httpx.AsyncClient:
    """Return a client of the server at a base URL. A request fails after `silence_s` seconds without a byte.

    `trust_env`: use the proxies and the certificates that the environment names. Raises UsageError if these cannot be
    used.
    """
    import httpx

    try:
        return httpx.AsyncClient(
            base_url=url,
            # In bytes, because httpx encodes texts as ASCII; surrogates are bytes of a key that is not UTF-8.
            headers={b"Authorization": f"Bearer {key}".encode(errors="surrogateescape")} if key else {},
            timeout=httpx.Timeout(silence_s, connect=CONNECT_S),
            limits=limits or httpx.Limits(),
            trust_env=trust_env,
        )
    except OSError as error:
        raise UsageError(f"the certificates in SSL_CERT_FILE or SSL_CERT_DIR cannot be read: {error}") from None
    except (ImportError, ValueError, httpx.InvalidURL) as error:  # of another scheme, or not a URL
        reason = "SOCKS needs the package socksio" if isinstance(error, ImportError) else error
        raise UsageError(f"the proxy in HTTP_PROXY, HTTPS_PROXY or ALL_PROXY cannot be used: {reason}") from None


async def describe(http: httpx.AsyncClient, model: str | None) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Return the name of a server's model, its entry in /v1/models, and /version.

    Without a name it is the first model. Both objects are empty if the server does not have them. Raises Failure.
    """
    import httpx

    try:
        response = await http.get("/v1/models", timeout=CONNECT_S)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        if (reason := _distrust(error)) is not None:
            advice = "SSL_CERT_FILE can name a file with the certificates to trust"
            raise Failure(f"the certificate of {http.base_url} could not be verified{reason}; {advice}") from None
        raise Failure(f"no server responds at {http.base_url} ({type(error).__name__}); is it running?") from None
    if response.status_code in (401, 403):
        raise Failure(f"{http.base_url} requires a key; pass it with --api-key or --api-key-file")
    cards = _cards(response)
    card = next((card for card in cards if not model or card["id"] == model), {})
    name = model or card.get("id")
    if not name:
        reason = ""
        if response.status_code != 200:
            reason = f": {Refusal.of(response)}"
        elif parsed(response.content) is None:
            reason = ": its response is not JSON"
        # A server without this route may well serve a model; any other status is an error to be solved first.
        advice = "; name one with --model" if response.status_code in (200, 404) else ""
        raise Failure(f"{http.base_url} does not list its models{reason}{advice}")
    try:
        response = await http.get("/version", timeout=CONNECT_S)
    except httpx.HTTPError:  # not part of OpenAI's API; without it the device is unknown
        return name, card, {}
    version = parsed(response.content) if response.status_code == 200 else None
    return name, card, version if isinstance(version, dict) else {}


def _distrust(error: BaseException) -> str | None:
    """Return why a server's certificate was rejected, with a colon before it; None if the error is another one."""
    import ssl

    for cause in _causes(error):
        if isinstance(cause, ssl.SSLCertVerificationError):
            reason = getattr(cause, "verify_message", "")  # which only OpenSSL itself sets
            return f": {reason}" if reason else ""
    return None


def lacks_files(error: BaseException) -> bool:
    """Return whether a request failed because this process, or its system, has no more file descriptors."""
    codes = (errno.EMFILE, errno.ENFILE)
    return any(isinstance(cause, OSError) and cause.errno in codes for cause in _causes(error))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and those that led to it."""
    while error is not None:
        yield error
        if isinstance(error, BaseExceptionGroup):  # an attempt to connect for each address of a name
            for each in error.exceptions:
                yield from _causes(each)
        error = error.__cause__ or error.__context__


def _cards(response: httpx.Response) -> list[dict[str, Any]]:
    """Return the entries of /v1/models that have an id: none if the response is an error or has another form."""
    body = parsed(response.content) if response.status_code == 200 else None
    data = body.get("data") if isinstance(body, dict) else None
    cards = data if isinstance(data, list) else []
    return [card for card in cards if isinstance(card, dict) and isinstance(card.get("id"), str)]


class Refusal(NamedTuple):
    """An error response."""

    status: int
    message: str | None
    code: str | None  # in OpenAI's form

    @classmethod
    def of(cls, response: httpx.Response) -> Refusal:
        """Return the error of a response whose body has been read."""
        body = parsed(response.content)
        return cls(response.status_code, error_field(body, "message"), error_field(body, "code"))

    def __str__(self) -> str:
        return f"the server responded with status {self.status}" + (f": {self.message}" if self.message else "")


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
    refusal: Refusal | None = None  # with `error`, if the server has refused the request
    broken: bool = False  # the connection failed, and not the request

    @property
    def ok(self) -> bool:
        return self.error is None

    @property
    def tokens(self) -> int:
        """Output tokens: from usage, else from token ids, else one for each chunk. A usage of 0 is none."""
        if self.output_tokens:
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
        """Tokens per second after those that arrived first; None if all arrived together.

        Chunks of unknown sizes count as equally large.
        """
        first = next((count for count, gap in enumerate(self.gaps, 1) if gap >= TOGETHER_S), None)
        if first is None:
            return None
        if self.sizes is not None:
            later: float = self.tokens - sum(self.sizes[:first])
        else:
            later = self.tokens * (1 - first / len(self.times))
        return later / (self.times[-1] - self.times[0]) if later > 0 else None

    @property
    def time_per_token(self) -> float | None:
        """Seconds per token after those that arrived first; None if all arrived together."""
        rate = self.decode_rate
        return None if rate is None else 1 / rate

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


async def send(
    http: httpx.AsyncClient,
    body: dict[str, Any],
    shot: Shot,
    began: float,
    on_text: Callable[[str], None] = lambda text: None,
) -> None:
    """Send a request for a completion or a chat, and fill the Shot; errors are in it.

    `on_text` is called with each piece of the text as it arrives, without reasoning.
    """
    import httpx

    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    try:
        async with http.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                await response.aread()
                shot.refusal = Refusal.of(response)
                shot.error = str(shot.refusal)
            elif response.headers.get("content-type", "text/event-stream").startswith("text/event-stream"):
                events = EventStream(response)
                async for arrived, event in events:
                    _add(shot, event, arrived - began, on_text)
                if not events.is_complete and shot.finish_reason is None and shot.error is None:
                    shot.error, shot.broken = "the stream ended without a last event", True
            else:
                shot.streamed = False
                _add(shot, json.loads(await response.aread()), time.perf_counter() - began, on_text)
    except httpx.HTTPError as error:
        if lacks_files(error):
            shot.error = "no file descriptor was left for the connection; `ulimit -n` raises the limit"
        else:
            shot.error, shot.broken = f"the connection failed: {type(error).__name__}", True
    except Malformed:
        shot.error = "the server sent a response of an unexpected form"
    except ValueError:
        shot.error = "the server sent invalid JSON"
    shot.done = time.perf_counter() - began
    if shot.ok and not shot.times and shot.finish_reason is None:
        shot.error = "the response had neither a token nor a finish reason"


class Malformed(Exception):
    """A response has another form than OpenAI's."""


def _add(shot: Shot, event: Any, now: float, on_text: Callable[[str], None]) -> None:
    """Add an event, or a whole response. Raises Malformed."""
    try:
        text = _read(shot, event, now)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise Malformed from error
    if text:
        on_text(text)


def _read(shot: Shot, event: Any, now: float) -> str:
    """Add an event, and return its text without reasoning. Any error of Python's may come of another form."""
    if event.get("error"):
        shot.error = error_field(event, "message") or "the server ended the response early"
        return ""
    if isinstance(usage := event.get("usage"), dict):
        shot.prompt_tokens = _count(usage.get("prompt_tokens"))
        shot.output_tokens = _count(usage.get("completion_tokens"))
        details = usage.get("prompt_tokens_details")
        shot.cached_tokens = _count(details.get("cached_tokens")) if isinstance(details, dict) else None
    texts = ""
    for choice in event.get("choices") or ():
        source = choice.get("delta") or choice.get("message") or choice
        thought, text = (
            "".join(_text(source.get(key)) for key in keys)
            for keys in (("reasoning_content", "reasoning"), ("content", "text"))
        )
        ids = choice.get("token_ids") or []
        shot.text += thought + text
        shot.token_ids += ids
        _add_logprobs(shot, choice.get("logprobs"))
        shot.finish_reason = choice.get("finish_reason") or shot.finish_reason
        if thought or text or ids:
            if ids and (shot.sizes is not None or not shot.times):
                shot.sizes = [*(shot.sizes or []), len(ids)]
            elif not ids:
                shot.sizes = None
            shot.times.append(now)
        texts += text
    return texts


def _count(value: Any) -> int | None:
    """Return a number of tokens, or None if the value is none."""
    return value if isinstance(value, int) and value >= 0 else None


def _text(value: Any) -> str:
    """Return a text, which some servers send as a list of parts."""
    if isinstance(value, list):
        return "".join(_text(part.get("text")) for part in value)
    if not isinstance(value, str | None):
        raise TypeError(value)
    return value or ""


def _add_logprobs(shot: Shot, found: Any) -> None:
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
    shot.logprobs += map(float, own)
    shot.margins += [top[0] - top[1] for top in tops if len(top) > 1]


def error_field(body: object, name: str) -> str | None:
    """Return `message` or `code` of an error in OpenAI's form; a message is also found in other servers' forms."""
    if not isinstance(body, dict):
        return None
    error = body.get("error", body.get("detail", body.get("message")) if name == "message" else None)
    value = error.get(name) if isinstance(error, dict) else error if name == "message" else None
    return None if value is None else str(value)


def parsed(content: bytes) -> Any:
    """Return a body parsed as JSON, or None if it is not JSON."""
    try:
        return json.loads(content)
    except ValueError:
        return None
