"""`pequod models` where the Hugging Face cache cannot be read; test_commands.py has its list."""

from __future__ import annotations

import json
from pathlib import Path

from server.__main__ import main
from server.cli.commands import models


def test_a_cache_that_cannot_be_read_is_one_sentence_beside_the_other_models(monkeypatch, tmp_path, capsys):
    is_dir = Path.is_dir

    def refused(path: Path) -> bool:
        if path == tmp_path / "theirs":
            raise PermissionError(13, "Permission denied", str(path))
        return is_dir(path)

    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "theirs"))
    monkeypatch.setattr(Path, "is_dir", refused)
    monkeypatch.setattr(models, "make", lambda _: (0, {}))
    assert main(["models", "--json"]) == 0
    out, err = capsys.readouterr()
    assert "builtin" in {model["name"] for model in json.loads(out)["models"]}
    assert err == f"pequod: the Hugging Face cache {tmp_path / 'theirs'} cannot be read: Permission denied\n"
    assert main(["models"]) == 0
    assert "has no models" not in capsys.readouterr().out
