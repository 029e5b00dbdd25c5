"""`make install` and `make serve`, with scripts in place of Python and Pequod that record how they are called."""

from __future__ import annotations

import pathlib
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parent.parent
# Debian's Python: without the package python3-venv it makes an environment, fails to put pip there, and ends with 1.
PYTHON = """#!/bin/sh
[ "$1 $2" = "-m venv" ] || exit 0
echo made >> made
mkdir -p "$3/bin"
printf '#!/bin/sh\\n[ "$3" = --version ] || echo "$@" >> calls\\n[ -e %s/pip ]\\n' "$3" > "$3/bin/python"
chmod +x "$3/bin/python"
[ -e python3-venv ] && touch "$3/pip"
"""
PEQUOD = '#!/bin/sh\n[ "$1" != pull ] || exit 0\nprintf "%s\\n" "$@"\n'

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not here")


def script(path: pathlib.Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def checkout(tmp_path) -> pathlib.Path:
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "pyproject.toml").touch()
    script(tmp_path / "python", PYTHON)
    return tmp_path


@pytest.fixture
def installed(checkout) -> pathlib.Path:
    script(checkout / ".venv/bin/pequod", PEQUOD)
    (checkout / ".venv/.installed").touch()
    return checkout


def make(checkout: pathlib.Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = ["make", "-s", "PYTHON=./python", *words]
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin"}
    return subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=False)


def test_the_installation_can_be_repeated_after_python_had_no_venv(checkout):
    assert make(checkout, "install").returncode != 0
    (checkout / "python3-venv").touch()
    done = make(checkout, "install")
    assert done.returncode == 0, done.stderr
    assert (checkout / "calls").read_text() == "-m pip install -q --disable-pip-version-check -e .\n"


def test_an_environment_that_is_there_is_kept(checkout):
    (checkout / "python3-venv").touch()
    subprocess.run(["./python", "-m", "venv", ".venv"], cwd=checkout, check=True)
    assert make(checkout, "install").returncode == 0
    assert (checkout / "made").read_text() == "made\n"


@pytest.mark.parametrize("model", ["/models/my model", "org/model", "/models/it's; echo two"])
def test_the_model_is_served_whatever_its_path_holds(installed, model):
    assert make(installed, "serve", f"MODEL={model}", "ARGS=--port 8001").stdout.splitlines() == [
        "serve", model, "--port", "8001",
    ]  # fmt: skip


def test_without_a_model_the_pulled_one_is_served_or_the_built_in_one(installed):
    assert make(installed, "serve").stdout.splitlines() == ["serve", "smollm2"]
    script(installed / ".venv/bin/pequod", PEQUOD.replace("exit 0", "exit 1"))
    assert make(installed, "serve").stdout.splitlines() == ["serve", "builtin"]
