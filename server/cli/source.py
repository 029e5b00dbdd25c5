"""Where `chat` and `complete` get their text: an engine of their own, or a server over HTTP."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from .commands import Failure, UsageError
from .openai_client import base_url, error_field, open_client, parsed

if TYPE_CHECKING:
    import httpx

    from ..settings import Settings
    from ..settings_sources import Loaded

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
COMPLETION_TOKENS = 100  # of a continuation, where nothing else was asked for: it may never end by itself
SILENCE_S = 600.0  # a long prompt on a slow machine, behind a queue, sends nothing for minutes


NO_TEMPLATE = "this model has no chat template: use `pequod complete`, or give one by --chat-template"


class TooLong(UsageError):
    """The prompt and what shall follow it are more than the context holds."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the user asked for; None: the model's or the server's default."""

    max_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None
    ignore_eos: bool = False


@dataclass(slots=True, eq=False)
class Answer:
    """One answer's figures, filled while it streams. Times are time.perf_counter()."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    token_ids: list[int] | None = None  # None: the server does not tell
    finish_reason: str | None = None
    began: float = field(default_factory=time.perf_counter)
    first: float | None = None
    last: float | None = None

    def came(self) -> None:
        """Note that tokens have just arrived."""
        self.last = time.perf_counter()
        if self.first is None:
            self.first = self.last

    @property
    def elapsed(self) -> float:
        return (self.last or time.perf_counter()) - self.began

    @property
    def ttft(self) -> float:
        return (self.first or self.began) - self.began

    @property
    def tokens_per_second(self) -> float:
        return self.generated_tokens / self.elapsed if self.elapsed > 0 else 0.0


class Source(Protocol):
    """Text from a prompt or from messages."""

    model: str
    device: str
    dtype: str
    can_chat: bool  # False: there is no chat template; a server tells only when it is asked

    async def open(self) -> None:
        """Load, or connect."""

    def complete(self, prompt: str | Sequence[int], options: Options, answer: Answer) -> AsyncIterator[str]:
        """The text that continues a prompt, as it comes; fills `answer`."""

    def chat(self, messages: Sequence[dict[str, str]], options: Options, answer: Answer) -> AsyncIterator[str]:
        """The assistant's next message, as it comes; fills `answer`."""

    async def close(self) -> None:
        """Stop what `open` started."""


def choose(loaded: Loaded, url: str | None) -> Source:
    """The server at `url`, or an engine made by the settings."""
    if url is None:
        return InProcess(loaded.settings)
    model = None if loaded.sources["model"] == "default" else loaded.settings.model
    return OverHttp(url, model, list(loaded.settings.keys))


class InProcess:
    """An engine in a child process of this one; no server between."""

    device = dtype = "unknown"
    can_chat = False

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.model = settings.names[0]
        self._stack = AsyncExitStack()
        self._client: httpx.AsyncClient | None = None

    async def open(self) -> None:
        from ..offline import running
        from .banner import loading

        progress = partial(loading, settings=self.settings)
        state, self._client = await self._stack.enter_async_context(running(self.settings, progress))
        model = await state.ready()
        self.can_chat = model.prompts.has_template
        self.device, self.dtype = model.info.device, model.info.dtype

    async def close(self) -> None:
        await self._stack.aclose()

    async def complete(self, prompt: str | Sequence[int], options: Options, answer: Answer) -> AsyncIterator[str]:
        assert self._client is not None
        answer.token_ids, body = [], completion(prompt) | {"return_token_ids": True}
        async for choice in stream(self._client, COMPLETIONS, body, options, answer, is_remote=False):
            answer.token_ids += choice.get("token_ids") or []
            yield choice.get("text") or ""

    async def chat(self, messages: Sequence[dict[str, str]], options: Options, answer: Answer) -> AsyncIterator[str]:
        if not self.can_chat:
            raise UsageError(NO_TEMPLATE)
        assert self._client is not None
        body = {"messages": list(messages)}
        async for choice in stream(self._client, CHAT, body, options, answer, is_remote=False):
            yield (choice.get("delta") or {}).get("content") or ""


