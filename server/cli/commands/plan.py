"""`pequod plan`: computes the memory that a model needs from its config.json, without loading it."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from ...child import run_python
from ...settings import with_flags
from ..banner import parameters, size
from . import Failure, Parser, add_settings, chat_model, settings_from, warn

if TYPE_CHECKING:
    from engine import EngineConfig

TIMEOUT_S = 300.0  # a hub model's config.json may have to be downloaded
LABELS = {
    "implementation": "code",
    "kv_dtype": "KV cache in",
    "num_params": "parameters",
    "weights_bytes": "weights",
    "activation_bytes": "activations (maximum)",
    "graph_bytes": "CUDA graphs (maximum)",
    "states_bytes": "states of sequences",
    "num_snapshots": "of these, for cached prefixes",
    "kv_bytes_per_token": "KV cache per token",
    "memory_total_bytes": "device memory",
    "memory_available_bytes": "free device memory",
    "memory_bytes": "memory budget",
    "kv_cache_bytes": "KV cache",
    "block_size": "tokens per block",
    "num_blocks": "blocks",
    "num_tokens": "tokens in the cache",
    "max_len": "tokens per request",
    "max_seqs": "requests per step",
    "max_batched_tokens": "tokens per step",
    "full_length_users": "users at full length",
}


def add_arguments(parser: Parser) -> None:
    parser.usage = "pequod plan [MODEL] [flags]"
    parser.description = (
        "Show how much memory a model needs and how many users it can serve at once, computed from its config.json."
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_settings(parser, "model", "engine")


def run(arguments: argparse.Namespace) -> int:
    """Print the plan. If the settings are impossible, print why and three `try:` lines, and return 2."""
    code, plan = make(settings_from(arguments, default_model=chat_model).settings.engine_config())
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
    """Return 0 and the engine's plan, or 2 and why there is none. A child process computes it, with torch."""
    import msgspec

    try:
        done = run_python("-m", "engine.plan", "--json", msgspec.json.encode(config).decode(), timeout_s=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise Failure(f"the plan was not computed within {TIMEOUT_S:.0f} s") from None
    try:
        plan = json.loads(done.stdout)
    except ValueError:
        plan = None
    if not isinstance(plan, dict) or done.returncode not in (0, 2):
        last = done.stderr.strip().splitlines()[-1:] or ["no output"]
        raise Failure(f"the plan could not be computed: {last[0]}")
    plan |= {name: [with_flags(each) for each in plan[name]] for name in ("notes", "try") if name in plan}
    plan |= {name: with_flags(plan[name]) for name in ("error",) if name in plan}
    return done.returncode, plan


def show(plan: dict[str, Any]) -> None:
    rows = [(LABELS.get(key, key.replace("_", " ")), readable(key, value)) for key, value in plan.items()]
    rows = [(label, text) for label, text in rows if text]
    width = max((len(label) for label, _ in rows), default=0)
    for label, text in rows:
        first, *more = text.split("\n")
        print(f"{label:<{width}}  {first}")
        for line in more:
            print(f"{'':<{width}}  {line}")


def readable(key: str, value: Any) -> str:
    """Return a value in readable form: sizes with units, counts with separators, lists with one entry per line."""
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
