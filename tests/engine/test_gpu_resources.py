"""The Triton kernels, compiled for GPUs that are not there: registers, shared memory and matrix units."""

from __future__ import annotations

import json
import os
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


# Kernels for logits are compiled for one vocabulary on each architecture: a size that 16 divides, and an odd one. Of
# the products of few rows those with a norm and a gate use the most registers, so the others are compiled for 90 alone.
CASES = [
    (90, "Llama 8B bf16 bf16", ATTENTION | LAYERS),
    (90, "window bf16 i8", ATTENTION),
    (90, "window bf16 fp8", ATTENTION),
    (90, "Gemma 4 bf16 i8", ATTENTION),
    (80, "Gemma 4 bf16 i8", ATTENTION),
    (90, "window fp32 fp32", ATTENTION),
    (90, "largest", LAYERS),
    (90, "logits of Qwen3", LOGITS | CHANGES),
    (80, "logits of GPT-2", LOGITS | CHANGES),
    (80, "Llama 8B bf16 bf16", ATTENTION | LAYERS),
    (90, "bf16 int4", WEIGHTS),
    (90, "bf16 int8 in rows", WEIGHTS),
    (90, "bf16 float8 in groups", WEIGHTS),
    (90, "fp16 int4 in groups of 32", WEIGHTS),
    (80, "bf16 int8", WEIGHTS),
    (80, "bf16 float8 in rows", WEIGHTS),
    (90, "few ", {"few"}),
    (80, ", gate bf16", {"few"}),
    (90, "alike ", {"alike"}),
    (90, "routed ", {"routed"}),
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
    found = [each for each in compiled(arch) if only in each["kernel"]]
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
