"""The Triton kernels without a GPU: in Triton's interpreter. test_gpu_resources.py compiles them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.attention import paged_gpu
from engine.attention.paged_gpu import PagedGPU
from tests.engine.test_attention import CPU, layer_of

pytest.importorskip("triton")
ROOT = Path(__file__).parents[2]


FILES = [
    "interpreted.py",
    "interpreted_delta.py",
    "interpreted_experts.py",
    "interpreted_invariance.py",
    "interpreted_latent.py",
    "interpreted_layers.py",
    "interpreted_logits.py",
    "interpreted_mixers.py",
    "interpreted_scaled.py",
    "interpreted_single.py",
    "interpreted_skinny.py",
    "interpreted_weights.py",
]


@pytest.mark.timeout(3600)  # these are files of tests
def test_kernels_in_the_interpreter_equal_torch():
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *(f"tests/engine/{file}" for file in FILES)]
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTEST_ADDOPTS": ""}
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and " passed" in done.stdout and "skipped" not in done.stdout, done.stdout


def test_without_a_gpu_or_a_compiler_there_is_a_reason(monkeypatch):
    layers = [layer_of(1, 16, 16)]
    assert (
        PagedGPU.objection(layers, torch.bfloat16, torch.int8, CPU, "auto") == "the Triton kernels need a CUDA device"
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    reason = paged_gpu.lack()
    assert reason is not None and "compute capability 8.0 (Ampere) or more, and this one has 7.5" in reason
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    assert paged_gpu.lack() == "Triton needs a C compiler: install gcc"
