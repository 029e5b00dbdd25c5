"""A function that runs `pequod bench`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from server.__main__ import main


@pytest.fixture
def pequod(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Return a function that runs a part of `pequod bench` in this process: the exit code, and what it printed."""

    def run(*argv: str) -> tuple[int, str, str]:
        return main(["bench", *argv]), *capsys.readouterr()

    return run
