"""benchmarks/gpu without a GPU: what it needs, and what it does with a part that fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import engine, invariance

ROOT = Path(__file__).parents[1]


@pytest.mark.timeout(3200)  # ten processes that import torch, on a computer that is busy with other tests
def test_it_runs_with_torch_numpy_and_msgspec_alone(tmp_path):
    others = [
        "fastapi",
        "pydantic",
        "httpx",
        "transformers",
        "tokenizers",
        "safetensors",
        "huggingface_hub",
        "llguidance",
    ]
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules |= dict.fromkeys({others})\n")
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--tiny", "--seconds", "3000"]
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run(
        [*command, "--out", tmp_path], env=env, cwd=ROOT, capture_output=True, text=True, timeout=3100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "results.json").read_text())["results"]
    assert {result["part"] for result in results} == {
        "kernels",
        "layers",
        "sampling",
        "quantized",
        "tiny",
        "tiny mixture",
        "start",
        "invariance",
        "tiny, torch's attention",
    }
    by_name = {(result["part"], result["measurement"]): result for result in results}
    assert by_name["kernels", "correctness"]["relative_error"] < 0.02
    errors = {name: value for name, value in by_name["layers", "relative errors"].items() if isinstance(value, float)}
    assert len(errors) == 6 and max(errors.values()) < 0.02
    assert by_name["sampling", "trial"]["seconds"] > 0
    cases = [result for result in results if result["part"] == "sampling" and "us" in result]
    assert cases and all(case["same"] for case in cases)
    errors = [result for result in results if result["measurement"].endswith(", relative errors")]
    assert [result["measurement"] for result in errors] == [
        f"{each}, relative errors" for each in ("int4", "int8", "fp8")
    ]
    assert all(value < 0.02 for result in errors for value in result.values() if isinstance(value, float))
    assert by_name["quantized", "int4, down, 1 rows"]["gb_per_s"] > 0
    assert by_name["start", "all kernels are compiled"]["load_s"] > 0
    for mode in ("eager", "graphs"):  # of our CPU kernels
        assert by_name["invariance", f"{mode}, load"]["exact"]
        found = by_name["invariance", f"{mode}, together"]
        assert (found["tokens"], found["tokens_differing"], found["logprobs_differing"]) == (24, 0, 0)
        assert found["logprobs"] >= 24
    beside = by_name["invariance", "graphs, alone, beside eager"]
    assert beside["logprobs"] >= 24 and beside["logprobs_differing"] == 0
    assert by_name["invariance", "times of the default, with --batch-invariant"]["decode 4"] > 0
    for part in ("tiny", "tiny mixture", "tiny, torch's attention"):
        assert by_name[part, "graphs"] == {"part": part, "measurement": "graphs", "skipped": "CUDA graphs need a GPU"}
        assert by_name[part, "decode 4 sampled"]["tokens_per_s"] > 0
        assert by_name[part, "8 requests"]["is_whole"]
    assert len((tmp_path / "table.md").read_text().splitlines()) == len(results) + 6


def test_the_log_probabilities_that_were_compared_are_counted():
    answers = [([1, 2], [-1.0, -2.0]), ([3], []), ([4], [-1.0])]
    found = invariance.differences(answers, [([1, 2], [-1.0, -2.5]), ([3], []), ([5], [-1.0])])
    assert found == {"tokens": 4, "tokens_differing": 1, "logprobs": 2, "logprobs_differing": 1}


class Crowded:
    """A loop of four sequences, of which one is preempted in every step."""

    def __init__(self) -> None:
        running = [SimpleNamespace(tokens=[1, 2], is_prompt=False)] * 4
        self.scheduler = SimpleNamespace(running=running, max_len=40, counters=SimpleNamespace(preempted=0))
        self.built = SimpleNamespace(info=SimpleNamespace(roofline=None))
        self.seconds: dict[str, list[float]] = {}

    def add(self, *_) -> None: ...

    def step(self):
        self.seconds.setdefault("step", []).append(0.5)
        self.scheduler.counters.preempted += 1
        return [SimpleNamespace(token_ids=[1])] * 3

    def drain(self) -> None:
        self.seconds = {}


def test_a_decode_counts_the_tokens_that_were_delivered():
    found = engine.decode(Crowded(), 4, 16, engine.GREEDY, 0.0)
    assert (found["tokens_per_s"], found["steps"]) == (6, 3)
    assert found["preempted"] == 3


def test_a_part_that_fails_and_one_that_hangs_are_reported(tmp_path, monkeypatch):
    (tmp_path / "broken.py").write_text(
        'print(\'{"measurement": "first"}\', flush=True)\nraise SystemExit("no memory")'
    )
    (tmp_path / "hangs.py").write_text("import time\ntime.sleep(60)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    broken = [{"measurement": "first"}, {"measurement": "failure", "error": "no memory"}]
    assert list(gpu.run(["broken"], 250)) == broken
    assert list(gpu.run(["hangs"], 1)) == [{"measurement": "failure", "error": "was stopped after 1 s"}]
