"""Fixtures for text: tokenizers of every kind, and model folders written on the spot. And one for deadlines."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from server.generation.choices import Generation
from server.settings import PREFIX
from server.tokenization.tokenizer import Tokenizer
from tests.toys import MADE

GIVEN = {"qwen3": "tokenizers/qwen3", "gpt2": "tokenizers/gpt2", "stories260k": "models/stories260k"}

Folder = Callable[..., Path]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """Write a model folder: folder(library, tokenizer_config={...}, other_file=text or object)."""

    def write(library: tokenizers.Tokenizer | None = None, **files: Any) -> Path:
        if library is not None:
            library.save(str(tmp_path / "tokenizer.json"))
        for name, content in files.items():
            path = tmp_path / (name if "." in name else f"{name}.json")
            path.parent.mkdir(exist_ok=True)
            path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
        return tmp_path

    return write


@pytest.fixture(scope="session", params=[*MADE, *GIVEN])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Each kind of tokenizer in turn."""
    if request.param in GIVEN:
        return Tokenizer(request.getfixturevalue("data") / GIVEN[request.param])
    place = tmp_path_factory.mktemp("tokenizer")
    MADE[request.param]().save(str(place / "tokenizer.json"))
    return Tokenizer(place)


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tokenizer]:
    """One of the tokenizers made here, by its kind."""

    def make(kind: str) -> Tokenizer:
        place = tmp_path_factory.mktemp("tokenizer")
        MADE[kind]().save(str(place / "tokenizer.json"))
        return Tokenizer(place)

    return make


@pytest.fixture
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings come from the test alone, not from variables of whoever runs it."""
    for name in list(os.environ):
        if name.startswith(PREFIX):
            monkeypatch.delenv(name)


@pytest.fixture
def expire(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Let the deadlines of all generations that run pass now.

    A test gives them a minute, and says by this when it is over. How long a request takes until its generation starts
    depends on the machine: a short deadline may pass before, and then there is nothing to end.
    """
    timers: list[asyncio.TimerHandle] = []
    start = Generation.start

    def noted(self: Generation, receive: Any) -> None:
        start(self, receive)
        if self._timer is not None:
            timers.append(self._timer)

    def expire() -> None:
        assert timers, "no generation with a deadline was started"
        for timer in timers:
            assert timer.when() - asyncio.get_running_loop().time() <= 60
            if not timer.cancelled():
                timer._run()
                timer.cancel()
        timers.clear()

    monkeypatch.setattr(Generation, "start", noted)
    return expire
