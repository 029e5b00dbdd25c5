"""Where `chat` and `complete` get their text: an engine of their own, or a server over HTTP."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from .commands import Failure, UsageError
from .openai_client import EventStream, base_url, error_field, open_client, parsed

if TYPE_CHECKING:
    import httpx

    from engine import ProcessEngine, SamplingParams

    from ..settings import Settings
    from ..settings_sources import Loaded
    from ..tokenization.encoder import Prompts
    from ..tokenization.tokenizer import Tokenizer

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
        self._engine: ProcessEngine | None = None
        self._prompts: Prompts | None = None
        self._ids = 0

    async def open(self) -> None:
        from engine import ProcessEngine, fetch

        from ..tokenization.encoder import Prompts
        from ..tokenization.tokenizer import Tokenizer
        from .banner import loading

        settings = self.settings
        self._engine = ProcessEngine(settings.engine_config())
        await self._engine.start()
        async with loading(self._engine, settings):
            folder = await asyncio.to_thread(fetch, settings.model, settings.revision, weights=False)
            self._tokenizer: Tokenizer = await asyncio.to_thread(Tokenizer, folder.path)
            self._info = await self._engine.ready()
            if self._info.revision not in (None, folder.revision):  # a branch of the hub moved in between
                folder = await asyncio.to_thread(fetch, settings.model, self._info.revision, weights=False)
                self._tokenizer = await asyncio.to_thread(Tokenizer, folder.path)
            self._defaults = await asyncio.to_thread(self._read_defaults, folder.path)
        self._prompts = await asyncio.to_thread(Prompts.load, self._tokenizer, settings.chat_template)
        self._prompts.max_len = self._info.max_len
        self.can_chat = self._prompts.has_template
        self.device, self.dtype = self._info.device, self._info.dtype

    def _read_defaults(self, folder: Path) -> dict[str, Any]:
        from ..tokenization.generation_defaults import read_defaults

        defaults: dict[str, Any] = dict(read_defaults(self.settings.generation_config, folder))
        if "top_k" in defaults:
            defaults["top_k"] = max(0, defaults["top_k"])  # the API's -1 is off, too
        return defaults

    async def close(self) -> None:
        if self._prompts is not None:
            self._prompts.close()
        if self._engine is not None:
            await self._engine.close()

    async def complete(self, prompt: str | Sequence[int], options: Options, answer: Answer) -> AsyncIterator[str]:
        assert self._prompts is not None
        ids = await self._prompts.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not ids:
            raise UsageError("the prompt holds no token")
        wrong = next((token for token in ids if not 0 <= token < self._info.vocab_size), None)
        if wrong is not None:
            raise UsageError(f"token id {wrong} is not in the model's 0 to {self._info.vocab_size - 1}")
        async for text in self._generate(ids, self._params(len(ids), options, COMPLETION_TOKENS), answer):
            yield text

    async def chat(self, messages: Sequence[dict[str, str]], options: Options, answer: Answer) -> AsyncIterator[str]:
        from ..tokenization.encoder import TextTooLong
        from ..tokenization.renderer import TemplateError

        if not self.can_chat:
            raise UsageError(NO_TEMPLATE)
        try:
            assert self._prompts is not None
            ids = await self._prompts.chat(list(messages))
        except TemplateError as error:
            raise UsageError(str(error)) from None
        except TextTooLong as error:
            raise TooLong(str(error)) from None
        async for text in self._generate(ids, self._params(len(ids), options, None), answer):
            yield text

    async def _generate(self, ids: list[int], params: SamplingParams, answer: Answer) -> AsyncIterator[str]:
        from engine import EngineRequest

        from ..tokenization.detokenizer import TextStream

        assert self._engine is not None
        answer.prompt_tokens, answer.token_ids = len(ids), []
        self._ids += 1
        text = TextStream(self._tokenizer, context=ids)
        deltas = self._engine.generate(EngineRequest(id=self._ids, prompt_ids=tuple(ids), params=params))
        try:
            async for delta in deltas:
                if delta.token_ids:
                    answer.came()
                    answer.token_ids += delta.token_ids
                    answer.generated_tokens += len(delta.token_ids)
                shown = delta.token_ids
                if delta.finish_reason == "stop" and shown and shown[-1] in params.stop_ids:
                    shown = shown[:-1]
                yield text.feed(shown).text
                if delta.finish_reason is not None:
                    answer.finish_reason = delta.finish_reason
                if delta.error is not None:
                    raise Failure(delta.error)
            yield text.finish().text
        finally:
            self._engine.abort(self._ids)

    def _params(self, num_prompt: int, options: Options, most: int | None) -> SamplingParams:
        """Sampling parameters; `most` tokens where the user did not say, None: as many as fit."""
        from engine import SamplingParams

        room = self._info.max_len - num_prompt
        if room < 1 or (options.max_tokens or 1) > room:
            raise TooLong(
                f"{num_prompt} prompt tokens and {options.max_tokens or 1} to generate are more than the"
                f" {self._info.max_len} that fit; raise --max-model-len, or ask for less"
            )
        chosen = dict(self._defaults)
        if options.temperature is not None:
            chosen["temperature"] = options.temperature
        return SamplingParams(
            max_tokens=options.max_tokens or min(room, most or room),
            seed=secrets.randbits(64) if options.seed is None else options.seed,
            stop_ids=() if options.ignore_eos else self._tokenizer.eos_ids,
            **chosen,
        )


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
        body = {"prompt": prompt if isinstance(prompt, str) else list(prompt), "max_tokens": COMPLETION_TOKENS}
        async for choice in self._stream("/v1/completions", body, options, answer):
            yield choice.get("text") or ""

    async def chat(self, messages: Sequence[dict[str, str]], options: Options, answer: Answer) -> AsyncIterator[str]:
        async for choice in self._stream("/v1/chat/completions", {"messages": list(messages)}, options, answer):
            yield (choice.get("delta") or {}).get("content") or ""

    async def _stream(
        self, path: str, body: dict[str, Any], options: Options, answer: Answer
    ) -> AsyncIterator[dict[str, Any]]:
        """The first choice of every event; usage and finish reason go to `answer`."""
        import httpx

        assert self._client is not None
        body |= {"model": self.model, "stream": True, "stream_options": {"include_usage": True}}
        asked = {"max_tokens": options.max_tokens, "temperature": options.temperature, "seed": options.seed}
        body |= {name: value for name, value in asked.items() if value is not None}
        if options.ignore_eos:
            body["ignore_eos"] = True
        events = 0
        try:
            async with self._client.stream("POST", path, json=body) as response:
                if response.status_code != 200:
                    raise _refusal(response.status_code, await response.aread())
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
                            events += 1
                        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
                        yield choice
        except httpx.HTTPError as error:
            raise Failure(f"the connection to {self.url} broke: {type(error).__name__}") from None
        except ValueError:
            raise Failure("the server sent an event that is not JSON") from None
        answer.generated_tokens = answer.generated_tokens or events  # a server without usage: one token an event


def _refusal(status: int, content: bytes) -> Failure | UsageError:
    """The server's refusal: what was asked is impossible, or the server cannot do it now."""
    body = parsed(content)
    message = error_field(body, "message")
    text = f"the server answered {status}" + (f": {message}" if message else "")
    if error_field(body, "code") == "context_length_exceeded":
        return TooLong(text)
    return UsageError(text) if status in (400, 404) else Failure(text)
