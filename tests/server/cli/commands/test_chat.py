"""`pequod chat` and `complete` at a terminal and at a pipe, with a source that says what a test wants."""

from __future__ import annotations

import asyncio
import io
import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from server.cli.commands import write_text
from server.cli.commands.chat import Talk
from server.cli.openai_client import Shot

ROOT = Path(__file__).parents[4]


class Source:
    """A model that says Aye; `messages` are the last message of each request."""

    model, device = "whale", "cpu"

    def __init__(self) -> None:
        self.messages: list[str] = []

    async def stream(self, body: dict[str, Any], on_text: Callable[[str], None]) -> Shot:
        self.messages.append(body["messages"][-1]["content"])
        on_text("Aye")
        return Shot(at=0.0, input_len=0, output_len=0, sent=0.0)


def talk(source: Source) -> int:
    """Talk until the input ends and return the exit code."""
    with asyncio.Runner() as runner:
        return Talk(runner, source, {}, None).run()  # type: ignore[arg-type]


def test_a_line_from_a_pipe_that_is_no_command_fails(monkeypatch, capsys):
    source = Source()
    monkeypatch.setattr(sys, "stdin", io.StringIO("/usr/bin is a folder\nHello\n"))
    assert talk(source) == 1  # a script must see that it got no response
    assert source.messages == ["Hello"]
    assert "unknown command /usr/bin" in capsys.readouterr().err


def test_pasted_lines_are_one_message():
    ours, theirs = pty.openpty()
    program = "from tests.server.cli.commands.test_chat import *\nsource = Source(); talk(source)\n"
    program += "print(json.dumps(source.messages), file=sys.stderr)"
    command = [sys.executable, "-c", program]
    environment = {**os.environ, "TERM": "xterm"}
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, cwd=ROOT, env=environment
    ) as process:
        os.close(theirs)
        shown = b""
        while b"> " not in shown:
            shown += os.read(ours, 1024)
        os.write(ours, b"\033[200~one\ntwo\033[201~\r")  # as a terminal sends what is pasted
        while b"Aye" not in shown:
            shown += os.read(ours, 1024)
        os.write(ours, b"/exit\r")
        assert process.stderr is not None
        assert json.loads(process.stderr.read().splitlines()[-1]) == ["one\ntwo"]
    os.close(ours)


@pytest.mark.parametrize(("is_terminal", "written"), [(True, "a[31mb\n\tc"), (False, "a\033[31m\x9b\x07b\n\tc")])
def test_a_terminal_gets_no_control_characters(monkeypatch, capsys, is_terminal, written):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    write_text("a\033[31m\x9b\x07b\n\tc")
    assert capsys.readouterr().out == written
