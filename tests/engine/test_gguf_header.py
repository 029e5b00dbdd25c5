"""What the header of a GGUF file decides: how to sample by default, and whether its parts belong together."""

from __future__ import annotations

import json
import shutil

import pytest

from engine import ModelError
from engine.gguf import reader
from engine.gguf.folder import folder_of
from tests.engine.test_gguf import write


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_the_sampling_that_a_file_suggests_is_that_of_the_model(tmp_path):
    suggested = {"temp": 0.7, "top_k": 21, "top_p": 0.9, "min_p": 0.05, "penalty_repeat": 1.1}
    values = {f"general__sampling__{name}": value for name, value in suggested.items()}
    found = json.loads((folder_of(write(tmp_path / "model.gguf", **values)) / "generation_config.json").read_text())
    sampling = {name: found.get(name) for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")}
    assert sampling == pytest.approx(
        {"temperature": 0.7, "top_k": 21, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.1}
    )


def test_a_file_that_suggests_no_sampling_leaves_the_defaults(tmp_path):
    found = json.loads((folder_of(write(tmp_path / "model.gguf")) / "generation_config.json").read_text())
    assert found.keys() <= {"eos_token_id", "bos_token_id", "pad_token_id"}


def test_parts_that_hold_the_same_tensor_are_not_those_of_one_model(tmp_path):
    first, second = (tmp_path / f"model-{part:05}-of-00002.gguf" for part in (1, 2))
    write(first)
    shutil.copy(first, second)  # as after a download that named the wrong part
    with pytest.raises(ModelError, match=r"00002-of-00002.gguf holds the tensor .* of another part; download"):
        reader.read(first)
