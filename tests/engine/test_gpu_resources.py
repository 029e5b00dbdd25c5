"""The Triton kernels, compiled for GPUs that are not there: registers, shared memory and matrix units."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).parents[2]
ATTENTION, LAYERS = {"decode", "chunk", "uniform", "store", "rotate"}, {"norm", "gate"}
WEIGHTS = {"product", "dequantize", "lookup"}
LOGITS = {"find_top", "count_digit", "weigh", "sum_digit", "sum_kept", "pick", "tally", "collect"}
CHANGES = {"penalize", "add", "exclude", "forbid"}


# Expressions for the names of kernels. Those of logits are compiled for one vocabulary on each architecture: a size
# that 16 divides, and an odd one. Where one kernel has several tiles, the smallest and the largest are compiled, since
# registers grow with the tile, and of the products of few rows those with a norm and a gate, which use the most.
# `python -m tests.engine.gpu_resources --check` compiles all.
CASES = [
    (90, "Llama 8B bf16 bf16", ATTENTION | LAYERS),
    (90, "window bf16 i8", ATTENTION),
    (90, "^(?!uniform).*window bf16 fp8", ATTENTION - {"uniform"}),
    (90, "Gemma 4 bf16 (bf16|i8)", ATTENTION),
    (80, "Gemma 4 bf16 i8", ATTENTION),
    (90, "^(?!uniform).*window fp32 fp32", ATTENTION - {"uniform"}),
    (90, "largest", LAYERS),
    (90, "logits of Qwen3", LOGITS | CHANGES),
    (80, "logits of GPT-2", LOGITS | CHANGES),
    (80, "Llama 8B bf16 bf16", ATTENTION | LAYERS),
    (90, "^(product|dequantize|lookup) bf16 int4(?!.* 32 rows)", WEIGHTS),
    (90, "^(product|dequantize|lookup) bf16 int8 in rows(?!, 32 rows)", WEIGHTS),
    (90, "^(product|dequantize|lookup) bf16 float8 in groups(?!.* 32 rows)", WEIGHTS),
    (90, "^(product|dequantize|lookup) fp16 int4 in groups of 32(?!, (16|32) rows)", WEIGHTS),
    (80, "^(product|dequantize|lookup) bf16 int8(?!.* 32 rows)", WEIGHTS),
    (80, "^(product|dequantize|lookup) bf16 float8 in rows(?!, 32 rows)", WEIGHTS),
    (90, "^few (?!(16|32) rows.*residual)", {"few"}),
    (80, "^few (16|64) rows, tiles of (16 by 256|64 by 128), gate bf16", {"few"}),
    (90, "alike ", {"alike"}),
    (90, "routed (gate|down|.*tiles of 64)", {"routed"}),
    (90, "Qwen3 30B", {"choose", "arrange", "combine"}),
    (80, "alike ", {"alike"}),
]


@cache
def compiled(arch: int) -> list[dict[str, Any]]:
    """Return the resources of the kernels of all cases of an architecture, which one process compiles."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    only = [part for own, part, _ in CASES if own == arch]
    command = [sys.executable, "-m", "tests.engine.gpu_resources", "--arch", str(arch), "--only", *only]
    with tempfile.TemporaryDirectory() as folder:
        env["TRITON_CACHE_DIR"] = folder
        done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.timeout(1200)  # the first one waits for the compiler
@pytest.mark.parametrize("arch, only, kernels", CASES)
def test_compiled_kernels_spill_no_registers(arch, only, kernels):
    found = [each for each in compiled(arch) if re.search(only, each["kernel"])]
    assert {each["kernel"].split()[0] for each in found} == kernels
    for each in found:
        assert each["stack"] == 0, each
        assert each["shared"] <= (227 if arch == 90 else 163) * 1024, each
    chunks = [each for each in found if each["kernel"].startswith("chunk") and "bf16" in each["kernel"]]
    assert all(each["wgmma" if arch == 90 else "mma"] for each in chunks), "prompts do not use the matrix units"
    products = [each for each in found if each["kernel"].split()[0] in ("product", "few")]
    products += [each for each in found if each["kernel"].startswith("alike") and "bf16" in each["kernel"]]
    products += [each for each in found if each["kernel"].startswith("routed")]
    assert all(each["mma"] or each["wgmma"] for each in products)
    dependent = ("few", "alike", "routed gate", "routed down", *LOGITS, *(ATTENTION - {"store"}))
    waits = [each["kernel"].startswith(dependent) for each in found]
    assert [each["waits"] for each in found] == [arch == 90 and each for each in waits]
