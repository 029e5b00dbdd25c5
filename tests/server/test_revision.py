"""Text files and weights come from one commit, also when a branch of the hub moves while the server starts."""

import shutil
from types import SimpleNamespace

from msgspec.structs import replace

import engine
from engine import fetch
from server.settings import Settings
from server.state import AppState
from tests.fakes import FakeEngine


async def test_the_text_files_follow_the_commit_of_the_weights(tmp_path, monkeypatch):
    looked: list[tuple[str | None, bool]] = []
    built_in = fetch("builtin", weights=False).path
    commits = {None: "aaaa", "bbbb": "bbbb"}

    def fake(model: str, revision: str | None = None, *, weights: bool, local_files_only: bool) -> SimpleNamespace:
        looked.append((revision, local_files_only))
        folder = tmp_path / commits[revision]
        shutil.copytree(built_in, folder, dirs_exist_ok=True)
        return SimpleNamespace(path=folder, revision=commits[revision], sampling={})

    monkeypatch.setattr(engine, "fetch", fake)
    fakes = FakeEngine()
    app = AppState(Settings(model="org/model", local_files_only=True), fakes, "test")
    await fakes.start()
    info = await fakes.ready()
    moved = replace(info, revision="bbbb")

    async def ready() -> engine.EngineInfo:
        return moved

    fakes.ready = ready
    await app.load()
    assert looked == [(None, True), ("bbbb", True)]
    assert app.model is not None and app.model.tokenizer.folder.name == "bbbb"
    await fakes.close()
