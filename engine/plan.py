"""Computes how an engine would use memory with given settings, from config.json alone:

    python -m engine.plan --json '{"model": "some/folder"}'

takes an EngineConfig as JSON and prints one JSON object on standard output. On an error it exits with status 2, and the
object has `error`, a sentence, and `try`, settings that would work.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from typing import Any

import msgspec

from . import machine_memory, memory
from .build import describe
from .config import EngineConfig
from .types import EngineError

ASSUMPTIONS = (
    "activations are estimated from the model's shape",
    "memory in use is measured now, including that of a running server",
    "an engine on a CPU may run more sequences at once, if it measures that it is fast enough",
)


def plan(config: EngineConfig) -> dict[str, Any]:
    """Return the plan as one flat object; sizes in bytes, lengths in tokens. Raises EngineError."""
    described = describe(config, weights=False)
    spec, device, chosen = described.spec, described.device, described.attention
    machine = machine_memory.measure(str(device))
    arranged = described.arrange(machine)
    return {
        "model": config.model,
        "architecture": spec.architecture,
        "implementation": spec.implementation,
        "dtype": str(spec.dtype).removeprefix("torch."),
        "quantization": spec.quantization,
        "device": str(device),
        "attention": chosen.name,
        "kv_dtype": str(spec.cache_dtype).removeprefix("torch."),
        "num_params": spec.num_params,
        "weights_bytes": arranged.weights_bytes,
        "activation_bytes": arranged.activation_bytes,
        "graph_bytes": arranged.graph_bytes or None,
        "states_bytes": arranged.states_bytes or None,
        "num_snapshots": arranged.config.num_snapshots if arranged.states_bytes else None,
        "kv_bytes_per_token": arranged.kv_bytes_per_token,
        "memory_total_bytes": machine.total,
        "memory_available_bytes": machine.available,
        "memory_bytes": arranged.memory_bytes,
        "kv_cache_bytes": arranged.kv_cache_bytes,
        "block_size": config.block_size,
        "num_blocks": arranged.num_blocks,
        "num_tokens": arranged.num_tokens,
        "max_len": arranged.max_len,
        "max_seqs": arranged.config.max_seqs,
        "max_batched_tokens": arranged.config.max_batched_tokens,
        "full_length_users": round(arranged.full_length_users, 2),
        "notes": [*arranged.notes, *spec.notes, *([chosen.note] if chosen.note else [])],
        "assumptions": list(ASSUMPTIONS),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m engine.plan", description=__doc__)
    parser.add_argument("--json", required=True, metavar="CONFIG", help="an EngineConfig as a JSON object")
    given = parser.parse_args(arguments)
    with contextlib.redirect_stdout(sys.stderr):  # libraries must not print into the JSON
        result, code = _result(given.json)
    print(json.dumps(result))
    return code


def _result(text: str) -> tuple[dict[str, Any], int]:
    try:
        return plan(msgspec.json.decode(text, type=EngineConfig)), 0
    except msgspec.DecodeError as error:
        return {"error": f"the settings are not an EngineConfig: {error}", "try": []}, 2
    except memory.Impossible as error:
        return {"error": error.sentence, "try": error.suggestions}, 2
    except EngineError as error:
        return {"error": str(error), "try": []}, 2


if __name__ == "__main__":
    sys.exit(main())
