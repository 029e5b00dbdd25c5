"""The commands of the command line, one module each, and the code that they share: flags and errors.

A command's module has `add_arguments(parser)` and `run(arguments) -> exit code`; it imports what it needs in `run`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol

from ... import settings
from ...settings_sources import Loaded, load, misspelled
from ...settings_values import SettingsError, hint, split
from .. import foreign_flags
from ..argv import hide

MODELS = ("builtin", "smollm2")  # names that are not a path and not a hub id
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
# Control characters in the text of a model, which must not change colours or move the cursor of a terminal.
CONTROL = {code: None for code in (*range(32), 127, *range(128, 160)) if chr(code) not in "\n\t"}
TITLES = {"model": "model", "engine": "engine", "http": "HTTP", "limits": "limits", "logs": "logs and metrics"}


class Command(Protocol):
    """The interface of a module in this package."""

    add_arguments: Callable[[Parser], None]
    run: Callable[..., int]  # of the argparse.Namespace


class Group(Protocol):
    """The interface of a module whose command has parts, such as `pequod bench latency`."""

    PARTS: dict[str, str]  # name -> summary
    part: Callable[[str], Command]


class UsageError(Exception):
    """The command line is invalid. The message is one sentence, the exit code 2."""


class Failure(Exception):
    """The command failed. The message is one sentence, the exit code 1."""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises UsageError, and suggests the nearest flag for an unknown one."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)

    def print_help(self, file: Any = None) -> None:
        """Print the help, and raise OSError if that fails, which argparse ignores."""
        print(self.format_help(), end="", file=file)

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Return the arguments. Settings that were not given are absent; flags may have _ instead of -."""
        for word in argv:
            if word.startswith("-h") and word != "-h":  # otherwise argparse reads it as -h with a value
                raise self._unknown(word)
        arguments, rest = self.parse_known_intermixed_args([self._spelled(word) for word in argv])
        for word in rest:
            if word.startswith("-") and word != "-":
                raise self._unknown(word)
        if rest:
            raise UsageError(f"unexpected argument {rest[0][:64]!r}; see `{self.prog} --help`")
        return arguments

    def _unknown(self, word: str) -> UsageError:
        name = word.partition("=")[0]
        known = self._option_string_actions
        remedy = foreign_flags.advice(name.replace("_", "-"), known)
        remedy = remedy or hint(name, known, f"see `{self.prog} --help`")
        return UsageError(f"unknown flag {name[:64]}{remedy}")

    def _spelled(self, word: str) -> str:
        name, equals, value = word.partition("=")
        hyphened = name.replace("_", "-")
        return hyphened + equals + value if hyphened in self._option_string_actions else word


def _default(name: str, value: Any) -> str:
    if settings.metavar(name) == "SIZE":
        return f"{value >> 20}MiB"
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def _add_field(box: argparse._ArgumentGroup, name: str, text: str = "") -> None:
    field = settings.FIELDS[name]
    kind, choices = settings.shape(name)
    text = text or field.description or ""
    if "default" not in text and field.default is not None and kind is not list:
        text += f" (default: {_default(name, field.default)})" if field.default != "" else ""
    options: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": text.replace("%", "%%")}
    if kind is bool:
        box.add_argument(settings.flag(name), action=argparse.BooleanOptionalAction, **options)
        return
    options["metavar"] = settings.metavar(name) or ("|".join(choices) if choices else name.upper())
    if kind is list:  # `--flag a b`, `--flag a --flag b` and `--flag a,b` are the same
        options |= {"action": "append", "nargs": "+", "type": _items}
    box.add_argument(settings.flag(name), **options)


def _items(word: str) -> list[str]:
    try:
        return split(word)
    except ValueError as error:
        # The word may be a key, so it is not in the message.
        raise argparse.ArgumentTypeError(f"the value {error}") from None


def whole(minimum: int) -> Callable[[str], int]:
    """Return a parser of integers of at least `minimum`."""

    def parse(text: str) -> int:
        if not text.isascii() or not text.isdigit() or not minimum <= int(text) <= 2**31 - 1:
            raise argparse.ArgumentTypeError(f"{text[:64]} is not a whole number of at least {minimum}")
        return int(text)

    return parse


def real(limits: str, is_within: Callable[[float], bool]) -> Callable[[str], float]:
    """Return a parser of numbers within limits, which the error describes."""

    def parse(text: str) -> float:
        with contextlib.suppress(ValueError):
            if is_within(value := float(text)):
                return value
        raise argparse.ArgumentTypeError(f"{text[:64]} is not a number {limits}")

    return parse


def add_settings(
    parser: Parser,
    *groups: str,
    model: bool = True,
    extra: Sequence[str] = (),
    help_texts: Mapping[str, str] | None = None,
) -> None:
    """Add flags for the settings of these groups and for the extra ones, --config, and MODEL as an argument.

    `help_texts` replaces the descriptions of settings.
    """
    if model:
        parser.add_argument(
            "positional_model",
            nargs="?",
            metavar="MODEL",
            default=None,
            help="model folder, GGUF file, hub id, `smollm2` or `builtin`",
        )
    box = parser.add_argument_group("settings")
    box.add_argument("--config", metavar="FILE", type=Path, default=None, help="TOML file with settings")
    for group, title in TITLES.items():
        names = [name for name in settings.FIELDS if settings.group(name) == group]
        names = [name for name in names if group in groups or name in extra]
        if names:
            box = parser.add_argument_group(title)
            for name in names:
                _add_field(box, name, (help_texts or {}).get(name, ""))


