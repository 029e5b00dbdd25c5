"""`pequod chat`: a conversation in the terminal, in process or over HTTP."""

from __future__ import annotations

import argparse
import asyncio
import sys
from typing import TYPE_CHECKING

from ...settings_values import nearest
from . import Failure, Parser, UsageError, add_settings, settings_from, wants_colour, warn
from .complete import add_sampling, options_from

if TYPE_CHECKING:
    from ..source import Options, Source

HELP = {
    "/exit": "leave (also Ctrl-D)",
    "/clear": "forget the conversation",
    "/system TEXT": "set the system message and start anew; without TEXT: none",
    "/help": "this text",
}
# Colours and cursor movements are the terminal's business, not the model's.
CONTROL = {code: None for code in (*range(32), 127, *range(128, 160)) if chr(code) not in "\n\t"}


def add_arguments(parser: Parser) -> None:
    parser.usage = "pequod chat [MODEL | --url URL] [flags]"
    parser.description = (
        "Talk to a model in the terminal. Ctrl-C stops an answer, Ctrl-D leaves; /help lists more."
        " From a pipe, every line is one message."
    )
    parser.add_argument_group("chat").add_argument("--system", metavar="TEXT", help="system message")
    add_sampling(parser, "most tokens of one answer (default: what fits)")
    add_settings(parser, "model", "engine", extra=["api_key"])


def run(arguments: argparse.Namespace) -> int:
    """Talk until the input ends."""
    from ..source import NO_TEMPLATE, choose

    loaded = settings_from(arguments)
    source = choose(loaded, arguments.url)
    options = options_from(arguments, loaded.settings.seed)
    with asyncio.Runner() as runner:
        try:
            runner.run(source.open())
            if not source.can_chat:
                raise UsageError(NO_TEMPLATE)
            return Talk(runner, source, options, arguments.system).run()
        finally:
            runner.run(source.close())


class Talk:
    """A conversation: reads on the main thread, lets the event loop run while an answer comes."""

    def __init__(self, runner: asyncio.Runner, source: Source, options: Options, system: str | None) -> None:
        self.runner = runner
        self.source = source
        self.options = options
        self.system = system
        self.turns: list[dict[str, str]] = []
        self.is_terminal = sys.stdin.isatty()
        self.failed = False

    def run(self) -> int:
        """Every line of the input is a message or a command; 1 when an answer from a pipe's line failed."""
        if self.is_terminal:
            import readline  # noqa: F401 (editing and history for input())

            print(f"{self.source.model} on {self.source.device}. /help lists the commands, Ctrl-D leaves.")
        while (line := self._read()) is not None:
            if line.startswith("/"):
                if not self._command(line):
                    break
            elif line:
                self._answer(line)
        return int(self.failed and not self.is_terminal)

    def _read(self) -> str | None:
        while True:
            try:
                if self.is_terminal:
                    return input("> ").strip()
                line = sys.stdin.readline()
                return line.strip() if line else None
            except EOFError:
                print()
                return None
            except KeyboardInterrupt:
                if not self.is_terminal:
                    raise
                print("\n(Ctrl-D or /exit leaves)")

    def _command(self, line: str) -> bool:
        """Do what a line that begins with / asks for; False: leave."""
        word, _, rest = line.partition(" ")
        if word in ("/exit", "/quit"):
            return False
        if word == "/clear":
            self.turns.clear()
        elif word == "/system":
            self.system = rest.strip() or None
            self.turns.clear()
        elif word == "/help":
            print("\n".join(f"{name:<14} {text}" for name, text in HELP.items()))
        else:
            near = nearest(word, [name.split()[0] for name in HELP])
            warn(f"unknown command {word[:64]}; " + (f"did you mean {near}?" if near else "/help lists them"))
        return True

    def _answer(self, line: str) -> None:
        from ..source import TooLong

        messages = [{"role": "system", "content": self.system}] if self.system else []
        self.turns.append({"role": "user", "content": line})
        pieces: list[str] = []
        note = ""
        try:
            note = self.runner.run(self._stream([*messages, *self.turns], pieces))
        except KeyboardInterrupt:
            note = "stopped"
            if not self.is_terminal:
                raise
        except (Failure, UsageError) as error:
            self.failed = True
            self.turns.pop()
            if pieces:
                print()
            warn(
                f"{error}; /clear forgets the conversation" if self.turns and isinstance(error, TooLong) else str(error)
            )
            return
        # What was stopped stays in the conversation: the model sees what the user saw.
        self.turns.append({"role": "assistant", "content": "".join(pieces)})
        out = sys.stdout if sys.stdout.isatty() else sys.stderr  # answers alone go into a file
        print()
        sys.stdout.flush()
        print(f"\033[2m[{note}]\033[0m" if wants_colour(out) else f"[{note}]", file=out, flush=True)

    async def _stream(self, messages: list[dict[str, str]], pieces: list[str]) -> str:
        """Print one answer as it comes; gives the line of figures."""
        from ..source import Answer

        answer = Answer()
        is_screen = sys.stdout.isatty()
        async for text in self.source.chat(messages, self.options, answer):
            pieces.append(text)
            sys.stdout.write(text.translate(CONTROL) if is_screen else text)
            sys.stdout.flush()
        cut = ", cut at the most tokens" if answer.finish_reason == "length" else ""
        return (
            f"{answer.generated_tokens} tokens, {answer.tokens_per_second:.1f} tokens/s,"
            f" first after {answer.ttft:.2f} s{cut}"
        )
