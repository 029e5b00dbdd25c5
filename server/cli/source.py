"""The source of the text of `chat` and `complete`: a model in a child process, or a server over HTTP."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from .commands import Failure, UsageError
from .openai_client import base_url, error_field, open_client, parsed

if TYPE_CHECKING:
    import httpx

    from ..settings import Settings
    from ..settings_sources import Loaded

COMPLETION_TOKENS = 100  # default for `complete`: a model that continues a text may never end by itself
SILENCE_S = 600.0  # a long prompt on a slow machine, after others in the queue, sends nothing for minutes


class TooLong(UsageError):
    """The prompt and its completion exceed the context length."""


@dataclass(frozen=True, slots=True)
class Options:
    """The sampling options of the user; None: the model's or the server's default."""

    max_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None
    ignore_eos: bool = False


@dataclass(slots=True, eq=False)
class Completion:
    """The figures of one completion, filled while it streams. Times are time.perf_counter()."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    token_ids: list[int] | None = None  # None: the server does not send them
    finish_reason: str | None = None
    began: float = field(default_factory=time.perf_counter)
    first: float | None = None
    last: float | None = None

    def record_arrival(self) -> None:
        """Record the current time as that of the last tokens, and of the first ones if there were none before."""
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


class Source(ABC):
    """Streams the text that continues a prompt or a conversation."""

    device = dtype = "unknown"
    can_chat = True  # False: the model has no chat template; of a server this is not known
    is_remote = True

    def __init__(self, model: str) -> None:
        self.model = model
        self._stack = AsyncExitStack()
        self._client: httpx.AsyncClient | None = None

    @abstractmethod
    async def open(self) -> None:
        """Load the model, or connect to the server."""

    async def close(self) -> None:
        """Stop the engine, or close the connections."""
        await self._stack.aclose()

    async def complete(
        self, prompt: str | Sequence[int], options: Options, completion: Completion
    ) -> AsyncIterator[str]:
        """Yield the text after a prompt as it is generated; fills `completion`."""
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": COMPLETION_TOKENS}
        if not self.is_remote:
            completion.token_ids = []
            body["return_token_ids"] = True
        async for choice in self._stream("/v1/completions", body, options, completion):
            if completion.token_ids is not None:
                completion.token_ids += choice.get("token_ids") or []
            yield choice.get("text") or ""

    async def chat(
        self, messages: Sequence[dict[str, str]], options: Options, completion: Completion
    ) -> AsyncIterator[str]:
        """Yield the assistant's next message as it is generated; fills `completion`."""
        async for choice in self._stream("/v1/chat/completions", {"messages": messages}, options, completion):
            yield (choice.get("delta") or {}).get("content") or ""

    async def _stream(
        self, path: str, body: dict[str, Any], options: Options, completion: Completion
    ) -> AsyncIterator[dict[str, Any]]:
        """Yield the choices of each event; usage and finish reason are stored in `completion`."""
        import httpx

        from ..http.sse import EventStream

        assert self._client is not None
        body |= {"model": self.model, "stream": True, "stream_options": {"include_usage": True}}
        for name in ("max_tokens", "temperature", "seed"):
            if (value := getattr(options, name)) is not None:
                body[name] = value
        if options.ignore_eos:
            body["ignore_eos"] = True
        num_events = 0
        try:
            async with self._client.stream("POST", path, json=body) as response:
                if response.status_code != 200:
                    raise _refusal(response.status_code, await response.aread(), is_remote=self.is_remote)
                async for _, event in EventStream(response):
                    if not isinstance(event, dict):
                        continue
                    if "error" in event:
                        raise Failure(error_field(event, "message") or "the server ended the response early")
                    if usage := event.get("usage"):
                        completion.prompt_tokens = usage.get("prompt_tokens", 0)
                        completion.generated_tokens = usage.get("completion_tokens", 0)
                    for choice in event.get("choices") or []:
                        if choice.get("text") or (choice.get("delta") or {}).get("content"):
                            completion.record_arrival()
                            num_events += 1
                        completion.finish_reason = choice.get("finish_reason") or completion.finish_reason
                        yield choice
        except httpx.HTTPError as error:
            raise Failure(f"the connection to {self._client.base_url} broke: {type(error).__name__}") from None
        except ValueError:
            raise Failure("the server sent an event that is not JSON") from None
        # A server without usage is taken to send one token per event.
        completion.generated_tokens = completion.generated_tokens or num_events


def choose(loaded: Loaded, url: str | None) -> Source:
    """Return the server at `url`, or a model loaded with these settings."""
    if url is None:
        return InProcess(loaded.settings)
    model = "" if loaded.sources["model"] == "default" else loaded.settings.model
    return OverHttp(url, model, loaded.settings.first_key)


class InProcess(Source):
    """A model in a child process of this one, without a server in between."""

    is_remote = False

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings.names[0])
        self.settings = settings

    async def open(self) -> None:
        from ..offline import running
        from .banner import loading

        progress = partial(loading, settings=self.settings)
        state, self._client = await self._stack.enter_async_context(running(self.settings, progress))
        model = await state.ready()
        self.can_chat = model.prompts.has_template
        self.device, self.dtype = model.info.device, model.info.dtype


class OverHttp(Source):
    """A server that speaks the OpenAI API. Without a model's name, its first model is used."""

    def __init__(self, url: str, model: str, key: str | None) -> None:
        super().__init__(model)
        self.url = base_url(url)
        self._key = key

    async def open(self) -> None:
        self._client = await self._stack.enter_async_context(open_client(self.url, self._key, SILENCE_S))
        models = await self._get("/v1/models")
        if not self.model:
            try:
                self.model = models["data"][0]["id"]
            except (KeyError, IndexError, TypeError):
                raise Failure(f"{self.url} does not list its models") from None
        try:
            version = await self._get("/version")
        except Failure:  # not a Pequod: device and dtype stay unknown
            return
        self.device, self.dtype = str(version.get("device", "unknown")), str(version.get("dtype", "unknown"))

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
                f"no server responds at {self.url} ({type(error).__name__}); is `pequod serve` running?"
            ) from None
        except ValueError:
            raise Failure(f"the response of {self.url}{path} is not JSON") from None
        return body if isinstance(body, dict) else {}


def _refusal(status: int, content: bytes, *, is_remote: bool = True) -> Failure | UsageError:
    """Return the error for a status: UsageError if the request is impossible, Failure if the server cannot serve it."""
    body = parsed(content)
    message = error_field(body, "message")
    prefix = [f"the server responded with status {status}"] if is_remote or message is None else []
    text = ": ".join([*prefix, *filter(None, [message])])
    if error_field(body, "code") == "context_length_exceeded":
        return TooLong(text)
    return UsageError(text) if status in (400, 404) else Failure(text)
