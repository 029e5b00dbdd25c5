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
import torch

pytest.importorskip("triton")
ROOT = Path(__file__).parents[2]
ATTENTION, LAYERS = {"decode", "chunk", "uniform", "store", "rotate"}, {"norm", "gate", "gate_heads"}
WEIGHTS = {"product", "dequantize", "lookup"}
LISTS = {"find_bound", "shortlist", "draw_listed"}
LOGITS = {"find_top", *LISTS, "count_digit", "weigh", "sum_digit", "sum_kept", "pick", "tally", "collect"}
CHANGES = {"penalize", "add", "exclude", "forbid"}
LINEAR, CONV = {"convolve", "recur", "finish"}, {"convolve_gated", "keep_windows"}
MAMBA = {"convolve_steps", "scan", "finish_groups"}


# Expressions for the names of kernels. Those of logits are compiled for one vocabulary on each architecture: a size
# that 16 divides, and an odd one. Where one kernel has several tiles, forms or shapes, those are compiled that take the
# most registers or the most shared memory, and of the others one of each kind, on one architecture.
# `python -m tests.engine.gpu_resources --check` compiles all.
SMALL_STACK = 16  # bytes: the compiler of Triton 3.9 makes room for one more program so, that of 3.6 does not
SMALL_STACKS = re.compile("uniform decode|chunk DeepSeek V3 .* (i8|fp8e4nv)$")  # kernels
LARGEST = "64 rows by 128$"  # of the tiles of a product: the one that takes the most registers
FORMS = [
    (90, "bf16 int4 in groups of 32", LARGEST),
    (90, "bf16 int4 in groups of 128", f"({LARGEST}|128 rows by 128, turned)"),
    (90, "bf16 float8 in groups", "128 rows by 128, turned"),
    (80, "bf16 int8 in rows", f"({LARGEST}|128 rows by 64, turned)"),
    (80, "bf16 int8 in groups", "16 rows by 128"),
]
CASES = [
    (90, "Llama 8B bf16 bf16", ATTENTION | LAYERS),
    (90, "^(decode|chunk) Llama 8B fp16 i8", {"decode", "chunk"}),
    (
        80,
        "^(chunk|uniform|store|rotate|norm|gate_heads) Llama 8B bf16 bf16",
        ATTENTION - {"decode"} | {"norm", "gate_heads"},
    ),
    (90, "^(chunk|uniform|store).*window bf16 i8", {"chunk", "uniform", "store"}),
    (90, "^(chunk|store|rotate).*window bf16 fp8", {"chunk", "store", "rotate"}),
    (80, "^(decode|chunk|uniform).*window fp16 i8", {"decode", "chunk", "uniform"}),
    (90, "^(chunk Gemma 4 bf16 bf16|(store|rotate) Gemma 4 bf16 i8)", {"chunk", "store", "rotate"}),
    (90, "^(chunk|store) GLM 4.7 Flash bf16 i8", {"chunk", "store"}),
    (90, "^uniform GLM 4.7 Flash fp32", {"uniform"}),
    (90, "^(chunk DeepSeek V3 bf16 (bf16|i8)|decode DeepSeek V3 bf16 bf16)", {"chunk", "decode"}),
    (80, "^decode GLM 4.7 Flash (bf16 bf16|fp16 i8)", {"decode"}),
    (90, " of (GLM 4.7 Flash bf16|latents of odd sizes fp32)", {"heads", "normalize", "turn"}),
    (80, " 128 tokens of DeepSeek V3 fp16", {"heads"}),
    (90, "largest", LAYERS),
    (90, "logits of Qwen3", LOGITS | CHANGES),
    (80, "logits of GPT-2", LOGITS | CHANGES),
    *((arch, f"^(product {form}.*{tiles}|(dequantize|lookup) {form})", WEIGHTS) for arch, form, tiles in FORMS),
    (90, "^few (64 rows.*(gate|residual)|16 rows, tiles of 32 by 256, in 4 parts)", {"few"}),
    (80, "^few 16 rows, tiles of 32 by 128, gate", {"few"}),
    (90, "^one row, 8 warps, 128 .*(12288 columns, (square|residual)|1024 columns, gate)", {"one"}),
    (90, "^(scaled (64 rows by 128.* rows|128 rows.* blocks)|quantize)", {"scaled", "quantize"}),
    (90, "^row bf16 int4 in groups of 128.*, 32 words, 16 warps, (.* square|12288)", {"row"}),
    (90, "^row bf16 float8 in groups.*, 32 words, 16 warps, .* gate", {"row"}),
    (80, "^row fp16 int4 in groups of 128.*, 32 words, 16 warps, 12288", {"row"}),
    (90, "alike tiles of (256|128 by 128, 2 parts|.* fp32)", {"alike"}),
    (80, "alike tiles of 128 by 128", {"alike"}),
    (90, "routed (gate, tiles of (64|128)|float8 in groups.*tiles of 64)", {"routed"}),
    (90, "(choose|combine) Qwen3 30B|arrange Qwen3 30B, tiles of 128", {"choose", "arrange", "combine"}),
    (90, "(Qwen3.5 9B|(?<!Mamba2 of )heads of 8 and 12) bf16", LINEAR),
    (90, "^recur heads of 256 fp32", {"recur"}),
    (80, "Qwen3.5 9B fp16", LINEAR),
    (90, "(LFM2 1.2B|conv of 24) bf16", CONV),
    (80, "LFM2 1.2B fp16", CONV),
    (90, "Granite 4.0 H Small bf16|Mamba2 of heads of 8 and 16 fp32", MAMBA),
    (80, "Mamba2 of heads of 256 fp32", MAMBA),
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


@pytest.mark.timeout(3600)  # the first one waits for the compiler
@pytest.mark.parametrize("arch, only, kernels", CASES)
def test_compiled_kernels_spill_no_registers(arch, only, kernels):
    found = [each for each in compiled(arch) if re.search(only, each["kernel"])]
    assert {each["kernel"].split()[0] for each in found} == kernels
    for each in found:
        assert each["carried"] == [], each
        assert each["stack"] <= (SMALL_STACK if SMALL_STACKS.match(each["kernel"]) else 0), each
        # Those of attention and of experts are not chosen by what fits into a GPU, so they must fit into all.
        chosen = each["kernel"].startswith("few")
        assert each["shared"] <= (227 if arch == 90 else 163 if chosen else 99) * 1024, each
    chunks = [each for each in found if each["kernel"].startswith("chunk") and "bf16" in each["kernel"]]
    # Their tiles have 32 rows, fewer than the units of a Hopper multiply.
    shared = re.compile("GLM 4.7|DeepSeek|wide, ")
    assert all(each["wgmma" if arch == 90 and not shared.search(each["kernel"]) else "mma"] for each in chunks), (
        "prompts do not use the matrix units"
    )
    products = [each for each in found if each["kernel"].split()[0] in ("product", "few", "scaled")]
    products += [each for each in found if each["kernel"].startswith("alike") and "bf16" in each["kernel"]]
    products += [each for each in found if each["kernel"].startswith("routed")]
    products += [each for each in found if each["kernel"].startswith("heads") and "fp32" not in each["kernel"]]
    assert all(each["mma"] or each["wgmma"] for each in products)
    alone = ("dequantize", "lookup", *CHANGES)  # launched when the kernel before has ended
    waits = [arch == 90 and not each["kernel"].startswith(alone) for each in found]
    assert [each["waits"] for each in found] == waits


@pytest.mark.parametrize("dtype, is_scaled, keys", [("bfloat16", False, 64), ("float16", True, 32)])
@pytest.mark.parametrize("heads", [16, 20, 128])
@pytest.mark.parametrize("queries", [1, 2])
def test_the_warps_of_latent_attention_have_keys_of_their_own(heads, queries, dtype, is_scaled, keys):
    """A matrix instruction multiplies with eight keys, or more."""
    from engine.attention.gpu_shapes import attend_shape
    from engine.attention.layer import AttentionLayer

    layer = AttentionLayer(heads, 1, 576, 512, scale=1.0, values_in_keys=True)
    traits = {"uniform": False, "is_scaled": is_scaled, "is_chunk": queries > 1}
    shape = attend_shape(layer, getattr(torch, dtype), queries, 1, is_large=True, **traits)
    assert (shape.keys, shape.warps) == (keys, 8)
    assert attend_shape(layer, getattr(torch, dtype), queries, 1, is_large=False, **traits).keys == 16, "of less memory"


def test_a_bound_that_an_iteration_sets_for_the_next_one_is_found():
    from tests.engine.gpu_resources import carried_bounds

    outer = "%0:2 = scf.for %i = %c0 to %n step %c1 iter_args(%x = %a, %begin_5 = %b) -> (tensor<8xf32>, i32)"
    assert carried_bounds(f"{outer} : i32 {{\n%1 = scf.for %j = %begin_5 to %stop step %c1 : i32 {{") == ["%begin_5"]
    assert carried_bounds(f"{outer} : i32 {{\n%1 = scf.for %j = %start to %stop step %c1 : i32 {{") == []
