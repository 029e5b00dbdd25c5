"""Child processes: what they find when they begin."""

from __future__ import annotations

import os
import socket

import pytest

from engine.process import spawn
from tests.live import WAIT_S


@pytest.mark.parametrize("module", ["engine.worker", "server.tokenization.template_worker"])
def test_a_child_imports_nothing_from_the_current_directory(module, tmp_path, monkeypatch):
    """It may be a folder from elsewhere, such as one with a model. An empty entry of PYTHONPATH names it, too."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep)
    for name in ("asyncio", "json", "resource", "traceback"):
        (tmp_path / f"{name}.py").write_text(f"open({name!r}, 'w').close()\nraise SystemExit(3)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    ours, theirs = socket.socketpair()
    with theirs:
        process = spawn(module, theirs.fileno())
    ours.close()  # before it is told what to do: it ends
    try:
        assert process.wait(WAIT_S) == 0
    finally:
        process.kill()
    assert {path.suffix for path in tmp_path.iterdir()} == {".py"}, "a file shows that its module was imported"
