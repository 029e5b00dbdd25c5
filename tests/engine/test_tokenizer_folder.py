"""The folder of a model's tokenizer.json: converted once, whoever needs it first."""

from __future__ import annotations

import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engine import ModelError, tokenizer_folder


def test_a_folder_with_tokenizer_json_is_its_own(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "vocab.json").write_text("{}")
    assert tokenizer_folder(tmp_path) == tmp_path


def test_of_two_that_need_a_conversion_one_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "vocab.json").write_text("{}")
    converting, goes_on, conversions = threading.Event(), threading.Event(), []

    def convert(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        conversions.append(command)
        converting.set()
        goes_on.wait()
        Path(command[-1]).mkdir()
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", convert)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(tokenizer_folder, tmp_path)
        converting.wait()
        second = threads.submit(tokenizer_folder, tmp_path)
        goes_on.set()
        assert first.result() == second.result() == Path(conversions[0][-1])
    assert len(conversions) == 1


def test_a_failed_conversion_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "vocab.json").write_text("{}")
    fails = subprocess.CompletedProcess([], 1, "", "warning\nthe merges are missing\n")
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: fails)
    for _ in range(2):
        with pytest.raises(ModelError, match="cannot be converted: the merges are missing"):
            tokenizer_folder(tmp_path)


def test_a_killed_child_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "vocab.json").write_text("{}")

    def begin(command: list[str], **_: object) -> None:
        target = Path(command[-1])
        (target.parent / f"{target.name}-x").mkdir()
        raise subprocess.TimeoutExpired(command, 1)

    monkeypatch.setattr(subprocess, "run", begin)
    with pytest.raises(ModelError, match="took over"):
        tokenizer_folder(tmp_path)
    assert not [path for path in (tmp_path / "cache").rglob("tokenizer-*") if path.is_dir()]


def test_the_child_has_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PEQUOD_API_KEY", "secret")
    (tmp_path / "vocab.json").write_text("{}")
    environments = []

    def convert(command: list[str], *, env: dict[str, str], **_: object) -> subprocess.CompletedProcess[str]:
        environments.append(env)
        return subprocess.CompletedProcess(command, 1, "", "")

    monkeypatch.setattr(subprocess, "run", convert)
    with pytest.raises(ModelError, match="exit status 1"):
        tokenizer_folder(tmp_path)
    assert "secret" not in environments[0].values()
