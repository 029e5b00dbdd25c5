"""Flags that the parts of `pequod bench` share."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from ..commands import Parser, add_settings, real, whole

Number = TypeVar("Number", int, float)
URL_USAGE = "[MODEL | --url URL] [flags]"


def wholes(text: str) -> list[int]:
    """Parse a list such as 1,2,4; returns it sorted."""
    return _sorted(text, whole(1), "1,2,4")


positive = real("above 0", lambda value: 0 < value < math.inf)


def positives(text: str) -> list[float]:
    """Parse a list such as 0.5,1,2; returns it sorted."""
    return _sorted(text, positive, "0.5,1,2")


def _sorted(text: str, parse: Callable[[str], Number], example: str) -> list[Number]:
    numbers = {parse(word) for word in text.replace(",", " ").split()}
    if not numbers:
        raise argparse.ArgumentTypeError(f"{text[:64]!r} is not a list such as {example}")
    return sorted(numbers)


def json_file(text: str) -> Path | None:
    """Parse the file of --json; None: standard output. The suffix keeps a MODEL after --json from being overwritten."""
    if text == "-":
        return None
    if not text.endswith(".json"):
        raise argparse.ArgumentTypeError(f"{text[:64]} does not end in .json; MODEL comes before --json")
    return Path(text)


def add_server(parser: Parser, api: str = "completions", *, takes_url: bool = True) -> None:
    """Add MODEL and the settings of the Pequod to start; with `takes_url` also --url, and --api with its default."""
    if takes_url:
        box = parser.add_argument_group("server")
        box.add_argument("--url", metavar="URL", help="measure this server, of any kind, instead of starting a Pequod")
        box.add_argument(
            "--api",
            choices=["completions", "chat"],
            default=api,
            help=f"API to use (default: {api}); completions accepts prompts as token ids",
        )
    else:
        parser.set_defaults(url=None, api=api)
    # Always the same model, so that figures of different machines can be compared.
    model = {"model": "same as the positional argument MODEL (default: builtin)"}
    add_settings(parser, "model", "engine", "limits", extra=["api_key", "api_key_file"], help_texts=model)


def add_number(box: argparse._ActionsContainer, flag: str, default: int, text: str, minimum: int = 1) -> None:
    box.add_argument(flag, metavar="N", type=whole(minimum), default=default, help=f"{text} (default: {default})")


def add_factor(box: argparse._ActionsContainer, flag: str, text: str) -> None:
    box.add_argument(flag, metavar="X", type=positive, default=1.0, help=f"{text} (default: 1)")


def add_numbers(box: argparse._ActionsContainer, flag: str, default: list[int], text: str) -> None:
    numbers = ",".join(map(str, default))
    box.add_argument(flag, metavar="N,...", type=wholes, default=default, help=f"{text} (default: {numbers})")


def add_measurement(parser: Parser, *, rounds: int, takes_url: bool = True, plots: bool = True) -> None:
    """Add the number of repetitions, the server and the output."""
    box = parser.add_argument_group("repetition")
    add_number(box, "--rounds", rounds, "measured repetitions")
    add_number(box, "--warmup", 1, "repetitions before them that are discarded", minimum=0)
    add_server(parser, takes_url=takes_url)
    add_output(parser, plots)


def chosen(arguments: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Return the values of these flags, for the description of the workload in a result."""
    return {name: getattr(arguments, name) for name in names}


def add_lengths(parser: Parser, input_len: int, output_len: int) -> None:
    box = parser.add_argument_group("requests")
    add_number(box, "--input-len", input_len, "tokens of each prompt")
    add_number(box, "--output-len", output_len, "tokens of each output")


def add_output(parser: Parser, plots: bool = True) -> None:
    box = parser.add_argument_group("output")
    box.add_argument(
        "--json",
        nargs="?",
        metavar="FILE.json",
        type=json_file,
        default=False,
        help="write the whole result as JSON to FILE; without FILE print it instead of the table",
    )
    if plots:
        box.add_argument("--plot", metavar="DIR", type=Path, help="draw PNGs into DIR (needs matplotlib)")