class OverHttp:
    """A server that speaks the OpenAI API."""

    device = dtype = "unknown"
    can_chat = True

    def __init__(self, url: str, model: str | None, keys: Sequence[str]) -> None:
        self.url = base_url(url)
        self.model = model or ""
        self._key = keys[0] if keys else None
        self._client: httpx.AsyncClient | None = None

    async def open(self) -> None:
        self._client = open_client(self.url, self._key, SILENCE_S)
        models = await self._get("/v1/models")
        if not self.model:
            try:
                self.model = models["data"][0]["id"]
            except (KeyError, IndexError, TypeError):
                raise Failure(f"{self.url} does not tell which models it serves") from None
        try:
            version = await self._get("/version")
        except Failure:  # another server: then device and dtype stay unknown
            return
        self.device, self.dtype = str(version.get("device", "unknown")), str(version.get("dtype", "unknown"))

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()

    async def _get(self, path: str) -> dict[str, Any]:
        import httpx

        assert self._client is not None
        try:
            response = await self._client.get(path)
            if response.status_code != 200:
                raise _refusal(response.status_code, response.content)
            body = response.json()
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise Failure(
                f"no server answers at {self.url} ({type(error).__name__}); is `pequod serve` running?"
            ) from None
        except ValueError:
            raise Failure(f"{self.url}{path} does not answer in JSON") from None
        return body if isinstance(body, dict) else {}

    async def complete(self, prompt: str | Sequence[int], options: Options, answer: Answer) -> AsyncIterator[str]:
        assert self._client is not None
        body = completion(prompt) | {"model": self.model}
        async for choice in stream(self._client, COMPLETIONS, body, options, answer):
            yield choice.get("text") or ""

    async def chat(self, messages: Sequence[dict[str, str]], options: Options, answer: Answer) -> AsyncIterator[str]:
        assert self._client is not None
        body = {"model": self.model, "messages": list(messages)}
        async for choice in stream(self._client, CHAT, body, options, answer):
            yield (choice.get("delta") or {}).get("content") or ""


def completion(prompt: str | Sequence[int]) -> dict[str, Any]:
    """The body of a request that continues a prompt."""
    return {"prompt": prompt if isinstance(prompt, str) else list(prompt), "max_tokens": COMPLETION_TOKENS}


async def stream(
    client: httpx.AsyncClient,
    path: str,
    body: dict[str, Any],
    options: Options,
    answer: Answer,
    *,
    is_remote: bool = True,
) -> AsyncIterator[dict[str, Any]]:
    """The first choice of every event; usage and finish reason go to `answer`."""
    import httpx

    from ..http.sse import EventStream

    body |= {"stream": True, "stream_options": {"include_usage": True}}
    asked = {"max_tokens": options.max_tokens, "temperature": options.temperature, "seed": options.seed}
    body |= {name: value for name, value in asked.items() if value is not None}
    if options.ignore_eos:
        body["ignore_eos"] = True
    num_events = 0
    try:
        async with client.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                raise _refusal(response.status_code, await response.aread(), is_remote=is_remote)
            async for _, event in EventStream(response):
                if not isinstance(event, dict):
                    continue
                if "error" in event:
                    raise Failure(error_field(event, "message") or "the server broke the answer off")
                if usage := event.get("usage"):
                    answer.prompt_tokens = usage.get("prompt_tokens", 0)
                    answer.generated_tokens = usage.get("completion_tokens", 0)
                for choice in event.get("choices") or []:
                    if choice.get("text") or (choice.get("delta") or {}).get("content"):
                        answer.came()
                        num_events += 1
                    answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
                    yield choice
    except httpx.HTTPError as error:
        raise Failure(f"the connection to {client.base_url} broke: {type(error).__name__}") from None
    except ValueError:
        raise Failure("the server sent an event that is not JSON") from None
    answer.generated_tokens = answer.generated_tokens or num_events  # a server without usage: one token an event


def _refusal(status: int, content: bytes, *, is_remote: bool = True) -> Failure | UsageError:
    """The server's refusal: what was asked is impossible, or the server cannot do it now."""
    body = parsed(content)
    message = error_field(body, "message")
    said = [f"the server answered {status}"] if is_remote or message is None else []
    text = ": ".join([*said, *filter(None, [message])])
    if error_field(body, "code") == "context_length_exceeded":
        return TooLong(text)
    return UsageError(text) if status in (400, 404) else Failure(text)
