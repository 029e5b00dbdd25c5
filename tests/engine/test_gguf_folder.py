"""Where the converted header of a GGUF file is kept if the cache directory cannot be written."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine import ModelError
from engine.gguf import folder
from engine.gguf.folder import folder_of, is_converted
from tests.engine.test_gguf import write


@pytest.fixture(params=["file", "x" * 300], ids=["a file", "a path that cannot be looked at"])
def read_only(tmp_path, monkeypatch, request) -> Path:
    """Return the temporary directory of a user whose cache directory cannot be created."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / request.param))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    return tmp_path / "tmp"


def test_a_file_is_converted_once_into_a_temporary_directory(read_only, tmp_path, monkeypatch):
    path = write(tmp_path / "model.gguf")
    found = folder_of(path)
    assert found.is_relative_to(read_only) and (found / "config.json").is_file()
    assert is_converted(found)
    monkeypatch.setattr(folder, "_files", lambda _: pytest.fail("converted a second time"))
    assert folder_of(path) == found


def test_a_temporary_directory_of_another_user_is_not_trusted(read_only, tmp_path):
    path = write(tmp_path / "model.gguf")
    found = folder_of(path)
    (root,) = read_only.iterdir()
    root.chmod(0o777)
    assert not is_converted(found)
    with pytest.raises(ModelError, match=r"model\.gguf cannot be converted: .* is not this user's alone"):
        folder_of(path)


def test_what_the_cache_has_is_used_also_if_it_cannot_be_written_now(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = write(tmp_path / "model.gguf")
    found = folder_of(path)
    monkeypatch.setattr(folder, "_write", lambda *_: pytest.fail("written a second time"))
    assert folder_of(path) == found and found.is_relative_to(tmp_path / "cache")
