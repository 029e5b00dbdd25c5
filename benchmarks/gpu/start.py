"""The start of an engine with random weights: with no compiled Triton kernel on the disk, and with all of them.

    python -m benchmarks.gpu.start --shape 0.6B --device cuda

Prints one line of JSON per measurement.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from . import shapes


def once(shape: str, device: str) -> dict[str, float]:
    """Return the seconds of each part of a start in this process, imports left out."""
    from engine.config import EngineConfig
    from engine.kernels.triton_files import begin_to_hash

    begin_to_hash()  # as engine/worker.py does
    from engine.build import describe, load  # the process that only starts others needs no torch

    with tempfile.TemporaryDirectory() as folder:
        model = str(shapes.write(shape, Path(folder)))
        is_tiny = shape == "tiny"
        config = EngineConfig(
            model=model,
            load_format="dummy",
            device=device,
            max_len=256 if is_tiny else 4096,
            num_blocks=128 if is_tiny else 4096,
        )
        started = time.perf_counter()
        described = describe(config)
        seen = time.perf_counter()
        load(described)
    return {"describe_s": seen - started, "load_s": time.perf_counter() - seen}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(shapes.SHAPES), default="0.6B")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--once", action="store_true", help="start in this process")
    parser.add_argument("--seconds", type=float, default=60.0)
    args = parser.parse_args()
    if args.once:
        print(json.dumps(once(args.shape, args.device)))
        return
    end = time.perf_counter() + args.seconds
    command = [sys.executable, "-m", "benchmarks.gpu.start", "--once", "--shape", args.shape, "--device", args.device]
    with tempfile.TemporaryDirectory() as cache:
        env = {**os.environ, "TRITON_CACHE_DIR": cache}
        for name in ("no kernel is compiled", "all kernels are compiled"):
            began = time.perf_counter()
            left = max(1.0, end - began)
            done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True, timeout=left)
            found = {"process_s": time.perf_counter() - began, **json.loads(done.stdout.splitlines()[-1])}
            print(json.dumps({"measurement": name, **found}), flush=True)


if __name__ == "__main__":
    main()
