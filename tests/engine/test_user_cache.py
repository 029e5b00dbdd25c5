"""Where files are kept that can be made again, also for users without a home directory."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from engine.gguf import folder as gguf
from engine.kernels import build
from engine.user_cache import cache_root, is_private, make_private, temporary_root


def test_caches_are_below_the_cache_directory_of_the_user(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache_root() == Path("/home/ada/.cache/pequod")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert cache_root() == Path("/caches/pequod")
    assert build.cache_folder().parent == Path("/caches/pequod/kernels")
    assert gguf.cache_folder() == Path("/caches/pequod/gguf")


def test_a_user_without_a_home_directory_has_a_cache_that_does_not_exist(monkeypatch):
    def none(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", none)
    assert cache_root() == Path("/nonexistent/.cache/pequod")


def test_the_temporary_directory_is_this_users_alone(monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    root = temporary_root()
    assert root.parent == tmp_path and not is_private(root)
    for _ in range(2):
        make_private(root)
        assert is_private(root)


@pytest.mark.parametrize("kind", ["open to others", "a link", "of another user"])
def test_a_temporary_directory_that_another_user_may_have_made_is_refused(monkeypatch, tmp_path, kind):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    root = temporary_root()
    if kind == "a link":
        (tmp_path / "theirs").mkdir(mode=0o700)
        root.symlink_to(tmp_path / "theirs")
    else:
        root.mkdir()
        root.chmod(0o777 if kind == "open to others" else 0o700)
    if kind == "of another user":
        uid = os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    assert not is_private(root)
    with pytest.raises(PermissionError, match="is not this user's alone"):
        make_private(root)
