"""`pequod complete`: continues a prompt, with a model in a child process or over HTTP."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from typing import Any

from ...settings_sources import Loaded
from ..openai_client import Shot
from ..source import Source, opened
from . import Parser, UsageError, add_settings, chat_model, real, settings_from, warn, whole, write_text

DEFAULT_TOKENS = 100  # a model that continues a text may never end by itself


def add_sampling(parser: Parser, max_tokens: str) -> None:
    """Add the flags that choose a server and the sampling options; `max_tokens` is a help text."""
    box = parser.add_argument_group("request")
    box.add_argument("--url", metavar="URL", help="use the server at this URL instead of loading a model")
    box.add_argument("--max-tokens", metavar="N", type=whole(1), help=max_tokens)
    temperature = real("from 0 to 2", lambda value: 0 <= value <= 2)
    box.add_argument("--temperature", metavar="T", type=temperature, help="0 is greedy (default: the model's, or 1)")
    box.add_argument("--ignore-eos", action="store_true", help="continue after the model's end token")


def sampling(arguments: argparse.Namespace, loaded: Loaded) -> dict[str, Any]:
    """Return the sampling options of the user as fields of a request; what is absent has the model's default."""
    options = {
        "max_tokens": arguments.max_tokens,
        "temperature": arguments.temperature,
        "seed": loaded.settings.seed,
        "ignore_eos": arguments.ignore_eos or None,
    }
    return {name: value for name, value in options.items() if value is not None}


def add_arguments(parser: Parser) -> None:
    parser.usage = "pequod complete [MODEL | --url URL] --prompt TEXT [flags]"
    box = parser.add_argument_group("prompt")
    box.add_argument("--prompt", metavar="TEXT", help="text to continue; - reads it from standard input")
    box.add_argument("--prompt-ids", metavar="1,2,3", type=_ids, help="token ids to continue, instead of text")
    add_sampling(parser, f"maximum tokens to generate (default: {DEFAULT_TOKENS})")
    box = parser.add_argument_group("output")
    box.add_argument("--show-stats", action="store_true", help="print a line of figures after the text")
    box.add_argument("--json", action="store_true", help="print one JSON object instead of the text")
    add_settings(parser, "model", "engine", extra=["api_key", "api_key_file"])


def run(arguments: argparse.Namespace) -> int:
    if (arguments.prompt is None) == (arguments.prompt_ids is None):
        raise UsageError("give either --prompt TEXT or --prompt-ids 1,2,3")
    loaded = settings_from(arguments, default_model=chat_model)
    prompt = arguments.prompt_ids if arguments.prompt is None else arguments.prompt
    if prompt == "-":
        prompt = sys.stdin.read()
    return asyncio.run(_complete(arguments, loaded, {"max_tokens": DEFAULT_TOKENS, "prompt": prompt}))


async def _complete(arguments: argparse.Namespace, loaded: Loaded, body: dict[str, Any]) -> int:
    pieces: list[str] = []

    def show(text: str) -> None:
        pieces.append(text)
        if not arguments.json:
            write_text(text)

    async with opened(loaded, arguments.url) as source:
        if source.model == "builtin" and sys.stdout.isatty() and not arguments.json:
            warn(
                "the built-in model was trained on chats only and continues other text with nonsense: try `pequod chat`"
            )
        if not source.is_remote:
            body["return_token_ids"] = True
        try:
            shot = await source.stream(body | sampling(arguments, loaded), show)
        except BaseException:
            if pieces and sys.stdout.isatty():
                print()  # the error begins on a new line
            raise
    text = "".join(pieces)
    if arguments.json:
        result: dict[str, object] = {"model": source.model, "text": text, "finish_reason": shot.finish_reason}
        if not source.is_remote:
            result["token_ids"] = shot.token_ids
        print(json.dumps(result | figures(shot, source), ensure_ascii=False))
        return 0
    if not text.endswith("\n"):
        print()
    if arguments.show_stats:
        print(" ".join(f"{name}={value}" for name, value in figures(shot, source).items()))
    return 0


def figures(shot: Shot, source: Source) -> dict[str, int | float | str]:
    """Return the figures of --show-stats and --json; the rate includes the time of the prompt."""
    return {
        "prompt_tokens": shot.prompt_tokens or 0,
        "generated_tokens": shot.tokens,
        "elapsed_seconds": round(elapsed(shot), 4),
        "tokens_per_second": round(per_second(shot), 2),
        "ttft_seconds": round(shot.ttft or 0.0, 4),
        "device": source.device,
        "dtype": source.dtype,
    }


def elapsed(shot: Shot) -> float:
    """Return the seconds until the last token arrived."""
    return shot.times[-1] if shot.times else shot.done


def per_second(shot: Shot) -> float:
    """Return the tokens per second, including the time of the prompt."""
    return shot.tokens / elapsed(shot) if elapsed(shot) else 0.0


def _ids(text: str) -> list[int]:
    words = text.replace(",", " ").split()
    if not words or not all(word.isascii() and word.isdigit() and len(word) < 10 for word in words):
        raise argparse.ArgumentTypeError(f"{text[:64]} is not a list of token ids such as 1,2,3")
    return [int(word) for word in words]
