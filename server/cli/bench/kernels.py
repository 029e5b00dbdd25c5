"""`pequod bench kernels`: times our CPU kernels and torch's, in a child process that imports torch."""

from __future__ import annotations

import argparse

from ...child import run_python
from ..commands import Parser
from . import options

FLAGS = ("isa", "dtype", "rows", "threads", "seconds")


def add_arguments(parser: Parser) -> None:
    parser.usage = "pequod bench kernels [flags]"
    parser.description = (
        "Time our CPU kernels and torch's on the shapes of a model. Also reports the error relative to float64, and"
        " whether a row has the same bits alone and in a batch. The same as `python -m engine.bench.kernels`."
    )
    parser.add_argument("--isa", metavar="NAME", help="instruction set, as for `pequod serve --cpu-isa`")
    parser.add_argument("--dtype", metavar="TYPE", help="bfloat16 or float32 (default: bfloat16)")
    parser.add_argument("--rows", metavar="N,...", type=options.wholes, help="rows of the matrix products")
    parser.add_argument("--threads", metavar="N", type=options.whole(1), help="torch threads (default: torch's choice)")
    parser.add_argument("--seconds", metavar="S", type=options.positive, help="approximate seconds per measurement")
    parser.add_argument("--json", action="store_true", help="print one JSON object, and the table on stderr")


def run(arguments: argparse.Namespace) -> int:
    """Run the child with the flags that were given; its output and exit code are those of this command."""
    words = ["-m", "engine.bench.kernels"]
    for name in FLAGS:
        if (value := getattr(arguments, name)) is not None:
            words += [f"--{name}", ",".join(map(str, value)) if isinstance(value, list) else str(value)]
    return run_python(*words, *["--json"] * arguments.json, capture=False).returncode
