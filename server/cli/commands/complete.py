"""`pequod complete`: continue one prompt, in process or over HTTP."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from typing import TYPE_CHECKING

from . import Parser, UsageError, add_settings, settings_from, warn

if TYPE_CHECKING:
    from ..source import Answer, Options, Source


def add_sampling(parser: Parser, max_tokens: str) -> None:
    """The flags that say where an answer comes from and how it is drawn."""
    box = parser.add_argument_group("request")
    box.add_argument("--url", metavar="URL", help="ask this server instead of loading a model here")
    box.add_argument("--max-tokens", metavar="N", type=_at_least_one, default=None, help=max_tokens)
    box.add_argument(
        "--temperature",
        metavar="T",
        type=_temperature,
        default=None,
        help="0 is greedy (default: the model's own, or 1)",
    )
    box.add_argument("--ignore-eos", action="store_true", help="go on after the model's end token")


def options_from(arguments: argparse.Namespace, seed: int | None) -> Options:
    """The sampling options that the flags make."""
    from ..source import Options

    return Options(
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        seed=seed,
        ignore_eos=arguments.ignore_eos,
    )


def add_arguments(parser: Parser) -> None:
    parser.usage = "pequod complete [MODEL | --url URL] --prompt TEXT [flags]"
    box = parser.add_argument_group("prompt")
    box.add_argument("--prompt", metavar="TEXT", help="text to continue; - reads it from standard input")
    box.add_argument("--prompt-ids", metavar="1,2,3", type=_ids, help="token ids to continue, instead of text")
    add_sampling(parser, "most tokens to generate (default: 100)")
    box = parser.add_argument_group("output")
    box.add_argument("--show-stats", action="store_true", help="end with one line of figures")
    box.add_argument("--json", action="store_true", help="print one JSON object instead of the text")
    add_settings(parser, "model", "engine", extra=["api_key"])


def run(arguments: argparse.Namespace) -> int:
    """Print the continuation as it comes."""
    if (arguments.prompt is None) == (arguments.prompt_ids is None):
        raise UsageError("give either --prompt TEXT or --prompt-ids 1,2,3")
    loaded = settings_from(arguments)
    prompt = arguments.prompt_ids if arguments.prompt is None else arguments.prompt
    if prompt == "-":
        prompt = sys.stdin.read()
    from ..source import choose

    source = choose(loaded, arguments.url)
    return asyncio.run(_complete(arguments, source, prompt, options_from(arguments, loaded.settings.seed)))


async def _complete(arguments: argparse.Namespace, source: Source, prompt: str | list[int], options: Options) -> int:
    from ..source import Answer

    pieces = []
    try:
        await source.open()
        answer = Answer()
        if source.model == "builtin" and sys.stdout.isatty() and not arguments.json:
            warn("the built-in model was trained on chats alone and continues other text with nonsense: `pequod chat`")
        async for text in source.complete(prompt, options, answer):
            pieces.append(text)
            if not arguments.json:
                sys.stdout.write(text)
                sys.stdout.flush()
    except BaseException:
        if pieces and sys.stdout.isatty():
            print()  # what follows begins on a line of its own
        raise
    finally:
        await source.close()
    text = "".join(pieces)
    if arguments.json:
        told: dict[str, object] = {"model": source.model, "text": text, "finish_reason": answer.finish_reason}
        if answer.token_ids is not None:
            told["token_ids"] = answer.token_ids
        print(json.dumps(told | figures(answer, source), ensure_ascii=False))
        return 0
    if not text.endswith("\n"):
        print()
    if arguments.show_stats:
        print(" ".join(f"{name}={value}" for name, value in figures(answer, source).items()))
    return 0


def figures(answer: Answer, source: Source) -> dict[str, int | float | str]:
    """What --show-stats and --json tell; the rate is all tokens over the whole time, prompt included."""
    return {
        "prompt_tokens": answer.prompt_tokens,
        "generated_tokens": answer.generated_tokens,
        "elapsed_seconds": round(answer.elapsed, 4),
        "tokens_per_second": round(answer.tokens_per_second, 2),
        "ttft_seconds": round(answer.ttft, 4),
        "device": source.device,
        "dtype": source.dtype,
    }


def _at_least_one(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 2**31 - 1:
        raise argparse.ArgumentTypeError(f"{text[:64]} is not a whole number of at least 1")
    return int(text)


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 2:
        raise argparse.ArgumentTypeError(f"{text[:64]} is not a number from 0 to 2")
    return value


def _ids(text: str) -> list[int]:
    words = text.replace(",", " ").split()
    if not words or not all(word.isascii() and word.isdigit() and len(word) < 10 for word in words):
        raise argparse.ArgumentTypeError(f"{text[:64]} is not a list of token ids such as 1,2,3")
    return [int(word) for word in words]
