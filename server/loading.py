"""Loading: the engine's model, and beside it what turns text into tokens and back."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass

from engine import Engine, EngineError, EngineInfo, ModelError

from .http.errors import place
from .parsers import Formats, detect
from .settings import Settings
from .tokenization.encoder import Prompts
from .tokenization.generation_defaults import read_defaults
from .tokenization.generic_tools import FORMAT as GENERIC
from .tokenization.generic_tools import renders_tools
from .tokenization.tokenizer import Tokenizer

log = logging.getLogger("pequod.server")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """What a request needs of the model; exists once generation works."""

    info: EngineInfo
    tokenizer: Tokenizer
    prompts: Prompts
    formats: Formats  # how the model writes calls and reasoning
    default_sampling: dict[str, float | int]
    fingerprint: str


@dataclass(frozen=True, slots=True)
class TextFiles:
    """What was made of a model's small files, and the commit that they are of."""

    revision: str | None
    tokenizer: Tokenizer
    prompts: Prompts
    defaults: dict[str, float | int]


async def load(settings: Settings, engine: Engine, version: str) -> LoadedModel:
    """Wait for the engine, and meanwhile read the text files; raises the first EngineError, which ends both."""
    try:
        async with asyncio.TaskGroup() as group:
            reading = group.create_task(_read_text_files(settings, settings.revision))
            starting = group.create_task(engine.ready())
        info, files = starting.result(), reading.result()
        if info.revision not in (None, files.revision):
            # A branch of the hub moved between our look and the engine's: take the text files of its commit.
            files.prompts.close()
            files = await _read_text_files(settings, info.revision)
    except Exception as raised:
        errors = list(_flat(raised))
        bug = next((error for error in errors if not isinstance(error, EngineError)), None)
        if bug is not None:
            log.error("%s at %s", type(bug).__name__, place(bug))
        # Whatever it was, the server will never answer: say so and end, rather than stay "loading" for ever.
        unknown = ModelError(f"the model could not be loaded: {type(bug).__name__}")
        raise next((error for error in errors if isinstance(error, EngineError)), unknown) from None
    files.prompts.max_len = info.max_len
    return LoadedModel(
        info,
        files.tokenizer,
        files.prompts,
        formats_of(settings, files.prompts.template_source),
        files.defaults,
        fingerprint(info, version),
    )


async def _read_text_files(settings: Settings, revision: str | None) -> TextFiles:
    def read() -> TextFiles:
        from engine import fetch  # with the hub's client only where a model is not a folder

        folder = fetch(settings.model, revision, weights=False)
        defaults = read_defaults(settings.generation_config, folder.path)
        tokenizer = Tokenizer(folder.path)
        prompts = Prompts.load(tokenizer, settings.chat_template)
        prompts.start()
        return TextFiles(folder.revision, tokenizer, prompts, defaults)

    return await asyncio.to_thread(read)


def formats_of(settings: Settings, template: str) -> Formats:
    """The model's formats, as its chat template shows them or as the settings say."""
    seen = detect(template)
    if not renders_tools(template):
        seen = seen._replace(tools=GENERIC)
    chosen = {"tools": settings.tool_call_parser, "reasoning": settings.reasoning_parser}
    own = {kind: None if name == "none" else name for kind, name in chosen.items() if name != "auto"}
    return seen._replace(**own)


def fingerprint(info: EngineInfo, version: str) -> str:
    """Hash of what decides the answers: weights, version, dtypes, backend."""
    kinds = (info.dtype, info.quantization, info.kv_dtype, info.implementation, info.attention)
    parts = (info.weights_hash, version, *kinds)
    return "fp_" + hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def _flat(error: Exception) -> Iterator[Exception]:
    """The error, or the errors of a group, however deep."""
    if isinstance(error, ExceptionGroup):
        for each in error.exceptions:
            yield from _flat(each)
    else:
        yield error
