"""Loads what requests need of the model: the engine, the tokenizer and the chat template."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from dataclasses import dataclass

from engine import Engine, EngineError, EngineInfo, ModelError

from .http.errors import traceback_line
from .parsers.formats import Formats, detect
from .settings import Settings
from .tokenization import reranker
from .tokenization.encoder import Prompts
from .tokenization.generation_defaults import read_defaults
from .tokenization.generic_tools import FORMAT as GENERIC
from .tokenization.generic_tools import renders_tools
from .tokenization.reranker import Reranker
from .tokenization.tokenizer import Tokenizer

log = logging.getLogger("pequod.server")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """What requests need of the model; exists once generation works."""

    info: EngineInfo
    tokenizer: Tokenizer
    prompts: Prompts
    formats: Formats  # of tool calls and reasoning
    default_sampling: dict[str, float | int]
    fingerprint: str
    reranker: Reranker | None = None  # None: the model is not a reranker


async def load(settings: Settings, engine: Engine, version: str) -> LoadedModel:
    """Wait for the engine and meanwhile read the text files. Raises the first EngineError."""
    reading = asyncio.to_thread(_read_text_files, settings, settings.revision)
    try:
        info, (revision, prompts, defaults) = await asyncio.gather(engine.ready(), reading)
        if info.revision not in (None, revision):
            # A branch on the hub moved between our download and the engine's: read the files of the engine's commit.
            prompts.close()
            _, prompts, defaults = await asyncio.to_thread(_read_text_files, settings, info.revision)
    except EngineError:
        raise
    except Exception as bug:
        # Any other error is final too: report it, instead of staying in the state "loading" forever.
        log.error("%s at %s", type(bug).__name__, traceback_line(bug))
        raise ModelError(f"the model could not be loaded: {type(bug).__name__}") from None
    prompts.max_len = info.max_len
    formats = formats_of(settings, prompts.template_source)
    scores = reranker.find(prompts.template_source, prompts.tokenizer)
    return LoadedModel(info, prompts.tokenizer, prompts, formats, defaults, fingerprint(info, version), scores)


def _read_text_files(settings: Settings, revision: str | None) -> tuple[str | None, Prompts, dict[str, float | int]]:
    """Read the tokenizer, the chat template and the sampling defaults; also returns the commit of these files."""
    from engine import fetch  # imports the hub's client only if the model is not a folder

    folder = fetch(settings.model, revision, weights=False, local_files_only=settings.local_files_only)
    own = folder.sampling if settings.generation_config == "auto" else {}
    defaults = {**own, **read_defaults(settings.generation_config, folder.path)}
    tokenizer = Tokenizer(folder.path)
    prompts = Prompts.load(tokenizer, settings.chat_template)
    if settings.chat_template is None and (template := reranker.own_template(settings.model, prompts.template_source)):
        prompts.close()
        prompts = Prompts(tokenizer, chat_template=template)
    prompts.start()
    return folder.revision, prompts, defaults


def formats_of(settings: Settings, template: str) -> Formats:
    """The model's formats, as set or, for `auto`, as detected from its chat template."""
    detected = detect(template)
    if not renders_tools(template):
        detected = detected._replace(tools=GENERIC)
    names = {"tools": settings.tool_call_parser, "reasoning": settings.reasoning_parser}
    return detected._replace(
        **{kind: None if name == "none" else name for kind, name in names.items() if name != "auto"}
    )


def fingerprint(info: EngineInfo, version: str) -> str:
    """Hash everything that affects completions: weights, version, dtypes, backend."""
    kinds = (info.dtype, info.quantization, info.kv_dtype, info.implementation, info.attention)
    parts = (info.weights_hash, version, *kinds)
    return "fp_" + hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]
