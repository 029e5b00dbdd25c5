"""Measure the limits of a model's steps on this machine:

    python -m engine.bench.roofline --json '{"model": "some/folder"}'

reads an EngineConfig as JSON, and prints a Roofline as one JSON object per line: one at once, and another for each line
on standard input. The bandwidth of a shared machine changes, so callers that compare two measurements request one
between them. On an error it prints an object with `error`, and exits with code 2.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys

import msgspec
from msgspec.structs import asdict

from .. import roofline
from ..build import describe, set_threads
from ..config import EngineConfig
from ..types import EngineError


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m engine.bench.roofline", description=__doc__)
    parser.add_argument("--json", required=True, metavar="CONFIG", help="an EngineConfig as a JSON object")
    given = parser.parse_args(arguments)
    try:
        with contextlib.redirect_stdout(sys.stderr):  # what libraries print must not be mixed with the JSON
            config = msgspec.json.decode(given.json, type=EngineConfig)
            described = describe(config, weights=False)
            set_threads(described)
    except (msgspec.DecodeError, EngineError) as error:
        print(json.dumps({"error": str(error)}))
        return 2
    spec, device = described.spec, described.device
    while True:
        limits = roofline.measure(spec, device, described.product.kernels, quick=False)
        if limits is None:
            print(json.dumps({"error": f"what a step of {spec.architecture} reads depends on its tokens"}))
            return 2
        line = {"dtype": str(spec.dtype).removeprefix("torch."), "device": str(device), **asdict(limits)}
        print(json.dumps(line), flush=True)
        if not sys.stdin.readline():
            return 0


if __name__ == "__main__":
    sys.exit(main())
