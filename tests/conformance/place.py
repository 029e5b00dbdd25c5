"""Where suites run: their environments, a folder for their files, and the servers they talk to."""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import subprocess
import tempfile
from dataclasses import dataclass

from tests.live import Server

from .verdicts import Result

ROOT = pathlib.Path(__file__).parent.parent.parent
TOKENIZER = ROOT / "engine/builtin/model"
KEY, MODEL, OTHER_MODEL = "sk-whale", "builtin", "pequod"
# A suite that hangs must not hang the command; the slowest takes 4 minutes on 2 cores.
TIMEOUT_S = 900


class Unavailable(Exception):
    """A suite cannot run here; the message says what is missing."""


@dataclass(frozen=True)
class Report:
    """What a suite reported: the versions that ran, and one result per test."""

    versions: str
    results: list[Result]


class Place:
    """Servers are started when first needed and stopped at the end."""

    def __init__(self, python: str | None = None, environments: pathlib.Path = ROOT) -> None:
        self._stack = contextlib.ExitStack()
        self._python = python
        self._environments = environments
        self.folder = pathlib.Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="pequod-conformance-")))

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @functools.cached_property
    def server(self) -> Server:
        """The built-in model under two names, with an API key."""
        return self.start("--api-key", KEY, "--served-model-name", MODEL, OTHER_MODEL)

    @functools.cached_property
    def open_server(self) -> Server:
        """The built-in model without a key: load clients send theirs to some of the paths only."""
        return self.start()

    def start(self, *flags: str) -> Server:
        return self._stack.enter_context(Server(*flags, python=self._python))

    def environment(self, name: str) -> pathlib.Path:
        """The folder of a suite's own packages; raises Unavailable where nobody has made it."""
        folder = self._environments / f".venv-conformance-{name}"
        if not (folder / ".installed").exists():
            raise Unavailable(f"{folder.name} is missing; `make conformance` makes it")
        return folder

    def run(self, *command: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Run a program in this place's folder, whatever its exit status; 124 where it did not end in time."""
        parts = [str(part) for part in command]
        own = {**os.environ, "DO_NOT_TRACK": "1", "NO_COLOR": "1", **(env or {})}
        try:
            return subprocess.run(
                parts, cwd=self.folder, env=own, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess(parts, 124, "", f"it did not end within {TIMEOUT_S} s")

    def versions(self, environment: pathlib.Path, *packages: str) -> str:
        """The installed versions of a Python environment's packages, as a sentence's part."""
        code = "import importlib.metadata, sys; print(*map(importlib.metadata.version, sys.argv[1:]))"
        found = self.run(environment / "bin/python", "-c", code, *packages).stdout.split()
        return ", ".join(f"{package} {version}" for package, version in zip(packages, found, strict=True))


def failed_run(done: subprocess.CompletedProcess[str]) -> str:
    """A message for a program that did not do its work: the end of what it printed."""
    return f"exit status {done.returncode}: {done.stdout.strip()[-600:]} {done.stderr.strip()[-600:]}"
