"""Kernels for a GPU are compiled while weights are read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine import EngineConfig, attention, build
from engine.models.checkpoint.weights import Checkpoint
from engine.models.decoder import Decoder
from tests.models import make

pytest.importorskip("triton")
ROOT = Path(__file__).parents[2]


def test_jobs_compile_what_an_engine_launches(tmp_path):
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/engine/compiled.py"]
    env |= {"PYTEST_ADDOPTS": "", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and " passed" in done.stdout and "skipped" not in done.stdout, done.stdout


class Recorded:
    """Records when jobs are begun and waited for."""

    def __init__(self, events: list[str]) -> None:
        self.events = events

    def wait(self, group: str) -> None:
        self.events.append(f"{group} compiled")

    def cancel(self) -> None:
        self.events.append("cancelled")


@pytest.fixture
def events(monkeypatch) -> list[str]:
    """What happens while an engine is built, in order."""
    found: list[str] = []

    def record(place: object, name: str, event: str) -> None:
        real = getattr(place, name)

        def recorded(*args: object, **options: object) -> object:
            if event not in found:
                found.append(event)
            return real(*args, **options)

        monkeypatch.setattr(place, name, recorded)

    monkeypatch.setattr(build, "_begin_to_compile", lambda *_: found.append("begun") or Recorded(found))
    record(attention, "choose", "attention tried")
    record(Checkpoint, "fill", "weights read")
    record(Decoder, "_finish", "layers tried")
    record(build, "Runner", "a runner")
    return found


def test_kernels_are_compiled_beside_reading_and_before_they_are_tried(tmp_path, events):
    config = EngineConfig(model=str(make("qwen3", tmp_path)), device="cpu", cpu_isa="torch", num_blocks=8)
    build.build(config)
    assert events == [
        "begun", "attention compiled", "attention tried", "weights read", "layers compiled", "layers tried",
        "logits compiled", "a runner", "cancelled",
    ]  # fmt: skip


def test_after_an_error_no_more_is_compiled(tmp_path, events, monkeypatch):
    config = EngineConfig(model=str(make("qwen3", tmp_path)), device="cpu", attention="triton")
    with pytest.raises(build.ConfigError, match="the Triton kernels need a CUDA device"):
        build.describe(config)
    assert events == ["begun", "attention compiled", "attention tried", "cancelled"]
    monkeypatch.setattr(Checkpoint, "fill", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        build.build(EngineConfig(model=config.model, device="cpu", cpu_isa="torch"))
    assert events[-1] == "cancelled"


def test_a_plan_compiles_nothing(tmp_path, events):
    build.describe(EngineConfig(model=str(make("qwen3", tmp_path)), device="cpu"), weights=False)
    assert events == ["attention tried"]
