"""`pequod chat`: a conversation in the terminal, with a model in a child process or over HTTP."""

from __future__ import annotations

import argparse
import asyncio
import sys
from contextlib import AsyncExitStack
from typing import Any

from ...settings_values import hint
from ..source import Source, TooLong, opened
from . import Failure, Parser, UsageError, add_settings, chat_model, settings_from, wants_colour, warn, write_text
from .complete import add_sampling, per_second, sampling

HELP = {
    "/exit": "leave (also Ctrl-D)",
    "/clear": "forget the conversation",
    "/system TEXT": "set the system message and forget the conversation; without TEXT: no system message",
    "/help": "this text",
}


def add_arguments(parser: Parser) -> None:
    parser.usage = "pequod chat [MODEL | --url URL] [flags]"
    parser.description = (
        "Talk to a model in the terminal. Ctrl-C stops a response, Ctrl-D leaves, and /help lists the commands."
        " If the input is not a terminal, each of its lines is a message."
    )
    parser.add_argument_group("chat").add_argument("--system", metavar="TEXT", help="system message")
    add_sampling(parser, "maximum tokens of a response (default: what fits the context)")
    add_settings(parser, "model", "engine", extra=["api_key", "api_key_file"])


def run(arguments: argparse.Namespace) -> int:
    """Talk until the input ends."""
    loaded = settings_from(arguments, default_model=chat_model)
    stack = AsyncExitStack()
    with asyncio.Runner() as runner:
        try:
            source = runner.run(stack.enter_async_context(opened(loaded, arguments.url)))
            if not source.can_chat:
                raise UsageError("the model has no chat template: use `pequod complete`, or pass --chat-template FILE")
            return Talk(runner, source, sampling(arguments, loaded), arguments.system).run()
        finally:
            runner.run(stack.aclose())


class Talk:
    """A conversation. Reads on the main thread, and runs the event loop while a response is generated."""

    def __init__(self, runner: asyncio.Runner, source: Source, options: dict[str, Any], system: str | None) -> None:
        self.runner = runner
        self.source = source
        self.options = options  # fields of each request
        self.system = system
        self.turns: list[dict[str, str]] = []
        self.is_terminal = sys.stdin.isatty()
        self.failed = False

    def run(self) -> int:
        """Handle each line of the input. Returns 1 if it is not a terminal and a line failed."""
        if self.is_terminal:
            import readline  # editing and history for input()

            readline.parse_and_bind("set enable-bracketed-paste on")  # several lines that are pasted are one message
            print(f"{self.source.model} on {self.source.device}. /help lists the commands, Ctrl-D leaves.")
        while (line := self._read()) is not None:
            if line.startswith("/"):
                if not self._command(line):
                    break
            elif line:
                self._respond(line)
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
        """Run a command, a line that begins with /; returns False to leave."""
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
            self.failed = True
            advice = hint(word, [name.split()[0] for name in HELP], "/help lists the commands")
            warn(f"unknown command {word[:64]}{advice}")
        return True

    def _respond(self, line: str) -> None:
        """Send a message, print the response, and append both to the conversation."""
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
            hint = "; /clear forgets the conversation" if self.turns and isinstance(error, TooLong) else ""
            warn(f"{error}{hint}")
            return
        # A stopped response stays in the conversation: the model sees what the user saw.
        self.turns.append({"role": "assistant", "content": "".join(pieces)})
        out = sys.stdout if sys.stdout.isatty() else sys.stderr  # a redirected standard output has only the responses
        print()
        sys.stdout.flush()
        print(f"\033[2m[{note}]\033[0m" if wants_colour(out) else f"[{note}]", file=out, flush=True)

    async def _stream(self, messages: list[dict[str, str]], pieces: list[str]) -> str:
        """Print a response as it is generated, and return the line of figures."""

        def show(text: str) -> None:
            pieces.append(text)
            write_text(text)

        shot = await self.source.stream({**self.options, "messages": messages}, show)
        cut = ", cut at the maximum number of tokens" if shot.finish_reason == "length" else ""
        return f"{shot.tokens} tokens, {per_second(shot):.1f} tokens/s, first after {shot.ttft or 0:.2f} s{cut}"
