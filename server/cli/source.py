"""The source of the text of `chat` and `complete`: a model in a child process, or a server over HTTP."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from .commands import Failure, UsageError
from .openai_client import Shot, base_url, describe, open_client, send

if TYPE_CHECKING:
    import httpx

    from ..settings_sources import Loaded

SILENCE_S = 600.0  # a long prompt on a slow machine, after others in the queue, sends nothing for minutes


class TooLong(UsageError):
    """The prompt and its completion exceed the context length."""


@dataclass(frozen=True, slots=True)
class Source:
    """A model, and the client of its server."""

    http: httpx.AsyncClient
    model: str
    device: str
    dtype: str
    is_remote: bool = True
    can_chat: bool = True  # False: the model has no chat template; of a server this is not known

    async def stream(self, body: dict[str, Any], on_text: Callable[[str], None]) -> Shot:
        """Send a request, call `on_text` with each piece of the text, and return the figures.

        Raises UsageError if the request is impossible, and Failure if the server cannot serve it.
        """
        shot = Shot(at=0.0, input_len=0, output_len=0, sent=0.0)
        body |= {"model": self.model, "stream": True, "stream_options": {"include_usage": True}}
        try:
            json.dumps(body, ensure_ascii=False).encode()
        except UnicodeEncodeError:  # surrogates, which stand for bytes of the input that are not UTF-8
            raise UsageError("the text is not valid UTF-8") from None
        await send(self.http, body, shot, time.perf_counter(), on_text)
        if shot.ok:
            return shot
        refusal = shot.refusal
        if refusal is None:
            raise Failure(shot.error)
        text = str(refusal) if self.is_remote or refusal.message is None else refusal.message
        if refusal.code == "context_length_exceeded":
            raise TooLong(text)
        raise UsageError(text) if refusal.status in (400, 404) else Failure(text)


@asynccontextmanager
async def opened(loaded: Loaded, url: str | None) -> AsyncIterator[Source]:
    """Connect to the server at `url`, or load a model with these settings."""
    settings = loaded.settings
    if url is not None:
        model = None if loaded.sources["model"] == "default" else settings.model
        async with open_client(base_url(url), settings.first_key, SILENCE_S) as http:
            name, _, version = await describe(http, model)
            yield Source(http, name, str(version.get("device", "unknown")), str(version.get("dtype", "unknown")))
        return
    from ..offline import running
    from .banner import loading

    async with running(settings, partial(loading, settings=settings)) as (state, http):
        found = await state.ready()
        info = found.info
        yield Source(
            http, settings.names[0], info.device, info.dtype, is_remote=False, can_chat=found.prompts.has_template
        )
