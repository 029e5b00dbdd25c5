"""Measures Pequod on a GPU and writes one table.

    python3 -m benchmarks.gpu --seconds 540 --out results

Needs torch, Triton, numpy and msgspec, no model and no network. Each part runs in a process of its own, in the time
that is left. Results are written as they come, so a part that fails or is cut off costs only itself.
`--device cpu --tiny` tries the program without a GPU; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

Result = dict[str, Any]


def facts(device: str) -> Result:
    """Return what the results depend on."""
    import torch

    found: Result = {"python": platform.python_version(), "torch": torch.__version__, "device": device}
    for name in ("triton", "numpy", "msgspec"):
        found[name] = metadata.version(name) if importlib.util.find_spec(name) else None
    if device.startswith("cuda"):
        properties = torch.cuda.get_device_properties(torch.device(device))
        found["device"] = properties.name
        found["memory_gb"] = round(properties.total_memory / 1e9, 1)
        found["multiprocessors"] = properties.multi_processor_count
        found["capability"] = f"{properties.major}.{properties.minor}"
        found["cuda"] = torch.version.cuda
    else:
        found["device"] = platform.processor() or platform.machine()
    return found


def parts(device: str, is_tiny: bool) -> list[tuple[str, float, list[str]]]:
    """Return (name, most seconds, arguments of `python -m`), the most wanted first."""
    if is_tiny:
        most = 300.0  # a slow and busy computer needs no more: this ends a part that hangs
        return [
            ("kernels", most, ["benchmarks.gpu.kernels", "--tiny"]),
            ("layers", most, ["benchmarks.gpu.layers", "--tiny"]),
            ("sampling", most, ["benchmarks.gpu.sampling", "--tiny"]),
            ("quantized", most, ["benchmarks.gpu.quantized", "--tiny"]),
            ("tiny", most, ["benchmarks.gpu.engine", "--shape", "tiny", "--async-scheduling"]),
            ("tiny mixture", most, ["benchmarks.gpu.engine", "--shape", "tiny mixture"]),
            ("start", most, ["benchmarks.gpu.start", "--shape", "tiny"]),
            ("invariance", most, ["benchmarks.gpu.invariance", "--shape", "tiny"]),
            ("tiny, torch's attention", most, ["benchmarks.gpu.engine", "--shape", "tiny", "--attention", "reference"]),
        ]
    return [
        ("kernels", 60, ["benchmarks.gpu.kernels"]),
        ("layers", 30, ["benchmarks.gpu.layers"]),
        ("sampling", 40, ["benchmarks.gpu.sampling"]),
        ("0.6B", 80, ["benchmarks.gpu.engine", "--shape", "0.6B"]),
        ("8B", 90, ["benchmarks.gpu.engine", "--shape", "8B"]),
        ("8B, fp8", 60, ["benchmarks.gpu.engine", "--shape", "8B", "--quantization", "fp8"]),
        ("8B, int4", 60, ["benchmarks.gpu.engine", "--shape", "8B", "--quantization", "int4"]),
        ("30B-A3B", 80, ["benchmarks.gpu.engine", "--shape", "30B-A3B"]),
        ("Qwen3.5-0.8B", 50, ["benchmarks.gpu.engine", "--shape", "Qwen3.5-0.8B"]),
        ("LFM2-1.2B", 50, ["benchmarks.gpu.engine", "--shape", "LFM2-1.2B"]),
        ("Granite-4.0-H-1B", 50, ["benchmarks.gpu.engine", "--shape", "Granite-4.0-H-1B"]),
        ("0.6B, torch's attention", 50, ["benchmarks.gpu.engine", "--shape", "0.6B", "--attention", "reference"]),
        ("invariance", 60, ["benchmarks.gpu.invariance", "--shape", "0.6B"]),
        ("start", 60, ["benchmarks.gpu.start", "--shape", "0.6B"]),
        ("quantized", 60, ["benchmarks.gpu.quantized"]),
        ("8B, int8", 60, ["benchmarks.gpu.engine", "--shape", "8B", "--quantization", "int8"]),
        ("0.6B, without graphs", 60, ["benchmarks.gpu.engine", "--shape", "0.6B", "--enforce-eager"]),
        ("8B, without graphs", 70, ["benchmarks.gpu.engine", "--shape", "8B", "--enforce-eager"]),
        ("0.6B, one step at a time", 60, ["benchmarks.gpu.engine", "--shape", "0.6B", "--no-async-scheduling"]),
        ("8B, torch's attention", 70, ["benchmarks.gpu.engine", "--shape", "8B", "--attention", "reference"]),
    ]


def run(command: list[str], seconds: float) -> Iterator[Result]:
    """Yield the results of a part as it prints them, and its failure as the last one."""
    # It stops by itself before; this is for one that hangs.
    process = subprocess.Popen(
        [sys.executable, "-m", *command, "--seconds", f"{max(1.0, seconds - 10):.0f}"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    assert process.stdout is not None and process.stderr is not None
    errors: list[str] = []
    reader = threading.Thread(target=lambda: errors.extend(process.stderr or ()), daemon=True)
    reader.start()
    try:
        for line in process.stdout:
            if line.startswith("{"):  # libraries print, too
                yield json.loads(line)
    finally:
        timer.cancel()
        code = process.wait()
        reader.join()
    if code:
        reason = f"was stopped after {seconds:.0f} s" if code < 0 else "".join(errors[-20:]).strip()
        yield {"measurement": "failure", "error": reason}


def table(results: list[Result], found: Result) -> str:
    """Return the results as Markdown."""
    lines = [f"# {found['device']}", "", ", ".join(f"{name} {value}" for name, value in found.items()), ""]
    lines += ["| part | measurement | result |", "|---|---|---|"]
    for result in results:
        rest = {name: value for name, value in result.items() if name not in ("part", "measurement")}
        lines.append(f"| {result['part']} | {result['measurement']} | {shown(rest)} |")
    return "\n".join([*lines, ""])


def shown(value: Any) -> str:
    """Return a result in one line, with three digits."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {shown(each)}" for name, each in value.items())
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return str(value).replace("\n", " ").replace("|", "/")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=540.0, help="of all parts together")
    parser.add_argument("--out", type=Path, required=True, help="folder for results.json and table.md")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try the program")
    args = parser.parse_args()
    end = time.perf_counter() + args.seconds
    args.out.mkdir(parents=True, exist_ok=True)
    found, results = facts(args.device), list[Result]()

    def add(part: str, result: Result) -> None:
        results.append({"part": part, **result})
        print(f"{part}: {shown(result)}", flush=True)
        (args.out / "results.json").write_text(json.dumps({"facts": found, "results": results}, indent=1) + "\n")
        (args.out / "table.md").write_text(table(results, found))

    for part, most, command in parts(args.device, args.tiny):
        left = end - time.perf_counter()
        if left < min(most, 30) / 2:
            add(part, {"measurement": "all", "skipped": "no time was left"})
            continue
        for result in run([*command, "--device", args.device], min(most, left)):
            add(part, result)
    return int(any("error" in result for result in results))


if __name__ == "__main__":
    raise SystemExit(main())