def settings_from(arguments: argparse.Namespace, *, default_model: Callable[[], str] | None = None) -> Loaded:
    """Return the settings of flags, environment and TOML file. API keys are hidden from the process list.

    `default_model` returns the model to use if none of these names one, in the place of the setting's default.
    """
    given = {name: value for name, value in vars(arguments).items() if name in settings.FIELDS}
    for name, value in given.items():
        if settings.shape(name)[0] is list:
            given[name] = [item for words in value for items in words for item in items]
    model = getattr(arguments, "positional_model", None)
    if model is not None:
        if given.get("model", model) != model:
            raise UsageError(f"two models are named, {model} and --model {given['model']}; name one")
        given["model"] = model
    config = arguments.config
    if config is None and os.environ.get("PEQUOD_CONFIG"):
        config = Path(os.environ["PEQUOD_CONFIG"])
    for sentence in misspelled(os.environ):
        warn(sentence)
    loaded = load(given, config)
    if loaded.sources["model"] == "default":
        _check_model_is_first(arguments)
    if default_model is not None and loaded.sources["model"] == "default":
        loaded = Loaded(load({**given, "model": default_model()}, config).settings, loaded.sources)
    secrets = (*loaded.settings.api_key, loaded.settings.metrics_key)
    hide(secret.get_secret_value() for secret in secrets if secret is not None)
    return loaded


def _check_model_is_first(arguments: argparse.Namespace) -> None:
    """Raise UsageError if the model is the last value of a flag with several, as in `serve --api-key KEY MODEL`."""
    for name, occurrences in vars(arguments).items():
        if name not in settings.FIELDS or settings.shape(name)[0] is not list:
            continue
        last = [words[-1][-1] for words in occurrences if len(words) > 1 and words[-1]]
        if any(word in MODELS or HUB_ID.fullmatch(word) or os.path.exists(word) for word in last):
            flag = settings.flag(name)  # the word may be a key, so it is not in the message
            raise UsageError(
                f"MODEL comes before {flag}, whose last value looks like a model: name the model first, or repeat "
                f"{flag} before each value"
            )


def chat_model() -> str:
    """Return the chat model from the package index if it is on this machine, else the built-in one."""
    from engine import packaged_models

    return next(iter(packaged_models()), "builtin")


def warn(sentence: str) -> None:
    """Print a message on stderr."""
    print(f"pequod: {sentence}", file=sys.stderr, flush=True)


def write_text(text: str) -> None:
    """Write a piece of a model's text to standard output at once, to a terminal without control characters."""
    sys.stdout.write(text.translate(CONTROL) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def wants_colour(stream: Any) -> bool:
    """Return whether a stream is a terminal that shows colours, and NO_COLOR is not set."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def execute(name: str, summary: str, command: Command, argv: Sequence[str], **given: object) -> int:
    """Run one command and return its exit code; errors that the user can act on are one sentence on stderr.

    `given`: keyword arguments for the command's `run`.
    """
    parser = Parser(prog=f"pequod {name}", description=f"{summary[:1].upper()}{summary[1:]}.", allow_abbrev=False)
    try:
        command.add_arguments(parser)
        return command.run(parser.parse(argv), **given)
    except (UsageError, SettingsError) as error:
        warn(str(error))
        return 2
    except Failure as error:
        warn(str(error))
        return 1
    except Exception as error:
        code = _engine_code(error)
        if code is None:
            raise
        warn(settings.with_flags(error))
        return code


def execute_group(name: str, summary: str, group: Group, argv: Sequence[str]) -> int:
    """Run one part of a command that has several, and return its exit code."""
    if not argv or argv[0] in ("-h", "--help"):
        print(f"usage: pequod {name} PART [...]\n\n{summary[:1].upper()}{summary[1:]}.\n")
        print("\n".join(f"  {part:<11} {text}" for part, text in group.PARTS.items()))
        print(f"\n`pequod {name} PART --help` lists the flags of a part.")
        return 0 if argv else 2
    part = argv[0]
    if part not in group.PARTS:
        advice = hint(part, group.PARTS, f"see `pequod {name} --help`")
        warn(f"pequod {name} has no part {part[:64]}{advice}")
        return 2
    return execute(f"{name} {part}", group.PARTS[part], group.part(part), argv[1:])


def _engine_code(error: Exception) -> int | None:
    """Return the exit code for an error of the engine, or None for others.

    The engine is not imported here: it is slow, and most commands do not use it.
    """
    if "engine" not in sys.modules:
        return None
    from engine import ConfigError, EngineError, ModelError, RequestError

    if isinstance(error, ModelError | ConfigError | RequestError):
        return 2
    return 1 if isinstance(error, EngineError) else None
