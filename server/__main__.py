"""The command line: picks a command. A command's module is imported when it is chosen, so `--help` stays quick."""

from __future__ import annotations

import io
import os
import signal
import sys
from importlib import import_module

from .version import version

COMMANDS = {
    "serve": "serve a model over the OpenAI HTTP API",
    "chat": "talk to a model in the terminal",
    "complete": "continue one prompt and print the text",
    "bench": "speed and exactness of this or any OpenAI-compatible server",
    "plan": "memory arithmetic of a model before loading it",
    "doctor": "what this machine can run, and how to repair what it cannot",
    "config": "each setting, its value and where it came from",
    "models": "models that can be served from this machine",
}


def usage() -> str:
    """The text of `pequod --help`."""
    lines = [f"  {name:<10} {summary}" for name, summary in COMMANDS.items()]
    return "\n".join(
        [
            "usage: pequod COMMAND [...]",
            "",
            "Serves language models: continuous batching over a paged KV cache.",
            "",
            *lines,
            "",
            "  --help     this text; `pequod COMMAND --help` lists the flags of a command",
            "  --version  the version",
            "",
            "Try: pequod serve",
        ]
    )


def _unknown(word: str) -> str:
    from difflib import get_close_matches

    if word.startswith("-"):
        close = get_close_matches(word.partition("=")[0], ["--help", "--version"], n=1)
        hint = f"did you mean {close[0]}?" if close else "a command comes first, as in `pequod serve --port 8001`"
        return f"unknown flag {word[:64]}; {hint}"
    close = get_close_matches(word, COMMANDS, n=1)
    return f"unknown command {word[:64]}; " + (f"did you mean {close[0]}?" if close else "see `pequod --help`")


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def main(argv: list[str] | None = None) -> int:
    """Run one command and give its exit code: 0 done, 1 failed, 2 asked for something impossible, 130 interrupted."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if argv else 2
    if argv[0] in ("-V", "--version"):
        print(f"pequod {version()}")
        return 0
    name, *rest = argv
    if name not in COMMANDS:
        print(f"pequod: {_unknown(name)}", file=sys.stderr)
        return 2
    if name != "serve" or {"-h", "--help"} & {*rest}:
        return _run(name, rest)
    try:
        child = import_module("engine").Child()  # before our own imports: either takes a second
    except OSError:  # it is tried again where there is somebody to tell
        return _run(name, rest)
    try:
        return _run(name, rest, child=child)
    finally:
        child.end()


def _run(name: str, rest: list[str], **given: object) -> int:
    """Run a command; `given` goes to its `run` beside the arguments."""
    from .cli.commands import execute, execute_group

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without UTF-8 shows ? and does not end the command
    try:
        command = import_module(f".cli.commands.{name}", __package__)
        if name == "bench":  # whoever ends a measurement ends the servers that it has started, as by Ctrl-C
            signal.signal(signal.SIGTERM, _interrupt)
        if hasattr(command, "PARTS"):
            code = execute_group(name, COMMANDS[name], command, rest)
        else:
            code = execute(name, COMMANDS[name], command, rest, **given)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has left, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


if __name__ == "__main__":
    sys.exit(main())
