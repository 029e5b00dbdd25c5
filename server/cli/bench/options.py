"""Flags that the parts of `pequod bench` share."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..commands import Parser, add_settings, whole

URL_USAGE = "[MODEL | --url URL] [flags]"


def wholes(text: str) -> list[int]:
    """Parse a list such as 1,2,4; returns it sorted."""
    numbers = [whole(1)(word) for word in text.replace(",", " ").split()]
    if not numbers:
        raise argparse.ArgumentTypeError(f"{text[:64]!r} is not a list such as 1,2,4")
    return sorted(set(numbers))


def positive(text: str) -> float:
    """Parse a number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text[:64]} is not a number above 0")
    return value


def positives(text: str) -> list[float]:
    """Parse a list such as 0.5,1,2; returns it sorted."""
    numbers = [positive(word) for word in text.replace(",", " ").split()]
    if not numbers:
        raise argparse.ArgumentTypeError(f"{text[:64]!r} is not a list such as 0.5,1,2")
    return sorted(set(numbers))


def json_place(text: str) -> Path | None:
    """Parse the file of --json; None: standard output. The suffix keeps a MODEL after --json from being overwritten."""
    if text == "-":
        return None
    if not text.endswith(".json"):
        raise argparse.ArgumentTypeError(f"{text[:64]} does not end in .json; MODEL comes before --json")
    return Path(text)


def add_own(parser: Parser) -> None:
    """Add MODEL and the settings of the Pequod to start, for measurements that need one started here."""
    parser.set_defaults(url=None, api="completions")
    add_settings(parser, "model", "engine", "limits", extra=["api_key"])


def add_server(parser: Parser, api: str = "completions") -> None:
    """Add MODEL and the settings of the Pequod to start, or --url; `api` is the default."""
    box = parser.add_argument_group("server")
    box.add_argument(
        "--url",
        metavar="URL",
        help="measure the server at this URL, of any kind, instead of starting a Pequod with MODEL",
    )
    box.add_argument(
        "--api",
        choices=["completions", "chat"],
        default=api,
        help=f"API to use (default: {api}); completions accepts prompts as token ids",
    )
    add_settings(parser, "model", "engine", "limits", extra=["api_key"])


def add_repeats(parser: Parser, rounds: int) -> None:
    """Add the number of repetitions."""
    box = parser.add_argument_group("repetition")
    box.add_argument(
        "--rounds", metavar="N", type=whole(1), default=rounds, help=f"measured repetitions (default: {rounds})"
    )
    box.add_argument(
        "--warmup",
        metavar="N",
        type=whole(0),
        default=1,
        help="repetitions before them that are discarded (default: 1)",
    )


def add_lengths(parser: Parser, input_len: int, output_len: int) -> None:
    """Add the lengths of requests."""
    box = parser.add_argument_group("requests")
    box.add_argument(
        "--input-len",
        metavar="N",
        type=whole(1),
        default=input_len,
        help=f"tokens of each prompt (default: {input_len})",
    )
    box.add_argument(
        "--output-len",
        metavar="N",
        type=whole(1),
        default=output_len,
        help=f"tokens of each output (default: {output_len})",
    )


def add_output(parser: Parser, plots: bool = True) -> None:
    """Add where results are written."""
    box = parser.add_argument_group("output")
    box.add_argument(
        "--json",
        nargs="?",
        metavar="FILE.json",
        type=json_place,
        const=None,
        default=False,
        help="write all results, with the time of every token, as JSON to FILE; without FILE print them instead of the"
        " table",
    )
    if plots:
        box.add_argument(
            "--plot", metavar="DIR", type=Path, help="draw PNGs into DIR (needs `pip install pequod[bench]`)"
        )
