"""Triton's files are hashed while torch is imported, where there is a GPU."""

from __future__ import annotations

import sys

import pytest

from engine.kernels import triton_files


@pytest.fixture
def hashed(monkeypatch) -> list[str]:
    """Which threads have been started."""
    found: list[str] = []

    class Started:
        def __init__(self, *, target: object, name: str, daemon: bool) -> None:
            assert target is triton_files.hash_files and daemon
            self.name = name

        def start(self) -> None:
            found.append(self.name)

    monkeypatch.setattr(triton_files, "Thread", Started)
    monkeypatch.setattr(triton_files.importlib.util, "find_spec", lambda _: object())
    return found


@pytest.mark.parametrize("has_gpu", [True, False])
def test_files_are_hashed_early_where_there_is_a_gpu(hashed, has_gpu, tmp_path, monkeypatch):
    monkeypatch.setattr(triton_files, "DRIVER_FILES", (str(tmp_path / "none"), str(tmp_path)) if has_gpu else ())
    triton_files.begin_to_hash()
    assert hashed == ["hash"] * has_gpu


def test_without_triton_nothing_is_hashed(hashed, tmp_path, monkeypatch):
    monkeypatch.setattr(triton_files, "DRIVER_FILES", (str(tmp_path),))
    monkeypatch.setattr(triton_files.importlib.util, "find_spec", lambda _: None)
    triton_files.begin_to_hash()
    assert not hashed


def test_another_version_of_triton_is_no_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton.runtime.cache", None)
    triton_files.hash_files()
