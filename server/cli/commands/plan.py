"""`pequod plan`: the memory arithmetic of a model, from its config.json, before loading it."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from ...child import run_python
from ...settings import with_flags
from . import Failure, Parser, add_settings, settings_from, warn

if TYPE_CHECKING:
    from engine import EngineConfig

TIMEOUT_S = 300.0  # a hub model's config.json may have to be downloaded
LABELS = {
    "implementation": "code",
    "kv_dtype": "KV cache in",
    "num_params": "parameters",
    "weights_bytes": "weights",
    "activation_bytes": "activations, at most",
    "kv_bytes_per_token": "KV cache per token",
    "memory_total_bytes": "memory of the device",
    "memory_available_bytes": "of it free",
    "memory_bytes": "may be used",
    "kv_cache_bytes": "KV cache",
    "block_size": "tokens per block",
    "num_blocks": "blocks",
    "num_tokens": "tokens in the cache",
    "max_len": "longest request, tokens",
    "max_seqs": "requests in a step",
    "max_batched_tokens": "tokens in a step",
    "full_length_users": "users at full length",
}


def add_arguments(parser: Parser) -> None:
    parser.usage = "pequod plan [MODEL] [flags]"
    parser.description = "Show how much memory a model needs and how many users fit, from its config.json alone."
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_settings(parser, "model", "engine")


def run(arguments: argparse.Namespace) -> int:
    """Print the plan; for impossible settings a sentence and three `try:` lines, exit code 2."""
    code, plan = make(settings_from(arguments).settings.engine_config())
    if arguments.json:
        print(json.dumps(plan, ensure_ascii=False))
    if code == 0:
        if not arguments.json:
            show(plan)
        return 0
    warn(str(plan.get("error", "these settings are impossible")))
    for suggestion in plan.get("try", []):
        print(f"try: {suggestion}", file=sys.stderr)
    return 2


def make(config: EngineConfig) -> tuple[int, dict[str, Any]]:
    """The engine's plan for a configuration, made in a child (it needs torch): 0 and the plan, or 2 and why not."""
    import msgspec

    try:
        done = run_python("-m", "engine.plan", "--json", msgspec.json.encode(config).decode(), timeout_s=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise Failure(f"the plan was not ready after {TIMEOUT_S:.0f} s") from None
    try:
        plan = json.loads(done.stdout)
    except ValueError:
        plan = None
    if not isinstance(plan, dict) or done.returncode not in (0, 2):
        last = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        raise Failure(f"the plan could not be made: {last[0]}")
    plan |= {name: [with_flags(each) for each in plan[name]] for name in ("notes", "try") if name in plan}
    plan |= {name: with_flags(plan[name]) for name in ("error",) if name in plan}
    return done.returncode, plan


def show(plan: dict[str, Any]) -> None:
    """The plan as a table."""
    rows = [(LABELS.get(key, key.replace("_", " ")), readable(key, value)) for key, value in plan.items()]
    rows = [(label, text) for label, text in rows if text]
    width = max((len(label) for label, _ in rows), default=0)
    for label, text in rows:
        first, *more = text.split("\n")
        print(f"{label:<{width}}  {first}")
        for line in more:
            print(f"{'':<{width}}  {line}")


def readable(key: str, value: Any) -> str:
    """A value for a person: sizes in GiB, counts with separators, lists one entry a line."""
    from ..banner import parameters, size

    if value is None or value in ("", []):
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if key == "num_params":
        return f"{parameters(value)} ({value:,})"
    if isinstance(value, int | float) and "bytes" in key:
        return f"{size(value)} ({value:,} bytes)"
    if isinstance(value, float):
        return f"{value:,.2f}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list):
        return "\n".join(str(item) for item in value)
    return str(value)
