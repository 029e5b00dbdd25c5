"""A folder that cannot be served: exit code 2, one clear sentence, no traceback."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from engine import fetch
from tests.live import free_port

ROOT = pathlib.Path(__file__).parent.parent.parent


def edit(folder: pathlib.Path, **fields) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, **fields}))


def truncate(folder: pathlib.Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def missing_shard(folder: pathlib.Path) -> None:
    weights = folder / "model.safetensors"
    weights.rename(folder / "model-00001-of-00002.safetensors")
    index = {
        "weight_map": {
            "model.embed_tokens.weight": "model-00001-of-00002.safetensors",
            "model.norm.weight": "model-00002-of-00002.safetensors",
        }
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def replace(folder: pathlib.Path, name: str, old: str, new: str) -> None:
    text = (folder / name).read_text()
    assert old in text
    (folder / name).write_text(text.replace(old, new, 1))


def pipe(folder: pathlib.Path, name: str) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)


def only_bin(folder: pathlib.Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


PANIC = "tokenizer that makes its library panic"
CHARSMAP = '{"type": "Precompiled", "precompiled_charsmap": "AAAA"}'
BROKEN = {
    "no config": (lambda f: (f / "config.json").unlink(), "config.json"),
    "unknown architecture": (lambda f: edit(f, architectures=["HalForCausalLM"], model_type="hal"), "HalForCausalLM"),
    "missing shard": (missing_shard, "model-00002-of-00002.safetensors"),
    "truncated file": (truncate, "model.safetensors"),
    "wrong shape": (lambda f: edit(f, intermediate_size=768), "shape"),
    "no tokenizer": (lambda f: [(f / n).unlink() for n in ("tokenizer.json", "tokenizer_config.json")], "tokenizer"),
    "only .bin": (only_bin, "safetensors"),
    "absurd number": (lambda f: edit(f, num_hidden_layers=10**9), "num_hidden_layers"),
    "deep config": (lambda f: (f / "config.json").write_text("[" * 100_000), "nested too deeply"),
    "a pipe": (lambda f: pipe(f, "tokenizer_config.json"), "is not a regular file"),
    PANIC: (lambda f: replace(f, "tokenizer.json", '"normalizer": null', f'"normalizer": {CHARSMAP}'), "charsmap"),
    "unsupported quantization": (lambda f: edit(f, quantization_config={"quant_method": "awq", "bits": 4}), "awq"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_folder_is_reported_in_one_sentence(name, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(fetch("builtin", weights=False).path, folder)
    spoil, word = BROKEN[name]
    spoil(folder)
    done = subprocess.run(
        [sys.executable, "-m", "server", "serve", str(folder), "--port", str(free_port())],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "NO_COLOR": "1"},
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    told = [line for line in done.stderr.splitlines() if not line.startswith("20")]  # log lines begin with a date
    assert word in told[-1], done.stderr
    assert len(told) == 1 or name == PANIC, "only a panic is reported by the library too"


def test_a_misspelt_backend_is_refused_with_the_list():
    done = subprocess.run(
        [sys.executable, "-m", "server", "serve", "--attention-backend", "flash", "--port", str(free_port())],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 2
    assert "flash" in done.stderr and "reference" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("command", [["plan", "."], ["complete", "--model", ".", "--prompt", "a", "--max-tokens", "1"]])
def test_no_code_is_run_from_the_folder_that_a_command_is_started_in(command, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(fetch("builtin", weights=True).path, folder)
    for module in ("asyncio", "torch", "jinja2"):
        (folder / f"{module}.py").write_text("raise SystemExit('imported')")
    done = subprocess.run(
        [sys.executable, "-P", "-m", "server", *command],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
