"""What a model's steps could take at best on this machine: its rates measured, and bytes and operations by the shape.

    python -m engine.bench.roofline --json '{"model": "some/folder"}'

takes an EngineConfig as JSON and prints a Roofline as one JSON object per line: one at once, and another for every line
on standard input. A machine's bandwidth drifts when others share it, so that who compares two measurements asks in
between. Exit code 2 goes with an object that holds `error`.
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
        with contextlib.redirect_stdout(sys.stderr):  # libraries that print must not end up inside of the JSON
            config = msgspec.json.decode(given.json, type=EngineConfig)
            described = describe(config, weights=False)
            set_threads(described)
    except (msgspec.DecodeError, EngineError) as error:
        print(json.dumps({"error": str(error)}))
        return 2
    spec, device = described.spec, described.device
    while True:
        found = roofline.measure(spec, device, described.product.kernels, quick=False)
        if found is None:
            print(json.dumps({"error": f"what a step of {spec.architecture} reads depends on its tokens"}))
            return 2
        told = {"dtype": str(spec.dtype).removeprefix("torch."), "device": str(device), **asdict(found)}
        print(json.dumps(told), flush=True)
        if not sys.stdin.readline():
            return 0


if __name__ == "__main__":
    sys.exit(main())
